"""Builds the capture side, from the first stage to the last; the caller owns what is returned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInputs:
    """What the capture side is built on. `models`: how many roots there are; `periodic`: see `StepEnd`."""

    index: LayerIndex
    models: int
    optimizers: Optimizers
    reader: GradientReader
    schedule: SamplingSchedule
    clock: StepClock
    mailbox: Mailbox
    hooks: Hooks
    errors: ErrorLog
    options: CaptureOptions
    periodic: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundParts:
    """The round, and what reads and prepares it."""

    cost: SampleCost
    probes: GradientProbes
    nodes: AccumulateGradNodes
    sampler: Sampler
    rounds: Rounds
    ladder: Ladder
    reductions: ReductionWatch
    preparation: RoundPreparation


def _round_parts(given: CaptureInputs) -> _RoundParts:
    index, optimizers, clock, mailbox = given.index, given.optimizers, given.clock, given.mailbox
    cost = SampleCost(clock, given.schedule, given.reader.timer)
    probes, nodes = GradientProbes(), AccumulateGradNodes()
    sampler = Sampler(
        index=index, optimizers=optimizers, reader=given.reader, clock=clock, cost=cost, mailbox=mailbox, errors=given.errors
    )
    rounds = Rounds(
        tracker=RoundTracker(given.schedule.due, optimizers.manual), sampler=sampler, clock=clock, optimizers=optimizers,
        reader=given.reader, probes=probes, nodes=nodes, mailbox=mailbox,
    )  # fmt: skip
    ladder = Ladder(nodes, probes, optimizers, Mode.OUTPUT if BACKWARDS_ARE_SEEN else Mode.OPTIMIZER)
    reductions = ReductionWatch(
        index=index, clock=clock, cost=cost, probes=probes, mailbox=mailbox, hooks=given.hooks, errors=given.errors,
        local_norm=given.options.local_norm,
    )  # fmt: skip
    preparation = RoundPreparation(
        index=index, rounds=rounds, ladder=ladder, nodes=nodes, reductions=reductions, cost=cost, hooks=given.hooks
    )
    return _RoundParts(
        cost=cost, probes=probes, nodes=nodes, sampler=sampler, rounds=rounds, ladder=ladder, reductions=reductions,
        preparation=preparation,
    )  # fmt: skip


def _step_watch(given: CaptureInputs, parts: _RoundParts, count_only: CountOnly) -> tuple[BackwardWatch, StepWatch]:
    backward = BackwardWatch(
        models=given.models, index=given.index, rounds=parts.rounds, ladder=parts.ladder, nodes=parts.nodes, probes=parts.probes,
        sampler=parts.sampler, reductions=parts.reductions, preparation=parts.preparation, count_only=count_only,
        clock=given.clock, cost=parts.cost, hooks=given.hooks,
    )  # fmt: skip
    steps = StepWatch(
        index=given.index, optimizers=given.optimizers, rounds=parts.rounds, ladder=parts.ladder, nodes=parts.nodes,
        probes=parts.probes, sampler=parts.sampler, reductions=parts.reductions, preparation=parts.preparation,
        backward=backward, cost=parts.cost,
    )  # fmt: skip
    return backward, steps


def _weight_watch(given: CaptureInputs, parts: _RoundParts) -> WeightWatch | None:
    if not given.options.weights:
        return None
    probe = WeightProbe(given.mailbox)
    return WeightWatch(probe=probe, sampler=parts.sampler, optimizers=given.optimizers, cost=parts.cost, errors=given.errors)


class Capture:
    """The capture side as others see it."""

    def __init__(self, given: CaptureInputs) -> None:
        parts, thread = _round_parts(given), TrainingThread()
        weights = _weight_watch(given, parts)
        count_only = CountOnly(
            clock=given.clock, rounds=parts.rounds, schedule=given.schedule, optimizers=given.optimizers, probes=parts.probes,
            preparation=parts.preparation, reductions=parts.reductions, mailbox=given.mailbox, hooks=given.hooks,
        )  # fmt: skip
        backward, steps = _step_watch(given, parts, count_only)
        observations = Observations(
            clock=given.clock, tracker=parts.rounds.tracker, count_only=count_only, optimizers=given.optimizers,
            reader=given.reader, mailbox=given.mailbox,
        )  # fmt: skip
        self._forwards = ForwardWatch(
            clock=given.clock, ladder=parts.ladder, steps=steps, backward=backward, preparation=parts.preparation,
            count_only=count_only, observations=observations, thread=thread, models=given.models, periodic=given.periodic,
        )  # fmt: skip
        step_end = StepEnd(
            clock=given.clock, rounds=parts.rounds, steps=steps, forwards=self._forwards, count_only=count_only,
            observations=observations, schedule=given.schedule, weights=weights, periodic=given.periodic,
        )  # fmt: skip
        self._loop = TrainingLoop(
            clock=given.clock, rounds=parts.rounds, steps=steps, count_only=count_only, step_end=step_end, reader=given.reader,
            optimizers=given.optimizers, hooks=given.hooks, thread=thread, weights=weights,
        )  # fmt: skip
        self._thread, self._observations = thread, observations
        self._rounds, self._ladder, self._reductions = parts.rounds, parts.ladder, parts.reductions
        self._count_only, self._reader, self._hooks = count_only, given.reader, given.hooks

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

    def observe(self, values: Iterator[tuple[str, Number]]) -> None:
        """Takes observed values by name, see `Observations.observe`. From any thread, but for `grad_norm`."""
        self._observations.observe(values, here=self._thread.may_be_here())

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done."""
        self._loop.manual_step(number)

    def look(self) -> None:
        """A few times a second, from any thread: lets an evaluation show while rounds are only counted."""
        self._count_only.look()

    def settle(self) -> None:
        """Ends counting and takes back the hook of a single step; idempotent. On the training thread."""
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
