"""What the Python frames that called a hook tell: whether an optimizer's step is running, and whose gradient scaler called it."""

from __future__ import annotations

import types

from torch_grad_exporter.capture.reader import Scaler

NEAREST = 12
"""Frames in which a gradient scaler is looked for."""


def called_from_step(frame: types.FrameType | None) -> bool:
    """Whether an optimizer's step is among the callers: else one that had begun has raised."""
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            return True
        frame = frame.f_back
    return False


def calling_scaler(frame: types.FrameType | None) -> Scaler | None:
    """The `torch.amp.GradScaler` whose `step` called the optimizer's, looked for in the nearest frames."""
    for _ in range(NEAREST):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
