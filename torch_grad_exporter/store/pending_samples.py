"""PendingSamples: a sample waits for the outcome of its round; here is decided when, and as what, it counts.

A later backward of the round may replace the sample, and only what the stepping optimizers own counts, so the norms
of a round that is not over are not shown. But a NaN must be visible even if the loop hangs right after it: what is
not finite counts after `GRACE_SECONDS`, with the outcome "unknown", and not again when its round goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.store.clip_detection import ClipDetection, ClipVerdict, Edit, with_ours
from torch_grad_exporter.store.records import UNOWNED, Outcome, RoundEnded, SampleRead, number_of
from torch_grad_exporter.store.sample import Sample

GRACE_SECONDS = 1.0  # after which a NaN counts without an outcome
GRACE_SECONDS_AMID = 10.0  # the same while more backwards of the round may follow
UNREPORTED = 8  # samples after the last one with a divisor, up to which one without it was probably forgotten by the loop


@dataclass(frozen=True, slots=True, eq=False)
class CountedSample:
    """A sample with its outcome, as the tables count it. It may come again when more optimizers have stepped."""

    number: int  # of the sample, the first is 1
    sample: Sample
    ended: RoundEnded
    owners: IntArray  # as in `SampleRead`, with what is known of them at the end of the round
    shown: frozenset[int]  # optimizers whose parameters it shows: those that stepped or were left out
    left_out: frozenset[int]  # those whose step a gradient scaler left out
    new: frozenset[int]  # those whose part of the round was not counted before
    newly_sized: frozenset[int]  # those whose norms were not counted before
    clippings: Mapping[int, ClipVerdict]  # by optimizer
    clipped: FloatArray | None  # with `clip=`: norms before and after, shape (2, parameters), NaN if unknown

    def owned(self, optimizers: frozenset[int]) -> BoolArray:
        """Return which parameters these optimizers own, shape (parameters,)."""
        if len(optimizers) == 1:  # a comparison is 40 times as fast
            owned: BoolArray = self.owners == next(iter(optimizers))
            return owned
        return np.isin(self.owners, list(optimizers))

    def outcome(self, optimizer: int) -> Outcome:
        """Return what became of this optimizer's step."""
        return Outcome.SKIPPED if optimizer in self.left_out else self.ended.outcome


class Listener(Protocol):
    """Follows what is counted. Called on the thread that drains, after the tables."""

    def counted(self, sample: CountedSample) -> None:
        """Take a sample with its outcome; again when more optimizers have stepped on it."""

    def observed(self, name: str, value: float) -> None:
        """Take a value that was observed."""

    def rounds_over(self, rounds: int) -> None:
        """This many more rounds are over."""


class PendingSamples:
    """Holds one sample at most. `clipped`: gradients are clipped as `clip=` asks for."""

    def __init__(self, *, clipped: bool = False) -> None:
        self.samples = 0  # rounds of which something was counted
        self.unattributed = 0  # samples whose optimizer is unknown, not counted
        self._clipped = clipped
        self._clips = ClipDetection()
        self.sample: Sample | None = None  # the one that waits
        self._ended: RoundEnded | None = None  # what its round has come to so far
        self._norm: float | None = None  # the global norm before clipping that the loop has given
        # The last round of which something was counted, and the optimizers whose part, and whose norms, were.
        self._round: int | None = None
        self._counted: frozenset[int] = frozenset()
        self._sized: frozenset[int] = frozenset()
        self._divided: dict[int, int] = {}  # by optimizer, the last sample with a divisor
        # By the owners of what a round wrote, and optimizer: it stepped whenever its gradients were finite.
        self._steps_if_finite: dict[tuple[frozenset[int], int], bool] = {}

    def read(self, record: SampleRead) -> CountedSample | None:
        """Take a sample; return the one before, of another round, whose outcome stays unknown."""
        before, counted = self.sample, None
        if before is not None and before.read.round != record.round:
            counted = self._count(before, self._ended or _guess(before, Outcome.UNKNOWN))
        elif before is not None and record.again and before.nonfinite():
            # No loop goes on with gradients that are not finite and were thrown away: that was a skipped step.
            counted = self._count(before, _guess(before, Outcome.SKIPPED))
            self._round = None
        self.sample, self._ended, self._norm = Sample.of(record), None, None
        return counted

    def norm_given(self, norm: float) -> None:
        """Take the global norm before clipping of the round that is not over."""
        if self.sample is not None and self._ended is None and 0 < norm < math.inf:
            self._norm = norm

    def round_ended(self, record: RoundEnded) -> CountedSample | None:
        """Take the outcome; return the sample of that round unless other optimizers may still step on it."""
        sample = self.sample
        if sample is None or sample.read.round != record.round:
            return None
        if not (record.final or record.withdrawn):
            self._ended = record
            return None
        self.sample = None
        if record.withdrawn:
            return None
        if record.guessed and not sample.nonfinite() and self._round != record.round:
            self.unattributed += 1
            return None
        return self._count(sample, record, complete=not record.guessed)

    def expired(self, now: float) -> CountedSample | None:
        """Return the sample if it has waited for too long; it stays. `now` is Unix time."""
        sample, ended = self.sample, self._ended
        if sample is None:
            return None
        if self._round == sample.read.round and (ended is None or ended.stepped <= self._counted):
            return None
        soon = sample.read.likely_last or ended is not None
        if now - sample.read.at <= (GRACE_SECONDS if soon else GRACE_SECONDS_AMID):
            return None
        if ended is not None:
            return self._count(sample, ended, over=False)
        if not sample.nonfinite():
            return None
        return self._count(sample, _guess(sample, Outcome.UNKNOWN), over=False, complete=False)

    def _count(self, sample: Sample, ended: RoundEnded, *, over: bool = True, complete: bool = True) -> CountedSample:
        """Decide what is known of a sample. `over`: its round is; `complete`: no more gradients come to it."""
        if self._round != sample.read.round:
            self._round, self._counted, self._sized = sample.read.round, frozenset(), frozenset()
            self.samples += 1
        owners = sample.read.owners if ended.owners is None else ended.owners
        for view in ended.views:
            if view.loss_scale is not None:  # of a scaler that was found at the step
                sample.unscale(number_of(view.loss_scale))
        divided, divisor_is_known = self._divide(sample, ended)

        seen = np.zeros((2, len(owners)))  # norms after the loop, and after the clipping of `clip=`
        for view in ended.views:
            norms = seen[int(view.ours)]
            if view.unchanged:
                mine = sample.present & (owners == view.optimizer)
                norms[mine] = sample.norms[mine]
                continue
            own_scale = 1.0 if view.own_scale is None else number_of(view.own_scale)
            for part_seen in view.parts:
                norms[part_seen.positions] = part_seen.rows()[:, 0] / own_scale
        by_loop = {view.optimizer for view in ended.views if not view.ours} & ended.stepped
        by_us = {view.optimizer for view in ended.views if view.ours} & ended.stepped
        own = {optimizer: sample.present & (owners == optimizer) for optimizer in by_loop | by_us}
        edits = {optimizer: Edit(sample.norms[own[optimizer]], seen[0, own[optimizer]]) for optimizer in by_loop}
        # With several optimizers it is unknown whose norm the loop has given.
        norm = self._norm if len({*owners.tolist()} - {UNOWNED}) < 2 else None
        part = bool(sample.read.table.sharded.any())
        clippings = self._clips.judge(self.samples, edits, norm=norm, divided=divided, part=part)
        edited = with_ours(sample.norms, seen, own, by_us, clippings) if self._clipped else None

        left_out = self._left_out(sample, ended, owners)
        # A scaler that is not known yet skips no step with finite gradients.
        stepped = ended.outcome is Outcome.STEPPED or bool(ended.views) or (over and not sample.nonfinite())
        scale_is_known = sample.unscaled or sample.read.scale_known or stepped
        if not (complete and divisor_is_known and scale_is_known):
            sample = sample.without_sizes()
            # Of these only what is certainly a clipping counts as one, and the others as none.
            clippings = {o: ClipVerdict(None, clipped=bool(clip.clipped), earlier=clip.earlier) for o, clip in clippings.items()}
        shown = ended.stepped | left_out
        new, newly_sized = shown - self._counted, shown - self._sized
        self._counted |= shown
        self._sized |= shown if sample.sized else frozenset()
        return CountedSample(self.samples, sample, ended, owners, shown, left_out, new, newly_sized, clippings, edited)

    def _divide(self, sample: Sample, ended: RoundEnded) -> tuple[bool, bool]:
        """Divide by what the loop has reported; return whether it has, and whether no divisor is left.

        A loop that reported divisors recently may have meant this round when it reported one for another.
        """
        if sample.read.at_step:  # they were divided already
            return False, True
        divisor = None if ended.divisor is None else number_of(ended.divisor)
        if divisor is None or not 0 < divisor < math.inf:
            last = max((self._divided.get(optimizer, -UNREPORTED) for optimizer in ended.stepped), default=-UNREPORTED)
            return False, self.samples - last >= UNREPORTED
        self._divided |= dict.fromkeys(ended.stepped, self.samples)
        sample.divide(divisor)
        return True, True

    def _left_out(self, sample: Sample, ended: RoundEnded, owners: IntArray) -> frozenset[int]:
        """Return the optimizers whose step a gradient scaler left out, while others stepped.

        They step after such backwards whenever their gradients are finite. A generator's backward writes gradients
        of the discriminator as well, whose optimizer steps in no such round.
        """
        left_out = {view.optimizer for view in ended.views if view.found_inf is not None and number_of(view.found_inf)}
        if ended.outcome is Outcome.STEPPED:
            kind = frozenset(owners[sample.present].tolist()) - {UNOWNED}
            for optimizer in kind:
                if optimizer in ended.stepped:
                    self._steps_if_finite.setdefault((kind, optimizer), True)
                elif not sample.nonfinite(owners == optimizer):
                    self._steps_if_finite[kind, optimizer] = False
                elif self._steps_if_finite.get((kind, optimizer), False):
                    left_out.add(optimizer)
        return frozenset(left_out)


def _guess(sample: Sample, outcome: Outcome) -> RoundEnded:
    """Return the end of a round of which it is unknown which optimizers stepped."""
    owners = sample.read.owners
    mine = frozenset(np.unique(owners[sample.present]).tolist())
    return RoundEnded(sample.read.round, outcome, owners, sample.read.usual & mine or mine, {})
