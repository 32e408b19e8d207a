"""Parameters whose data get another shape in place: training goes on as without an exporter."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.scrape import OFF, errors
from torch_grad_exporter import start_exporter

ROUNDS = 30


class Layers(nn.Sequential):
    """Two layers whose hidden width may change."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    def widen(self, width: int) -> None:
        """Puts other data into the same parameters."""
        self[0].weight.data, self[0].bias.data = 0.1 * torch.randn(width, 6), torch.zeros(width)
        self[2].weight.data = 0.1 * torch.randn(3, width)


Event = Callable[[Layers, int], None]


def grows(model: Layers, step: int) -> None:
    """Widen between step and forward, in rounds that are sampled and in others."""
    if step % 7 == 3:
        model.widen(5 + step)


def gathers(model: Layers, _step: int) -> None:
    """Keep nothing between steps; what is needed comes before each layer's forward, as under ZeRO-3."""
    for layer in (model[0], model[2]):
        kept = {parameter: parameter.data for parameter in layer.parameters()}

        def gather(_layer: nn.Module, _inputs: object, kept: dict[nn.Parameter, torch.Tensor] = kept) -> None:
            for parameter, data in kept.items():
                parameter.data = data

        handle = layer.register_forward_pre_hook(gather)
        weakref.finalize(kept[layer.weight], handle.remove)
        for parameter in layer.parameters():
            parameter.data = torch.empty(0)
        model.gathering.append(handle)


def freezes_and_widens(model: Layers, step: int) -> None:
    """Freeze a layer for a while and thaw it with another width."""
    frozen = 8 <= step < 20
    for layer in (model[0], model[2]):
        layer.requires_grad_(True)
    model[0].requires_grad_(not frozen)
    if step == 20:
        model.widen(9)


@functools.cache
def trained(event: Event, every: int | None) -> list[torch.Tensor]:
    """Return the parameters after training. `every`: with an exporter."""
    torch.manual_seed(0)
    model = Layers()
    model.gathering = []

    def backward() -> None:
        model(torch.randn(4, 6)).square().mean().backward()

    def run() -> None:
        for step in range(ROUNDS):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            event(model, step)
            backward()
            while model.gathering:
                model.gathering.pop().remove()
            if step != 9:
                optimizer.step()
            optimizer.zero_grad()

    if every is None:
        run()
    else:
        with start_exporter(model, port=None, every=every, collectors=OFF) as exporter:
            run()
            assert errors(exporter) == {}
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("event", [grows, gathers, freezes_and_widens])
def test_training_is_unchanged(event: Event, every: int) -> None:
    """Training, in which a step is skipped, is the same in every bit, whichever rounds are sampled."""
    assert all(map(torch.equal, trained(event, every), trained(event, None)))


def test_a_skipped_step_keeps_nothing_alive() -> None:
    """After a skipped step, and one more sample, a parameter that is replaced is freed by the next step."""
    model = Layers()
    with start_exporter(model, port=None, every=100, collectors=OFF):
        for step in range(30):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            model(torch.randn(4, 6)).square().mean().backward()
            if step != 15:
                optimizer.step()
            optimizer.zero_grad()
        gone = weakref.ref(model[0].weight)
        model[0] = nn.Linear(6, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        del optimizer
        gc.collect()
        assert gone() is None
