"""Clipper: carries out a policy on the gradients of a model when the user calls it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_grad_exporter.actions.clip.clipping import Clipping
from torch_grad_exporter.actions.clip.options import checked_clip, checked_policies
from torch_grad_exporter.actions.clip.parameters import EXPECTED, ParameterTracker, listed
from torch_grad_exporter.actions.clip.policy import NoClipping, Policy
from torch_grad_exporter.actions.clip.policy_run import PolicyRun
from torch_grad_exporter.actions.clip.skipped_step import FusedSteps, RemovedGradients
from torch_grad_exporter.torch_compat.optimizers import remove_step_hooks


class Clipper:
    """Clips gradients by a policy, in place of `clip_grad_norm_`: `norm = clipper()` between the backward and the step.

    With a gradient scaler call `scaler.unscale_(optimizer)` first, as before `clip_grad_norm_`. No call waits for a device, but for
    what skips steps. A norm that is not finite changes nothing and enters no history. If parameters are sharded (FSDP2, tensor
    parallelism), a call is a collective: each rank calls it in each step.

    Args:
        model_or_parameters: A model, whose parameters may change later; its parameters; or pairs of names and parameters.
            Each bare parameter is its own layer.
        policy: The policy, such as `MaxNorm(1.0)`, or a list of policies, such as `[SkipNonFinite(), MaxNorm(1.0)]`.
        dry_run: Policies that only say what they would have done, see `candidates`.
        foreach: As in `clip_grad_norm_`.
        optimizers: Fused optimizers, only for policies that skip steps.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is wrong, or a parameter cannot be clipped.
    """

    def __init__(
        self,
        model_or_parameters: torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        policy: Policy | Sequence[Policy],
        *,
        dry_run: Sequence[Policy] = (),
        foreach: bool | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        if policy is None:
            raise TypeError("Clipper(policy=None): expected a policy, such as MaxNorm(1.0)")
        policies = checked_clip(policy, "Clipper(policy={})")
        checked_policies(dry_run, "Clipper(dry_run={})")
        if foreach is not None and not isinstance(foreach, bool):
            raise ValueError(f"Clipper(foreach={foreach!r}): expected True, False or None")
        if isinstance(optimizers, torch.optim.Optimizer):
            raise TypeError(f"Clipper(optimizers={type(optimizers).__name__}(...)): expected a list of optimizers")
        if optimizers and not any(each.skips for each in policies):
            raise ValueError(f"Clipper(optimizers=...): {type(policy).__name__} needs none; leave them out")
        is_model = isinstance(model_or_parameters, torch.nn.Module)
        self._models = {"": model_or_parameters} if isinstance(model_or_parameters, torch.nn.Module) else {}  # kept alive
        tracker = ParameterTracker(self._models, fixed=[] if is_model else [*listed(model_or_parameters)])
        parameters = tracker.current()
        if parameters is None:
            raise ValueError(f"Clipper(model_or_parameters=...): it has no parameters; {EXPECTED}")
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        for each in (*policies, *dry_run):
            each.check_layers(parameters.layers)
            each.check_ranks(world_size)
        self._clipping = Clipping(tracker, policies, dry_run, foreach=foreach)
        self._fused = FusedSteps(optimizers) if optimizers else None
        self._removed = RemovedGradients()
        self._restoring: weakref.finalize[..., Clipper] | None = None
        self._judges_loss = any(each.judges_loss for each in (*policies, *dry_run))
        self._loss: float | torch.Tensor | None = None

    @property
    def policy(self) -> Policy:
        """The policy that changes gradients; if there is none, the last one that skips steps."""
        return self._shown.policy

    @property
    def skipping(self) -> tuple[PolicyRun, ...]:
        """The policies that skip steps, each with the number of them, `clipped_steps`, on the device."""
        return self._clipping.skipping

    @property
    def candidates(self) -> tuple[PolicyRun, ...]:
        """The policies of `dry_run`, each with its `threshold`, `coefficients` and `clipped_steps`, on the device."""
        return self._clipping.candidates

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order of `threshold` and `coefficients` in the scope `layer`."""
        return self._clipping.parameters.layers

    @property
    def threshold(self) -> torch.Tensor | None:
        """The largest norm, or value, that the last call left alone, on the device; None before the first call."""
        return self._shown.threshold

    @property
    def coefficients(self) -> torch.Tensor | None:
        """The factors of the gradients in the last call, on the device; None if it multiplied nothing, such as `MaxValue`."""
        return self._shown.coefficients

    def __call__(self) -> torch.Tensor:
        """Clip the gradients that there are now.

        Returns:
            Their global norm before clipping, on their device.

        Raises:
            TooManySkippedSteps: See `SkipNonFinite`.
        """
        loss, self._loss = self._loss, None
        self._removed.forget()  # of a step that was not taken
        norm, skip = self._clipping(loss=loss)
        if self._fused is not None:
            self._fused.skip_next(skip)  # None, without a gradient: the flags of an earlier call must not hold
            self._clipping.check_in_row(waits=False)
        elif skip is not None and self._clipping.read(skip):
            self._removed.remove(self._clipping.parameters.parameters)
            if self._restoring is None or not self._restoring.alive:
                handle = register_optimizer_step_post_hook(_restoring(self._removed))
                self._restoring = weakref.finalize(self, remove_step_hooks, [handle])
                self._restoring.atexit = False
        return norm

    @property
    def _shown(self) -> PolicyRun:
        clipping = self._clipping
        return clipping.skipping[-1] if isinstance(clipping.active.policy, NoClipping) else clipping.active

    def observe(self, loss: float | torch.Tensor, *, epoch: float | None = None) -> None:
        """Give `Plateau` and `SkipAbove(on="loss")` a loss; other policies need none. A loss on a device stays there.

        Args:
            loss: A number or a tensor with one element.
            epoch: The epoch of the loss, whose whole part counts. Losses of an epoch are averaged, and judged when an
                observation names another epoch. Without it the loss is that of a whole epoch.

        Raises:
            TypeError: The loss is of a wrong type.
            ValueError: The loss has several elements or is complex, or the epoch is not a finite number.
        """
        if isinstance(loss, bool) or not isinstance(loss, int | float | torch.Tensor):
            raise TypeError(f"observe(loss={loss!r}): expected a number or a tensor with one element")
        if isinstance(loss, torch.Tensor) and (loss.numel() != 1 or loss.is_complex()):
            raise ValueError(f"observe(loss=...): expected one real number, got a tensor of shape {tuple(loss.shape)}")
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int | float) or not math.isfinite(epoch)):
            raise ValueError(f"observe(epoch={epoch!r}): expected a finite number, such as 3")
        if self._judges_loss:
            self._loss = loss.detach().clone() if isinstance(loss, torch.Tensor) else loss
        self._clipping.observe(loss, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what the policy and the candidates remember, as copies of their tensors."""
        return self._clipping.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what `state_dict()` of a clipper with the same policies and scopes returned.

        Raises:
            TypeError: It is not such a dictionary.
            ValueError: It does not fit; then nothing has changed.
        """
        self._clipping.load(state_dict)

    def close(self) -> None:
        """Remove its hooks, which only policies that skip steps have."""
        if self._fused is not None:
            self._fused.close()
        if self._restoring is not None:
            self._restoring()


def _restoring(removed: RemovedGradients) -> Any:  # noqa: ANN401 - a hook, which does nothing once they are gone
    reference = weakref.ref(removed)

    def step_ended(optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        its = reference()
        if its is not None:
            its.restore(optimizer)

    return torch.compiler.disable(step_ended)  # type: ignore[no-untyped-call]
