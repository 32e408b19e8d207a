"""Layers that come and go: a counter stays while its module exists, what is removed is added up, and nothing grows without end."""

from __future__ import annotations

import copy
import gc
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.store.support import Given, Training
from tests.support.scrape import Key, errors, key, values
from tests.support.tools import eventually
from tests.support.torch_versions import get_total_norm
from torch_grad_exporter import start_exporter
from torch_grad_exporter.metrics.families import REMOVED, Family

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
        """Train one step of each task, until there have been this many adapters."""
        while self.adapters < adapters:
            self.model.adapters.clear()
            for _ in range(self.together):
                self.model.adapters[f"task_{self.adapters}"] = nn.Linear(3, 3, bias=False)
                self.adapters += 1
            self.optimizer.param_groups[0]["params"] = list(self.model.parameters())
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()


def totals(families: Iterable[Family]) -> dict[str, tuple[float, float]]:
    """Return the sum over all layers of each counter and histogram, and the remainder's part of it."""
    found = {}
    for family in families:
        if family.spec.name in (*COUNTED, *SUMMED):
            removed = np.array([row[0] == REMOVED for row in family.labels.rows])
            counts = family.values.reshape(len(removed), -1).sum(axis=1)
            found[family.spec.name] = float(counts.sum()), float(counts[removed].sum())
            if family.sums is not None:
                found[f"{family.spec.name}_sum"] = float(family.sums.sum()), float(family.sums[removed].sum())
    return found


@pytest.mark.full
def test_thousands_of_adapters(tmp_path: Path) -> None:
    """Of thousands of adapters, a hundred at a time, series and memory stay bounded, and no sum ever falls."""
    most, together = 6_000, 100
    tasks = Tasks(together)
    before: dict[str, tuple[float, float]] = {}
    series, memory = [], []
    with start_exporter(tasks.model, None, every=1) as exporter:

        def traced() -> int:
            exporter.collect()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        for adapters in range(most // 3, most + 1, most // 3):  # the first of them fill what is kept of removed ones
            tasks.train(adapters)
            families = exporter.collect()
            found = totals(families)
            assert found[CAPTURES] == (adapters + adapters // together, adapters - together)
            for name, (whole, _) in before.items():
                assert found[name][0] >= whole * (1 - 1e-12), name  # sums of the same parts may differ in their last digits
            before = found
            series.append(sum(family.series for family in families if "layer" in family.spec.labels))
            memory.append(traced())
        # Labels kept would be 2 kB each; what is on its way to the history is there for a moment.
        assert eventually(lambda: traced() - memory[0] < 1_000 * most * 2 // 3)
        tracemalloc.stop()
        assert errors(exporter) == {}
    assert series[1] == series[2]
    exporter.save(tmp_path / "run.json")
    layers = json.loads((tmp_path / "run.json").read_text())["layers"]["norm"]["whole"]["layers"]
    assert len(layers) <= 1_000 + together + 1


def of_layer(found: dict[Key, float], layer: str) -> tuple[set[str], dict[str, float]]:
    """Return the names of a layer's gauges, and its counters."""
    mine = {
        name: value for (name, labels), value in found.items() if dict(labels).get("layer") == layer and "le" not in dict(labels)
    }
    counters = {name: value for name, value in mine.items() if name.endswith(("_total", "_count", "_sum"))}
    return mine.keys() - counters.keys(), counters


class Changing(Training):
    """A training whose layers, with one weight each, come and go."""

    def __init__(self, *names: str, **options: int) -> None:
        super().__init__(Given({name: nn.Linear(2, 2, bias=False) for name in names}).double(), **options)

    def add(self, name: str) -> None:
        """Put a new layer of this name, with dots, into model and optimizer."""
        parent, _, last = name.rpartition(".")
        self.model.get_submodule(parent)[last] = nn.Linear(2, 2, bias=False).double()  # type: ignore[operator]
        self._known()

    def remove(self, name: str) -> None:
        parent, _, last = name.rpartition(".")
        del self.model.get_submodule(parent)[last]  # type: ignore[operator]
        self._known()

    def _known(self) -> None:
        self.optimizers[0].param_groups[0]["params"] = list(self.model.parameters())

    def ones(self) -> None:
        """Train a round in which every gradient has the norm 1."""
        self.model.zero_grad()
        self.model({p: torch.full_like(p, 0.5) for p in self.model.parameters() if p.requires_grad}).backward()
        self.step()

    def captures(self) -> dict[str, float]:
        """Return the samples by layer."""
        return {dict(labels)["layer"]: number for (name, labels), number in values(self.exporter).items() if name == CAPTURES}


def test_a_new_layer_has_none_of_a_removed_ones_past() -> None:
    """A layer in the place of a removed one has its own baseline, histogram and sums; the remainder has the old ones."""
    with Changing("a", "b") as training:
        for number in range(30):
            training.round(a=1.0 + number % 3 / 10, b=1.0)
        training.remove("a")
        training.add("c")
        for _ in range(10):
            training.round(b=1.0, c=1000.0)
        found = values(training.exporter)
        gauges, counters = of_layer(found, "c")
        assert "torch_grad_norm_zscore" not in gauges
        names = ("captures_total", "norm_distribution_count", "norm_distribution_sum", "norm_spikes_total")
        assert [counters[f"torch_grad_{name}"] for name in names] == [10, 10, 10_000, 0]
        assert found[key("torch_grad_norm_recent_max", layer="c")] == 1000
        assert "torch_grad_norm_zscore" in of_layer(found, "b")[0]
        gauges, counters = of_layer(found, REMOVED)
        assert (gauges, [counters[f"torch_grad_{name}"] for name in names]) == (set(), [30, 30, pytest.approx(33), 0])


def test_a_folded_label_stays_while_one_module_exists() -> None:
    """Labels before and after folding keep their counters, until the last module of each is gone."""
    training = Changing("head", max_layers=3)
    training.model["blocks"] = nn.ModuleDict()
    with training:
        for name in ("blocks.x", "blocks.y"):
            training.add(name)
        training.ones()
        assert training.captures() == {"blocks.x": 1, "blocks.y": 1, "head": 1}
        training.add("blocks.z")
        training.ones()
        assert training.captures() == {"blocks": 1, "head": 2, "blocks.x": 1, "blocks.y": 1}
        training.remove("blocks.x")
        training.ones()
        assert training.captures() == {"blocks.y": 2, "blocks.z": 1, "head": 3, "blocks": 1, REMOVED: 1}


@pytest.mark.full
def test_labels_trained_no_more_are_bounded() -> None:
    """Of layers that are trained in turn and still exist, the last thousand keep their counters, and no sum falls."""
    with Changing(*map(str, range(1_200)), max_layers=2_000) as training:
        training.model.requires_grad_(False)
        for first in range(0, 1_200, 200):
            for number in range(1_200):
                training.model[str(number)].requires_grad_(first <= number < first + 200)
            training.ones()
            assert totals(training.exporter.collect())[CAPTURES][0] == first + 200
        families = {family.spec.name: family for family in training.exporter.collect()}
        labels = {row[0] for row in families[CAPTURES].labels.rows}
        assert set(map(str, range(200, 1_200))) <= labels
        assert len(labels) <= 1_201


def test_a_layer_of_the_remainders_name_is_shown_once() -> None:
    """Whatever a module is called, no series is there twice."""
    with Changing(REMOVED, "b") as training:
        training.ones()
        training.remove("b")
        training.ones()
        assert training.captures() == {REMOVED: 2.0}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("of", ["module", "parameter"])
def test_a_copy_without_an_optimizer_has_no_norm(of: str, by_hand: bool) -> None:
    """Where a copy takes the place of a part, the old part's series stops, until an optimizer has the copy."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    with start_exporter(model, None, every=1) as exporter:

        def shown(rounds: int) -> list[str]:
            """Train, and return the layers that have a norm; it must be that of the model's last gradients."""
            for _ in range(rounds):
                model.zero_grad()
                loss, parameters = model(torch.randn(4, 3)).square().mean(), list(model.parameters())
                if by_hand:
                    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                        parameter.grad = gradient
                else:
                    loss.backward()
                true = [get_total_norm([p.grad for p in part.parameters() if p.grad is not None]) for part in model]
                for optimizer in optimizers:
                    optimizer.step()
            norms = {name.partition("/")[2]: norm for name, norm in exporter.values("^torch_grad_norm/").items()}
            assert norms == pytest.approx({name: float(true[int(name)]) for name in norms})
            return [*norms]

        assert shown(8) == ["0", "1"]
        if of == "module":
            model[0] = copy.deepcopy(model[0])
        else:
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        assert shown(4) == ["1"]
        if not by_hand:
            optimizers[0] = torch.optim.SGD(model[0].parameters(), lr=0.01)
            assert shown(4) == ["0", "1"]
