"""What follows from local norms on the host: this rank's norm, and the gradient noise scale.

The simple noise scale is B_simple = tr(Sigma) / |G|^2: the variance of the gradient of a single training example, summed over
all parameters, divided by the squared norm of the mean gradient. At this batch size noise and signal are equal: well below it,
twice the batch is worth nearly twice the step; well above it, a larger batch gains hardly anything.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training", 2018
(arXiv:1812.06162), appendix A.1. A gradient over B examples has E|G_B|^2 = |G|^2 + tr(Sigma) / B. So two batch sizes, here the b
examples of one rank and the B of all ranks together, give estimates of both terms that are right on average:

    |G|^2     = (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

The mean of ratios is not the ratio of means, so each is averaged over samples on its own before they are divided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.samples import values
from torch_grad_exporter.aggregation.settlement import Settled
from torch_grad_exporter.aggregation.tables import UNOWNED
from torch_grad_exporter.statistics.combine import length
from torch_grad_exporter.transfer.events import Local

MEMORY = 0.98
"""What is left of a sample's weight after the next one: a mean over some 100 of them, whose noise is a tenth of a single one's.

With 100 samples a change of the noise scale by learning shows within minutes, and one batch that is odd moves it by 2 %.
"""

ENOUGH = 20
"""Samples before which there is no noise scale: as of a baseline. The first ones weigh as much as those that follow."""

BATCHES_ENOUGH = 8
BATCHES_REMEMBERED = 512
"""Rounds over which observed examples are counted: at least, and until older ones are halved."""


@dataclass(slots=True)
class NoiseScale:
    """Averages the two terms over samples, exponentially, with equal weights."""

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def add(self, local: float, reduced: float, *, batch: float, whole: float) -> None:
        """Takes squared norms over `batch` examples and over `whole`, which include those; non-finite ones are left out."""
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
        """The noise scale in training examples, `None` while it is not known."""
        if self.count < ENOUGH or self.signal <= 0 or self.noise < 0:
            return None
        found = self.noise / self.signal
        return found if math.isfinite(found) else None


@dataclass(slots=True)
class Batches:
    """Training examples per round, from what the user observes: which round an observed number belongs to is not known.

    Counted are the rounds from one observation to another, and the examples of all observations but the first.
    """

    _samples: float = 0.0
    _rounds: float = 0.0
    _since: int = 0
    """Rounds since the last observation."""
    _began: bool = False

    def observed(self, samples: float) -> None:
        """Takes an observed number of examples."""
        rounds, self._since = self._since if self._began else 0, 0
        self._began = True
        self._rounds += rounds
        if self._rounds and samples >= 0 and math.isfinite(samples):
            self._samples += samples
        if self._rounds > BATCHES_REMEMBERED:
            self._rounds, self._samples = self._rounds / 2, self._samples / 2

    def stepped(self, rounds: int) -> None:
        """So many rounds are over."""
        self._since += rounds

    @property
    def known(self) -> bool:
        """Whether there was an observation: then that is the source."""
        return self._began

    @property
    def size(self) -> float | None:
        """Training examples per round; `None` while it is not known."""
        return self._samples / self._rounds if self._rounds >= BATCHES_ENOUGH and self._samples > 0 else None


@dataclass(frozen=True, slots=True)
class LocalValues:
    """Of one optimizer's parameters, the local norm of the last sample and the noise scale; `None` where not known."""

    norm: float | None
    noise_scale: float | None


@dataclass(slots=True)
class LocalTotals:
    """Adds up `Local` events, each of them together with the sample that it came with."""

    batches: Batches = field(default_factory=Batches)
    _event: Local | None = None
    _norms: dict[int, float | None] = field(default_factory=dict)
    _scales: dict[int, NoiseScale] = field(default_factory=dict)

    def snapshot(self) -> dict[int, LocalValues]:
        """The values by optimizer."""
        return {number: LocalValues(norm, self._scales[number].value) for number, norm in self._norms.items()}

    def take(self, event: Local | None) -> None:
        """The event of the capture that is pending; `None`: that one is new, and has none so far."""
        self._event = event

    def publish(self, settled: Settled) -> None:
        """Makes the sample the last one of what the stepping optimizers own."""
        sample, owners, event = settled.sample, settled.closed.owners, self._event
        if event is None or event.round != sample.captured.round:
            self._norms |= dict.fromkeys(self._norms.keys() & settled.shown)
            return
        positions = np.concatenate([np.zeros(0, dtype=np.int64), *(part.positions for part in event.parts)])
        norms = np.concatenate([np.zeros(0), *(values(part.ticket.ready()) for part in event.parts)])
        dirty = np.zeros(len(owners), dtype=np.bool_)
        dirty[-1 - positions[(positions < 0) & (norms != 0)]] = True
        for number in settled.shown:
            mine = (owners == number) & event.reduced
            if (mine & sample.present).any():
                known = sample.sized and not (mine & dirty).any()
                factor = sample.scale * sample.divisor
                local = length(norms[(positions >= 0) & mine[positions]]) / factor if known else None
                reduced = length(sample.norms[mine & sample.present])
                self._enter(number, local, reduced, event, new=number in settled.unmeasured)

    def _enter(self, number: int, local: float | None, reduced: float, event: Local, *, new: bool) -> None:
        if UNOWNED in self._norms and number != UNOWNED and len(self._norms) == 1:
            self._norms, self._scales = {}, {number: self._scales[UNOWNED]}
        self._norms[number] = local
        scale = self._scales.setdefault(number, NoiseScale())
        batch = self.batches.size if self.batches.known else event.samples
        if local is not None and batch is not None and new:
            # The ranks' own sizes are not known here: taken for equal.
            scale.add(local * local, reduced * reduced, batch=batch, whole=batch * event.ranks)
