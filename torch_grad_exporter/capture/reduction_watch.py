"""ReductionWatch: what concerns other ranks in a round, without a collective.

Which gradients are reduced, how long the backward waits for that, and, where the user asked for it, this rank's own gradients
before the reduction.
"""

from __future__ import annotations

import torch

from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.gradient_versions import GradientProbes
from torch_grad_exporter.capture.local import LocalGradients
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.rounds import Round
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.capture.waits import GradientWaits
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.reduction import Reductions
from torch_grad_exporter.transfer.events import Mailbox


class ReductionWatch:
    """Receives forwards and backwards. Belongs to the training thread and that of the backward. `local_norm`: measure it."""

    def __init__(
        self,
        *,
        index: LayerIndex,
        clock: StepClock,
        cost: SampleCost,
        probes: GradientProbes,
        mailbox: Mailbox,
        hooks: Hooks,
        errors: ErrorLog,
        local_norm: bool,
    ) -> None:
        self._index = index
        self._clock = clock
        self._probes = probes
        self._reductions = Reductions()
        self._waits = GradientWaits(clock, hooks)
        self._local = LocalGradients(hooks, mailbox, cost, clock) if local_norm else None
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
        if self._index.replicas.undecided(self._index.models):
            self._index.find_replicas(root)
        if root is not None:
            self._reductions.forward_began(root)

    def saw(self, task: int) -> None:
        """Another backward has begun; called for each."""
        self._waits.saw(task)

    def counted(self, *, unfinished: bool) -> None:
        """There were backwards that were only counted. `unfinished`: of a round that is not over."""
        self._waits.missed()
        if self._local is not None:
            self._local.missed(None if unfinished else self._examples())

    def begin(self, table: ParameterTable, backwards: int, *, on_host: bool, local: bool) -> None:
        """A backward of a sampled round begins, after so many in this round.

        `on_host`: gradients are on the CPU, where the wait for other ranks can be timed. `local`: own gradients can be measured.
        """
        self._began(self._begin, table, backwards, on_host, local)

    def _begin(self, table: ParameterTable, backwards: int, on_host: bool, local: bool) -> None:
        reduction = self._reductions.coming()
        if reduction is not None and reduction.parameters and on_host:
            self._waits.begin()
        if self._local is not None and local:
            self._local.begin(table, reduction, carries_on=backwards > 0 and self._probes.untouched())

    def waited(self, round_number: int, moment: float) -> None:
        """The backward was over at this moment, and the wrapper done with it."""
        self._waits.end(round_number, moment)

    def end(self, current: Round, table: ParameterTable, fired: set[int], *, written: bool) -> None:
        """A backward is over, of any round. `written`: it was one that writes gradients; `fired`: which, on a sampled one."""
        if self._local is not None:
            self._ended(self._end, self._local, current, table, fired, written)

    def _end(self, local: LocalGradients, current: Round, table: ParameterTable, fired: set[int], written: bool) -> None:
        local.end(current, table, fired, self._examples(), written=written)

    def captured(self, round_number: int) -> None:
        """The round's gradients were read."""
        if self._local is not None:
            self._posted(self._local.post, round_number)

    def disarm(self) -> None:
        """Removes the hooks of the running backward; idempotent, from any thread."""
        if self._local is not None:
            self._local.disarm()

    def _examples(self) -> int | None:
        return self._clock.examples if self._clock.examples_known else None
