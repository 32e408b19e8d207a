from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import resource
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.support.catalogue import CATALOGUE
from tests.support.collected import series
from tests.support.tools import eventually
from torch_grad_exporter.collectors import process
from torch_grad_exporter.collectors.process import ProcessCollector, PsutilFamilies, standard_registry
from torch_grad_exporter.metrics.families import Spec
from torch_grad_exporter.resources.readings import SHARE

linux = pytest.mark.skipif(sys.platform != "linux", reason="compared with Linux' /proc")

DECLARED = [spec.name for spec in CATALOGUE.values() if spec.name.startswith(("process_", "python_", "torch_process_"))]
CHILDREN = (process.PROCESS_CHILDREN, process.PROCESS_CHILDREN_MEMORY, process.PROCESS_CHILDREN_CPU_SECONDS)
TICK = 1 / os.sysconf("SC_CLK_TCK")


Io = namedtuple("Io", "read_count write_count read_bytes write_bytes")  # noqa: PYI024 - as psutil has it
CpuTimes = namedtuple("CpuTimes", "user system children_user children_system")  # noqa: PYI024 - the same


def read(collector: ProcessCollector, spec: Spec) -> float | None:
    """Return one value without labels of a scrape, `None` if it is absent."""
    return series(collector).get((spec.name,))


def unpaced() -> ProcessCollector:
    """Return the collector of this process that reads everything at each scrape, since readings take no time on its clock."""
    return ProcessCollector(psutil_families=PsutilFamilies(psutil.Process(), spent=lambda: 0.0))


class Fake:
    """A process whose values are set; an error is raised. Its identity is the pid with the time of creation."""

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
    """A collector of a fake process with a clock that the test sets."""

    def __init__(self, *children: Fake, **values: object) -> None:
        self.process = Fake(**{"children": list(children), **values})
        self.waited_for = 0.0
        self.now = 0.0
        self.spent = 0.0
        self.collector = ProcessCollector(standard=prometheus_client.CollectorRegistry(), psutil_families=self.families())

    def families(self) -> PsutilFamilies:
        return PsutilFamilies(self.process, times=self.times, clock=lambda: self.now, spent=lambda: self.spent)

    def times(self) -> os.times_result:
        return os.times_result((50.0, 60.0, 0.75 * self.waited_for, 0.25 * self.waited_for, 0.0))


DENIED, GONE, ZOMBIE = psutil.AccessDenied(1), psutil.NoSuchProcess(1), psutil.ZombieProcess(1)


# What prometheus_client shows


def test_without_proc_the_rest_remains(tmp_path: Path) -> None:
    """Without /proc, as on macOS, the standard process values are absent, not zero."""
    names = {name for name, *_ in series(ProcessCollector(standard=standard_registry(str(tmp_path / "none"))))}
    assert {name for name in DECLARED if name not in names} == {n for n in DECLARED if n.startswith("process_")}


@linux
def test_standard_samples_equal_prometheus_client() -> None:
    """Names, labels, help texts and values equal those of a fresh prometheus_client registry."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)

    def reference() -> dict[tuple[str, ...], float]:
        metrics = text_string_to_metric_families(prometheus_client.generate_latest(registry).decode())
        samples = [sample for metric in metrics for sample in metric.samples]
        return {(s.name, *(s.labels.get(n, "") for n in CATALOGUE[s.name].labels)): s.value for s in samples}

    # node_exporter's textfile collector drops a metric that has two help texts in its folder.
    for metric in text_string_to_metric_families(prometheus_client.generate_latest(registry).decode()):
        ours_named = metric.name if metric.name in CATALOGUE else f"{metric.name}_total"
        assert not metric.name.startswith("process_") or CATALOGUE[ours_named].help == metric.documentation

    gc.collect()
    gc.disable()
    try:
        before, ours, after = reference(), series(ProcessCollector()), reference()
    finally:
        gc.enable()
    ours = {key: value for key, value in ours.items() if not key[0].startswith("torch_")}
    assert ours.keys() == before.keys()
    assert len({name for name, *_ in ours}) == 10
    moving = {"process_virtual_memory_bytes", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    assert {k: v for k, v in ours.items() if k[0] not in moving} == {k: v for k, v in before.items() if k[0] not in moving}
    cpu = ("process_cpu_seconds_total",)
    assert before[cpu] <= ours[cpu] <= after[cpu]
    for name in ("process_virtual_memory_bytes", "process_resident_memory_bytes"):
        assert ours[name,] == pytest.approx(before[name,], rel=0.05)


# What psutil adds


def test_what_psutil_says_is_shown() -> None:
    """Each value of a fake process is shown under its name; memory is what its end would free, not what is resident."""
    child = Fake(2, memory_full_info=SimpleNamespace(uss=30), cpu_times=CpuTimes(1.0, 2.0, 3.0, 4.0))
    scene = Scene(child, Fake(3))
    scene.waited_for = 5.0
    assert {name: value for (name,), value in series(scene.collector).items()} == {
        "torch_process_threads": 7,
        "torch_process_io_read_bytes_total": 300,
        "torch_process_io_write_bytes_total": 400,
        "torch_process_unique_memory_bytes": 1000,
        "torch_process_children": 2,
        "torch_process_children_memory_bytes": 1030,
        "torch_process_children_cpu_seconds_total": 18,
    }


DEPENDS = {
    "num_threads": [process.PROCESS_THREADS],
    "io_counters": [process.PROCESS_IO_READ, process.PROCESS_IO_WRITE],
    "memory_full_info": [process.PROCESS_UNIQUE_MEMORY],
    "children": list(CHILDREN),
}


@pytest.mark.parametrize("source", DEPENDS)
@pytest.mark.parametrize("error", [DENIED, OSError(errno.EMFILE, "Too many open files")], ids=repr)
def test_what_cannot_be_read_is_absent(source: str, error: Exception) -> None:
    """A source that the platform or its owner denies costs only its own values."""
    scene = Scene(**{source: error})
    names = [name for (name,) in series(scene.collector)]
    missing = [spec.name for spec in DEPENDS[source]]
    assert names == [name for name in DECLARED if name.startswith("torch_process") and name not in missing]
    with pytest.raises(TypeError, match="odd"):  # the scrape counts other errors
        list(Scene(**{source: TypeError("odd")}).collector.collect())


def takes(scene: Scene, seconds: float, value: object) -> Callable[[], object]:
    """Return a reading that takes this many seconds of a processor."""

    def read() -> object:
        scene.spent += seconds
        return value

    return read


def test_expensive_values_are_not_read_at_each_scrape() -> None:
    """Memory and children are read for a small share of the time, each at its own pace; cheap values are read at each scrape."""
    scene = Scene()
    scene.process.values["memory_full_info"] = takes(scene, 2.0, SimpleNamespace(uss=1))
    scene.process.values["children"] = takes(scene, 0.5, [])

    def reads_at(now: float) -> list[int]:
        scene.now = now
        list(scene.collector.collect())
        return [scene.process.reads.count(name) for name in ("memory_full_info", "children", "num_threads")]

    assert reads_at(0.0) == [1, 1, 1]
    assert reads_at(0.5 / process.CHILDREN_SHARE - 1) == [1, 1, 2]
    assert reads_at(0.5 / process.CHILDREN_SHARE) == [1, 2, 3]
    assert reads_at(2.0 / SHARE - 1) == [1, 3, 4]
    assert reads_at(2.0 / SHARE) == [2, 3, 5]


@linux
def test_values_of_this_process_agree_with_proc() -> None:
    """Threads, bytes and memory of this process agree with /proc."""

    def numbers(file: str) -> dict[str, int]:
        lines = [line.split() for line in Path(f"/proc/self/{file}").read_text().splitlines()]
        return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}

    before = numbers("io")
    samples = {name: value for (name, *_), value in series(unpaced()).items()}
    after, pages = numbers("io"), Path("/proc/self/smaps").read_text().splitlines()
    assert samples["torch_process_threads"] == numbers("status")["Threads:"]
    assert before["read_bytes:"] <= samples["torch_process_io_read_bytes_total"] <= after["read_bytes:"]
    assert before["write_bytes:"] <= samples["torch_process_io_write_bytes_total"] <= after["write_bytes:"]
    private = sum(1024 * int(line.split()[1]) for line in pages if line.startswith("Private_"))
    assert samples["torch_process_unique_memory_bytes"] == pytest.approx(private, rel=0.05)


# Children, made up


def test_children_that_cannot_be_read_are_left_out() -> None:
    """A child whose memory is denied counts as a child, one that has just ended does not, and neither is an error."""
    scene = Scene(Fake(2), Fake(3, memory_full_info=DENIED), Fake(4, cpu_times=GONE), Fake(5, memory_full_info=GONE))
    assert [read(scene.collector, spec) for spec in CHILDREN] == [3, 1000, 9]
    scene = Scene(Fake(2), Fake(3, status=OSError(errno.EMFILE, "Too many open files")), Fake(4, cpu_times=ValueError("odd")))
    assert [read(scene.collector, spec) for spec in CHILDREN] == [3, 3000, 6]
    assert [read(Scene(Fake(2, memory_full_info=DENIED)).collector, spec) for spec in CHILDREN] == [1, None, 3]
    assert [read(Scene().collector, spec) for spec in CHILDREN] == [0, 0, 0]


SCRIPTS: dict[str, list[tuple[float, dict[int, object], float]]] = {
    "waited for, with what it used after it was last seen": [(1, {2: (5, 0)}, 6), (6.5, {}, 6.5), (6.5, {}, 6.5)],
    "waited for by another child": [(0, {2: (1, 0), 3: (5, 0)}, 6), (0, {2: (1, 5)}, 6), (6, {}, 6)],
    "not waited for yet": [(1, {2: (5, 0)}, 6), (1, {}, 6), (7, {3: (1, 0)}, 8)],
    "unreadable for a while": [(0, {2: (5, 0)}, 5), (0, {2: DENIED}, 5), (0, {2: (6, 0)}, 6), (6, {}, 6)],
    "stepping back": [(0, {2: (5, 0)}, 5), (0, {2: (4, 0)}, 5), (0, {2: (6, 0)}, 6)],
    "gone when the exporter starts": [(9, {}, 9)],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_cpu_time_of_a_child_counts_once(script: list[tuple[float, dict[int, object], float]]) -> None:
    """The CPU time of children that are waited for counts once and the total never falls."""
    scene = Scene()
    totals = []
    for scene.waited_for, children, _ in script:
        times = {pid: CpuTimes(took[0], 0, took[1], 0) if isinstance(took, tuple) else took for pid, took in children.items()}
        scene.process.values["children"] = [Fake(pid, cpu_times=time) for pid, time in times.items()]
        totals.append(read(scene.collector, process.PROCESS_CHILDREN_CPU_SECONDS))
    assert totals == [expected for *_, expected in script]


# Real children


def waited_for() -> float:
    """Return the CPU time of the children that this process has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def private(*pids: int) -> int:
    """Return the bytes in pages that each of these processes has for itself."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps").read_text().splitlines()]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def of_children(collector: ProcessCollector) -> tuple[float, float, float]:
    """Return number, memory and CPU time of the children."""
    samples = series(collector)
    return tuple(samples[spec.name,] for spec in CHILDREN)


class Work(torch.utils.data.Dataset[torch.Tensor]):
    """Each item costs 20 ms of CPU time."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        return torch.tensor(index)


@pytest.mark.process
@linux
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_workers_of_a_loader_are_children() -> None:
    """Two forked workers of a DataLoader count as two children, and their time stays when they end."""
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
