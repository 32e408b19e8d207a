"""The resources of the machine, as the live page shows them."""

from __future__ import annotations

from collections.abc import Iterable

from torch_grad_exporter.collectors import container, cuda_memory, gpu, host, process
from torch_grad_exporter.outputs.live.encoding import Json, number
from torch_grad_exporter.rules.values import Values


def resources(values: Values) -> Iterable[Json]:
    """Name, value, limit and unit of each resource of the machine."""

    def row(name: str, value: float | None, limit: float | None, unit: str) -> Iterable[Json]:
        if value is not None:
            yield {"name": name, "value": number(value), "limit": number(limit), "unit": unit}

    total, available = values.one(host.HOST_MEMORY_TOTAL), values.one(host.HOST_MEMORY_AVAILABLE)
    yield from row("Process memory", values.one(process.PROCESS_RESIDENT_MEMORY), total, "bytes")
    yield from row("Worker processes' memory", values.one(process.PROCESS_CHILDREN_MEMORY) or None, total, "bytes")
    if total is not None and available is not None:
        yield from row("Host memory", total - available, total, "bytes")
    limit = values.one(container.CONTAINER_MEMORY_LIMIT)
    yield from row("Container memory", values.one(container.CONTAINER_MEMORY_WORKING_SET) if limit else None, limit, "bytes")
    yield from row("Host processors", values.one(host.HOST_CPU), 1.0, "ratio")
    for labels, reserved in values.rows(cuda_memory.CUDA_MEMORY_RESERVED):
        yield from row(f"Device {labels[0]} memory reserved", reserved, values.one(cuda_memory.CUDA_MEMORY_TOTAL, *labels), "bytes")
    for labels, used in values.rows(gpu.GPU_UTILIZATION):
        yield from row(f"GPU {labels[0]} in use", used, 1.0, "ratio")
        yield from row(f"GPU {labels[0]} temperature", values.one(gpu.GPU_TEMPERATURE, *labels), None, "celsius")
        yield from row(f"GPU {labels[0]} power", values.one(gpu.GPU_POWER, *labels), None, "watts")
