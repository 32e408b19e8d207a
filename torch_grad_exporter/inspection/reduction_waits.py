"""ReductionWaits: how long this rank waits for other ranks under `DistributedDataParallel`."""

from __future__ import annotations

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import First, Inspection
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.inspection.measuring import InspectionContext
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.replicas import Reductions
from torch_grad_exporter.torch_compat.autograd import after_backward


class ReductionWaits(Inspection):
    """How long this rank waits, when its own gradients are done, until those of all ranks are reduced, in sampled rounds.

    Under `DistributedDataParallel` a callback that is queued when a backward begins runs when this rank's last gradient is there,
    and before the wrapper's own, which waits for the other ranks and the network and writes the means back. The time between the
    two is the wait. Host clock, so on the CPU only: on CUDA the host does not wait there.

    A reentrant checkpoint runs backwards within the backward, and the wrapper may wait in one of those. Autograd numbers the
    backwards: where two in a row have consecutive numbers, none ran within the first. A wait is timed only where that was the case
    for the last two that were seen.

    Belongs to the thread of the backward; its totals may be read from any.

    Attributes:
        seconds: Of all waits.
        rounds: Sampled rounds in which they were timed; None where there are no other ranks.
    """

    def __init__(self, context: InspectionContext, reductions: Reductions, reader: GradientReader) -> None:
        self.seconds = 0.0
        self.rounds: int | None = None
        self._clock, self._reductions, self._reader = context.clock, reductions, reader
        self._hook = context.hooks.guarded("backward_hook", self._gradients_are_there)
        self._last_task: int | None = None
        self._alone = False
        self._since: float | None = None
        self._timed_round: int | None = None

    def backward_began(self, current: ArmedRound, table: ParameterTable, first: First | None, task: int) -> None:  # noqa: ARG002
        """Queue the callback, if this backward reduces and none seems to run within it."""
        if self._last_task is not None:  # else as for the last two that were seen
            self._alone = task == self._last_task + 1
        self._last_task, self._since = task, None
        reduction = self._reductions.coming if current.sampled else None
        if reduction is not None and reduction.parameters and self._reader.devices <= {"cpu"}:
            self.rounds = self.rounds or 0
            if self._alone:
                after_backward(self._hook)

    def _gradients_are_there(self) -> None:
        self._since = self._clock.clock()

    def backward_ended(self, current: ArmedRound, at: float) -> None:
        """Add the wait up to this moment."""
        since, self._since = self._since, None
        if since is not None:
            self.seconds += at - since
            self.rounds = (self.rounds or 0) + (self._timed_round != current.number)
            self._timed_round = current.number

    def counted(self, *, unfinished: bool) -> None:  # noqa: ARG002
        """Note that backwards were not seen."""
        self._last_task = None
