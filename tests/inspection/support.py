"""Modes that watch each operation of PyTorch, and a clock that only the test moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique_consecutive"}


class EachOperation(TorchDispatchMode):
    """Calls a function with the name of each operation before it runs, also of the exporter's, which hide from other modes."""

    def __init__(self, act: Callable[[str], object]) -> None:
        super().__init__()
        self.act = act
        self.shown = mock.patch.object(torch.utils._python_dispatch, "_disable_current_modes", contextlib.nullcontext)

    def __enter__(self) -> Self:
        self.shown.start()
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self.shown.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - as its base
        self.act(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def refuse_reads(name: str) -> None:
    """Refuse an operation that waits for a device."""
    if name in READS:
        raise AssertionError(f"{name} waits for the device")


class Clock:
    """A clock that stands still unless something takes time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> None:
        """Take this long."""
        self.now += seconds
