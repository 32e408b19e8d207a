"""NanOrigin: the inspection of `start_exporter(nan_origin=)`. It hooks inner modules in armed rounds only, and sends tapes."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.loss_scale import LossScale
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.inspection.inner_hooks import ForwardObserver, InnerHooks
from torch_grad_exporter.inspection.modules import VisibleModules
from torch_grad_exporter.inspection.nan_origin.origins import SentTape
from torch_grad_exporter.inspection.nan_origin.recording import Recording
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.records import Inspected, Mailbox
from torch_grad_exporter.torch_compat.autograd import capturing_graph, within_transform
from torch_grad_exporter.torch_compat.compiler import compiles_its_call

# Forwards at most that an alarm arms, since a round that is skipped may not show its end.
FORWARDS = 64

# Forwards before one backward, at most; more are taken for forwards without any.
TOGETHER = 8

SOURCE = "nan_origin"


class NanOrigin(Inspection, ForwardObserver):
    """The inspection of rounds that the worker asks for. Belongs to the training thread, and to that of the backward.

    Args:
        hooks: Disconnects all hooks when the exporter closes.
        cost: Is charged with what recording takes.
        clock: Counts the steps.
        mailbox: Takes the tapes.
        loss_scale: Knows whether a gradient scaler is in use.
        models: The models by name.
        always: Record each sampled round, too.
    """

    def __init__(
        self,
        *,
        hooks: Hooks,
        cost: SampleCost,
        clock: StepClock,
        mailbox: Mailbox,
        loss_scale: LossScale,
        models: Mapping[str, torch.nn.Module],
        always: bool,
    ) -> None:
        self._cost, self._clock, self._mailbox, self._loss_scale = cost, clock, mailbox, loss_scale
        self._names = [(weakref.ref(module), name) for name, module in models.items()]
        self._always = always
        self._transfer = HostTransfer(pressed=mailbox.press)
        self._hooks = InnerHooks(hooks, SOURCE, self)
        self._arrives, self._passes = (
            hooks.guarded(SOURCE, functools.partial(self._gradients, arrives)) for arrives in (True, False)
        )
        self._recording: Recording | None = None
        self._rounds = self._forwards = self._number = 0
        self._sampled = False

    # The moments of a round

    def requested(self, rounds: Mapping[str, int]) -> None:
        """Record the next rounds."""
        if SOURCE in rounds:
            self._rounds, self._forwards = rounds[SOURCE], FORWARDS

    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sampled: bool) -> None:
        """Record this forward, if the round is armed."""
        if not (self._rounds or (self._always and sampled)):
            return
        if capturing_graph() or within_transform() or compiles_its_call(root):
            return
        self._hooks.disarm()
        if self._recording is not None and len(self._recording.tape.roots) >= TOGETHER:
            self._send(backward=False)
        recording = self._recording
        if recording is None or recording.thread != threading.get_ident():
            recording = self._recording = Recording(self._clock.number, self._arrives, self._passes)
        if self._rounds:
            self._forwards -= 1
            self._rounds = self._rounds if self._forwards > 0 else 0
        self._sampled = sampled
        visible = VisibleModules.of(root, next((name for model, name in self._names if model() is root), ""))
        with torch.no_grad():
            recording.begin(visible)
        self._hooks.arm(root, tuple(visible.modules))
        recording.called_with(args, kwargs)

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Send what was recorded up to now."""
        self._number = current.number
        self._send(backward=True)

    def step_over(self, *, sampled: bool) -> None:  # noqa: ARG002
        """Send a recording without a backward."""
        self._rounds = max(0, self._rounds - 1)
        self._send(backward=False)

    def release(self) -> None:
        """Remove the hooks and forget the recording; idempotent, from any thread."""
        self._hooks.disarm()
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.over = True

    # Hooks

    def entered(self, label: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that a module is called."""
        if self._recording is not None:
            start = self._clock.clock()
            self._recording.enter(module, label, args, kwargs)
            self._cost.spent(start, sampled=self._sampled)

    def left(self, label: str, module: torch.nn.Module, output: object) -> None:  # noqa: ARG002 - of `ForwardObserver`
        """Record what a module has returned; behind the root, hook the graph."""
        if self._recording is not None:
            start = self._clock.clock()
            if self._recording.leave(module, output):
                self._hooks.disarm()
                self._recording.hook_graph()
            self._cost.spent(start, sampled=self._sampled)

    def _gradients(self, arrives: bool, recording: Recording, node: int, gradients: tuple[Any, ...], _got: object = None) -> None:
        start = self._clock.clock()
        recording.gradients(node, gradients, arrives=arrives)
        self._cost.spent(start, sampled=self._sampled)

    def _send(self, *, backward: bool) -> None:
        self._hooks.disarm()
        recording, self._recording = self._recording, None
        if recording is None:
            return
        tape = recording.finish(backward=backward, scaled=self._loss_scale.has_scaler)
        sent = recording.flags.send(self._transfer)
        if sent is not None:
            self._mailbox.append(Inspected(SOURCE, self._number, sent.tickets, SentTape(tape, sent)))
