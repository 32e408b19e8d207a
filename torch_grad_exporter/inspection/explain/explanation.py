"""What `explain` returns: a row for each parameter, as a table for the terminal, a notebook and a page."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch_grad_exporter.inspection.explain.drawing import Drawing
from torch_grad_exporter.inspection.explain.page import page, table_of
from torch_grad_exporter.inspection.explain.rows import Row, Verdict

SHOWN = 40
"""Rows up to which all are printed; of more, those are left out that are `ok` without a note."""

PRINTED = 200
"""Rows that are printed at most."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why each parameter has a gradient or not. `print` shows it as a table; a notebook shows it by itself.

    `rows`: one for each parameter, in the order of the model. `notes`: what concerns the loss, the optimizers or all.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    _drawing: Drawing = field(default=Drawing((), ()), repr=False)

    def __getitem__(self, parameter: str) -> Row:
        """The row of a parameter by its name; raises `KeyError`."""
        for row in self.rows:
            if row.parameter == parameter:
                return row
        raise KeyError(parameter)

    def __str__(self) -> str:
        shown = self._shown()
        lines = [("parameter", "verdict", "where", "note"), *((r.parameter, r.verdict, str(r.where or ""), r.note) for r in shown)]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        text = [
            "  ".join((*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3])).rstrip() for line in lines
        ]
        text += [f"... {len(self.rows) - len(shown)} rows more"] if len(shown) < len(self.rows) else []
        return "\n".join([*text, "", self.summary, *self.notes])

    @property
    def summary(self) -> str:
        """How many parameters have which verdict, in a sentence."""
        counts = Counter(row.verdict for row in self.rows)
        parts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
        return f"{len(self.rows)} parameters: {', '.join(parts)}"

    def _shown(self) -> tuple[Row, ...]:
        if len(self.rows) <= SHOWN:
            return self.rows
        return tuple(row for row in self.rows if row.verdict is not Verdict.OK or row.note)[:PRINTED]

    def _repr_html_(self) -> str:
        """For notebooks: the table."""
        return table_of(self._shown(), self.summary, self.notes, len(self.rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the table and the graph, in which nodes with a bad gradient are red. It loads nothing from elsewhere.

        A graph of many nodes is folded by module. Raises `OSError`.
        """
        Path(path).write_text(page(self.rows, self.summary, self.notes, self._drawing), encoding="utf-8")
