"""TrainingLoop: what PyTorch's hooks and the user's calls mean for the clock and the capture.

Unsampled steps pass here too, so every line counts: a forward costs two calls, a step two more, and nothing
here depends on the number of parameters.
"""

from __future__ import annotations

import functools
import numbers
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.capture.capture import GradientCapture
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.count_only import CountOnly
from torch_grad_exporter.capture.progress import FORWARD, OUTSIDE, StepClock
from torch_grad_exporter.capture.reader import GradientReader, Scaler
from torch_grad_exporter.capture.schedule import HOOKS_SECONDS, SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Handle, Hooks
from torch_grad_exporter.capture.weights import WeightProbe
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat import at_end_of_backward, called_from_step, graph_task
from torch_grad_exporter.transfer.events import Mailbox, Observed
from torch_grad_exporter.transfer.tracing import active_trace
from torch_grad_exporter.transfer.transfer import Arrived, HostTransfer, Ticket

READ_SECONDS = 0.5
"""Learning rates, and losses that models return, are read at sampled steps and otherwise this often at most."""

GROUPS = 64
"""Parameter groups of an optimizer whose learning rates are shown."""

Number = float | int | torch.Tensor | np.number[Any]


class TrainingLoop:
    """Receives forwards, steps and observations, all on the training thread.

    `periodic`: something else that belongs to that thread, to be done behind a guard of its own at the end of steps and of an
    evaluation's forwards.
    """

    def __init__(
        self,
        *,
        clock: StepClock,
        cost: SampleCost,
        capture: GradientCapture,
        reader: GradientReader,
        optimizers: Optimizers,
        schedule: SamplingSchedule,
        mailbox: Mailbox,
        hooks: Hooks,
        errors: ErrorLog,
        models: int = 1,
        weights: WeightProbe | None = None,
        periodic: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._capture = capture
        self._reader = reader
        self._optimizers = optimizers
        self._schedule = schedule
        self._mailbox = mailbox
        self._weights = weights
        self._periodic = periodic
        self._errors = errors
        self._models = models
        self._transfer = HostTransfer(ring=64)
        self._end_hook = hooks.guarded("optimizer_hook", self._backward_ended)
        self._hooks = hooks
        self._look_hook = hooks.guarded("optimizer_hook", self._look)
        self._late_hook: Handle | None = None
        self._within = -1
        self._stepped_within: set[int] = set()
        self._hooked = False
        """Whether an optimizer's hook has told of a step since the user last did."""
        self._forwards = False
        """Whether there was a training forward, outside of a backward, since the last step."""
        self._settings_read = self._loss_read = float("-inf")
        self.count_only = CountOnly(
            clock=clock,
            capture=capture,
            schedule=schedule,
            optimizers=optimizers,
            mailbox=mailbox,
            hooks=hooks,
            other=self._late_step,
        )
        capture.on_backward = self.count_only.settle

    # Hooks

    def forward_began(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A root's forward begins; outside of training it only shows that the loop is alive."""
        self.count_only.settle()
        clock = self._clock
        start = clock.clock()
        clock.active()
        clock.evaluating = not module.training
        if clock.stepping and not called_from_step(sys._getframe(1)):
            clock.leave_step()
            self._capture.step_was_abandoned()
        if torch.is_grad_enabled():
            self._capture.forward_began(module)
        if module.training and torch.is_grad_enabled():
            # Checkpoints run forwards again within the backward; a reentrant one runs its first forward without grad.
            again = graph_task() != -1
            if not again:
                clock.switch(FORWARD)
            if clock.samples_known and not (again and self._forwards):
                self._count_samples(args, kwargs)
            self._forwards |= not again
        clock.own_seconds += clock.clock() - start

    def forward_ended(self, model: int, module: torch.nn.Module, _args: object, _kwargs: object, output: object) -> None:
        """The forward of the root of this number is over: the capture hooks its output, a loss in it is observed."""
        clock = self._clock
        start = clock.clock()
        if graph_task() != -1:
            return
        clock.switch(OUTSIDE)
        if torch.is_grad_enabled():
            self._capture.forward_ended(model, output)
            if module.training and not isinstance(output, torch.Tensor):
                self._observe_output(output)
        if self._periodic is not None and not module.training:
            self._periodic()
        clock.own_seconds += clock.clock() - start

    def step_began(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, over: bool = False
    ) -> None:
        """Before any optimizer's step; foreign are ignored. `args` begin with the optimizer itself.

        `over`: it was not seen until it was over, so that no other hook is to be waited for.
        """
        self.count_only.settle()
        within = graph_task() != -1
        inside = self._capture.stepping if self._clock.stepping else frozenset()
        number = self._optimizers.number(optimizer, within_backward=within, inside=inside)
        if number is None:
            self._capture.current.foreign |= not inside
            self._capture.tool_steps(inside)
            return
        start = self._clock.clock()
        if within:
            self._step_within_backward(number, optimizer)
            self._clock.own_seconds += self._clock.clock() - start
            return
        if self._clock.stepping and not called_from_step(sys._getframe(3)):
            self._clock.leave_step()
            self._capture.step_was_abandoned()
        if self._clock.stepping and number in self._capture.stepping:
            return  # `step` has called `super().step()`
        self._clock.step_began()
        sampled = self._capture.current.sampled
        if sampled:
            self._find_scaler()
        if sampled and not over and self._hooks.others_follow(optimizer):
            self._late_hook = optimizer.register_step_pre_hook(self._look_hook)
        else:
            self._look(optimizer, args, kwargs)
        self._clock.own_seconds += self._clock.clock() - start

    def _look(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Right before an optimizer's step, when nobody will change the gradients any more."""
        number = self._optimizers.number(optimizer)
        if number is None:
            return
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        sampled = self._capture.current.sampled
        # A scaler sets both for the time of a fused optimizer's step.
        found_inf = _tensor(getattr(optimizer, "found_inf", None))
        grad_scale = None if found_inf is None else _tensor(getattr(optimizer, "grad_scale", None))
        self._capture.step_began(number, closure=closure, grad_scale=grad_scale, found_inf=found_inf)
        if sampled and self._weights is not None:
            self._weigh(functools.partial(self._weights.before, self._capture.current.table, number, self._owners(number)))

    def step_ended(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """After any optimizer's step."""
        number = self._optimizers.number(optimizer)
        if number is not None and graph_task() == -1:
            self._hooked = True
            self._step_ended(number)
            self.release()

    def close(self) -> None:
        """Ends a stretch and takes back the hook of a single step; idempotent."""
        self.count_only.settle()
        self.release()

    def release(self) -> None:
        """Takes back the hook of a single step; idempotent."""
        hook, self._late_hook = self._late_hook, None
        if hook is not None:
            hook.remove()

    def _step_within_backward(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps before the backward is over: all that do so are one step, at the backward's end."""
        self._capture.step_within_backward(number, optimizer)
        if graph_task() != self._within:
            self._within = graph_task()
            self._stepped_within.clear()
            at_end_of_backward(self._end_hook)
        self._stepped_within.add(number)

    def _backward_ended(self) -> None:
        self._hooked = True
        for number in sorted(self._stepped_within):
            self._step_ended(number)

    def _step_ended(self, number: int) -> None:
        start = self._clock.clock()
        self._forwards = False
        sampled = self._capture.current.sampled
        first = self._capture.step_ended(number)
        if first is None:
            return
        if sampled and self._weights is not None:
            self._weigh(functools.partial(self._weights.after, number))
        if sampled or start - self._settings_read > READ_SECONDS:
            self._read_settings()
        if self._periodic is not None:
            self._periodic()
        self._clock.own_seconds += self._clock.clock() - start + (HOOKS_SECONDS if first else 0.0)
        own = self._clock.own_seconds
        seconds = self._clock.step_ended(first_of_round=first, trace=active_trace() if sampled else None)
        if seconds is not None:
            self._schedule.stepped(seconds - own, None if sampled else own)
        if first:
            self.count_only.round_over()

    def _late_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped of which nobody thought that it would, so that its step's beginning was not seen."""
        self.step_began(optimizer, (), {}, over=True)
        self.step_ended(optimizer, (), {})

    def _weigh(self, action: Callable[[], None]) -> None:
        """A part of the weight probe, behind a guard of its own; its time belongs to the sample."""
        self._cost.of(self._errors.guard, "weights", action)

    def _owners(self, optimizer: int) -> IntArray:
        return self._optimizers.owners(self._capture.current.table, {optimizer})[0]

    def _find_scaler(self) -> None:
        """Looks for a gradient scaler among the callers of the step that has just begun."""
        self._reader.steps_seen = True
        scaler = calling_scaler(sys._getframe(1))
        if scaler is not None:
            self._reader.use_scaler(scaler)

    def _count_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        size = batch_size(args, kwargs) if self._models == 1 else None
        if size is None:
            self._clock.samples_known = False
        else:
            self._clock.samples += size

    # The user's calls

    def observe(self, name: str, value: Number) -> None:
        """Takes an observed value; a tensor's first element is copied without waiting for it."""
        if name == "samples":
            self._clock.samples_known = False
        start = self._clock.clock()
        ticket = self._sent(value)
        if ticket is not None:
            if name == "grad_norm":
                self.count_only.norm_comes()
            self._mailbox.append(Observed(name, ticket))
            if name == "grad_norm":
                (self.count_only if self.count_only.counting else self._capture).norm_observed()
        self._clock.own_seconds += self._clock.clock() - start

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done; counts it unless an optimizer's hook has said so already."""
        self.count_only.settle()
        if not (self._hooked and self._capture.current.stepped):
            optimizer = self._optimizers.manual()
            self._clock.step_began()
            self._capture.step_began(optimizer, closure=False)
            self._step_ended(optimizer)
        self._hooked = False
        if number is not None:
            self._capture.set_step(number)

    # Values

    def _observe_output(self, output: object) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        moment = self._clock.clock()
        if self._capture.current.sampled or moment - self._loss_read > READ_SECONDS:
            self._loss_read = moment
            self.observe("loss", loss)

    def _read_settings(self) -> None:
        self._settings_read = self._clock.clock()
        # Those that share a number step within the backward, one per parameter; the first stands for them.
        for number, optimizer in dict(reversed(self._optimizers.numbered())).items():
            for group, settings in enumerate(optimizer.param_groups[:GROUPS]):
                rate = None if settings.get("lr") is None else self._sent(settings["lr"])
                if rate is not None:
                    self._mailbox.append(Observed("learning_rate", rate, (self._optimizers.names[number], str(group))))
        if self._reader.scale is not None:
            self.observe("loss_scale", self._reader.scale)

    def _sent(self, value: object) -> Ticket | float | None:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"expected a number or a tensor of one element, got one of shape {tuple(value.shape)}")
            if value.device.type == "cpu":
                if type(value) is torch.Tensor:
                    return float(value.item())  # nothing is waited for, and one call is what a step's loss may cost
                return Arrived(value.detach().reshape(1).double().clone().numpy())
            return self._transfer.send(value.detach().reshape(1))
        if isinstance(value, numbers.Real):
            return float(value)
        raise TypeError(f"expected a number or a tensor of one element, got {type(value).__name__}")


def _tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def batch_size(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """The first dimension of the first tensor input; `None` if other tensors disagree or there is none."""
    sizes = [value.shape[0] for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim() > 0]
    if any(type(size) is not int for size in sizes):
        return 0  # a tracer's symbols: this forward is no training
    return sizes[0] if len(set(sizes)) == 1 else None


def calling_scaler(frame: types.FrameType | None) -> Scaler | None:
    """The `torch.amp.GradScaler` whose `step` called the optimizer's, looked for in the nearest frames."""
    for _ in range(12):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
