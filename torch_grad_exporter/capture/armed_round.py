"""ArmedRound: one round of training that hooks follow, with everything that belongs to it.

A round is everything between the first backward after a step and the last optimizer step before the next backward. It is the
unit of sampling and of the step duration: two optimizers that share a backward share a round, and the two alternating ones of a
GAN do not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torch_grad_exporter.capture.gradient_versions import GradientsAsRead, GradientVersions
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.device import GroupReading
from torch_grad_exporter.store.records import OptimizerView, SamplePart


class Lost(enum.Enum):
    """Why a sample that was due is not shown; the values of the label `reason`."""

    EDITED = "edited"
    """A round shorter than those before changed its gradients before they were read."""
    PARAMETERS_CHANGED = "parameters_changed"
    """Parameters were added, replaced or thawed within the round, so that not all that came into gradients was seen."""
    GATHERED = "gathered"
    """FSDP2 had not shown its sharded parameters before the backward."""
    GRAPH_CAPTURE = "graph_capture"
    """A CUDA graph was being captured."""
    FAILED = "failed"
    """The gradients could not be read, or the host is too far behind to take more."""
    UNATTRIBUTED = "unattributed"
    """No step followed, and of which optimizer it would have been is not known yet."""
    UNDELIVERED = "undelivered"
    """What was read never arrived from its device."""


@dataclass(slots=True, eq=False)
class ArmedRound:
    """The state of one round. `RoundTracker` applies the rules to it, `GradientReader` enters what it reads.

    It is dropped when the next backward after a step begins, and no gradient outlives it.
    """

    number: int
    sampled: bool
    """Whether its gradients are read."""
    table: ParameterTable
    """The parameters, as they were when its last backward began."""
    extra: bool = False
    """Whether it is sampled although it was not due, to see what follows a skipped step."""

    # Backwards

    backwards: int = 0
    models: set[int] = field(default_factory=set)
    """Models that received gradients."""
    fired: set[int] = field(default_factory=set)
    """Positions in the table of the parameters that received a gradient."""
    again: bool = False
    """Whether earlier gradients of this round were thrown away."""
    passes: int = 0
    """How often gradients were cleared in it."""
    of_inputs: bool = False
    """Whether the last backward gives an input a gradient, as an adversarial attack does; a clearing then is not a skipped step."""
    left: GradientVersions | None = None
    """The gradients at the end of the last backward, where it matters at the step whether they are still the same."""

    # The sample

    counted: bool = False
    """Whether gradients were read of it, also if they were thrown away since."""
    captured: bool = False
    lost: bool = False
    """Whether there were gradients that could not be read."""
    open: bool = True
    """Whether the outcome of the sample is still unknown."""
    as_read: GradientsAsRead | None = None
    parts: tuple[SamplePart, ...] = ()
    early: list[GroupReading] = field(default_factory=list)
    """Gradients that optimizers used before the backward was over, or without a backward that was seen."""
    early_fired: set[int] = field(default_factory=set)
    """Positions in the table of these."""
    views: list[OptimizerView] = field(default_factory=list)
    """Gradients as optimizers saw them."""
    divided_again: bool = False
    """Whether the loop gave a divisor again after the capture; if the step is skipped it may be of the next round."""

    # Steps

    stepped: set[int] = field(default_factory=set)
    """Optimizers that have stepped."""
    read: set[int] = field(default_factory=set)
    """Optimizers whose view of the gradients was taken."""
    foreign: bool = False
    """Whether an optimizer stepped that owns none of our parameters."""
    abandoned: bool = False
    """Whether a step raised after a backward."""
    observed: bool = False
    """Whether the user gave the global norm, and its outcome is still to be reported."""

    def begin_again(self) -> None:
        """Forget the backwards so far: gradients were cleared, and it is unknown yet whether that was a skipped step."""
        self.backwards, self.again, self.captured = 0, True, False
        self.passes += 1
        self.fired.clear()

    @property
    def behind(self) -> bool:
        """Whether there are gradients to read that were not read when the last backward ended."""
        return self.sampled and bool(self.fired) and not self.captured

    @property
    def sample_is_open(self) -> bool:
        """Whether the gradients were read and the outcome is unknown yet."""
        return self.captured and self.open
