"""Statistics of the allocators: when they are read, what is shown, and that nothing is initialised for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.collected import series
from torch_grad_exporter.collectors.cuda_memory import CudaMemoryCollector
from torch_grad_exporter.resources.devices import DeviceMemory, DeviceStatistics

UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
NAME = "NVIDIA H100 80GB HBM3"

FILLED = {
    "allocated_bytes": {"all": {"current": 300, "peak": 500, "allocated": 900, "freed": 600}, "small_pool": {"current": 1}},
    "reserved_bytes": {"all": {"current": 1000, "peak": 2000, "allocated": 2000, "freed": 1000}},
    "active_bytes": {"all": {"current": 400, "peak": 600, "allocated": 900, "freed": 500}},
    "inactive_split_bytes": {"all": {"current": 0, "peak": 0, "allocated": 0, "freed": 0}},
    "requested_bytes": {"all": {"current": 290, "peak": 480, "allocated": 880, "freed": 590}},
    "num_alloc_retries": 0,
    "num_ooms": 3,
}  # fmt: skip
EMPTY = {
    key: {"all": dict.fromkeys(("current", "peak", "allocated", "freed"), 0)} if isinstance(value, dict) else 0
    for key, value in FILLED.items()
}


def flat(statistics: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return nested statistics as `torch.accelerator` gives them."""
    flattened = {}
    for key, value in statistics.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flattened


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeCuda:
    """`torch.cuda` with these devices; a call that comes too early fails the test."""

    devices: list[Mapping[str, Any]] = field(default_factory=lambda: [FILLED])
    initialised: bool = True
    capturing: bool = False
    backend: str = "native"
    reads: int = 0
    property_reads: int = 0
    name: str = NAME

    def is_initialized(self) -> bool:
        return self.initialised

    def is_current_stream_capturing(self) -> bool:
        assert self.initialised
        return self.capturing

    def device_count(self) -> int:
        assert self.initialised
        return len(self.devices)

    def get_allocator_backend(self) -> str:
        assert self.initialised
        return self.backend

    def memory_stats_as_nested_dict(self, device: int, /) -> Mapping[str, Any]:
        assert self.initialised
        assert not self.capturing
        self.reads += 1
        return self.devices[device]

    def get_device_properties(self, device: int, /) -> object:
        assert self.initialised
        self.property_reads += 1
        return SimpleNamespace(total_memory=80_000, uuid=UUID, name=self.name)


METHODS = [name for name, method in vars(FakeCuda).items() if not name.startswith("_") and callable(method)]


@dataclass
class FakeAccelerator:
    """`torch.accelerator` of another kind and the module of that kind."""

    kind: str = "xpu"
    statistics: Mapping[str, Any] = field(default_factory=lambda: flat(FILLED))
    failure: Exception | None = None
    reads: int = 0

    def current_accelerator(self) -> torch.device:
        return torch.device(self.kind)

    def memory_stats(self, index: int, /) -> Mapping[str, Any]:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        return self.statistics


def refreshed(memory: DeviceMemory) -> tuple[DeviceStatistics, ...]:
    """Return the statistics after one more reading."""
    memory.refresh()
    return memory.snapshot()


def test_every_number() -> None:
    """Each statistic is that of all pools, with the device's memory and its UUID."""
    memory = DeviceMemory(cuda=FakeCuda(), accelerator=None)
    assert refreshed(memory) == (DeviceStatistics("cuda:0", 300, 1000, 400, 0, 290, 500, 2000, 80_000, 0, 3, UUID, NAME),)
    names = ["allocated", "reserved", "active", "inactive_split", "requested", "peak_allocated", "peak_reserved", "total"]
    sizes = dict(zip(names, [300, 1000, 400, 0, 290, 500, 2000, 80_000], strict=True))
    expected = {(f"torch_cuda_memory_{name}_bytes", "cuda:0"): size for name, size in sizes.items()}
    expected |= {("torch_cuda_alloc_retries_total", "cuda:0"): 0, ("torch_cuda_ooms_total", "cuda:0"): 3}
    expected |= {("torch_gpu_info", "cuda:0", f"GPU-{UUID}", NAME): 1}
    assert series(CudaMemoryCollector(memory)) == expected


@pytest.mark.parametrize(
    ("name", "hip", "uuid"),
    [(NAME, None, f"GPU-{UUID}"), (f"{NAME} MIG 1g.10gb", None, f"MIG-{UUID}"), ("AMD Instinct MI300X", "6.4", "")],
)
def test_a_device_has_the_uuid_of_its_driver(name: str, hip: str | None, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The UUID of a GPU and of a part of one is that of NVIDIA's driver; that of another vendor's is absent."""
    monkeypatch.setattr(torch.version, "hip", hip)
    memory = DeviceMemory(cuda=FakeCuda(name=name), accelerator=None)
    memory.refresh()
    assert series(CudaMemoryCollector(memory))["torch_gpu_info", "cuda:0", uuid, name] == 1


def test_what_is_not_counted_is_absent() -> None:
    """The collector shows a 0, and not what is not counted."""
    some = DeviceStatistics("cuda:3", 11, 12, None, 0, None, 16, 17, None, None, None, None)
    shown = {"allocated": 11, "reserved": 12, "inactive_split": 0, "peak_allocated": 16, "peak_reserved": 17}
    expected = {(f"torch_cuda_memory_{name}_bytes", "cuda:3"): value for name, value in shown.items()}
    assert series(CudaMemoryCollector(SimpleNamespace(snapshot=lambda: (some,)))) == expected
    assert series(CudaMemoryCollector(SimpleNamespace(snapshot=tuple))) == {}


def test_nothing_is_initialised() -> None:
    """Devices are read only once the program has initialised CUDA."""
    cuda, clock = FakeCuda(initialised=False), Clock()
    memory = DeviceMemory(cuda=cuda, accelerator=None, clock=clock)
    assert refreshed(memory) == ()
    cuda.initialised, clock.now = True, 101.0
    assert [device.device for device in refreshed(memory)] == ["cuda:0"]


def test_a_reading_that_fails_leaves_no_old_numbers() -> None:
    """An unexpected error is raised, and earlier numbers are not shown until a reading succeeds."""
    cuda, clock = FakeCuda(), Clock()
    memory = DeviceMemory(cuda=cuda, accelerator=None, clock=clock)
    clock.now = 100.0
    devices = cuda.devices
    assert refreshed(memory)
    cuda.devices = [None] * len(devices)  # type: ignore[list-item]
    clock.now = 101.0
    with pytest.raises(AttributeError):
        memory.refresh()
    assert memory.snapshot() == ()
    cuda.devices = devices
    clock.now = 102.0
    assert refreshed(memory)


def test_when_devices_are_read() -> None:
    """Devices are read at most once a second, and not during the capture of a CUDA graph, when the last numbers stay."""
    cuda, clock = FakeCuda(), Clock()
    memory = DeviceMemory(cuda=cuda, accelerator=None, clock=clock)
    before = refreshed(memory)
    for clock.now, cuda.capturing, reads in ((100.9, False, 1), (101.0, False, 2), (103.0, True, 2), (105.0, False, 3)):
        assert refreshed(memory) == before
        assert cuda.reads == reads


def test_only_devices_in_use() -> None:
    """A device is shown once memory was reserved on it, and stays when all is freed."""
    cuda, clock = FakeCuda(devices=[EMPTY, FILLED, EMPTY]), Clock()
    memory = DeviceMemory(cuda=cuda, accelerator=None, clock=clock)
    assert [device.device for device in refreshed(memory)] == ["cuda:1"]
    cuda.devices, clock.now = [EMPTY, EMPTY, FILLED], 102.0
    assert [(device.device, device.reserved) for device in refreshed(memory)] == [("cuda:1", 0), ("cuda:2", 1000)]
    assert cuda.property_reads == 2


def test_an_allocator_that_counts_little() -> None:
    """With CUDA's own pool what it does not count is absent."""
    counted = FILLED | {key: EMPTY[key] for key in ("requested_bytes", "inactive_split_bytes", "num_ooms", "num_alloc_retries")}
    (device,) = refreshed(DeviceMemory(cuda=FakeCuda([counted], backend="cudaMallocAsync"), accelerator=None))
    assert (device.allocated, device.reserved, device.active, device.peak_allocated) == (300, 1000, 400, 500)
    assert (device.requested, device.inactive_split, device.retries, device.ooms) == (None,) * 4


def test_a_backend_without_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend without statistics is asked once, without an error, and no longer shown."""
    cuda, clock = FakeCuda(), Clock()
    memory = DeviceMemory(cuda=cuda, accelerator=None, clock=clock)
    assert refreshed(memory) != ()
    asked = []

    def refuse(index: int) -> Mapping[str, Any]:
        asked.append(index)
        raise RuntimeError("an allocator of the user's")

    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", refuse)
    for clock.now in (102.0, 104.0, 106.0):
        assert refreshed(memory) == ()
    assert asked == [0]


def test_another_accelerator() -> None:
    """Another accelerator is read under its kind's name once it is initialised."""
    accelerator, clock, started = FakeAccelerator(), Clock(), []
    module = SimpleNamespace(
        is_initialized=lambda: bool(started),
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(total_memory=9),
    )
    memory = DeviceMemory(cuda=FakeCuda(initialised=False), accelerator=accelerator, module=lambda kind: module, clock=clock)
    assert refreshed(memory) == ()
    assert accelerator.reads == 0
    started.append(1)
    clock.now = 102.0
    first, second = refreshed(memory)
    # Of a number that was never anything but 0 it is not known whether it is counted.
    assert first == DeviceStatistics("xpu:0", 300, 1000, 400, None, 290, 500, 2000, 9, None, 3, None)
    assert second.device == "xpu:1"
