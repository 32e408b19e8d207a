"""What a policy is: settings that never change, and a pure rule that turns norms and a memory into a decision.

A policy holds no tensor, so one may be given to several clippers. Its memory is a dictionary of tensors on the device of the
gradients, which the clipper owns. A rule reads no value of a tensor: it decides by arithmetic on the device.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch

Scope = Literal["model", "layer", "unit"]
"""What is measured and clipped as one: all gradients, those of a layer, or those of an output unit of a layer."""

Memory = dict[str, torch.Tensor]


class OnFailure(enum.Enum):
    """What becomes of a step whose gradients cannot be clipped."""

    CONTINUE = "continue"
    RAISE = "raise"


EPSILON = 1e-6
"""What `clip_grad_norm_` adds to a norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class Groups:
    """What a policy's memory is made for: the shape of the norms, the layers by position, where and how precisely to compute."""

    shape: tuple[int, ...]
    layers: Sequence[str]
    device: torch.device
    dtype: torch.dtype

    def full(self, value: float, *before: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor with one value for each norm; `before`: dimensions in front of those of the norms."""
        return torch.full((*before, *self.shape), value, device=self.device, dtype=dtype or self.dtype)


@dataclass(slots=True)
class Measured:
    """The norms of a step before clipping: of each group, and of all gradients. `weights`: of the parameters, if asked for."""

    norms: torch.Tensor
    total: torch.Tensor
    weights: torch.Tensor | None = None


@dataclass(slots=True)
class Decision:
    """What a policy decides for each group.

    `threshold`: the largest norm, or value, that is left alone. `coefficients`: by what gradients are multiplied. `limit`: the
    largest magnitude of an element. `skip`: whether the step is to be left out.
    """

    threshold: torch.Tensor
    coefficients: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    skip: torch.Tensor | None = None


@runtime_checkable
class Policy(Protocol):
    """How gradients are clipped.

    `weighs`: whether it needs the norms of the parameters; `observes`: whether it needs the loss. `exact`: whether norms are
    rounded as `clip_grad_norm_` rounds them, to the gradients' own type. `derived`: what of the memory follows from the settings,
    and is not saved.
    """

    weighs: ClassVar[bool]
    observes: ClassVar[bool]
    derived: ClassVar[frozenset[str]]

    @property
    def scope(self) -> Scope:
        """What it measures as one."""

    @property
    def exact(self) -> bool:
        """See the class."""

    def fits(self, groups: Groups, /) -> None:
        """Raises where the policy does not fit the model; asked once, when a clipper is made."""

    def start(self, groups: Groups, /) -> Memory:
        """The memory before the first step."""

    def decide(self, measured: Measured, memory: Memory, /) -> Decision:
        """What is to be done in a step; writes into the memory."""

    def observe(self, loss: torch.Tensor, memory: Memory, /) -> None:
        """Takes in a loss of the present epoch."""

    def end_epoch(self, memory: Memory, /) -> None:
        """The present epoch is over."""


class Plain:
    """What most policies have in common: they need no loss and no weights, save all they remember, and round in no special way."""

    __slots__ = ()
    weighs: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    derived: ClassVar[frozenset[str]] = frozenset()

    @property
    def exact(self) -> bool:
        """Norms are measured in float32 at least."""
        return False

    def fits(self, _groups: Groups, /) -> None:
        """Fits each model."""

    def observe(self, _loss: torch.Tensor, _memory: Memory, /) -> None:
        """Needs none."""

    def end_epoch(self, _memory: Memory, /) -> None:
        """Means nothing to it."""


def finite(norms: torch.Tensor) -> torch.Tensor:
    """Which norms are finite. A norm is never negative, so one comparison says it."""
    return norms < math.inf


def entering(norms: torch.Tensor) -> torch.Tensor:
    """Which norms enter a history: those that are finite, and of a gradient that is not all zero.

    A norm of exactly 0 says that nothing was learned there, as of an expert without tokens. It would make thresholds 0, by which a
    layer is never trained again.
    """
    return finite(norms) & (norms > 0)


def shrink(norms: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
    """By what gradients are multiplied so that norms are at most the threshold, as `clip_grad_norm_` does it.

    1 where a norm is not finite, for which that function makes gradients zero or NaN: such a norm becomes 0 here, and a threshold
    over 0 is infinite. That costs one operation on the device.
    """
    divisor = (norms + EPSILON).nan_to_num_(nan=0.0, posinf=0.0)
    return (threshold / divisor).clamp_(max=1.0)


def policy_name(policy: object) -> str:
    """A policy as its user has written it, without what is the default: `ZClip(alpha=0.9)`; 100 characters at most."""
    if not is_dataclass(policy) or isinstance(policy, type):
        return type(policy).__name__
    shown = [(one, getattr(policy, one.name)) for one in fields(policy)]
    given = [(one, value) for one, value in shown if one.default is MISSING or value != one.default]
    parts = [repr(value) if one.default is MISSING else f"{one.name}={value!r}" for one, value in given]
    return f"{type(policy).__name__}({', '.join(parts)})"[:100]


# Checks of settings


def checked_policy(given: object, argument: str = "clip={!r}") -> Policy:
    """A policy. Raises `TypeError` for anything else; `argument`: how an error shows it."""
    if not isinstance(given, Policy) or isinstance(given, type):
        raise TypeError(f"{argument.format(given)}: expected a policy, such as MaxNorm(1.0)")
    return given


def checked_policies(given: object, argument: str = "dry_run={!r}") -> tuple[Policy, ...]:
    """Policies that are only tried; `None` stands for none. Raises `TypeError` for anything else."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise TypeError(f"{argument.format(given)}: expected a list of policies, such as [ZClip()]")
    for one in given:
        if not isinstance(one, Policy) or isinstance(one, type):
            raise TypeError(f"{argument.format([one])}: expected policies, such as ZClip()")
    return tuple(given)


def number(policy: object, argument: str, *, above: float = 0.0, to: float = math.inf, example: float, least: bool = False) -> None:
    """Raises unless a setting is a finite number within the bounds; `least`: the lower bound itself is allowed."""
    value = getattr(policy, argument)
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not right or value > to or value < above or (value == above and not least):
        bounds = f"{'of at least' if least else 'above'} {above:g}" + ("" if to == math.inf else f" and at most {to:g}")
        raise _wrong(policy, argument, f"a finite number {bounds}, such as {example:g}")


def whole(policy: object, argument: str, *, example: int, least: int = 1) -> None:
    """Raises unless a setting is a whole number of at least `least`."""
    value = getattr(policy, argument)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(policy, argument, f"a whole number of at least {least}, such as {example}")


def scope_among(policy: object, *allowed: Scope) -> None:
    """Raises unless the policy's scope is one of those that it knows."""
    if getattr(policy, "scope", None) not in allowed:
        names = " or ".join(f'"{one}"' for one in get_args(Scope) if one in allowed)
        raise _wrong(policy, "scope", names)


def flag(policy: object, argument: str) -> None:
    """Raises unless a setting is True or False."""
    if not isinstance(getattr(policy, argument), bool):
        raise _wrong(policy, argument, "True or False")


def _wrong(policy: object, argument: str, expected: str) -> ValueError:
    return ValueError(f"{type(policy).__name__}({argument}={getattr(policy, argument)!r}): expected {expected}")
