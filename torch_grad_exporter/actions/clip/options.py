"""The options `clip=`, `dry_run=` and `on_failure=`, and the checks of their policies."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from torch_grad_exporter.actions.clip.policies import MaxNorm
from torch_grad_exporter.actions.clip.policy import Policy
from torch_grad_exporter.actions.clip.skipping import SkipAbove
from torch_grad_exporter.arguments import shown


class OnFailure(enum.Enum):
    """What becomes of a step whose gradients cannot be clipped."""

    CONTINUE = "continue"
    RAISE = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """What `clip=`, `dry_run=` and `on_failure=` ask for.

    Attributes:
        clip: The policies that act, those that skip steps first; empty if others are only tried.
        dry_run: The policies that are only tried.
        raises: Whether a step that cannot be clipped raises.
    """

    clip: tuple[Policy, ...]
    dry_run: tuple[Policy, ...] = ()
    raises: bool = False

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All of them."""
        return (*self.clip, *self.dry_run)


def checked_policies(given: object, argument: str = "dry_run={}", *, example: str = "[ZClip()]") -> tuple[Policy, ...]:
    """Return a list of policies; None stands for none. Raises `TypeError` for anything else."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise TypeError(f"{argument.format(shown(given))}: expected a list of policies, such as {example}")
    for policy in given:
        if not isinstance(policy, Policy):
            raise TypeError(f"{argument.format(f'[{shown(policy)}]')}: expected policies, such as {example}; list each by itself")
    return tuple(given)


def checked_clip(given: object, argument: str = "clip={}") -> tuple[Policy, ...]:
    """Return the policies of `clip=`: first those that skip steps, then one that changes gradients, if any.

    Raises:
        TypeError: It is neither a policy nor a list of policies.
        ValueError: The list is empty, or contradicts itself.
    """
    if isinstance(given, Policy):
        return (given,)
    example = "[SkipNonFinite(), MaxNorm(1.0)]"
    if given is not None and not isinstance(given, list | tuple):
        raise TypeError(f"{argument.format(shown(given))}: expected a policy, such as MaxNorm(1.0), or a list of policies")
    policies = checked_policies(given, argument, example=example)
    if given is not None:
        where = argument.format(shown([*policies]))
        if not policies:
            raise ValueError(f"{where}: the list is empty; expected policies, such as {example}")
        _check_order(policies, where)
    return policies


def _check_order(policies: Sequence[Policy], where: str) -> None:
    changing = [policy for policy in policies if not policy.skips]
    if len(changing) > 1:
        first, second = changing[:2]
        fix = f"keep one of them, and try the other by dry_run=[{second!r}]"
        raise ValueError(f"{where}: both {first!r} and {second!r} change gradients; {fix}")
    if changing and policies[-1] is not changing[0]:
        fix = f"put {changing[0]!r} last"
        raise ValueError(f"{where}: steps are skipped by the gradients before they are clipped; {fix}")
    kinds = [(type(policy), getattr(policy, "on", "")) for policy in policies]
    for number, policy in enumerate(policies):
        if kinds[number] in kinds[:number]:
            raise ValueError(f"{where}: two policies skip steps for one reason; leave out {policy!r} or the other")
    limits = [policy.limit for policy in policies if isinstance(policy, SkipAbove) and policy.on == "norm"]
    for policy in changing:
        if limits and isinstance(policy, MaxNorm) and policy.scope == "model" and limits[0] <= policy.max_norm:
            fix = "set a limit above max_norm, or leave out one of them"
            raise ValueError(f"{where}: {policy!r} would never clip, since all norms above {limits[0]:g} are skipped; {fix}")
