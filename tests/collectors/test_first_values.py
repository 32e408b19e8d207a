"""Counters start at 0 before anything is counted, so that Prometheus sees their first increase."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.real_prometheus import prometheus
from tests.support.scrape import key, values
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter

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
        """Take one round of steps."""
        loss = self.model(torch.randn(5, 3)).sum() * (float("nan") if spoil else 1.0)
        loss.backward()
        for optimizer in self.optimizers.values():
            if not skip:
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_every_counter_is_there_from_the_start() -> None:
    """A run adds no counter to those at the start, and none vanishes or gets other labels."""
    scene = Scene()
    off = dict.fromkeys(("process", "host", "container", "gpu"), False)
    with start_exporter(scene.model, None, every=1, optimizers=scene.optimizers, collectors=off) as exporter:
        before = {series: number for series, number in values(exporter).items() if series[0].endswith("_total")}
        for step in range(30):
            scene.step(spoil=step == 25, skip=step in (25, 26))
            exporter.observe(loss=float("nan"), tokens=3)
        after = {series: number for series, number in values(exporter).items() if series[0].endswith("_total")}
    assert before.pop(key("torch_train_time_seconds_total", cause="starting")) > 0.0  # it counts from the start
    assert set(before.values()) == {0.0}
    assert before.keys() - after.keys() == set()
    del after[key("torch_train_time_seconds_total", cause="starting")]
    assert {name for name, _ in after.keys() - before.keys()} == set(UNKNOWN_AT_FIRST)
    assert after[key("torch_train_steps_total", optimizer="first")] == 28
    assert after[key("torch_train_skipped_steps_total")] >= 1


@pytest.mark.server
def test_prometheus_sees_the_first_increase(tmp_path: Path) -> None:
    """In a real Prometheus the steps begin at 0, and their increase is their number."""
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
    assert increase > 5  # Prometheus extrapolates, and more where a scrape was late
