"""Why samples are lost, and how a backward is detected."""

from __future__ import annotations

import enum


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


class Mode(enum.Enum):
    """Where gradients are read: after the backward, or at the optimizer's step."""

    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
