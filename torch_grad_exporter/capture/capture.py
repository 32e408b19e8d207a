"""Capture: builds the side that runs on the training thread, in the order of the data, and shows it to others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from torch_grad_exporter.capture.backward import BackwardHooks
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.counted_rounds import CountedRounds
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.forwards import ForwardHooks
from torch_grad_exporter.capture.inspections import Inspection, Inspections
from torch_grad_exporter.capture.observations import Observations
from torch_grad_exporter.capture.progress import StepClock, TrainingThread
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.steps import StepHooks
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.replicas import Reductions
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.store.records import Mailbox
from torch_grad_exporter.torch_compat.optimizers import LossScale


class Capture:
    """The hooks of PyTorch, the rounds that they follow, and what is read in them.

    Args:
        index: The parameters of the models.
        optimizers: The optimizers that own them.
        clock: Counts and times.
        cost: What samples cost.
        schedule: Which rounds to sample.
        reader: Measures gradients.
        loss_scale: The gradient scaler.
        hooks: Where PyTorch calls.
        mailbox: The queue to the worker.
        requests: What the worker asks for.
        errors: Counts failures.
        periodic: Something else to do on the training thread after steps, and after the forwards of an evaluation.
    """

    def __init__(
        self,
        *,
        index: LayerIndex,
        optimizers: Optimizers,
        clock: StepClock,
        cost: SampleCost,
        schedule: SamplingSchedule,
        reader: GradientReader,
        loss_scale: LossScale,
        hooks: Hooks,
        mailbox: Mailbox,
        requests: Requests,
        errors: ErrorLog,
        periodic: Callable[[], object] | None,
    ) -> None:
        self._index, self._schedule, self._reader, self._hooks = index, schedule, reader, hooks
        self._clock, self._thread = clock, TrainingThread()
        self.reductions, thread = Reductions(), self._thread
        self.inspections = inspections = Inspections(cost)
        self.rounds = rounds = RoundTracker(
            index=index, optimizers=optimizers, schedule=schedule, clock=clock, cost=cost, mailbox=mailbox, reader=reader,
            inspections=inspections, errors=errors,
        )  # fmt: skip
        self.detection = detection = BackwardDetection(index, optimizers, cost, hooks, inspections)
        self.counted = counted = CountedRounds(
            optimizers=optimizers, clock=clock, schedule=schedule, hooks=hooks, inspections=inspections, rounds=rounds,
            detection=detection, requests=requests,
        )  # fmt: skip
        self._forwards = forwards = ForwardHooks(
            index=index, optimizers=optimizers, clock=clock, cost=cost, loss_scale=loss_scale, inspections=inspections,
            rounds=rounds, detection=detection, reductions=self.reductions, counted=counted, thread=thread, requests=requests,
            errors=errors,
        )  # fmt: skip
        self.backward = backward = BackwardHooks(
            index=index, clock=clock, cost=cost, hooks=hooks, reader=reader, inspections=inspections, rounds=rounds,
            detection=detection, reductions=self.reductions, counted=counted, forwards=forwards, thread=thread, errors=errors,
            periodic=periodic,
        )  # fmt: skip
        self.observations = Observations(
            clock=clock, mailbox=mailbox, reader=reader, rounds=rounds, detection=detection, counted=counted, thread=thread,
        )  # fmt: skip
        self.steps = StepHooks(
            index=index, optimizers=optimizers, clock=clock, cost=cost, schedule=schedule, mailbox=mailbox, reader=reader,
            hooks=hooks, loss_scale=loss_scale, inspections=inspections, rounds=rounds, detection=detection, counted=counted,
            forwards=forwards, backward=backward, observations=self.observations, thread=thread, errors=errors, periodic=periodic,
        )  # fmt: skip

    def watch(self, models: Iterable[torch.nn.Module]) -> None:
        """Hook the forwards of the roots, in the order of their numbers, and the steps of all optimizers."""
        for number, module in enumerate(models):
            self._hooks.on_module(module, self._forwards.began, functools.partial(self.backward.forward_ended, number))
        self._hooks.on_optimizers(self.steps.began, self.steps.ended)
        self._forwards.follow_device()

    # What others see

    @property
    def models(self) -> int:
        """How many models are watched."""
        return self._index.models

    @property
    def samples(self) -> int:
        """How many rounds had their gradients read."""
        return self._reader.samples

    @property
    def devices(self) -> frozenset[str]:
        """The kinds of devices that gradients were read from, such as `cpu` and `cuda`."""
        return self._reader.devices

    # What the user reports

    def interrupted(self, cause: str, *, now: bool) -> bool:
        """An evaluation or a checkpoint begins, or has ended; return False if it was reported before and goes on."""
        return self._clock.interrupted(cause, now=now, here=self._thread.may_be_here())

    def step_skipped(self) -> None:
        """The user says that a step was skipped."""
        self.counted.settle()
        self.rounds.step_skipped()

    def gradients_elsewhere(self) -> None:
        """Parameters do not have the gradients that they are trained with: no round is sampled any more."""
        self.counted.settle()
        self._schedule.never()
        self.rounds.current.sampled = False
        table = self._index.table
        self.detection.follow(table, set(range(len(table.tracked))))
        self.detection.arm(sampled=False)

    def look(self) -> float:
        """Let an evaluation show while rounds are only counted; return the seconds until the next call. From any thread."""
        return self.counted.look()

    # The end

    def close(self, *, failed: bool) -> None:
        """Hand over what is still open and remove the hooks of this round; idempotent. `failed`: by an exception."""
        self.rounds.fused.settle(-1)
        self.rounds.training_over(failed=failed)
        self.release()
        self.inspections.tell(Inspection.training_over)

    def release(self) -> None:
        """Release everything that keeps a parameter alive; idempotent, from any thread."""
        self.detection.nodes.release()
        self.inspections.release()
