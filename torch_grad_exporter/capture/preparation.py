"""RoundPreparation: scans parameters and arms nodes before the next backward, so that it can be read if its round is sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes, NodeHook
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.reduction_watch import ReductionWatch
from torch_grad_exporter.capture.round_executor import Rounds
from torch_grad_exporter.capture.round_pattern import ClearingEvidence
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.capture.triggers import Ladder
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.torch_compat import graph_task


@dataclass(frozen=True, slots=True)
class EarlyLook:
    """What was seen before a forward, where FSDP2 shows its sharded parameters in their places.

    `evidence`: of the gradients of the backward before; `versions`: of all, before the backward that follows.
    """

    evidence: ClearingEvidence = ClearingEvidence()  # noqa: RUF009 - frozen
    versions: GradientVersions | None = None


class RoundPreparation:
    """Belongs to the training thread."""

    def __init__(
        self,
        *,
        index: LayerIndex,
        rounds: Rounds,
        ladder: Ladder,
        nodes: AccumulateGradNodes,
        reductions: ReductionWatch,
        cost: SampleCost,
        hooks: Hooks,
    ) -> None:
        self._index = index
        self._rounds = rounds
        self._ladder = ladder
        self._nodes = nodes
        self._reductions = reductions
        self._cost = cost
        self._hooks = hooks
        self.early = EarlyLook()

    def forward_began(self, root: torch.nn.Module) -> None:
        """A forward of a root with gradients begins: with FSDP2 the last moment at which sharded parameters are in their places."""
        if graph_task() != -1:
            return
        tracker = self._rounds.tracker
        if tracker.next_is_sampled:
            self._reductions.look(root)
        if self._index.fully_sharded:
            current = tracker.current
            again = bool(current.backwards) and not current.stepped and not tracker.stepping
            evidence = self._rounds.evidence() if again else ClearingEvidence()
            versions = self.early.versions
            if not again or versions is None:  # else, in the middle of a round, FSDP2 may have left them gathered
                versions = self._versions()
            self.early = EarlyLook(evidence, versions)

    def _versions(self) -> GradientVersions | None:
        if not self._rounds.tracker.next_is_sampled or self._index.table.parameters() is None:  # `None`: FSDP2 has gathered them
            return None
        return GradientVersions.of(self._index.refresh().tracked)

    def forward_ended(self, hook: NodeHook) -> None:
        """A forward of a root is over: arms the nodes for a check, unless that was done after the step."""
        if self._ladder.current.wants_nodes(self._rounds.tracker.samples) and self._rounds.tracker.next_is_sampled:
            self._arm(hook)

    def step_over(self, hook: NodeHook) -> None:
        """A step is over: scans the parameters again if the next round is sampled."""
        if self._index.fully_sharded:
            self._hooks.come_first()
        sampled_next, rung = self._rounds.tracker.next_is_sampled, self._ladder.current
        if not (rung.keeps_nodes() and sampled_next):
            self._nodes.disarm()
        if sampled_next and rung.wants_nodes(self._rounds.tracker.samples) and self._may_arm():
            self._cost.of(self._index.refresh)
            self._arm(hook)

    def _may_arm(self) -> bool:
        # The nodes of gathered parameters do not show what happens to the sharded ones.
        return not self._nodes.armed and not self._index.fully_sharded

    def _arm(self, hook: NodeHook) -> None:
        if self._may_arm():
            self._cost.of(self._hook_nodes, hook)

    def _hook_nodes(self, hook: NodeHook) -> None:
        """Hooks the AccumulateGrad nodes of all parameters until the round ends."""
        # Not after another scan: `torch.func.functional_call` has put others in the parameters' places if this is in a forward.
        if self._index.table.parameters() is not None:
            self._nodes.arm(self._index.table, hook)
