"""Processes that have torch from the start: forked off a server that has imported it, so that a rank starts in milliseconds.

One server serves all the tests of a process. What it has imported is what most ranks need; it has started no thread.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable

import torch.multiprocessing

PATIENCE = 300.0
"""Seconds after which ranks that are not done are killed. No test waits for them: they end when they are done."""

FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch_grad_exporter", "pytest"]
)


def start_ranks(main: Callable[..., None], *arguments: object, ranks: int = 2) -> torch.multiprocessing.ProcessContext:
    """Calls `main(rank, *arguments)` in a process for each rank."""
    started = torch.multiprocessing.start_processes(main, arguments, ranks, join=False, start_method=FORKED.get_start_method())
    assert started is not None
    return started


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
