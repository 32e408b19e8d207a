"""Clipping: a policy and its candidates over the gradients of some parameters; what `Clipper` and `clip=` have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from torch_grad_exporter.actions.clip.changing import change
from torch_grad_exporter.actions.clip.measuring import gradients_of, wide
from torch_grad_exporter.actions.clip.policy import Decision, Groups, Policy
from torch_grad_exporter.actions.clip.running import Candidate, Measurements, RunningPolicy
from torch_grad_exporter.actions.clip.table import ParameterGroups
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.torch_compat.tensors import local


class ParameterSource(Protocol):
    """Where parameters come from that may change."""

    def groups(self) -> ParameterGroups:
        """The groups now; the same object as long as nothing has changed."""


class Clipping:
    """Clips all gradients of its parameters at each call. Never reads a value.

    `told`: fused optimizers are told to leave steps out, which they cannot be where ranks have different parts of parameters.
    `guards`: one of each policy of `dry_run`, which keeps its failures from the clipping; without them they are raised.
    """

    def __init__(
        self,
        parameters: ParameterSource,
        policy: Policy,
        dry_run: Sequence[Policy] = (),
        *,
        foreach: bool | None = None,
        told: bool = False,
        guards: Sequence[Guard] = (),
    ) -> None:
        self._foreach = foreach
        self._told = told
        self._parameters = parameters
        self._groups = groups = parameters.groups()
        self._device = device = local(groups.entries[0].parameter).device
        self.running = RunningPolicy(policy, groups, device)
        pairs = zip(dry_run, guards or (None,) * len(dry_run), strict=True)
        self.candidates = tuple(Candidate(one, groups, device, guard) for one, guard in pairs)
        self._all: tuple[RunningPolicy | Candidate, ...] = (self.running, *self.candidates)
        self._epoch: int | None = None
        if self.running.split:
            self._check_split()

    @property
    def groups(self) -> ParameterGroups:
        """The parameters of the last call."""
        return self._groups

    @property
    def remembers(self) -> bool:
        """Whether a memory changes from step to step."""
        return self.running.remembers or bool(self.candidates)

    @property
    def device(self) -> torch.device:
        """Where norms are brought together."""
        return self._device

    def __call__(self, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, Decision | None]:
        """Clips; returns the global norm before, on its device, and what was decided, `None` where there is no gradient.

        `scale`: of the loss, by which gradients are still multiplied; norms and thresholds are those without it.
        """
        with torch.no_grad():
            groups = self._parameters.groups()
            gradients = gradients_of(groups, self._foreach, scale)
            device = gradients.device if gradients.parts else self._device
            if groups is not self._groups or device != self._device:
                self._follow(groups, device)
            if not gradients.parts and not self.running.split:
                return torch.zeros((), device=device, dtype=torch.float32), None
            measurements: Measurements = {}
            measured, decision = self.running.decide(gradients, measurements)
            for candidate in self.candidates:  # before anything is changed
                candidate.look(gradients, measurements, groups, device)
            change(gradients, decision, groups, self.running.policy.scope)
            return measured.total, decision

    def observe(self, loss: float | torch.Tensor, epoch: float | None) -> None:
        """As of `Clipper`, of arguments that are right."""
        with torch.inference_mode(mode=False), torch.no_grad():  # what is remembered is written to later, outside of it
            value = self._on_device(loss)
            number = None if epoch is None else math.floor(epoch)
            for one in self._all:
                if self._epoch is not None and number != self._epoch:
                    one.end_epoch()
                one.observe(value)
                if number is None:
                    one.end_epoch()
            self._epoch = number

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """What the policy and the candidates remember; as copies, unless nothing else will use it."""
        candidates = [one.state(copied=copied) for one in self.candidates]
        return {**self.running.state(copied=copied), "epoch": self._epoch, "candidates": candidates}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state` returned. Raises where it does not fit, and then nothing has changed."""
        self.check(state)
        for one, of_one in zip(self._all, (state, *state.get("candidates", ())), strict=True):
            one.load(of_one)
        self._epoch = state.get("epoch")

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises where what `state` returned does not fit."""
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict({type(state).__name__}): expected what state_dict() returned")
        candidates = state.get("candidates", ())
        if len(candidates) != len(self.candidates):
            raise ValueError(f"load_state_dict(): the state has {len(candidates)} candidates, this clipper {len(self.candidates)}")
        for one, of_one in zip(self._all, (state, *candidates), strict=True):
            one.check(of_one)

    def _on_device(self, loss: float | torch.Tensor) -> torch.Tensor:
        """A loss on the device of the gradients. A number gets there without a copy from the host, which would wait."""
        if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
            return loss.detach().reshape(()).to(self._device, wide(self._device))
        return torch.full((), float(loss), device=self._device, dtype=wide(self._device))

    def _follow(self, groups: ParameterGroups, device: torch.device) -> None:
        """Goes on with the parameters that there are now, and where they are now. Raises where that cannot be right."""
        if any(entry.splits for entry in groups.entries):
            self._check_split()
        self.running.follow(groups, device)
        self._groups, self._device = groups, device

    def _check_split(self) -> None:
        """What cannot be right where ranks have different parts of parameters."""
        if self._told:
            raise ValueError("Clipper(optimizers=...): parameters are split over ranks; use SkipAbove(synchronize=True) instead")


def check_fits(policies: Iterable[Policy], layers: Sequence[str]) -> None:
    """Raises where a policy does not fit a model with these layers."""
    device = torch.device("cpu")
    for policy in policies:
        policy.fits(Groups((), layers, device, wide(device)))


def check_observed(loss: object, epoch: object) -> None:
    """Raises on what is no loss or no epoch."""
    if isinstance(loss, bool) or not isinstance(loss, int | float | torch.Tensor):
        raise TypeError(f"observe(loss={loss!r}): expected a number or a tensor with one element")
    if isinstance(loss, torch.Tensor) and (loss.numel() != 1 or loss.is_complex()):
        raise ValueError(f"observe(loss=...): expected one real number, got a tensor of shape {tuple(loss.shape)}")
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int | float) or not math.isfinite(epoch)):
        raise ValueError(f"observe(epoch={epoch!r}): expected a finite number, such as 3")
