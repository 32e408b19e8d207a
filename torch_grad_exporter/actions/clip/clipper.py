"""Clipper: carries out a policy on the gradients of a model, where the user calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_grad_exporter.actions.clip.clipping import Clipping, check_fits, check_observed
from torch_grad_exporter.actions.clip.policy import Decision, Policy, checked_policies, checked_policy
from torch_grad_exporter.actions.clip.running import Candidate
from torch_grad_exporter.actions.clip.skipping import FusedSteps, SkipAbove, remove_gradients
from torch_grad_exporter.actions.clip.table import Parameters


class Clipper:
    """Clips gradients by a policy, in place of `clip_grad_norm_`: `norm = clipper()` between the backward and the step.

    `model_or_parameters`: a model, whose parameters may change later; its parameters; or pairs of names and parameters. Of bare
    parameters each is a layer of its own. `dry_run`: policies that only say what they would have done, see `candidates`. `foreach`
    as in `clip_grad_norm_`. `optimizers`: fused ones, for `SkipAbove` alone.

    With a gradient scaler call `scaler.unscale_(optimizer)` first, as before `clip_grad_norm_`. No call waits for a device. A
    norm that is not finite changes nothing and enters no history. Where ranks have different parts of parameters (FSDP2,
    tensor parallelism), a call is a collective: each rank calls it in each step.
    """

    def __init__(
        self,
        model_or_parameters: torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        policy: Policy,
        *,
        dry_run: Sequence[Policy] = (),
        foreach: bool | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        checked_policy(policy, "Clipper(policy={!r})")
        checked_policies(dry_run, "Clipper(dry_run={!r})")
        _check(policy, foreach, optimizers)
        parameters = Parameters(model_or_parameters)
        check_fits((policy, *dry_run), parameters.groups().layers)
        self._clipping = Clipping(parameters, policy, dry_run, foreach=foreach, told=bool(optimizers))
        self._fused = FusedSteps(tuple(optimizers)) if optimizers else None

    @property
    def policy(self) -> Policy:
        """The policy that it was given."""
        return self._clipping.running.policy

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The policies of `dry_run`, each with its `threshold`, `coefficients` and `clipped_steps`, on the device."""
        return self._clipping.candidates

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order of `threshold` and `coefficients` in the scope `layer`."""
        return self._clipping.groups.layers

    @property
    def threshold(self) -> torch.Tensor | None:
        """The largest norm, or value, that the last call left alone, on the device; `None` before the first call."""
        return None if self._clipping.running.decision is None else self._clipping.running.decision.threshold

    @property
    def coefficients(self) -> torch.Tensor | None:
        """By what the last call multiplied gradients, on the device; `None` where it did not, as under `MaxValue`."""
        return None if self._clipping.running.decision is None else self._clipping.running.decision.coefficients

    def __call__(self) -> torch.Tensor:
        """Clips the gradients that there are now. Returns their global norm before clipping, on their device."""
        norm, decision = self._clipping()
        self._skip(decision)
        return norm

    def observe(self, loss: float | torch.Tensor, *, epoch: float | None = None) -> None:
        """Gives `Plateau` a loss; other policies need none. A loss on a device stays there.

        Without `epoch` it is the loss of a whole epoch. With it, losses of an epoch are averaged, and judged once an observation
        names another epoch. The whole part of `epoch` counts.
        """
        check_observed(loss, epoch)
        self._clipping.observe(loss, epoch)

    def state_dict(self) -> dict[str, Any]:
        """What the policy and the candidates remember, as copies of their tensors."""
        return self._clipping.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict()` of a clipper with the same policies and scopes returned."""
        self._clipping.load(state_dict)

    def close(self) -> None:
        """Takes its hooks off fused optimizers; else there is nothing to end."""
        if self._fused is not None:
            self._fused.close()

    def _skip(self, decision: Decision | None) -> None:
        if self._fused is not None and decision is None:
            self._fused.forget()
        elif self._fused is not None and decision is not None and decision.skip is not None:
            self._fused.tell(decision.skip)
        elif decision is not None and decision.skip is not None and isinstance(self.policy, SkipAbove):
            remove_gradients(self._clipping.groups, decision.skip, synchronize=self.policy.synchronize)


def _check(policy: Policy, foreach: object, optimizers: object) -> None:
    if foreach is not None and not isinstance(foreach, bool):
        raise ValueError(f"Clipper(foreach={foreach!r}): expected True, False or None")
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(f"Clipper(optimizers={type(optimizers).__name__}(...)): expected a list of optimizers")
    if optimizers and not isinstance(policy, SkipAbove):
        raise ValueError(f"Clipper(optimizers=...): {type(policy).__name__} needs none; leave them out")
