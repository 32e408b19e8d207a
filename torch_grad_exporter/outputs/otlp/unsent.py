"""Unsent: what of an export is not sent yet, taken in requests of a size that the receiver accepts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torch_grad_exporter.metrics.families import Family, by_spec
from torch_grad_exporter.outputs.otlp.points import ExportTimes, Points, Portion

# Points of one request, at most: encoded in about 30 ms by code that other threads can interrupt, and a few hundred kB.
POINTS = 2_000

# Where a receiver refuses requests as too large, they are halved down to about this many points.
LEAST = 30


@dataclass(slots=True)
class RequestSize:
    """How many points the receiver accepts in one request, as far as is known."""

    points: int = POINTS

    def halve(self) -> bool:
        """Return whether smaller requests may be accepted."""
        if self.points < 2 * LEAST:
            return False
        self.points //= 2
        return True


class Unsent:
    """The rows of an export in the order in which they are sent: those of the whole process first, its state among them.

    No request has both these and rows of layers, which are many and may be refused as too large.
    """

    def __init__(self, families: Iterable[Family], points: Points, times: ExportTimes, size: RequestSize) -> None:
        self._points, self._times, self._size = points, times, size
        grouped = [family for group in by_spec(families).values() for family in group]
        ordered = sorted(grouped, key=_by_layer)
        self._rows = deque((family, slice(0, count)) for family in ordered if (count := len(family.row_numbers)))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def take(self) -> Portion:
        """Remove and return the next request. It may have fewer metrics than rows: one that cannot be encoded is left out."""
        rows: list[tuple[Family, slice]] = []
        room = self._size.points
        while room and self._rows and (not rows or _by_layer(self._rows[0][0]) is _by_layer(rows[0][0])):
            family, piece = self._rows.popleft()
            end = min(piece.stop, piece.start + room)
            rows.append((family, slice(piece.start, end)))
            room -= end - piece.start
            if end < piece.stop:
                self._rows.appendleft((family, slice(end, piece.stop)))
        return self._points.portion(rows, self._times)

    def put_back(self, portion: Portion) -> None:
        """Return a request that the receiver has refused, to be sent in smaller ones."""
        self._rows.extendleft(reversed(portion.rows))


def _by_layer(family: Family) -> bool:
    return "layer" in family.spec.labels
