"""What this rank does by itself under `DistributedDataParallel`: the norm of its own gradient, and its waits for other ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.inspections import First, Inspection
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.torch_hooks import Hooks, Removable
from torch_grad_exporter.metrics.families import BoolArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, parameters_of
from torch_grad_exporter.model.replicas import Reduction, Reductions
from torch_grad_exporter.statistics import single
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket
from torch_grad_exporter.store.records import Inspected, Mailbox
from torch_grad_exporter.torch_compat.autograd import after_backward, nodes_of

SOURCE = "local_norms"


@dataclass(frozen=True, slots=True, eq=False)
class LocalMeasurement:
    """The data of a record of norms that a part of the round's examples has given: those of this rank, or of a micro-batch.

    Attributes:
        positions: Shape (n,), the parameter of each norm in the vectors together; a parameter may have several, of its parts. A
            negative one, -1 - p, is of the gradient that parameter p had before the round's first backward, which should be zero.
        reduced: Shape (parameters,), which of the table's parameters were measured. Of ranks, those that are reduced.
        samples: Training examples of the part, None if unknown.
        ranks: Over how many the mean was taken, 0 if unknown.
        micro_batches: If above 1, the part is the first of that many micro-batches, and else the whole of this rank.
    """

    positions: IntArray
    reduced: BoolArray
    samples: int | None
    ranks: int
    micro_batches: int = 1


@dataclass(slots=True)
class _Accumulation:
    """The backwards whose gradients are added up.

    `samples`: examples in their forwards, None if unknown; `reduced`: whether any of them was reduced; `before`: by position the
    norms of what was there before the first of them.
    """

    samples: int | None = 0
    reduced: bool = False
    before: dict[int, list[single.Norm]] = field(default_factory=dict)


class LocalGradients(Inspection):
    """The norm of this rank's own gradient, before `DistributedDataParallel` takes the mean over all ranks.

    On a sampled round a hook on each parameter's AccumulateGrad node sees what the backward has brought before the wrapper does,
    and measures it at once: the wrapper writes over it in the same backward. Under `no_sync()` only the backward that reduces is
    measured, then together with the gradient that is there already.

    What is measured is this rank's gradient as long as it contains nothing of other ranks. So nothing is reported of a round in
    which gradients other than zero were there before, were reduced before, or are reduced without passing a node in the backward
    that reduces. Changes by a user's post-accumulate-grad hook are not seen.

    It posts a record for each sampled round, after the `SampleRead` that it belongs to. Belongs to the thread of the backward;
    holds parameters during one only.
    """

    def __init__(
        self,
        *,
        hooks: Hooks,
        mailbox: Mailbox,
        cost: SampleCost,
        clock: StepClock,
        reductions: Reductions,
        detection: BackwardDetection,
    ) -> None:
        self._cost, self._clock = cost, clock
        self._reductions, self._detection = reductions, detection
        self._hook = hooks.guarded("backward_hook", self._arrives)
        self._mailbox = mailbox
        self._transfer = HostTransfer(pressed=mailbox.press)
        self._handles: list[Removable] = []
        self._hooked: dict[TrackedParameter, int] = {}  # with their positions
        self._accumulation = _Accumulation()
        # The running backward: whether it is the first of its round, what it reduces, the norms by position, and which parameters
        # have a gradient already.
        self._first = False
        self._reduction: Reduction | None = None
        self._norms: dict[int, list[single.Norm]] = {}
        self._present: set[int] = set()
        self._table: ParameterTable
        # The backward before, if what was measured is of this rank alone.
        self._ready: tuple[Reduction, ParameterTable] | None = None
        # Training examples of all forwards up to the last backward; None if unknown.
        self._samples_before: int | None = 0

    def counted(self, *, unfinished: bool) -> None:
        """Note that backwards were not seen, so the examples of a round that is not over are unknown."""
        self._samples_before = None if unfinished else self._samples()

    def backward_began(self, current: ArmedRound, table: ParameterTable, first: First | None, task: int) -> None:  # noqa: ARG002
        """Hook the parameters that this backward reduces, in a sampled round; hooks that came since the first one miss it."""
        self.release()
        if not (current.sampled and self._detection.sees_backwards):
            return
        reduction, self._table = self._reductions.coming, table
        self._first = current.backwards == 0 or not self._detection.probes.untouched()
        if self._first:
            self._accumulation = _Accumulation()
        self._reduction, self._ready = reduction, None
        self._norms, self._present = {}, set()
        if reduction is not None and (reduction.parameters or self._first):
            self._hook_nodes(table, reduction.parameters)
            if first is not None and first[0] in self._hooked:
                self._arrives(self._hooked[first[0]], *first)

    def _hook_nodes(self, table: ParameterTable, reduced: frozenset[int]) -> None:
        """Hook the nodes of what is reduced; if that is nothing, of all, to see what is there before."""
        trained: dict[int, torch.nn.Parameter] = {}
        for position, (tracked, parameter) in enumerate(zip(table.tracked, parameters_of(table.tracked), strict=True)):
            if parameter is not None and parameter.requires_grad and (not reduced or tracked.identity in reduced):
                trained[position] = parameter
        self._hooked = {table.tracked[position]: position for position in trained}
        self._present |= {position for position, parameter in trained.items() if parameter.grad is not None}
        for position, node in zip(trained, nodes_of(trained.values()), strict=True):
            self._handles.append(node.register_prehook(functools.partial(self._hook, position, table.tracked[position])))

    def _arrives(self, position: int, tracked: TrackedParameter, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Measure a gradient that is about to be added to what its parameter has. The last time in a backward counts."""
        start, incoming, present = self._clock.clock(), gradients[0], tracked.gradient()
        if self._first and present is not None and position not in self._norms:
            self._accumulation.before[position] = [*single.norms(present)]
        if self._reduction is None or not self._reduction.parameters:
            self._norms[position] = []
        elif incoming is not None:
            self._norms[position] = [*single.norms(incoming, present)]
        else:
            self._norms[position] = [] if present is None else [*single.norms(present)]
        self._cost.spent(start, sampled=True)

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Decide whether what was measured is of this rank alone."""
        self.release()
        reduction, self._reduction, total = self._reduction, None, self._accumulation
        samples = self._samples()
        before, self._samples_before = self._samples_before, samples
        if not current.sampled:
            return
        if total.samples is not None:
            total.samples = None if before is None or samples is None else total.samples + samples - before
        if reduction is None or not reduction.parameters:
            return
        unseen = (self._present & current.fired) - self._norms.keys()
        if not (total.reduced or unseen or any(self._table.tracked[i].sharded for i in self._norms)):
            self._ready = reduction, self._table
        total.reduced = True

    def backward_dropped(self) -> None:
        """Remove the hooks."""
        self.release()
        self._reduction = None

    def gradients_read(self, current: ArmedRound) -> None:
        """Post what was measured of the backward before, which may be nothing."""
        ready, self._ready = self._ready, None
        sent = None if ready is None else send_norms(self._transfer, self._norms, self._accumulation.before)
        if ready is None or sent is None:
            self._mailbox.append(Inspected(SOURCE, current.number, ()))
            return
        (reduction, table), (positions, tickets) = ready, sent
        reduced = np.array([tracked.identity in reduction.parameters for tracked in table.tracked], dtype=np.bool_)
        measured = LocalMeasurement(positions, reduced, self._accumulation.samples, reduction.ranks)
        self._mailbox.append(Inspected(SOURCE, current.number, tickets, measured))

    def _samples(self) -> int | None:
        """Return the training examples of all forwards up to now, None if unknown."""
        return self._clock.examples if self._clock.examples_known else None

    def release(self) -> None:
        """Remove the hooks; idempotent, from any thread."""
        handles, self._handles, self._hooked = self._handles, [], {}
        for handle in handles:
            handle.remove()


def send_norms(
    transfer: HostTransfer, norms: Mapping[int, list[single.Norm]], before: Mapping[int, list[single.Norm]]
) -> tuple[IntArray, tuple[Ticket, ...]] | None:
    """Start one copy to the host for each device; return None if too much is under way.

    Args:
        transfer: Takes the vectors.
        norms: By the position of their parameter.
        before: Those of the gradients that were there before.

    Returns:
        The positions of all norms, as in `LocalMeasurement`, and the tickets of the vectors in that order.
    """
    by_device: dict[torch.device, tuple[list[int], list[single.Norm]]] = {}
    for position, parts in (*norms.items(), *((-1 - position, parts) for position, parts in before.items())):
        for norm in parts:
            device = norm.device if isinstance(norm, torch.Tensor) else torch.device("cpu")
            positions, values = by_device.setdefault(device, ([], []))
            positions.append(position)
            values.append(norm)
    sent, tickets = [], []
    for device, (positions, values) in by_device.items():
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        vector = torch.cat(tensors) if tensors else torch.tensor(values, dtype=torch.float64, device=device)
        ticket = transfer.send(vector)
        if ticket is None:
            return None
        sent += positions
        tickets.append(ticket)
    return np.array(sent, dtype=np.int64), tuple(tickets)


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

    def __init__(self, hooks: Hooks, clock: StepClock, reductions: Reductions, reader: GradientReader) -> None:
        self.seconds = 0.0
        self.rounds: int | None = None
        self._clock, self._reductions, self._reader = clock, reductions, reader
        self._hook = hooks.guarded("backward_hook", self._gradients_are_there)
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
