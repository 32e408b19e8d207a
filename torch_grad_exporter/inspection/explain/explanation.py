"""What `explain` returns: a row for each parameter, as a table for the terminal and a notebook, and as a page with the graph.

The page has no script, loads nothing from elsewhere, and every text in it is escaped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from torch_grad_exporter.files import write_output
from torch_grad_exporter.inspection.explain.drawing import Drawing, svg
from torch_grad_exporter.inspection.explain.verdicts import Row, Verdict

# Rows up to which all are printed; of more, those are left out that are `ok` without a note. And rows that are printed at most.
SHOWN, PRINTED = 40, 200

_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5em; background: Canvas; color: CanvasText }
table { border-collapse: collapse }
td, th { padding: .2em .8em; text-align: left; vertical-align: top; border-bottom: 1px solid #8884 }
code { font-size: .92em } .bad { color: #c62828; font-weight: 600 }
.graph { overflow: auto; border: 1px solid #8884; max-height: 85vh }
svg { font: 12px system-ui, sans-serif } path { stroke: #888; fill: none }
rect { fill: color-mix(in srgb, #888 8%, Canvas); stroke: #888 } text { fill: CanvasText }
rect.ok { fill: color-mix(in srgb, #2e7d32 13%, Canvas); stroke: #2e7d32 }
rect.bad { fill: #c62828; stroke: #7f0000 } text.bad { fill: #fff }
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why each parameter has a gradient or not. `print` shows it as a table; a notebook shows it by itself.

    Attributes:
        rows: One for each parameter, in the order of the model.
        notes: What concerns the loss, the optimizers or all.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    _drawing: Drawing = field(default=Drawing((), ()), repr=False)

    def __getitem__(self, parameter: str) -> Row:
        """Return the row of a parameter by its name; raises `KeyError`."""
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
        return self._table(self._shown())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the table and the graph, in which nodes with a bad gradient are red. It loads nothing from elsewhere.

        A graph of many nodes is folded by module. A file is whole, or as it was before.

        Raises:
            OSError: The file cannot be written.
        """
        apart = ""
        if self._drawing.apart:
            apart = f"<h2>Not in the graph</h2><div class='graph'>{svg(self._drawing.apart, (), columns=5)}</div>"
        page = (
            "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
            "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>Why a parameter has no gradient</title><style>{_STYLE}</style></head><body>"
            f"<h1>Why a parameter has no gradient</h1>{self._table(self.rows)}"
            "<h2>The graph, from the loss down to the parameters</h2>"
            "<p>Red: the gradient there is missing, zero everywhere, or not finite. A box says more under the mouse.</p>"
            f"<div class='graph'>{svg(self._drawing.boxes, self._drawing.arrows)}</div>{apart}</body></html>\n"
        )
        write_output(Path(path), page.encode())

    def _table(self, shown: Sequence[Row]) -> str:
        head = "<tr><th>parameter<th>verdict<th>where<th>note</tr>"
        more = f"<p>{len(self.rows) - len(shown)} rows more are ok.</p>" if len(self.rows) > len(shown) else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in (self.summary, *self.notes))
        return f"{notes}<table>{head}{''.join(map(_cells, shown))}</table>{more}"


def _cells(row: Row) -> str:
    where = escape(str(row.where or ""))
    if row.where is not None and row.where.code:
        where += f"<br><code>{escape(row.where.code)}</code>"
    kind = "" if row.verdict in (Verdict.OK, Verdict.FROZEN) else " class='bad'"
    return f"<tr><td>{escape(row.parameter)}<td{kind}>{row.verdict}<td>{where}<td>{escape(row.note)}</tr>"
