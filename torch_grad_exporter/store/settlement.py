"""Settlement: what happened to a sample between the end of its backward and the step.

That is its loss scale, by what it was divided, how it was clipped, and which optimizers a gradient scaler left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.aggregation.clipping import Clipping, Clippings, Said, combined
from torch_grad_exporter.aggregation.edits import Edit
from torch_grad_exporter.aggregation.pending import Ended
from torch_grad_exporter.aggregation.samples import Sample, arrived, values
from torch_grad_exporter.aggregation.scale_by_hand import ScalesByHand
from torch_grad_exporter.aggregation.tables import UNOWNED
from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.transfer.events import AfterClip, Closed, Outcome

FEW = 8
"""Optimizers that are compared with one by one: for that NumPy's search is slow. Of an optimizer for each parameter it is not."""


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """A sample as it is counted.

    `number`: as of `Ended`. `shown`: the optimizers whose parameters it shows; `left_out`: those of them that a gradient scaler
    left out. `uncounted`: those whose part of the round was not counted before, `unmeasured`: those whose sizes were not.
    `clippings`: by optimizer. `edited`: the norms of all gradients before and after clipping, where both are known; only with
    `clip=`, which makes them known.
    """

    number: int
    sample: Sample
    closed: Closed
    shown: frozenset[int]
    left_out: frozenset[int]
    uncounted: frozenset[int]
    unmeasured: frozenset[int]
    clippings: Mapping[int, Clipping]
    edited: Edit | None = None

    def gradients(self, optimizers: frozenset[int]) -> BoolArray:
        """Which gradients of the sample these optimizers own, shape (parameters,)."""
        return self.owned(optimizers) & self.sample.present

    def owned(self, optimizers: frozenset[int]) -> BoolArray:
        """Which parameters they own, shape (parameters,)."""
        owners = self.closed.owners
        if len(optimizers) > FEW:
            return np.isin(owners, list(optimizers))
        found = np.zeros(len(owners), dtype=np.bool_)
        for one in optimizers:
            found |= owners == one
        return found

    def outcome(self, optimizer: int) -> Outcome:
        """What became of this optimizer's step."""
        return Outcome.SKIPPED if optimizer in self.left_out else self.closed.outcome


UNTOLD = 8
"""Samples after the last one whose divisor the loop told, up to which one without is taken for one that was told of in vain."""


@dataclass(slots=True)
class Settlement:
    """Settles samples, and remembers what earlier ones have shown of clipping, of divisions and of scalers.

    `by_us`: gradients are clipped as `clip=` asks for.
    """

    by_us: bool = False
    _clippings: Clippings = field(default_factory=Clippings)
    _by_hand: ScalesByHand = field(default_factory=ScalesByHand)
    _told: dict[int, int] = field(default_factory=dict)
    """By optimizer, the number of the last sample by which the loop told to divide."""
    _faithful: dict[tuple[frozenset[int], int], bool] = field(default_factory=dict)
    """By the owners of what a round wrote: whether an optimizer stepped in each of them in which its gradients were finite."""

    def settle(self, ended: Ended) -> Settled:
        """The sample without its loss scale, or without sizes where that is not known or more gradients may come."""
        sample, closed = ended.sample, ended.closed
        verdicts, edited = self._compare(ended)
        found_inf = {event.optimizer for event in ended.after if event.found_inf and values(event.found_inf.ready())[0]}
        left_out = found_inf | self._overflowed(sample, closed)
        sure = self._divisor_is_known(ended) and all(verdict.sure for verdict in verdicts.values())
        if not (ended.whole and sure and self._scale_is_known(ended)):
            sample = sample.without_sizes()
            verdicts = {optimizer: replace(verdict, coefficient=None, after=None) for optimizer, verdict in verdicts.items()}
        shown = closed.stepped | left_out
        uncounted, unmeasured = shown - ended.counted, shown - ended.measured
        return Settled(ended.number, sample, closed, shown, frozenset(left_out), uncounted, unmeasured, verdicts, edited)

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

    def _divisor_is_known(self, ended: Ended) -> bool:
        """Whether the sample is free of any divisor that the loop tells.

        It may have told that of another round than it meant, as before the backward that follows a skipped step.
        """
        if ended.told:
            self._told |= dict.fromkeys(ended.closed.stepped, ended.number)
        if ended.told or ended.sample.captured.at_step:
            return True
        return all(ended.number - self._told.get(optimizer, -UNTOLD) >= UNTOLD for optimizer in ended.closed.stepped)

    def _scale_is_known(self, ended: Ended) -> bool:
        """Whether the sample is free of any loss scale.

        Before the first step a scaler may be there that is not known; but one skips no step whose gradients are finite.
        """
        sample, closed = ended.sample, ended.closed
        if sample.unscaled:
            return True
        if any(self._by_hand.may_be(optimizer) for optimizer in closed.stepped):
            return False
        stepped = closed.outcome is Outcome.STEPPED or bool(ended.after)
        return sample.captured.scale_known or stepped or (ended.over and not sample.nonfinite())

    def _compare(self, ended: Ended) -> tuple[dict[int, Clipping], Edit | None]:
        """Compares the norms before and after, and divides the sample by what is known only now."""
        sample, closed = ended.sample, ended.closed
        loop = [event for event in ended.after if not event.ours]
        after = _norms(loop, np.zeros(len(closed.owners)))
        for event in loop:
            if event.loss_scale is not None:  # of the scaler that was found among the step's callers
                sample.unscale(float(values(event.loss_scale.ready())[0]))
        mine = {
            event.optimizer: sample.present & (closed.owners == event.optimizer)
            for event in ended.after
            if event.optimizer in closed.stepped
        }
        of_loop = {optimizer: mine[optimizer] for event in loop if (optimizer := event.optimizer) in mine}
        edits = {optimizer: Edit(sample.norms[own], after[own]) for optimizer, own in of_loop.items()}
        if not (sample.unscaled or ended.told or ended.given is not None) and self._reveal_scale(ended.number, sample, edits):
            edits = {optimizer: Edit(sample.norms[own], after[own]) for optimizer, own in of_loop.items()}
        said = Said(divided=ended.told, norm=ended.given, part=bool(sample.captured.table.sharded.any()))
        verdicts = self._clippings.judge(ended.number, edits, said)
        for verdict in verdicts.values():  # of one optimizer at most: whose norm is given is not known where there are several
            sample.divide(verdict.divisor)
        return self._with_ours(ended, verdicts, mine, after) if self.by_us else (verdicts, None)

    def _with_ours(
        self, ended: Ended, verdicts: dict[int, Clipping], mine: Mapping[int, BoolArray], after: FloatArray
    ) -> tuple[dict[int, Clipping], Edit]:
        """The verdicts with the clipping that `clip=` asked for, which came after all that the loop has done.

        Of that one both norms are known, so that nothing is to be guessed.
        """
        by_us = [event for event in ended.after if event.ours]
        clipped, told = _norms(by_us, np.zeros(len(after))), {event.optimizer for event in by_us}
        edited = Edit(np.full(len(after), np.nan), np.full(len(after), np.nan))
        found = dict(verdicts)
        for optimizer, own in mine.items():
            of_loop = verdicts.get(optimizer)
            before = ended.sample.norms if of_loop is None else after
            if optimizer in told:
                edit = Edit(before[own], clipped[own])
                found[optimizer] = combined(of_loop or Clipping(1.0), edit)
                edited.before[own], edited.after[own] = edit.before, edit.after
            elif of_loop is not None and of_loop.coefficient is not None:  # in a closure it cannot be told apart
                edited.before[own], edited.after[own] = ended.sample.norms[own], after[own]
        return found, edited

    def _reveal_scale(self, number: int, sample: Sample, edits: Mapping[int, Edit]) -> bool:
        """Divides by the scale that the norms themselves reveal, if they do. Each sample's is its own: the next may have grown."""
        found = [self._by_hand.look(number, optimizer, edit) for optimizer, edit in edits.items()]
        scales = [scale for scale in found if scale is not None]
        if scales:  # one loss was scaled, and clipping makes a scale seem larger than it is
            sample.unscale(min(scales))
        return bool(scales)


def _norms(events: Iterable[AfterClip], norms: FloatArray) -> FloatArray:
    """The norms of these events by parameter, in the place of what is in `norms`."""
    for event in events:
        own_scale = 1.0 if event.own_scale is None else float(values(event.own_scale.ready())[0])
        for part in event.parts:
            norms[part.positions] = arrived(part)[:, 0] / own_scale
    return norms
