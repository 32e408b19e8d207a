"""RuleContext: everything that a rule may read, and helpers that put it into words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_grad_exporter.collectors.training import TRAIN_START_TIMESTAMP
from torch_grad_exporter.metrics.families import BoolArray, FloatArray, Spec
from torch_grad_exporter.rules.declaration import Finding
from torch_grad_exporter.rules.values import Table, Values

if TYPE_CHECKING:
    from torch_grad_exporter.rules.memory import Memory

MINUTES_5, MINUTES_10, MINUTES_15, MINUTES_30, HOUR = 300.0, 600.0, 900.0, 1800.0, 3600.0

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
    "CudaMemoryNearLimit": 0.95,
    "CudaMemoryFragmented": 0.3,
    "GpuThrottled": 0.1,
    "GpuUnderused": 0.5,
    "HostMemoryPressure": 0.9,
    "GradientClippingFailing": 10,
    "ExporterOverBudget": 1.2,
    "ExporterBlind": 4096,
    "ExporterSkippingSamples": 0.1,
}
"""The number in each alert's expression that is its threshold, in seconds, shares, factors or counts. The rules have the others."""

SAMPLE_SECONDS = 15.0
"""A rule's time that one sample stands for where its durations count in samples: Prometheus' usual scrape interval.

A scrape shows a rule one value of each metric, and so does a sample: `for: 5m` are 20 of either.
"""

LAYERS = 8
"""Problems of one kind that are listed layer by layer; more are summed up."""

YOUNG = MINUTES_10
"""The time after the start in which some counters count as a whole: their increase is not known from the first moment on."""

BUSY = frozenset({"training", "evaluating", None})
"""The states in which a run makes steps. `None`: it is not known, and is judged, since the process at least runs."""

GOING = BUSY | {"initialising"}


@dataclass(frozen=True, slots=True)
class RuleContext:
    """Everything that a rule may read: a scrape, its time, the state of the run and what is remembered of the scrapes before."""

    values: Values
    now: float
    state: str | None
    memories: Mapping[Spec, Memory]
    slowest_step: float | None
    """The slowest of a day."""
    by_samples: bool = False
    """Whether seconds are counted by samples, of which each stands for `SAMPLE_SECONDS`."""

    def age(self, spec: Spec) -> float | None:
        """Seconds since the moment that is a metric's value."""
        at = self.values.one(spec)
        return None if at is None else self.now - at

    def younger(self, seconds: float) -> bool:
        """Whether the exporter was started less than so many seconds ago."""
        age = self.age(TRAIN_START_TIMESTAMP)
        return age is not None and age < seconds

    def increase(self, spec: Spec, seconds: float) -> Table:
        """By how much a counter has grown within so many seconds.

        What is not remembered for so long has grown from nothing if it began with the exporter, else from where it was first seen.
        """
        table, memory = self.values.table(spec), self.memories[spec]
        before = memory.before(self.now - seconds)
        known = before[1] if before else Table()
        if spec.older:
            known = either(known, *memory.between(self.now - seconds, self.now), table)
        return table.since(known)

    def lately(self, spec: Spec, seconds: float) -> Table:
        """As `increase`, but the whole count while the process is younger than `YOUNG`."""
        return self.values.table(spec) if self.younger(YOUNG) else self.increase(spec, seconds)

    def since(self, seconds: float) -> str:
        """Since when `lately` counts, in words."""
        return "since the start" if self.younger(YOUNG) else f"in the last {self.span(seconds)}"

    def within(self, seconds: float) -> str:
        """Since when `increase` counts, in words."""
        return "since the start" if self.younger(seconds) else f"in the last {self.span(seconds)}"

    def span(self, seconds: float) -> str:
        """A window of an alert in words."""
        return times(seconds / SAMPLE_SECONDS, "sample") if self.by_samples else span(seconds)

    def growth(self, spec: Spec, seconds: float) -> float:
        """The largest increase of any row, 0 if there is none."""
        return self.increase(spec, seconds).largest() or 0.0

    def over(self, spec: Spec, seconds: float) -> FloatArray:
        """What a gauge was within so many seconds: a row for each moment, the last one now, a column for each row of its table."""
        table = self.values.table(spec)
        earlier = self.memories[spec].between(self.now - seconds, self.now)
        return np.array([*(moment.at(table.rows) for moment in earlier), table.numbers], dtype=np.float64)

    def highest(self, spec: Spec, seconds: float) -> Table:
        """The largest number of each row within so many seconds."""
        return Table(self.values.table(spec).rows, np.fmax.reduce(self.over(spec, seconds)))

    def mean(self, spec: Spec, seconds: float) -> Table:
        """The mean of each row over the moments within so many seconds."""
        numbers = self.over(spec, seconds)
        with np.errstate(invalid="ignore"):  # NaN where none is known
            means = np.nansum(numbers, axis=0) / np.count_nonzero(~np.isnan(numbers), axis=0)
        return Table(self.values.table(spec).rows, means)

    def remembers(self, spec: Spec, seconds: float) -> bool:
        """Whether a metric was there so many seconds ago."""
        before = self.memories[spec].before(self.now - seconds)
        return before is not None and bool(before[1].rows)

    def was(self, spec: Spec, seconds: float) -> FloatArray:
        """The numbers so many seconds ago of the rows that there are now; NaN where that is not known."""
        rows, before = self.values.table(spec).rows, self.memories[spec].before(self.now - seconds)
        return np.full(len(rows), np.nan) if before is None else before[1].at(rows)


def either(first: Table, *others: Table) -> Table:
    """The number of the first table that has one, for each row of any."""
    rows = first.rows
    if any(other.rows != rows for other in others):
        rows = tuple(dict.fromkeys(row for table in (first, *others) for row in table.rows))
    numbers = first.at(rows)
    for other in others:
        numbers = np.where(np.isnan(numbers), other.at(rows), numbers)
    return Table(rows, numbers)


def by_layer(severity: str, table: Table, chosen: BoolArray, what: str) -> Iterator[Finding]:
    """One for each layer that is chosen, and one for all beyond `LAYERS`."""
    rows = np.flatnonzero(chosen).tolist()
    names = [table.rows[row][0] for row in rows]
    for row, name in zip(rows[:LAYERS], names[:LAYERS], strict=True):
        yield Finding(severity, f"Layer {name}: {what}.", name, value=float(table.numbers[row]))
    if rest := tuple(names[LAYERS:]):
        yield Finding(severity, f"{times(len(rest), 'more layer')}: {what}.", others=rest)


def times(count: float, what: str = "step") -> str:
    """A count and what is counted."""
    return f"{count:g} {what}" + ("" if count == 1 else "s")


def span(seconds: float) -> str:
    """A window of an alert, which is a whole number of minutes."""
    return "hour" if seconds == HOUR else f"{seconds / 60:g} minutes"


def duration(seconds: float) -> str:
    """A duration as one says it."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
