"""RunningPolicy: a policy with its memory, over the present parameters. Candidate: one that only says what it would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVarTuple

import torch

from torch_grad_exporter.actions.clip.fixed import MaxValue
from torch_grad_exporter.actions.clip.measuring import Gradients, Measuring, wide
from torch_grad_exporter.actions.clip.policy import Decision, Groups, Measured, Memory, Policy
from torch_grad_exporter.actions.clip.table import ParameterGroups
from torch_grad_exporter.errors import Guard

_Arguments = TypeVarTuple("_Arguments")

Measurements = dict[tuple[object, ...], Measured]
"""What was measured in this step already, by scope, weights and precision: policies that need the same share it."""


class RunningPolicy:
    """The one owner of a policy's memory. It follows the model: layers that stay keep what is remembered of them."""

    def __init__(self, policy: Policy, groups: ParameterGroups, device: torch.device) -> None:
        self.policy = policy
        self.decision: Decision | None = None
        self._key = (policy.scope, policy.weighs, policy.exact)
        self._begin(groups, device)

    @property
    def remembers(self) -> bool:
        """Whether its memory changes from step to step."""
        return bool(self._saved())

    @property
    def split(self) -> bool:
        """Whether each step has a collective."""
        return self._measuring.split

    def decide(self, gradients: Gradients, measurements: Measurements) -> tuple[Measured, Decision]:
        """Measures, unless that is done, and decides."""
        measured = measurements.get(self._key)
        if measured is None:
            measured = measurements[self._key] = self._measuring(gradients, exact=self.policy.exact)
        self.decision = decision = self.policy.decide(measured, self._memory)
        return measured, decision

    def observe(self, loss: torch.Tensor) -> None:
        """Passes a loss on."""
        self.policy.observe(loss, self._memory)

    def end_epoch(self) -> None:
        """Passes the end of an epoch on."""
        self.policy.end_epoch(self._memory)

    def follow(self, groups: ParameterGroups, device: torch.device) -> None:
        """Goes on with other parameters, or on another device; does nothing where both are the same."""
        if groups is self._groups and device == self._device:
            return
        before, memory = self._groups.layers, self._memory
        self._begin(groups, device)
        kept = [(new, before.index(layer)) for new, layer in enumerate(groups.layers) if layer in before]
        for name, tensor in self._saved().items():
            old = memory[name]
            if old.is_meta:  # the model had no data yet
                continue
            if self.policy.scope != "layer" or old.ndim == 0:
                tensor.copy_(old)
            else:
                for new, place in kept:
                    tensor[..., new] = old[..., place]

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """What is to be saved, as copies unless it is not to be used any more."""
        memory = {name: tensor.clone() if copied else tensor for name, tensor in self._saved().items()}
        return {"policy": type(self.policy).__name__, "layers": [*self._groups.layers], "memory": memory}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises where what `state` returned is of another policy, another size of its history, or another model."""
        name, memory, saved = state.get("policy"), state.get("memory"), self._saved()
        if name != type(self.policy).__name__ or not isinstance(memory, Mapping):
            raise ValueError(f"load_state_dict(): the state is one of {name!r}, this clipper has {type(self.policy).__name__}")
        if any(tensor.is_meta for tensor in saved.values()):
            raise ValueError("load_state_dict(): the model has no data yet; load the state when its parameters are on their device")
        if self.policy.scope == "layer" and saved and tuple(state.get("layers", ())) != self._groups.layers:
            raise ValueError("load_state_dict(): the state has other layers than this clipper; load it for the same model")
        for key, tensor in saved.items():
            given = memory.get(key)
            if not isinstance(given, torch.Tensor) or given.shape != tensor.shape:
                found = tuple(given.shape) if isinstance(given, torch.Tensor) else "nothing"
                raise ValueError(
                    f"load_state_dict(): {key!r} has the shape {found}, expected {tuple(tensor.shape)};"
                    " make the policy with the settings of the one that was saved"
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned, once `check` has passed it."""
        memory, saved = state["memory"], self._saved()
        self._memory.update({key: memory[key].to(tensor.device, tensor.dtype, copy=True) for key, tensor in saved.items()})

    def _begin(self, groups: ParameterGroups, device: torch.device) -> None:
        scope = self.policy.scope
        count = sum(entry.units for entry in groups.entries) if scope == "unit" else len(groups.layers)
        shape = () if scope == "model" else (count,)
        measuring = Measuring(groups, scope, device, weighs=self.policy.weighs)
        memory = self.policy.start(Groups(shape, groups.layers, device, wide(device)))
        # All at once, at the end: what raises before leaves everything as it was.
        self._groups, self._device, self._measuring = groups, device, measuring
        self._memory: Memory = memory
        self.decision = None

    def _saved(self) -> Memory:
        """The part of the memory that does not follow from the settings."""
        return {name: tensor for name, tensor in self._memory.items() if name not in self.policy.derived}


class Candidate:
    """A policy that changes nothing: on the gradients of the run, what it would have done.

    `guard`: what keeps a failure of it from the policy that clips; without one it is raised.
    """

    def __init__(self, policy: Policy, groups: ParameterGroups, device: torch.device, guard: Guard | None = None) -> None:
        self._policy = policy
        self._guard = guard
        self._running: RunningPolicy | None = None
        self._clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._run(self._follow, groups, device)

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self._policy

    @property
    def decision(self) -> Decision | None:
        """What it would have done in the last step."""
        return None if self._running is None else self._running.decision

    @property
    def threshold(self) -> torch.Tensor | None:
        """The largest norm, or value, that it would have left alone in the last step, on the device."""
        return None if self.decision is None else self.decision.threshold

    @property
    def coefficients(self) -> torch.Tensor | None:
        """By what it would have multiplied gradients in the last step, on the device."""
        return None if self.decision is None else self.decision.coefficients

    @property
    def clipped_steps(self) -> torch.Tensor:
        """In how many steps it would have changed a gradient, or left out the step; on the device."""
        return self._clipped

    def look(self, gradients: Gradients, measurements: Measurements, groups: ParameterGroups, device: torch.device) -> None:
        """Decides about the gradients of a step, and counts. `groups`, `device`: of the gradients."""
        self._run(self._look, gradients, measurements, groups, device)

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """As of a running policy, and the count."""
        clipped = self._clipped.clone() if copied else self._clipped
        name = type(self._policy).__name__
        of_policy = {"policy": name, "layers": [], "memory": {}} if self._running is None else self._running.state(copied=copied)
        return {**of_policy, "clipped_steps": clipped}

    def check(self, state: Mapping[str, Any]) -> None:
        """As of a running policy, and the count."""
        if self._running is not None:
            self._running.check(state)
        if "clipped_steps" not in state:
            raise ValueError("load_state_dict(): the state of a candidate has no clipped_steps")

    def load(self, state: Mapping[str, Any]) -> None:
        """As of a running policy, and the count."""
        if self._running is not None:
            self._running.load(state)
        self._clipped.copy_(state["clipped_steps"])

    def observe(self, loss: torch.Tensor) -> None:
        """As of a running policy."""
        if self._running is not None:
            self._run(self._running.observe, loss)

    def end_epoch(self) -> None:
        """As of a running policy."""
        if self._running is not None:
            self._run(self._running.end_epoch)

    def _run(self, action: Callable[[*_Arguments], object], *arguments: *_Arguments) -> None:
        if self._guard is None:
            action(*arguments)
        else:
            self._guard(action, *arguments)

    def _look(self, gradients: Gradients, measurements: Measurements, groups: ParameterGroups, device: torch.device) -> None:
        _, decision = self._follow(groups, device).decide(gradients, measurements)
        self._clipped += _changes(gradients, decision)

    def _follow(self, groups: ParameterGroups, device: torch.device) -> RunningPolicy:
        """The running policy over these parameters. Raises where that cannot be right."""
        split = any(entry.splits for entry in groups.entries)
        if split and (isinstance(self._policy, MaxValue) or self._policy.scope == "unit"):
            raise ValueError(f"dry_run=[{self._policy}]: parameters are split over ranks, of which each would count its own part")
        if self._running is None:
            self._running = RunningPolicy(self._policy, groups, device)
        self._running.follow(groups, device)
        if self._clipped.device != device:
            meta = self._clipped.is_meta  # the model had no data yet
            self._clipped = torch.zeros_like(self._clipped, device=device) if meta else self._clipped.to(device)
        return self._running


def _changes(gradients: Gradients, decision: Decision) -> torch.Tensor:
    """Whether a decision changes anything."""
    if decision.coefficients is not None:
        return (decision.coefficients != 1).any()
    if decision.skip is not None:
        return decision.skip
    limit = decision.threshold if decision.limit is None else decision.limit
    limit = limit if gradients.scale is None else limit * gradients.scale.to(limit.device)
    largest = [torch.linalg.vector_norm(part, torch.inf).to(limit) for part in gradients.parts if part.numel()]
    return (torch.stack(largest) > limit).any() if largest else torch.zeros_like(limit, dtype=torch.bool)
