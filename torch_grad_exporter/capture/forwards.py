"""ForwardHooks: the forwards of roots, and what has to be known before a backward of a sampled round.

The nodes are hooked from the step before on; the table is taken when the backward begins. With FSDP gradients are looked at before
the forward, since other tensors are in the places of sharded parameters from then on.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from torch_grad_exporter.capture.armed_round import ClearingEvidence, Lost
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.inspections import Inspection, Inspections
from torch_grad_exporter.capture.progress import FORWARD, OUTSIDE, main_device
from torch_grad_exporter.capture.torch_hooks import batch_size
from torch_grad_exporter.model.parameters import parameters_of
from torch_grad_exporter.torch_compat.autograd import capturing_graph, graph_task
from torch_grad_exporter.torch_compat.optimizers import called_from_step
from torch_grad_exporter.torch_compat.replicas import PIPELINES, calling_pipeline

if TYPE_CHECKING:
    from torch_grad_exporter.capture.cost import SampleCost
    from torch_grad_exporter.capture.counted_rounds import CountedRounds
    from torch_grad_exporter.capture.detection import BackwardDetection
    from torch_grad_exporter.capture.progress import StepClock, TrainingThread
    from torch_grad_exporter.capture.rounds import RoundTracker
    from torch_grad_exporter.errors import ErrorLog
    from torch_grad_exporter.model.layers import LayerIndex
    from torch_grad_exporter.model.optimizers import Optimizers
    from torch_grad_exporter.model.parameters import ParameterTable
    from torch_grad_exporter.model.replicas import Reductions
    from torch_grad_exporter.requests import Requests
    from torch_grad_exporter.torch_compat.optimizers import LossScale

PIECEWISE = "a pipeline schedule changes gradients between backwards; norms are those after clipping"


class ForwardHooks:
    """Belongs to the training thread, and to that of a backward when it begins.

    Attributes:
        early: With FSDP, the gradients before the forward; None if the parameters were not in their places.
        divisor: By what a pipeline schedule divides gradients after its last backward.
    """

    def __init__(
        self,
        *,
        index: LayerIndex,
        optimizers: Optimizers,
        clock: StepClock,
        cost: SampleCost,
        loss_scale: LossScale,
        inspections: Inspections,
        rounds: RoundTracker,
        detection: BackwardDetection,
        reductions: Reductions,
        counted: CountedRounds,
        thread: TrainingThread,
        requests: Requests,
        errors: ErrorLog,
    ) -> None:
        self._index, self._optimizers, self._clock, self._cost = index, optimizers, clock, cost
        self._loss_scale, self._inspections, self._rounds, self._detection = loss_scale, inspections, rounds, detection
        self._reductions, self._counted, self._thread, self._requests = reductions, counted, thread, requests
        self._ranks = errors.boundary("reduction", "which ranks have the same gradients")
        self.early: GradientVersions | None = None
        self.divisor = 1.0
        self._early_evidence = ClearingEvidence()
        self._placed: tuple[ParameterTable | None, torch.device | None] = None, None  # whose device is known, and which it is

    # Before a forward

    def began(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A root's forward begins; outside of training it only shows that the loop is alive."""
        if not self._thread.may_be_here():  # such as an actor, which runs the same model while one trains
            return
        self._counted.settle()
        clock = self._clock
        start = clock.clock()
        clock.active(evaluating=not module.training)
        if clock.phases.stepping and not called_from_step(sys._getframe(1)):
            clock.phases.enter(OUTSIDE, step_over=True)
            self._rounds.step_abandoned()
        if self._requests.pending:
            self._counted.take_requests()
        # Checkpoints run forwards again within the backward; a reentrant one runs its first forward without grad.
        again = graph_task() != -1
        if torch.is_grad_enabled() and not again:
            self._rounds.forward_began()
            sampled, moment = self._rounds.next_is_sampled, clock.clock()
            self._detection.forward_began(sampled=sampled)
            if sampled:
                self._cost.charge(moment)
                self.follow_device()
                # Importing torch makes no process group, and imports no pipeline schedule.
                if not self._index.replicas.alone or (torch.distributed.is_available() and torch.distributed.is_initialized()):
                    self._ranks(self._look_for_ranks, module)
                self.divisor = 1.0
                if PIPELINES in sys.modules:
                    self._look_for_pipeline(sys._getframe(1))
            if self._index.fully_sharded:
                self._look_early(sampled=sampled)
            self._inspections.tell(Inspection.forward_began, module, args, kwargs, sampled=sampled)
        if torch.is_grad_enabled() and module.training:
            if not again:
                clock.phases.enter(FORWARD, start)
                tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
                self._rounds.inputs_wanted = any(value.requires_grad and value.is_leaf for value in tensors)
            if clock.examples_known and not (again and clock.forward_came):
                size = batch_size(args, kwargs) if self._index.models == 1 else None
                clock.examples_known = size is not None
                clock.examples += size or 0
            clock.forward_came |= not again
        clock.spent(start)

    def follow_device(self) -> None:
        """The model may be somewhere else than before: phases are timed on the device where most of its parameters are."""
        table = self._index.table
        first = next(iter(parameters_of(table.tracked[:1])), None)
        known, at = self._placed
        if first is None or (table is known and first.device == at):
            return
        device = main_device(table.parameters() or ())
        if device is not None:
            self._placed = table, first.device
            self._clock.phases.on(device)

    def _look_early(self, *, sampled: bool) -> None:
        """With FSDP this is the last moment at which sharded parameters are in their places."""
        rounds, index = self._rounds, self._index
        current = rounds.current
        again = bool(current.backwards) and not current.stepped and not rounds.stepping
        self._early_evidence = self._evidence_now() if again else ClearingEvidence()
        if not again or self.early is None:  # else, in the middle of a round, FSDP may have left them gathered
            in_place = sampled and index.table.parameters() is not None  # `None`: it has gathered them
            self.early = GradientVersions.of(index.refresh().tracked) if in_place else None

    def look_for_ranks(self) -> None:
        """Find out which ranks have the same gradients, and what reduces them, where no forward of a root has shown it."""
        self._ranks(self._look_for_ranks, None)

    def _look_for_ranks(self, root: torch.nn.Module | None) -> None:
        if self._index.replicas.undecided(self._index.models):
            self._index.find_replicas(root)
        if root is not None:
            self._reductions.forward_began(root)

    def _look_for_pipeline(self, frame: types.FrameType | None) -> None:
        """A pipeline schedule among the callers may divide gradients by the number of its micro-batches after the last backward."""
        pipeline = calling_pipeline(frame)
        self.divisor = 1.0 if pipeline is None or pipeline.divisor is None else float(pipeline.divisor)
        if pipeline is None or not self._detection.sees_backwards:
            return
        # Under FSDP2 the schedule reduces by hand what its backwards have left.
        if pipeline.divisor is None or pipeline.piecewise or self._index.fully_sharded:
            self._detection.read_at_steps(PIECEWISE)

    # When a backward begins

    def backward_began(self) -> Lost | None:
        """A backward of a sampled round begins: why its gradients cannot be read or distinguished from earlier ones, or None.

        Where all nodes are yet to be hooked, as right after a skipped step, a later round is sampled instead.
        """
        if capturing_graph():
            return Lost.GRAPH_CAPTURE
        current, detection = self._rounds.current, self._detection
        if not detection.around_roots:
            self.look_for_ranks()
        known = True  # all parameters that got a gradient in this round are among those that are trained now
        if detection.sees_backwards or not current.backwards:
            if detection.by_nodes and not detection.nodes.hooked:
                self._index.look_at_shapes()
            looked = detection.around_roots and detection.looked
            before, current.table = current.table, self._index.table if looked else self._index.refresh(within_step=True)
            if current.table is not before and current.fired:
                fired = {before.tracked[position] for position in current.fired}
                known = fired <= {*current.table.tracked}
                if known:
                    current.fired = {position for position, tracked in enumerate(current.table.tracked) if tracked in fired}
                else:  # some were frozen since, whose gradients the step will use all the same
                    trained, current.table = current.table, before
                    known = {*trained.tracked} <= {*before.tracked}
        if not detection.sees_backwards:
            return None
        if self._index.fully_sharded:
            return Lost.GATHERED if self.early is None else None
        if not detection.around_roots:
            self._look_for_pipeline(self._thread.frame())
        hooked, complete = detection.nodes.table, detection.nodes.hooks_all_of(current.table)
        if not complete:
            detection.nodes.arm(current.table, late=True)
            if hooked is None and not current.captured:
                self._rounds.postpone()
                return None
        return None if known and complete else Lost.PARAMETERS_CHANGED

    def evidence(self) -> ClearingEvidence:
        """Return what the gradients of the last backward look like now; with FSDP, what they looked like before the forward."""
        return self._early_evidence if self._index.fully_sharded else self._evidence_now()

    def _evidence_now(self) -> ClearingEvidence:
        probes = self._detection.probes
        zeroed = probes.zeroed()
        gone, written = probes.gone() or zeroed is True, zeroed is None
        if not (gone or written):
            return ClearingEvidence()
        return ClearingEvidence(gone, written, probes.updated(), self._optimizers.reporting, self._loss_scale.has_scaler)
