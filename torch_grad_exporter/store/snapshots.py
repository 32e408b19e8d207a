"""GradientAggregation: what the samples of the gradients add up to, on the host.

`worker.HostSide` feeds it with events whose vectors have arrived, in their order; it touches no tensor. Each event goes to the
one owner of what it changes: the pending sample, the totals of layers, those of optimizers, the observed norm, the local
norms. Nothing that is not finite enters a histogram, a sum or a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakSet

import numpy as np

from torch_grad_exporter.aggregation.cursor import Cursor
from torch_grad_exporter.aggregation.exponential import Counts, ExponentialCounts
from torch_grad_exporter.aggregation.layer_totals import LayerTotals, UntrackedLayers
from torch_grad_exporter.aggregation.noise import LocalTotals, LocalValues
from torch_grad_exporter.aggregation.optimizer_totals import OptimizerTotals
from torch_grad_exporter.aggregation.pending import Ended, PendingSample
from torch_grad_exporter.aggregation.settlement import Settlement
from torch_grad_exporter.aggregation.tables import Records
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.layout import ORDINARY, Layout
from torch_grad_exporter.transfer.events import AfterClip, Captured, Closed, Divided, Local, OutcomeResolved, Weights, Withdrawn

GradientEvent = Captured | Local | AfterClip | Closed | Divided | Withdrawn | OutcomeResolved | Weights


@dataclass(frozen=True, slots=True, eq=False)
class GradientSnapshot:
    """All gradient values at one moment, of one and the same sample; `layers` and `layer_values` go together.

    `recent_max`: shape (layers,), NaN where there was no sample in the last minute, and in a consumer's reading, which is none of a
    minute. `optimizers`: numbers. `local`: by number. Nobody writes to the arrays: as long as nothing changes, they are the same.
    `untracked`: layers without a gradient that is tracked at present, and the remainder of removed ones: of these there are
    totals only. `exponential`: norms of the layers by exponential bucket, and `exponential_totals` those of the optimizers, if
    they are counted. `declared`: by column of each other statistic, `statistic.column`, its values, shape (layers,); NaN where
    there is none.
    """

    table: ParameterTable
    layer_values: Records
    recent_max: FloatArray
    optimizers: tuple[int, ...]
    totals: Records
    samples: int
    undelivered: int
    unattributed: int
    norm_observed: bool
    local: Mapping[int, LocalValues]
    untracked: UntrackedLayers
    exponential: tuple[Counts, ...] | None
    exponential_totals: tuple[Counts, ...] | None
    declared: Mapping[str, FloatArray]


@dataclass(frozen=True, slots=True, eq=False)
class NewGradients:
    """What is new of the gradients since a consumer's last read.

    `samples`: how many. `peaks`: of each layer of the snapshot the norm and the z-score that were farthest from zero, shape
    (2, layers), and `peaks_of_totals` of each optimizer the largest norm and norm after clipping; NaN where none is new.
    `norms`: of each layer the sum of its norms, how many, and how many gradients were not finite, shape (3, layers), where the
    consumer asked for them.
    """

    samples: int
    peaks: FloatArray
    peaks_of_totals: FloatArray
    norms: FloatArray | None = None


class GradientAggregation:
    """Adds up samples. For one thread at a time.

    `layout`: of the samples; `exponential`: whether norms are counted by exponential bucket, too; `clipped`: whether gradients are
    clipped as `clip=` asks for. `nonfinite`: is told of each sample with gradients that are not finite, and in which layers.
    """

    def __init__(
        self,
        layout: Layout = ORDINARY,
        *,
        exponential: bool = False,
        clipped: bool = False,
        nonfinite: Callable[[tuple[str, ...]], object] | None = None,
    ) -> None:
        self._nonfinite = nonfinite
        self._cursors: WeakSet[Cursor] = WeakSet()
        self._pending = PendingSample()
        self._settlement = Settlement(clipped)
        self._layers = LayerTotals(self._cursors, ExponentialCounts(exponential), layout)
        self._optimizers = OptimizerTotals(self._cursors, ExponentialCounts(exponential))
        self._local = LocalTotals()
        self._undelivered = 0
        self.changes = 0
        """Grows with whatever changes a value."""
        self._known: tuple[int, GradientSnapshot] | None = None
        """The last snapshot, and the changes up to it."""
        self.sampled_at = 0.0
        """Unix time of the capture of the sample that was published last."""

    def use(self, table: ParameterTable) -> None:
        """Shows the layers of `table` from now on; a layer that was there before keeps its totals."""
        self.changes += 1
        self._layers.use(table)

    def apply(self, event: GradientEvent) -> None:
        """Takes one event; its vectors have arrived."""
        self.changes += 1
        with np.errstate(all="ignore"):  # NaN and overflow are detected here
            self._apply(event)

    def _apply(self, event: GradientEvent) -> None:
        match event:
            case Captured():
                self._publish(self._pending.begin(event))
                self._local.take(None)
            case Local():
                self._local.take(event)
            case AfterClip():
                self._pending.seen_after(event)
            case Closed():
                self._publish(self._pending.closed_by(event))
            case Divided():
                self._pending.divided(event)
            case Withdrawn():
                self._pending.withdrawn(event)
                self._local.take(None)
            case OutcomeResolved():
                self._optimizers.resolve(event.outcome)
            case Weights():
                self._layers.weigh(event)

    def give_up(self, event: object) -> None:
        """Counts a capture whose vectors never arrived."""
        self.changes += 1
        self._undelivered += isinstance(event, Captured)

    def observe_norm(self, norm: float, step: int | None = None) -> None:
        """Takes a global norm that the user computed before clipping; from then on it is the source of that norm.

        `step`: the number of the optimizer step that it is of.
        """
        self.changes += 1
        with np.errstate(all="ignore"):
            self._optimizers.observe(norm, step)
            self._pending.given(norm)
            if self._nonfinite is not None and not math.isfinite(norm):
                self._nonfinite(())

    def stepped(self, rounds: int) -> None:
        """So many rounds are over."""
        self._local.batches.stepped(rounds)

    def observe_batch(self, examples: float) -> None:
        """Takes an observed number of training examples."""
        self._local.batches.observed(examples)

    def expire(self, now: float) -> None:
        """Counts a sample that has been pending for too long; `now` is Unix time."""
        with np.errstate(all="ignore"):
            self._publish(self._pending.expired(now))

    def _publish(self, ended: Ended | None) -> None:
        """Makes a sample the last one of what the stepping optimizers own, and counts what of it is new."""
        if ended is None:
            return
        self.changes += 1
        self.sampled_at = ended.sample.captured.at
        settled = self._settlement.settle(ended)
        self._layers.publish(settled)
        self._optimizers.publish(settled)
        self._local.publish(settled)
        self._pending.count(settled.shown, sized=settled.sample.sized)
        if self._nonfinite is not None and settled.sample.nonfinite():
            self._nonfinite(settled.sample.nonfinite_layers())

    @property
    def pending(self) -> bool:
        """Whether there is a sample whose time may run out."""
        return self._pending.waits

    @property
    def samples(self) -> int:
        """How many have been published."""
        return self._pending.samples

    def snapshot(self, now: float, *, more_to_come: bool = False, of_minute: bool = True) -> GradientSnapshot:
        """A copy of all values as of `now`, Unix time.

        `more_to_come`: events that may resolve the outcome of the pending sample are known to be under way. `of_minute`: with the
        largest norms of the last minute.
        """
        if not more_to_come:
            self.expire(now)
        if self._known is None or self._known[0] != self.changes:
            self._known = self.changes, self._copied()
        found = self._known[1]
        return replace(found, recent_max=self._layers.recent_max(now)) if of_minute else found

    def _copied(self) -> GradientSnapshot:
        """A copy of all values, but for those of the last minute."""
        optimizers, totals, norm_observed, exponential_totals = self._optimizers.snapshot()
        return GradientSnapshot(
            table=self._layers.table,
            layer_values=self._layers.values(),
            recent_max=np.full(len(self._layers.table.layers), np.nan),
            optimizers=optimizers,
            totals=totals,
            samples=self._pending.samples,
            undelivered=self._undelivered,
            unattributed=self._pending.unattributed,
            norm_observed=norm_observed,
            local=self._local.snapshot(),
            untracked=self._layers.untracked(),
            exponential=self._layers.exponential(),
            exponential_totals=exponential_totals,
            declared=self._layers.declared(),
        )

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer: what comes from now on is new to it."""
        self._layers.follow(cursor)
        self._optimizers.follow(cursor)
        cursor.samples = self._pending.samples
        self._cursors.add(cursor)

    def read(self, cursor: Cursor, snapshot: GradientSnapshot) -> NewGradients:
        """What is new to a consumer, in the order of the snapshot, which is of the same moment."""
        if cursor.changes == self.changes:
            return _nothing(snapshot, norms=cursor.norms is not None)
        cursor.changes = self.changes
        new, cursor.samples = self._pending.samples - cursor.samples, self._pending.samples
        layers = len(snapshot.table.layers)
        peaks = cursor.layers.take()[:, :layers]
        norms = None if cursor.norms is None else cursor.norms.take()[:, :layers]
        over = self._optimizers.take_peaks(cursor, snapshot.optimizers, norm_observed=snapshot.norm_observed)
        return NewGradients(new, peaks, over, norms)


def _nothing(snapshot: GradientSnapshot, *, norms: bool) -> NewGradients:
    """Nothing is new."""
    layers, optimizers = len(snapshot.table.layers), len(snapshot.optimizers)
    peaks, over = np.full((2, layers), np.nan), np.full((2, optimizers), np.nan)
    return NewGradients(0, peaks, over, np.zeros((3, layers)) if norms else None)
