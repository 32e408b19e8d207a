"""NaN origin: the inspection that sends tapes of armed rounds, and the worker's side, which asks for them and judges tapes."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.errors import inform, warn
from torch_grad_exporter.inspection.inner_hooks import Args, ForwardObserver, InnerHooks, Kwargs
from torch_grad_exporter.inspection.measuring import InspectionContext, VectorSender
from torch_grad_exporter.inspection.modules import VisibleModules
from torch_grad_exporter.inspection.nan_origin.origin_search import Origin, OriginSearch
from torch_grad_exporter.inspection.nan_origin.recording import Recording
from torch_grad_exporter.inspection.nan_origin.tape import FlaggedTape, Tape
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import Inspected, Outcome
from torch_grad_exporter.torch_compat.autograd import capturing_graph, within_transform
from torch_grad_exporter.torch_compat.compiler import compiles_its_call

# Forwards at most that an alarm arms, since a round that is skipped may not show its end.
FORWARDS = 64

# Forwards before one backward, at most; more are taken for forwards without any.
TOGETHER = 8

SOURCE = "nan_origin"

# Rounds that an alarm arms, and seconds between two alarms that arm: while it goes on, more rounds show the same.
ROUNDS, AGAIN_SECONDS = 4, 5.0

# Lines that are logged, at most.
LINES = 64

# Places that are shown at most; beyond, the oldest is dropped.
PLACES = 32


class Origins:
    """The origins that tapes show, and the alarms that arm rounds. Belongs to the worker.

    Attributes:
        steps: By layer, pass and kind of each place the step at which it was last found, the latest at the end. From any thread: it
            is replaced and never changed.
        latest: The last one that is not what a gradient scaler causes by its search.
    """

    def __init__(self, requests: Requests) -> None:
        self.steps: Mapping[tuple[str, str, str], int] = {}
        self.latest: Origin | None = None
        self._requests = requests
        self._armed_at = -math.inf
        self._losses = 0  # not finite since the last tape
        self._since: dict[str, int] = {}  # by layer, the steps after which its gradients were first found non-finite
        self._finite_at: dict[str, int] = {}  # by parameter, the steps after which it was last seen finite
        self._reported_at = -1  # the step of the last origin that was reported
        self._lines = 0

    # What arms

    def counted(self, sample: CountedSample) -> None:
        """Arm rounds where a sample is not finite."""
        if sample.sample.nonfinite():
            ended = sample.ended
            step = max(ended.steps.values(), default=0) - (ended.outcome is Outcome.STEPPED)
            for layer in sample.sample.nonfinite_layers():
                self._since.setdefault(layer, step)
            self._arm()

    def observed(self, name: str, value: float) -> None:
        """Arm rounds where a loss or a global norm is not finite."""
        if name in ("loss", "grad_norm") and not math.isfinite(value):
            self._losses += name == "loss"
            self._arm()

    def rounds_over(self, rounds: int) -> None:
        """Do nothing: rounds alone arm nothing."""

    def _arm(self) -> None:
        now = time.monotonic()
        if now - self._armed_at >= AGAIN_SECONDS:
            self._armed_at = now
            self._requests.arm(ROUNDS, SOURCE)

    # What is found

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Judge a tape."""
        assert isinstance(record.data, Tape)  # noqa: S101 - only `NanOrigin` sends records of this name
        flagged = FlaggedTape.of(record.data, values)
        losses, self._losses = self._losses, 0
        origin = OriginSearch(flagged).origin(loss_was_nonfinite=losses > 0)
        if origin is not None:
            finite = self._finite_at.get(origin.parameter)
            # A parameter that was finite until the step of a reported origin: that step has made it so.
            if finite is None or self._reported_at < finite or origin.step <= self._reported_at:
                self._reported_at = origin.step
                self._report(origin)
        # What was known of a layer ends where its parameters are finite.
        nonfinite = {held.layer for held in flagged.tape.held if flagged.kind(held.slot)}
        for held in flagged.tape.held:
            if not flagged.kind(held.slot):
                self._finite_at[held.name] = flagged.tape.step
                if held.layer not in nonfinite:
                    self._since.pop(held.layer, None)

    def _report(self, origin: Origin) -> None:
        """Show a place, and log it unless it is shown already."""
        place = (origin.layer, origin.stage, origin.kind)
        if not origin.routine:
            self.latest = origin
        new = place not in self.steps
        latest = [*((other, step) for other, step in self.steps.items() if other != place), (place, origin.step)]
        self.steps = dict(latest[-PLACES:])
        if new and self._lines < LINES:
            self._lines += 1
            log = inform if origin.routine else warn
            log("nan_origin: at step %d %s%s", origin.step, origin.text, self._since_when(origin))

    def _since_when(self, origin: Origin) -> str:
        """Return since when a parameter or buffer is not finite, as far as that is known."""
        if not origin.parameter:
            return ""
        first, finite = self._since.get(origin.layer), self._finite_at.get(origin.parameter)
        if finite is not None:
            return f"; it was finite at step {finite}"
        if first is not None and first < origin.step:
            return f"; non-finite since step {first}, when gradients of its layer first were"
        return f"; non-finite since before step {origin.step}"


class NanOrigin(Inspection, ForwardObserver):
    """The inspection of rounds that the worker asks for, and of each sampled one if `always`.

    Belongs to the training thread, and to that of the backward.
    """

    def __init__(self, context: InspectionContext, models: Mapping[str, torch.nn.Module], *, always: bool) -> None:
        hooks, self._cost, self._clock, self._loss_scale = context.hooks, context.cost, context.clock, context.loss_scale
        self._names = [(weakref.ref(module), name) for name, module in models.items()]
        self._always = always
        self._sender = VectorSender(SOURCE, context)
        self._hooks = InnerHooks(hooks, SOURCE, self)
        self._on_gradients = hooks.guarded(SOURCE, self._gradients)
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
            recording = self._recording = Recording(self._clock.number, self._on_gradients)
        if self._rounds:
            self._forwards -= 1
            self._rounds = self._rounds if self._forwards > 0 else 0
        self._sampled = sampled
        visible = VisibleModules(root, next((name for model, name in self._names if model() is root), ""))
        with torch.no_grad():
            recording.begin(visible)
        self._hooks.arm(root, tuple(visible.modules.values()), args, kwargs)

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

    def entered(self, label: str, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> int | None:
        """Record that a module is called."""
        if self._recording is None:
            return None
        start = self._clock.clock()
        call = self._recording.enter(module, label, args, kwargs, self._around())
        self._cost.spent(start, sampled=self._sampled)
        return call

    def left(self, label: str, module: torch.nn.Module, output: object, call: int | None) -> None:  # noqa: ARG002 - of `ForwardObserver`
        """Record what a module has returned; behind the root, hook the graph."""
        if self._recording is not None and call is not None:
            start = self._clock.clock()
            self._recording.leave(call, output, self._around())
            if not self._hooks.running:
                self._hooks.disarm()
                self._recording.hook_graph()
            self._cost.spent(start, sampled=self._sampled)

    def _around(self) -> int:
        """Return the innermost running call that is recorded, -1 for none."""
        return next((running.of for running in reversed(self._hooks.running) if running.of is not None), -1)

    def _gradients(self, recording: Recording, node: int, watched: bool, given: tuple[Any, ...], got: tuple[Any, ...]) -> None:
        start = self._clock.clock()
        recording.gradients(node, given, got if watched else ())
        self._cost.spent(start, sampled=self._sampled)

    def _send(self, *, backward: bool) -> None:
        self._hooks.disarm()
        recording, self._recording = self._recording, None
        if recording is None:
            return
        tape = recording.finish(backward=backward, scaled=self._loss_scale.has_scaler)
        vectors, tape.slots = recording.flags.vectors()
        self._sender.send(self._number, vectors, tape)
