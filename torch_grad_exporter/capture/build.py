"""Builds the capture side, from the first stage to the last; whoever builds it owns what is returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.capture import GradientCapture, Mode
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.loop import Number, TrainingLoop
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.capture.weights import WeightProbe
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.transfer.events import Mailbox


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What the user may ask for beside the gradients: own ones under DDP, and norms of weights and of their updates."""

    local_norm: bool = False
    weights: bool = False


class Capture:
    """The capture side as others see it. `models`: how many roots there are; `periodic`: see `TrainingLoop`."""

    def __init__(
        self,
        *,
        index: LayerIndex,
        models: int,
        optimizers: Optimizers,
        reader: GradientReader,
        schedule: SamplingSchedule,
        clock: StepClock,
        mailbox: Mailbox,
        hooks: Hooks,
        errors: ErrorLog,
        options: CaptureOptions,
        periodic: Callable[[], None] | None = None,
    ) -> None:
        cost = SampleCost(clock, schedule, reader.timer)
        self._reader = reader
        self._hooks = hooks
        self._gradients = GradientCapture(
            index=index, models=models, optimizers=optimizers, reader=reader, schedule=schedule, clock=clock, cost=cost,
            mailbox=mailbox, hooks=hooks, errors=errors, local_norm=options.local_norm,
        )  # fmt: skip
        self._loop = TrainingLoop(
            clock=clock, cost=cost, capture=self._gradients, reader=reader, optimizers=optimizers, schedule=schedule,
            mailbox=mailbox, hooks=hooks, errors=errors, models=models,
            weights=WeightProbe(mailbox) if options.weights else None, periodic=periodic,
        )  # fmt: skip

    def watch(self, number: int, module: torch.nn.Module) -> None:
        """Hooks the forwards of the root of this number."""
        self._hooks.on_module(module, self._loop.forward_began, functools.partial(self._loop.forward_ended, number))

    def watch_optimizers(self) -> None:
        """Hooks the steps of all optimizers; from here on the training is watched."""
        self._hooks.on_optimizers(self._loop.step_began, self._loop.step_ended)

    @property
    def mode(self) -> Mode:
        """The rung that is in use."""
        return self._gradients.mode

    @property
    def samples(self) -> int:
        """Rounds whose gradients were read."""
        return self._gradients.samples

    @property
    def skipped(self) -> int:
        """Rounds that were due to be sampled and were not."""
        return self._gradients.skipped

    @property
    def devices(self) -> frozenset[str]:
        """The kinds of devices that gradients were read from, such as `cpu` and `cuda`."""
        return self._reader.devices

    def observe(self, name: str, value: Number) -> None:
        """Takes an observed value."""
        self._loop.observe(name, value)

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done."""
        self._loop.manual_step(number)

    def look(self) -> None:
        """A few times a second, from any thread: lets an evaluation show while rounds are only counted."""
        self._loop.count_only.look()

    def settle(self) -> None:
        """Ends counting; idempotent. On the training thread."""
        self._loop.close()

    def close(self) -> None:
        """Hands over what is still open and removes the hooks of this round; idempotent."""
        self._gradients.close()

    def release(self) -> None:
        """Lets go of everything that keeps a parameter alive; idempotent, from any thread."""
        self._gradients.release()

    def release_witness(self) -> None:
        """Lets go of the parameter that tells of backwards in counted rounds; idempotent, from any thread."""
        self._loop.count_only.release()
