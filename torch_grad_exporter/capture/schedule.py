"""SamplingSchedule: which rounds are sampled, so that the exporter keeps to its budget.

The first rounds are all sampled, so that values show at once. Then the interval, a power of two, follows from what a sample
costs and how long a step takes: from the latest ones, and from the sums over all since it changed, which include the outliers
that the estimate leaves out.

One round of every `interval` is sampled, and which one of them changes in a fixed, scattered pattern:
a fixed place would alias with a loop that has a period of its own, and of two alternating optimizers
one would never be sampled. The pattern depends on the round's number alone, and the rounds of a long interval
are among those of every shorter one, so ranks that count alike sample alike.

Rounds that are not sampled are only counted, if they are like those before, see `counted_rounds.py`: hooks at the forward, the
backward and the step would cost more than a short step may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from torch_grad_exporter.capture.round_costs import COUNTED_ROUNDS, RoundCosts, StepTimes

FIRST_SAMPLES = 10
FIRST_SECONDS = 2.0
"""At the start every round is sampled, at most this many and until they took this long together."""

LONGEST = 4096
"""The interval's cap."""

NEVER = 1 << 62
"""The interval where no round is sampled: no training has as many."""

PATIENCE = 8
"""Samples between two changes of the interval."""

RELAX_BELOW = 0.4
"""Share of the budget under which the interval is halved."""

LEFT_AT_LEAST = 0.25
"""Share of the budget that samples may take even where the other rounds use it up, so that values show."""

ACCOUNT_FROM = 32
"""Samples since the interval changed, from which on the cost of all of them counts as well."""

_REMEMBERED = 32
_ACCOUNT_REMEMBERED = 256


@dataclass(slots=True)
class _Account:
    """What samples cost since the interval changed and how long rounds took, in seconds: nothing left out, older ones halved."""

    samples: float = 0.0
    spent: float = 0.0
    rounds: float = 0.0
    trained: float = 0.0

    def sampled(self, cost: float) -> None:
        """Takes in a sample."""
        if self.samples >= _ACCOUNT_REMEMBERED:
            self.samples, self.spent, self.rounds, self.trained = (
                one / 2 for one in (self.samples, self.spent, self.rounds, self.trained)
            )
        self.samples += 1
        self.spent += cost

    def stepped(self, rounds: int, seconds: float) -> None:
        """Takes in rounds that took so long together."""
        self.rounds += rounds
        self.trained += seconds

    def share(self, interval: int, more: float) -> float:
        """The share of training time that samples take at an interval, if a round with one costs so much more than the sample.

        0 while they are few, when a single one decides it.
        """
        if self.samples < ACCOUNT_FROM or not self.rounds:
            return 0.0
        return (self.spent / self.samples + more) / interval / max(self.trained / self.rounds, 1e-9)


class SamplingSchedule:
    """Decides with `due`, learns from `stepped` and `sampled`. Belongs to the training thread.

    `every`: a fixed interval in rounds, or `None` to follow `budget`, the share of step time that samples may
    take, in (0, 1). `counting`: what it knows of rounds that are not sampled.
    """

    def __init__(self, every: int | None = None, budget: float = 0.01) -> None:
        self.every = every
        self.budget = budget
        self.interval = every or 1
        self._steps = StepTimes()
        self.counting = RoundCosts()
        self._first = FIRST_SAMPLES
        self._first_spent = 0.0
        self._since_change = 0
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._account = _Account()
        self._due: tuple[int, int, int] = (0, 0, -1)
        """The interval, and the first and the last of some rounds of which only the last is sampled."""

    def never(self) -> None:
        """No round is sampled any more."""
        self.every = self.interval = NEVER

    def due(self, number: int) -> bool:
        """Whether the round of this number, from 0, is sampled: exactly one of each `interval` in a row."""
        return self.next_due(number) == number

    def next_due(self, number: int) -> int:
        """The first round from this number on that is sampled."""
        if self.interval == NEVER:
            return number + NEVER
        interval, first, last = self._due
        if interval != self.interval or not first <= number <= last:
            block = number // self.interval
            last = self._sampled_of(block)
            if last < number:
                last = self._sampled_of(block + 1)
            self._due = self.interval, number, last
        return last

    def _sampled_of(self, block: int) -> int:
        """The one round that is sampled of those from `block * interval` on."""
        interval = self.interval
        if interval & (interval - 1):
            return block * interval + scattered(block) % interval
        for level in reversed(range(interval.bit_length() - 1)):
            # Of each two that the interval half as long samples, this one takes one or the other.
            block = 2 * block + (scattered(block, level) & 1)
        return block

    def only_counted(self, number: int) -> int:
        """How many rounds from this number on need only be counted: all up to the next one that is sampled, if these are few.

        Many are interrupted by one that is followed, at scattered places for the reason that samples are scattered for.
        """
        return min((COUNTED_ROUNDS + 1) // 2 + scattered(number) % (COUNTED_ROUNDS // 2), self.next_due(number) - number)

    @property
    def shown_interval(self) -> int | None:
        """The interval; `None` where no round is sampled."""
        return None if self.interval == NEVER else self.interval

    @property
    def capped(self) -> bool:
        """Whether the budget would require a longer interval than there is."""
        return self.every is None and self.interval == LONGEST and self._share(LONGEST) > self.budget

    def stepped(self, seconds: float, floor: float | None = None) -> None:
        """Learns how long a round took, the exporter's own time left out; and that time, if it was not sampled."""
        self._steps.append(seconds)
        self._account.stepped(1, seconds)
        if floor is not None:
            self.counting.followed(floor)

    def counted(self, seconds: Sequence[float], own: float) -> None:
        """Learns how long rounds took that were only counted, and what they cost together."""
        self._steps.extend(seconds)
        self._account.stepped(len(seconds), sum(seconds))
        self.counting.counted(len(seconds), own)

    def sampled(self, cost: float) -> None:
        """Learns what a sample cost in seconds and adapts the interval."""
        self._costs.append(cost)
        if self.every is not None:
            return
        if self._first:
            self._first -= 1
            self._first_spent += cost
            if not self._steps or (self._first and self._first_spent < FIRST_SECONDS):
                return
            self._first = 0
            self._change(self._smallest_within_budget())
            return
        self._since_change += 1
        self._account.sampled(cost)
        if self._since_change < PATIENCE:
            return
        share = max(self._share(self.interval), self._account.share(self.interval, self.counting.more()))
        if share > self._available() and self.interval < LONGEST:
            self._change(self.interval * 2)
        elif share < RELAX_BELOW * self._available() and self.interval > 1:
            self._change(self.interval // 2)

    def _available(self) -> float:
        """What samples may take of the budget once all rounds have cost what those cost that are not sampled."""
        if not self._steps:
            return self.budget
        return max(self.budget - self.counting.rest() / self._steps.typical, LEFT_AT_LEAST * self.budget)

    def _change(self, interval: int) -> None:
        self.interval, self._since_change, self._account = interval, 0, _Account()

    def _share(self, interval: int) -> float:
        """The share of training time that samples take at an interval; 0 while no step time is known.

        The step's median, since a step that compiles or writes a checkpoint is not typical. The cost's
        mean, since some samples measure more and cost more; without the most expensive one, which allocated.
        """
        if not self._costs or not self._steps:
            return 0.0
        costs = sorted(self._costs)[: max(1, len(self._costs) - 1)]
        return (fmean(costs) + self.counting.more()) / interval / self._steps.typical

    def _smallest_within_budget(self) -> int:
        interval = 1
        while interval < LONGEST and self._share(interval) > self._available():
            interval *= 2
        return interval


def scattered(number: int, level: int = 0) -> int:
    """A fixed pseudo-random 32-bit number for each number and level; 0 for 0, so that the first round is sampled."""
    if number == 0:
        return 0
    number = number * 16 + level
    mixed = (number ^ (number >> 4)) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B & 0xFFFFFFFF
    return mixed ^ (mixed >> 13)
