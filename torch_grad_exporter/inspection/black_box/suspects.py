"""Suspects: which batches may have caused a problem, as far as the worker sees it while they are still kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from torch_grad_exporter.inspection.black_box.kept import SOURCE, BatchRing
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.store.baselines import Baseline
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import Inspected

NONFINITE, LOSS, NORM = "nonfinite", "loss", "norm"

# Seconds for which batches are kept after a NaN or Inf is over, as after a skipped step, and after a spike, of which a rule
# wants three within ten minutes.
KEPT_SECONDS = {NONFINITE: 60.0, LOSS: 600.0, NORM: 600.0}

# Forwards after one, until which its sample may still come to be counted.
LATE = 2


class Suspects:
    """Pins the batches of the first non-finite gradient or loss, and of the last jumps. Belongs to the worker, but for `of`.

    Records come in the order in which things happened, so a loss belongs to the last forward before it. `finite`: whether the last
    loss or gradient that was seen was finite.
    """

    def __init__(self, ring: BatchRing, requests: Requests, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring, self._requests, self._clock = ring, requests, clock
        self._seen_at: dict[str, float] = {}  # by the reason that pins batches, the last time
        self._baselines = {LOSS: Baseline(loss=True), NORM: Baseline()}
        self.finite = True
        self._forward = -1  # the last one that the mailbox has announced
        self._nonfinite_from = -2  # the forward with which the last NaN or Inf began
        self._spiking: set[str] = set()  # losses or norms whose last value was a spike

    def of(self, kind: str) -> tuple[int, ...]:
        """Return the forwards that are pinned by this reason, none if there are none. From any thread."""
        return self._ring.pins.get(kind, ())

    def written(self, kind: str) -> None:
        """Unpin what was written. From any thread."""
        self._seen_at.pop(kind, None)
        self._ring.pins.pop(kind, None)

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the number of a forward, or what shows whether the gradients after it are finite."""
        if not values:
            self._forward = record.round
            self._ring.seen = record.round - LATE
            for kind, at in tuple(self._seen_at.items()):
                if self._clock() - at > KEPT_SECONDS[kind]:
                    self.written(kind)
        else:
            self._judge(all(np.isfinite(each).all() for each in values), record.round)

    def observed(self, name: str, value: float) -> None:
        """Take a loss."""
        if name == "loss" and not math.isfinite(value):
            self._judge(False, self._forward)
        elif name == "loss":
            self._judge_size(LOSS, value, self._forward)

    def counted(self, sample: CountedSample) -> None:
        """Take a sample, which shows all gradients of its round."""
        number = sample.sample.read.round
        forward = next((batch.number for batch in reversed(tuple(self._ring.batches.values())) if batch.round == number), None)
        if forward is None:
            return
        norm = float(np.sqrt(np.square(sample.sample.norms).sum()))
        if sample.sample.nonfinite():
            self._judge(False, forward)
        elif sample.new and math.isfinite(norm):
            self._judge_size(NORM, norm, forward)

    def rounds_over(self, rounds: int) -> None:
        """Do nothing: rounds alone show nothing."""

    def _judge(self, finite: bool, forward: int) -> None:
        """Pin the batches where NaN or Inf begins: what follows is its consequence."""
        if not finite and self.finite and forward > self._nonfinite_from + 1:  # else it is the same one, seen by another value
            self._nonfinite_from = forward
            self._pin(NONFINITE, forward)
            self._requests.arm(1, SOURCE)
        elif not finite and self.of(NONFINITE):
            self._seen_at[NONFINITE] = self._clock()
        self.finite = finite

    def _judge_size(self, kind: str, value: float, forward: int) -> None:
        """Pin the batches where spikes begin: one after the other, they may be consequences of the first."""
        spike = self._baselines[kind].is_spike(value)
        if spike and kind not in self._spiking:
            self._pin(kind, forward)
        (self._spiking.add if spike else self._spiking.discard)(kind)

    def _pin(self, kind: str, forward: int) -> None:
        forwards = self._ring.latest(forward)
        if forwards:
            self._ring.pins[kind], self._seen_at[kind] = forwards, self._clock()
