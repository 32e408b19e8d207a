"""LossScale: the gradient scaler of the training, and the scale by which it multiplies the loss."""

from __future__ import annotations

import types
import weakref
from typing import Protocol

import torch

from torch_grad_exporter.torch_compat.optimizers import scale_of

NEAREST = 12
"""Callers of an optimizer's step that are searched for a gradient scaler."""


class Scaler(Protocol):
    """A `torch.amp.GradScaler`: `_scale` is a tensor, `None` before its first use; a disabled one has none."""

    def is_enabled(self) -> bool:
        """Whether it scales."""


class LossScale:
    """Finds the scaler, and holds it weakly. Belongs to the training thread.

    Args:
        scaler: One that the user has named.
    """

    def __init__(self, scaler: Scaler | None = None) -> None:
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._searched = False

    def search(self, frame: types.FrameType | None) -> None:
        """Search the callers of an optimizer's step for a scaler whose `step` called it."""
        self._searched = True
        for _ in range(NEAREST):
            if frame is None:
                return
            if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
                scaler = frame.f_locals.get("self")
                if scaler is not None:
                    self._scaler = weakref.ref(scaler)
                return
            frame = frame.f_back

    @property
    def has_scaler(self) -> bool:
        """Whether a scaler was given or found, and is alive."""
        return self._scaler is not None and self._scaler() is not None

    @property
    def is_known(self) -> bool:
        """Whether it is known if there is a scaler, as it is from the first step on."""
        return self._searched or self.has_scaler

    @property
    def value(self) -> torch.Tensor | None:
        """The loss scale now, if there is a scaler that has one."""
        return scale_of(None if self._scaler is None else self._scaler())
