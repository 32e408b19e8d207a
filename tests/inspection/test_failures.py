"""A failure at any seam of activations, times of layers and watched tensors: training ends with the same bits; it is counted."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.scrape import errors
from torch_grad_exporter import start_exporter

SEAMS = [
    "inspection.activations:first_of",
    "inspection.activations:dense",
    "inspection.activations:on_node_of",
    "inspection.activations:called_from_compiled",
    "inspection.activations:something_is_compiled",
    "inspection.activations:Activations.forward_began",
    "inspection.activations:Activations.backward_ended",
    "inspection.activations:Activations.round_over",
    "inspection.activations:Activations.step_over",
    "inspection.layer_timer:LayerTimer.forward_began",
    "inspection.layer_timer:LayerTimer.backward_ended",
    "inspection.layer_timer:LayerTimer.round_over",
    "inspection.layer_timer:LayerTimer.step_over",
    "inspection.layer_timer:differentiable",
    "inspection.layer_timer:own_nodes",
    "inspection.layer_timer:next_sequence",
    "inspection.own_nodes:number_of",
    "inspection.round_hooks:RoundHooks.arm",
    "inspection.round_hooks:RoundHooks.disarm",
    "inspection.round_hooks:graph_task",
    "capture.timeline:HostWatch.now",
    "capture.timeline:Timeline.enter",
    "capture.timeline:Timeline.go_on",
    "capture.timeline:Timeline.cut",
    "capture.timeline:Stretch.passed",
    "capture.timeline:Stretch.seconds",
    "aggregation.layer_times:LayerTimes.take",
    "aggregation.layer_times:LayerTimes.snapshot",
    "inspection.modules:InnerModules.chosen",
    "inspection.modules:is_compiled",
    "inspection.rounds:RoundTallies.backward",
    "inspection.rounds:RoundTallies.measure",
    "inspection.rounds:RoundTallies.backward_ended",
    "inspection.rounds:RoundTallies.confirm",
    "inspection.rounds:RoundTallies.forget_backwards",
    "inspection.rounds:RoundTallies.round_over",
    "inspection.rounds:packed",
    "inspection.rounds:include",
    "inspection.tallies:Packed.values",
    "inspection.tallies:Tally.of_output",
    "inspection.tallies:Tally.of_gradient",
    "inspection.tallies:Tally.include",
    "inspection.tensors:UnitDims.of",
    "inspection.watch:Watch.watch",
    "inspection.watch:Watch.forward_began",
    "inspection.watch:Watch.backward_ended",
    "inspection.watch:Watch.round_over",
    "inspection.watch:Watch.step_over",
    "inspection.watch:dense",
    "aggregation.activations:ActivationTotals.take",
    "aggregation.activations:ActivationTotals.modules",
    "aggregation.activations:ActivationTotals.snapshot",
    "aggregation.watched:WatchTotals.take",
    "aggregation.watched:WatchTotals.label",
    "aggregation.watched:WatchTotals.clipped",
    "aggregation.watched:WatchTotals.snapshot",
]


class PlantedError(Exception):
    """What a double raises."""


def trained(*, watched: bool, plant: Callable[[], object] = lambda: None) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The parameters after 14 steps of two micro-batches, and the failures that were counted. `plant` is called after the start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {
        "every": 1,
        "activations": True,
        "layer_times": True,
        "collectors": {"host": False, "process": False, "container": False},
    }
    failures: dict[str, float] = {}
    with start_exporter(model, None, **(options if watched else {})) as exporter:
        plant()
        for _ in range(14):
            optimizer.zero_grad()
            for _ in range(2):
                y = model(torch.randn(3, 4))
                if watched:
                    y = exporter.watch("again", exporter.watch("y", y), max_norm=1e9)
                y.square().mean().backward()
            optimizer.step()
        if watched:
            exporter.collect()
            failures = errors(exporter)
    if watched:
        failures = {**failures, **{k: v for k, v in exporter._errors.counts().items() if v}}
    return [parameter.detach().clone() for parameter in model.parameters()], failures


@pytest.mark.parametrize("seam", SEAMS)
def test_the_training_goes_on(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the seam raises: same parameters, and something is counted."""
    expected, _ = trained(watched=False)
    room, name = seam.split(":")
    owner: object = importlib.import_module(f"torch_grad_exporter.{room}")
    *outer, attribute = name.split(".")
    for one in outer:
        owner = getattr(owner, one)
    found = inspect.getattr_static(owner, attribute)

    def double(*_arguments: object, **_options: object) -> None:
        raise PlantedError

    kind: Callable[..., object] = type(found) if isinstance(found, classmethod | staticmethod) else lambda one: one
    parameters, failures = trained(watched=True, plant=lambda: monkeypatch.setattr(owner, attribute, kind(double)))
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert {*failures} & {
        "activations", "layer_times", "watch", "worker",
        "collector_activations", "collector_layer_times", "collector_watched",
    }  # fmt: skip


def test_without_a_failure_nothing_is_counted() -> None:
    """The same training, with nothing planted."""
    expected, _ = trained(watched=False)
    parameters, failures = trained(watched=True)
    assert failures == {}
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
