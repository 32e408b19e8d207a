"""MicroBatches: the norms that the first of several micro-batches has given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.gradient_versions import GradientVersions, PresentGradients
from torch_grad_exporter.capture.inspections import First, Inspection
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.inspection.local_gradients import SOURCE, LocalMeasurement, Norms
from torch_grad_exporter.inspection.measuring import InspectionContext, VectorSender
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.replicas import Reductions
from torch_grad_exporter.statistics import single


class MicroBatches(Inspection):
    """Measures the gradient after the first backward of a sampled round that usually has several.

    The sample itself has their sum. Both together give the noise scale if each backward was of another batch of the same size, so
    nothing is reported of a round whose backwards had unequal numbers of forwards or of training examples, whose gradients were
    written to between backwards, or of which a wrapper reduces gradients; nor of sharded parameters. It means nothing where
    they are of different losses, such as those of a GAN's discriminator with one backward for real and one for generated images.

    It posts its record before or after the `SampleRead` that it belongs to. Belongs to the thread of the backward.
    """

    def __init__(
        self, context: InspectionContext, rounds: RoundTracker, reductions: Reductions, detection: BackwardDetection
    ) -> None:
        self._sender, self._clock, self._rounds = VectorSender(SOURCE, context), context.clock, rounds
        self._reductions, self._detection = reductions, detection
        # Since the last backward: its forwards, and the training examples of all forwards before them.
        self._forwards, self._examples = 0, 0
        # Of the first backward of the round: its forwards and examples, and the norms before and after it.
        self._size: tuple[int, int | None] | None = None
        self._before: Norms = {}
        self._norms: Norms | None = None
        self._left: GradientVersions | None = None

    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sampled: bool) -> None:  # noqa: ARG002
        """Count it."""
        if not self._forwards:
            self._examples = self._clock.examples
        self._forwards += 1

    def counted(self, *, unfinished: bool) -> None:  # noqa: ARG002
        """Forget forwards, since their backwards were not seen."""
        self._forwards = 0

    def backward_began(self, current: ArmedRound, table: ParameterTable, first: First | None, task: int) -> None:  # noqa: ARG002
        """Note what is there before the first backward of the round; else see if this one continues it."""
        size = self._forwards, self._clock.examples - self._examples if self._clock.examples_known else None
        self._forwards = 0
        if current.backwards == 0:
            self.backward_dropped()
            if current.sampled and size[0] and self._accumulates() and not table.tracked.flat:
                self._size, self._before = size, _norms_of(table)
        elif size != self._size or not self._accumulates() or (self._left is not None and not self._left.unchanged()):
            self.backward_dropped()

    def _accumulates(self) -> bool:
        """Return whether a backward of this rank alone may be followed by more before the step."""
        usual = self._detection.sees_backwards and not self._rounds.pattern.is_whole(1)
        return usual and self._reductions.coming is None

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Measure what the first backward has brought."""
        if self._size is not None:
            if self._norms is None:
                self._norms = _norms_of(current.table, current.fired)
            self._left = GradientVersions.of(current.table.tracked)

    def backward_dropped(self) -> None:
        """Forget the round."""
        self._size, self._norms, self._left, self._before = None, None, None, {}

    def gradients_read(self, current: ArmedRound) -> None:
        """Post what was measured, if there were more backwards."""
        if self._size is None or self._norms is None or current.backwards < 2:
            return
        local = np.array([not tracked.sharded for tracked in current.table.tracked], dtype=np.bool_)
        measured = LocalMeasurement(local, self._size[1], ranks=1, micro_batches=current.backwards)
        measured.send(self._sender, current.number, self._norms, self._before)


def _norms_of(table: ParameterTable, positions: set[int] | None = None) -> Norms:
    """Return the norms of the gradients that are there, by the position of their parameter."""
    gradients = PresentGradients.of(table.tracked).at(range(len(table.tracked)) if positions is None else positions)
    return {position: [*single.norms(gradient)] for position, gradient in gradients.items()}
