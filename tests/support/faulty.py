"""Real training that goes wrong on request: each rank a process of its own, found by Prometheus through a folder.

Processes come from a server that has imported torch already, so that a dozen runs start within seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.made_hardware import Hardware, installed
from tests.support.tools import PATIENCE
from torch_grad_exporter import Exporter, start_exporter

PACE = 0.15
"""Seconds that a step takes besides what is computed."""

WARM_STEPS = 40
"""More than any statistic needs: a baseline of norms judges from its 20th sample on, units are dead after 25."""


class Training:
    """A small perceptron on random data, a step at a time; what is public is for faults to change."""

    def __init__(self, run: str, rank: int, folder: str, options: dict[str, Any], hardware: Hardware | None) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.hardware = hardware
        self.model = torch.nn.Sequential()
        for name, inputs, outputs in (("first", 16, 32), ("second", 32, 32), ("third", 32, 4)):
            self.model.add_module(name, torch.nn.Linear(inputs, outputs))
            self.model.add_module(f"after_{name}", torch.nn.ReLU() if name != "third" else torch.nn.Identity())
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        usual = {"every": 1, "dead_window": 25, "addr": "127.0.0.1", "run": run, "rank": rank, "sd_dir": folder}
        if hardware is None:  # there are a dozen of them, and each looks at the same machine
            usual["collectors"] = dict.fromkeys(("host", "container", "gpu", "cuda_memory"), False)
        self.exporter: Exporter = start_exporter(self.wrapped, 0, **usual | options)
        self.loader = iter(self.exporter.watch_loader(self._batches()))
        self.stepped: Callable[[], None] = lambda: None
        """Called after each step."""
        self.late = 0.0
        """Seconds by which each batch is late."""
        self.steps = 0

    def _batches(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(self.late)
            yield torch.randn(8, 16)

    def layer(self, name: str) -> torch.nn.Linear:
        """One of the three."""
        found = self.model.get_submodule(name)
        assert isinstance(found, torch.nn.Linear)
        return found

    def step(self, *, scale: float = 1.0, spoil: Callable[[], None] = lambda: None, loss: float | None = None) -> None:
        """One step. `scale`: of the gradients; `spoil`: is called between backward and step; `loss`: what is observed instead."""
        self.optimizer.zero_grad()
        found = (self.wrapped(next(self.loader)) - 1.0).square().mean()
        (found * scale).backward()
        spoil()
        self.optimizer.step()
        self.exporter.observe(loss=float(found.detach()) if loss is None else loss)
        self.steps += 1
        self.stepped()
        time.sleep(PACE)  # always: who waits for another rank in the backward must not make up for it here


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done in place of each step once the fault has begun, and how the run is started.

    `late`: there is something wrong from the start, so that it is only started when faults begin. `together`: ranks are replicas.
    `hardware`: made hardware. `environment`: variables.
    """

    step: Callable[[Training], None]
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    together: bool = False
    late: bool = False
    hardware: bool = False


class Run:
    """The processes of a run, from the parent's side."""

    def __init__(self, name: str, fault: Fault, folder: Path) -> None:
        self.name = name
        self.fault = fault
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(fault.ranks):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_main, args=(name, rank, fault, str(folder), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def warm(self) -> None:
        """Waits until the statistics have the samples that they need."""
        assert all(pipe.poll(3 * PATIENCE) and pipe.recv() == "warm" for pipe in self._pipes), f"{self.name} has ended"

    def begin(self) -> float:
        """Lets the fault begin, with the next step; returns the Unix time at which it has on all ranks."""
        for pipe in self._pipes:
            pipe.send("begin")
        return self.stepped()

    def stepped(self) -> float:
        """The Unix time at which all ranks had made one step, or another one, with the fault."""
        assert all(pipe.poll(PATIENCE) for pipe in self._pipes), f"{self.name} does not answer"
        return max(float(pipe.recv()) for pipe in self._pipes)

    def kill(self) -> None:
        """Ends the processes at once, whatever they do."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join(PATIENCE)


CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch_grad_exporter", "faulty"])


def _main(name: str, rank: int, fault: Fault, folder: str, pipe: Connection) -> None:
    """The process of a rank: trains well until the fault is requested, and badly from then on, until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if fault.ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(fault.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(fault.ranks))
    os.environ.update(fault.environment)
    if fault.together:
        dist.init_process_group("gloo", init_method=f"file://{folder}/.{name}", rank=rank, world_size=fault.ranks)
    with contextlib.ExitStack() as stack, contextlib.suppress(RuntimeError):  # which is how a run fails
        hardware = stack.enter_context(installed()) if fault.hardware else None
        training = Training(name, rank, folder, fault.options, hardware)
        with training.exporter:
            _train(training, fault, pipe)


def _train(training: Training, fault: Fault, pipe: Connection) -> None:
    while not (fault.late or pipe.poll()):
        training.step()
        if training.steps == WARM_STEPS:
            pipe.send("warm")
    pipe.recv()
    pipe.send(time.time())

    def stepped() -> None:
        pipe.send(time.time())
        training.stepped = lambda: None

    training.stepped = stepped
    while True:
        fault.step(training)
