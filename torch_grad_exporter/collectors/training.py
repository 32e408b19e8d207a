"""Collector `training`: steps, phases, losses, learning rates and the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from torch_grad_exporter.aggregation.totals import TotalsSnapshot
from torch_grad_exporter.capture.progress import PHASES, StepClock
from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.metrics.families import Family, RowCache, scalar

STATES = ("initialising", "training", "evaluating", "finished", "failed")


class TrainingCollector:
    """Families of the step clock and the training totals. `info`: the labels of `torch_train_info`, `None` while unknown.

    `ended`: "finished" or "failed" once the run is over, else `None`. `phases`: whether the host's clock can
    time phases; on an accelerator it only times launches, so phases are absent there.
    """

    name = "training"

    def __init__(
        self,
        snapshot: Callable[[], TotalsSnapshot],
        clock: StepClock,
        names: Sequence[str],
        *,
        info: Callable[[], Mapping[str, str] | None],
        world_size: int,
        ended: Callable[[], str | None],
        phases: Callable[[], bool],
    ) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._names = names
        self._info = info
        self._world_size = world_size
        self._ended = ended
        self._phases = phases
        self._rows = {spec: RowCache() for spec in (c.TRAIN_INFO, c.TRAIN_STEPS, c.TRAIN_LEARNING_RATE)}
        self._states, self._phase_rows = RowCache(), RowCache()

    def collect(self) -> Iterator[Family]:
        """The families as of now."""
        totals, clock = self._snapshot(), self._clock
        yield self._facts()
        yield self._state()
        yield scalar(c.TRAIN_WORLD_SIZE, self._world_size)
        counts = clock.counts()
        yield self._steps(counts.steps)
        yield scalar(c.TRAIN_BACKWARD_PASSES, counts.backward_passes)
        yield scalar(c.TRAIN_SKIPPED_STEPS, clock.skipped)
        yield self._durations(totals)
        yield from self._phase_seconds()
        waits = clock.gradient_waits.rounds if self._phases() else None
        yield scalar(c.TRAIN_GRADIENT_WAIT_SECONDS, None if waits is None else clock.gradient_waits.seconds)
        yield scalar(c.TRAIN_GRADIENT_WAITS, waits)
        counted = counts.examples if clock.examples_known and counts.examples else None
        yield scalar(c.TRAIN_SAMPLES, totals.sums.get("samples", counted))
        yield scalar(c.TRAIN_TOKENS, totals.sums.get("tokens"))
        yield scalar(c.TRAIN_LOSS, totals.last.get("loss"))
        yield scalar(c.TRAIN_EPOCH, totals.last.get("epoch"))
        yield scalar(c.TRAIN_LOSS_NONFINITE, totals.loss_nonfinite)
        yield scalar(c.TRAIN_LOSS_SPIKES, totals.loss_spikes)
        yield from self._learning_rates(totals)
        yield scalar(c.TRAIN_LOSS_SCALE, totals.last.get("loss_scale"))
        yield scalar(c.TRAIN_LAST_STEP_TIMESTAMP, clock.last_step)
        yield scalar(c.TRAIN_LAST_ACTIVITY_TIMESTAMP, clock.last_activity)
        yield scalar(c.TRAIN_START_TIMESTAMP, clock.started)
        yield scalar(c.TRAIN_SLOWEST_STEP, totals.slowest)

    def _facts(self) -> Family:
        info = self._info()
        rows = () if info is None else (tuple(info[name] for name in c.TRAIN_INFO.labels),)
        return Family(c.TRAIN_INFO, np.ones(len(rows)), self._rows[c.TRAIN_INFO].get(rows))

    def _durations(self, totals: TotalsSnapshot) -> Family:
        buckets, sums = totals.duration_buckets[None, :], np.array([totals.duration_sum])
        return Family(c.TRAIN_STEP_DURATION, buckets, sums=sums, exemplars=(totals.exemplars,) if totals.exemplars else None)

    def _state(self) -> Family:
        clock = self._clock
        running = "evaluating" if clock.evaluating else "training" if clock.last_step is not None else "initialising"
        current = self._ended() or running
        rows = self._states.get(tuple((state,) for state in STATES))
        return Family(c.TRAIN_STATE, np.array([float(state == current) for state in STATES]), rows)

    def _steps(self, steps: Mapping[int, int]) -> Family:
        rows = self._rows[c.TRAIN_STEPS].get(tuple((self._names[number],) for number in steps))
        return Family(c.TRAIN_STEPS, np.array(list(steps.values()), dtype=np.float64), rows)

    def _phase_seconds(self) -> Iterator[Family]:
        seen = self._clock.phases.seen
        if "forward" not in seen or not self._phases():
            return
        phases = [phase for phase in PHASES if phase in seen or phase == "outside"]
        seconds = self._clock.phases.seconds
        rows = self._phase_rows.get(tuple((phase,) for phase in phases))
        yield Family(c.TRAIN_PHASE_SECONDS, np.array([seconds[phase] for phase in phases]), rows)

    def _learning_rates(self, totals: TotalsSnapshot) -> Iterator[Family]:
        rows = self._rows[c.TRAIN_LEARNING_RATE].get(tuple(totals.learning_rates))
        yield Family(c.TRAIN_LEARNING_RATE, np.array(list(totals.learning_rates.values())), rows)
