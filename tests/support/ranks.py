"""Processes that have torch from the start: forked off a server that has imported it, so that a rank starts in milliseconds.

One server serves all the tests of a process. What it has imported is what most ranks need; it has started no thread.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import time
from collections.abc import Callable

import torch
import torch.multiprocessing

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
