"""Processes that have torch from the start: forked off a server that has imported it, so that a rank starts in milliseconds.

One server serves all the tests of a process. What it has imported is what most ranks need; it has started no thread.
"""

from __future__ import annotations

import datetime as dt
import gc
import multiprocessing as mp
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

T = TypeVar("T")

PATIENCE = 500.0
"""Seconds after which ranks that are not done are killed. No test waits for them: they end when they are done."""

FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch_grad_exporter", "pytest"]
)


def start_ranks(main: Callable[..., None], *arguments: object, ranks: int = 2) -> torch.multiprocessing.ProcessContext:
    """Calls `main(rank, *arguments)` in a process for each rank."""
    started = torch.multiprocessing.start_processes(
        _main, (main, ranks, arguments), ranks, join=False, start_method=FORKED.get_start_method()
    )
    assert started is not None
    return started


def _main(rank: int, main: Callable[..., None], ranks: int, arguments: tuple[object, ...]) -> None:
    """A rank's process, with one thread for torch and the variables that torchrun sets."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    gc.freeze()  # a full collection looks at all of torch otherwise
    main(rank, *arguments)


def joined(started: torch.multiprocessing.ProcessContext, seconds: float = PATIENCE) -> bool:
    """Waits for all ranks, and kills those that are not done; whether all ended by themselves. Raises what a rank raised."""
    until = time.monotonic() + seconds
    try:
        while not started.join(timeout=max(0.0, until - time.monotonic())):
            if time.monotonic() >= until:
                return False
        return True
    finally:
        for process in started.processes:
            process.kill()
            process.join()


def run_ranks(main: Callable[..., None], *arguments: object, ranks: int = 2) -> None:
    """Calls `main(rank, *arguments)` in a process for each rank, and waits for them; raises what a rank raised."""
    assert joined(start_ranks(main, *arguments, ranks=ranks)), f"not done within {PATIENCE:.0f} s"


def of_ranks(work: Callable[..., T], *arguments: object, ranks: int = 2) -> list[T]:
    """Return what `work(rank, *arguments)` returns on each rank of a job over gloo; raises what a rank raised."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_in_a_job, folder, ranks, work, arguments, ranks=ranks)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]  # noqa: S301 - written below


def _in_a_job(rank: int, folder: str, ranks: int, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    patience = dt.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", timeout=patience, rank=rank, world_size=ranks)
    result = work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
