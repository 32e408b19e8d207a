"""LayerRows: which row of the tables belongs to which layer label, and when a label releases its row.

A label keeps its row, and its counters, as long as one of the modules that it has represented exists, also while none of their
parameters is tracked, as when they are frozen. The row of a label whose modules have all been removed goes to the next new
label, so that a training that adds and removes a module for each task needs no more rows than it has modules at one time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable

MOST_UNTRACKED = 1000
"""Labels that keep a row though the table does not have them, or twice as many as the largest table had, if that is more.

Beyond that, the label that has been out of the table for longest loses its row as if its modules had been removed: a model whose
thousands of layers are trained a few at a time, or that is folded anew again and again, must stay bounded, too."""


@dataclass(slots=True)
class LayerRows:
    """Assigns rows to labels. `size`: the most rows that there have been at one time."""

    size: int = 0
    _row_of: dict[str, int] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _modules: dict[str, set[str]] = field(default_factory=dict)
    """By label the names of the modules that it has represented, as far as they exist."""
    _untracked: dict[str, None] = field(default_factory=dict)
    """The labels that the table does not have, in the order in which it lost them."""
    _largest: int = 0
    """The most layers that a table has had."""

    @property
    def untracked(self) -> tuple[str, ...]:
        """The labels that have a row and are not in the table."""
        return tuple(self._untracked)

    def __contains__(self, label: str) -> bool:
        """Whether a label has a row."""
        return label in self._row_of

    def of(self, labels: Iterable[str]) -> IntArray:
        """The rows of labels that have one."""
        return np.array([self._row_of[label] for label in labels], dtype=np.int64)

    def give_up(self, table: ParameterTable) -> IntArray:
        """Frees the rows of the labels that end with the change to `table`; returns these rows."""
        self._largest = max(self._largest, len(table.layers))
        self._keep_modules(table)
        tracked = set(table.layers)
        left = [label for label in self._row_of if label not in tracked and label not in self._untracked]
        self._untracked = dict.fromkeys(label for label in (*self._untracked, *left) if label not in tracked)
        gone = [label for label in self._untracked if not self._modules[label]]
        frozen = [label for label in self._untracked if self._modules[label]]
        gone += frozen[: max(0, len(frozen) - max(MOST_UNTRACKED, 2 * self._largest))]
        rows = self.of(gone)
        for label in gone:
            self._free.append(self._row_of.pop(label))
            del self._modules[label], self._untracked[label]
        return rows

    def take(self, table: ParameterTable) -> IntArray:
        """The rows of the table's layers; new ones get rows that are free, or more of them."""
        for label in table.layers:
            if label not in self._row_of:
                self._row_of[label] = self._free.pop() if self._free else self.size
                self.size = max(self.size, self._row_of[label] + 1)
        for one, layer in zip(table.tracked, table.layer_of.tolist(), strict=True):
            self._modules.setdefault(table.layers[layer], set()).add(one.layer)
        return self.of(table.layers)

    def _keep_modules(self, table: ParameterTable) -> None:
        exist = table.frozen.union(one.layer for one in table.tracked)
        for modules in self._modules.values():
            modules.intersection_update(exist)
