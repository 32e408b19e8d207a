"""Collector `cuda_memory`: CUDA devices, or another accelerator: what they are, and their memory as PyTorch's allocator counts it."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows
from torch_grad_exporter.resources.devices import DeviceMemory

METRICS = Section("CUDA devices and their memory")

GPU_INFO = METRICS.gauge(
    "torch_gpu_info",
    "A device that this process uses, with its UUID as NVIDIA's driver and DCGM print it, where known; the value is always 1.",
    "device", "uuid", "name",
)  # fmt: skip

CUDA_MEMORY_ALLOCATED = METRICS.gauge(
    "torch_cuda_memory_allocated_bytes", "Memory of the device that tensors occupy.", "device", unit="bytes"
)
CUDA_MEMORY_RESERVED = METRICS.gauge(
    "torch_cuda_memory_reserved_bytes", "Memory of the device that PyTorch's caching allocator holds.", "device", unit="bytes"
)
CUDA_MEMORY_ACTIVE = METRICS.gauge(
    "torch_cuda_memory_active_bytes",
    "Memory of the device in blocks that tensors occupy or that wait for a stream to be done with them.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_INACTIVE_SPLIT = METRICS.gauge(
    "torch_cuda_memory_inactive_split_bytes",
    "Unused memory of the device in blocks that are partly in use: the cost of fragmentation.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_REQUESTED = METRICS.gauge(
    "torch_cuda_memory_requested_bytes",
    "Memory of the device that the program asked for, before the allocator rounded it up.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_PEAK_ALLOCATED = METRICS.gauge(
    "torch_cuda_memory_peak_allocated_bytes",
    "Largest amount of memory of the device that tensors occupied, since the start or since the program reset PyTorch's peaks.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_PEAK_RESERVED = METRICS.gauge(
    "torch_cuda_memory_peak_reserved_bytes",
    "Largest amount of memory of the device that the allocator held, since the start or since the program reset PyTorch's peaks.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_TOTAL = METRICS.gauge("torch_cuda_memory_total_bytes", "Memory that the device has.", "device", unit="bytes")
CUDA_ALLOC_RETRIES = METRICS.counter(
    "torch_cuda_alloc_retries_total",
    "Allocations that only succeeded after the allocator had given its cached memory back to the driver.",
    "device",
    older=True,
)
CUDA_OOMS = METRICS.counter("torch_cuda_ooms_total", "Allocations that failed for lack of memory.", "device", older=True)

_VALUES = {
    CUDA_MEMORY_ALLOCATED: "allocated",
    CUDA_MEMORY_RESERVED: "reserved",
    CUDA_MEMORY_ACTIVE: "active",
    CUDA_MEMORY_INACTIVE_SPLIT: "inactive_split",
    CUDA_MEMORY_REQUESTED: "requested",
    CUDA_MEMORY_PEAK_ALLOCATED: "peak_allocated",
    CUDA_MEMORY_PEAK_RESERVED: "peak_reserved",
    CUDA_MEMORY_TOTAL: "total",
    CUDA_ALLOC_RETRIES: "retries",
    CUDA_OOMS: "ooms",
}


class CudaMemoryCollector:
    """Families of the devices that the training thread saw last; none before it has seen one."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families, all of one reading."""
        devices = self._memory.snapshot()
        named = {(each.device, each.driver_uuid or "", each.name): 1.0 for each in devices if each.name is not None}
        yield self._rows.family(GPU_INFO, named)
        for spec, name in _VALUES.items():
            yield self._rows.by_label(spec, {device.device: getattr(device, name) for device in devices})


COLLECTOR = Declaration(
    "cuda_memory",
    (METRICS,),
    lambda context: CudaMemoryCollector(context.memory),
    place=40,
    reads_devices=True,
    judged=False,
)
