"""BackwardDetection: how backwards are seen, and where gradients are read.

All AccumulateGrad nodes are hooked in sampled rounds, those of a few parameters in other followed ones. Where backwards cannot be
seen that way, gradients are read when an optimizer steps.
"""

from __future__ import annotations

import enum
import logging

import numpy as np

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.gradient_versions import PROBES, GradientProbes
from torch_grad_exporter.capture.inspections import Inspection, Inspections
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN, capturing_graph, within_transform
from torch_grad_exporter.torch_compat.compiler import compiled_backwards

logger = logging.getLogger("torch_grad_exporter")

MISSES = 2
"""Rounds in a row in which all nodes were hooked and no backward was seen, after which gradients are read at the step."""

DETECTORS = 16
"""Parameters at most that report backwards in rounds that are not sampled."""


class Mode(enum.Enum):
    """Where gradients are read: after the backward, or at the optimizer's step."""

    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class BackwardDetection:
    """Hooks what shows the next backward. Belongs to the training thread and that of the backward.

    Attributes:
        sees_backwards: Whether gradients are read after the backward, and not at the step; it changes once at most.
        nodes: The hooks.
        probes: A few parameters of each model, whose gradients show whether they were cleared.
        around_roots: Whether the last backward ran through the output of a root.
        looked: Whether the table was brought up to date when the running backward reached that output.
        trusts_backwards: Whether a loop that reduces gradients by itself has done so by the end of a backward.
        misses: Steps since the last backward that was seen.
    """

    def __init__(self, index: LayerIndex, optimizers: Optimizers, cost: SampleCost, hooks: Hooks, inspections: Inspections) -> None:
        self._index, self._optimizers, self._cost, self._hooks, self._inspections = index, optimizers, cost, hooks, inspections
        self.sees_backwards = BACKWARDS_ARE_SEEN
        self.nodes = AccumulateGradNodes()
        self.probes = GradientProbes()
        self.around_roots = False
        self.looked = False
        self.trusts_backwards = False
        self._unsure = False  # a step came without a backward that was seen: all parameters are to report the next ones
        self.misses = 0
        self._compiled_before = compiled_backwards()
        self._followed: tuple[ParameterTable, set[int]] | None = None
        self._detectors: dict[tuple[int, int, int], TrackedParameter] = {}  # by model, optimizer, and first or last
        self._steady: dict[tuple[int, int], set[TrackedParameter]] = {}  # by model and optimizer, what each backward has reached

    @property
    def mode(self) -> Mode:
        """Where gradients are read."""
        return Mode.BACKWARD if self.sees_backwards else Mode.OPTIMIZER

    @property
    def by_nodes(self) -> bool:
        """Whether nodes show what comes into gradients; those of gathered parameters do not show it of the sharded ones."""
        return self.sees_backwards and not self._index.fully_sharded

    # What is hooked

    def arm(self, *, sampled: bool) -> None:
        """After a step, before any backward of the next round can begin: hook what that round needs.

        These are all nodes if it is `sampled`, else those of a few parameters that report its backwards.
        """
        nodes = self.nodes
        if self._index.fully_sharded:
            self._hooks.come_first()
            if sampled:  # here its sharded parameters are in their places
                self._cost.of(self._index.refresh)
        if not self.by_nodes:
            nodes.disarm()
        elif not (sampled or self._unsure) and self._detectors:
            nodes.arm_some(dict.fromkeys(self._detectors.values()))
        elif not (self.around_roots and nodes.table is self._index.table):
            # Where roots are called, the backward looks for what has changed since.
            self._cost.of(self.arm_all)

    def arm_all(self, *, in_place: bool = False, within_step: bool = False) -> None:
        """Hook the nodes of all parameters that are trained now, until the round ends. For the rest see `LayerIndex.refresh`."""
        if not self.nodes.hooked:  # else a change shows by the nodes
            self._index.look_at_shapes()
        table = self._index.refresh(in_place=in_place, within_step=within_step)
        if not self.nodes.hooks_all_of(table) and table.parameters() is not None:
            self.nodes.arm(table)

    def forward_began(self, *, sampled: bool) -> None:
        """Before a forward: use no node that was made for another shape of its parameter, or for another stream."""
        nodes = self.nodes
        if sampled and capturing_graph():
            nodes.release()
            return
        if nodes.drop_changed():
            self._index.look_at_shapes()
            if not sampled:
                nodes.arm_some(dict.fromkeys(self._detectors.values()))
        # If FSDP manages the model now, it shows the parameters here for the last time. Within `torch.func.functional_call` others
        # are in the parameters' places, and are not to be tracked.
        if sampled and self.by_nodes and not nodes.hooked and not within_transform():
            self.arm_all(in_place=True)

    # What was seen

    def follow(self, table: ParameterTable, fired: set[int]) -> None:
        """After a round in which `fired` got gradients: choose what shows backwards, and clearing, until the next sample.

        The first and the last parameter of each optimizer and model show backwards; probes are spread over what got a gradient.
        """
        self._unsure = False
        if (table, fired) == self._followed:
            return
        self._followed = table, set(fired)
        owners = self._optimizers.owners(table)
        by_model: dict[int, list[int]] = {}
        for i in sorted(fired):
            by_model.setdefault(table.tracked[i].model, []).append(i)
        for model, positions in by_model.items():
            spread = dict.fromkeys(round(place) for place in np.linspace(0, len(positions) - 1, PROBES))  # weights and biases
            self.probes.choose(model, [table.tracked[positions[place]] for place in spread])
            for owner in np.unique(owners[positions]).tolist():
                owned = [i for i in positions if owners[i] == owner]
                steady = self._steady.get((model, owner), set())  # not an expert, which others may be chosen instead of
                owned = [i for i in owned if table.tracked[i] in steady] or owned
                self._steady[model, owner] = {table.tracked[i] for i in owned}
                for place, i in enumerate(dict.fromkeys((owned[0], owned[-1]))):
                    key = model, owner, place
                    if key in self._detectors or len(self._detectors) < DETECTORS:
                        self._detectors[key] = table.tracked[i]

    def step_without_backward(self) -> None:
        """A step was taken, and no backward was seen before it."""
        if not self.sees_backwards:
            return
        table = self._index.refresh(within_step=True)
        has_gradients = any(tracked.gradient() is not None for tracked in table.tracked)
        if not (has_gradients and self.probes.written_between_steps(table)):
            return
        compiled, complete = compiled_backwards() > self._compiled_before, self.nodes.hooks_all_of(table)
        self.nodes.disarm()  # they may be those of tensors that were replaced
        self._unsure = True
        if compiled:
            self.read_at_steps("backwards are compiled; norms are those after clipping")
        elif complete or self._index.fully_sharded:
            # Where hooked nodes saw nothing, gradients do not come from autograd.
            self.misses += 1
            if self.misses >= MISSES:
                self.read_at_steps("steps were seen, but no backward; norms are those after clipping")

    def read_at_steps(self, why: str) -> None:
        """Read gradients at the step from now on."""
        say(logger, logging.INFO, "gradients are read at the step from now on: %s", why)
        self.sees_backwards = False
        self._followed, self._detectors = None, {}
        self.probes.forget()
        self.nodes.release()
        self._inspections.tell(Inspection.backward_dropped)  # no end of a backward will do it
