"""Layers that come and go: a counter stays while its module exists, what is removed is added up, and nothing grows without end."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import nn

from tests.aggregation.test_gradients import NOW, captured, closed, row
from tests.support.scrape import Key, errors, key, values
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.aggregation import layer_totals
from torch_grad_exporter.aggregation.gradients import GradientAggregation, GradientSnapshot
from torch_grad_exporter.collectors.gradients import GradientCollector
from torch_grad_exporter.metrics.families import REMOVED, Family
from torch_grad_exporter.model.layers import LayerIndex, ParameterTable

CAPTURES = "torch_grad_captures_total"
COUNTED = (CAPTURES, "torch_grad_norm_distribution", "torch_grad_nonfinite_elements_total", "torch_grad_norm_spikes_total")
SUMMED = ("torch_grad_norm_squared_accumulated_total",)


class Model(nn.Module):
    """A layer, and adapters behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.adapters = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base(x)
        for adapter in self.adapters.values():
            x = x + adapter(x)
        return x


class Tasks:
    """A training whose adapters are replaced, in the model and in the optimizer."""

    def __init__(self, together: int) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.together = together
        self.adapters = 0

    def train(self, adapters: int) -> None:
        """Trains one step of each task, until there have been so many adapters."""
        while self.adapters < adapters:
            self.model.adapters.clear()
            for _ in range(self.together):
                self.model.adapters[f"task_{self.adapters}"] = nn.Linear(3, 3, bias=False)
                self.adapters += 1
            self.optimizer.param_groups[0]["params"] = list(self.model.parameters())
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3)).square().mean().backward()
            self.optimizer.step()


def totals(families: Iterable[Family]) -> dict[str, tuple[float, float]]:
    """By counter and by histogram of layers, the sum over all layers, and the remainder's part of it."""
    found = {}
    for family in families:
        if family.spec.name in (*COUNTED, *SUMMED):
            removed = np.array([row[0] == REMOVED for row in family.labels.rows])
            counts = family.values.reshape(len(removed), -1).sum(axis=1)
            found[family.spec.name] = float(counts.sum()), float(counts[removed].sum())
            if family.sums is not None:
                found[f"{family.spec.name}_sum"] = float(family.sums.sum()), float(family.sums[removed].sum())
    return found


def traced(exporter: Exporter) -> int:
    """The bytes in use that were taken since `tracemalloc` began, but for those of the history, which has bounds of its own."""
    exporter.collect()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - exporter._view.history.nbytes


@pytest.mark.parametrize("most", [3_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_thousands_of_adapters_need_no_more_than_a_hundred(most: int) -> None:
    """Thousands of adapters, a hundred at a time, each with a name of its own: series and memory are bounded, sums never fall."""
    torch.manual_seed(0)
    tasks, together = Tasks(100), 100
    before: dict[str, tuple[float, float]] = {}
    series, memory = [], []
    with start_exporter(tasks.model, None, every=1) as exporter:
        tracemalloc.start()
        for adapters in range(1_000, most + 1, 1_000):
            tasks.train(adapters)
            families = exporter.collect()
            found = totals(families)
            assert found[CAPTURES] == (adapters + adapters // together, adapters - together)
            for name, (whole, _) in before.items():
                assert found[name][0] >= whole * (1 - 1e-12), name  # sums of the same parts may differ in their last digits
            before = found
            series.append(sum(family.series for family in families))
            memory.append(traced(exporter))
        # What is on its way to the history counts as well, until its thread is done. Labels kept would be 2 kB each.
        assert eventually(lambda: traced(exporter) - min(memory[:2]) < 500_000)
        tracemalloc.stop()
        layers = exporter._view.history.layers
        assert errors(exporter) == {}
    assert max(series[1:]) - min(series[1:]) <= 20  # but for gauges that come with time
    assert len(layers) <= 1_000 + together + 1


def gauges_and_counters(found: dict[Key, float], layer: str) -> tuple[set[str], dict[str, float]]:
    """Of a layer, which gauges there are, and the counters."""
    mine = {
        name: value for (name, labels), value in found.items() if dict(labels).get("layer") == layer and "le" not in dict(labels)
    }
    counters = {name: value for name, value in mine.items() if name.endswith(("_total", "_count", "_sum"))}
    return mine.keys() - counters.keys(), counters


def test_a_frozen_layer_keeps_its_counters_until_its_module_goes() -> None:
    """Frozen and thawed in turns, a layer's counters are in each scrape and never fall; its gauges go and come."""
    torch.manual_seed(0)
    tasks = Tasks(2)
    tasks.train(2)
    with start_exporter(tasks.model, None, every=1) as exporter:
        captures = 0
        for step in range(6):
            frozen = step % 2 == 1
            tasks.model.adapters["task_0"].requires_grad_(not frozen)
            tasks.optimizer.zero_grad()
            tasks.model(torch.randn(4, 3)).square().mean().backward()
            tasks.optimizer.step()
            captures += not frozen
            gauges, counters = gauges_and_counters(values(exporter), "adapters.task_0")
            assert counters[CAPTURES] == counters["torch_grad_norm_distribution_count"] == captures
            assert bool(gauges - {"torch_grad_norm_recent_max"}) == (not frozen)
        assert key(CAPTURES, layer=REMOVED) not in values(exporter)
        tasks.model.adapters["task_0"].requires_grad_(False)
        tasks.train(4)
        found = values(exporter)
        assert gauges_and_counters(found, "adapters.task_0") == (set(), {})
        gauges, counters = gauges_and_counters(found, REMOVED)
        assert (gauges, counters[CAPTURES]) == (set(), captures + 6)
        assert errors(exporter) == {}


class Scene:
    """An aggregation, and the layers of a model that changes."""

    def __init__(self, *names: str, max_layers: int = 300, frozen: bool = False) -> None:
        self.model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names}).requires_grad_(not frozen)
        self.index = LayerIndex({"": self.model}, max_layers=max_layers)
        self.gradients = GradientAggregation(exponential=True)
        self.gradients.use(self.index.table)
        self.number = 0

    def sample(self, *norms: float) -> ParameterTable:
        """One with a gradient of these norms, in the order of the table."""
        self.number += 1
        table, owners = self.index.refresh(), [0] * len(norms)
        rows = {place: row(norm) for place, norm in enumerate(norms)}
        self.gradients.apply(captured(self.number, rows, table=table, owners=owners))
        self.gradients.apply(closed(self.number, owners=owners))
        return table

    def snapshot(self) -> GradientSnapshot:
        return self.gradients.snapshot(NOW)

    def counted(self, name: str = CAPTURES) -> dict[str, float]:
        """A counter by layer."""
        families = GradientCollector(self.snapshot, ["sgd"], dead_window=5).collect()
        (family,) = (family for family in families if family.spec.name == name)
        return {label: float(value) for (label, *_), value in zip(family.labels.rows, family.values, strict=True)}


def test_a_layer_in_the_place_of_a_removed_one_has_none_of_its_past() -> None:
    """A new layer's baseline, z-score, recent maximum, buckets and totals are its own; the remainder has those of the old one."""
    scene = Scene("a", "b")
    for _ in range(30):
        scene.sample(1000.0, 1.0)
    del scene.model["a"]
    scene.model["c"] = nn.Linear(2, 2, bias=False)
    scene.sample(1.0, 0.25)
    snapshot = scene.snapshot()
    assert snapshot.table.layers == ("b", "c")
    new = snapshot.layer_values[1]
    assert [float(new[name]) for name in ("captures", "bucket_sum", "squared_total", "spikes")] == [1, 0.25, 0.0625, 0]
    assert np.isnan(new["zscore"])
    assert (snapshot.recent_max.tolist(), snapshot.untracked.labels) == ([1.0, 0.25], (REMOVED,))
    (rest,) = snapshot.untracked.values
    assert [float(rest[name]) for name in ("captures", "bucket_sum", "squared_total")] == [30, 30_000, 30e6]
    assert snapshot.exponential is not None
    assert [sum(counts.values()) for counts in (*snapshot.exponential, *snapshot.untracked.exponential)] == [31, 1, 30]
    for _ in range(20):
        scene.sample(1.0, 0.25)
    assert scene.snapshot().layer_values["spikes"].tolist() == [0, 0]


def test_a_name_that_comes_back_begins_anew() -> None:
    """Removed and added under its old name a layer counts from 0; the sum over layers goes on."""
    scene = Scene("a", "b")
    for number in range(1, 7):
        scene.sample(1.0, 2.0)
        old = scene.model.pop("a")
        scene.sample(2.0)
        scene.model["a"] = old
        scene.sample(2.0, 1.0)
        assert scene.counted() == {"b": 3.0 * number, "a": 1.0, REMOVED: 2.0 * number - 1}


def test_a_folded_label_stays_while_one_of_its_modules_exists() -> None:
    """Labels before and after folding keep their counters, until the last module of each is gone."""
    scene = Scene(max_layers=3)
    blocks = scene.model["blocks"] = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "xy"})
    scene.model["head"] = nn.Linear(2, 2, bias=False)
    assert scene.sample(1.0, 1.0, 1.0).layers == ("blocks.x", "blocks.y", "head")
    blocks["z"] = nn.Linear(2, 2, bias=False)
    assert scene.sample(1.0, 1.0, 1.0, 1.0).layers == ("blocks", "head")
    assert scene.counted() == {"blocks": 1, "head": 2, "blocks.x": 1, "blocks.y": 1}
    del blocks["x"]
    assert scene.sample(1.0, 1.0, 1.0).layers == ("blocks.y", "blocks.z", "head")
    assert scene.counted() == {"blocks.y": 2, "blocks.z": 1, "head": 3, "blocks": 1, REMOVED: 1}


def test_labels_that_are_trained_no_more_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that are trained one after another and still exist the last ones keep their counters; no sum falls."""
    monkeypatch.setattr(layer_totals, "MOST_UNTRACKED", 3)
    scene = Scene(*map(str, range(9)), frozen=True)
    for number in range(9):
        scene.model.requires_grad_(False)
        scene.model[str(number)].requires_grad_(True)
        scene.sample(1.0)
        assert sum(scene.counted().values()) == number + 1
    assert scene.counted() == {"8": 1, "5": 1, "6": 1, "7": 1, REMOVED: 5}


def test_a_layer_that_has_the_remainders_name_is_shown_once() -> None:
    """Whatever a module is called, no series is there twice."""
    scene = Scene(REMOVED, "b")
    scene.sample(1.0, 1.0)
    del scene.model["b"]
    scene.sample(1.0)
    assert scene.counted() == {REMOVED: 2.0}
