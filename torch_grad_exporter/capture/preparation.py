"""RoundPreparation: scans parameters and arms nodes before the next backward, so that it can be read if its round is sampled."""

from __future__ import annotations

import torch

from torch_grad_exporter.capture.accumulate_grad import NodeHook
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.round_pattern import ClearingEvidence
from torch_grad_exporter.torch_compat import graph_task


class RoundPreparation:
    """Belongs to the training thread.

    `early`: the versions of all gradients before a forward, where FSDP2 shows its sharded parameters in their places.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._early_evidence = ClearingEvidence()
        self.early: GradientVersions | None = None

    def evidence(self) -> ClearingEvidence:
        """What the gradients of the last backward look like now; with FSDP2, what they looked like before the forward."""
        return self._early_evidence if self._parts.index.fully_sharded else self._evidence_now()

    def _evidence_now(self) -> ClearingEvidence:
        parts, probes = self._parts, self._parts.probes
        gone, written = probes.gone(), probes.written()
        if not (gone or written):
            return ClearingEvidence()
        return ClearingEvidence(gone, written, probes.updated(), parts.optimizers.reporting, parts.reader.knows_scaler)

    def forward_began(self, root: torch.nn.Module) -> None:
        """A forward of a root with gradients begins: with FSDP2 the last moment at which sharded parameters are in their places."""
        if graph_task() != -1:
            return
        rounds = self._parts.rounds
        if rounds.next_is_sampled:
            self._parts.reductions.look(root)
        if self._parts.index.fully_sharded:
            current = rounds.current
            again = bool(current.backwards) and not current.stepped and not rounds.stepping
            self._early_evidence = self._evidence_now() if again else ClearingEvidence()
            if not again or self.early is None:  # else, in the middle of a round, FSDP2 may have left them gathered
                self.early = self._versions()

    def _versions(self) -> GradientVersions | None:
        index = self._parts.index
        if not self._parts.rounds.next_is_sampled or index.table.parameters() is None:  # `None`: FSDP2 has gathered them
            return None
        return GradientVersions.of(index.refresh().tracked)

    def forward_ended(self, hook: NodeHook) -> None:
        """A forward of a root is over: arms the nodes for a check, unless that was done after the step."""
        if self._wants_nodes():
            self._parts.cost.of(self._arm, hook)

    def step_over(self, hook: NodeHook) -> None:
        """A step is over: scans the parameters again if the next round is sampled."""
        parts = self._parts
        if parts.index.fully_sharded:
            parts.hooks.come_first()
        if parts.ladder.announces or not parts.rounds.next_is_sampled:  # a check of the rung `output` is over after one round
            parts.nodes.disarm()
        if self._wants_nodes():
            parts.cost.of(parts.index.refresh)
            parts.cost.of(self._arm, hook)

    def _wants_nodes(self) -> bool:
        """Whether nodes are to be armed that are not, and can be."""
        parts = self._parts
        wanted = parts.ladder.wants_nodes(parts.rounds.samples) and parts.rounds.next_is_sampled
        # The nodes of gathered parameters do not show what happens to the sharded ones.
        return wanted and not parts.nodes.armed and not parts.index.fully_sharded

    def _arm(self, hook: NodeHook) -> None:
        """Hooks the AccumulateGrad nodes of all parameters until the round ends."""
        table = self._parts.index.table
        # Not after another scan: `torch.func.functional_call` has put others in the parameters' places if this is in a forward.
        if table.parameters() is not None:
            self._parts.nodes.arm(table, hook)
