"""A fake GPU and fake limits of a container under the real collectors of a real exporter."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pynvml

from tests.collectors.test_container import group_2, write
from tests.support.fake_nvml import FakeDriver, FakeGpu
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.container import ContainerCollector
from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.cuda_memory import CudaMemoryCollector
from torch_grad_exporter.collectors.gpu import GpuCollector
from torch_grad_exporter.collectors.registry import Collector
from torch_grad_exporter.resources.devices import DeviceStatistics

UUID = "11111111-8ff3-c2dc-3b0d-fafd804516ae"
GIB = 2**30


class Hardware:
    """A busy GPU with free memory, and a container that uses half of its memory."""

    def __init__(self, root: Path) -> None:
        sizes = (60, 90, 61, 20, 59, 70, 91, 140)
        self.memory = DeviceStatistics("cuda:0", *(gib * GIB for gib in sizes), retries=0, ooms=0, uuid=UUID, name="NVIDIA H200")
        self.gpu = FakeGpu(f"GPU-{UUID}")
        self._root = root
        self.container(0.5)

    def container(self, used: float) -> None:
        """Let the container use this share of its memory."""
        size = 8 * GIB
        files = group_2("job", memory_max=size, memory_current=int(used * size), cpu_max="200000 100000")
        write(self._root, {"proc/self/cgroup": "0::/job"})
        write(self._root / "sys/fs/cgroup", files)

    def worsen(self) -> None:
        """Make the GPU short of memory, hot, idle and faulty, and the container full."""
        counted = {"retries": (self.memory.retries or 0) + 1, "ooms": (self.memory.ooms or 0) + 1}
        self.memory = replace(self.memory, reserved=139 * GIB, inactive_split=60 * GIB, **counted)
        self.gpu.utilization = 3
        self.gpu.nanoseconds = {policy: held + 50_000_000 for policy, held in self.gpu.nanoseconds.items()}
        self.gpu.ecc = {kind: errors + 1 for kind, errors in self.gpu.ecc.items()}
        self.container(0.97)

    def collectors(self) -> dict[str, Collector]:
        """Return the collectors that read from it."""
        memory: Any = SimpleNamespace(snapshot=lambda: (self.memory,))
        return {
            "gpu": GpuCollector(memory, nvml=pynvml),
            "cuda_memory": CudaMemoryCollector(memory),
            "container": ContainerCollector(root=self._root),
        }


@contextlib.contextmanager
def installed() -> Iterator[Hardware]:
    """Show this hardware to exporters that are started in this process."""
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        hardware = Hardware(Path(root))
        stack.enter_context(mock.patch.multiple(pynvml, nvmlLib=FakeDriver([hardware.gpu]), _nvmlGetFunctionPointer_cache={}))
        for declaration in REGISTRY:
            if (collector := hardware.collectors().get(declaration.name)) is not None:
                made = replace(declaration, make=functools.partial(_given, collector))
                stack.enter_context(contextlib.closing(REGISTRY.register(made, replace=True)))
        yield hardware


def _given(collector: Collector, _context: CollectorContext) -> Collector:
    return collector
