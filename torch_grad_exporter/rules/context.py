"""RuleContext: everything that a rule may read, and helpers that put it into words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_grad_exporter.collectors.gradients import LAYER_FROZEN
from torch_grad_exporter.collectors.training import TRAIN_START_TIMESTAMP
from torch_grad_exporter.metrics.families import BoolArray, FloatArray, Spec
from torch_grad_exporter.rules.declaration import Finding
from torch_grad_exporter.rules.values import Table, Values

if TYPE_CHECKING:
    from torch_grad_exporter.rules.watch import Memory

MINUTES_5, MINUTES_10, MINUTES_30, HOUR = 300.0, 600.0, 1800.0, 3600.0

# The number in each alert's expression that is its threshold: seconds, shares, factors or counts. The rules have the others.
THRESHOLDS: Mapping[str, float] = {
    "TrainingNonFiniteGradients": 20,
    "TrainingStalled": 300,
    "TrainingNeverStarted": 1200,
    "LossSpike": 3,
    "DataLoaderStarvation": 0.2,
    "GradientExploding": 3,
    "GradientVanishing": 1e-7,
    "LayerDead": 0.9,
    "LayerNotUpdating": 3,
    "UpdatesLost": 0.5,
    "SpikeAhead": 8,
    "ExpertCollapse": 0.3,
    "RouterImbalance": 3,
    "AttentionLogitsGrowing": 100,
    "EntropyCollapse": 0.05,
    "KlOutOfRange": 1,
    "ZeroAdvantage": 0.8,
    "RewardWithoutEval": 0.1,
    "PolicyClipped": 0.3,
    "TrainInferenceMismatch": 0.1,
    "GradientClippingFailing": 10,
}

SAMPLE_SECONDS = 15.0
"""A rule's time that one sample stands for where its durations count in samples: Prometheus' usual scrape interval.

A scrape shows a rule one value of each metric, and so does a sample: `for: 5m` are 20 of either.
"""

# Problems of one kind that are listed layer by layer; further ones are summed up.
LAYERS = 8

# Seconds after the start in which some counters count as a whole: their first increase may be before the first look.
YOUNG = MINUTES_10

# The states in which a run makes steps. An unknown state (None) is judged too, since the process at least runs.
BUSY = frozenset({"training", "evaluating", None})
GOING = BUSY | {"initialising"}


@dataclass(frozen=True, slots=True)
class RuleContext:
    """Everything that a rule may read: a scrape, its time, the state of the run and what is remembered of earlier scrapes.

    Attributes:
        values: The present scrape.
        now: Its Unix time. In a judgement by samples each sample counts as `SAMPLE_SECONDS`.
        state: Of the run, None if unknown.
        memories: By metric, see `Rule.remembers`.
        slowest_step: Seconds of the slowest step of a day, None if there was none.
        by_samples: Whether times count samples.
    """

    values: Values
    now: float
    state: str | None
    memories: Mapping[Spec, Memory]
    slowest_step: float | None
    by_samples: bool = False

    def age(self, spec: Spec) -> float | None:
        """Return the seconds since the moment that is a metric's value."""
        at = self.values.one(spec)
        return None if at is None else self.now - at

    def younger(self, seconds: float) -> bool:
        """Return whether the exporter was started less than these seconds ago."""
        age = self.age(TRAIN_START_TIMESTAMP)
        return age is not None and age < seconds

    # Counters

    def increase(self, spec: Spec, seconds: float) -> Table:
        """Return by how much a counter has grown within these seconds.

        A row that is new has grown from nothing, or from its first value if it is older than the exporter (`Spec.older`).
        """
        table, memory = self.values.table(spec), self.memories[spec]
        before = memory.before(self.now - seconds)
        known = before[1] if before else Table()
        if spec.older:
            known = either(known, *memory.between(self.now - seconds, self.now), table)
        return table.since(known)

    def recent(self, spec: Spec, seconds: float) -> Table:
        """Return the `increase`, but the whole count while the process is younger than `YOUNG`."""
        return self.values.table(spec) if self.younger(YOUNG) else self.increase(spec, seconds)

    def growth(self, spec: Spec, seconds: float) -> float:
        """Return the largest increase of any row, 0 if there is none."""
        return self.increase(spec, seconds).largest() or 0.0

    # Gauges

    def over(self, spec: Spec, seconds: float) -> FloatArray:
        """Return a gauge within these seconds, shape (moments, rows); the last moment is now."""
        table = self.values.table(spec)
        earlier = self.memories[spec].between(self.now - seconds, self.now)
        return np.array([*(moment.at(table.rows) for moment in earlier), table.numbers], dtype=np.float64)

    def highest(self, spec: Spec, seconds: float) -> Table:
        """Return the largest number of each row within these seconds."""
        return Table(self.values.table(spec).rows, np.fmax.reduce(self.over(spec, seconds)))

    def mean(self, spec: Spec, seconds: float) -> Table:
        """Return the mean of each row over the moments within these seconds."""
        numbers = self.over(spec, seconds)
        with np.errstate(invalid="ignore"):  # NaN where none is known
            means = np.nansum(numbers, axis=0) / np.count_nonzero(~np.isnan(numbers), axis=0)
        return Table(self.values.table(spec).rows, means)

    def was(self, spec: Spec, seconds: float) -> FloatArray:
        """Return the numbers, these seconds ago, of the rows that exist now; NaN where unknown."""
        rows, before = self.values.table(spec).rows, self.memories[spec].before(self.now - seconds)
        return np.full(len(rows), np.nan) if before is None else before[1].at(rows)

    def frozen(self, layers: Table) -> BoolArray:
        """Return which layers an action has frozen: they show their last sample before it, and that is meant."""
        flags: BoolArray = self.values.table(LAYER_FROZEN).at(layers.rows) == 1
        return flags

    # Words

    def since(self, seconds: float) -> str:
        """Say over which time `recent` counts."""
        return "since the start" if self.younger(YOUNG) else f"in the last {self.span(seconds)}"

    def within(self, seconds: float) -> str:
        """Say over which time `increase` counts."""
        return "since the start" if self.younger(seconds) else f"in the last {self.span(seconds)}"

    def span(self, seconds: float) -> str:
        """Say a window of an alert, which is a whole number of minutes."""
        if self.by_samples:
            return times(seconds / SAMPLE_SECONDS, "sample")
        return "hour" if seconds == HOUR else f"{seconds / 60:g} minutes"


def either(first: Table, *others: Table) -> Table:
    """Return, for each row of any table, the number of the first table that has one."""
    rows = first.rows
    if any(other.rows != rows for other in others):
        rows = tuple(dict.fromkeys(row for table in (first, *others) for row in table.rows))
    numbers = first.at(rows)
    for other in others:
        numbers = np.where(np.isnan(numbers), other.at(rows), numbers)
    return Table(rows, numbers)


def by_layer(severity: str, table: Table, chosen: BoolArray, text: str) -> Iterator[Finding]:
    """Yield a finding for each chosen layer, and one for all beyond `LAYERS`."""
    rows = np.flatnonzero(chosen).tolist()
    names = [table.rows[row][0] for row in rows]
    for row, name in zip(rows[:LAYERS], names[:LAYERS], strict=True):
        yield Finding(severity, f"Layer {name}: {text}.", name, value=float(table.numbers[row]))
    if rest := tuple(names[LAYERS:]):
        yield Finding(severity, f"{times(len(rest), 'more layer')}: {text}.", others=rest)


def times(count: float, noun: str = "step") -> str:
    """Say a count with its noun."""
    return f"{count:,.15g} {noun}" + ("" if count == 1 else "s")


def duration(seconds: float) -> str:
    """Say a duration."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
