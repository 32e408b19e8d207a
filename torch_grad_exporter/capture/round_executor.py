"""Rounds: puts into effect what the `RoundTracker` decides: counts, closes samples, and begins the next round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.fused_optimizer import FusedSteps
from torch_grad_exporter.capture.gradient_versions import GradientProbes
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.round_events import (
    BackwardBegan,
    BeginRound,
    CloseSample,
    CountSkipped,
    CountUnseen,
    EarlierStepSkipped,
    NoBackwardSeen,
    ReadGradients,
    ResolveNorm,
    RoundEvent,
    TrainingOver,
)
from torch_grad_exporter.capture.round_pattern import ClearingEvidence
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.capture.sampler import Sampler
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.transfer.events import Mailbox, OutcomeResolved

Left = ReadGradients | NoBackwardSeen
"""Decisions that the sender of the event carries out."""


class Rounds:
    """The tracker, and what carries out its decisions. All may read `tracker`; only `handle` changes it."""

    def __init__(
        self,
        *,
        tracker: RoundTracker,
        sampler: Sampler,
        clock: StepClock,
        optimizers: Optimizers,
        reader: GradientReader,
        probes: GradientProbes,
        nodes: AccumulateGradNodes,
        mailbox: Mailbox,
    ) -> None:
        self.tracker = tracker
        self._sampler = sampler
        self._clock = clock
        self._optimizers = optimizers
        self._reader = reader
        self._probes = probes
        self._nodes = nodes
        self._fused = FusedSteps(clock)
        self._effects: dict[type, Callable[[Any], None]] = {
            CountSkipped: lambda decided: clock.steps_skipped(decided.steps),
            CountUnseen: lambda decided: clock.step_done(decided.optimizer, decided.steps),
            CloseSample: sampler.close,
            ResolveNorm: lambda decided: mailbox.append(OutcomeResolved(decided.outcome)),
            BeginRound: self._begin_round,
        }

    def handle(self, event: RoundEvent) -> list[Left]:
        """Carries out what the event leads to; returns the decisions that are left to its sender."""
        left: list[Left] = []
        for decided in self.tracker.handle(event):
            if isinstance(decided, ReadGradients | NoBackwardSeen):
                left.append(decided)
            else:
                self._effects[type(decided)](decided)
        return left

    def backward_began(self, seen: ClearingEvidence | None = None) -> None:
        """A backward begins. `seen`: what the gradients looked like, where they could be seen earlier only."""
        within = self._clock.stepping
        asked = self.tracker.asks_for_evidence(within_step=within)
        self.handle(BackwardBegan(within, seen or self.evidence()) if asked else BackwardBegan(within))

    def evidence(self) -> ClearingEvidence:
        """What the gradients of the last backward look like now."""
        gone, written = self._probes.gone(), self._probes.written()
        if not (gone or written):
            return ClearingEvidence()
        return ClearingEvidence(
            gone=gone,
            written=written,
            updated=self._probes.updated(),
            reporting=self._optimizers.reporting,
            scaler_known=self._reader.knows_scaler,
        )

    def step_counted(self, optimizer: int, found_inf: torch.Tensor | None) -> None:
        """Counts an optimizer's step. `found_inf`: a scaler's answer, not zero if nothing was done."""
        self._fused.stepped(self.tracker.current.number, optimizer, found_inf)

    @property
    def answers_may_come(self) -> bool:
        """Whether it may turn out later that a step did not take place."""
        return self._reader.knows_scaler or self._fused.waiting

    def close(self) -> None:
        """Hands over what is still open."""
        self._fused.settle(-1)
        self.handle(TrainingOver())

    def _begin_round(self, decided: BeginRound) -> None:
        self._sampler.begin_round()
        if decided.after_step:
            self._optimizers.round_over()
        if self._fused.settle(decided.number):
            self.tracker.handle(EarlierStepSkipped())
        if not self.tracker.current.sampled:
            self._nodes.disarm()
