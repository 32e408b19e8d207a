"""Short real trainings of the demo, saved as `exporter.save(path)` does it."""

from __future__ import annotations

import contextlib
import sysconfig
from functools import cache
from pathlib import Path

import torch

from torch_grad_exporter import start_exporter
from torch_grad_exporter.cli import demo

STEPS = 120
FAULT = 30
"""The step at which a fault begins: after the 20 samples that spikes take."""

OFF = dict.fromkeys(("gpu", "cuda_memory", "container", "host", "process"), False)


class Silent(demo.Progress):
    """No bar."""

    def __init__(self) -> None:
        """None."""

    def advance(self, loss: torch.Tensor) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@cache
def corpus() -> torch.Tensor:
    """What the demo learns from, a part of it."""
    return demo.read_corpus(Path(sysconfig.get_path("stdlib")))


def trained(path: Path, *kinds: str, steps: int = STEPS, seed: int = 0, layers: int = 2, raises: bool = False) -> Path:
    """A run of the demo with these faults, saved after its end. `raises`: an exception ends it."""
    torch.manual_seed(seed)
    faults = tuple(demo.Injection(kind, FAULT, 1.2) for kind in kinds)
    options = demo.Options(steps=steps, every=1, inject=faults, seed=seed, batch_size=2, context=16)
    model = demo.ByteTransformer(width=16, layers=layers, context=16)
    with contextlib.suppress(ZeroDivisionError), start_exporter(model, None, every=1, collectors=OFF, dead_window=20) as exporter:
        demo.train(model, corpus(), options, exporter, Silent())
        if raises:
            raise ZeroDivisionError
    exporter.save(path)
    return path
