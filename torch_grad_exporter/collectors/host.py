"""Collector `host`: processors, memory, disks and network of the whole host, read by psutil."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, Spec, scalar
from torch_grad_exporter.resources.readings import ABSENT, Rising, attempt

METRICS = Section("Host and container")

HOST_CPU = METRICS.gauge("torch_host_cpu_ratio", "Share of the host's processor time that was busy since the previous scrape.")
HOST_MEMORY_TOTAL = METRICS.gauge("torch_host_memory_total_bytes", "Memory of the host.", unit="bytes")
HOST_MEMORY_AVAILABLE = METRICS.gauge(
    "torch_host_memory_available_bytes", "Memory of the host that programs can get without swapping.", unit="bytes"
)
HOST_DISK_READ = METRICS.counter("torch_host_disk_read_bytes_total", "Bytes read from the host's disks.", unit="bytes", older=True)
HOST_DISK_WRITE = METRICS.counter(
    "torch_host_disk_write_bytes_total", "Bytes written to the host's disks.", unit="bytes", older=True
)
HOST_NETWORK_RECEIVE = METRICS.counter(
    "torch_host_network_receive_bytes_total",
    "Bytes received by network hardware; where there is none, as in a container, on all interfaces other than loopback.",
    unit="bytes",
    older=True,
)
HOST_NETWORK_TRANSMIT = METRICS.counter(
    "torch_host_network_transmit_bytes_total",
    "Bytes sent by network hardware; where there is none, as in a container, on all interfaces other than loopback.",
    unit="bytes",
    older=True,
)

# Over less time the kernel's ticks are too coarse for a share of CPU time.
SETTLE_SECONDS = 0.5

BLOCK_DEVICES = Path("/sys/block") if psutil.LINUX else None
NETWORK_INTERFACES = Path("/sys/class/net") if psutil.LINUX else None

_IDLE = frozenset({"idle", "iowait"})
_COUNTED_ELSEWHERE = frozenset({"guest", "guest_nice"})  # Linux counts them in `user` and `nice` already.


class BusyShare:
    """The busy share of all processors' time from one call to the next, the first time since construction.

    Always within 0 and 1. A call within `SETTLE_SECONDS` of the last one that counted, as where several outputs share a collector,
    gets the same share. For one thread at a time.
    """

    def __init__(self, machine: ModuleType, clock: Callable[[], float]) -> None:
        self._machine = machine
        self._clock = clock
        self._since = clock()
        self._before = self._times()
        self._share: float | None = None

    def __call__(self) -> float | None:
        """Return the share, None before there is one, and if the times cannot be read."""
        now = self._clock()
        if now - self._since < SETTLE_SECONDS:
            return self._share
        times, before = self._times(), self._before
        if times is None:
            return None
        self._since, self._before = now, times
        if before is not None:
            self._share = _busy_share(before, times, self._share)
        return self._share

    def _times(self) -> Mapping[str, float] | None:
        return attempt(lambda: self._machine.cpu_times()._asdict(), ABSENT)


def _busy_share(before: Mapping[str, float], now: Mapping[str, float], otherwise: float | None) -> float | None:
    """Return the busy share of the time between `before` and `now`, `otherwise` if none has passed."""
    # A kernel's idle times may step back; psutil's own percentages take no field for less than nothing either.
    passed = {name: max(0.0, now[name] - before.get(name, 0.0)) for name in now}
    idle = sum(seconds for name, seconds in passed.items() if name in _IDLE)
    busy = sum(seconds for name, seconds in passed.items() if name not in _IDLE | _COUNTED_ELSEWHERE)
    return busy / (busy + idle) if busy + idle else otherwise


class HostCollector:
    """Families of the host. `machine`: the module psutil.

    `block_devices`, `network_interfaces`: Linux' directories of them, `None` elsewhere.
    """

    def __init__(
        self,
        *,
        machine: ModuleType = psutil,
        block_devices: Path | None = BLOCK_DEVICES,
        network_interfaces: Path | None = NETWORK_INTERFACES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._block_devices = block_devices
        self._network_interfaces = network_interfaces
        self._has_hardware = False
        self._busy = BusyShare(machine, clock)
        self._totals: dict[Spec, Rising[str]] = {
            spec: Rising() for spec in (HOST_DISK_READ, HOST_DISK_WRITE, HOST_NETWORK_RECEIVE, HOST_NETWORK_TRANSMIT)
        }
        # Readings are added in the order in which they were taken.
        self._lock = threading.Lock()

    def collect(self) -> list[Family]:
        """Return the families of now; a value that psutil cannot read here has no series."""
        with self._lock:
            return [*self._processors_and_memory(), *self._disks(), *self._network()]

    def _processors_and_memory(self) -> Iterator[Family]:
        memory = attempt(lambda: self._machine.virtual_memory()._asdict(), ABSENT)
        yield scalar(HOST_CPU, self._busy())
        yield scalar(HOST_MEMORY_TOTAL, memory["total"] if memory else None)
        yield scalar(HOST_MEMORY_AVAILABLE, memory["available"] if memory else None)

    def _disks(self) -> Iterator[Family]:
        disks = attempt(self._disk_counters, ABSENT) or {}
        yield self._total(HOST_DISK_READ, disks, "read_bytes")
        yield self._total(HOST_DISK_WRITE, disks, "write_bytes")

    def _disk_counters(self) -> dict[str, Any]:
        counted = self._machine.disk_io_counters(perdisk=True)
        return {name: counters for name, counters in counted.items() if self._is_disk(name)}

    def _is_disk(self, name: str) -> bool:
        """Return whether it is hardware, not a partition, volume, RAID or loop device, whose bytes count below it again."""
        return self._block_devices is None or _is_hardware(self._block_devices / name.replace("/", "!"))

    def _network(self) -> Iterator[Family]:
        interfaces = attempt(self._network_counters, ABSENT) or {}
        yield self._total(HOST_NETWORK_RECEIVE, interfaces, "bytes_recv")
        yield self._total(HOST_NETWORK_TRANSMIT, interfaces, "bytes_sent")

    def _network_counters(self) -> dict[str, Any]:
        """Return those of hardware; if there has never been any, as in a container, those of all but the loopback."""
        counted = self._machine.net_io_counters(pernic=True)
        hardware = {name: counters for name, counters in counted.items() if self._is_wire(name)}
        # While hardware is away, interfaces that run over it do not replace it: their bytes have counted already.
        self._has_hardware |= bool(hardware)
        return hardware if self._has_hardware else {name: of for name, of in counted.items() if not _is_loopback(name)}

    def _is_wire(self, name: str) -> bool:
        """Return whether it is hardware whose bytes no other hardware counts again, as for a virtual function in a cloud."""
        if self._network_interfaces is None:
            return False
        interface = self._network_interfaces / name
        return _is_hardware(interface) and not _is_hardware(interface / "master")

    def _total(self, spec: Spec, devices: Mapping[str, Any], field: str) -> Family:
        if not devices:
            return scalar(spec, None)
        return scalar(spec, self._totals[spec]({name: counters._asdict()[field] for name, counters in devices.items()}))


def _is_hardware(device: Path) -> bool:
    # `Path.exists` raises where a directory above is closed to this user.
    return os.path.exists(device / "device")  # noqa: PTH110


def _is_loopback(interface: str) -> bool:
    # By the names that Linux, BSD with macOS, and Windows give it.
    return interface in {"lo", "lo0"} or interface.startswith("Loopback")


COLLECTOR = Declaration("host", (METRICS,), lambda _: HostCollector(), place=70, judged=False)
