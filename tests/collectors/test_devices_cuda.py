"""On a GPU: the allocator's and the driver's numbers are those of PyTorch and `nvidia-smi`. Needs a CUDA device (`-m cuda`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
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
    """Memory of an odd size on the first device."""
    yield torch.ones(3_000_001, device="cuda:0")
    torch.cuda.synchronize()


def smi(query: str) -> list[str]:
    """What nvidia-smi says of the first device that PyTorch uses, one text per value."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split(", ")


def run(script: str, **environment: str) -> str:
    """A script in a process of its own; what it prints."""
    found = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_allocators_numbers(tensor: torch.Tensor) -> None:
    """Every statistic equals that of `torch.cuda.memory_stats`, also after an allocation that failed."""
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        torch.empty(2**50, device="cuda:0")
    memory = DeviceMemory()
    memory.refresh()
    expected = torch.cuda.memory_stats(0)
    found = {key[0]: value for key, value in series(CudaMemoryCollector(memory.snapshot)).items() if key[1] == "cuda:0"}
    total = found.pop("torch_cuda_memory_total_bytes")
    assert found == {name: expected[key] for name, key in STATISTICS.items()}
    assert found["torch_cuda_ooms_total"] >= 1
    assert total == torch.cuda.get_device_properties(0).total_memory


def test_nothing_waits(tensor: torch.Tensor) -> None:
    """A reading waits for nothing: it ends while the device is busy, and raises no alarm of PyTorch's own."""
    memory = DeviceMemory()
    busy = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)  # A few tenths of a second.
        busy.record()
        memory.refresh()
        assert not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert memory.snapshot()


def test_during_a_capture(tensor: torch.Tensor) -> None:
    """While a graph is captured a refresh reads nothing, and neither it nor a scrape of the GPUs elsewhere harms the capture."""
    moments = iter([0.0, 10.0, 20.0])
    memory = DeviceMemory(clock=lambda: next(moments))
    memory.refresh()
    before, graph, collector = memory.snapshot(), torch.cuda.CUDAGraph(), GpuCollector(memory.snapshot)
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
    """Before the program has used CUDA neither a reading nor a scrape of the GPUs initialises it or makes a context."""
    script = """
import torch
from torch_grad_exporter.collectors.gpu import GpuCollector
from torch_grad_exporter.resources.devices import DeviceMemory
memory = DeviceMemory()
memory.refresh()
assert memory.snapshot() == ()
print(sum(len(family.labels) for family in GpuCollector(memory.snapshot).collect()))
assert not torch.cuda.is_initialized()
assert not any(torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count()))
"""
    assert int(run(script)) > 0


def test_no_context_on_other_devices() -> None:
    """A reading of one device of several makes no context on the others, and only that one is shown."""
    script = """
import torch
from torch_grad_exporter.resources.devices import DeviceMemory
def contexts():
    return [torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count())]
last = torch.cuda.device_count() - 1
tensor = torch.ones(3, device=f"cuda:{last}")
before = contexts()
memory = DeviceMemory()
memory.refresh()
assert contexts() == before
print(*[device.device for device in memory.snapshot()], last)
"""
    device, last = run(script).split()
    assert device == f"cuda:{last}"


def test_cudas_own_pool() -> None:
    """With cudaMallocAsync what it does not count is absent, and what it counts is there."""
    script = """
import torch
from torch_grad_exporter.resources.devices import DeviceMemory
tensor = torch.ones(1000, device="cuda")
memory = DeviceMemory()
memory.refresh()
(device,) = memory.snapshot()
assert device.allocated >= 4000 and device.reserved >= 4000, device
print(device.requested, device.inactive_split, device.retries, device.ooms)
"""
    assert run(script, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync") == "None None None None"


def test_the_drivers_numbers(tensor: torch.Tensor) -> None:
    """What NVML tells is what nvidia-smi tells, as far as both are of one moment."""
    memory = DeviceMemory()
    memory.refresh()
    collector = GpuCollector(memory.snapshot)

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


def test_energy_is_in_joules(tensor: torch.Tensor) -> None:
    """Over two seconds of work the energy grows by what the power says, give or take a factor of two."""
    memory = DeviceMemory()
    memory.refresh()
    collector = GpuCollector(memory.snapshot)
    square = torch.ones(4096, 4096, device="cuda:0")
    moments = []
    while not moments or moments[-1][0] - moments[0][0] < 2:
        square = (square @ square).clamp(0, 1)
        torch.cuda.synchronize()
        found = {key[0]: value for key, value in series(collector).items() if key[1] == "cuda:0"}
        if "torch_gpu_energy_joules_total" not in found:
            pytest.skip("this GPU does not count energy")
        moments.append((time.monotonic(), found["torch_gpu_energy_joules_total"], found["torch_gpu_power_watts"]))
    collector.close()
    (begin, before, _), (end, after, _) = moments[0], moments[-1]
    power = sum(power for _, _, power in moments) / len(moments)
    assert 0.5 < (after - before) / (end - begin) / power < 2


def test_before_cuda_is_used_and_after_it_is_the_same_gpu() -> None:
    """What the environment promises is what CUDA shows then: the same names, the same UUIDs."""
    script = """
import torch
from torch_grad_exporter.collectors.gpu import GpuCollector
from torch_grad_exporter.resources.devices import DeviceMemory
def shown():
    return {row[:2] for family in collector.collect() for row in family.labels.rows}
memory = DeviceMemory(clock=iter(range(0, 100, 10)).__next__)
collector = GpuCollector(memory.snapshot)
before = shown()
tensors = [torch.ones(3, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
memory.refresh()
assert shown() >= before, (shown(), before)
print(len(before))
"""
    assert int(run(script, CUDA_DEVICE_ORDER="PCI_BUS_ID")) >= 1
    assert int(run(script, CUDA_VISIBLE_DEVICES=smi("uuid")[0][:16])) == 1
