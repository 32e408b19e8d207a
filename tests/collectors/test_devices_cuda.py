"""On a GPU: the allocator's and the driver's numbers are those of PyTorch and `nvidia-smi`. Needs a CUDA device (`-m cuda`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.support.collected import series
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.collectors.cuda_memory import CudaMemoryCollector
from torch_grad_exporter.collectors.gpu import GpuCollector
from torch_grad_exporter.resources.devices import DeviceMemory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]

STATISTICS = {
    "torch_cuda_memory_allocated_bytes": "allocated_bytes.all.current",
    "torch_cuda_memory_reserved_bytes": "reserved_bytes.all.current",
    "torch_cuda_memory_active_bytes": "active_bytes.all.current",
    "torch_cuda_memory_inactive_split_bytes": "inactive_split_bytes.all.current",
    "torch_cuda_memory_requested_bytes": "requested_bytes.all.current",
    "torch_cuda_memory_peak_allocated_bytes": "allocated_bytes.all.peak",
    "torch_cuda_memory_peak_reserved_bytes": "reserved_bytes.all.peak",
    "torch_cuda_alloc_retries_total": "num_alloc_retries",
    "torch_cuda_ooms_total": "num_ooms",
}


@pytest.fixture
def tensor() -> Iterator[torch.Tensor]:
    """Return memory of an odd size on the first device."""
    yield torch.ones(3_000_001, device="cuda:0")
    torch.cuda.synchronize()


def smi(query: str) -> list[str]:
    """Return what nvidia-smi says of the first device that PyTorch uses, one text per value."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split(", ")


def run(script: str, **environment: str) -> str:
    """Run a script in another process and return what it prints."""
    found = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_numbers_of_the_allocator(tensor: torch.Tensor) -> None:
    """Every statistic equals that of `torch.cuda.memory_stats`, also after an allocation that failed."""
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        torch.empty(2**50, device="cuda:0")
    memory = DeviceMemory()
    memory.refresh()
    expected = torch.cuda.memory_stats(0)
    found = {key[0]: value for key, value in series(CudaMemoryCollector(memory)).items() if key[1] == "cuda:0"}
    assert found.pop("torch_gpu_info") == 1
    total = found.pop("torch_cuda_memory_total_bytes")
    assert found == {name: expected[key] for name, key in STATISTICS.items()}
    assert found["torch_cuda_ooms_total"] >= 1
    assert total == torch.cuda.get_device_properties(0).total_memory


def test_uuid_is_that_of_the_driver(tensor: torch.Tensor) -> None:
    """UUID and name of `torch_gpu_info` are those that `nvidia-smi` lists."""
    memory = DeviceMemory()
    memory.refresh()
    (info,) = [key for key in series(CudaMemoryCollector(memory)) if key[:2] == ("torch_gpu_info", "cuda:0")]
    listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    assert f": {info[3]} (UUID: {info[2]})" in listed


def test_nothing_waits(tensor: torch.Tensor) -> None:
    """A reading ends while the device is busy, and does not synchronise."""
    memory = DeviceMemory()
    busy = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)  # private: nothing public keeps a device busy without work
        busy.record()
        memory.refresh()
        assert not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert memory.snapshot()


def test_during_a_capture(tensor: torch.Tensor) -> None:
    """During the capture of a graph a refresh reads nothing, and neither it nor a scrape harms the capture."""
    moments = iter([0.0, 10.0, 20.0])
    memory = DeviceMemory(clock=lambda: next(moments))
    memory.refresh()
    before, graph, collector = memory.snapshot(), torch.cuda.CUDAGraph(), GpuCollector(memory)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(len(series(collector))))
    with torch.cuda.graph(graph):
        result = tensor * 3  # Takes memory of the graph's own, which a reading would show.
        memory.refresh()
        thread.start()
        thread.join(PATIENCE)
    assert memory.snapshot() == before
    assert seen[0] > 0
    graph.replay()
    torch.cuda.synchronize()
    assert bool((result == 3).all())
    memory.refresh()
    assert memory.snapshot() != before
    collector.close()


def test_nothing_is_initialised() -> None:
    """Neither a reading nor a scrape initialises CUDA or makes a context."""
    script = """
import torch
from torch_grad_exporter.collectors.gpu import GpuCollector
from torch_grad_exporter.resources.devices import DeviceMemory
memory = DeviceMemory()
memory.refresh()
assert memory.snapshot() == ()
print(sum(len(family.labels) for family in GpuCollector(memory).collect()))
assert not torch.cuda.is_initialized()
assert not any(torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count()))
"""
    assert int(run(script)) == 0


def test_numbers_of_the_driver(tensor: torch.Tensor) -> None:
    """NVML's values are those of nvidia-smi at the same moment."""
    memory = DeviceMemory()
    memory.refresh()
    collector = GpuCollector(memory)

    def agree() -> bool:
        found = {key[0]: value for key, value in series(collector).items() if key[1] == "cuda:0" and len(key) == 3}
        wanted = {
            "torch_gpu_memory_used_bytes": ("memory.used", 2**20, 64 * 2**20),
            "torch_gpu_power_watts": ("power.draw", 1, 150),
            "torch_gpu_temperature_celsius": ("temperature.gpu", 1, 5),
            "torch_gpu_sm_clock_hertz": ("clocks.sm", 1e6, 300e6),
            "torch_gpu_utilization_ratio": ("utilization.gpu", 0.01, 0.5),
        }
        told = smi(",".join(query for query, _, _ in wanted.values()))
        return all(
            abs(found[name] - float(text) * unit) <= slack
            for (name, (_, unit, slack)), text in zip(wanted.items(), told, strict=True)
            if text.replace(".", "").isdigit()
        )

    assert eventually(agree)
    labels = {key[1:3] for key in series(collector)}
    assert ("cuda:0", smi("uuid")[0]) in labels
    collector.close()
