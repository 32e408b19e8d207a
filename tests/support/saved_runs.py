"""Short real trainings of the demo, saved as `exporter.save(path)` does it."""

from __future__ import annotations

import contextlib
import sysconfig
from functools import cache
from pathlib import Path

import torch

from tests.support.scrape import OFF
from torch_grad_exporter import start_exporter
from torch_grad_exporter.cli import demo
from torch_grad_exporter.cli.faults import Injection

STEPS = 120
FAULT = 30
"""The step at which a fault begins: after the 20 samples that spikes take."""


@cache
def corpus() -> torch.Tensor:
    """What the demo learns from, a part of it."""
    return demo.read_corpus(Path(sysconfig.get_path("stdlib")))


def trained(path: Path, *kinds: str, steps: int = STEPS, seed: int = 0, layers: int = 2, raises: bool = False) -> Path:
    """A run of the demo with these faults, saved after its end. `raises`: an exception ends it."""
    torch.manual_seed(seed)
    faults = tuple(Injection(kind, FAULT, 1.2) for kind in kinds)
    options = demo.DemoOptions(steps=steps, every=1, inject=faults, seed=seed, batch_size=2, context=16)
    model = demo.ByteTransformer(width=16, layers=layers, context=16)
    with contextlib.suppress(ZeroDivisionError), start_exporter(model, None, every=1, collectors=OFF, dead_window=20) as exporter:
        for _ in demo.train(model, corpus(), options, exporter):
            pass
        if raises:
            raise ZeroDivisionError
    exporter.save(path)
    return path
