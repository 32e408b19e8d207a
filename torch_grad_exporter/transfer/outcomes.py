"""What the training thread reports of a round, without any tensor: the outcome of its step and where its gradients were read."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """What became of the step whose gradients were captured."""

    STEPPED = "stepped"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


class Mode(enum.Enum):
    """The rungs of the ladder: how a backward is detected, and so where gradients are read."""

    OUTPUT = "output"
    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
