"""Policies that clip: without a memory, and with one, whose threshold follows the norms or the loss of the training so far.

A norm that is not finite, or exactly 0, enters no memory. All memories are float64 if the device has it: a variance that is
small against its mean is lost in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_grad_exporter.actions.clip.policy import (
    EPSILON,
    Decision,
    GradientNorms,
    Memory,
    NormGroups,
    Policy,
    Scope,
    finite,
    remembered,
    shrink,
)
from torch_grad_exporter.arguments import check_number, check_whole, some
from torch_grad_exporter.statistics.device import to_device, wide


@dataclass(frozen=True)
class MaxNorm(Policy):
    """Norms are at most `max_norm`: gradients are multiplied by `min(1, max_norm / (norm + 1e-6))`.

    Source: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks" (arXiv:1211.5063),
    with the small constant of `torch.nn.utils.clip_grad_norm_`. Over the whole model it gives the same bits as that function, in
    float32, float64 and bfloat16. Norms of float16 gradients are measured in float32, since they overflow at 65,504.
    """

    max_norm: float
    scope: Scope = "model"

    def __post_init__(self) -> None:
        check_number(self.shown("max_norm"), self.max_norm, above=0.0, example=1.0)
        self.check_scope("model", "layer", "unit")

    @property
    def exact(self) -> bool:
        """Whether it gives the bits of `clip_grad_norm_`: over the whole model."""
        return self.scope == "model"

    def decide(self, measured: GradientNorms, _memory: Memory, /) -> Decision:
        """Apply the same limit to all groups."""
        # A Python number leaves the norms in their own type, which the bits of `clip_grad_norm_` need.
        return Decision(self.max_norm, shrink(measured.norms, float(self.max_norm)))


@dataclass(frozen=True)
class MaxValue(Policy):
    """Elements of gradients are limited to `[-value, value]`, as by `torch.nn.utils.clip_grad_value_`.

    Source: T. Mikolov, "Statistical Language Models Based on Neural Networks" (thesis, Brno 2012), section 3.2.2. A gradient
    whose norm over the whole model is not finite is left alone, so that an infinity is still one afterwards.
    """

    value: float

    def __post_init__(self) -> None:
        check_number(self.shown("value"), self.value, above=0.0, example=0.5)

    def decide(self, measured: GradientNorms, _memory: Memory, /) -> Decision:
        """Limit elements, unless the norm is not finite."""
        device = measured.total.device
        # In the widest type, so that the limit of float64 gradients is not rounded.
        limit = torch.full((), self.value, device=device, dtype=wide(device))
        return Decision(self.value, limit=torch.where(finite(measured.total), limit, torch.inf))


@dataclass(frozen=True)
class AGC(Policy):
    """Adaptive gradient clipping: each unit's gradient norm is at most `clip_factor` times the norm of the unit's weights.

    Source: A. Brock, S. De, S. L. Smith, K. Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization"
    (arXiv:2102.06171), equation 3: where `|G| / max(|W|, eps)` exceeds `clip_factor`, `G` becomes
    `clip_factor * max(|W|, eps) / |G| * G`. Units are rows of weights and output channels of convolutions; biases, gains and
    scalars are one unit. `scope="layer"` takes whole layers for units.
    """

    clip_factor: float = 0.01
    eps: float = 1e-3
    scope: Scope = "unit"
    needs_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self.shown("clip_factor"), self.clip_factor, above=0.0, example=0.01)
        check_number(self.shown("eps"), self.eps, above=0.0, example=1e-3)
        self.check_scope("layer", "unit")

    def decide(self, measured: GradientNorms, _memory: Memory, /) -> Decision:
        """Limit each unit by the norm of its weights."""
        norms, weights = measured.norms, measured.weights
        if weights is None:
            raise RuntimeError("AGC was measured without the norms of the weights")
        limit = weights.clamp(min=self.eps) * self.clip_factor
        clipped = (norms > limit) & finite(norms)
        # The smallest norm is that of the authors' program.
        return Decision(limit, torch.where(clipped, limit / norms.clamp(min=1e-6), 1.0))


@dataclass(frozen=True)
class LayerScale(Policy):
    """Gradients of a layer are multiplied by the factor of the first expression that matches its name.

    A factor of 0 stops a layer's gradient, one above 1 strengthens a vanishing one. Other layers are left alone. No source: it is
    a multiplication. An expression that matches no layer raises, and so does a factor below 0.
    """

    factors: Mapping[str, float]
    scope: ClassVar[Scope] = "layer"
    settings: ClassVar[frozenset[str]] = frozenset({"factors"})

    def __post_init__(self) -> None:
        if not isinstance(self.factors, Mapping) or not self.factors:
            raise ValueError(f"{self.shown('factors')}: expected a mapping such as {{'head': 0.1}}")
        for expression, factor in self.factors.items():
            try:
                re.compile(expression)
            except (TypeError, re.error) as error:
                raise ValueError(f"LayerScale(factors={{{expression!r}: ...}}): expected a regular expression ({error})") from None
            check_number(f"LayerScale(factors={{{expression!r}: {factor!r}}})", factor, example=0.1)
        object.__setattr__(self, "factors", dict(self.factors))  # the user may change the mapping later

    def check_layers(self, layers: Sequence[str], /) -> None:
        """Raise `ValueError` unless each expression matches a layer now; the layer may go later."""
        for expression in self.factors:
            if not any(re.search(expression, layer) for layer in layers):
                raise ValueError(f"LayerScale(factors={{{expression!r}: ...}}): no layer matches; layers: {some(layers, 10)}")

    def start(self, groups: NormGroups, /) -> Memory:
        """Return the factor of each layer."""
        factors = [next((f for e, f in self.factors.items() if re.search(e, layer)), 1.0) for layer in groups.layers]
        return {"factors": to_device(torch.tensor(factors, dtype=groups.dtype, device="cpu"), groups.device)}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Multiply by the factors; no norm is too large."""
        return Decision(torch.inf, torch.where(finite(measured.norms), memory["factors"], 1.0))


@dataclass(frozen=True)
class AutoClip(Policy):
    """Norms are at most the `percentile` of all norms so far, including that of this step, as by `MaxNorm`.

    Source: P. Seetharaman, G. Wichern, B. Pardo, J. Le Roux, "AutoClip: Adaptive Gradient Clipping for Source Separation
    Networks" (arXiv:2007.14469), algorithm 1. Percentiles are interpolated linearly, as numpy does. The paper keeps every norm;
    here the last `history_size` are kept.
    """

    percentile: float = 10.0
    history_size: int = 1000
    scope: Scope = "model"

    def __post_init__(self) -> None:
        check_number(self.shown("percentile"), self.percentile, most=100.0, example=10.0)
        check_whole(self.shown("history_size"), self.history_size, example=1000)
        self.check_scope("model", "layer")

    def start(self, groups: NormGroups, /) -> Memory:
        """Return an empty history. Places without a norm hold infinity, which sorts behind all norms."""
        return {"history": groups.full(math.inf, self.history_size), "count": groups.full(0, dtype=torch.int64)}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Enter the norms into the history, and take its percentile."""
        history, count = memory["history"], memory["count"]
        norms = measured.norms.to(history.dtype)
        entered = remembered(norms)
        # A ring: the newest norm replaces the oldest. A norm that is not remembered writes back what is there.
        place = (count % self.history_size)[None]
        history.scatter_(0, place, torch.where(entered, norms[None], history.gather(0, place)))
        count += entered
        threshold = self._percentile(history.sort(dim=0).values, count.clamp(max=self.history_size))
        # A threshold may be 0, and 0 over a norm that is not finite is NaN.
        return Decision(threshold, torch.where(finite(norms), shrink(norms, threshold), 1.0))

    def _percentile(self, ordered: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the percentile of the first `count` ordered norms, infinity if there are none."""
        last = (count - 1).clamp(min=0)
        place = last.to(ordered.dtype) * (self.percentile / 100)
        low = place.floor().long()
        below = ordered.gather(0, low[None])[0]
        above = ordered.gather(0, torch.minimum(low + 1, last)[None])[0]
        return torch.where(count > 0, below + (above - below) * (place - low), math.inf)


@dataclass(frozen=True)
class ZClip(Policy):
    """A norm that lies more than `z_thresh` standard deviations above its moving mean is a spike, and is clipped.

    Source: A. Kumar, L. Owen, N. R. Chowdhury, F. Güra, "ZClip: Adaptive Spike Mitigation for LLM Pre-Training"
    (arXiv:2504.02507), with the small constant of the authors' program. With the z-score `z = (norm - mean) / (std + 1e-6)`,
    a norm with `z > z_thresh` becomes `mean + z_thresh² / z * std`. Mean and variance are moving averages with the weight
    `alpha`, into which the clipped norm enters; they begin with those of the first `warmup_steps` norms, which are not clipped.
    `max_norm` is a limit for all steps, those too; the authors' program has 1.0 there by default.
    """

    alpha: float = 0.97
    z_thresh: float = 2.5
    warmup_steps: int = 25
    max_norm: float | None = None
    scope: Scope = "model"

    def __post_init__(self) -> None:
        check_number(self.shown("alpha"), self.alpha, above=0.0, most=1.0, example=0.97)
        if self.alpha == 1:
            raise ValueError("ZClip(alpha=1): expected a number below 1, such as 0.97: the mean would never change")
        check_number(self.shown("z_thresh"), self.z_thresh, above=0.0, example=2.5)
        check_whole(self.shown("warmup_steps"), self.warmup_steps, least=2, example=25)  # one norm has no deviation
        if self.max_norm is not None:
            check_number(self.shown("max_norm"), self.max_norm, above=0.0, example=1.0)
        self.check_scope("model", "layer")

    def start(self, groups: NormGroups, /) -> Memory:
        """Return a memory of no norms."""
        return {"mean": groups.full(0.0), "variance": groups.full(0.0), "count": groups.full(0, dtype=torch.int64)}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Compare the norms with mean and deviation before this step, then enter them."""
        mean, deviation = memory["mean"], memory["variance"].sqrt()
        norms, warm = measured.norms.to(mean.dtype), memory["count"] < self.warmup_steps
        scaled = (norms - mean) / (deviation + EPSILON)
        spike = ~warm & (scaled > self.z_thresh)
        effective = torch.where(spike, mean + deviation * (self.z_thresh**2 / scaled), norms)
        threshold = torch.where(warm, math.inf, mean + self.z_thresh * (deviation + EPSILON))
        allowed = effective
        if self.max_norm is not None:
            allowed, threshold = effective.clamp(max=self.max_norm), threshold.clamp(max=self.max_norm)
        clipped = (norms > allowed) & finite(norms)
        self._enter(effective, remembered(norms), warm, memory)
        return Decision(threshold, torch.where(clipped, allowed / (norms + EPSILON), 1.0))

    def _enter(self, norms: torch.Tensor, entered: torch.Tensor, warm: torch.Tensor, memory: Memory) -> None:
        """Update mean and variance: plain ones during the warm-up, then moving ones."""
        mean, variance, count = memory["mean"], memory["variance"], memory["count"]
        weight = torch.where(warm, 1 / (count.to(mean.dtype) + 1), 1 - self.alpha)
        delta = norms - mean
        later = mean + weight * delta
        # A plain variance takes the deviations from the means before and after, a moving one twice that from the mean after.
        squares = (norms - later) * torch.where(warm, delta, norms - later)
        spread = (1 - weight) * variance + weight * squares
        memory["mean"] = torch.where(entered, later, mean)
        memory["variance"] = torch.where(entered, spread, variance)
        count += entered


@dataclass(frozen=True)
class Plateau(Policy):
    """Like `MaxNorm`, with a limit that is multiplied by `factor` after `patience` epochs in a row without a smaller loss.

    Source: the rule of `torch.optim.lr_scheduler.ReduceLROnPlateau`, applied to the limit. But that one, and clipping made with
    it, acts one epoch later, after `patience + 1` of them, and takes only a loss that is smaller by a ten-thousandth for better.

    `observe(loss)` of the clipper gives it the loss of an epoch; `observe(loss, epoch=)` any number of losses per epoch, whose mean
    counts once the next epoch begins. All ranks have to observe the same loss, such as its mean over them: limits that differ make
    replicas differ.
    """

    max_norm: float = 1.0
    factor: float = 0.5
    patience: int = 10
    min_norm: float = 0.0
    scope: Scope = "model"
    needs_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self.shown("max_norm"), self.max_norm, above=0.0, example=1.0)
        check_number(self.shown("factor"), self.factor, above=0.0, most=1.0, example=0.5)
        check_whole(self.shown("patience"), self.patience, example=10)
        check_number(self.shown("min_norm"), self.min_norm, most=self.max_norm, example=0.01)
        self.check_scope("model", "layer", "unit")

    def start(self, groups: NormGroups, /) -> Memory:
        """Return one limit for all groups, before the first epoch."""
        first = {"max_norm": float(self.max_norm), "best": math.inf, "bad_epochs": 0.0, "loss": 0.0, "losses": 0.0}
        return {name: torch.full((), value, device=groups.device, dtype=groups.dtype) for name, value in first.items()}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Apply the present limit to all groups."""
        limit = memory["max_norm"]
        return Decision(limit, shrink(measured.norms.to(limit.dtype), limit))

    def observe(self, loss: torch.Tensor, memory: Memory, /) -> None:
        """Add a loss to its epoch."""
        memory["loss"] += loss
        memory["losses"] += 1

    def end_epoch(self, memory: Memory, /) -> None:
        """Judge the epoch by its mean loss. A loss that is NaN is not smaller. Without a loss nothing changes."""
        seen, loss = memory["losses"] > 0, memory["loss"] / memory["losses"].clamp(min=1)
        better = seen & (loss < memory["best"])
        memory["best"] = torch.where(better, loss, memory["best"])
        bad = torch.where(better, 0.0, memory["bad_epochs"] + seen)
        # No `if` anywhere: it would wait for the device.
        enough = bad >= self.patience
        smaller = (memory["max_norm"] * self.factor).clamp(min=self.min_norm)
        memory["max_norm"] = torch.where(enough, smaller, memory["max_norm"])
        memory["bad_epochs"] = torch.where(enough, 0.0, bad)
        memory["loss"], memory["losses"] = torch.zeros_like(loss), torch.zeros_like(loss)
