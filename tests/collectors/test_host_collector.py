from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.catalogue import CATALOGUE
from tests.support.collected import series
from torch_grad_exporter.collectors import host
from torch_grad_exporter.collectors.host import HostCollector
from torch_grad_exporter.metrics.families import Spec

linux = pytest.mark.skipif(sys.platform != "linux", reason="compared with Linux' /proc")

HOST = [spec.name for spec in CATALOGUE.values() if spec.name.startswith("torch_host_")]


class Cpu(NamedTuple):
    """CPU times as on Linux, where guests' time is also within `user` and `nice`."""

    user: float = 0.0
    nice: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    irq: float = 0.0
    softirq: float = 0.0
    steal: float = 0.0
    guest: float = 0.0
    guest_nice: float = 0.0


class Memory(NamedTuple):
    total: int = 64
    available: int = 48
    free: int = 7


class Disk(NamedTuple):
    read_count: int
    write_count: int
    read_bytes: int
    write_bytes: int


class Net(NamedTuple):
    bytes_sent: int
    bytes_recv: int


class Fake:
    """A psutil with a clock whose values are set; an error is raised."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cpu: object = Cpu()
        self.memory: object = Memory()
        self.disks: object = {"sda": Disk(1, 2, 30, 40)}
        self.net: object = {"eth0": Net(50, 60)}
        self.cpu_readings = 0

    @staticmethod
    def _give(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value

    def cpu_times(self) -> object:
        self.cpu_readings += 1
        return self._give(self.cpu)

    def virtual_memory(self) -> object:
        return self._give(self.memory)

    def disk_io_counters(self, perdisk: bool = False) -> object:
        assert perdisk
        return self._give(self.disks)

    def net_io_counters(self, pernic: bool = False) -> object:
        assert pernic
        return self._give(self.net)

    def collector(self, block_devices: Path | None = None, network_interfaces: Path | None = None) -> HostCollector:
        return HostCollector(
            machine=self, block_devices=block_devices, network_interfaces=network_interfaces, clock=lambda: self.now
        )


def shown(collector: HostCollector) -> dict[str, float]:
    """Return the samples of a scrape by name."""
    return {name: value for (name,), value in series(collector).items()}


def read(collector: HostCollector, spec: Spec) -> float | None:
    """Return one value of a scrape, `None` if it is absent."""
    return shown(collector).get(spec.name)


def test_the_first_share_is_since_the_start() -> None:
    """The first scrape shows busy over total time since construction; waiting for disks is idle."""
    fake = Fake()
    fake.cpu = Cpu(user=100, system=50, idle=1000, iowait=10)
    collector = fake.collector()
    fake.now += 2
    fake.cpu = Cpu(user=101, system=50.5, idle=1000.75, iowait=10.25, irq=0.25, softirq=0.25, steal=1)
    assert read(collector, host.HOST_CPU) == 0.75


def test_a_share_needs_half_a_second() -> None:
    """A scrape within half a second shows the share of the one before, the first one nothing."""
    fake = Fake()
    collector = fake.collector()
    fake.cpu = Cpu(user=1)
    fake.now += 0.4
    assert read(collector, host.HOST_CPU) is None
    fake.now += 0.2
    assert read(collector, host.HOST_CPU) == 1
    fake.cpu, fake.now = Cpu(user=1, idle=1), fake.now + 0.4
    assert read(collector, host.HOST_CPU) == 1
    fake.cpu, fake.now = Cpu(user=2, idle=3), fake.now + 0.2
    assert read(collector, host.HOST_CPU) == 0.25


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (Cpu(user=10, idle=10, iowait=10), Cpu(user=11, idle=11, iowait=4), 0.5),
        (Cpu(user=10, idle=10), Cpu(user=9, idle=11), 0.0),
        (Cpu(user=10, idle=10), Cpu(user=11, idle=4), 1.0),
        (Cpu(user=10, idle=10, guest=5), Cpu(user=10, idle=10, guest=6), 0.25),
        (Cpu(user=10, idle=10), Cpu(user=10, idle=10), 0.25),
    ],
)
def test_counters_that_step_back_count_for_nothing(before: Cpu, after: Cpu, share: float) -> None:
    """The share stays within 0 and 1, and keeps its value if no time has passed."""
    fake = Fake()
    fake.cpu = Cpu(*(now - then for now, then in zip(before, Cpu(user=1, idle=3), strict=True)))
    collector = fake.collector()
    fake.cpu, fake.now = before, fake.now + 1
    assert read(collector, host.HOST_CPU) == 0.25
    fake.cpu, fake.now = after, fake.now + 1
    assert read(collector, host.HOST_CPU) == share


def test_an_interface_that_goes_takes_nothing_with_it() -> None:
    """Loopback does not count; totals neither fall nor jump when interfaces come and go."""
    fake = Fake()
    fake.net = {"lo": Net(900, 900), "lo0": Net(900, 900), "Loopback Pseudo-Interface 1": Net(900, 900), "eth0": Net(50, 60)}
    collector = fake.collector()
    totals = []
    for interfaces in (
        fake.net,
        {"eth0": Net(51, 62), "veth1": Net(10, 20)},
        {"eth0": Net(52, 64)},
        {"eth0": Net(3, 4)},
        {"veth1": Net(13, 20)},
    ):
        fake.net = interfaces
        totals.append((read(collector, host.HOST_NETWORK_TRANSMIT), read(collector, host.HOST_NETWORK_RECEIVE)))
    assert totals == [(50, 60), (61, 82), (62, 84), (62, 84), (65, 84)]


def sysfs(directory: Path, *hardware: str, **masters: str) -> Path:
    """Write Linux' directory of network interfaces: those of hardware, and the master of each that has one."""
    for name in {*hardware, *masters, *masters.values(), "lo", "docker0", "veth1"}:
        (directory / name).mkdir(parents=True)
    for name in hardware:
        (directory / name / "device").mkdir()
    for name, master in masters.items():
        (directory / name / "master").symlink_to(directory / master)
    return directory


def both(collector: HostCollector) -> tuple[float | None, float | None]:
    """Return bytes received and sent."""
    return read(collector, host.HOST_NETWORK_RECEIVE), read(collector, host.HOST_NETWORK_TRANSMIT)


def test_only_hardware_counts_as_network(tmp_path: Path) -> None:
    """Only hardware counts, since bonds, bridges and virtual cables run over the same wires."""
    fake = Fake()
    wires = {"eth0": Net(100, 10), "eth1": Net(100, 10)}
    fake.net = {"lo": Net(9, 9), **wires, "bond0": Net(200, 20), "docker0": Net(50, 5), "veth1": Net(50, 5)}
    collector = fake.collector(network_interfaces=sysfs(tmp_path, "eth0", "eth1", eth0="bond0", eth1="bond0"))
    assert both(collector) == (20, 200)


def test_hardware_that_is_away_is_not_replaced(tmp_path: Path) -> None:
    """While the hardware is away there is no value, and the bond above it is not counted instead."""
    fake = Fake()
    collector = fake.collector(network_interfaces=sysfs(tmp_path, "eth0", eth0="bond0"))
    bond, totals = {"bond0": Net(100, 10), "docker0": Net(50, 5)}, []
    for interfaces in ({"eth0": Net(100, 10), **bond}, bond, {"eth0": Net(101, 12), **bond}):
        fake.net = interfaces
        totals.append(both(collector))
    assert totals == [(10, 100), (None, None), (12, 101)]


def test_only_hardware_counts_as_a_disk(tmp_path: Path) -> None:
    """Partitions and volumes do not count beside the disks that they are on."""
    for device in ("sda/device", "sda/sda1", "cciss!c0d0/device", "dm-0/dm", "zram0/queue"):
        (tmp_path / device).mkdir(parents=True)
    fake = Fake()
    fake.disks = {
        "sda": Disk(1, 1, 1000, 100),
        "sda1": Disk(1, 1, 900, 90),
        "dm-0": Disk(1, 1, 900, 90),
        "zram0": Disk(1, 1, 5, 5),
        "cciss/c0d0": Disk(1, 1, 200, 20),
    }
    collector = fake.collector(block_devices=tmp_path)
    assert (read(collector, host.HOST_DISK_READ), read(collector, host.HOST_DISK_WRITE)) == (1200, 120)
    del fake.disks["sda"]
    assert (read(collector, host.HOST_DISK_READ), read(collector, host.HOST_DISK_WRITE)) == (1200, 120)


DEPENDS = {
    "cpu": [host.HOST_CPU],
    "memory": [host.HOST_MEMORY_TOTAL, host.HOST_MEMORY_AVAILABLE],
    "disks": [host.HOST_DISK_READ, host.HOST_DISK_WRITE],
    "net": [host.HOST_NETWORK_RECEIVE, host.HOST_NETWORK_TRANSMIT],
}


@pytest.mark.parametrize("source", DEPENDS)
@pytest.mark.parametrize("error", [PermissionError(), ValueError("odd line"), psutil.Error()])
def test_what_a_sandbox_does_not_show_is_absent(source: str, error: Exception) -> None:
    """A source that psutil cannot read costs only its own values."""
    fake = Fake()
    collector = fake.collector()
    fake.now += 1
    fake.cpu = Cpu(user=1)
    setattr(fake, source, error)
    missing = [spec.name for spec in DEPENDS[source]]
    assert list(shown(collector)) == [name for name in HOST if name not in missing]
    setattr(fake, source, TypeError("changed"))
    fake.now += 1
    with pytest.raises(TypeError, match="changed"):  # the scrape counts other errors
        collector.collect()


def proc(path: str, parse: Callable[[list[str]], int]) -> int:
    """Return the sum over a file's lines."""
    return sum(parse(line.replace(":", " ").split()) for line in Path(path).read_text().splitlines())


def disk_sectors(field: int) -> int:
    """Return sectors of 512 bytes over the disks that sysfs does not place among the virtual devices."""
    real = [disk.name for disk in Path("/sys/block").iterdir() if "/devices/virtual/" not in str(disk.resolve())]
    return proc("/proc/diskstats", lambda words: int(words[field]) if words[2] in real else 0)


def traffic(field: int) -> int:
    """Return bytes over the interfaces that are hardware; without any, over all but the loopback."""
    names = [interface.name for interface in Path("/sys/class/net").iterdir()]
    real = [name for name in names if "/devices/virtual/" not in str((Path("/sys/class/net") / name).resolve())]
    counted = real or [name for name in names if name != "lo"]
    return proc("/proc/net/dev", lambda words: int(words[field]) if words[0] in counted else 0)


@linux
def test_totals_are_those_of_the_kernel() -> None:
    """Each total of this machine lies between two readings of /proc around it."""
    sources = {
        host.HOST_DISK_READ: lambda: 512 * disk_sectors(5),
        host.HOST_DISK_WRITE: lambda: 512 * disk_sectors(9),
        host.HOST_NETWORK_RECEIVE: lambda: traffic(1),
        host.HOST_NETWORK_TRANSMIT: lambda: traffic(9),
    }
    before = {spec: source() for spec, source in sources.items()}
    samples = shown(HostCollector())
    for spec, source in sources.items():
        assert before[spec] <= samples.get(spec.name, 0) <= source()


@linux
def test_memory_is_what_the_kernel_says() -> None:
    """Total memory is exact and available memory close to /proc/meminfo."""
    words = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    kernel = {name: int(kibibytes) * 1024 for name, kibibytes, *_ in words}
    samples = shown(HostCollector())
    assert samples[host.HOST_MEMORY_TOTAL.name] == kernel["MemTotal:"]
    assert samples[host.HOST_MEMORY_AVAILABLE.name] == pytest.approx(kernel["MemAvailable:"], abs=0.1 * kernel["MemTotal:"])
