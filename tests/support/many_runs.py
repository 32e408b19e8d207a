"""Runs that together show every metric: one of all options, two ranks of each kind, and one that takes itself for one on a GPU.

The last is a training on the CPU whose collectors of GPUs, of CUDA memory and of the container read from what was made up.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.made_hardware import installed
from torch_grad_exporter import Exporter, start_exporter

PACE = 0.05
GPU_RUN = "fake-gpu"
"""The run whose hardware is made up."""


class Net(torch.nn.Module):
    """A perceptron with ReLU, of which one unit is dead and one parameter never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
        self.unused = torch.nn.Parameter(torch.ones(3))
        with torch.no_grad():
            self.first.bias[0] = -1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def train(model: torch.nn.Module, exporter: Exporter, scaler: torch.amp.GradScaler | None = None) -> None:
    """Trains for ever, with clipping, everything observed, and now and then a step that goes wrong."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step, x in enumerate(exporter.watch_loader(batches())):
        optimizer.zero_grad()
        loss = (model(x) - 1.0).square().mean() * (1e3 if step % 40 == 39 else 1.0)
        scaler.scale(loss * (float("nan") if step % 50 == 49 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step % 50 != 49:
            scaler.step(optimizer)
        scaler.update()
        exporter.observe(loss=loss.detach(), samples=len(x), tokens=16 * len(x), epoch=step // 100)


def batches() -> Iterator[torch.Tensor]:
    """Random ones, not too fast."""
    while True:
        time.sleep(PACE)
        yield torch.randn(8, 16)


def usual(folder: str, run: str) -> dict[str, Any]:
    """How all of them are started."""
    return {"every": 1, "dead_window": 25, "addr": "127.0.0.1", "sd_dir": folder, "run": run}


def alone(folder: str) -> None:
    """One process with everything that can be switched on."""
    model = Net()
    train(model, start_exporter(model, 0, moments=True, weights=True, max_layers=2, **usual(folder, "alone")))


def replicas(folder: str) -> None:
    """Two ranks under DDP."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    train(model, start_exporter(model, 0, local_norm=True, collectors={"whole_run": True}, **usual(folder, "replicas")))


def shards(folder: str) -> None:
    """Two ranks under FSDP2."""
    model = Net()
    del model.unused
    fully_shard(model)
    exporter = start_exporter(model, 0, collectors={"whole_run": True}, **usual(folder, "shards"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches():
        optimizer.zero_grad()
        (model(x) - 1.0).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        exporter.observe(grad_norm=norm.full_tensor())  # type: ignore[attr-defined]


def on_a_fake_gpu(folder: str) -> None:
    """One process with made hardware."""
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    options = usual(folder, GPU_RUN) | {"every": "auto", "overhead_budget": 0.9}
    with installed():
        train(model, start_exporter(model, 0, grad_scaler=scaler, **options), scaler)


CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch_grad_exporter", "many_runs"])


def _main(kind: Callable[[str], None], folder: str, store: str, rank: int, ranks: int) -> None:
    """One process; several ranks have a process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    kind(folder)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[int]:
    """All of them, until the end; how many targets there will be. `folder` is for Prometheus to watch."""
    processes = []
    with tempfile.TemporaryDirectory() as stores:
        for kind, ranks in ((alone, 1), (replicas, 2), (shards, 2), (on_a_fake_gpu, 1)):
            for rank in range(ranks):
                arguments = (kind, str(folder), f"{stores}/{kind.__name__}", rank, ranks)
                processes.append(CONTEXT.Process(target=_main, args=arguments, daemon=True))
        try:
            for process in processes:
                process.start()
            yield len(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
