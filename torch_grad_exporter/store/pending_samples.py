"""PendingSample: the sample whose round is not over yet, and what of its round was counted before.

A sample is *pending* until its round is closed: a later backward of the round may replace it, and only what the stepping
optimizers own is counted. So the norms of a round that is not over are not shown, however long it takes. But a NaN is to be seen
even if the loop hangs right after it: what is not finite is counted after `PATIENCE` seconds, with the outcome "unknown", and not
again when its round goes on. After a step the gradients are known to be complete: where others might step as well, the sample is
shown after that time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.samples import Sample, values
from torch_grad_exporter.aggregation.tables import UNOWNED
from torch_grad_exporter.transfer.events import AfterClip, Captured, Closed, Divided, Outcome, Withdrawn

PATIENCE = 1.0
PATIENCE_AMID = 10.0
"""Seconds after which is counted what is not finite of a pending sample, although the outcome of its step is unknown; the longer
one while more backwards of its round may follow, as at the start of a run that accumulates."""

DIVISORS = 4
"""Rounds of which it is remembered by what the loop divides: the one of the pending sample, and those told of since."""


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A sample that is to be counted, with what is known of its step. It may be counted again when more is known.

    `number`: of the sample, from 1. `after`: what the optimizers saw. `over`: nothing more can come to its round; `whole`: nor to
    its gradients. `counted`: the optimizers whose part of the round was counted before; `measured`: those of them whose sizes were
    known then. `given`: the global norm before clipping that the loop gave of the round; `told`: it has said by what it divides
    the gradients.
    """

    number: int
    sample: Sample
    after: tuple[AfterClip, ...]
    closed: Closed
    over: bool
    whole: bool
    counted: frozenset[int]
    measured: frozenset[int]
    given: float | None = None
    told: bool = False


@dataclass(slots=True)
class PendingSample:
    """Holds one sample at most. `samples`: rounds of which something was counted; `unattributed`: not, as it is not known whose."""

    samples: int = 0
    unattributed: int = 0
    _sample: Sample | None = None
    _after: list[AfterClip] = field(default_factory=list)
    _stepped: Closed | None = None
    """What its round has come to by the steps so far."""
    _given: float | None = None
    """The global norm before clipping that was given since the capture."""
    _divisors: dict[int, float] = field(default_factory=dict)
    """Of the last rounds of which the loop has told it, by what their gradients are divided."""
    _told_again: bool = False
    """Whether the loop has told it once more since the capture: where the step is skipped it may have meant the next round."""
    _round: int = -1
    """The last round of which something was counted; the two below are of that round."""
    _counted: frozenset[int] = frozenset()
    _measured: frozenset[int] = frozenset()

    def begin(self, event: Captured) -> Ended | None:
        """Takes the place of the sample that was pending; what that ends: one of another round, whose outcome stays unknown.

        No training continues from gradients that are not finite and were thrown away: that was a skipped step and not the first
        of two passes.
        """
        ended, sample, new = None, self._sample, Sample.of(event)
        if sample is not None and sample.captured.round != event.round:
            ended = self._guessed(sample, Outcome.UNKNOWN)
        elif sample is not None and event.again and sample.nonfinite():
            ended = self._guessed(sample, Outcome.SKIPPED)
            self._round = -1
        # Where no backward is seen, each optimizer's step reads the round anew, with what those before have left.
        same = ended is None and event.at_step and sample is not None
        self._after = [one for one in self._after if one.ours] if same else []
        self._sample, self._stepped, self._given, self._told_again = new, None, None, False
        new.divide(self._told(event) or 1.0)
        return ended

    def _told(self, event: Captured) -> float | None:
        """By what the loop has told to divide what was captured, if it has."""
        return None if event.at_step else self._divisors.get(event.round)

    def given(self, norm: float) -> None:
        """Takes the global norm before clipping of the round that is not over, if there is one."""
        if self._sample is not None and self._stepped is None and 0 < norm < math.inf:
            self._given = norm

    def divided(self, event: Divided) -> None:
        """Takes by what the loop divides the gradients of a round after its backwards."""
        divisor = event.divisor if isinstance(event.divisor, float) else float(values(event.divisor.ready())[0])
        if not 0 < divisor < math.inf:
            return
        sample = self._sample
        if sample is not None and sample.captured.round == event.round and not sample.captured.at_step:
            before = self._told(sample.captured)
            self._told_again |= before is not None
            sample.divide(divisor / (before or 1.0))
        self._divisors.pop(event.round, None)
        self._divisors[event.round] = divisor
        if len(self._divisors) > DIVISORS:
            del self._divisors[next(iter(self._divisors))]

    def seen_after(self, event: AfterClip) -> None:
        """Takes what an optimizer saw of the gradients."""
        if self._sample is not None and self._sample.captured.round == event.round:
            self._after.append(event)

    def closed_by(self, event: Closed) -> Ended | None:
        """What the end of a round ends, or a step after which others may still come."""
        sample = self._sample
        if sample is None or sample.captured.round != event.round:
            return None
        self._stepped = event
        if not event.final:
            return None
        self._sample = None
        if event.guessed and not sample.nonfinite() and self._round != sample.captured.round:
            self.unattributed += 1
            return None
        return self._end(sample, event, over=True, whole=not event.guessed)

    def withdrawn(self, event: Withdrawn) -> None:
        """Drops what was read of a round."""
        if self._sample is not None and self._sample.captured.round == event.round:
            self._sample = None

    @property
    def waits(self) -> bool:
        """Whether there is a sample."""
        return self._sample is not None

    def expired(self, now: float) -> Ended | None:
        """The sample if it has been pending for too long; it stays. `now` is Unix time."""
        sample, stepped = self._sample, self._stepped
        if sample is None or (self._round == sample.captured.round and (stepped is None or stepped.stepped <= self._counted)):
            return None
        likely_last = sample.captured.likely_last or stepped is not None
        if now - sample.captured.at <= (PATIENCE if likely_last else PATIENCE_AMID):
            return None
        if stepped is not None:
            return self._end(sample, stepped, over=False)
        return self._guessed(sample, Outcome.UNKNOWN, over=False) if sample.nonfinite() else None

    def count(self, optimizers: frozenset[int], *, sized: bool) -> None:
        """Notes that these optimizers' parts of the round were counted, and whether with their sizes."""
        self._counted |= optimizers
        if sized:
            self._measured |= optimizers

    def _guessed(self, sample: Sample, outcome: Outcome, *, over: bool = True) -> Ended:
        """The pending sample, though it is not known which optimizers stepped."""
        owners = sample.captured.owners
        mine = frozenset(np.unique(owners[sample.present]).tolist())
        stepped = frozenset(event.optimizer for event in self._after) or sample.captured.usual & mine or mine
        closed = Closed(sample.captured.round, outcome, owners, stepped, {})
        return self._end(sample, closed, over=over, whole=over)

    def _end(self, sample: Sample, closed: Closed, *, over: bool, whole: bool = True) -> Ended:
        if self._round != sample.captured.round:
            self._round, self._counted, self._measured = sample.captured.round, frozenset(), frozenset()
            self.samples += 1
        told = self._told(sample.captured) is not None
        whole &= not (self._told_again and closed.outcome is Outcome.SKIPPED)
        # With several optimizers it is not known whose norm it is.
        given = self._given if len(frozenset(closed.owners.tolist()) - {UNOWNED}) < 2 else None
        return Ended(self.samples, sample, tuple(self._after), closed, over, whole, self._counted, self._measured, given, told)
