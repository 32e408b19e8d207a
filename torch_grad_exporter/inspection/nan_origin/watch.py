"""NanOrigin: the inspection. It hooks inner modules in armed rounds only, and hands over a tape of each forward and backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.inspection.inner_hooks import InnerHooks
from torch_grad_exporter.inspection.nan_origin.backward import RecordedGraph
from torch_grad_exporter.inspection.nan_origin.forward import Inside, Recording
from torch_grad_exporter.inspection.nan_origin.origins import SentTape
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import graph_task, within_transform
from torch_grad_exporter.torch_compat.compiler import compiles_its_call

FORWARDS = 64
"""Forwards at most that an alarm arms, since a round that is skipped may not show its end."""

TOGETHER = 8
"""Forwards before one backward, at most; more are taken for forwards without any."""

SOURCE = "nan_origin"


class NanOrigin(Inspection):
    """Told of rounds by the capture. `always`: arms each sampled round, too. `scaled`: whether a gradient scaler is in use."""

    def __init__(
        self,
        hooks: Hooks,
        cost: SampleCost,
        clock: StepClock,
        mailbox: Mailbox,
        *,
        models: Mapping[str, torch.nn.Module],
        steps: Callable[[], int],
        scaled: Callable[[], bool],
        always: bool,
    ) -> None:
        self._cost, self._clock, self._mailbox = cost, clock, mailbox
        self._names = [(weakref.ref(module), name) for name, module in models.items()]
        self._steps, self._scaled, self._always = steps, scaled, always
        self._transfer = HostTransfer(pressed=mailbox.press)
        self._inner = InnerHooks(hooks, SOURCE, self._entered, self._left)
        self._graph = RecordedGraph(hooks.guarded(SOURCE, self._arrived), hooks.guarded(SOURCE, self._passed))
        self._recording: Recording | None = None
        self._rounds = self._forwards = self._number = 0
        self._sampled = False

    # As of `Inspection`

    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sampled: bool) -> None:
        """Begins to record, where the round is armed."""
        if not (self._rounds or (self._always and sampled)):
            return
        if capturing_graph() or within_transform() or compiles_its_call(root):
            return
        self._inner.disarm()
        recording = self._recording
        if recording is not None and len(recording.roots) >= TOGETHER:
            self._hand_over(backward=False)
        if self._recording is None or self._recording.thread != threading.get_ident():
            self._recording = Recording(self._steps())
        if self._rounds:
            self._forwards -= 1
            self._rounds = self._rounds if self._forwards > 0 else 0
        self._sampled = sampled
        inside = Inside.of(root, next((name for model, name in self._names if model() is root), ""))
        with torch.no_grad():
            self._recording.begin(inside)
        self._inner.arm(inside.modules)
        self._recording.got(args, kwargs)

    def requested(self, rounds: Mapping[str, int]) -> None:
        """Record the next rounds."""
        if SOURCE in rounds:
            self._rounds, self._forwards = rounds[SOURCE], FORWARDS

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Hands over what was recorded up to now."""
        self._number = current.number
        if self._recording is not None:
            self._hand_over(backward=True)

    def step_over(self, *, sampled: bool) -> None:  # noqa: ARG002
        """A step is over: what no backward was seen of is handed over as it is."""
        self._rounds = max(0, self._rounds - 1)
        if self._recording is not None:
            self._hand_over(backward=False)

    def release(self) -> None:
        """As of `Inspection`."""
        self._inner.disarm()
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.over = True

    # Hooks

    def _entered(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        recording = self._recording
        # After a forward that has raised the root still has the hook of that one, whose keyword arguments PyTorch does not give.
        if recording is not None and self._is_forward(recording) and not recording.runs(module):
            start = self._clock.clock()
            recording.enter(module, args, kwargs or {})
            self._cost.spent(start, sampled=self._sampled)

    def _left(self, module: torch.nn.Module, _args: object, _kwargs: object, output: object) -> None:
        recording = self._recording
        if recording is None or not self._is_forward(recording):
            return
        start = self._clock.clock()
        if recording.leave(module, output):
            self._inner.disarm()
            self._graph.hook(recording)
        self._cost.spent(start, sampled=self._sampled)

    def _is_forward(self, recording: Recording) -> bool:
        """Whether a module is called by the forward, and neither by a checkpoint within the backward nor on another thread."""
        return not recording.over and graph_task() == -1 and recording.thread == threading.get_ident()

    def _arrived(self, recording: Recording, node: int, gradients: tuple[Any, ...]) -> None:
        start = self._clock.clock()
        self._graph.arrived(recording, node, gradients)
        self._cost.spent(start, sampled=self._sampled)

    def _passed(self, recording: Recording, node: int, given: tuple[Any, ...], got: tuple[Any, ...]) -> None:
        start = self._clock.clock()
        self._graph.passed(recording, node, given, got)
        self._cost.spent(start, sampled=self._sampled)

    # What is handed over

    def _hand_over(self, *, backward: bool) -> None:
        self._inner.disarm()
        recording, self._recording = self._recording, None
        if recording is None:
            return
        after = recording.gradients() if backward else {}
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        tape = recording.tape(after, backward=backward, ranks=ranks, scaled=self._scaled())
        sent = recording.flags.send(self._transfer)
        if sent is not None:
            self._mailbox.append(Inspected(SOURCE, self._number, sent.tickets, SentTape(tape, sent)))
