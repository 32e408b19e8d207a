"""What the Python frames that called a hook show: which gradient scaler called the step."""

from __future__ import annotations

import types

from torch_grad_exporter.capture.reader import Scaler

NEAREST = 12
"""Frames that are searched for a gradient scaler."""


def calling_scaler(frame: types.FrameType | None) -> Scaler | None:
    """The `torch.amp.GradScaler` whose `step` called the optimizer's, searched for in the nearest frames."""
    for _ in range(NEAREST):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
