"""SamplingSchedule: which rounds are sampled, so that the exporter keeps to its budget.

The interval is a power of two and a round is sampled when its number is a multiple of it, so that ranks
that count alike sample alike. The first rounds are all sampled, that there is something to see at once. Then
the interval follows from the medians of what a sample costs and how long a step takes; medians, because a
step that compiles or writes a checkpoint says nothing about the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

FIRST_SAMPLES = 10
FIRST_SECONDS = 2.0
"""At the start every round is sampled, at most this many and until they took this long together."""

LONGEST = 4096
"""The interval's cap."""

PATIENCE = 8
"""Samples between two changes of the interval."""

RELAX_BELOW = 0.4
"""Share of the budget under which the interval is halved."""

_REMEMBERED = 32


@dataclass(slots=True)
class SamplingSchedule:
    """Decides with `due`, learns from `stepped` and `sampled`. Belongs to the training thread.

    `every`: a fixed interval in rounds, or `None` to follow `budget`, the share of step time that samples may
    take, in (0, 1).
    """

    every: int | None = None
    budget: float = 0.01
    interval: int = 1
    _first: int = FIRST_SAMPLES
    _first_spent: float = 0.0
    _since_change: int = 0
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def __post_init__(self) -> None:
        self.interval = self.every or 1

    def due(self, number: int) -> bool:
        """Whether the round of this number is sampled."""
        return number % self.interval == 0

    @property
    def capped(self) -> bool:
        """Whether the budget would ask for a longer interval than there is."""
        return self.every is None and self.interval == LONGEST and self._share() > self.budget

    def stepped(self, seconds: float) -> None:
        """Learns how long a round took that was not sampled itself, the exporter's own time left out."""
        self._steps.append(seconds)

    def sampled(self, cost: float) -> None:
        """Learns what a sample cost in seconds and adapts the interval."""
        self._costs.append(cost)
        if self.every is not None:
            return
        if self._first:
            self._first -= 1
            self._first_spent += cost
            if self._first and self._first_spent < FIRST_SECONDS:
                return
            self._first = 0
            self.interval = self._smallest_within_budget()
            self._since_change = 0
            return
        self._since_change += 1
        if self._since_change < PATIENCE:
            return
        share = self._share()
        if share > self.budget and self.interval < LONGEST:
            self.interval, self._since_change = self.interval * 2, 0
        elif share < RELAX_BELOW * self.budget and self.interval > 1:
            self.interval, self._since_change = self.interval // 2, 0

    def _share(self, interval: int | None = None) -> float:
        """The share of training time that samples take at an interval; 0 while no step time is known."""
        if not self._costs or not self._steps:
            return 0.0
        return median(self._costs) / (interval or self.interval) / max(median(self._steps), 1e-9)

    def _smallest_within_budget(self) -> int:
        interval = 1
        while interval < LONGEST and self._share(interval) > self.budget:
            interval *= 2
        return interval
