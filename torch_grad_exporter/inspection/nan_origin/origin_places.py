"""Where values have become non-finite: written by `inspection/nan_origin/`, read by the collector `nan_origin`."""

from __future__ import annotations

from collections.abc import Mapping

PLACES = 32
"""Places that are shown at most; beyond, the one that was found longest ago is not shown any more."""


class OriginPlaces:
    """Layer, pass and kind of each place, with the step at which it was last found. From any thread: replaced, never changed."""

    def __init__(self) -> None:
        self._steps: Mapping[tuple[str, str, str], int] = {}

    @property
    def steps(self) -> Mapping[tuple[str, str, str], int]:
        """The places in the order in which they were last found."""
        return self._steps

    def add(self, place: tuple[str, str, str], step: int) -> bool:
        """A place was found; whether it is not among those that are shown. For one thread at a time."""
        found = {one: at for one, at in self._steps.items() if one != place} | {place: step}
        new = place not in self._steps
        while len(found) > PLACES:
            del found[next(iter(found))]
        self._steps = found
        return new
