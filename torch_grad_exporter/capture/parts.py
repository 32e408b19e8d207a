"""Parts: what the watches of the training share."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.capture_mode import CaptureMode
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.fused_optimizer import FusedSteps
from torch_grad_exporter.capture.gradient_versions import GradientProbes
from torch_grad_exporter.capture.inspections import Inspections
from torch_grad_exporter.capture.outcomes import Mode
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.reduction import Reductions
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN


class TrainingThread:
    """The thread of the last step of an optimizer of the models: before the first one it may be any."""

    def __init__(self) -> None:
        self._ident: int | None = None

    def is_here(self) -> None:
        """The calling thread trains."""
        self._ident = threading.get_ident()

    def frame(self) -> types.FrameType | None:
        """What that thread is executing; of the calling thread if it is not known yet which one trains."""
        return sys._current_frames().get(threading.get_ident() if self._ident is None else self._ident)

    def may_be_here(self) -> bool:
        """Whether the calling thread trains, or it is not known yet which one does."""
        return self._ident in (None, threading.get_ident())


@dataclass(slots=True, kw_only=True, eq=False)
class Parts:
    """The services of the training thread, and the round with what reads it. A watch uses of them what it needs.

    `periodic`: something else that belongs to that thread, to be done behind a guard of its own at the end of steps, and of an
    evaluation's forwards.
    """

    index: LayerIndex
    optimizers: Optimizers
    cost: SampleCost
    reader: GradientReader
    schedule: SamplingSchedule
    clock: StepClock
    mailbox: Mailbox
    hooks: Hooks
    errors: ErrorLog
    requests: Requests
    periodic: Callable[[], None] | None = None
    thread: TrainingThread = field(init=False, default_factory=TrainingThread)
    fused: FusedSteps = field(init=False)
    rounds: RoundTracker = field(init=False)
    mode: CaptureMode = field(init=False)
    nodes: AccumulateGradNodes = field(init=False, default_factory=AccumulateGradNodes)
    reductions: Reductions = field(init=False, default_factory=Reductions)
    inspections: Inspections = field(init=False)
    probes: GradientProbes = field(init=False, default_factory=GradientProbes)

    def __post_init__(self) -> None:
        self.inspections = Inspections(self.cost)
        self.fused = FusedSteps(self.clock)
        self.rounds = RoundTracker(
            index=self.index,
            optimizers=self.optimizers,
            schedule=self.schedule,
            clock=self.clock,
            mailbox=self.mailbox,
            reader=self.reader,
            inspections=self.inspections,
            fused=self.fused,
        )
        start = Mode.BACKWARD if BACKWARDS_ARE_SEEN else Mode.OPTIMIZER
        self.mode = CaptureMode(self.probes, self.optimizers, start)
