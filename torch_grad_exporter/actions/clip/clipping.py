"""Clipping: a policy and the candidates of `dry_run=` over some parameters; what `Clipper` and `clip=` have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_grad_exporter.actions.clip.gradients import Gradients, gradients_of
from torch_grad_exporter.actions.clip.parameters import ParameterSet, ParameterTracker
from torch_grad_exporter.actions.clip.policies import MaxValue
from torch_grad_exporter.actions.clip.policy import Decision, GradientNorms, NoClipping, Policy, policy_name
from torch_grad_exporter.actions.clip.policy_run import PolicyRun
from torch_grad_exporter.actions.clip.skipping import InRowLimit, SkipNonFinite
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.torch_compat.tensors import local


class Clipping:
    """Clips all gradients of its parameters at each call. Never reads a value.

    Args:
        tracker: Has the parameters.
        policies: Those that skip steps, then at most one that changes gradients, see `checked_clip`.
        dry_run: The candidates, which change nothing.
        foreach: See `Gradients`.
        counts: Whether to count the steps in which a gradient was changed.
        guards: One for each candidate, which keeps its failures from the clipping; without them they are raised.

    Raises:
        ValueError: The parameters cannot be clipped by these policies.
    """

    def __init__(
        self,
        tracker: ParameterTracker,
        policies: Sequence[Policy],
        dry_run: Sequence[Policy] = (),
        *,
        foreach: bool | None = None,
        counts: bool = False,
        guards: Sequence[Guard] = (),
    ) -> None:
        parameters = tracker.current()
        if parameters is None:
            raise ValueError("there are no parameters to clip")
        self._tracker, self._foreach, self._counts = tracker, foreach, counts
        self.device = local(parameters.entries[0].parameter).device
        changing = next((policy for policy in policies if not policy.skips), NoClipping())
        self.active = PolicyRun(changing, self.device)
        self.skipping = tuple(PolicyRun(policy, self.device) for policy in policies if policy.skips)
        # A norm that is not finite is no norm for a policy over the model anyway.
        self._hides_skipped = changing.scope != "model" or not all(isinstance(p, SkipNonFinite) for p in policies if p.skips)
        self._in_row = InRowLimit()
        self.candidates = tuple(PolicyRun(candidate, self.device) for candidate in dry_run)
        self._guarded = tuple(zip(self.candidates, guards or [Guard(_raised)] * len(dry_run), strict=True))
        self._epoch: int | None = None
        self._follow(parameters, self.device)
        for candidate, guard in self._guarded:
            guard(_follow_as_candidate, candidate, parameters, self.device)

    @property
    def remembers(self) -> bool:
        """Whether a memory changes from step to step."""
        return bool(self.active.saved or self.candidates or any(run.saved for run in self.skipping))

    def __call__(
        self,
        scale: torch.Tensor | None = None,
        *,
        loss: float | torch.Tensor | None = None,
        left_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Clip the gradients that there are now.

        Args:
            scale: The loss scale by which gradients are still multiplied. Norms and thresholds are those without it.
            loss: The loss of this step, for policies that judge it.
            left_out: Whether a gradient scaler makes the optimizer skip the step.

        Returns:
            The global norm before clipping, on its device, and whether to skip the step, None if no policy skips steps or there
            is no gradient.
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
            judged = None if loss is None else self._on_device(loss)
            known: dict[tuple[object, ...], GradientNorms] = {}

            def norms(run: PolicyRun) -> GradientNorms:
                if run.policy.skips and known:  # all have the norm of all gradients
                    return next(iter(known.values()))
                key = run.policy.scope, run.policy.needs_weights, run.policy.exact
                if key not in known:  # else another policy has asked for the same, which may have cost a collective
                    known[key] = run.meter(gradients)
                    known[key].loss, known[key].left_out = judged, left_out
                return known[key]

            measured = norms(self.active)
            skip, total = self._skip(measured), measured.total
            if skip is not None and self._hides_skipped:  # a skipped step enters no history, and is not clipped as well
                measured = GradientNorms(torch.where(skip, torch.nan, measured.norms), total, measured.weights)
            decision = self.active.decide(measured)
            changes = decision.changes if self._counts else None  # MaxValue is not counted
            if changes is not None:
                self.active.clipped_steps += changes
            for candidate, guard in self._guarded:  # before anything is changed
                guard(self._try, candidate, norms, gradients)
            gradients.clip(decision, parameters, self.active.policy.scope)
            return total, skip

    def _try(self, candidate: PolicyRun, norms: Callable[[PolicyRun], GradientNorms], gradients: Gradients) -> None:
        """Count the step if the candidate would have changed it."""
        _follow_as_candidate(candidate, self.parameters, self.device)
        decision = candidate.decide(norms(candidate))
        changes = decision.changes
        candidate.clipped_steps += _exceeds(gradients, decision) if changes is None else changes

    def _skip(self, measured: GradientNorms) -> torch.Tensor | None:
        """Return whether to skip the step. It counts for the first policy that wants it."""
        skip: torch.Tensor | None = None
        for run in self.skipping:
            wanted = run.decide(measured).skip
            if wanted is not None:
                first = wanted if skip is None else wanted & ~skip
                run.clipped_steps += first
                skip = wanted if skip is None else skip | wanted
        return skip

    def read(self, skip: torch.Tensor) -> bool:
        """Return whether the step is to be skipped. The only place here that may wait for a device.

        Raises:
            TooManySkippedSteps: Too many steps were skipped in a row.
            ValueError: It would wait, which no policy allows.
        """
        device, waits = skip.device.type, any(run.policy.synchronize for run in self.skipping)
        if device != "cpu" and not waits:
            raise ValueError(
                f"SkipAbove: the gradients are on {skip.device}, so their norm can only be read by waiting for it; allow that by"
                " SkipAbove(..., synchronize=True), or use fused optimizers, which a Clipper has to know (optimizers=)"
            )
        skipped = bool(skip)
        if skipped:
            self.check_in_row(waits=True)
        return skipped

    def check_in_row(self, *, waits: bool) -> None:
        """Raise `TooManySkippedSteps` if more steps were skipped in a row than allowed."""
        for run in self.skipping:
            if isinstance(run.policy, SkipNonFinite) and (in_row := run.memory.get("in_row")) is not None:
                self._in_row.check(run.policy, in_row, waits=waits)

    def observe(self, loss: float | torch.Tensor, epoch: float | None) -> None:
        """Give all policies a loss; see `Clipper.observe`."""
        with torch.inference_mode(mode=False), torch.no_grad():  # memories are written to later, outside of it
            value = self._on_device(loss)
            number = None if epoch is None else math.floor(epoch)
            begins = self._epoch is not None and number != self._epoch
            self.active.observe(value, begins, number is None)
            for candidate, guard in self._guarded:
                guard(candidate.observe, value, begins, number is None)
            self._epoch = number

    def _on_device(self, loss: float | torch.Tensor) -> torch.Tensor:
        if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
            return loss.detach().reshape(()).to(self.device, wide(self.device))
        # A number needs no copy from the host, which would wait.
        return torch.full((), float(loss), device=self.device, dtype=wide(self.device))

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """Return what the policies and the candidates remember; as copies unless nothing else will use it."""
        candidates = [run.state(copied=copied) for run in self.candidates]
        skipping = {policy_name(run.policy): run.state(copied=copied) for run in self.skipping}
        return {**self.active.state(copied=copied), "epoch": self._epoch, "skipping": skipping, "candidates": candidates}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `TypeError` or `ValueError` if a state does not fit."""
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict({type(state).__name__}): expected what state_dict() returned")
        candidates = state.get("candidates", ())
        if len(candidates) != len(self.candidates):
            raise ValueError(f"load_state_dict(): the state has {len(candidates)} candidates, this clipper {len(self.candidates)}")
        self.active.check(state)
        for run, its in [*zip(self.candidates, candidates, strict=True), *self._skipping_in(state)]:
            run.check(its)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` returned. Raises if it does not fit, and then nothing has changed."""
        self.check(state)
        self.active.load(state)
        for run, its in [*zip(self.candidates, state.get("candidates", ()), strict=True), *self._skipping_in(state)]:
            run.load(its)
        self._epoch = state.get("epoch")

    def _skipping_in(self, state: Mapping[str, Any]) -> list[tuple[PolicyRun, Mapping[str, Any]]]:
        """Return the policies that skip steps with what was saved of each: a run may go on with other ones."""
        saved = state.get("skipping", {})
        return [(run, saved[name]) for run in self.skipping if (name := policy_name(run.policy)) in saved]

    def _follow(self, parameters: ParameterSet, device: torch.device) -> None:
        for run in (self.active, *self.skipping):
            run.follow(parameters, device)
        self.parameters, self.device = parameters, device


def _raised(error: Exception) -> None:
    """Raise a candidate's failure, which the caller is to see."""
    raise error


def _follow_as_candidate(run: PolicyRun, parameters: ParameterSet, device: torch.device) -> None:
    """Like `PolicyRun.follow`. Raises `ValueError` if ranks would count differently."""
    if parameters.sharded and (isinstance(run.policy, MaxValue) or run.policy.scope == "unit"):
        raise ValueError(f"dry_run=[{run.policy}]: parameters are split over ranks, of which each would count its own part")
    run.follow(parameters, device)


def _exceeds(gradients: Gradients, decision: Decision) -> torch.Tensor:
    """Return whether an element is beyond the limit of a decision."""
    if decision.limit is None or not gradients.parts:
        return torch.zeros((), dtype=torch.bool)
    limit = gradients.scaled(decision.limit)
    largest = [torch.linalg.vector_norm(part, torch.inf).to(limit) for part in gradients.parts if part.numel()]
    return (torch.stack(largest) > limit).any() if largest else torch.zeros_like(limit, dtype=torch.bool)
