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

    def replaced_by(self, event: Captured) -> Ended | None:
        """What a capture ends: that of another round leaves the outcome of the pending sample unknown."""
        if self._sample is None:
            return None
        if self._sample.captured.round != event.round:
            return self._guessed(Outcome.UNKNOWN)
        return self._guessed(Outcome.SKIPPED) if self._thrown_away(event) else None

    def begin(self, event: Captured) -> None:
        """Takes the place of the sample that was pending."""
        if self._thrown_away(event):
            self._round = -1
        self._sample, self._after = Sample.of(event), []

    def seen_after(self, event: AfterClip) -> None:
        """Takes what an optimizer saw of the gradients."""
        if self._sample is not None and self._sample.captured.round == event.round:
            self._after.append(event)

    def closed_by(self, event: Closed) -> Ended | None:
        """What the end of a round ends."""
        if self._sample is None or self._sample.captured.round != event.round:
            return None
        return self._end(self._sample, event, over=True)

    def clear(self, event: Closed) -> None:
        """Drops the sample of a round that is over."""
        if self._sample is not None and self._sample.captured.round == event.round:
            self._sample = None

    def expired(self, now: float) -> Ended | None:
        """The sample if it has been pending for too long; it stays. `now` is Unix time."""
        if self._sample is None or self._round == self._sample.captured.round:
            return None
        captured = self._sample.captured
        if now - captured.at <= (PATIENCE if captured.likely_last else PATIENCE_AMID):
            return None
        return self._guessed(Outcome.UNKNOWN, over=False)

    def count(self, optimizers: frozenset[int], *, sized: bool) -> None:
        """Notes that these optimizers' parts of the round were counted, and whether with their sizes."""
        self._counted |= optimizers
        if sized:
            self._measured |= optimizers

    def _thrown_away(self, event: Captured) -> bool:
        """Whether the pending gradients were thrown away before this capture of the same round.

        No training continues from such gradients: this was a skipped step and not the first of two passes.
        """
        pending = self._sample
        return pending is not None and pending.captured.round == event.round and event.again and pending.nonfinite()

    def _guessed(self, outcome: Outcome, *, over: bool = True) -> Ended | None:
        """The pending sample, though it is not known which optimizers stepped."""
        sample = self._sample
        if sample is None:
            return None
        owners = sample.captured.owners
        stepped = frozenset(event.optimizer for event in self._after) or sample.captured.usual
        stepped = stepped or frozenset(np.unique(owners[sample.present]).tolist())
        return self._end(sample, Closed(sample.captured.round, outcome, owners, owners, stepped, {}), over=over)

    def _end(self, sample: Sample, closed: Closed, *, over: bool) -> Ended:
        if self._round != sample.captured.round:
            self._round, self._counted, self._measured = sample.captured.round, frozenset(), frozenset()
            self.samples += 1
        return Ended(sample, tuple(self._after), closed, over, self._counted, self._measured)
