"""SamplingSchedule: which rounds are sampled, so that the exporter keeps to its budget.

The first rounds are all sampled, so that values show at once: they are lent against the budget. Then the interval, a power of
two, follows from what a sample costs and how long a step takes: from the latest ones, and from the sums over all since it
changed, which include the outliers that the estimate leaves out. Estimates may be wrong, so an account of all that the exporter
takes is kept as well: a sample that it cannot pay for is postponed, and so the loan is paid back first.

One round of every `interval` is sampled, and which one of them changes in a fixed, scattered pattern:
a fixed place would alias with a loop that has a period of its own, and of two alternating optimizers
one would never be sampled. The pattern depends on the round's number alone, and the rounds of a long interval
are among those of every shorter one, so ranks that count alike sample alike.

Rounds that are not sampled are only counted, if they are like those before, see `counted_rounds.py`: hooks at the forward, the
backward and the step would cost more than a short step may.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from torch_grad_exporter.capture.cost import COUNTED_SECONDS
from torch_grad_exporter.lifecycle import ThreadTime

# At the start every round is sampled, at most this many and until they took what the budget allows in this many seconds.
FIRST_SAMPLES = 10
LENT_SECONDS = 2.5

# Of how many seconds the budget is owed at most: where a single sample takes seconds, others are to come all the same.
OWED_SECONDS = 30.0

# Training after which what rounds cost is known well enough to say how long it takes to pay for a sample.
LEARNT_SECONDS = 10.0

# Training after which an unpaid loan counts as overhead like all else.
REPAID_SECONDS = 60.0

# The interval's cap.
LONGEST = 4096

# The interval where no round is sampled: no training has as many.
NEVER = 1 << 62

# Samples between two changes of the interval.
PATIENCE = 8

# Share of the budget under which the interval is halved.
RELAX_BELOW = 0.4

# Share of the budget that samples may take even where the other rounds use it up, so that values show.
LEFT_AT_LEAST = 0.25

# Samples since the interval changed, from which on the sums count as well: of few, a single one would decide it.
SUMS_FROM = 32

_ADDED_UP = 256

# Rounds that are only counted in a row, at most.
COUNTED_ROUNDS = 255
COUNTING_SECONDS = 0.5

_REMEMBERED = 32
_FOLLOWED_REMEMBERED = 256
_ROUNDS_ADDED_UP = 1024


class SamplingSchedule:
    """Decides with `next_due`, learns from `stepped`, `counted` and `sampled`. Belongs to the training thread.

    `every`: a fixed interval in rounds, or None to follow `budget`, the share of step time that the exporter may take, in (0, 1).
    `threads`: the CPU time of our own threads, which counts in the budget.
    `lending`: whether the first samples go on. `repaying`: whether what they took is not paid back yet.
    """

    def __init__(self, every: int | None = None, budget: float = 0.01, threads: ThreadTime | None = None) -> None:
        self.every = every
        self.budget = budget
        self.interval = every or 1
        self._threads = threads
        # In seconds: how long the last rounds took without us, what samples cost, and rounds that were followed.
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._followed_costs: deque[float] = deque(maxlen=_FOLLOWED_REMEMBERED)
        # Of rounds that are not sampled: followed ones, those that were only counted, and the seconds that the latter cost. Older
        # ones count half.
        self._followed, self._counted, self._counted_cost = 0.0, 0.0, 0.0
        self._first, self._first_spent = FIRST_SAMPLES, 0.0
        self.lending = self.repaying = every is None
        # What was taken beyond the budget so far, in seconds, and what a sample takes.
        self._owed = self._a_sample = 0.0
        self._age = 0.0  # seconds of training
        # Since the interval changed: samples, what they cost, rounds, how long these took. Older ones count half.
        self._samples = self._spent = self._rounds = self._trained = 0.0
        # The interval, and the first and the last of some rounds of which only the last is sampled.
        self._due: tuple[int, int, int] = (0, 0, -1)

    # Which rounds

    def never(self) -> None:
        """Sample no round any more."""
        self.every = self.interval = NEVER
        self.lending = self.repaying = False

    def next_due(self, number: int) -> int:
        """Return the first round from this number, from 0, on that is sampled: one of each `interval`, or later."""
        if self.interval == NEVER:
            return number + NEVER
        interval, first, last = self._due
        if interval != self.interval or not first <= number <= last:
            payable = number
            if self.lending:  # where the first sample was enough, the second round shows how long a step takes
                payable += number == 1 and self._lent_enough
            elif self.every is None and (step := self._step) is not None:  # for how many rounds no sample can be paid for
                payable += max(0, math.ceil((self._owed + self._a_sample) / (self._available * step)))
            block = payable // self.interval
            last = _sampled_of(block, self.interval)
            if last < payable:
                last = _sampled_of(block + 1, self.interval)
            self._due = self.interval, number, last
        return last

    def only_counted(self, number: int) -> int:
        """Return how many rounds from this number on need only be counted: up to the next that is sampled, if these are few.

        Many are interrupted by one that is followed, at scattered places for the reason that samples are scattered for.
        """
        least, until_due = (COUNTED_ROUNDS + 1) // 2, self.next_due(number) - number
        return until_due if until_due <= least else min(least + scattered(number) % (COUNTED_ROUNDS // 2), until_due)

    @property
    def shown_interval(self) -> int | None:
        """The interval; None where no round is sampled."""
        return None if self.interval == NEVER else self.interval

    @property
    def affords_another(self) -> bool:
        """Whether a sample beside the regular ones can be paid back: a larger debt is forgotten."""
        cost = fmean(self._costs) if self._costs else 0.0
        return self.interval != NEVER and (self.every is not None or self._owed + cost <= OWED_SECONDS * self.budget)

    @property
    def capped(self) -> bool:
        """Whether the budget would require a longer interval than there is."""
        return self.every is None and self.interval == LONGEST and self._share() / LONGEST > self.budget

    # What it learns

    def stepped(self, seconds: float | None, own: float = 0.0, *, sampled: bool = False) -> None:
        """Learn how long a round took, without the exporter's own time on the host, None of the very first; and that time."""
        if seconds is not None:
            self._steps.append(seconds)
            if not sampled:
                self._followed_costs.append(own)
                self._add_up(1, 0, 0.0)
            self._rounds += 1
            self._trained += seconds
        if self.every is None:
            self._charge(own, seconds or 0.0, sampled=sampled)
            if self.lending:
                self._end_loan()

    def counted(self, seconds: Sequence[float], own: float) -> None:
        """Learn how long rounds took that were only counted, and what they cost together."""
        self._steps.extend(seconds)
        self._add_up(0, len(seconds), own)
        self._rounds += len(seconds)
        self._trained += (trained := sum(seconds))
        if self.every is None:
            self._charge(own, trained - own)

    def _add_up(self, followed: int, counted: int, counted_cost: float) -> None:
        older = 1.0 if self._followed + self._counted <= _ROUNDS_ADDED_UP else 0.5
        self._followed = self._followed * older + followed
        self._counted = self._counted * older + counted
        self._counted_cost = self._counted_cost * older + counted_cost

    def _charge(self, own: float, trained: float = 0.0, *, sampled: bool = False) -> None:
        """Enter what the exporter took, besides this many seconds of training, into the account. A fixed interval has none."""
        self._age += trained
        if self._age < LEARNT_SECONDS:
            self._due = 0, 0, -1
        saved = self.budget * (own + trained) - own
        if not sampled:  # where following alone takes more than the budget, as in short irregular rounds, samples still come
            saved = max(saved, LEFT_AT_LEAST * self.budget * trained)
        owed = self._owed - saved
        # A credit lasts for two samples, which may come close together.
        self._owed = min(max(owed, -2 * self._a_sample), OWED_SECONDS * self.budget)
        self.repaying &= (self.lending or self._owed > 0) and self._age < REPAID_SECONDS

    def sampled(self, cost: float, on_devices: float = 0.0) -> None:
        """Learn what a sample cost in seconds, and how many of them on devices, and adapt the interval."""
        self._costs.append(cost)
        if self.every is not None:
            return
        self._a_sample = min(fmean(self._costs), OWED_SECONDS * self.budget)
        self._charge(on_devices, sampled=True)
        self._samples += 1
        self._spent += cost
        if self.lending:
            self._first -= 1
            self._first_spent += cost
            self._end_loan()
        elif self._samples >= PATIENCE:
            share, available = self._share(), self._available
            if self._samples >= SUMS_FROM and self._trained:
                followed, rest = self._not_sampled()
                share = max(share, (self._spent / self._samples + followed - rest) / (self._trained / self._rounds))
            if share / self.interval > available and self.interval < LONGEST:
                self._change(self.interval * 2)
            elif share / self.interval < RELAX_BELOW * available and self.interval > 1:
                self._change(self.interval // 2)
            elif self._samples >= _ADDED_UP:
                self._weigh(0.5)

    # What it knows

    @property
    def timing_interval(self) -> int:
        """Of how many of the last rounds that were not sampled one was followed by hooks."""
        return round(1 / self._share_followed)

    @property
    def _share_followed(self) -> float:
        return max(self._followed, 1.0) / max(self._followed + self._counted, 1.0)

    @property
    def _step(self) -> float | None:
        """The median duration, since a step that compiles or writes a checkpoint is not typical; None if none is known."""
        return max(median(self._steps), 1e-9) if self._steps else None

    def _not_sampled(self) -> tuple[float, float]:
        """Return what a round costs that is followed and not sampled, and what any round costs that is not sampled.

        The first is the mean over many rounds, without the most expensive one, and 0 while there was none. On a shared machine a
        few rounds are interrupted within a hook, and the interruption takes a hundred times as long as the hook; steps are
        interrupted as often, but by a small share of their duration.
        """
        costs = self._followed_costs
        followed = (sum(costs) - max(costs)) / (len(costs) - 1) if len(costs) > 1 else sum(costs)
        counted = self._counted_cost / self._counted if self._counted else COUNTED_SECONDS
        return followed, counted + self._share_followed * (followed - counted)

    def _share(self) -> float:
        """Return the share of training time that samples would take besides if all rounds were sampled; 0 while that is unknown.

        By the mean of their costs, since some samples measure more and cost more; without the most expensive one, which allocated.
        A sampled round is a followed one, which costs more than most.
        """
        step = self._step
        if step is None or not self._costs:
            return 0.0
        costs = sorted(self._costs)[: max(1, len(self._costs) - 1)]
        followed, rest = self._not_sampled()
        return (fmean(costs) + followed - rest) / step

    @property
    def _lent_enough(self) -> bool:
        return self._first <= 0 or self._first_spent >= LENT_SECONDS * self.budget

    def _end_loan(self) -> None:
        """Choose the interval, once the first samples were taken and it is known how long a step takes."""
        if self._lent_enough and self._steps:
            self.lending, interval = False, 1
            share, available = self._share(), self._available
            while interval < LONGEST and share / interval > available:
                interval *= 2
            self._change(interval)

    @property
    def _available(self) -> float:
        """What samples may take of the budget, as a share of training time.

        Our threads take theirs first, and all rounds cost what those cost that are not sampled.
        """
        step, (_, rest) = self._step, self._not_sampled()
        threads = 0.0 if self._threads is None else self._threads.share
        return max(self.budget - threads - (rest / step if step else 0.0), LEFT_AT_LEAST * self.budget)

    def _change(self, interval: int) -> None:
        self.interval = interval
        self._weigh(0.0)

    def _weigh(self, factor: float) -> None:
        self._samples *= factor
        self._spent *= factor
        self._rounds *= factor
        self._trained *= factor


def _sampled_of(block: int, interval: int) -> int:
    """Return the round that is sampled of the `interval` ones from `block * interval` on."""
    if interval & (interval - 1):
        return block * interval + scattered(block) % interval
    for level in reversed(range(interval.bit_length() - 1)):
        # Of each two that the interval half as long samples, this one takes one or the other.
        block = 2 * block + (scattered(block, level) & 1)
    return block


def scattered(number: int, level: int = 0) -> int:
    """Return a fixed pseudo-random 32-bit number for each number and level; 0 for 0, so that the first round is sampled."""
    if number == 0:
        return 0
    number = number * 16 + level
    mixed = (number ^ (number >> 4)) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B & 0xFFFFFFFF
    return mixed ^ (mixed >> 13)
