"""LocalGradients: the norms that this rank's own examples have given, before they are reduced over ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.inspections import First, Inspection
from torch_grad_exporter.capture.torch_hooks import Removable
from torch_grad_exporter.inspection.measuring import InspectionContext, VectorSender
from torch_grad_exporter.metrics.families import BoolArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, parameters_of
from torch_grad_exporter.model.replicas import Reduction, Reductions
from torch_grad_exporter.statistics import single
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import nodes_of

SOURCE = "local_norms"

Norms = dict[int, list[single.Norm]]  # of the parts of gradients, by the position of their parameter


@dataclass(frozen=True, slots=True, eq=False)
class LocalMeasurement:
    """The data of a record of norms that a part of the round's examples has given: those of this rank, or of a micro-batch.

    Attributes:
        reduced: Shape (parameters,), which of the table's parameters were measured. Of ranks, those that are reduced.
        samples: Training examples of the part, None if unknown.
        ranks: Over how many the mean was taken, 0 if unknown.
        micro_batches: If above 1, the part is the first of that many micro-batches, and else the whole of this rank.
        positions: Shape (n,), the parameter of each norm in the vectors together; a parameter may have several, of its parts. A
            negative one, -1 - p, is of the gradient that parameter p had before the round's first backward, which should be zero.
    """

    reduced: BoolArray
    samples: int | None
    ranks: int
    micro_batches: int = 1
    positions: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def send(self, sender: VectorSender, number: int, norms: Norms, before: Norms) -> bool:
        """Send norms, and those of the gradients that were there before; return False if too much is under way."""
        devices: dict[torch.device, tuple[list[int], list[single.Norm]]] = {}
        for position, parts in (*norms.items(), *((-1 - position, parts) for position, parts in before.items())):
            for norm in parts:
                device = norm.device if isinstance(norm, torch.Tensor) else torch.device("cpu")
                positions, values = devices.setdefault(device, ([], []))
                positions.append(position)
                values.append(norm)
        vectors = []
        for _, values in devices.values():
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            vectors.append(torch.cat(tensors) if tensors else torch.tensor(values, dtype=torch.float64))
        places = np.array([position for positions, _ in devices.values() for position in positions], dtype=np.int64)
        return sender.send(number, vectors or [torch.zeros(0)], replace(self, positions=places))


@dataclass(slots=True)
class _Accumulation:
    """The backwards whose gradients are added up. `samples`: examples in their forwards; `before`: what was there before."""

    samples: int | None = 0
    reduced: bool = False
    before: Norms = field(default_factory=dict)


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

    def __init__(self, context: InspectionContext, reductions: Reductions, detection: BackwardDetection) -> None:
        self._cost, self._clock, self._mailbox = context.cost, context.clock, context.mailbox
        self._reductions, self._detection = reductions, detection
        self._hook = context.hooks.guarded("backward_hook", self._arrives)
        self._sender = VectorSender(SOURCE, context)
        self._handles: list[Removable] = []
        self._hooked: dict[TrackedParameter, int] = {}  # with their positions
        self._accumulation = _Accumulation()
        # The running backward: whether it is the first of its round, what it reduces, the norms by position, and which parameters
        # have a gradient already.
        self._first = False
        self._reduction: Reduction | None = None
        self._norms: Norms = {}
        self._present: set[int] = set()
        self._table: ParameterTable
        self._ready: LocalMeasurement | None = None  # of the backward before, if what was measured is of this rank alone
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
            reduced = np.array([tracked.identity in reduction.parameters for tracked in self._table.tracked], dtype=np.bool_)
            self._ready = LocalMeasurement(reduced, total.samples, reduction.ranks)
        total.reduced = True

    def backward_dropped(self) -> None:
        """Remove the hooks."""
        self.release()
        self._reduction = None

    def gradients_read(self, current: ArmedRound) -> None:
        """Post what was measured of the backward before, which may be nothing."""
        measured, self._ready = self._ready, None
        if measured is None or not measured.send(self._sender, current.number, self._norms, self._accumulation.before):
            self._mailbox.append(Inspected(SOURCE, current.number, ()))

    def _samples(self) -> int | None:
        """Return the training examples of all forwards up to now, None if unknown."""
        return self._clock.examples if self._clock.examples_known else None

    def release(self) -> None:
        """Remove the hooks; idempotent, from any thread."""
        handles, self._handles, self._hooked = self._handles, [], {}
        for handle in handles:
            handle.remove()
