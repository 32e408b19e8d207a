"""Arms measured side by side: short blocks of steps, one arm after the other, round after round, in one process.

A machine's speed drifts by far more than one percent within minutes, but hardly between two blocks that follow each other.
So each block of an arm is compared with the block of plain training in the same round, and a second plain arm, the control,
shows what is left of the noise.

Garbage: a full collection runs before each block, untimed, and the collector is on during it. Each arm so pays for the
collections that its own garbage makes necessary, and for no other arm's.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean

Step = Callable[[], None]
Blocks = dict[str, list[float]]
"""Seconds per step of each block, by arm; blocks of the same place in two lists belong to the same round."""

TRIM = 0.1
"""Share of the rounds that is left out at each end, see `trimmed_mean`."""

RESAMPLES = 4000
CONFIDENCE = 0.95


def interleave(
    arms: Mapping[str, Step],
    *,
    steps_per_block: int,
    rounds: int | None = None,
    seconds: float | None = None,
    least_rounds: int = 3,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    collect: Callable[[], object] = gc.collect,
) -> Blocks:
    """Runs `steps_per_block` steps of each arm per round and returns the seconds per step of each block.

    Either `rounds` of them, or as many as begin within `seconds`, at least `least_rounds`. `around` may give an arm a
    context that its blocks run in; entering and leaving it is not timed. No step is left out of the timing, so what an
    arm does every N steps is in its blocks as often as it happens.
    """
    if not arms or steps_per_block < 1 or (rounds is None) == (seconds is None):
        raise ValueError(f"arms={list(arms)}, steps_per_block={steps_per_block}: expected some, and either rounds or seconds")
    blocks: Blocks = {name: [] for name in arms}
    orders = _Orders(arms, seed)
    end = clock() + (seconds or 0.0)
    done = 0
    while done < (least_rounds if rounds is None else rounds) or (rounds is None and clock() < end):
        for name in orders.next():
            context = (around or {}).get(name, contextlib.nullcontext)
            collect()
            blocks[name].append(_block(arms[name], steps_per_block, context, clock))
        done += 1
    return blocks


def _block(step: Step, steps: int, context: Callable[[], AbstractContextManager[object]], clock: Callable[[], float]) -> float:
    with context():
        start = clock()
        for _ in range(steps):
            step()
        return (clock() - start) / steps


class _Orders:
    """The arms' order in each round: a shuffled one is rotated until each arm has been at each place, then shuffled again.

    So no arm always comes after the same one, and over whole turns each is as often first as it is last.
    """

    def __init__(self, arms: Mapping[str, Step], seed: int) -> None:
        self._names = list(arms)
        self._random = random.Random(seed)  # noqa: S311 - an order, no secret
        self._turn = 0

    def next(self) -> list[str]:
        if self._turn % len(self._names) == 0:
            self._random.shuffle(self._names)
        place = self._turn % len(self._names)
        self._turn += 1
        return self._names[place:] + self._names[:place]


def trimmed_mean(values: Sequence[float], trim: float = TRIM) -> float:
    """The mean without the smallest and the largest `trim` of the values, rounded to whole values at each end.

    Meant for one value per round, not per step. A median of steps would hide a monitor that looks at every 50th step only,
    and so would a mean of steps without the slowest. Here whole rounds are left out, as many slow ones as fast ones, and as
    long as a block is one or more whole intervals of the monitor each has the same number of looks in it: what is left out
    is other people's use of the machine, which hits either arm alike.
    """
    cut = round(trim * len(values))
    kept = sorted(values)[cut : len(values) - cut] if len(values) > 2 * cut else sorted(values)
    return fmean(kept)


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm beside the baseline. Times are seconds per step; overheads and their bounds are ratios, 0.01 being 1 %."""

    rounds: int
    seconds: float
    """Trimmed mean."""
    overhead: float
    """Trimmed mean over the rounds of the arm's time divided by the baseline's, less one."""
    low: float
    high: float
    untrimmed: float
    """The same overhead from all rounds, of the plain means of both arms: to see that trimming hides nothing."""


def compare(
    blocks: Blocks, baseline: str = "plain", *, trim: float = TRIM, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Comparison]:
    """Each arm but the baseline, compared with it round by round.

    `low` and `high` hold 95 % of the overheads of resampled rounds (percentile bootstrap).
    """
    return {name: _compared(values, blocks[baseline], trim, resamples, seed) for name, values in blocks.items() if name != baseline}


def _compared(values: Sequence[float], base: Sequence[float], trim: float, resamples: int, seed: int) -> Comparison:
    ratios = [value / other - 1.0 for value, other in zip(values, base, strict=True)]
    low, high = interval(ratios, lambda sample: trimmed_mean(sample, trim), resamples=resamples, seed=seed)
    return Comparison(
        rounds=len(ratios),
        seconds=trimmed_mean(values, trim),
        overhead=trimmed_mean(ratios, trim),
        low=low,
        high=high,
        untrimmed=fmean(values) / fmean(base) - 1.0,
    )


def interval(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The bounds that hold 95 % of a statistic of the values, resampled with replacement."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    found = sorted(statistic(chance.choices(values, k=len(values))) for _ in range(resamples))
    outside = (1.0 - CONFIDENCE) / 2.0
    return found[int(outside * (resamples - 1))], found[round((1.0 - outside) * (resamples - 1))]
