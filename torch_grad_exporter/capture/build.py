"""Builds the capture side, from the first stage to the last; the caller owns what is returned."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

import torch

from torch_grad_exporter.capture.backward import BackwardWatch
from torch_grad_exporter.capture.counted_rounds import CountedRounds
from torch_grad_exporter.capture.forwards import ForwardWatch
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.loop import TrainingLoop
from torch_grad_exporter.capture.observations import Number, Observations
from torch_grad_exporter.capture.outcomes import Lost, Mode
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.errors import Guard


class Capture:
    """The capture side as others see it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._counted = CountedRounds(parts)
        self._backward = backward = BackwardWatch(parts, self._counted)
        steps = StepWatch(parts, backward)
        self.observations = Observations(parts, self._counted)
        self._forwards = ForwardWatch(parts, backward, steps, self._counted)
        self._loop = TrainingLoop(parts, steps, self._forwards, self._counted, self.observations)

    def watch(self, models: Iterable[torch.nn.Module]) -> None:
        """Hooks the forwards of the roots, in the order of their numbers, and the steps of all optimizers."""
        for number, module in enumerate(models):
            self._parts.hooks.on_module(module, self._forwards.began, functools.partial(self._forwards.ended, number))
        self._parts.hooks.on_optimizers(self._loop.step_began, self._loop.step_ended)
        self._backward.watch()
        self._backward.preparation.follow_device()

    def inspect(self, inspection: Inspection, guard: Guard) -> None:
        """Tells an inspection of the rounds to come; `guard`: its boundary. Before `watch`."""
        self._parts.inspections.add(inspection, guard)

    @property
    def is_sampled(self) -> bool:
        """Whether the round of a forward that begins now is due to be sampled."""
        return self._parts.rounds.next_is_sampled

    @property
    def mode(self) -> Mode:
        """The rung that is in use."""
        return self._parts.mode.current

    @property
    def models(self) -> int:
        """How many models are watched."""
        return self._parts.index.models

    @property
    def samples(self) -> int:
        """Rounds whose gradients were read."""
        return self._parts.rounds.samples

    @property
    def skipped(self) -> Mapping[Lost, int]:
        """Rounds that were due to be sampled and were not, by the reason."""
        return self._parts.rounds.lost

    @property
    def devices(self) -> frozenset[str]:
        """The kinds of devices that gradients were read from, such as `cpu` and `cuda`."""
        return self._parts.reader.devices

    def observe(self, values: Iterator[tuple[str, Number]]) -> None:
        """Takes observed values by name, see `Observations.observe`. From any thread, but for what belongs to a round."""
        self.observations.observe(values)

    def backward_comes(self, loss: torch.Tensor) -> None:
        """A backward of this loss is about to begin, which no forward of a root may have shown."""
        self._forwards.backward_comes(loss)

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done."""
        self._loop.manual_step(number)

    def step_skipped(self) -> None:
        """The user says that a step was left out."""
        self._counted.settle()
        self._parts.rounds.step_skipped()

    def gradients_elsewhere(self) -> None:
        """Parameters do not have the gradients that they are trained with: no round is sampled any more."""
        self._counted.settle()
        self._parts.schedule.never()
        self._parts.rounds.gradients_elsewhere()
        table = self._parts.index.table
        self._parts.mode.follow(table, set(range(len(table.tracked))))
        self._backward.preparation.arm_nodes(sampled=False)

    def clipped(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor | None) -> None:
        """`clip=` has clipped an optimizer's gradients right before its step; `skip`: whether it is told to leave the step out."""
        self._loop.clipped(optimizer, skip)

    def look(self) -> float:
        """Lets an evaluation show while rounds are only counted; the seconds until it is to be called again. From any thread."""
        return self._counted.look()

    def settle(self, *, failed: bool) -> None:
        """Ends counting and takes back the hook of a single step; idempotent. `failed`: an exception has ended the training."""
        self._loop.close(failed=failed)

    def close(self, *, failed: bool) -> None:
        """Hands over what is still open and removes the hooks of this round; idempotent. `failed`: as of `settle`."""
        self._parts.fused.settle(-1)
        self._parts.rounds.training_over(failed=failed)
        self.release()
        self._parts.inspections.tell(Inspection.training_over)

    def release(self) -> None:
        """Releases everything that keeps a parameter alive; idempotent, from any thread."""
        self._parts.nodes.release()
        self._parts.inspections.tell(Inspection.release)

    def release_witness(self) -> None:
        """Releases the parameter that reports backwards in counted rounds; idempotent, from any thread."""
        self._counted.release()
