"""The collectors that there are: found in their files, in their order, and each with what it declares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import torch_grad_exporter.collectors
from tests.support.models import Perceptron
from tests.support.scrape import values
from torch_grad_exporter import start_exporter
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.host import COLLECTOR as HOST
from torch_grad_exporter.collectors.host import HOST_MEMORY_TOTAL
from torch_grad_exporter.collectors.registry import Collector, Declaration, Registry
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, scalar

OF_GRADIENTS = {"clipping", "weights"}
"""Files with metrics of the collector `gradients`."""

NO_COLLECTORS = OF_GRADIENTS | {
    *("__init__", "clip_reports", "context", "frozen_layers", "happened", "of_sample", "origins", "outcomes", "registry", "scrape"),
}
"""Files of the package that hold none."""


def fail(_context: CollectorContext) -> Collector:
    """Makes no collector."""
    raise AssertionError


def declaration(name: str, place: int = 90, *, metric: str = "", default: bool = True) -> Declaration:
    """A collector of one metric, or none."""
    section = Section("Title")
    if metric:
        section.gauge(metric, "A metric.")
    return Declaration(name, (section,), fail, default=default, place=place)


def test_each_file_is_a_collector_of_its_name() -> None:
    """All files of the package but for the machinery declare one, called like the file."""
    files = {path.stem for path in Path(torch_grad_exporter.collectors.__file__).parent.glob("*.py")}
    assert sorted(REGISTRY.names) == sorted(files - NO_COLLECTORS)
    assert all(found.make.__module__.endswith(f".{found.name}") for found in REGISTRY)


def test_collectors_come_in_the_order_of_their_places() -> None:
    """Of equal places the one that was declared first comes first; sources and metrics follow."""
    registry = Registry(
        [declaration("b", metric="b_b"), declaration("c", 1, metric="c_c"), declaration("a", metric="a_a", default=False)]
    )
    assert registry.names == ("c", "b", "a")
    assert registry.sources == ("collector_c", "collector_b", "collector_a")
    assert list(registry.catalogue) == ["c_c", "b_b", "a_a"]
    assert registry.on_by_default == {"b", "c"}


@pytest.mark.parametrize("name", ["", "A", "a b", "a-b", "1a", "a=b"])
def test_a_name_that_no_option_could_say_is_refused(name: str) -> None:
    """Names are said in an environment variable and on a command line."""
    with pytest.raises(ValueError, match="no name of a collector"):
        Registry([declaration(name)])


def test_devices_are_looked_at_for_those_that_show_them_only() -> None:
    """Without a collector of device memory no device is asked for it."""
    registry = Registry([declaration("a"), replace(declaration("b"), reads_devices=True)])
    assert registry.reads_devices({"a", "b"})
    assert not registry.reads_devices({"a"})
    assert {found.name for found in REGISTRY if found.reads_devices} == {"cuda_memory", "gpu"}


class Substitute:
    """A collector `host` that knows one number."""

    def collect(self) -> Iterator[Family]:
        """The family."""
        yield scalar(HOST_MEMORY_TOTAL, 7)


def substitute(_context: CollectorContext) -> Substitute:
    """Makes it."""
    return Substitute()


def test_a_collector_can_stand_in_for_another_one() -> None:
    """With `replace` it is made in the place of the one of its name, which is back after `close`; others stay out."""
    names = REGISTRY.names
    with pytest.raises(ValueError, match="'host' already"):
        REGISTRY.register(replace(HOST, make=substitute))
    with contextlib.closing(REGISTRY.register(replace(HOST, make=substitute), replace=True)):
        assert REGISTRY.names == names
        with start_exporter(Perceptron(), None) as exporter:
            shown = {name: value for (name, _), value in values(exporter).items() if name.startswith("torch_host_")}
    assert shown == {"torch_host_memory_total_bytes": 7}
    assert HOST in list(REGISTRY)
