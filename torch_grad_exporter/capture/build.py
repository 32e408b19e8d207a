"""Builds the capture side, from the first stage to the last; the caller owns what is returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.backward import BackwardWatch
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.forwards import ForwardWatch
from torch_grad_exporter.capture.gradient_versions import GradientProbes
from torch_grad_exporter.capture.loop import TrainingLoop
from torch_grad_exporter.capture.observations import Number, Observations
from torch_grad_exporter.capture.preparation import RoundPreparation
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.reduction_watch import ReductionWatch
from torch_grad_exporter.capture.round_executor import Rounds
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.capture.sampler import Sampler
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.step_end import StepEnd
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.capture.training_thread import TrainingThread
from torch_grad_exporter.capture.triggers import Ladder
from torch_grad_exporter.capture.weight_watch import WeightWatch
from torch_grad_exporter.capture.weights import WeightProbe
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat import BACKWARDS_ARE_SEEN
from torch_grad_exporter.transfer.events import Mailbox
from torch_grad_exporter.transfer.outcomes import Mode


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What the user may ask for in addition: this rank's own gradients under DDP, and norms of weights and of their updates."""

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
        probes, nodes = GradientProbes(), AccumulateGradNodes()
        sampler = Sampler(index=index, optimizers=optimizers, reader=reader, clock=clock, cost=cost, mailbox=mailbox, errors=errors)
        tracker = RoundTracker(schedule.due, optimizers.manual)
        rounds = Rounds(
            tracker=tracker, sampler=sampler, clock=clock, optimizers=optimizers, reader=reader, probes=probes, nodes=nodes,
            mailbox=mailbox,
        )  # fmt: skip
        ladder = Ladder(nodes, probes, optimizers, Mode.OUTPUT if BACKWARDS_ARE_SEEN else Mode.OPTIMIZER)
        reductions = ReductionWatch(
            index=index, clock=clock, cost=cost, probes=probes, mailbox=mailbox, hooks=hooks, errors=errors,
            local_norm=options.local_norm,
        )  # fmt: skip
        preparation = RoundPreparation(
            index=index, rounds=rounds, ladder=ladder, nodes=nodes, reductions=reductions, cost=cost, hooks=hooks
        )
        count_only = CountOnly(
            clock=clock, rounds=rounds, schedule=schedule, optimizers=optimizers, probes=probes, preparation=preparation,
            reductions=reductions, mailbox=mailbox, hooks=hooks,
        )  # fmt: skip
        backward = BackwardWatch(
            models=models, index=index, rounds=rounds, ladder=ladder, nodes=nodes, probes=probes, sampler=sampler,
            reductions=reductions, preparation=preparation, count_only=count_only, clock=clock, cost=cost, hooks=hooks,
        )  # fmt: skip
        steps = StepWatch(
            index=index, optimizers=optimizers, rounds=rounds, ladder=ladder, nodes=nodes, probes=probes, sampler=sampler,
            reductions=reductions, preparation=preparation, backward=backward, cost=cost,
        )  # fmt: skip
        observations = Observations(
            clock=clock, tracker=tracker, count_only=count_only, optimizers=optimizers, reader=reader, mailbox=mailbox
        )
        thread = TrainingThread()
        forwards = ForwardWatch(
            clock=clock, ladder=ladder, steps=steps, backward=backward, preparation=preparation, count_only=count_only,
            observations=observations, thread=thread, models=models, periodic=periodic,
        )  # fmt: skip
        weights = (
            WeightWatch(probe=WeightProbe(mailbox), sampler=sampler, optimizers=optimizers, cost=cost, errors=errors)
            if options.weights
            else None
        )
        step_end = StepEnd(
            clock=clock, rounds=rounds, steps=steps, forwards=forwards, count_only=count_only, observations=observations,
            schedule=schedule, weights=weights, periodic=periodic,
        )  # fmt: skip
        self._loop = TrainingLoop(
            clock=clock, rounds=rounds, steps=steps, count_only=count_only, step_end=step_end, reader=reader, optimizers=optimizers,
            hooks=hooks, thread=thread, weights=weights,
        )  # fmt: skip
        self._thread, self._observations = thread, observations
        self._forwards = forwards
        self._rounds = rounds
        self._ladder = ladder
        self._reductions = reductions
        self._count_only = count_only
        self._reader = reader
        self._hooks = hooks

    def watch(self, number: int, module: torch.nn.Module) -> None:
        """Hooks the forwards of the root of this number."""
        self._hooks.on_module(module, self._forwards.began, functools.partial(self._forwards.ended, number))

    def watch_optimizers(self) -> None:
        """Hooks the steps of all optimizers; from here on the training is watched."""
        self._hooks.on_optimizers(self._loop.step_began, self._loop.step_ended)

    @property
    def mode(self) -> Mode:
        """The rung that is in use."""
        return self._ladder.mode

    @property
    def samples(self) -> int:
        """Rounds whose gradients were read."""
        return self._rounds.tracker.samples

    @property
    def skipped(self) -> int:
        """Rounds that were due to be sampled and were not."""
        return self._rounds.tracker.lost

    @property
    def devices(self) -> frozenset[str]:
        """The kinds of devices that gradients were read from, such as `cpu` and `cuda`."""
        return self._reader.devices

    def observe(self, name: str, value: Number) -> None:
        """Takes an observed value. From any thread, but for `grad_norm`."""
        self._observations.observe(name, value, here=self._thread.may_be_here())

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done."""
        self._loop.manual_step(number)

    def look(self) -> None:
        """A few times a second, from any thread: lets an evaluation show while rounds are only counted."""
        self._count_only.look()

    def settle(self) -> None:
        """Ends counting; idempotent. On the training thread."""
        self._loop.close()

    def close(self) -> None:
        """Hands over what is still open and removes the hooks of this round; idempotent."""
        self._rounds.close()
        self.release()

    def release(self) -> None:
        """Releases everything that keeps a parameter alive; idempotent, from any thread."""
        self._ladder.release()
        self._reductions.disarm()

    def release_witness(self) -> None:
        """Releases the parameter that reports backwards in counted rounds; idempotent, from any thread."""
        self._count_only.release()
