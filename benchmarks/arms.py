"""One arm of a comparison: a training of its own, with a monitor, stepped as a user's loop does.

PyTorch's hooks on optimizer steps belong to the whole process, so an exporter in one arm would be called in the steps of the
plain ones as well, and make them look slower than they are. Each arm therefore has its own while it runs (`apart.py`): a plain
arm runs as in a process without any exporter, and the exporter as in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.apart import OptimizerHooks
from benchmarks.monitor import Monitor
from benchmarks.monitors import ThisExporter
from benchmarks.workloads import Training, Workload

STEADY_SAMPLES = 9
"""Samples in a row at one interval, after which the exporter's is taken as found; it may change after eight of them."""


class Arm:
    """A training with a monitor. Every arm of a workload starts from the same weights and sees the same batches."""

    def __init__(self, workload: Workload, monitor: Monitor) -> None:
        self.training = Training(workload)
        self.monitor = monitor
        self.steps = 0
        self._hooks = OptimizerHooks()
        with self.running():
            monitor.attach(self.training)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The process' optimizer hooks are this arm's."""
        with self._hooks.there():
            yield

    def step(self) -> None:
        """One step of training, only to be called while `running`."""
        loss = self.training.backward()
        self.monitor.after_backward()
        self.training.optimizer.step()
        self.monitor.after_step(loss)
        self.steps += 1

    def warm_up(self, seconds: float, least: int = 3, clock: Callable[[], float] = time.perf_counter) -> float:
        """Steps for some seconds and returns how long one of the last of them took by the clock."""
        end = time.perf_counter() + seconds
        durations: list[float] = []
        with self.running():
            while len(durations) < least or time.perf_counter() < end:
                start = clock()
                self.step()
                durations.append(clock() - start)
        later = sorted(durations[len(durations) // 2 :])
        return later[len(later) // 2]

    def align(self, steps: int) -> None:
        """Steps until the number of steps is a multiple of `steps`, so that blocks of that length are whole cycles."""
        with self.running():
            while self.steps % steps:
                self.step()

    def close(self) -> None:
        """Ends the monitor."""
        self._hooks.restore()
        self.monitor.close()


def settle(arm: Arm, exporter: ThisExporter, seconds: float) -> int:
    """Steps until the exporter has found its interval, at most for some seconds; returns the interval."""
    end = time.perf_counter() + seconds
    interval, since = 0, 0.0
    while True:
        seen = exporter.scrape()
        captures = seen["torch_grad_exporter_captures_total"]
        if seen["torch_grad_exporter_sampling_interval_steps"] != interval:
            interval, since = int(seen["torch_grad_exporter_sampling_interval_steps"]), captures
        if captures - since >= STEADY_SAMPLES or time.perf_counter() > end:
            return interval
        with arm.running():
            for _ in range(interval):
                arm.step()
