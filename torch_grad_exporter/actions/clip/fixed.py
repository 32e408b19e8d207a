"""Policies without a memory: what they do follows from the gradients of the step, and of AGC from the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_grad_exporter.actions.clip.policy import (
    Decision,
    Groups,
    Measured,
    Memory,
    Plain,
    Scope,
    finite,
    number,
    scope_among,
    shrink,
)


@dataclass(frozen=True)
class MaxNorm(Plain):
    """Norms are at most `max_norm`: gradients are multiplied by `min(1, max_norm / (norm + 1e-6))`.

    Source: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks" (arXiv:1211.5063),
    with the small constant of `torch.nn.utils.clip_grad_norm_`. Over the whole model it gives the same bits as that function, in
    float32, float64 and bfloat16. Norms of float16 gradients are measured in float32, since they overflow at 65,504.
    """

    max_norm: float
    scope: Scope = "model"

    def __post_init__(self) -> None:
        number(self, "max_norm", example=1.0)
        scope_among(self, "model", "layer", "unit")

    @property
    def exact(self) -> bool:
        """As `clip_grad_norm_` over the whole model."""
        return self.scope == "model"

    def start(self, groups: Groups, /) -> Memory:
        """The threshold alone, to be shown."""
        return {"threshold": groups.full(float(self.max_norm))}

    derived: ClassVar[frozenset[str]] = frozenset({"threshold"})

    def decide(self, measured: Measured, memory: Memory, /) -> Decision:
        """The same limit for all groups."""
        return Decision(memory["threshold"], shrink(measured.norms, float(self.max_norm)))


@dataclass(frozen=True)
class LeaveAlone(Plain):
    """Changes nothing: what is in the place of a policy where others are only tried."""

    scope: ClassVar[Scope] = "model"
    derived: ClassVar[frozenset[str]] = frozenset({"threshold"})

    def start(self, groups: Groups, /) -> Memory:
        """No norm is too large."""
        return {"threshold": groups.full(torch.inf)}

    def decide(self, _measured: Measured, memory: Memory, /) -> Decision:
        """Nothing is to be done."""
        return Decision(memory["threshold"])


@dataclass(frozen=True)
class MaxValue(Plain):
    """Elements of gradients are limited to `[-value, value]`, as by `torch.nn.utils.clip_grad_value_`.

    Source: T. Mikolov, "Statistical Language Models Based on Neural Networks" (thesis, Brno 2012), section 3.2.2. A gradient
    whose norm over the whole model is not finite is left alone, so that an infinity is still one afterwards.
    """

    value: float
    scope: ClassVar[Scope] = "model"
    derived: ClassVar[frozenset[str]] = frozenset({"threshold"})

    def __post_init__(self) -> None:
        number(self, "value", example=0.5)

    def start(self, groups: Groups, /) -> Memory:
        """The limit alone, to be shown."""
        return {"threshold": groups.full(float(self.value))}

    def decide(self, measured: Measured, memory: Memory, /) -> Decision:
        """The limit, and none where the norm is not finite."""
        limit = torch.where(finite(measured.total), memory["threshold"], torch.inf)
        return Decision(memory["threshold"], limit=limit)


@dataclass(frozen=True)
class AGC(Plain):
    """Adaptive gradient clipping: each unit's gradient norm is at most `clip_factor` times the norm of the unit's weights.

    Source: A. Brock, S. De, S. L. Smith, K. Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization"
    (arXiv:2102.06171), equation 3: where `|G| / max(|W|, eps)` exceeds `clip_factor`, `G` becomes
    `clip_factor * max(|W|, eps) / |G| * G`. Units are rows of weights and output channels of convolutions; biases, gains and
    scalars are one unit. `scope="layer"` takes whole layers for units.
    """

    clip_factor: float = 0.01
    eps: float = 1e-3
    scope: Scope = "unit"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number(self, "clip_factor", example=0.01)
        number(self, "eps", example=1e-3)
        scope_among(self, "layer", "unit")

    def start(self, _groups: Groups, /) -> Memory:
        """None: the weights say it all."""
        return {}

    def decide(self, measured: Measured, _memory: Memory, /) -> Decision:
        """The limit of each unit from the norm of its weights."""
        norms, weights = measured.norms, measured.weights
        if weights is None:
            raise RuntimeError("AGC was measured without the norms of the weights")
        limit = weights.clamp(min=self.eps) * self.clip_factor
        clipped = (norms > limit) & finite(norms)
        return Decision(limit, torch.where(clipped, limit / norms.clamp(min=1e-6), 1.0))


@dataclass(frozen=True)
class LayerScale(Plain):
    """Gradients of layers are multiplied by a factor, of each layer that of the first expression that is found in its name.

    A factor of 0 stops a layer's gradient, one above 1 strengthens a vanishing one. Layers that no expression finds are left
    alone. No source: it is a multiplication. An expression that finds no layer raises, and so does a factor below 0.
    """

    factors: Mapping[str, float]
    scope: ClassVar[Scope] = "layer"
    derived: ClassVar[frozenset[str]] = frozenset({"factors"})

    def __post_init__(self) -> None:
        if not isinstance(self.factors, Mapping) or not self.factors:
            raise ValueError(f"LayerScale(factors={self.factors!r}): expected a mapping such as {{'head': 0.1}}")
        for expression, factor in self.factors.items():
            self._check(expression, factor)
        object.__setattr__(self, "factors", dict(self.factors))

    def _check(self, expression: str, factor: float) -> None:
        try:
            re.compile(expression)
        except (TypeError, re.error) as error:
            raise ValueError(f"LayerScale(factors={{{expression!r}: ...}}): expected a regular expression ({error})") from None
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 <= factor < float("inf"):
            raise ValueError(f"LayerScale(factors={{{expression!r}: {factor!r}}}): expected a finite factor of at least 0")

    def fits(self, groups: Groups, /) -> None:
        """Each expression finds a layer. Those that it finds may go later."""
        for expression in self.factors:
            if not any(re.search(expression, layer) for layer in groups.layers):
                raise ValueError(f"LayerScale(factors={{{expression!r}: ...}}): no layer matches; layers: {_some(groups.layers)}")

    def start(self, groups: Groups, /) -> Memory:
        """The factor of each layer."""
        found = [next((f for e, f in self.factors.items() if re.search(e, layer)), 1.0) for layer in groups.layers]
        return {"factors": torch.tensor(found, dtype=groups.dtype, device="cpu").to(groups.device)}

    def decide(self, measured: Measured, memory: Memory, /) -> Decision:
        """The factors; no norm is too large."""
        factors = memory["factors"]
        return Decision(torch.full_like(factors, torch.inf), torch.where(finite(measured.norms), factors, 1.0))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
