"""Resources of the machine: a run of the demo scraped by a real Prometheus, and the switches."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.cli.test_demo import demos
from tests.metrics.test_golden import MACHINE
from tests.resources.test_devices import FILLED, METHODS, FakeCuda
from tests.support.catalogue import CATALOGUE
from tests.support.models import Perceptron
from tests.support.real_prometheus import Prometheus, prometheus
from tests.support.scrape import errors, key, values
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.collectors import REGISTRY

ALLOCATED = key("torch_cuda_memory_allocated_bytes", device="cuda:0")
ON = REGISTRY.names

RESOURCES = frozenset(name for name in CATALOGUE if name.startswith(MACHINE))


def control_group_files(controller: str, *names: str) -> list[str]:
    """Return the contents of files of the process' control group and of all above it, versions 1 and 2."""
    paths = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    first = next((path for controllers, path in paths.items() if controller in controllers.split(",")), None)
    mount = Path("/sys/fs/cgroup") if first is None else Path("/sys/fs/cgroup") / controller
    own = mount / paths.get("", "/").lstrip("/") if first is None else mount / first.lstrip("/")
    folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    return [(folder / name).read_text() for folder in folders for name in names if (folder / name).exists()]


def unlimited(text: str) -> bool:
    """Return whether a limit's file says that there is none."""
    return text.startswith(("max", "-1")) or int(text.split(maxsplit=1)[0]) >= 2**62


def absent_here() -> set[str]:
    """Return what this machine cannot have."""
    missing = set()
    if not torch.cuda.is_available():
        missing |= {name for name in RESOURCES if name.startswith(("torch_cuda_", "torch_gpu_"))}
    if all(map(unlimited, control_group_files("memory", "memory.max", "memory.limit_in_bytes"))):
        missing |= {"torch_container_memory_limit_bytes"}
    if not control_group_files("memory", "memory.current", "memory.usage_in_bytes"):
        missing |= {"torch_container_memory_working_set_bytes"}
    if all(map(unlimited, control_group_files("cpu", "cpu.max", "cpu.cfs_quota_us"))):
        missing |= {name for name in RESOURCES if name.startswith("torch_container_cpu_")}
    if psutil.disk_io_counters() is None:
        missing |= {name for name in RESOURCES if name.startswith("torch_host_disk_")}
    if set(psutil.net_io_counters(pernic=True)) <= {"lo"}:
        missing |= {name for name in RESOURCES if name.startswith("torch_host_network_")}
    return missing


def stored(real: Prometheus) -> set[str]:
    """Return the resource metrics that Prometheus has of the training."""
    return {labels["__name__"] for labels, _ in real.query('{job="training"}')} & RESOURCES


@pytest.mark.server
def test_the_demo_shows_every_resource_of_this_machine(tmp_path: Path) -> None:
    """Each resource metric that this machine can have arrives in a real Prometheus."""
    with demos(tmp_path) as start:
        demo = start("--port", "0")
        port = int(demo.url.rpartition(":")[2].partition("/")[0])
        with prometheus(tmp_path, port) as real:
            assert eventually(lambda: real.is_scraping() and stored(real) >= RESOURCES - absent_here()), RESOURCES - stored(real)
            assert stored(real) == RESOURCES - absent_here()
            assert real.value("process_resident_memory_bytes") > 50e6
            assert 0.0 <= real.value("torch_host_cpu_ratio") <= 1.0
            assert real.value("process_start_time_seconds") == pytest.approx(
                psutil.Process(demo.process.pid).create_time(), abs=2.0
            )
            assert real.value("torch_host_memory_total_bytes") == psutil.virtual_memory().total
            assert {value for _, value in real.query("torch_grad_exporter_collector_success")} == {"1"}
        demo.interrupt()


ASKED_FOR = (
    "optimizer_state",
    "activations",
    "watched",
    "routers",
    "nan_origin",
    "replicas",
    "attention",
    "layer_times",
    "logged",
    "reinforcement",
    "rollbacks",
    "extra",
)
"""Collectors that yield only their success until an option enables them."""


@pytest.fixture(scope="module")
def complete() -> set[str]:
    """The metrics of a scrape at which each collector succeeded, in the documented order."""
    with start_exporter(Perceptron(), None) as exporter:
        shown = values(exporter)
        succeeded = [dict(labels)["collector"] for (name, labels), n in shown.items() if name.endswith("collector_success") and n]
        assert tuple(succeeded) == ON
        assert errors(exporter) == {}
        return {family.spec.name for family in exporter.collect()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON)
def test_a_collector_that_is_disabled_is_absent(name: str, complete: set[str]) -> None:
    """All collectors are on by default; a disabled one yields nothing, and all others are as before."""
    with start_exporter(Perceptron(), None, collectors={name: False}) as exporter:
        rest = {family.spec.name for family in exporter.collect()}
        shown = values(exporter)
    silent = name in ASKED_FOR or (name == "gpu" and not torch.cuda.is_available())
    assert rest == complete if silent else rest < complete
    success = {labels for metric, labels in shown if metric == "torch_grad_exporter_collector_success"}
    assert success == {key("", collector=other)[1] for other in ON if other != name}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Install a fake CUDA in `torch.cuda`."""
    fake = FakeCuda()
    for name in METHODS:
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    return fake


@pytest.mark.slow
def test_devices_are_read_in_the_loop_alone(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and evaluation read the allocators' numbers about once a second, and no other thread does."""
    readers: set[threading.Thread] = set()
    read = cuda.memory_stats_as_nested_dict

    def reading(device: int) -> Mapping[str, Any]:
        readers.add(threading.current_thread())
        return read(device)

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", reading)
    model = Perceptron()

    def train() -> None:
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(torch.randn(4, 6))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start_exporter(model, None) as exporter:

        def shows(allocated: int, after: Callable[[], None]) -> bool:
            after()
            return values(exporter)[ALLOCATED] == allocated

        for number, action in ((301, train), (302, evaluate)):
            cuda.devices = [{**FILLED, "allocated_bytes": {"all": {"current": number, "peak": 500}}}]
            assert eventually(functools.partial(shows, number, action))
        assert readers == {threading.current_thread()}
        assert errors(exporter) == {}


def test_a_device_that_cannot_be_read_harms_nothing(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """An error of an allocator is counted as `devices` and does not reach the training."""
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {}[device])
    model = Perceptron()
    with start_exporter(model, None) as exporter:
        model(torch.randn(4, 6)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert errors(exporter).keys() == {"devices"}
