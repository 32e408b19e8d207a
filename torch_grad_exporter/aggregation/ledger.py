"""GradientLedger: what the samples add up to, on the host, per layer and per optimizer.

It is fed by `host.HostSide` with events whose vectors have arrived, in their order, and touches no tensor.
Nothing that is not finite enters a histogram, a sum or a baseline.

A sample is *pending* until its round is closed: a later backward of the round may replace it, and only
what the stepping optimizers own is published. One that stays pending for `PATIENCE` seconds is counted with
the outcome "unknown", so that a NaN is seen even if the loop hangs right after it; it is not counted again
when its round goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.aggregation import clipping
from torch_grad_exporter.aggregation.baseline import Baselines
from torch_grad_exporter.aggregation.declared import DeclaredValues
from torch_grad_exporter.aggregation.exponential import Counts, Exponentials
from torch_grad_exporter.aggregation.noise import LocalTotals, LocalValues
from torch_grad_exporter.aggregation.peaks import Peaks
from torch_grad_exporter.aggregation.samples import Groups, Sample, arrived, grouped_norms, values
from torch_grad_exporter.metrics.catalogue import DECADES, HALF_DECADES
from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.model.layers import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.transfer.events import AfterClip, Captured, Closed, Hints, Local, Outcome, OutcomeResolved, Weights

PATIENCE = 1.0
PATIENCE_AMID = 10.0
"""Seconds after which a pending sample is counted although nobody knows what became of its step; the longer one
while more backwards of its round may follow, as at the start of a run that accumulates."""

UNOWNED = -1
"""The owner of a parameter that no known optimizer has."""

_SECONDS = 60
_ALWAYS_NUMBERS = ("squared_total", "captures", "spikes", "nans", "infs", "bucket_sum")

LAYER = np.dtype(
    [(name, np.float64) for name in (
        "norm", "max_magnitude", "zero_ratio", "zero_units_ratio", "dead_ratio", "missing", "zscore",
        "part", "units", "mean", "stddev", "minimum", "maximum", "weight_norm", "update_ratio", *_ALWAYS_NUMBERS,
    )]
    + [("buckets", np.float64, (len(DECADES) + 1,)), ("recent", np.float64, (_SECONDS,)), ("sized", np.bool_)]
)  # fmt: skip
"""One layer's values; NaN where a value was never had, but for the totals.

`sized`: whether the last sample was one whose loss scale is known. `part`: the norm over those parameters of which this
rank's part counts in sums over ranks, as `squared_total`, `nans` and `infs` are; `units`: of what this rank has.
"""

OPTIMIZER = np.dtype(
    [(name, np.float64) for name in (
        "norm", "after_clip", "coefficient", "sample_step", "spikes", "clipped", "bucket_sum",
        *(f"nonfinite_{outcome.value}" for outcome in Outcome),
    )]
    + [("buckets", np.float64, (len(HALF_DECADES) + 1,)), ("seen", np.bool_), ("sized", np.bool_), ("clip_known", np.bool_)]
)  # fmt: skip
"""The values over all parameters of one optimizer. `seen`: whether there was a sample; `sized`: as of a layer."""

_OF_NORMS = ("norm", "sized", "buckets", "bucket_sum", "spikes")
"""What an observed norm is the source of."""

_DECADES = np.array(DECADES)
_HALF_DECADES = np.array(HALF_DECADES)


@dataclass(frozen=True, slots=True, eq=False)
class GradientSnapshot:
    """All gradient values at one moment, of one and the same sample; `layers` and `layer_values` go together.

    `recent_max`: shape (layers,), NaN where there was no sample in the last minute. `optimizers`: numbers. `local`: by number.
    `peaks`: of each layer the largest norm and z-score since the last look, shape (2, layers), and `peaks_of_totals` of each
    optimizer the largest norm and norm after clipping; NaN where there was no new one.
    `declared`: by column of each other statistic, `statistic.column`, its values, shape (layers,); NaN where there is none.
    `exponential`: norms of the layers by exponential bucket, and `exponential_totals` those of the optimizers, if they are counted.
    """

    table: ParameterTable
    layer_values: np.ndarray[tuple[int], np.dtype[np.void]]
    recent_max: FloatArray
    optimizers: tuple[int, ...]
    totals: np.ndarray[tuple[int], np.dtype[np.void]]
    samples: int
    undelivered: int
    norm_observed: bool
    local: Mapping[int, LocalValues]
    peaks: FloatArray
    peaks_of_totals: FloatArray
    exponential: tuple[Counts, ...] | None = None
    exponential_totals: tuple[Counts, ...] | None = None
    declared: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass(slots=True)
class GradientLedger:
    """Adds up samples. `hints` is where it says which parameters are worth probing for clipping.

    `exponential`: counts the same norms by exponential bucket, too, if it is given.
    """

    dead_window: int
    hints: Hints
    exponential: Exponentials | None = None
    declared: DeclaredValues = field(default_factory=DeclaredValues)
    local: LocalTotals = field(default_factory=LocalTotals)
    samples: int = 0
    undelivered: int = 0
    _table: ParameterTable | None = None
    _rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _row_of: dict[str, int] = field(default_factory=dict)
    _layers: np.ndarray[tuple[int], np.dtype[np.void]] = field(default_factory=lambda: np.zeros(0, dtype=LAYER))
    _recent_second: IntArray = field(default_factory=lambda: np.full(_SECONDS, -1, dtype=np.int64))
    _optimizers: dict[int, int] = field(default_factory=dict)
    _totals: np.ndarray[tuple[int], np.dtype[np.void]] = field(default_factory=lambda: np.zeros(0, dtype=OPTIMIZER))
    _layer_baseline: Baselines = field(default_factory=Baselines)
    _global_baseline: Baselines = field(default_factory=Baselines)
    _peaks: Peaks = field(default_factory=Peaks)
    _peaks_of_totals: Peaks = field(default_factory=Peaks)
    _peaks_of_observed: Peaks = field(default_factory=Peaks)
    _pending: Sample | None = None
    _after: list[AfterClip] = field(default_factory=list)
    _counted_round: int = -1
    _counted: frozenset[int] = frozenset()
    _measured: frozenset[int] = frozenset()
    """The optimizers whose part of that round was counted, and of those the ones whose sizes were known then."""
    _scaled_by_hand: set[int] = field(default_factory=set)
    """The optimizers whose gradients have shown a loss scale that nobody told of."""
    _faithful: dict[tuple[frozenset[int], int], bool] = field(default_factory=dict)
    """By the owners of what a round wrote: whether an optimizer stepped in each of them in which its gradients were finite."""
    _observed: np.ndarray[tuple[int], np.dtype[np.void]] | None = None
    _observed_baseline: Baselines = field(default_factory=Baselines)
    _untold: bool = False
    """Whether the last observed norm was not finite, and what became of its step is still to be told."""
    _probes: dict[int, set[int]] = field(default_factory=dict)

    def use(self, table: ParameterTable) -> None:
        """Shows the layers of `table` from now on; a layer that was there before keeps its totals."""
        if table is self._table:
            return
        for label in table.layers:
            self._row_of.setdefault(label, len(self._row_of))
        more = np.zeros(len(self._row_of) - len(self._layers), dtype=LAYER)
        for name in LAYER.names or ():
            if name not in (*_ALWAYS_NUMBERS, "buckets", "sized"):
                more[name] = np.nan
        self._layers = np.concatenate([self._layers, more])
        self._layer_baseline.grow(len(self._layers))
        self._peaks.grow(len(self._layers))
        self.declared.grow(len(self._layers))
        self._rows = np.array([self._row_of[label] for label in table.layers], dtype=np.int64)
        self._table = table

    def apply(self, event: Captured | Local | AfterClip | Closed | OutcomeResolved | Weights) -> None:
        """Takes one event; its vectors have arrived."""
        with np.errstate(all="ignore"):  # NaN and overflow are what is looked for here
            self._apply(event)

    def _apply(self, event: Captured | Local | AfterClip | Closed | OutcomeResolved | Weights) -> None:
        match event:
            case Captured():
                self._replace_pending(event)
                self._pending, self._after = Sample.of(event), []
                self.local.take(None)
            case Local():
                self.local.take(event)
            case AfterClip():
                if self._pending is not None and self._pending.captured.round == event.round:
                    self._after.append(event)
            case Closed():
                if self._pending is not None and self._pending.captured.round == event.round:
                    self._publish(self._pending, event)
                    self._pending = None
            case OutcomeResolved():
                if self._untold and self._observed is not None:
                    self._observed[f"nonfinite_{event.outcome.value}"] += 1
                    self._untold = False
            case Weights():
                self._weigh(event)

    def observe_norm(self, norm: float) -> None:
        """Takes a global norm that the user computed before clipping; from then on it is the source of that norm.

        With several optimizers it is not known whose norm it is, and the captured ones are shown: both are counted, since
        a second optimizer may come at any time.
        """
        if self._observed is None:
            self._observed = np.zeros(1, dtype=OPTIMIZER)
            self._observed_baseline.grow(1)
            self._peaks_of_observed.grow(1)
        norm = norm if norm >= 0 else np.nan  # DeepSpeed says -1 where the norm is NaN or Inf
        self._untold = not np.isfinite(norm)
        self._observed["norm"], self._observed["sized"] = norm, True
        self._peaks_of_observed.enter([0], np.array([norm]), np.array([np.nan]))
        with np.errstate(all="ignore"):
            seen = _count_norm(self._observed, self._observed_baseline, 0, np.array([norm]))
        if self.exponential is not None:
            self.exponential.observed.observe(*seen)

    def _over_optimizers(self) -> tuple[tuple[int, ...], np.ndarray[tuple[int], np.dtype[np.void]], bool]:
        """The optimizers, a copy of their values, and whether the norm in it is an observed one."""
        optimizers, totals = tuple(self._optimizers), self._totals.copy()
        if self._observed is None or len(optimizers) > 1:
            return optimizers, totals, False
        if not optimizers:
            optimizers, totals = (UNOWNED,), np.zeros(1, dtype=OPTIMIZER)
        for name in _OF_NORMS:
            totals[name] = self._observed[name]
        for outcome in Outcome:
            totals[f"nonfinite_{outcome.value}"] += self._observed[f"nonfinite_{outcome.value}"]
        return optimizers, totals, True

    def expire(self, now: float) -> None:
        """Counts a sample that has been pending for too long; `now` is Unix time."""
        pending = None if self._pending is None else self._pending.captured
        if pending is None or self._counted_round == pending.round:
            return
        if now - pending.at > (PATIENCE if pending.likely_last else PATIENCE_AMID):
            with np.errstate(all="ignore"):
                self._publish_unknown(keep=True)

    def snapshot(self, now: float, *, more_to_come: bool = False, look: bool = False) -> GradientSnapshot:
        """A copy of all values as of `now`, Unix time.

        `more_to_come`: events that may tell the outcome of the pending sample are known to be under way. `look`: peaks begin anew.
        """
        if not more_to_come:
            self.expire(now)
        table = self._table
        if table is None:
            raise RuntimeError("the ledger has no table yet")
        layer_values = self._layers[self._rows]
        fresh = self._recent_second > int(now) - _SECONDS
        recent = np.fmax.reduce(layer_values["recent"][:, fresh], axis=1, initial=np.nan)
        recent[np.isinf(recent)] = np.nan
        optimizers, totals, observed = self._over_optimizers()
        local = self.local.snapshot()
        layers, over = self._exponential(optimizers, observed=observed)
        peaks = self._peaks.of(self._rows), self._peaks_over(optimizers, observed=observed)
        if look:
            for forgetful in (self._peaks, self._peaks_of_totals, self._peaks_of_observed):
                forgetful.forget()
        declared = self.declared.of(self._rows)
        return GradientSnapshot(
            table,
            layer_values,
            recent,
            optimizers,
            totals,
            self.samples,
            self.undelivered,
            observed,
            local,
            *peaks,
            layers,
            over,
            declared,
        )

    def _peaks_over(self, optimizers: tuple[int, ...], *, observed: bool) -> FloatArray:
        """Of the optimizers, in the order of the snapshot."""
        found = self._peaks_of_totals.of([self._optimizers.get(number, -1) for number in optimizers])
        if observed:
            found[0] = self._peaks_of_observed.of([0])[0]
        return found

    def _exponential(
        self, optimizers: tuple[int, ...], *, observed: bool
    ) -> tuple[tuple[Counts, ...] | None, tuple[Counts, ...] | None]:
        """Of the layers and of the optimizers, in the order of the snapshot."""
        if self.exponential is None:
            return None, None
        own = self.exponential.optimizers.snapshot(self._optimizers.get(number, -1) for number in optimizers)
        return self.exponential.layers.snapshot(self._rows.tolist()), self.exponential.observed.snapshot([0]) if observed else own

    def _replace_pending(self, event: Captured) -> None:
        """Another capture has come: that of another round leaves the outcome of the pending one unknown."""
        pending = self._pending
        if pending is None or pending.captured.round != event.round:
            self._publish_unknown()
        elif event.again and pending.nonfinite():
            # Nobody goes on from such gradients: this was a skipped step and not the first of two passes.
            self._publish_unknown(Outcome.SKIPPED)
            self._counted_round = -1

    def _publish_unknown(self, outcome: Outcome = Outcome.UNKNOWN, *, keep: bool = False) -> None:
        """Publishes the pending sample though nobody has said who stepped."""
        sample = self._pending
        if sample is None:
            return
        owners = sample.captured.owners
        stepped = frozenset(event.optimizer for event in self._after) or sample.captured.usual
        stepped = stepped or frozenset(np.unique(owners[sample.present]).tolist())
        self._publish(sample, Closed(sample.captured.round, outcome, owners, owners, stepped, {}), over=not keep)
        if not keep:
            self._pending = None

    def _publish(self, sample: Sample, closed: Closed, *, over: bool = True) -> None:
        """Makes a sample the last one of what the stepping optimizers own, and counts what of it is new.

        `over`: whether nothing more can come to its round.
        """
        self._untold = False  # the sample itself says whether it was finite
        if self._counted_round != sample.captured.round:
            self._counted_round, self._counted, self._measured = sample.captured.round, frozenset(), frozenset()
            self.samples += 1
        verdicts = self._clipping(sample, closed)
        left_out = {event.optimizer for event in self._after if event.found_inf and values(event.found_inf.ready())[0]}
        left_out |= self._overflowed(sample, closed)
        if not self._scale_is_known(sample, closed, over=over):
            sample = sample.without_sizes()
            verdicts = {optimizer: replace(verdict, coefficient=None) for optimizer, verdict in verdicts.items()}
        shown = closed.stepped | left_out
        self.use(sample.captured.table)
        self._publish_layers(sample, closed.owners, shown)
        # What nobody owns is in nobody's totals, unless no optimizer is known yet.
        known = (shown | set(self._optimizers)) - {UNOWNED}
        for optimizer in sorted(shown & known if known else shown):
            told = replace(closed, outcome=Outcome.SKIPPED) if optimizer in left_out else closed
            clip = None if optimizer in left_out else verdicts.get(optimizer)
            self._publish_optimizer(sample, told, optimizer, clip)
        self.local.publish(sample, closed.owners, shown, shown - self._measured)
        self._counted |= shown
        if sample.sized:
            self._measured |= shown
        self._hint(sample, closed)

    def _overflowed(self, sample: Sample, closed: Closed) -> set[int]:
        """The optimizers that a gradient scaler left out: they step on gradients such as these whenever theirs are finite.

        A generator's backward writes gradients of the discriminator, too, whose optimizer steps in no such round.
        """
        kind = frozenset(closed.owners[sample.present].tolist()) - {UNOWNED}
        found: set[int] = set()
        if closed.outcome is not Outcome.STEPPED:
            return found
        for optimizer in kind:
            if optimizer in closed.stepped:
                self._faithful.setdefault((kind, optimizer), True)
            elif not sample.nonfinite(closed.owners == optimizer):
                self._faithful[kind, optimizer] = False
            elif self._faithful.get((kind, optimizer), False):
                found.add(optimizer)
        return found

    def _scale_is_known(self, sample: Sample, closed: Closed, *, over: bool) -> bool:
        """Whether the sample is free of any loss scale.

        Before the first step nobody knows of a scaler; but one skips no step whose gradients are finite.
        """
        if sample.unscaled:
            return True
        if closed.stepped & self._scaled_by_hand:
            return False
        stepped = closed.outcome is Outcome.STEPPED or bool(self._after)
        return sample.captured.scale_known or stepped or (over and not sample.nonfinite())

    def _clipping(self, sample: Sample, closed: Closed) -> dict[int, clipping.Clipping]:
        """Compares the norms before and after, and unscales the sample by a scale that is known only now."""
        after = np.zeros(len(closed.owners))
        measured = np.zeros(len(closed.owners), dtype=np.bool_)
        full = bool(self._after)
        for event in self._after:
            full &= event.full
            own_scale = 1.0 if event.own_scale is None else float(values(event.own_scale.ready())[0])
            for part in event.parts:
                after[part.positions] = arrived(part)[:, 0] / own_scale
                measured[part.positions] = True
            if event.loss_scale is not None:  # of the scaler that stands among the step's callers
                sample.unscale(float(values(event.loss_scale.ready())[0]))
        measured &= sample.present
        mine = {optimizer: sample.present & (closed.owners == optimizer) for optimizer in closed.stepped}
        if not sample.unscaled:
            self._reveal_scale(sample, after, measured, mine)
        before = sample.columns[:, Column.NORM]
        found = {o: clipping.compare(before[own], after[own], measured[own], full=full) for o, own in mine.items()}
        self.hints.full = any(verdict.disagree for verdict in found.values())
        return found

    def _reveal_scale(self, sample: Sample, after: FloatArray, measured: BoolArray, mine: dict[int, BoolArray]) -> None:
        """Divides by the scale that the norms themselves reveal. Each sample's is its own: the next one's may have grown."""
        before = sample.columns[:, Column.NORM]
        found = {o: clipping.revealed_scale(before[own], after[own], measured[own]) for o, own in mine.items()}
        scales = {optimizer: scale for optimizer, scale in found.items() if scale is not None}
        by_hand = {optimizer: scale for optimizer, scale in scales.items() if scale != 1}
        self._scaled_by_hand |= by_hand.keys()
        if scales:
            # Clipping makes a scale seem larger than it is.
            sample.unscale(min((by_hand or scales).values()))

    def _publish_layers(self, sample: Sample, owners: IntArray, shown: frozenset[int]) -> None:
        table, layer_values, mine = sample.captured.table, self._layers, np.isin(owners, list(shown))
        missing = np.zeros(len(table.tracked), dtype=np.bool_)
        missing[sample.captured.missing] = True
        touched = np.unique(table.layer_of[mine & (sample.present | missing)])
        layer_values["missing"][self._rows[touched]] = np.bincount(table.layer_of[mine & missing], minlength=len(table.layers))[
            touched
        ]
        groups = Groups.of(sample, mine & sample.present)
        rows = self._rows[groups.layers]
        norms, elements, units = groups.norms(), groups.total(sample.elements), groups.total(sample.units)
        layer_values["norm"][rows], layer_values["sized"][rows] = norms, sample.sized
        layer_values["part"][rows], layer_values["units"][rows] = groups.counted_norms(), units
        layer_values["max_magnitude"][rows] = groups.largest(Column.MAX, Column.MIN)
        layer_values["zero_ratio"][rows] = groups.sum(Column.ZEROS) / np.maximum(elements, 1)
        share = np.where(units > 0, 1 / np.maximum(units, 1), np.nan)
        layer_values["zero_units_ratio"][rows] = groups.sum(Column.ZERO_UNITS) * share
        layer_values["dead_ratio"][rows] = groups.sum(Column.DEAD_UNITS) * share
        self._moments(groups, rows, norms, elements)
        self.declared.enter(sample, groups, rows)
        self._count_layers(Groups.of(sample, np.isin(owners, list(shown - self._counted)) & sample.present))
        self._judge_layers(Groups.of(sample, np.isin(owners, list(shown - self._measured)) & sample.present), sample)

    def _moments(self, groups: Groups, rows: IntArray, norms: FloatArray, elements: FloatArray) -> None:
        layer_values = self._layers
        mean = groups.sum(Column.SUM) / np.maximum(elements, 1)
        rms = norms / np.sqrt(np.maximum(elements, 1))
        # In units of the root mean square, whose own square may be out of range.
        share = 1 - np.square(mean / np.where(rms > 0, rms, 1.0))
        layer_values["mean"][rows] = mean
        layer_values["stddev"][rows] = rms * np.sqrt(np.where(share < 0, 0.0, share))
        layer_values["minimum"][rows] = groups.smallest(Column.MIN)
        layer_values["maximum"][rows] = -groups.smallest(Column.MAX, negated=True)

    def _count_layers(self, groups: Groups) -> None:
        layer_values, rows = self._layers, self._rows[groups.layers]
        layer_values["captures"][rows] += 1
        layer_values["nans"][rows] += groups.counted_sum(Column.NANS)
        layer_values["infs"][rows] += groups.counted_sum(Column.INFS)

    def _judge_layers(self, groups: Groups, sample: Sample) -> None:
        """Enters norms that were not known before into the sums and compares them with earlier ones."""
        layer_values, rows, norms = self._layers, self._rows[groups.layers], groups.norms()
        finite = np.isfinite(norms)
        squares = np.square(groups.counted_norms())
        fits = np.isfinite(layer_values["squared_total"][rows] + squares)
        layer_values["squared_total"][rows[fits]] += squares[fits]
        seen = _observe(layer_values, rows[finite], norms[finite], _DECADES)
        if self.exponential is not None:
            self.exponential.layers.observe(*seen)
        verdict = self._layer_baseline.judge(rows, norms)
        layer_values["zscore"][rows] = verdict.zscore
        layer_values["spikes"][rows] += verdict.spike
        self._peaks.enter(rows, norms, verdict.zscore)
        # A finite norm of unknown size may be the largest: nobody knows the largest until it is no longer recent.
        recent = finite if sample.sized else groups.sum(Column.NANS) + groups.sum(Column.INFS) == 0
        self._remember(rows[recent], norms[recent] if sample.sized else np.inf, int(sample.captured.at))

    def _remember(self, rows: IntArray, norms: FloatArray | float, second: int) -> None:
        """Enters norms into the sliding minute, which has one place per second."""
        place = second % _SECONDS
        recent = self._layers["recent"]
        if self._recent_second[place] != second:
            recent[:, place] = np.nan
            self._recent_second[place] = second
        recent[rows, place] = np.fmax(recent[rows, place], norms)

    def _publish_optimizer(self, sample: Sample, closed: Closed, optimizer: int, clip: clipping.Clipping | None) -> None:
        mine = (closed.owners == optimizer) & sample.present
        if not mine.any():
            return
        row = self._optimizer_row(optimizer)
        one = self._totals[row : row + 1]
        norm = Groups.of(sample, mine, together=True).norms()
        if optimizer in closed.steps:
            one["sample_step"] = closed.steps[optimizer]
        one["clip_known"] = clip is not None and clip.coefficient is not None
        if clip is not None and clip.coefficient is not None:
            one["coefficient"] = clip.coefficient
            one["after_clip"] = clip.coefficient * norm
        if closed.outcome is not Outcome.UNKNOWN:  # until then nobody knows whether it was clipped
            one["clipped"] += clip is not None and clip.clipped
        one["norm"], one["seen"], one["sized"] = norm, True, sample.sized
        fresh = optimizer not in self._measured
        self._peaks_of_totals.enter(
            [row], norm if fresh else np.array([np.nan]), np.where(one["clip_known"], one["after_clip"], np.nan)
        )
        if fresh:
            _, norms = _count_norm(one, self._global_baseline, row, norm)
            if self.exponential is not None:
                self.exponential.optimizers.observe(np.full(len(norms), row), norms)
        if optimizer not in self._counted:
            one[f"nonfinite_{closed.outcome.value}"] += sample.nonfinite(mine)

    def _optimizer_row(self, optimizer: int) -> int:
        """The row of an optimizer; the first one takes over the row of samples before any was known."""
        if optimizer not in self._optimizers:
            if UNOWNED in self._optimizers:
                self._optimizers = {optimizer if o == UNOWNED else o: row for o, row in self._optimizers.items()}
            else:
                self._optimizers[optimizer] = len(self._totals)
                self._totals = np.concatenate([self._totals, np.zeros(1, dtype=OPTIMIZER)])
                self._global_baseline.grow(len(self._totals))
                self._peaks_of_totals.grow(len(self._totals))
        return self._optimizers[optimizer]

    def _hint(self, sample: Sample, closed: Closed) -> None:
        """Names the probes for the next comparison: per parameter group the largest norm and magnitude."""
        if self.hints.table is not sample.captured.table:
            self._probes = {}
        magnitude = np.fmax(np.abs(sample.columns[:, Column.MIN]), np.abs(sample.columns[:, Column.MAX]))
        for group in np.unique(closed.groups[sample.present]):
            members = np.flatnonzero((closed.groups == group) & sample.present)
            best: set[int] = set()
            for column, count in ((sample.columns[:, Column.NORM], 1), (magnitude, 1), (sample.columns[:, Column.NORM], 2)):
                # The third look only where the first two found the same one: a single probe agrees with itself.
                if len(best) < 2:
                    usable = members[np.isfinite(column[members]) & (column[members] > 0)]
                    best |= set(usable[np.argsort(column[usable])[-count:]].tolist())
            self._probes[int(group)] = best
        self.hints.probes = frozenset().union(*self._probes.values())
        self.hints.table = sample.captured.table

    def _weigh(self, event: Weights) -> None:
        table = event.table
        self.use(table)
        norms = values(event.vector.ready()).reshape(-1, 3)
        layers, group = np.unique(table.layer_of[event.positions], return_inverse=True)
        before, after, update = (grouped_norms(norms[:, i], group, len(layers)) for i in range(3))
        rows = self._rows[layers]
        self._layers["weight_norm"][rows] = after
        self._layers["update_ratio"][rows] = np.where(before > 0, update / before, np.nan)


def _observe(
    layer_values: np.ndarray[tuple[int], np.dtype[np.void]], rows: IntArray, norms: FloatArray, bounds: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Enters one observation for each row into its histogram; a bucket's upper bound belongs to it. Returns what was entered.

    What would make the sum overflow is left out, like what is not finite.
    """
    fits = np.isfinite(layer_values["bucket_sum"][rows] + norms)
    rows, norms = rows[fits], norms[fits]
    layer_values["buckets"][rows, np.searchsorted(bounds, norms, side="left")] += 1
    layer_values["bucket_sum"][rows] += norms
    return rows, norms


def _count_norm(
    one: np.ndarray[tuple[int], np.dtype[np.void]], baseline: Baselines, row: int, norm: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Enters a global norm into the histogram `one`, and compares it with those in this row of the baseline.

    Returns what was entered, as `_observe` does.
    """
    finite = np.flatnonzero(np.isfinite(norm))
    seen = _observe(one, finite, norm[finite], _HALF_DECADES)
    one["spikes"] += baseline.judge(np.array([row]), norm).spike
    return seen
