"""PendingSample: the sample whose round is not over yet, and what of its round was counted before.

A sample is *pending* until its round is closed: a later backward of the round may replace it, and only what the stepping
optimizers own is counted. One that stays pending for `PATIENCE` seconds is counted with the outcome "unknown", so that a NaN
is seen even if the loop hangs right after it; it is not counted again when its round goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.samples import Sample
from torch_grad_exporter.transfer.events import AfterClip, Captured, Closed, Outcome

PATIENCE = 1.0
PATIENCE_AMID = 10.0
"""Seconds after which a pending sample is counted although the outcome of its step is unknown; the longer one while more
backwards of its round may follow, as at the start of a run that accumulates."""


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A sample that is to be counted, with what is known of its step.

    `after`: what the optimizers saw. `over`: nothing more can come to its round. `counted`: the optimizers whose part of the
    round was counted before; `measured`: those of them whose sizes were known then.
    """

    sample: Sample
    after: tuple[AfterClip, ...]
    closed: Closed
    over: bool
    counted: frozenset[int]
    measured: frozenset[int]


@dataclass(slots=True)
class PendingSample:
    """Holds one sample at most. `samples`: rounds of which something was counted."""

    samples: int = 0
    _sample: Sample | None = None
    _after: list[AfterClip] = field(default_factory=list)
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
        self._sample, self._after = new, []
        return ended

    def seen_after(self, event: AfterClip) -> None:
        """Takes what an optimizer saw of the gradients."""
        if self._sample is not None and self._sample.captured.round == event.round:
            self._after.append(event)

    def closed_by(self, event: Closed) -> Ended | None:
        """What the end of a round ends."""
        sample = self._sample
        if sample is None or sample.captured.round != event.round:
            return None
        self._sample = None
        return self._end(sample, event, over=True)

    def expired(self, now: float) -> Ended | None:
        """The sample if it has been pending for too long; it stays. `now` is Unix time."""
        if self._sample is None or self._round == self._sample.captured.round:
            return None
        captured = self._sample.captured
        if now - captured.at <= (PATIENCE if captured.likely_last else PATIENCE_AMID):
            return None
        return self._guessed(self._sample, Outcome.UNKNOWN, over=False)

    def count(self, optimizers: frozenset[int], *, sized: bool) -> None:
        """Notes that these optimizers' parts of the round were counted, and whether with their sizes."""
        self._counted |= optimizers
        if sized:
            self._measured |= optimizers

    def _guessed(self, sample: Sample, outcome: Outcome, *, over: bool = True) -> Ended:
        """The pending sample, though it is not known which optimizers stepped."""
        owners = sample.captured.owners
        stepped = frozenset(event.optimizer for event in self._after) or sample.captured.usual
        stepped = stepped or frozenset(np.unique(owners[sample.present]).tolist())
        return self._end(sample, Closed(sample.captured.round, outcome, owners, owners, stepped, {}), over=over)

    def _end(self, sample: Sample, closed: Closed, *, over: bool) -> Ended:
        if self._round != sample.captured.round:
            self._round, self._counted, self._measured = sample.captured.round, frozenset(), frozenset()
            self.samples += 1
        return Ended(sample, tuple(self._after), closed, over, self._counted, self._measured)
