"""ReductionWatch: what concerns other ranks in a round, without a collective.

Which gradients are reduced, and, where the user asked for it, this rank's own gradients before the reduction.
"""

from __future__ import annotations

import functools
from dataclasses import InitVar, dataclass

import torch

from torch_grad_exporter.capture.accumulate_grad import Gradients
from torch_grad_exporter.capture.gradient_versions import GradientProbes
from torch_grad_exporter.capture.local import LocalGradients
from torch_grad_exporter.capture.rounds import Round
from torch_grad_exporter.capture.waits import GradientWaits
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.model.reduction import Reductions


@dataclass(eq=False)
class ReductionWatch:
    """Receives forwards and backwards. Belongs to the training thread and that of the backward.

    `local`: measures this rank's own gradients, where the user asked for it.
    """

    index: LayerIndex
    probes: GradientProbes
    waits: GradientWaits
    local: LocalGradients | None
    errors: InitVar[ErrorLog]

    def __post_init__(self, errors: ErrorLog) -> None:
        self._reductions = Reductions()
        self._ranks = errors.boundary("reduction", "which ranks have the same gradients")
        self._began = errors.boundary("reduction", "beginning of a backward")
        self._ended = errors.boundary("reduction", "end of a backward")
        self._posted = errors.boundary("reduction", "hand-over")

    @property
    def wrapped(self) -> bool:
        """Whether the last sampled forward ran through a wrapper, whose reduction is a part of the backward."""
        return self._reductions.wrapped

    def look(self, root: torch.nn.Module | None = None) -> None:
        """Finds out which ranks have the same gradients, and what reduces them: within a forward of a root, or without one."""
        self._ranks(self._look, root)

    def _look(self, root: torch.nn.Module | None) -> None:
        if self.index.replicas.undecided(self.index.models):
            self.index.find_replicas(root)
        if root is not None:
            self._reductions.forward_began(root)

    def counted(self, *, unfinished: bool) -> None:
        """There were backwards that were only counted. `unfinished`: of a round that is not over."""
        if self.local is not None:
            self.local.missed(unfinished=unfinished)

    def begin(self, table: ParameterTable, backwards: int, *, on_host: bool, local: bool) -> None:
        """A backward of a sampled round begins, after so many in this round.

        `on_host`: gradients are on the CPU, where the wait for other ranks can be timed. `local`: own gradients can be measured.
        """
        self._began(self._begin, table, backwards, on_host, local)

    def _begin(self, table: ParameterTable, backwards: int, on_host: bool, local: bool) -> None:
        reduction = self._reductions.coming()
        if reduction is not None and reduction.parameters and on_host:
            self.waits.begin()
        if self.local is not None and local:
            self.local.begin(table, reduction, carries_on=backwards > 0 and self.probes.untouched())

    def arrives(self, tracked: TrackedParameter, gradients: Gradients) -> None:
        """The first parameter of a backward that has begun is about to receive these gradients; hooks that came since miss it."""
        if self.local is not None:
            self._began(self.local.arrives_first, tracked, gradients)

    def end(self, current: Round, table: ParameterTable, fired: set[int], *, written: bool) -> None:
        """A backward is over, of any round. `written`: it was one that writes gradients; `fired`: which, on a sampled one."""
        if self.local is not None:
            self._ended(functools.partial(self.local.end, written=written), current, table, fired)

    def captured(self, round_number: int) -> None:
        """The round's gradients were read."""
        if self.local is not None:
            self._posted(self.local.post, round_number)

    def disarm(self) -> None:
        """Removes the hooks of the running backward; idempotent, from any thread."""
        if self.local is not None:
            self.local.disarm()
