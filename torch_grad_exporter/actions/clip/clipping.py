"""Clipping: a policy and the candidates of `dry_run=` over some parameters; what `Clipper` and `clip=` have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_grad_exporter.actions.clip.gradients import gradients_of
from torch_grad_exporter.actions.clip.parameters import ParameterSet, ParameterTracker
from torch_grad_exporter.actions.clip.policy import Decision, Policy
from torch_grad_exporter.actions.clip.policy_run import Measurements, PolicyRun
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.torch_compat.tensors import local


class Clipping:
    """Clips all gradients of its parameters at each call. Never reads a value.

    Args:
        tracker: The parameters.
        policy: The policy that clips.
        dry_run: The candidates, which change nothing.
        foreach: See `Gradients`.
        by_flags: Whether fused optimizers skip steps, which they cannot if parameters are sharded.
        guards: One for each candidate, which keeps its failures from the clipping; without them they are raised.

    Raises:
        ValueError: The parameters cannot be clipped by these policies.
    """

    def __init__(
        self,
        tracker: ParameterTracker,
        policy: Policy,
        dry_run: Sequence[Policy] = (),
        *,
        foreach: bool | None = None,
        by_flags: bool = False,
        guards: Sequence[Guard] = (),
    ) -> None:
        parameters = tracker.current()
        if parameters is None:
            raise ValueError("there are no parameters to clip")
        self._tracker, self._foreach, self._by_flags = tracker, foreach, by_flags
        self.device = local(parameters.entries[0].parameter).device
        self.active = PolicyRun(policy, self.device)
        self.candidates = tuple(PolicyRun(candidate, self.device) for candidate in dry_run)
        self._guarded = tuple(zip(self.candidates, guards or [Guard(_raised)] * len(dry_run), strict=True))
        self._epoch: int | None = None
        self._follow(parameters, self.device)
        for candidate, guard in self._guarded:
            guard(candidate.follow_as_candidate, parameters, self.device)

    @property
    def remembers(self) -> bool:
        """Whether a memory changes from step to step."""
        return bool(self.active.saved or self.candidates)

    def __call__(self, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, Decision | None]:
        """Clip the gradients that there are now.

        Args:
            scale: The loss scale by which gradients are still multiplied. Norms and thresholds are those without it.

        Returns:
            The global norm before clipping, on its device, and the decision, None if there is no gradient.
        """
        with torch.no_grad():
            parameters = self._tracker.current()
            if parameters is None:
                return torch.zeros((), device=self.device), None
            gradients = gradients_of(parameters, self._foreach, scale)
            device = gradients.device if gradients.parts else self.device
            self._follow(parameters, device)
            if not gradients.parts and not parameters.sharded:
                return torch.zeros((), device=device, dtype=torch.float32), None
            measurements: Measurements = {}
            measured, decision = self.active.decide(gradients, measurements)
            for candidate, guard in self._guarded:  # before anything is changed
                guard(candidate.count, gradients, measurements, parameters, device)
            gradients.clip(decision, parameters, self.active.policy.scope)
            return measured.total, decision

    def observe(self, loss: float | torch.Tensor, epoch: float | None) -> None:
        """Give all policies a loss; see `Clipper.observe`."""
        with torch.inference_mode(mode=False), torch.no_grad():  # memories are written to later, outside of it
            if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
                value = loss.detach().reshape(()).to(self.device, wide(self.device))
            else:  # a number needs no copy from the host, which would wait
                value = torch.full((), float(loss), device=self.device, dtype=wide(self.device))
            number = None if epoch is None else math.floor(epoch)
            begins = self._epoch is not None and number != self._epoch
            self.active.observe(value, begins, number is None)
            for candidate, guard in self._guarded:
                guard(candidate.observe, value, begins, number is None)
            self._epoch = number

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """Return what the policy and the candidates remember; as copies unless nothing else will use it."""
        candidates = [run.state(copied=copied) for run in self.candidates]
        return {**self.active.state(copied=copied), "epoch": self._epoch, "candidates": candidates}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `TypeError` or `ValueError` if a state does not fit."""
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict({type(state).__name__}): expected what state_dict() returned")
        candidates = state.get("candidates", ())
        if len(candidates) != len(self.candidates):
            raise ValueError(f"load_state_dict(): the state has {len(candidates)} candidates, this clipper {len(self.candidates)}")
        self.active.check(state)
        for run, its in zip(self.candidates, candidates, strict=True):
            run.check(its)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` returned. Raises if it does not fit, and then nothing has changed."""
        self.check(state)
        self.active.load(state)
        for run, its in zip(self.candidates, state.get("candidates", ()), strict=True):
            run.load(its)
        self._epoch = state.get("epoch")

    def _follow(self, parameters: ParameterSet, device: torch.device) -> None:
        if self._by_flags and parameters.sharded:
            raise ValueError("Clipper(optimizers=...): parameters are split over ranks; use SkipAbove(synchronize=True) instead")
        self.active.follow(parameters, device)
        self.parameters, self.device = parameters, device


def _raised(error: Exception) -> None:
    """Raise a candidate's failure, which the caller is to see."""
    raise error


# Skipping a step
#
# A hook before an optimizer's step cannot cancel it, and Adam moves the weights on zero gradients too. So there are three ways,
# none of them a guess. A fused optimizer has a flag on the device, which gradient scalers use as well. On the CPU the norm is read
# at once and the gradients are removed, which every optimizer takes for nothing to do. On another device this waits for the
# device, which the user has to allow.


class SkipFlag:
    """The flag `found_inf` of a fused optimizer, which its kernel reads. It does not hold the optimizer."""

    __slots__ = ("_before", "_ours")

    def __init__(self) -> None:
        self._ours: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    @property
    def is_set(self) -> bool:
        """Whether a step is to be skipped, or may be."""
        return self._ours is not None

    def set(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
        """Let the optimizer skip the step that it is about to take, if `skip` is true; joins the flag of a gradient scaler."""
        self.clear(optimizer)  # a closure may be evaluated several times
        self._before = before = getattr(optimizer, "found_inf", None)
        # A scaler's flag stays in force: the step is skipped if either asks for it.
        ours = skip.to(torch.float32)
        self._ours = ours if before is None else torch.maximum(before, ours.to(before.device).reshape(before.shape))
        optimizer.found_inf = self._ours  # type: ignore[attr-defined]

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the flag, unless a gradient scaler has replaced it since. Idempotent."""
        ours, self._ours = self._ours, None
        if ours is None or getattr(optimizer, "found_inf", None) is not ours:
            return
        if self._before is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = self._before  # type: ignore[attr-defined]


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it can skip a step by a flag on the device."""
    return optimizer.defaults.get("fused") is True


def remove_gradients(parameters: ParameterSet, skip: torch.Tensor, *, synchronize: bool) -> None:
    """Remove all gradients if the step is to be skipped. Reads the decision, the only place here that may wait for a device."""
    if skip.device.type != "cpu" and not synchronize:
        raise ValueError(
            f"SkipAbove: the gradients are on {skip.device}, so their norm can only be read by waiting for it; allow that by"
            " SkipAbove(..., synchronize=True), or use fused optimizers, which a Clipper has to know (optimizers=)"
        )
    if bool(skip):
        for parameter in parameters.parameters:
            parameter.grad = None
