"""Policies that skip a step; how an optimizer is made to skip one is in `skipped_step`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

from torch_grad_exporter.actions.clip.policy import Decision, GradientNorms, Memory, NormGroups, Policy, finite
from torch_grad_exporter.arguments import check_number, check_whole
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket


class TooManySkippedSteps(RuntimeError):  # noqa: N818 - the name says what happened
    """`SkipNonFinite(max_in_row=)` has skipped as many steps in a row as it may."""


@dataclass(frozen=True)
class SkipNonFinite(Policy):
    """A step in which any gradient is NaN or infinite is skipped: weights and the optimizer's state stay as they are.

    No source: it is a comparison of the norm of all gradients, which is not finite if one of them is not, or if they are so large
    that it overflows. Fused optimizers skip the step on the device. For others all gradients are removed, for which the decision
    is read: at once on the CPU, elsewhere by waiting for the device in each step. Steps that a gradient scaler skips are not
    counted here.

    `max_in_row` steps in a row are skipped at most: then `TooManySkippedSteps` is raised before the next such step, whatever
    `on_failure` says. None skips any number. Fused optimizers on a device have skipped some more by then, as nothing waits.
    """

    max_in_row: int | None = None
    skips: ClassVar[bool] = True
    synchronize: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_in_row is not None:
            check_whole(self.shown("max_in_row"), self.max_in_row, example=10)

    def start(self, groups: NormGroups, /) -> Memory:
        """Return the number of steps that were skipped in a row, if it is limited."""
        return {} if self.max_in_row is None else {"in_row": groups.full(0, dtype=torch.int64)}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Skip the step unless the norm of all gradients is finite."""
        skip = ~finite(measured.total)
        if measured.left_out is not None:
            skip = skip & ~measured.left_out.to(skip.device)
        if self.max_in_row is not None:
            memory["in_row"] = torch.where(skip, memory["in_row"] + 1, 0)
        return Decision(math.inf, skip=skip)


@dataclass(frozen=True)
class SkipAbove(Policy):
    """A step whose gradients have a norm above `limit`, or `on="loss"` a loss above it, is skipped.

    No source: it is a comparison. Fused optimizers skip the step on the device. For others all gradients are removed, for which
    the decision is read: at once on the CPU, elsewhere by waiting for the device in each step, which `synchronize=True` allows.
    A norm that is not finite skips nothing, see `SkipNonFinite`. A loss that is not finite is above any limit.

    The loss is the last one that `observe(loss=)` was given since the optimizer's last step, so call it in each step before
    that. In a job of several ranks it must be the same on all of them, such as its mean; `reduced=True` says that it is.
    """

    limit: float
    synchronize: bool = False
    on: Literal["norm", "loss"] = "norm"
    reduced: bool = False
    skips: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self.shown("limit"), self.limit, above=0.0, example=10.0)
        for name in ("synchronize", "reduced"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{self.shown(name)}: expected True or False")
        if self.on not in ("norm", "loss"):
            raise ValueError(f'{self.shown("on")}: expected "norm" or "loss"')
        if self.reduced and self.on == "norm":
            raise ValueError('SkipAbove(reduced=True): the norm is the same on all ranks; leave it out, or set on="loss"')

    @property
    def judges_loss(self) -> bool:
        """Whether it needs the loss of each step."""
        return self.on == "loss"

    def check_ranks(self, world_size: int, /) -> None:
        """Raise `ValueError` if it judges by a loss that may differ between ranks."""
        if self.on == "loss" and world_size > 1 and not self.reduced:
            raise ValueError(
                f"SkipAbove(on='loss'): this job has {world_size} ranks, each with a loss of its own, so that some would skip a"
                " step that others take; observe the mean of the loss over ranks and say so by reduced=True, or use on='norm'"
            )

    def decide(self, measured: GradientNorms, _memory: Memory, /) -> Decision:
        """Skip the step if the norm or the loss is above the limit."""
        if self.on == "norm":
            return Decision(self.limit, skip=(measured.total > self.limit) & finite(measured.total))
        self.check_ranks(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)
        if measured.loss is None:
            raise RuntimeError(
                "SkipAbove(on='loss'): no loss was observed for this step; call observe(loss=...) in each step, from the first"
                " on, after the last optimizer step and before this one"
            )
        # Not `>`, which is false for NaN.
        skip = ~(measured.loss.to(measured.total.device) <= self.limit)
        if measured.left_out is not None:
            skip = skip & ~measured.left_out.to(skip.device)
        return Decision(math.inf, skip=skip)


class InRowLimit:
    """Raises once `SkipNonFinite` has skipped too many steps in a row."""

    def __init__(self) -> None:
        self._transfer = HostTransfer()
        self._under_way: deque[Ticket] = deque()  # as many as `HostTransfer` allows

    def check(self, policy: SkipNonFinite, in_row: torch.Tensor, *, waits: bool) -> None:
        """Raise `TooManySkippedSteps` if the number of steps is above the limit; `waits`: now, and not once it has arrived."""
        if waits:
            self._judge(policy, int(in_row))
        elif (ticket := self._transfer.send(in_row.reshape(1))) is not None:
            self._under_way.append(ticket)
        while self._under_way and (values := self._under_way[0].ready()) is not None:
            self._under_way.popleft()
            self._judge(policy, int(values[0]))

    def _judge(self, policy: SkipNonFinite, in_row: int) -> None:
        if policy.max_in_row is not None and in_row > policy.max_in_row:
            self._under_way.clear()
            raise TooManySkippedSteps(
                f"{policy!r}: {in_row} steps in a row had gradients that are not finite, and none of them was taken; go back to a"
                " checkpoint, or find out where they come from, see docs/clipping.md"
            )
