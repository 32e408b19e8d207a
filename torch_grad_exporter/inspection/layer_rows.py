"""LayerRows: what the totals of an inspection have by layer, for a bounded number of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, Protocol, Self, TypeVar

from torch_grad_exporter.metrics.families import REMOVED

# Samples without any call of a layer after which the gauges of its last sample vanish.
KEPT = 8


class LayerRow(Protocol):
    """A row: immutable values of a layer."""

    def with_totals_of(self, other: Self) -> Self:
        """Return a row with the totals of both and nothing else, for the remainder."""


Row = TypeVar("Row", bound=LayerRow)


class LayerRows(Generic[Row]):
    """Rows by layer, the one entered last at the end; the remainder is under `REMOVED`.

    Belongs to the worker, but for `rows`: the mapping is replaced and never changed, so any thread may read it without a lock.
    """

    def __init__(self, empty: Row) -> None:
        self._empty = empty
        self.rows: Mapping[str, Row] = {}

    def get(self, layer: str) -> Row:
        """Return the row of a layer, an empty one if there is none yet."""
        return self.rows.get(layer, self._empty)

    def enter(self, new: Mapping[str, Row], *, most: int, gone: Collection[str] = ()) -> None:
        """Set the rows of some layers; add those of `gone` layers, and the oldest ones beyond `most`, to the remainder."""
        rows = {layer: row for layer, row in self.rows.items() if layer not in new} | dict(new)
        layers = [layer for layer in rows if layer != REMOVED]
        removed = {*layers[: max(0, len(layers) - most)], *gone} & {*layers}
        for layer in [layer for layer in layers if layer in removed]:
            rows[REMOVED] = rows.get(REMOVED, self._empty).with_totals_of(rows.pop(layer))
        self.rows = rows
