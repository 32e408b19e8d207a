"""Settlement: what happened to a sample between the end of its backward and the step, and which gradients tell it of the next one.

That is its loss scale, how it was clipped, and which optimizers a gradient scaler left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.aggregation import clipping
from torch_grad_exporter.aggregation.clipping import Clipping
from torch_grad_exporter.aggregation.pending import Ended
from torch_grad_exporter.aggregation.samples import Sample, arrived, values
from torch_grad_exporter.aggregation.tables import UNOWNED
from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.transfer.events import AfterClip, Closed, Decisions, Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """A sample as it is counted.

    `shown`: the optimizers whose parameters it shows; `left_out`: those of them that a gradient scaler left out. `uncounted`:
    those whose part of the round was not counted before, `unmeasured`: those whose sizes were not. `clippings`: by optimizer.
    """

    sample: Sample
    closed: Closed
    shown: frozenset[int]
    left_out: frozenset[int]
    uncounted: frozenset[int]
    unmeasured: frozenset[int]
    clippings: Mapping[int, Clipping]

    def gradients(self, optimizers: frozenset[int]) -> BoolArray:
        """Which gradients of the sample these optimizers own, shape (parameters,)."""
        return np.isin(self.closed.owners, list(optimizers)) & self.sample.present

    def outcome(self, optimizer: int) -> Outcome:
        """What became of this optimizer's step."""
        return Outcome.SKIPPED if optimizer in self.left_out else self.closed.outcome


@dataclass(slots=True)
class Settlement:
    """Settles samples, and remembers what earlier ones have shown of scalers."""

    _scaled_by_hand: set[int] = field(default_factory=set)
    """The optimizers whose gradients have shown a loss scale that was not known otherwise."""
    _faithful: dict[tuple[frozenset[int], int], bool] = field(default_factory=dict)
    """By the owners of what a round wrote: whether an optimizer stepped in each of them in which its gradients were finite."""

    def settle(self, ended: Ended) -> Settled:
        """The sample without its loss scale, or without sizes where that is not known."""
        sample, closed = ended.sample, ended.closed
        verdicts = self._compare(sample, ended.after, closed)
        found_inf = {event.optimizer for event in ended.after if event.found_inf and values(event.found_inf.ready())[0]}
        left_out = found_inf | self._overflowed(sample, closed)
        if not self._scale_is_known(ended):
            sample = sample.without_sizes()
            verdicts = {optimizer: replace(verdict, coefficient=None) for optimizer, verdict in verdicts.items()}
        shown = closed.stepped | left_out
        return Settled(sample, closed, shown, frozenset(left_out), shown - ended.counted, shown - ended.measured, verdicts)

    def _overflowed(self, sample: Sample, closed: Closed) -> set[int]:
        """The optimizers that a gradient scaler left out: they step after such backwards whenever their gradients are finite.

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

    def _scale_is_known(self, ended: Ended) -> bool:
        """Whether the sample is free of any loss scale.

        Before the first step a scaler may be there that is not known; but one skips no step whose gradients are finite.
        """
        sample, closed = ended.sample, ended.closed
        if sample.unscaled:
            return True
        if closed.stepped & self._scaled_by_hand:
            return False
        stepped = closed.outcome is Outcome.STEPPED or bool(ended.after)
        return sample.captured.scale_known or stepped or (ended.over and not sample.nonfinite())

    def _compare(self, sample: Sample, events: tuple[AfterClip, ...], closed: Closed) -> dict[int, Clipping]:
        """Compares the norms before and after, and unscales the sample by a scale that is known only now."""
        after = np.zeros(len(closed.owners))
        measured = np.zeros(len(closed.owners), dtype=np.bool_)
        full = bool(events)
        for event in events:
            full &= event.full
            own_scale = 1.0 if event.own_scale is None else float(values(event.own_scale.ready())[0])
            for part in event.parts:
                after[part.positions] = arrived(part)[:, 0] / own_scale
                measured[part.positions] = True
            if event.loss_scale is not None:  # of the scaler that was found among the step's callers
                sample.unscale(float(values(event.loss_scale.ready())[0]))
        measured &= sample.present
        mine = {optimizer: sample.present & (closed.owners == optimizer) for optimizer in closed.stepped}
        if not sample.unscaled:
            self._reveal_scale(sample, after, measured, mine)
        before = sample.norms
        return {o: clipping.compare(before[own], after[own], measured[own], full=full) for o, own in mine.items()}

    def _reveal_scale(self, sample: Sample, after: FloatArray, measured: BoolArray, mine: dict[int, BoolArray]) -> None:
        """Divides by the scale that the norms themselves reveal. Each sample's is its own: the next one's may have grown."""
        before = sample.norms
        found = {o: clipping.revealed_scale(before[own], after[own], measured[own]) for o, own in mine.items()}
        scales = {optimizer: scale for optimizer, scale in found.items() if scale is not None}
        by_hand = {optimizer: scale for optimizer, scale in scales.items() if scale != 1}
        self._scaled_by_hand |= by_hand.keys()
        if scales:
            # Clipping makes a scale seem larger than it is.
            sample.unscale(min((by_hand or scales).values()))


@dataclass(slots=True)
class Probes:
    """Chooses what is measured again at the next step: of each parameter group the largest norm and the largest magnitude."""

    decisions: Decisions
    _by_group: dict[int, set[int]] = field(default_factory=dict)

    def choose(self, settled: Settled) -> None:
        """Names the probes for the next comparison; all gradients are measured where these disagreed."""
        sample, groups = settled.sample, settled.closed.groups
        table = sample.captured.table
        if self.decisions.table is not table:
            self._by_group = {}
        magnitudes = np.abs(sample.columns[:, [Column.MIN, Column.MAX]])
        sizes = (sample.norms, np.fmax.reduce(magnitudes, axis=1))
        for group in np.unique(groups[sample.present]).tolist():
            self._by_group[group] = _largest(np.flatnonzero((groups == group) & sample.present), *sizes)
        disagree = any(verdict.disagree for verdict in settled.clippings.values())
        self.decisions.tell(table, frozenset().union(*self._by_group.values()), full=disagree)


def _largest(members: IntArray, norms: FloatArray, magnitudes: FloatArray) -> set[int]:
    best: set[int] = set()
    for column, count in ((norms, 1), (magnitudes, 1), (norms, 2)):
        # The third choice only where the first two chose the same gradient: a single probe always agrees with itself.
        if len(best) < 2:
            usable = members[np.isfinite(column[members]) & (column[members] > 0)]
            best |= set(usable[np.argsort(column[usable])[-count:]].tolist())
    return best
