"""Sampler: reads the gradients of sampled rounds on request, and hands them over. A failure costs one sample.

It owns the parameter table of the current round. What is due is decided in `rounds.py`; what reading means, in `reader.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader, OptimizerView
from torch_grad_exporter.capture.rounds import Round, RoundTracker
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.transfer.events import Closed, Mailbox
from torch_grad_exporter.transfer.outcomes import Outcome

FULL_EVERY = 8
"""Every so many samples all gradients are measured again where the optimizer sees them."""

CROWDED = 1 << 12
"""Records in the mailbox, half of what it takes, beyond which no sample is taken: the host side has fallen behind."""


class Sampler:
    """Reads, and reports what a sample has cost. Belongs to the training thread and that of the backward."""

    def __init__(
        self,
        *,
        index: LayerIndex,
        optimizers: Optimizers,
        reader: GradientReader,
        clock: StepClock,
        cost: SampleCost,
        mailbox: Mailbox,
        errors: ErrorLog,
    ) -> None:
        self._index = index
        self._optimizers = optimizers
        self._reader = reader
        self._clock = clock
        self._cost = cost
        self._mailbox = mailbox
        self._looking = errors.boundary("capture", "gradients before a backward")
        self._reading = errors.boundary("capture", "gradients after a backward")
        self._reading_early = errors.boundary("capture", "gradients at a step")
        self._reading_again = errors.boundary("capture", "gradients as the optimizer sees them")
        self._closing = errors.boundary("capture", "end of a sample")
        self._forgetting = errors.boundary("capture", "units of other optimizers")
        self.table: ParameterTable = index.table

    # The round

    def begin_round(self) -> None:
        """A round begins."""
        self._settle_cost()
        self._reader.within.clear()
        self.table = self._index.table

    def backward_began(self) -> None:
        """A backward begins: what was read within the one before is no part of it."""
        self._reader.within.clear()

    def renew_table(self, *, within_step: bool = True) -> ParameterTable:
        """Takes the parameters that are trained now. `within_step`: FSDP2 may have gathered them."""
        self.table = self._index.refresh(within_step=within_step)
        return self.table

    # Reading

    def versions(self) -> GradientVersions | None:
        """The gradients' versions before a backward of a sampled round; `None` if they cannot be had."""
        return self._looking.result(GradientVersions.of, self.table.tracked)

    def read(self, rounds: RoundTracker) -> bool:
        """Measures the gradients of the round so far and hands them over, in place of an earlier capture; whether that was done."""
        return self._reading.result(self._read, rounds) or False

    def _read(self, rounds: RoundTracker) -> bool:
        if len(self._mailbox) >= CROWDED:
            return False
        return self._reader.read(rounds.current, self.table, rounds.pattern, self._clock.now())

    def read_within_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads what an optimizer is about to use up before the backward is over."""
        self._cost.of(self._reading_early, self._reader.within.read_of, self.table, optimizer)

    def read_of(self, optimizer: int) -> frozenset[int]:
        """Reads what an optimizer is about to use, where no backward is seen; what was found in this round so far."""
        owners, _ = self._optimizers.owners(self.table, {optimizer})
        self._reading_early(self._reader.within.read, self.table, np.flatnonzero(owners == optimizer))
        return self.found_early

    @property
    def found_early(self) -> frozenset[int]:
        """What was read at steps, of this backward or, where none is seen, of this round."""
        return frozenset(self._reader.within.fired)

    def read_again(self, rounds: RoundTracker, seen: OptimizerView) -> None:
        """Measures norms again where the optimizer sees them."""
        full = rounds.samples % FULL_EVERY == 1
        self._reading_again(lambda: self._reader.read_after(rounds.current, self.table, seen, full=full))

    # The end of a sample

    def owners_of(self, positions: Iterable[int], stepped: Iterable[int] = ()) -> frozenset[int]:
        """The optimizers that own these parameters; -1 stands for none."""
        owners, _ = self._optimizers.owners(self.table, frozenset(stepped))
        return frozenset(owners[sorted(positions)].tolist())

    def close(self, current: Round, outcome: Outcome, usual: frozenset[int]) -> None:
        """The outcome of the sample is known: hands it over, and subtracts what belongs to optimizers that did not step.

        `usual`: the optimizers that usually step. A failure costs this sample; the next round begins all the same.
        """
        self._closing(self._close, current, outcome, usual)
        self._cost.sample_over()
        self._settle_cost()

    def _close(self, current: Round, outcome: Outcome, usual: frozenset[int]) -> None:
        table, did_step = self.table, frozenset(current.stepped)
        owners, groups = self._optimizers.owners(table, did_step)
        stepped = did_step or usual or self.owners_of(current.fired, did_step)
        self._mailbox.append(Closed(current.number, outcome, owners, groups, stepped, dict(self._clock.steps)))
        fired = np.array(sorted(current.fired), dtype=np.int64)
        others = fired[~np.isin(owners[fired], list(stepped))].tolist()
        if others:
            self._forgetting(self._reader.forget, current.number, table, others)

    def _settle_cost(self) -> None:
        if not capturing_graph():
            self._cost.settle()


def capturing_graph() -> bool:
    """Whether a CUDA graph is being captured: then nothing may be allocated or copied. Never initialises CUDA."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
