"""Scenes for `test_layer_times`, which runs them in a process where `time.perf_counter` is a clock that only layers move.

So each number is exact. A scene returns what the scrape has by layer and pass, and what it should have.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from tests.inspection.support import Clock, EachOperation
from tests.support.scrape import OFF, errors, value, values
from tests.support.torch_hooks import module_hooks
from torch_grad_exporter import Exporter, start_exporter

SECONDS, STEPS = "torch_layer_seconds_total", "torch_layer_timed_steps_total"

Times = dict[str, float]
SCENES: dict[str, Callable[[Clock], tuple[Times, Times]]] = {}


def scene(function: Callable[[Clock], tuple[Times, Times]]) -> Callable[[Clock], tuple[Times, Times]]:
    """Add a scene under the function's name."""
    SCENES[function.__name__] = function
    return function


class Takes(torch.autograd.Function):
    """The identity, which takes its time in the backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        context.clock, context.seconds = clock, seconds
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401 - autograd's own
        _ = context.saved_tensors  # where a checkpoint computes them again
        context.clock.takes(context.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    """A layer that takes `seconds` in the forward and twice as many in the backward; without `owns` it has no parameter."""

    def __init__(self, clock: Clock, seconds: float, *, owns: bool = True) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.scale = nn.Parameter(torch.ones(4)) if owns else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.takes(self.seconds)
        y = x if self.scale is None else x * self.scale
        return Takes.apply(y, self.clock, 2 * self.seconds)  # type: ignore[no-any-return,no-untyped-call]


class Around(nn.Module):
    """A layer with another one within it, and time of its own before, between and after."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.scale = clock, nn.Parameter(torch.ones(4))
        self.inner = Layer(clock, 8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.takes(0.25)
        x = Takes.apply(x * self.scale, self.clock, 0.5)  # type: ignore[no-untyped-call]
        x = self.inner(self.inner(x))
        self.clock.takes(1.0)
        return Takes.apply(x * self.scale, self.clock, 2.0)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def timed(model: nn.Module, **options: object) -> Iterator[Exporter]:
    """Start an exporter of every round that fails in nothing."""
    with start_exporter(model, None, **{"every": 1, "layer_times": True, "collectors": OFF, **options}) as exporter:
        yield exporter
        assert errors(exporter) == {}


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, micro_batches: int = 1) -> None:
    """Take one step that leaves the model as it is."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    for _ in range(micro_batches):
        model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()


def shown(exporter: Exporter, metric: str = SECONDS) -> Times:
    """Close the exporter and return the metric by layer and pass."""
    exporter.close()
    labelled = ((dict(labels), number) for (name, labels), number in values(exporter).items() if name == metric)
    return {f"{labels['layer']} {labels['pass']}": number for labels, number in labelled}


def passes(**layers: float) -> Times:
    """Return what is expected of layers whose forwards took this long."""
    return {f"{layer} {name}": s * (1 + (name == "backward")) for layer, s in layers.items() for name in ("forward", "backward")}


@scene
def each_layer_has_its_own_time(clock: Clock) -> tuple[Times, Times]:
    """Each layer has its time over all micro-batches; what has no parameters is in no time."""
    block = nn.Sequential(Layer(clock, 4.0), nn.ReLU(inplace=True), Layer(clock, 8.0))
    model = nn.Sequential(Layer(clock, 0.5), Layer(clock, 64.0, owns=False), block)
    with timed(model) as exporter:
        for _ in range(5):
            train(model, micro_batches=3)
            clock.takes(1e6)
        seconds = shown(exporter)
        assert shown(exporter, STEPS) == dict.fromkeys(seconds, 5.0)
        return seconds, passes(**{"0": 15 * 0.5, "2.0": 15 * 4.0, "2.2": 15 * 8.0})


@scene
def a_layer_around_others(clock: Clock) -> tuple[Times, Times]:
    """Nothing counts twice in a layer with others within it, one of which is called twice."""
    model = nn.Sequential(Around(clock))
    with timed(model) as exporter:
        train(model)
        return shown(exporter), passes(**{"0": 1.25, "0.inner": 16.0})


@scene
def time_of_the_exporter(clock: Clock) -> tuple[Times, Times]:
    """Operations of the exporter within a layer are not in the layer's time."""
    model = nn.Sequential(Layer(clock, 0.5), nn.ReLU(inplace=True), Layer(clock, 2.0))
    own: set[str] = set()
    with EachOperation(own.add):
        train(model)
    slow: list[str] = []

    def slow_down(name: str) -> None:
        if name not in own:
            slow.append(name)
            clock.takes(128.0)

    with timed(model, activations=True) as exporter:
        with EachOperation(slow_down):
            train(model)
            assert len(slow) > 10
        return shown(exporter), passes(**{"0": 0.5, "2": 2.0})


@scene
def only_sampled_training_steps(clock: Clock) -> tuple[Times, Times]:
    """Only sampled steps are timed, without evaluations in them, and no hook stays between steps."""
    model = nn.Sequential(Layer(clock, 0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with timed(model, every=4) as exporter:
        for _ in range(16):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            with torch.no_grad():
                model(torch.randn(3, 4))
                model[0](torch.randn(3, 4))
            loss.backward()
            optimizer.step()
            assert module_hooks(model[0]) == []
        assert value(exporter, "torch_grad_exporter_captures_total") == 4
        seconds = shown(exporter)
        assert shown(exporter, STEPS) == dict.fromkeys(seconds, 4.0)
        return seconds, passes(**{"0": 4 * 0.5})


class FailsOnce(Layer):
    """A layer whose first forward raises, after a long time."""

    failed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.failed:
            self.failed = True
            self.clock.takes(64.0)
            raise ValueError
        return super().forward(x)


@scene
def a_forward_that_raises(clock: Clock) -> tuple[Times, Times]:
    """A layer that has raised, and what comes until the next forward, is in no time."""
    model = nn.Sequential(Layer(clock, 0.5), FailsOnce(clock, 2.0))
    with timed(model) as exporter:
        with suppress(ValueError):
            train(model)
        clock.takes(1e6)
        train(model)
        return shown(exporter), {**passes(**{"0": 0.5, "1": 2.0}), "0 forward": 2 * 0.5}


class Checkpointed(nn.Module):
    """A part that is computed again in the backward."""

    def __init__(self, clock: Clock, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.part = Layer(clock, 0.5), nn.Sequential(Layer(clock, 4.0), Layer(clock, 8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def checkpointed(clock: Clock, *, reentrant: bool) -> Times:
    """Return what is shown of three steps with a checkpoint."""
    model = Checkpointed(clock, reentrant=reentrant)
    with timed(model) as exporter, torch.utils.checkpoint.set_checkpoint_early_stop(False):
        for _ in range(3):
            train(model)
        return shown(exporter)


@scene
def a_checkpoint(clock: Clock) -> tuple[Times, Times]:
    """The second forward of a checkpoint is in no layer's time."""
    return checkpointed(clock, reentrant=False), passes(**{"first": 1.5, "part.0": 12.0, "part.1": 24.0})


@scene
def a_reentrant_checkpoint(clock: Clock) -> tuple[Times, Times]:
    """Layers of a reentrant checkpoint have no backward."""
    expected = {"first forward": 1.5, "first backward": 3.0, "part.0 forward": 12.0, "part.1 forward": 24.0}
    return checkpointed(clock, reentrant=True), expected


@scene
def frozen_layers(clock: Clock) -> tuple[Times, Times]:
    """A layer before all that is trained has no backward; a frozen one behind it has."""
    model = nn.Sequential(Layer(clock, 0.5), Layer(clock, 2.0), Layer(clock, 8.0))
    for frozen in (model[0], model[2]):
        frozen.requires_grad_(requires_grad=False)
    with timed(model) as exporter:
        train(model, torch.optim.SGD(model[1].parameters(), lr=0.0))
        expected = passes(**{"0": 0.5, "1": 2.0, "2": 8.0})
        del expected["0 backward"]
        return shown(exporter), expected


def main() -> None:
    """Run all scenes by the clock in `time.perf_counter` and print the results."""
    clock = time.perf_counter
    assert isinstance(clock, Clock), "time.perf_counter is replaced before PyTorch is imported"
    results = {}
    for name, function in SCENES.items():
        try:
            results[name] = (*function(clock), "")
        except Exception:  # noqa: BLE001 - each scene is a test
            results[name] = ({}, {}, traceback.format_exc())
    sys.stdout.write(json.dumps(results))
