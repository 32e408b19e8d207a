"""Policies without a memory: the decision follows from the gradients of the step, and that of AGC from the weights too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_grad_exporter.actions.clip.policy import (
    Decision,
    GradientNorms,
    Memory,
    NormGroups,
    Policy,
    Scope,
    finite,
    shrink,
)
from torch_grad_exporter.arguments import check_number, some
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
        """Over the whole model it gives the bits of `clip_grad_norm_`."""
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
        """Each expression matches a layer now; the layer may go later."""
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
