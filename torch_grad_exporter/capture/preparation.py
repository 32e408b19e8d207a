"""RoundPreparation: what has to be there when a backward of a sampled round begins, so that all that it writes is known.

The nodes are hooked from the step before on. The table is taken when the backward begins. With FSDP gradients are looked at before
the forward, since other tensors are in the places of sharded parameters from then on.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.outcomes import Lost
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.phases import main_device
from torch_grad_exporter.capture.round_pattern import ClearingEvidence
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.torch_compat.autograd import graph_task, within_transform
from torch_grad_exporter.torch_compat.pipelines import calling_pipeline

PIECEWISE = "a pipeline schedule changes gradients between backwards; norms are those after clipping"


class RoundPreparation:
    """Belongs to the training thread, and to that of a backward when it begins.

    `early`: with FSDP, the gradients before the forward; `None` if the parameters were not in their places. `divisor`: by what a
    pipeline schedule divides gradients after its last backward. Others only read them.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._rounds = parts.rounds
        self._early_evidence = ClearingEvidence()
        self._placed: tuple[ParameterTable | None, torch.device | None] = None, None
        """The parameters whose device is known, and that of the first one."""
        self._replaced = False
        """Whether parameters were out of their places when the last forward began, replaced or only for the time of it, or lazy."""
        self._ranks = parts.errors.boundary("reduction", "which ranks have the same gradients")
        self.early: GradientVersions | None = None
        self.divisor = 1.0

    # After a step

    def step_over(self) -> None:
        """A step is over: hooks the nodes that the next round needs, before any backward of it can begin."""
        parts, sampled = self._parts, self._parts.rounds.next_is_sampled
        parts.inspections.tell_and_charge(Inspection.step_over, sampled=sampled)
        if parts.index.fully_sharded:
            parts.hooks.come_first()
            if sampled:  # here its sharded parameters are in their places
                parts.cost.of(parts.index.refresh)
        self.arm_nodes(sampled=sampled)

    def arm_nodes(self, *, sampled: bool) -> None:
        """Hooks all nodes for a round that is sampled, else those of a few parameters that report its backwards."""
        parts = self._parts
        if not self._may_arm:
            parts.nodes.disarm()
        elif sampled or parts.mode.unsure or not parts.mode.detectors:
            # Where roots are called, a forward will come that looks for what has changed since.
            if not (parts.mode.around_roots and parts.nodes.table is parts.index.table):
                parts.cost.of(self._arm)
        else:
            parts.nodes.arm_some(parts.mode.detectors)

    @property
    def _may_arm(self) -> bool:
        """Whether nodes show what comes into gradients; those of gathered parameters do not show it of the sharded ones."""
        return self._parts.mode.sees_backwards and not self._parts.index.fully_sharded

    def _arm(self, *, in_place: bool = False) -> None:
        """Hooks the nodes of all parameters that are trained now, until the round ends. `in_place`: as of `refresh`."""
        if not self._parts.nodes.armed:  # else a change shows by the nodes
            self._parts.index.look_at_shapes()
        table = self._parts.index.refresh(in_place=in_place)
        if not self._parts.nodes.hooks_all_of(table) and table.parameters() is not None:
            self._parts.nodes.arm(table)

    # Before a forward

    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of a root with gradients begins. `args`, `kwargs`: what it is called with."""
        if graph_task() != -1:
            return
        if self._rounds.next_is_sampled:
            self.follow_device()
            self._parts.cost.of(self._prepare_for_thawed)
            self.look_for_ranks(root)
            self.look_for_pipeline(sys._getframe(1))
        elif self._parts.nodes.keeps_any and self._drop_changed():
            self._parts.nodes.arm_some(self._parts.mode.detectors)
        if self._parts.index.fully_sharded:
            self._look_early()
        self._parts.inspections.tell_and_charge(Inspection.forward_began, root, args, kwargs, sampled=self._rounds.next_is_sampled)

    def look_for_ranks(self, root: torch.nn.Module | None = None) -> None:
        """Find out which ranks have the same gradients, and what reduces them: within a forward of a root, or without one."""
        self._ranks(self._look_for_ranks, root)

    def _look_for_ranks(self, root: torch.nn.Module | None) -> None:
        index = self._parts.index
        if index.replicas.undecided(index.models):
            index.find_replicas(root)
        if root is not None:
            self._parts.reductions.forward_began(root)

    def backward_comes(self) -> None:
        """A backward is about to begin that no forward of a root has shown."""
        if self._rounds.next_is_sampled and torch.is_grad_enabled():
            self._parts.cost.of(self._prepare_for_thawed)

    def follow_device(self) -> None:
        """The model may be somewhere else than before: phases are timed on the device where most of its parameters are."""
        table = self._parts.index.table
        first = table.tracked[0].parameter() if table.tracked else None
        known, at = self._placed
        if first is None or (table is known and first.device == at):
            return
        device = main_device(table.parameters() or ())
        if device is not None:
            self._placed = table, first.device
            self._parts.clock.phases.on(device)

    def _drop_changed(self, present: list[torch.nn.Parameter | None] | None = None) -> bool:
        """No node that was taken before this forward may be used with data of another shape. Whether any was."""
        index, nodes = self._parts.index, self._parts.nodes
        changed = nodes.keeps_any and nodes.drop_changed(index.table, present)
        if changed:
            index.look_at_shapes()
        return changed

    def _prepare_for_thawed(self) -> None:
        """Before the first forward of a sampled round: what was added or thawed since the step is hooked as well."""
        index, nodes = self._parts.index, self._parts.nodes
        if capturing_graph():
            nodes.release()  # they were made for another stream
            return
        # Within `torch.func.functional_call` others are in the parameters' places, and are not to be tracked.
        looks = self._may_arm and not within_transform()
        present = index.present() if looks and nodes.keeps_any else None
        changed = self._drop_changed(present)
        if looks and (changed or present is None or not nodes.hooks_all_of(index.table)):
            self._arm(in_place=True)
            self._replaced = index.has_lazy or index.table.parameters() is None

    def backward_announced(self) -> None:
        """A backward has reached the output of a root and no parameter yet: hooks what its forward could not show.

        Such as parameters that were replaced before it, or all of them if the exporter was started within it.
        """
        unseen = self._replaced or not self._parts.nodes.armed
        if unseen and self._may_arm and self._rounds.next_is_sampled:
            self._parts.cost.of(self._arm)
        self._replaced = False

    def _look_early(self) -> None:
        """With FSDP this is the last moment at which sharded parameters are in their places."""
        rounds, index = self._rounds, self._parts.index
        current = rounds.current
        again = bool(current.backwards) and not current.stepped and not rounds.stepping
        self._early_evidence = self._evidence_now() if again else ClearingEvidence()
        if not again or self.early is None:  # else, in the middle of a round, FSDP may have left them gathered
            in_place = rounds.next_is_sampled and index.table.parameters() is not None  # `None`: it has gathered them
            self.early = GradientVersions.of(index.refresh().tracked) if in_place else None

    def look_for_pipeline(self, frame: types.FrameType | None) -> None:
        """A pipeline schedule among the callers may divide gradients by the number of its micro-batches after the last backward."""
        pipeline = calling_pipeline(frame)
        self.divisor = 1.0 if pipeline is None or pipeline.divisor is None else float(pipeline.divisor)
        if pipeline is None or not self._parts.mode.sees_backwards:
            return
        # Under FSDP2 the schedule reduces by hand what its backwards have left.
        if pipeline.divisor is None or pipeline.piecewise or self._parts.index.fully_sharded:
            self._parts.mode.read_at_steps(PIECEWISE)
            self._parts.nodes.release()
            self._parts.inspections.tell(Inspection.backward_dropped)

    # When a backward begins

    def backward_began(self) -> Lost | None:
        """A backward of a sampled round begins: why its gradients cannot be read, or told from earlier ones; `None` if they can.

        Where all nodes are yet to be hooked, as right after a skipped step, a later round is sampled instead.
        """
        parts = self._parts
        if capturing_graph():
            return Lost.GRAPH_CAPTURE
        known = self._renew_table()
        if not parts.mode.sees_backwards:
            return None
        if parts.index.fully_sharded:
            return Lost.GATHERED if self.early is None else None
        if not parts.mode.around_roots:
            self.look_for_pipeline(parts.thread.frame())
        table, before = self._rounds.current.table, parts.nodes.table
        complete = parts.nodes.hooks_all_of(table)
        if not complete:
            parts.nodes.arm(table, late=True)
            if before is None and not self._rounds.current.captured:
                self._rounds.postpone()
                return None
        return None if known and complete else Lost.PARAMETERS_CHANGED

    def _renew_table(self) -> bool:
        """Takes the parameters that are trained now; whether all are among them that got a gradient in this round."""
        parts, current = self._parts, self._rounds.current
        if not parts.mode.around_roots:
            self.look_for_ranks()
        if not parts.mode.sees_backwards and current.backwards:
            return True
        if self._may_arm and not parts.nodes.armed:
            parts.index.look_at_shapes()
        before, table = current.table, self.table_now(within_step=True)
        current.table = table
        if table is before or not current.fired:
            return True
        fired = {before.tracked[position] for position in current.fired}
        if not fired <= {*table.tracked}:  # some were frozen since, whose gradients the step will use all the same
            current.table = before
            return {*table.tracked} <= {*before.tracked}
        current.fired = {position for position, tracked in enumerate(table.tracked) if tracked in fired}
        return True

    def table_now(self, *, within_step: bool) -> ParameterTable:
        """Return the parameters that are trained now. `within_step`: FSDP2 may have gathered them."""
        index = self._parts.index
        return index.table if index.present() is not None else index.refresh(within_step=within_step)

    def evidence(self) -> ClearingEvidence:
        """What the gradients of the last backward look like now; with FSDP, what they looked like before the forward."""
        return self._early_evidence if self._parts.index.fully_sharded else self._evidence_now()

    def _evidence_now(self) -> ClearingEvidence:
        parts, probes = self._parts, self._parts.probes
        zeroed = probes.zeroed()
        gone, written = probes.gone() or zeroed is True, zeroed is None
        if not (gone or written):
            return ClearingEvidence()
        return ClearingEvidence(gone, written, probes.updated(), parts.optimizers.reporting, parts.reader.knows_scaler)
