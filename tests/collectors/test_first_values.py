"""Counters are there with 0 before there is anything to count, so that Prometheus sees their first increase."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.support.real_prometheus import prometheus
from tests.support.scrape import key, value, values
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter

UNKNOWN_AT_FIRST = {
    "torch_train_phase_seconds_total": "a model that is never called as a whole has no phases",
    "torch_train_samples_total": "only the inputs say whether samples can be counted",
    "torch_train_tokens_total": "counted only where they are observed",
}
"""Counters that come with the first steps, and why."""


class Scene:
    """Two layers with an optimizer each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self.optimizers = {
            "first": torch.optim.SGD(self.model[0].parameters(), lr=0.1),
            "second": torch.optim.AdamW(self.model[2].parameters(), lr=0.1),
        }

    def step(self, *, spoil: bool = False, skip: bool = False) -> None:
        """One round of steps."""
        loss = self.model(torch.randn(5, 3)).sum() * (float("nan") if spoil else 1.0)
        loss.backward()
        for optimizer in self.optimizers.values():
            if not skip:
                optimizer.step()
            optimizer.zero_grad()


def served(exporter: Exporter) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All series of `/metrics`, as prometheus_client reads them."""
    assert exporter.url is not None
    with urllib.request.urlopen(exporter.url, timeout=PATIENCE) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_steps_skipped_steps_and_overhead_are_there_before_the_first_step() -> None:
    """`/metrics` has them with 0 while nothing has been trained, the steps by the name of each optimizer."""
    scene = Scene()
    with start_exporter(scene.model, 0, addr="127.0.0.1", run="r1", optimizers=scene.optimizers) as exporter:
        found = served(exporter)
    ours = {("run", "r1"), ("rank", "0")}
    for name in (
        "torch_train_skipped_steps_total",
        "torch_grad_exporter_overhead_seconds_total",
        "torch_grad_exporter_overhead_ratio",
    ):
        assert found[name, frozenset(ours)] == 0
    steps = {labels: number for (name, labels), number in found.items() if name == "torch_train_steps_total"}
    assert steps == {frozenset({*ours, ("optimizer", name)}): 0 for name in ("first", "second")}


def test_every_counter_is_there_from_the_start_but_for_those_that_cannot_be() -> None:
    """A run with everything that is counted adds no counter, and none goes away or gets other labels."""
    scene = Scene()
    off = dict.fromkeys(("process", "host", "container", "gpu"), False)
    with start_exporter(scene.model, None, every=1, optimizers=scene.optimizers, collectors=off) as exporter:
        before = {one: number for one, number in values(exporter).items() if one[0].endswith("_total")}
        for step in range(30):
            scene.step(spoil=step == 25, skip=step in (25, 26))
            exporter.observe(loss=float("nan"), tokens=3)
        after = {one: number for one, number in values(exporter).items() if one[0].endswith("_total")}
    assert set(before.values()) == {0.0}
    assert before.keys() - after.keys() == set()
    assert {name for name, _ in after.keys() - before.keys()} == set(UNKNOWN_AT_FIRST)
    assert after[key("torch_train_steps_total", optimizer="first")] == 28
    assert after[key("torch_train_skipped_steps_total")] >= 1


def test_an_optimizer_without_a_name_is_shown_from_its_first_step_on() -> None:
    """Its label is not known before: there is no series that would get another label."""
    scene = Scene()
    with start_exporter(scene.model, None, every=1) as exporter:
        assert not [one for one in values(exporter) if one[0] == "torch_train_steps_total"]
        scene.step()
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 1
        assert value(exporter, "torch_train_steps_total", optimizer="AdamW") == 1


def test_an_optimizer_that_is_about_to_step_is_shown_with_nothing() -> None:
    """A scrape from within the first step of an optimizer has it with 0."""
    scene = Scene()
    found: list[float | None] = []
    with start_exporter(scene.model, None, every=1) as exporter:
        second = scene.optimizers["second"]
        second.register_step_post_hook(lambda *_: found.append(value(exporter, "torch_train_steps_total", optimizer="AdamW")))
        scene.step()
    assert found == [0]


def test_the_counters_of_a_device_are_there_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start looks at the devices in use, so that an allocation that fails in the first forward is an increase."""
    sizes = ("allocated", "reserved", "active", "inactive_split", "requested")
    numbers = {f"{name}_bytes": {"all": {"current": 8, "peak": 8}} for name in sizes}
    cuda = {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "get_allocator_backend": lambda: "native",
        "memory_stats_as_nested_dict": lambda _: {**numbers, "num_alloc_retries": 0, "num_ooms": 0},
        "get_device_properties": lambda _: SimpleNamespace(total_memory=9, uuid=None),
    }
    for name, replacement in cuda.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    with start_exporter(Scene().model, None) as exporter:
        assert value(exporter, "torch_cuda_ooms_total", device="cuda:0") == 0
        assert value(exporter, "torch_cuda_alloc_retries_total", device="cuda:0") == 0


@pytest.mark.server
def test_prometheus_sees_the_first_increase(tmp_path: Path) -> None:
    """What a real Prometheus stores of the steps begins at 0, and its increase over the first of them is their number."""
    scene = Scene()
    with (
        start_exporter(scene.model, 0, addr="127.0.0.1", run="r1", optimizers=scene.optimizers) as exporter,
        prometheus(tmp_path, exporter.port or 0) as real,
    ):
        assert eventually(real.is_scraping)
        assert eventually(lambda: real.query('torch_train_steps_total{optimizer="second"} == 0') != [])
        for _ in range(7):
            scene.step()
        assert eventually(lambda: real.query('torch_train_steps_total{optimizer="second"} == 7') != [])
        increase = real.value('increase(torch_train_steps_total{optimizer="second"}[5m])')
        first = real.value('min_over_time(torch_train_steps_total{optimizer="second"}[5m])')
    assert first == 0
    assert increase == pytest.approx(7, rel=0.2)
