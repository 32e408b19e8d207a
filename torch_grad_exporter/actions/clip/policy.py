"""The contract of a policy: settings that never change, and a pure rule that turns norms and a memory into a decision.

A policy holds no tensor, so several clippers may use the same one. Its memory is a dictionary of tensors on the device of the
gradients, which belongs to the clipper. A rule reads no value of a tensor: it decides by arithmetic on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import ClassVar, Literal, get_args

import torch

from torch_grad_exporter.arguments import shown

Scope = Literal["model", "layer", "unit"]
"""What is measured and clipped as one: all gradients, those of a layer, or those of an output unit of a layer."""

Memory = dict[str, torch.Tensor]

EPSILON = 1e-6  # added to a norm before a division by it, as in `clip_grad_norm_`


@dataclass(frozen=True, slots=True)
class NormGroups:
    """What the norms of a policy belong to.

    Attributes:
        shape: The shape of the norms: () for the model, else (layers,) or (units,).
        layers: The names of all layers.
        device: Where norms and memory are.
        dtype: The type of sums and memory.
    """

    shape: tuple[int, ...]
    layers: Sequence[str]
    device: torch.device
    dtype: torch.dtype

    def full(self, value: float, *before: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor with one value for each norm; `before`: dimensions in front of those of the norms."""
        return torch.full((*before, *self.shape), value, device=self.device, dtype=dtype or self.dtype)


@dataclass(slots=True)
class GradientNorms:
    """The norms of a step before clipping.

    Attributes:
        norms: The norm of each group; NaN for a group without a gradient.
        total: The norm of all gradients.
        weights: The norm of each group's parameters, if the policy needs it.
        loss: The loss of the step, if a policy needs it and it was observed.
        left_out: Whether a gradient scaler makes the optimizer skip the step, None without one.
    """

    norms: torch.Tensor
    total: torch.Tensor
    weights: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    left_out: torch.Tensor | None = None


@dataclass(slots=True)
class Decision:
    """The decision for each group.

    Attributes:
        threshold: The largest norm, or value, that is left alone; a number if it is the same for all groups.
        coefficients: The factor for the gradients, None to multiply nothing.
        limit: The largest magnitude of an element, None for no limit.
        skip: Whether to skip the step, None for never.
    """

    threshold: torch.Tensor | float
    coefficients: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    skip: torch.Tensor | None = None

    @property
    def changes(self) -> torch.Tensor | None:
        """Whether it changes a gradient or skips the step, on its device; None if that depends on single elements."""
        if self.coefficients is None:
            return self.skip
        changed: torch.Tensor = self.coefficients != 1
        return changed if changed.ndim == 0 else changed.any()


class Policy:
    """How gradients are clipped. A subclass is a frozen dataclass with a `scope` and the method `decide`.

    Attributes:
        needs_weights: Whether it needs the norms of the parameters.
        needs_loss: Whether it needs the loss of each epoch.
        skips: Whether it skips steps and changes no gradient.
        settings: The entries of the memory that follow from the settings; they are not saved.
    """

    needs_weights: ClassVar[bool] = False
    needs_loss: ClassVar[bool] = False
    skips: ClassVar[bool] = False
    settings: ClassVar[frozenset[str]] = frozenset()

    @property
    def scope(self) -> Scope:
        """What it measures as one."""
        return "model"

    @property
    def exact(self) -> bool:
        """Whether norms are rounded to the type of the gradients like those of `clip_grad_norm_`, else to float32 at least."""
        return False

    @property
    def synchronize(self) -> bool:
        """Whether it may wait for a device in order to skip a step."""
        return False

    @property
    def judges_loss(self) -> bool:
        """Whether it needs the loss of each step."""
        return False

    def check_layers(self, layers: Sequence[str], /) -> None:
        """Raise `ValueError` if the policy does not fit a model with these layers."""

    def check_ranks(self, world_size: int, /) -> None:
        """Raise `ValueError` if ranks of a job of this size would decide differently."""

    def start(self, _groups: NormGroups, /) -> Memory:
        """Return the memory before the first step."""
        return {}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Return what to do in a step, and update the memory."""
        raise NotImplementedError

    def observe(self, loss: torch.Tensor, memory: Memory, /) -> None:
        """Add a loss to the present epoch."""

    def end_epoch(self, memory: Memory, /) -> None:
        """End the present epoch."""

    def shown(self, setting: str) -> str:
        """Return a setting as errors show it, such as `MaxNorm(max_norm=0)`."""
        return f"{type(self).__name__}({setting}={shown(getattr(self, setting))})"

    def check_scope(self, *allowed: Scope) -> None:
        """Raise `ValueError` unless the scope is one of these."""
        if self.scope not in allowed:
            names = " or ".join(f'"{scope}"' for scope in get_args(Scope) if scope in allowed)
            raise ValueError(f"{self.shown('scope')}: expected {names}")


class NoClipping(Policy):
    """Changes nothing. It takes the place of a policy if others are only tried."""

    def decide(self, _measured: GradientNorms, _memory: Memory, /) -> Decision:
        """Leave all norms alone."""
        return Decision(math.inf)


def finite(norms: torch.Tensor) -> torch.Tensor:
    """Return which norms are finite. A norm is never negative, so one comparison is enough."""
    return norms < math.inf


def remembered(norms: torch.Tensor) -> torch.Tensor:
    """Return which norms enter a history: those that are finite and not 0.

    A norm of exactly 0 says that nothing was learned there, such as an expert without tokens. It would make a threshold 0, and
    the layer would never be trained again.
    """
    return finite(norms) & (norms > 0)


def shrink(norms: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
    """Return the factors that make norms at most the threshold, like `clip_grad_norm_`; 1 for a norm that is not finite.

    That function makes gradients zero or NaN then. Here such a norm becomes 0, and a threshold over 0 is infinite, which costs
    one operation on the device.
    """
    divisor = (norms + EPSILON).nan_to_num_(nan=0.0, posinf=0.0)
    return (threshold / divisor).clamp_(max=1.0)


def policy_name(policy: object) -> str:
    """Return a policy as its user wrote it, without defaults: `ZClip(alpha=0.9)`; at most 100 characters."""
    if not is_dataclass(policy) or isinstance(policy, type):
        return type(policy).__name__
    settings = [(field, getattr(policy, field.name)) for field in fields(policy)]
    given = [(field, value) for field, value in settings if field.default is MISSING or value != field.default]
    parts = [repr(value) if field.default is MISSING else f"{field.name}={value!r}" for field, value in given]
    return f"{type(policy).__name__}({', '.join(parts)})"[:100]
