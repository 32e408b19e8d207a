"""The collectors of resources: which there are, and what each reads from."""

from __future__ import annotations

from collections.abc import Callable

from torch_grad_exporter.collectors.container import ContainerCollector
from torch_grad_exporter.collectors.cuda_memory import CudaMemoryCollector
from torch_grad_exporter.collectors.gpu import GpuCollector
from torch_grad_exporter.collectors.host import HostCollector
from torch_grad_exporter.collectors.process import ProcessCollector
from torch_grad_exporter.distributed.identity import Identity
from torch_grad_exporter.metrics.families import Collector
from torch_grad_exporter.resources.devices import DeviceMemory


def collectors(identity: Identity, memory: DeviceMemory) -> dict[str, Callable[[], Collector]]:
    """How each of them is made, by name."""
    return {
        "cuda_memory": lambda: CudaMemoryCollector(memory.snapshot),
        "gpu": lambda: GpuCollector(memory.snapshot, local_rank=identity.local_rank, local_world_size=identity.local_world_size),
        "process": ProcessCollector,
        "host": HostCollector,
        "container": ContainerCollector,
    }
