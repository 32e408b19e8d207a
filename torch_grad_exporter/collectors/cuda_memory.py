"""Collector `cuda_memory`: the memory of CUDA devices, or of another accelerator, as PyTorch's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.metrics.families import Family, RowCache
from torch_grad_exporter.resources.devices import DeviceStatistics

_VALUES = {
    c.CUDA_MEMORY_ALLOCATED: "allocated",
    c.CUDA_MEMORY_RESERVED: "reserved",
    c.CUDA_MEMORY_ACTIVE: "active",
    c.CUDA_MEMORY_INACTIVE_SPLIT: "inactive_split",
    c.CUDA_MEMORY_REQUESTED: "requested",
    c.CUDA_MEMORY_PEAK_ALLOCATED: "peak_allocated",
    c.CUDA_MEMORY_PEAK_RESERVED: "peak_reserved",
    c.CUDA_MEMORY_TOTAL: "total",
    c.CUDA_ALLOC_RETRIES: "retries",
    c.CUDA_OOMS: "ooms",
}


class CudaMemoryCollector:
    """Families of the devices that the training thread saw last; none before it has seen one."""

    name = "cuda_memory"

    def __init__(self, snapshot: Callable[[], tuple[DeviceStatistics, ...]]) -> None:
        self._snapshot = snapshot
        self._rows = RowCache()

    def collect(self) -> Iterator[Family]:
        """The families, all of one and the same look."""
        devices = self._snapshot()
        rows = self._rows.get(tuple((device.device,) for device in devices))
        for spec, name in _VALUES.items():
            # A number that nobody counts becomes NaN here, which no allocator gives.
            values = np.array([getattr(device, name) for device in devices], dtype=np.float64)
            yield Family(spec, values, rows, ~np.isnan(values))
