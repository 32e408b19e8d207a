from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, Self

import prometheus_client
import psutil
import pytest
import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.catalogue import CATALOGUE
from tests.support.tools import eventually
from torch_grad_exporter.collectors.process import (
    CHILDREN_SHARE,
    PROCESS_CHILDREN,
    PROCESS_CHILDREN_CPU_SECONDS,
    PROCESS_CHILDREN_MEMORY,
    PROCESS_IO_READ,
    PROCESS_IO_WRITE,
    PROCESS_THREADS,
    PROCESS_UNIQUE_MEMORY,
    ProcessCollector,
    PsutilFamilies,
    standard_registry,
)
from torch_grad_exporter.metrics.families import Family, LabelRows, Spec
from torch_grad_exporter.resources.children import ChildrenCpu, CpuSeconds, Descendants
from torch_grad_exporter.resources.readings import SHARE

linux = pytest.mark.skipif(sys.platform != "linux", reason="compared with Linux' /proc")

DECLARED = [spec.name for spec in CATALOGUE.values() if spec.name.startswith(("process_", "python_", "torch_process_"))]
CHILDREN = (PROCESS_CHILDREN, PROCESS_CHILDREN_MEMORY, PROCESS_CHILDREN_CPU_SECONDS)
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Io(NamedTuple):
    read_count: int
    write_count: int
    read_bytes: int
    write_bytes: int


class CpuTimes(NamedTuple):
    user: float
    system: float
    children_user: float
    children_system: float


def shown(families: Iterable[Family]) -> dict[tuple[str, tuple[str, ...]], float]:
    """The samples by name and label values."""
    return {
        (family.spec.name, row): float(family.values[position])
        for family in families
        for position, row in enumerate(family.labels.rows)
        if family.present is None or family.present[position]
    }


def read(collector: ProcessCollector, spec: Spec) -> float | None:
    """One value without labels of a scrape, `None` if it is absent."""
    return shown(collector.collect()).get((spec.name, ()))


def unpaced() -> ProcessCollector:
    """The collector of this process, which reads everything at each scrape: on its clock readings take no time."""
    return ProcessCollector(psutil_families=PsutilFamilies(psutil.Process(), spent=lambda: 0.0))


class Fake:
    """A process whose values are set, or are raised where they are errors; by pid and creation it is one or another."""

    def __init__(self, pid: int = 1, created: float = 0.0, **values: object) -> None:
        self.pid = pid
        self.ident = (pid, created)
        self.values: dict[str, object] = {
            "cpu_times": CpuTimes(1.0, 2.0, 0.0, 0.0),
            "status": psutil.STATUS_RUNNING,
            "memory_full_info": SimpleNamespace(uss=1000, rss=5000),
            "io_counters": Io(1, 2, 300, 400),
            "num_threads": 7,
            "children": [],
            **values,
        }
        self.reads: list[str] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fake) and self.ident == other.ident

    def __hash__(self) -> int:
        return hash(self.ident)

    def __getattr__(self, name: str) -> object:
        if name not in self.values:
            raise AttributeError(name)
        return functools.partial(self._give, name)

    def _give(self, name: str, recursive: bool | None = None) -> object:
        assert (recursive is True) == (name == "children")
        self.reads.append(name)
        value = self.values[name]
        if isinstance(value, Exception):
            raise value
        return value() if callable(value) else value

    def oneshot(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Scene:
    """A collector of a fake process, with times and a clock that are set."""

    def __init__(self, *children: Fake, **values: object) -> None:
        self.process = Fake(**{"children": list(children), **values})
        self.waited_for = 0.0
        self.now = 0.0
        self.spent = 0.0
        self.collector = ProcessCollector(standard=prometheus_client.CollectorRegistry(), psutil_families=self.families())

    def families(self) -> PsutilFamilies:
        """On a host without lists of children."""
        sources = {"times": self.times, "clock": lambda: self.now, "spent": lambda: self.spent}
        return PsutilFamilies(self.process, proc="/nowhere", **sources)

    def times(self) -> os.times_result:
        return os.times_result((50.0, 60.0, 0.75 * self.waited_for, 0.25 * self.waited_for, 0.0))

    def children(self, *children: Fake, waited_for: float) -> float | None:
        """The children's CPU time with these children."""
        self.process.values["children"] = list(children)
        self.waited_for = waited_for
        return read(self.collector, PROCESS_CHILDREN_CPU_SECONDS)


DENIED, GONE, ZOMBIE = psutil.AccessDenied(1), psutil.NoSuchProcess(1), psutil.ZombieProcess(1)


# What prometheus_client shows


def fake_proc(directory: Path) -> Path:
    """A /proc with a process that used 3.5 seconds, started 100 seconds after boot and has three open files."""
    ticks = 1 / TICK
    fields = ["0"] * 50
    fields[11], fields[12], fields[19] = str(int(3 * ticks)), str(int(0.5 * ticks)), str(int(100 * ticks))
    fields[20], fields[21] = "123456789", "1000"
    (directory / "stat").write_text("cpu 1 2 3\nbtime 1700000000\n")
    for name in ("0", "1", "2"):
        (directory / "self" / "fd" / name).mkdir(parents=True)
    (directory / "self" / "stat").write_text(f"17 (a name) {' '.join(fields)}\n")
    (directory / "self" / "limits").write_text("Limit  Soft  Hard  Units\nMax open files            1024   4096   files\n")
    return directory


def test_process_values_are_those_of_proc(tmp_path: Path) -> None:
    """Each value of a made-up /proc comes out under its standard name."""
    samples = shown(ProcessCollector(standard=standard_registry(str(fake_proc(tmp_path)))).collect())
    assert {name: value for (name, _), value in samples.items() if name.startswith("process_")} == {
        "process_virtual_memory_bytes": 123456789,
        "process_resident_memory_bytes": 1000 * os.sysconf("SC_PAGE_SIZE"),
        "process_start_time_seconds": 1700000100,
        "process_cpu_seconds_total": 3.5,
        "process_open_fds": 3,
        "process_max_fds": 1024,
    }


def test_without_proc_the_rest_remains(tmp_path: Path) -> None:
    """Where there is no /proc, as on macOS, the standard process values are absent, not zero."""
    names = {name for name, _ in shown(ProcessCollector(standard=standard_registry(str(tmp_path / "none"))).collect())}
    assert {name for name in DECLARED if name not in names} == {n for n in DECLARED if n.startswith("process_")}


def test_samples_of_other_names_are_left_out() -> None:
    """A newer prometheus_client may know more; what the catalogue does not declare here is ignored, series and labels."""

    class More:
        def collect(self) -> Iterator[Metric]:
            yield GaugeMetricFamily("process_network_receive_bytes", "Newer.", value=1.0)
            yield GaugeMetricFamily("torch_grad_norm", "Not of the process.", value=1.0)
            info = GaugeMetricFamily("python_info", "With one label more, and one less.", labels=["version", "jit"])
            info.add_metric(["3.99.1", "yes"], 1.0)
            yield info
            yield CounterMetricFamily("process_cpu_seconds", "As ever.", value=4.0)

    registry = prometheus_client.CollectorRegistry()
    registry.register(More())
    collector = ProcessCollector(standard=registry, psutil_families=Scene().families())
    assert {key: value for key, value in shown(collector.collect()).items() if not key[0].startswith("torch_process")} == {
        ("python_info", ("", "", "", "", "3.99.1")): 1,
        ("process_cpu_seconds_total", ()): 4,
    }


def test_label_rows_are_kept() -> None:
    """From scrape to scrape the same objects, so that outputs can prepare each row once."""
    collector = ProcessCollector()

    def rows() -> dict[str, LabelRows]:
        return {family.spec.name: family.labels for family in collector.collect()}

    first, second = rows(), rows()
    assert len(first) == len(DECLARED)
    assert all(first[name] is second[name] for name in first)


@linux
def test_every_standard_sample_is_prometheus_clients_own() -> None:
    """Names, labels and values agree with the text of a fresh registry, as far as values stand still meanwhile."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)

    def reference() -> dict[tuple[str, tuple[str, ...]], float]:
        metrics = text_string_to_metric_families(prometheus_client.generate_latest(registry).decode())
        samples = [sample for metric in metrics for sample in metric.samples]
        return {(s.name, tuple(s.labels.get(n, "") for n in CATALOGUE[s.name].labels)): s.value for s in samples}

    gc.collect()
    gc.disable()
    try:
        before, ours, after = reference(), shown(ProcessCollector().collect()), reference()
    finally:
        gc.enable()
    ours = {key: value for key, value in ours.items() if not key[0].startswith("torch_")}
    assert ours.keys() == before.keys()
    assert len({name for name, _ in ours}) == 10
    moving = {"process_virtual_memory_bytes", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    assert {k: v for k, v in ours.items() if k[0] not in moving} == {k: v for k, v in before.items() if k[0] not in moving}
    cpu = ("process_cpu_seconds_total", ())
    assert before[cpu] <= ours[cpu] <= after[cpu]
    for name in ("process_virtual_memory_bytes", "process_resident_memory_bytes"):
        assert ours[name, ()] == pytest.approx(before[name, ()], rel=0.05)


def test_the_default_registry_is_left_alone() -> None:
    """Nothing is registered outside of the collector's own registry."""
    before = list(prometheus_client.REGISTRY.collect())
    ProcessCollector()
    assert [metric.name for metric in prometheus_client.REGISTRY.collect()] == [metric.name for metric in before]


# What psutil adds


def test_each_declared_metric_is_collected_once() -> None:
    """The families are those of the catalogue, in its order."""
    assert [family.spec.name for family in ProcessCollector().collect()] == DECLARED


def test_what_psutil_says_is_shown() -> None:
    """Each value of a made-up process under its name; memory is what is freed at its end, not what is resident."""
    child = Fake(2, memory_full_info=SimpleNamespace(uss=30), cpu_times=CpuTimes(1.0, 2.0, 3.0, 4.0))
    scene = Scene(child, Fake(3))
    scene.waited_for = 5.0
    assert {name: value for (name, _), value in shown(scene.collector.collect()).items()} == {
        "torch_process_threads": 7,
        "torch_process_io_read_bytes_total": 300,
        "torch_process_io_write_bytes_total": 400,
        "torch_process_unique_memory_bytes": 1000,
        "torch_process_children": 2,
        "torch_process_children_memory_bytes": 1030,
        "torch_process_children_cpu_seconds_total": 18,
    }


DEPENDS = {
    "num_threads": [PROCESS_THREADS],
    "io_counters": [PROCESS_IO_READ, PROCESS_IO_WRITE],
    "memory_full_info": [PROCESS_UNIQUE_MEMORY],
    "children": list(CHILDREN),
}


@pytest.mark.parametrize("source", DEPENDS)
@pytest.mark.parametrize(
    "error",
    [
        DENIED,
        GONE,
        ZOMBIE,
        NotImplementedError(),
        AttributeError(),
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("/proc/1/io file was empty"),
        ValueError("field was not found"),
    ],
    ids=repr,
)
def test_what_cannot_be_read_is_absent(source: str, error: Exception) -> None:
    """A source that the platform or its owner denies costs its own values alone."""
    scene = Scene(**{source: error})
    names = [name for name, _ in shown(scene.collector.collect())]
    missing = [spec.name for spec in DEPENDS[source]]
    assert names == [name for name in DECLARED if name.startswith("torch_process") and name not in missing]


def test_functions_that_a_platform_lacks_are_absent() -> None:
    """On macOS there are no io_counters; the BSDs know no unique memory and count bytes as -1."""
    scene = Scene(io_counters=Io(1, 2, -1, -1), memory_full_info=SimpleNamespace(rss=1))
    assert read(scene.collector, PROCESS_IO_READ) is None
    assert read(scene.collector, PROCESS_IO_WRITE) is None
    assert read(scene.collector, PROCESS_UNIQUE_MEMORY) is None
    del scene.process.values["io_counters"]
    assert read(scene.collector, PROCESS_IO_READ) is None
    assert read(scene.collector, PROCESS_THREADS) == 7


@pytest.mark.parametrize("source", DEPENDS)
def test_an_unexpected_error_is_a_failure(source: str) -> None:
    """Other errors reach the scrape, which counts them."""
    with pytest.raises(TypeError, match="odd"):
        list(Scene(**{source: TypeError("odd")}).collector.collect())


def test_a_process_that_psutil_does_not_find_has_the_standard_values() -> None:
    """Without /proc psutil refuses this very process: no error, and its values are absent."""
    script = """
import psutil
def refuse():
    raise psutil.NoSuchProcess(1)
psutil.Process = refuse
from torch_grad_exporter.collectors.process import ProcessCollector
print(*[family.spec.name for family in ProcessCollector().collect()])
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [name for name in DECLARED if not name.startswith("torch_process")]


def takes(scene: Scene, seconds: float, value: object) -> Callable[[], object]:
    """A reading that takes this long of a processor."""

    def read() -> object:
        scene.spent += seconds
        return value

    return read


def test_what_is_dear_is_not_read_at_each_scrape() -> None:
    """Pages and children are read for a small share of the time, each at its own pace; what is cheap, each time."""
    scene = Scene()
    scene.process.values["memory_full_info"] = takes(scene, 2.0, SimpleNamespace(uss=1))
    scene.process.values["children"] = takes(scene, 0.5, [])

    def reads_at(now: float) -> list[int]:
        scene.now = now
        list(scene.collector.collect())
        return [scene.process.reads.count(name) for name in ("memory_full_info", "children", "num_threads")]

    assert reads_at(0.0) == [1, 1, 1]
    assert reads_at(0.5 / CHILDREN_SHARE - 1) == [1, 1, 2]
    assert reads_at(0.5 / CHILDREN_SHARE) == [1, 2, 3]
    assert reads_at(2.0 / SHARE - 1) == [1, 3, 4]
    assert reads_at(2.0 / SHARE) == [2, 3, 5]


def test_memory_of_children_that_come_and_go() -> None:
    """A new child's memory counts at once, that of one that ended no more, whenever the others' was read."""
    scene = Scene()

    def child(pid: int, memory: int) -> Fake:
        return Fake(pid, memory_full_info=takes(scene, 1.0, SimpleNamespace(uss=memory)))

    def memory(*children: Fake) -> float | None:
        scene.process.values["children"] = list(children)
        return read(scene.collector, PROCESS_CHILDREN_MEMORY)

    assert memory(child(2, 100)) == 100
    third = child(3, 50)
    assert memory(child(2, 999), third) == 150
    third.values["memory_full_info"] = SimpleNamespace(uss=60)
    assert memory(third) == 50
    scene.now = 2 / SHARE
    assert memory(third, child(4, 1), child(5, 2)) == 53  # Three of them: each is read a third as often.
    scene.now = 3 / SHARE
    assert memory(third, child(4, 1), child(5, 2)) == 63


@linux
def test_threads_bytes_and_pages_are_those_of_the_kernel() -> None:
    """This process' values agree with /proc: exactly, between two readings, or within what allocations do meanwhile."""

    def numbers(file: str) -> dict[str, int]:
        lines = [line.split() for line in Path(f"/proc/self/{file}").read_text().splitlines()]
        return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}

    before = numbers("io")
    samples = {name: value for (name, _), value in shown(unpaced().collect()).items()}
    after, pages = numbers("io"), Path("/proc/self/smaps").read_text().splitlines()
    assert samples["torch_process_threads"] == numbers("status")["Threads:"]
    assert before["read_bytes:"] <= samples["torch_process_io_read_bytes_total"] <= after["read_bytes:"]
    assert before["write_bytes:"] <= samples["torch_process_io_write_bytes_total"] <= after["write_bytes:"]
    private = sum(1024 * int(line.split()[1]) for line in pages if line.startswith("Private_"))
    assert samples["torch_process_unique_memory_bytes"] == pytest.approx(private, rel=0.05)


@linux
def test_bytes_of_storage_are_counted(tmp_path: Path) -> None:
    """Eight mebibytes forced to storage are eight mebibytes more, where there is storage below."""
    collector = unpaced()
    before = read(collector, PROCESS_IO_WRITE)
    assert before is not None
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(8 << 20))
        file.flush()
        os.fsync(file.fileno())
    accounted = int(Path("/proc/self/io").read_text().split("\nwrite_bytes: ")[1].split()[0])
    assert read(collector, PROCESS_IO_WRITE) == accounted
    if not any(disk.fstype == "tmpfs" and str(tmp_path).startswith(disk.mountpoint) for disk in psutil.disk_partitions(True)):
        assert accounted - before >= 8 << 20


# Children, made up


def test_children_that_cannot_be_read_are_left_out() -> None:
    """A child whose memory is denied counts as a child; one that has just ended does not; neither is an error."""
    scene = Scene(Fake(2), Fake(3, memory_full_info=DENIED), Fake(4, cpu_times=GONE), Fake(5, memory_full_info=GONE))
    assert [read(scene.collector, spec) for spec in CHILDREN] == [3, 1000, 9]
    scene = Scene(Fake(2), Fake(3, status=OSError(errno.EMFILE, "Too many open files")), Fake(4, cpu_times=ValueError("odd")))
    assert [read(scene.collector, spec) for spec in CHILDREN] == [3, 3000, 3]


def test_ended_children_run_no_more() -> None:
    """Of one that ended and was not waited for only its CPU time counts, whether or not the platform still tells it."""
    scene = Scene(Fake(2, status=psutil.STATUS_ZOMBIE), Fake(3, cpu_times=ZOMBIE), Fake(4))
    assert [read(scene.collector, spec) for spec in CHILDREN] == [1, 1000, 6]


def test_an_ended_child_that_tells_nothing_counts_once() -> None:
    """However long it is a zombie before it is waited for: its 3 seconds are kept, and are the same when they arrive."""
    scene, zombie = Scene(), Fake(2, cpu_times=ZOMBIE)
    readings = [((Fake(2),), 0), ((zombie,), 0), ((zombie,), 0), ((), 3), ((), 3)]
    assert [scene.children(*children, waited_for=waited_for) for children, waited_for in readings] == [3] * 5


def test_memory_of_children_is_absent_where_none_can_be_read() -> None:
    """Children whose memory is denied, all of them, do not use 0 bytes; no children do."""
    scene = Scene(Fake(2, memory_full_info=DENIED), Fake(3, memory_full_info=DENIED, cpu_times=DENIED))
    assert [read(scene.collector, spec) for spec in CHILDREN] == [2, None, 3]
    assert [read(Scene().collector, spec) for spec in CHILDREN] == [0, 0, 0]


def test_an_unexpected_error_of_a_child_is_a_failure() -> None:
    """It reaches the scrape."""
    with pytest.raises(TypeError, match="odd"):
        list(Scene(Fake(2, status=TypeError("odd"))).collector.collect())


def test_a_reused_pid_is_another_child() -> None:
    """Pid 2 ends after 3 seconds and comes back as another process, which used 3 as well: 6 in all."""
    scene = Scene()
    assert scene.children(Fake(2, created=1.0), waited_for=0) == 3
    assert scene.children(Fake(2, created=1.0), waited_for=0) == 3
    assert scene.children(Fake(2, created=9.0), waited_for=3) == 6
    assert scene.children(waited_for=6) == 6


def test_time_of_this_process_is_read_before_that_of_its_children() -> None:
    """A child that is waited for right after it was looked at does not count twice."""
    scene = Scene()

    def looked_at() -> CpuTimes:
        scene.waited_for = 4.0
        return CpuTimes(1.0, 2.0, 0.0, 0.0)

    assert scene.children(Fake(2, cpu_times=looked_at), waited_for=0) == 3
    assert scene.children(waited_for=4) == 4


def test_a_child_that_goes_between_two_looks_counts_once() -> None:
    """Listed, then gone: what was seen of it stays until it arrives with who waited for it."""
    scene = Scene()
    assert scene.children(Fake(2), waited_for=0) == 3
    assert scene.children(Fake(2, cpu_times=GONE), waited_for=0) == 3
    assert scene.children(waited_for=4) == 4


# The bookkeeping of children's CPU time


def cpu(own: float, waited_for: float = 0.0) -> CpuSeconds:
    """Of one child."""
    return CpuSeconds(own, waited_for)


SCRIPTS: dict[str, list[tuple[float, dict[str, CpuSeconds | None], float]]] = {
    "waited for, with what it used after it was last seen": [(1, {"a": cpu(5)}, 6), (6.5, {}, 6.5), (6.5, {}, 6.5)],
    "waited for in the midst of a reading": [(0, {"a": cpu(5)}, 5), (0, {}, 5), (5.5, {}, 5.5), (6, {}, 6)],
    "never waited for, then others": [(0, {"a": cpu(5)}, 5), (0, {}, 5), (0, {"b": cpu(2)}, 7), (2, {}, 7), (3, {}, 8)],
    "waited for by another child": [(0, {"a": cpu(1), "b": cpu(5)}, 6), (0, {"a": cpu(1, 5)}, 6), (6, {}, 6)],
    "by another in the midst": [(0, {"a": cpu(1), "b": cpu(5)}, 6), (0, {"a": cpu(1)}, 6), (0, {"a": cpu(1, 5)}, 6), (6, {}, 6)],
    "by another, and both go": [(0, {"a": cpu(1), "b": cpu(5)}, 6), (6, {}, 6), (6, {"c": cpu(1)}, 7)],
    "orphaned by one that is waited for": [(0, {"a": cpu(1), "b": cpu(5)}, 6), (1, {}, 6), (1, {}, 6), (2, {}, 7)],
    "one lost, one waited for": [(0, {"a": cpu(3), "b": cpu(5)}, 8), (5, {}, 8), (5, {"c": cpu(1)}, 9), (6, {}, 9)],
    "unreadable for a while": [(0, {"a": cpu(5)}, 5), (0, {"a": None}, 5), (0, {"a": None}, 5), (0, {"a": cpu(6)}, 6), (6, {}, 6)],
    "unreadable beside another": [(0, {"a": cpu(5), "b": cpu(1)}, 6), (0, {"a": None, "b": cpu(2)}, 7)],
    "stepping back": [(0, {"a": cpu(5)}, 5), (0, {"a": cpu(4)}, 5), (0, {"a": cpu(6)}, 6)],
    "unreadable with one that it waited for": [(0, {"a": cpu(1), "b": cpu(5)}, 6), *2 * [(0, {"a": None}, 6)], (6, {}, 6)],
    "unreadable from the start": [(0, {"a": None}, 0), (0, {"a": cpu(6)}, 6), (6, {}, 6)],
    "never seen": [(0, {}, 0), (7, {}, 7)],
    "gone when the exporter starts": [(9, {}, 9)],
    "rounded down": [(0, {"a": cpu(5)}, 5), (4.99, {}, 5), (4.99, {}, 5)],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_cpu_time_of_a_child_counts_once(script: list[tuple[float, dict[str, CpuSeconds | None], float]]) -> None:
    """However a child ends, what was seen of it stays, and counts once."""
    total = ChildrenCpu()
    assert [total(waited_for, children) for waited_for, children, _ in script] == [expected for *_, expected in script]


def test_where_waiting_is_not_shown_time_may_arrive_late() -> None:
    """On macOS it cannot be seen that a child has waited for its own one; when it ends itself, both count once."""
    total = ChildrenCpu(shown=False)
    readings = [(0.0, {"a": cpu(1), "b": cpu(5)}), *2 * [(0.0, {"a": cpu(1)})], (6.5, {}), (6.5, {"c": cpu(1)})]
    assert [total(waited_for, children) for waited_for, children in readings] == [6, 6, 6, 6.5, 7.5]


class Kernel:
    """Counts CPU time of processes as a kernel does, exactly; 0 is this process, and no number is used again.

    `losses`: a child's time may be discarded at its end, and one may end before its own children, which then have no parent here.
    """

    def __init__(self, seed: int, losses: bool) -> None:
        self.random = random.Random(seed)
        self.losses = losses
        self.own, self.waited_for = {0: 0}, {0: 0}
        self.parent: dict[int, int | None] = {}
        self.used = 0

    def descendants(self) -> list[int]:
        """Those that run, parents before their children."""
        found = [0]
        for one in found:
            found += self.children(one)
        return found[1:]

    def children(self, one: int) -> list[int]:
        return [child for child, parent in self.parent.items() if parent == one]

    def happen(self) -> None:
        """Some child begins, works or ends."""
        running = self.descendants()
        events = [self.begin] if len(running) < 8 else []
        event = self.random.choice([*events, self.work, self.work, self.end]) if running else self.begin
        event(self.random.choice([0, *running] if event == self.begin else running))

    def begin(self, parent: int) -> None:
        child = len(self.own)
        self.own[child] = self.waited_for[child] = 0
        self.parent[child] = parent

    def work(self, child: int) -> None:
        seconds = self.random.randint(1, 9)
        self.own[child] += seconds
        self.used += seconds

    def end(self, child: int) -> None:
        if self.children(child) and not self.losses:
            return
        self.parent.update(dict.fromkeys(self.children(child)))
        parent = self.parent.pop(child)
        if parent is not None and not (self.losses and self.random.random() < 0.3):
            self.waited_for[parent] += self.own[child] + self.waited_for[child]

    def read(self, total: ChildrenCpu, events: float = 0.0) -> float:
        """A reading, in the midst of which things happen."""
        waited_for, children = self.waited_for[0], {}
        for child in self.descendants():
            while self.random.random() < events:
                self.happen()
            if child in self.parent:
                children[child] = CpuSeconds(self.own[child], self.waited_for[child])
        return total(waited_for, children)


@pytest.mark.parametrize("seed", range(20))
def test_no_time_is_lost_or_counted_twice(seed: int) -> None:
    """With readings at any moment and children that end in their midst: never falling, never too much, exact in the end."""
    kernel, total, last = Kernel(seed, losses=False), ChildrenCpu(), 0.0
    for _ in range(200):
        for _ in range(kernel.random.randint(0, 6)):
            kernel.happen()
        value = kernel.read(total, events=0.4)
        assert last <= value <= kernel.used
        last = value
    assert kernel.read(total) == kernel.used > 0


@pytest.mark.parametrize("seed", range(20))
def test_time_that_arrives_nowhere_is_kept(seed: int) -> None:
    """Children whose time is discarded and orphans keep what was seen of them: with a reading after each event, all."""
    kernel, total = Kernel(seed, losses=True), ChildrenCpu()
    for _ in range(300):
        kernel.happen()
        assert kernel.read(total) == kernel.used
    waited_for = kernel.waited_for[0] + sum(kernel.own[one] + kernel.waited_for[one] for one in kernel.descendants())
    assert waited_for < kernel.used


@pytest.mark.parametrize("seed", range(20))
def test_with_losses_the_total_never_falls(seed: int) -> None:
    """Whatever happens in the midst of readings, the total neither falls nor exceeds what was used."""
    kernel, total, last = Kernel(seed, losses=True), ChildrenCpu(), 0.0
    for _ in range(200):
        for _ in range(kernel.random.randint(0, 6)):
            kernel.happen()
        least = max(last, kernel.waited_for[0])
        value = kernel.read(total, events=0.4)
        assert least <= value <= kernel.used
        last = value


# The kernel's lists of children


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """Three children of this process: one started by another thread, one with a child of its own."""
    nap = ["sleep", "60"]
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as ends:
        found = [subprocess.Popen(nap), pool.submit(subprocess.Popen, nap).result()]
        found.append(subprocess.Popen(["sh", "-c", "sleep 60 & read line"], stdin=subprocess.PIPE))
        for one in found:
            ends.callback(one.communicate)
            ends.callback(one.kill)
        shell = psutil.Process(found[2].pid)
        assert eventually(lambda: bool(shell.children()))
        ends.callback(shell.children()[0].kill)
        yield [one.pid for one in found]


@linux
def test_the_kernels_lists_have_all_descendants(sleepers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are psutil's own, parents before children, without a look at the host's other processes."""
    expected = psutil.Process().children(recursive=True)
    monkeypatch.setattr(psutil.Process, "children", None)
    found = Descendants(psutil.Process())()
    assert found is not None
    assert set(found) == set(expected)
    assert {*sleepers} < {process.pid for process in found}
    positions = {process.pid: position for position, process in enumerate(found)}
    assert all(positions.get(process.ppid(), -1) < positions[process.pid] for process in found)


@linux
def test_a_list_that_leaves_one_out_is_not_believed(sleepers: list[int], tmp_path: Path) -> None:
    """One that was listed and still runs is found again; one that has ended does not count as missing."""
    tasks = tmp_path / str(os.getpid()) / "task" / str(os.getpid())
    tasks.mkdir(parents=True)
    listing = tasks / "children"
    listing.write_text(" ".join(map(str, sleepers[:2])))
    descendants = Descendants(psutil.Process(), str(tmp_path))

    def found() -> set[int]:
        return {process.pid for process in descendants() or ()}

    assert found() == {*sleepers[:2]}
    listing.write_text(str(sleepers[0]))
    assert found() >= {*sleepers}  # psutil has looked.
    os.kill(sleepers[1], signal.SIGKILL)
    os.waitpid(sleepers[1], 0)
    assert found() == {sleepers[0]}


class Descriptors:
    """Takes all file descriptors that this process may still open."""

    def __enter__(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.taken = [os.open(os.devnull, os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.taken[0] + 8, self.limits[1]))
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(os.open(os.devnull, os.O_RDONLY))

    def __exit__(self, *_: object) -> None:
        for descriptor in self.taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)


@linux
def test_lists_that_cannot_be_read_are_not_empty(sleepers: list[int]) -> None:
    """Without a free file descriptor it is not known which children there are: they have not ended, and count once afterwards."""
    descendants = Descendants(psutil.Process())
    before = descendants()
    with Descriptors():
        assert descendants() is None
    after = descendants()
    assert before == after
    assert {*sleepers} < {process.pid for process in after or ()}


@linux
def test_each_list_must_be_readable(tmp_path: Path) -> None:
    """Neither threads nor children that cannot be listed at all are taken for none; a thread that has just ended has none."""
    threads = tmp_path / str(os.getpid()) / "task"
    listing = threads / str(os.getpid()) / "children"
    listing.mkdir(parents=True)
    descendants = Descendants(psutil.Process(), str(tmp_path))
    assert descendants() is None
    listing.rmdir()
    assert descendants() == []
    listing.parent.rmdir()
    threads.rmdir()
    threads.write_text("no directory")
    assert descendants() is None


@linux
def test_without_descriptors_the_rest_remains(sleepers: list[int]) -> None:
    """The collector shows what takes no file, fails at nothing, and has everything when files can be opened again."""
    collector = unpaced()
    first = shown(collector.collect())
    with Descriptors():
        names = {name for name, _ in shown(collector.collect())}
    assert {"python_info", "python_gc_collections_total"} <= names
    assert not names & {"process_cpu_seconds_total", "torch_process_io_read_bytes_total", *(spec.name for spec in CHILDREN)}
    last = shown(collector.collect())
    assert last.keys() == first.keys()
    number, cpu_seconds = ((spec.name, ()) for spec in (PROCESS_CHILDREN, PROCESS_CHILDREN_CPU_SECONDS))
    assert last[number] == first[number] >= len(sleepers)
    assert last[cpu_seconds] == pytest.approx(first[cpu_seconds], abs=3 * TICK)


def test_a_proc_that_refuses_has_no_lists() -> None:
    """A look that the kernel denies, here as the name is too long, is no failure: psutil lists the children."""
    process = Fake(children=[Fake(2)])
    assert Descendants(process, "/" + 300 * "x")() == [Fake(2)]


# Real children

BURN = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print(time.process_time(), flush=True)
"""


class Burner:
    """A child that uses as many seconds of CPU time as it is told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def burn(self, seconds: float) -> float:
        """Until it has; gives all the CPU time that the child has used, as it says itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(seconds, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """Returns when it has ended; no process has waited for it yet."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def waited_for() -> float:
    """CPU time of the children that this process has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def private(*pids: int) -> int:
    """The bytes in pages that each of these processes has for itself."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps").read_text().splitlines()]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def of_children(collector: ProcessCollector) -> tuple[float, float, float]:
    """Number, memory and CPU time of the children."""
    samples = shown(collector.collect())
    return tuple(samples[spec.name, ()] for spec in CHILDREN)


@linux
def test_a_child_counts_while_it_runs_and_after() -> None:
    """A busy child's number, memory and time are what it and the kernel say: running, ended, and waited for."""
    collector = unpaced()
    number, memory, before = of_children(collector)
    ended_before = waited_for()
    with Burner() as child:
        used = child.burn(0.3)
        running = of_children(collector)
        assert running[0] - number == 1
        assert running[1] - memory == pytest.approx(private(child.process.pid), rel=0.05)
        assert running[2] - before == pytest.approx(used, abs=3 * TICK)
        used = child.burn(0.2)
        child.end()
        ended = of_children(collector)
        assert ended[0] == number
        assert ended[1] == pytest.approx(memory, abs=2**20)  # other children of this process may move a little
        assert ended[2] - before >= used - 2 * TICK
    *_, after = of_children(collector)
    assert after >= ended[2] >= running[2]
    assert after - before == pytest.approx(waited_for() - ended_before, abs=3 * TICK)


@linux
def test_time_of_a_child_that_is_never_waited_for_is_kept() -> None:
    """With SIGCHLD ignored the kernel discards what an ended child used; the total keeps it, and the next child adds to it."""
    script = """
import os, resource, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from tests.collectors.test_process import Burner, of_children, unpaced
collector, used = unpaced(), 0.0
for _ in range(2):
    with Burner() as child:
        used += child.burn(0.2)
        print(of_children(collector)[2] - used)
    print(of_children(collector)[2] - used)
    print(of_children(collector)[2] - used)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
"""
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=here)
    *differences, arrived = map(float, done.stdout.split())
    assert arrived == 0
    assert differences == pytest.approx([0] * 6, abs=6 * TICK)


@linux
def test_a_grandchild_counts_until_it_is_an_orphan() -> None:
    """What a shell's child used counts while the shell runs, and is kept when the shell ends before it."""
    collector = unpaced()
    number, _, before = of_children(collector)
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)\ntime.sleep(60)"
    shell = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -c '{burn}' & echo $!; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    grandchild, used = int(shell.stdout.readline()), float(shell.stdout.readline())
    try:
        children, _, seen = of_children(collector)
        assert children - number == 2
        assert seen - before == pytest.approx(used, abs=4 * TICK)
        assert shell.stdin is not None
        shell.stdin.close()
        shell.wait()
        for _ in range(3):
            children, _, kept = of_children(collector)
            assert children == number
            assert kept >= seen
            assert kept == pytest.approx(seen, abs=2 * TICK)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        shell.stdout.close()


class Work(torch.utils.data.Dataset[torch.Tensor]):
    """Each item costs 20 ms of CPU time."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        return torch.tensor(index)


@linux
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_workers_of_a_loader_are_children() -> None:
    """Two forked workers count as two, with what they do not share with this process; their time stays when they end."""
    collector = ProcessCollector()
    number, _, before = of_children(collector)
    ended_before = waited_for()
    loader = torch.utils.data.DataLoader(Work(), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    assert len(list(loader)) == 16
    children, memory, first = of_children(collector)
    workers = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
    assert children - number == len(workers) == 2
    assert memory >= private(*(worker.pid for worker in workers)) * 0.9 > 0
    assert memory < sum(worker.memory_info().rss for worker in workers)
    assert first - before >= 16 * 0.02 - 4 * TICK
    assert len(list(loader)) == 16
    assert eventually(lambda: of_children(collector)[2] - first >= 16 * 0.02 - 4 * TICK)
    *_, second = of_children(collector)
    del loader
    gc.collect()
    assert eventually(lambda: of_children(collector)[0] == number)
    *_, after = of_children(collector)
    assert after >= second
    assert eventually(lambda: abs(of_children(collector)[2] - before - (waited_for() - ended_before)) <= 5 * TICK)
