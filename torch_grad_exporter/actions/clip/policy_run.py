"""PolicyRun: a policy at work, with its memory and what it has come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_grad_exporter.actions.clip.gradients import NormMeter
from torch_grad_exporter.actions.clip.parameters import ParameterSet
from torch_grad_exporter.actions.clip.policy import Decision, GradientNorms, Memory, NormGroups, Policy
from torch_grad_exporter.statistics.device import to_device, wide


class PolicyRun:
    """A policy with its memory. It follows the model: layers that stay keep what is remembered of them.

    Attributes:
        policy: The policy.
        decision: Its decision in the last step, None before the first one.
        clipped_steps: The steps in which it changed a gradient or skipped the step, or would have as a candidate; on the device.
        memory: What it remembers.
        meter: Measures what it needs, from `follow` on.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.policy = policy
        self.decision: Decision | None = None
        self.clipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.memory: Memory = {}
        self.meter: NormMeter
        self._parameters: ParameterSet | None = None  # until `follow`, which sets what is over these
        self._groups: NormGroups
        self._layer_of_unit: torch.Tensor | None = None

    @property
    def threshold(self) -> torch.Tensor | None:
        """The largest norm, or value, that was left alone in the last step, on the device."""
        if self.decision is None:
            return None
        threshold = self.decision.threshold
        return threshold if isinstance(threshold, torch.Tensor) else self._groups.full(threshold)

    @property
    def coefficients(self) -> torch.Tensor | None:
        """The factors of the gradients in the last step, on the device."""
        return None if self.decision is None else self.decision.coefficients

    @property
    def saved(self) -> Memory:
        """The part of the memory that does not follow from the settings."""
        return {name: tensor for name, tensor in self.memory.items() if name not in self.policy.settings}

    def decide(self, measured: GradientNorms) -> Decision:
        """Decide about a step."""
        self.decision = decision = self.policy.decide(measured, self.memory)
        return decision

    def follow(self, parameters: ParameterSet, device: torch.device) -> None:
        """Go on with other parameters, or on another device. What raises changes nothing."""
        before, old_memory = self._parameters, self.memory
        if before is not None and parameters is before and device == self._groups.device:
            return
        scope = self.policy.scope
        count = len(parameters.layers) if scope == "layer" else sum(entry.units for entry in parameters.entries)
        groups = NormGroups(() if scope == "model" else (count,), parameters.layers, device, wide(device))
        meter, memory = NormMeter(parameters, self.policy, device), self.policy.start(groups)
        # From here on nothing raises, so a failure above leaves everything as it was.
        self._parameters, self._groups, self.meter, self.memory, self.decision = parameters, groups, meter, memory, None
        self._layer_of_unit = None
        if self.clipped_steps.device != device:
            meta = self.clipped_steps.is_meta  # the model had no data yet
            self.clipped_steps = torch.zeros_like(self.clipped_steps, device=device) if meta else self.clipped_steps.to(device)
        if before is None:
            return
        kept = [(new, before.layers.index(layer)) for new, layer in enumerate(parameters.layers) if layer in before.layers]
        for name, tensor in self.saved.items():
            old = old_memory[name]
            if old.is_meta:  # the model had no data yet
                continue
            if scope != "layer" or old.ndim == 0:
                tensor.copy_(old)
            else:
                for new, place in kept:
                    tensor[..., new] = old[..., place]

    def shown_threshold(self) -> torch.Tensor | None:
        """Return the threshold for all, or that of each layer: of its units the smallest."""
        threshold, parameters = self.threshold, self._parameters
        if threshold is None or parameters is None or self.policy.scope != "unit" or threshold.ndim == 0:
            return threshold
        if self._layer_of_unit is None:
            pairs = zip(parameters.entries, parameters.layer_of, strict=True)
            self._layer_of_unit = to_device([layer for entry, layer in pairs for _ in range(entry.units)], threshold.device)
        least = torch.full((len(parameters.layers),), torch.inf, device=threshold.device, dtype=threshold.dtype)
        return least.scatter_reduce_(0, self._layer_of_unit, threshold, "amin")

    def observe(self, loss: torch.Tensor, begins: bool, whole: bool) -> None:
        """Pass a loss on. `begins`: it is the first of an epoch; `whole`: it is that of a whole epoch."""
        if self._parameters is None:
            return
        if begins:
            self.policy.end_epoch(self.memory)
        self.policy.observe(loss, self.memory)
        if whole:
            self.policy.end_epoch(self.memory)

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """Return what is to be saved, as copies unless nothing else will use it."""
        memory = {name: tensor.clone() if copied else tensor for name, tensor in self.saved.items()}
        layers = () if self._parameters is None else self._parameters.layers
        steps = self.clipped_steps.clone() if copied else self.clipped_steps
        return {"policy": type(self.policy).__name__, "layers": [*layers], "memory": memory, "clipped_steps": steps}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `ValueError` if a state is that of another policy, another size of its history, or another model."""
        name, memory, saved = state.get("policy"), state.get("memory"), self.saved
        if name != type(self.policy).__name__ or not isinstance(memory, Mapping):
            raise ValueError(f"load_state_dict(): the state is one of {name!r}, this clipper has {type(self.policy).__name__}")
        if any(tensor.is_meta for tensor in saved.values()):
            raise ValueError("load_state_dict(): the model has no data yet; load the state when its parameters are on their device")
        layers = () if self._parameters is None else self._parameters.layers
        if self.policy.scope == "layer" and saved and tuple(state.get("layers", ())) != layers:
            raise ValueError("load_state_dict(): the state has other layers than this clipper; load it for the same model")
        for key, tensor in saved.items():
            given = memory.get(key)
            if not isinstance(given, torch.Tensor) or given.shape != tensor.shape:
                shape = tuple(given.shape) if isinstance(given, torch.Tensor) else "nothing"
                raise ValueError(
                    f"load_state_dict(): {key!r} has the shape {shape}, expected {tuple(tensor.shape)};"
                    " make the policy with the settings of the one that was saved"
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `check` has passed."""
        memory = state["memory"]
        self.memory.update({key: memory[key].to(tensor.device, tensor.dtype, copy=True) for key, tensor in self.saved.items()})
        if "clipped_steps" in state:
            self.clipped_steps.copy_(state["clipped_steps"])
