"""Whose an optimizer is: asked from any thread, answered without changing anything, right after models or optimizers change."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from tests.support.tools import PATIENCE
from torch_grad_exporter import start_exporter
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers


def made(model: nn.Module) -> tuple[LayerIndex, Optimizers]:
    """The index and the optimizers of a model."""
    index = LayerIndex({"": model})
    return index, Optimizers(index)


def state(one: object) -> dict[str, Any]:
    """Its attributes but for the memory of answers, with copies of what could be changed in place."""
    found = {name: kept for name, kept in vars(one).items() if name not in ("_answers", "_index", "_models", "_filter", "replicas")}
    return {name: copy.copy(kept) if isinstance(kept, list | dict | set) else kept for name, kept in found.items()}


def test_an_optimizer_of_another_model_changes_nothing() -> None:
    """Asking for, and numbering, an optimizer that owns nothing of the model leaves numbers, names and the index as they were."""
    model, other = Perceptron(), sgd(Perceptron())
    index, optimizers = made(model)
    own = sgd(model)
    assert optimizers.number(own) == 0
    model.third = nn.Linear(2, 2)  # not seen yet: refreshing the index would find it
    before = state(optimizers), state(index)
    for _ in range(2):
        assert not optimizers.concerns(other)
        assert optimizers.number(other) is None
        assert optimizers.number(other, within_backward=True) is None
        assert optimizers.concerns(own)
    assert (state(optimizers), state(index)) == before


def test_asking_numbers_nothing() -> None:
    """`concerns` of an optimizer of the model says so without giving it a number or a name."""
    model = Perceptron()
    index, optimizers = made(model)
    before = state(optimizers), state(index)
    assert optimizers.concerns(sgd(model))
    assert (state(optimizers), state(index)) == before
    assert optimizers.names == []


def test_parameters_that_came_since_are_known() -> None:
    """An optimizer of a module that was added after the last look at the model concerns it, and is numbered."""
    model = Perceptron()
    index, optimizers = made(model)
    model.adapter = nn.Linear(2, 2)
    adapter = sgd(model.adapter)
    tracked = index.table
    assert optimizers.concerns(adapter)
    assert index.table is tracked
    assert optimizers.number(adapter) == 0
    assert len(index.table.tracked) == len(tracked.tracked) + 2


def test_an_answer_ends_with_the_table() -> None:
    """A module that joins the model later brings its optimizer, which was another's before, once the index has seen it."""
    model, adapter = Perceptron(), nn.Linear(2, 2)
    index, optimizers = made(model)
    optimizer = sgd(adapter)
    assert not optimizers.concerns(optimizer)
    model.adapter = adapter
    index.refresh()
    assert optimizers.concerns(optimizer)
    adapter.requires_grad_(requires_grad=False)
    index.refresh()
    assert not optimizers.concerns(optimizer)


def test_an_answer_ends_with_the_optimizers_groups() -> None:
    """An optimizer that gets parameters of the model, in a new group or in the place of others, concerns it from then on."""

    def grow(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer.add_param_group({"params": list(model.parameters())})

    def append(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer.param_groups[0]["params"].append(next(model.parameters()))

    def replace(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer.param_groups[0]["params"] = list(model.parameters())

    def exchange(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer.param_groups[0]["params"][:] = list(model.parameters())

    ways: list[Callable[[torch.optim.Optimizer, nn.Module], None]] = [grow, append, replace, exchange]
    for way in ways:
        model = Perceptron()
        _, optimizers = made(model)
        optimizer = sgd(Perceptron())
        assert not optimizers.concerns(optimizer)
        way(optimizer, model)
        assert optimizers.concerns(optimizer), way.__name__
        assert optimizers.number(optimizer) == 0


def test_copies_in_another_type_concern_the_model() -> None:
    """The optimizer of a half-precision model's master weights is the model's; one of a model of other shapes is not."""
    model = Perceptron().half()
    _, optimizers = made(model)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    others = [p.flatten() for p in masters]
    assert optimizers.concerns(torch.optim.SGD(masters))
    assert not optimizers.concerns(torch.optim.SGD([p.detach().requires_grad_() for p in others]))


def test_a_tool_of_another_optimizer_has_no_number() -> None:
    """One that steps within the step of an optimizer that owns all it owns is its tool, and remains so."""
    model = Perceptron()
    _, optimizers = made(model)
    outer, inner = sgd(model), sgd(model.first)
    number = optimizers.number(outer)
    assert number is not None
    assert optimizers.number(inner, inside=frozenset({number})) is None
    assert optimizers.number(inner) is None
    assert optimizers.number(sgd(model.first)) == 1


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


def test_threads_ask_while_the_model_changes() -> None:
    """Threads that ask all the time get right answers while the training thread freezes, adds and numbers."""
    model = Perceptron()
    index, optimizers = made(model)
    own = sgd(model)
    over = threading.Event()
    asked = [threading.Event() for _ in range(3)]

    def ask(number: int) -> set[tuple[bool, bool]]:
        other, found = sgd(Perceptron()), set()
        while not over.is_set():
            found.add((optimizers.concerns(own), optimizers.concerns(other)))
            found.add((True, optimizers.concerns(sgd(Perceptron()))))
            asked[number].set()
        return found

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, number) for number in range(3)]
        try:
            for change in range(60):
                model.second.requires_grad_(requires_grad=change % 2 == 0)
                model.add_module(f"adapter{change}", nn.Linear(2, 2))
                index.refresh()
                new = sgd(getattr(model, f"adapter{change}"))
                assert optimizers.number(new) is not None
                assert answers[change % 3].done() or asked[change % 3].wait(PATIENCE)
                asked[change % 3].clear()
        finally:
            over.set()
        assert set().union(*(answer.result(PATIENCE) for answer in answers)) == {(True, False)}


def test_two_trainings_in_two_threads() -> None:
    """Two models that are trained in two threads, with an exporter each, count their own steps and nothing else."""
    steps = {"first": 300, "second": 190}
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


def test_a_named_optimizer_that_steps_wraps_no_other_one() -> None:
    """Another optimizer over the same parameters has steps, and a name, of its own."""
    model = Perceptron()
    first, second = sgd(model), sgd(model)
    with start_exporter(model, port=None, every=1, optimizers={"main": first}) as exporter:
        for optimizer in (first, first, second):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        assert value(exporter, "torch_train_steps_total", optimizer="main") == 2
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 1
