"""Which optimizers belong to a model: asked from any thread, without changing anything."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from tests.support.tools import PATIENCE
from torch_grad_exporter import start_exporter
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers


def made(model: nn.Module) -> tuple[LayerIndex, Optimizers]:
    """Return the index and the optimizers of a model."""
    index = LayerIndex({"": model})
    return index, Optimizers(index)


def test_an_optimizer_of_another_model_changes_nothing() -> None:
    """Asking for an optimizer of another model leaves the numbers, names and the index as they were."""
    model, other = Perceptron(), sgd(Perceptron())
    index, optimizers = made(model)
    own = sgd(model)
    assert optimizers.concerns(own)
    assert optimizers.names == []
    assert optimizers.number(own) == 0
    model.third = nn.Linear(2, 2)  # refreshing the index would find it
    before = index.table, list(optimizers.names)
    for _ in range(2):
        assert not optimizers.concerns(other)
        assert optimizers.number(other) is None
        assert optimizers.number(other, within_backward=True) is None
        assert optimizers.concerns(own)
    assert (index.table, optimizers.names) == before


def test_copies_in_another_type_concern_the_model() -> None:
    """An optimizer of float32 copies of half-precision weights belongs to the model; one of other shapes does not."""
    model = Perceptron().half()
    _, optimizers = made(model)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    others = [p.flatten() for p in masters]
    assert optimizers.concerns(torch.optim.SGD(masters))
    assert not optimizers.concerns(torch.optim.SGD([p.detach().requires_grad_() for p in others]))


def test_optimizers_are_held_weakly() -> None:
    """Neither a number nor an answer keeps an optimizer alive."""
    model = Perceptron()
    _, optimizers = made(model)
    own, other = sgd(model), sgd(Perceptron())
    assert optimizers.number(own) == 0
    assert not optimizers.concerns(other)
    references = weakref.ref(own), weakref.ref(other)
    del own, other
    gc.collect()
    optimizers.number(sgd(model))  # the last one is remembered weakly as well
    assert [reference() for reference in references] == [None, None]


@pytest.mark.slow
def test_two_trainings_in_two_threads() -> None:
    """Two models trained in two threads with their own exporters count only their own steps."""
    steps = {"first": 100, "second": 60}
    ready = threading.Barrier(len(steps))
    models = {name: Perceptron() for name in steps}
    exporters = {name: start_exporter(model, port=None, every=3, run=name) for name, model in models.items()}

    def train(name: str) -> None:
        optimizer = sgd(models[name])
        ready.wait(PATIENCE)
        for _ in range(steps[name]):
            optimizer.zero_grad()
            models[name](batch()).square().mean().backward()
            optimizer.step()

    with ThreadPoolExecutor(len(steps)) as pool:
        list(pool.map(train, steps))
    for name, exporter in exporters.items():
        with exporter:
            assert value(exporter, "torch_train_steps_total", optimizer="SGD") == steps[name]
            assert value(exporter, "torch_train_backward_passes_total") == steps[name]
            assert value(exporter, "torch_train_skipped_steps_total") == 0
            assert sum(errors(exporter).values()) == 0


def test_two_optimizers_over_the_same_parameters() -> None:
    """Two optimizers over the same parameters have their own steps and names."""
    model = Perceptron()
    first, second = sgd(model), sgd(model)
    with start_exporter(model, port=None, every=1, optimizers={"main": first}) as exporter:
        for optimizer in (first, first, second):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        assert value(exporter, "torch_train_steps_total", optimizer="main") == 2
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 1


def test_groups_that_change_are_followed() -> None:
    """An optimizer that gets parameters of the model later, in any way, belongs to it from then on."""
    ways: list[Callable[[torch.optim.Optimizer, nn.Module], object]] = [
        lambda optimizer, model: optimizer.add_param_group({"params": list(model.parameters())}),
        lambda optimizer, model: optimizer.param_groups[0]["params"].append(next(model.parameters())),
        lambda optimizer, model: optimizer.param_groups[0].update(params=list(model.parameters())),
    ]
    for number, way in enumerate(ways):
        model, optimizer = Perceptron(), sgd(Perceptron())
        _, optimizers = made(model)
        assert not optimizers.concerns(optimizer)
        way(optimizer, model)
        assert optimizers.concerns(optimizer), number
        assert optimizers.number(optimizer) == 0
