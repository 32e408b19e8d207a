"""LocalNormTotals: this rank's norm, and the gradient noise scale that follows from it or from a micro-batch's.

The simple noise scale is B_simple = tr(Sigma) / |G|^2: the variance of the gradient of a single training example, summed
over all parameters, divided by the squared norm of the mean gradient. At this batch size noise and signal are equal: well
below it, twice the batch is worth nearly twice the step; well above it, a larger batch gains hardly anything.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training", 2018
(arXiv:1812.06162), appendix A.1. A gradient over B examples has E|G_B|^2 = |G|^2 + tr(Sigma) / B. So two batch sizes, here
the b examples of one rank and the B of all ranks together, or those of a micro-batch and of all that are accumulated, give
estimates of both terms that are right on average:

    |G|^2     = (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

The mean of ratios is not the ratio of means, so each is averaged over samples on its own before they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.inspection.local_gradients import LocalMeasurement
from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.statistics.combine import length
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import UNOWNED, Inspected

# The factor of a sample's weight after each further one: a mean over about 100 samples, whose noise is a tenth of a single one's.
# A change of the noise scale by learning shows within minutes, and one odd batch moves it by 2 %.
MEMORY = 0.98

# Samples before which there is no noise scale, like a baseline. The first ones weigh as much as those that follow.
ENOUGH = 20

# Rounds over which observed examples are counted: at least, and until older ones are halved.
BATCHES_ENOUGH, BATCHES_REMEMBERED = 8, 512


@dataclass(slots=True)
class NoiseScale:
    """The two terms, averaged over samples exponentially, with equal weights."""

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def add(self, local: float, reduced: float, *, batch: float, whole: float) -> None:
        """Add squared norms over `batch` examples and over `whole`, which include those; non-finite ones are left out."""
        if not 0 < batch < whole or not math.isfinite(local + reduced):
            return
        signal = (whole * reduced - batch * local) / (whole - batch)
        noise = (local - reduced) / (1 / batch - 1 / whole)
        if math.isfinite(signal) and math.isfinite(noise):
            self.count += 1
            keep = max(MEMORY * (1 - MEMORY ** (self.count - 1)), 0.0) / (1 - MEMORY**self.count)
            self.signal = keep * self.signal + (1 - keep) * signal
            self.noise = keep * self.noise + (1 - keep) * noise

    @property
    def value(self) -> float | None:
        """The noise scale in training examples, None while it is unknown."""
        if self.count < ENOUGH or self.signal <= 0 or self.noise < 0:
            return None
        ratio = self.noise / self.signal
        return ratio if math.isfinite(ratio) else None


@dataclass(frozen=True, slots=True)
class LocalValues:
    """Of one optimizer's parameters, the local norm of the last sample and the noise scale; None where unknown."""

    norm: float | None
    noise_scale: float | None


class LocalNormTotals:
    """The local norms of optimizers. Each is added to the sample that it came with once that counts.

    Belongs to the worker, but for `values`, which is replaced and never changed.
    """

    def __init__(self) -> None:
        self.values: Mapping[int, LocalValues] = {}  # by the number of the optimizer
        self._last: tuple[int, LocalMeasurement, FloatArray] | None = None  # the number of its round, and its norms
        self._scales: dict[int, NoiseScale] = {}
        # Which round an observed number of examples belongs to is unknown. Counted are the rounds from one observation to another,
        # and the examples of all observations but the first.
        self._samples = self._rounds = 0.0
        self._since = 0  # rounds since the last observation
        self._observed = False  # whether there was one: then that is the source

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take what was measured in the last backward of a round, which may be nothing."""
        self._last = None
        if isinstance(record.data, LocalMeasurement):
            self._last = record.round, record.data, np.concatenate([np.zeros(0), *values])

    def observed(self, name: str, value: float) -> None:
        """Take a number of training examples."""
        if name != "samples":
            return
        self._rounds += self._since if self._observed else 0
        self._since, self._observed = 0, True
        if self._rounds and value >= 0 and math.isfinite(value):
            self._samples += value
        if self._rounds > BATCHES_REMEMBERED:
            self._rounds, self._samples = self._rounds / 2, self._samples / 2

    def rounds_over(self, rounds: int) -> None:
        """Count rounds that are over."""
        self._since += rounds

    def counted(self, sample: CountedSample) -> None:
        """Make the sample the last one of what the stepping optimizers own."""
        norms, last = {number: local.norm for number, local in self.values.items()}, self._last
        if last is None or last[0] != sample.sample.read.round or sample.sample.read.at_step:
            norms |= dict.fromkeys(norms.keys() & sample.shown)
        else:
            for number in sample.shown:
                mine = (sample.owners == number) & last[1].reduced
                if (mine & sample.sample.present).any():
                    if UNOWNED in norms and number != UNOWNED and len(norms) == 1:
                        norms, self._scales = {}, {number: self._scales[UNOWNED]}
                    norms[number] = self._enter(sample, number, mine, *last[1:])
        self.values = {number: LocalValues(norm, self._scales[number].value) for number, norm in norms.items()}

    def _enter(
        self, counted: CountedSample, number: int, mine: BoolArray, measured: LocalMeasurement, norms: FloatArray
    ) -> float | None:
        """Return the local norm of an optimizer's parameters, and add it to the noise scale."""
        sample, positions = counted.sample, measured.positions
        # Parameters that had a gradient other than zero before the round's first backward.
        dirty = np.zeros(len(mine), dtype=np.bool_)
        dirty[-1 - positions[(positions < 0) & (norms != 0)]] = True
        scale = self._scales.setdefault(number, NoiseScale())
        if not sample.sized or (mine & dirty).any():
            return None
        local = length(norms[(positions >= 0) & mine[positions]]) / (sample.scale * sample.divisor * sample.read.divisor)
        reduced = length(sample.norms[mine & sample.present])
        parts, batch = measured.micro_batches, float(measured.samples) if measured.samples is not None else None
        if self._observed:
            known = self._rounds >= BATCHES_ENOUGH and self._samples > 0
            batch = self._samples / self._rounds / parts if known else None
        if batch is not None and number in counted.newly_sized:
            # The sizes of the other ranks are unknown here, and assumed to be equal. A sum over micro-batches, of losses that the
            # loop has divided or not, is compared with as many times the first.
            scale.add((parts * local) ** 2, reduced * reduced, batch=batch, whole=batch * parts * measured.ranks)
        return local if parts == 1 else None
