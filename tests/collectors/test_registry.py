"""The registry of collectors: order, names and replacement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.models import Perceptron
from tests.support.scrape import values
from torch_grad_exporter import start_exporter
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.host import COLLECTOR as HOST
from torch_grad_exporter.collectors.host import HOST_MEMORY_TOTAL
from torch_grad_exporter.metrics.families import Family, scalar


class Substitute:
    """A collector `host` that has one number."""

    def collect(self) -> Iterator[Family]:
        """The family."""
        yield scalar(HOST_MEMORY_TOTAL, 7)


def substitute(_context: CollectorContext) -> Substitute:
    """Make it."""
    return Substitute()


def test_a_collector_can_replace_another_one() -> None:
    """With `replace` a collector takes the place of the one with its name until `close`."""
    names = REGISTRY.names
    with pytest.raises(ValueError, match="duplicate collector 'host'"):
        REGISTRY.register(replace(HOST, make=substitute))
    with contextlib.closing(REGISTRY.register(replace(HOST, make=substitute), replace=True)):
        assert REGISTRY.names == names
        with start_exporter(Perceptron(), None) as exporter:
            shown = {name: value for (name, _), value in values(exporter).items() if name.startswith("torch_host_")}
    assert shown == {"torch_host_memory_total_bytes": 7}
    assert HOST in list(REGISTRY)
