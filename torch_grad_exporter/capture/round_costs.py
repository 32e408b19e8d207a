"""RoundCosts: how long steps take, and what rounds cost, be they sampled, followed by hooks or only counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

# What PyTorch takes to call the hooks of a round, which a clock inside them cannot measure; as `make bench` measures it.
HOOKS_SECONDS = 10e-6

# What a round costs that is only counted: 3.4 to 4 us by `python -m benchmarks.whole_step`. A clock around its hooks would cost as
# much again, so it is not measured in the training itself.
COUNTED_SECONDS = 4e-6

# Rounds that are only counted in a row, at most.
COUNTED_ROUNDS = 255
COUNTING_SECONDS = 0.5

_REMEMBERED = 32
_FOLLOWED_REMEMBERED = 256
_ROUNDS_ADDED_UP = 1024


class RoundCosts:
    """Learns costs and durations, in seconds. Belongs to the training thread. Its memory is bounded."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._samples: deque[float] = deque(maxlen=_REMEMBERED)
        self._followed_costs: deque[float] = deque(maxlen=_FOLLOWED_REMEMBERED)
        # Of rounds that are not sampled: followed ones, those that were only counted, and the seconds that the latter cost. Older
        # ones count half.
        self._followed, self._counted, self._counted_cost = 0.0, 0.0, 0.0

    def stepped(self, seconds: float, own: float | None) -> None:
        """A followed round took this long without the exporter's own time, `own`, which is None if it was sampled."""
        self._steps.append(seconds)
        if own is not None:
            self._followed_costs.append(own)
            self._add_up(1, 0, 0.0)

    def counted(self, seconds: Sequence[float], own: float) -> None:
        """Rounds that were only counted took this long each, and cost `own` together."""
        self._steps.extend(seconds)
        self._add_up(0, len(seconds), own)

    def _add_up(self, followed: int, counted: int, counted_cost: float) -> None:
        older = 1.0 if self._followed + self._counted <= _ROUNDS_ADDED_UP else 0.5
        self._followed = self._followed * older + followed
        self._counted = self._counted * older + counted
        self._counted_cost = self._counted_cost * older + counted_cost

    def sampled(self, cost: float) -> None:
        """A sample cost this much."""
        self._samples.append(cost)

    @property
    def timing_interval(self) -> int:
        """Of how many of the last rounds that were not sampled one was followed by hooks."""
        return round(1 / self._share_followed)

    @property
    def _share_followed(self) -> float:
        return max(self._followed, 1.0) / max(self._followed + self._counted, 1.0)

    @property
    def step(self) -> float | None:
        """The median duration, since a step that compiles or writes a checkpoint is not typical; None if none is known."""
        return max(median(self._steps), 1e-9) if self._steps else None

    def not_sampled(self) -> tuple[float, float]:
        """Return what a round costs that is followed and not sampled, and what any round costs that is not sampled.

        The first is the mean over many rounds, without the most expensive one, and 0 while there was none. On a shared machine a
        few rounds are interrupted within a hook, and the interruption takes a hundred times as long as the hook; steps are
        interrupted as often, but by a small share of their duration.
        """
        costs = self._followed_costs
        followed = (sum(costs) - max(costs)) / (len(costs) - 1) if len(costs) > 1 else sum(costs)
        counted = self._counted_cost / self._counted if self._counted else COUNTED_SECONDS
        return followed, counted + self._share_followed * (followed - counted)

    def share(self) -> float:
        """Return the share of training time that samples would take besides if all rounds were sampled; 0 while that is unknown.

        By the mean of their costs, since some samples measure more and cost more; without the most expensive one, which allocated.
        A sampled round is a followed one, which costs more than most.
        """
        step = self.step
        if step is None or not self._samples:
            return 0.0
        costs = sorted(self._samples)[: max(1, len(self._samples) - 1)]
        followed, rest = self.not_sampled()
        return (fmean(costs) + followed - rest) / step
