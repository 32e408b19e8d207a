"""What `nan_origin` costs a step, beside `torch.autograd.detect_anomaly`: all ways interleaved step by step, in one process.

`python -m benchmarks.nan_origin` prints a table for docs/nan-origin.md. Each way trains a copy of the same model on the same batch.
"""

from __future__ import annotations

import contextlib
import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from torch_grad_exporter import start_exporter

STEPS, LEFT_OUT = 200, 20
OFF = dict.fromkeys(("process", "host", "container", "gpu", "cuda_memory"), False)
WAYS: dict[str, dict[str, object] | None] = {
    "without": None,
    "detect_anomaly": None,
    "defaults": {},
    "defaults, again": {},
    "defaults, nan_origin=True": {"nan_origin": True},
    "every=1": {"every": 1},
    'every=1, nan_origin="always"': {"every": 1, "nan_origin": "always"},
}


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Ten small layers."""
    return nn.Sequential(*(one for _ in range(10) for one in (nn.Linear(64, 64), nn.ReLU()))), torch.randn(32, 64)


def transformer(width: int, layers: int) -> tuple[nn.Module, torch.Tensor]:
    """An encoder."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(8, 32, width)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "perceptron, 10 layers of 64": perceptron,
    "transformer, 2 layers of 64": lambda: transformer(64, 2),
    "transformer, 4 layers of 256": lambda: transformer(256, 4),
}


def stepping(model: nn.Module, batch: torch.Tensor, *, anomaly: bool) -> Callable[[], float]:
    """A step of training, which returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> float:
        start = time.perf_counter()
        with torch.autograd.detect_anomaly() if anomaly else contextlib.nullcontext():
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def measured(make: Callable[[], tuple[nn.Module, torch.Tensor]], steps: int = STEPS) -> dict[str, float]:
    """The median milliseconds of a step by way; in each turn all ways, in an order made by chance."""
    torch.manual_seed(0)
    model, batch = make()
    chance, seconds = random.Random(0), dict[str, list[float]]()  # noqa: S311 - no secret
    with contextlib.ExitStack() as stack:
        ways = {}
        for way, options in WAYS.items():
            mine = copy.deepcopy(model)
            if options is not None:
                stack.enter_context(start_exporter(mine, None, collectors=OFF, **options))  # type: ignore[arg-type]
            ways[way] = stepping(mine, batch, anomaly=way == "detect_anomaly")
        for _ in range(steps):
            for way, step in chance.sample([*ways.items()], len(ways)):
                seconds.setdefault(way, []).append(step())
    return {way: 1000 * statistics.median(seconds[way][LEFT_OUT:]) for way in WAYS}


def main() -> None:
    """Prints the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| model |", " | ".join(WAYS), "|")
    print("|---|", "---|" * len(WAYS), sep="")
    for name, make in MODELS.items():
        found = measured(make)
        print(f"| {name} |", " | ".join(f"{found[way]:.2f}" for way in WAYS), "|")


if __name__ == "__main__":
    main()
