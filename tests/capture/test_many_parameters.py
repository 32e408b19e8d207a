"""What the exporter does for each parameter, counted: with thousands of them that is what it costs.

Counted are calls, of functions and of built-ins, from lines of Python, and objects that the garbage collector visits. A pass over
all parameters that runs within a built-in, such as `map`, counts as one call.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import pytest
import torch

from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.lifecycle import BackgroundThread

SIZES = 200, 700
"""Layers, of two parameters each, of two models: what one takes beyond the other is linear in the parameters."""

OBJECTS = 50
"""Objects after which the garbage collector comes, in these tests."""


class Many(torch.nn.Module):
    """Many small layers, each a module of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One layer after the other."""
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Training:
    """A model with its optimizer, which has stepped before."""

    def __init__(self, layers: int) -> None:
        self.model = Many(layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.step()

    def step(self) -> None:
        """An ordinary training step."""
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).square().mean().backward()
        self.optimizer.step()

    def start(self) -> Exporter:
        """An exporter that samples each round."""
        off = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container"), False)
        return start_exporter(self.model, port=None, every=1, optimizers=self.optimizer, collectors=off)


@dataclass(frozen=True, slots=True)
class Work:
    """What was counted. `objects`: that were new, and not gone when `OBJECTS` of them were."""

    calls: float
    objects: float

    def beyond(self, other: Work, parts: int = 1) -> Work:
        """What is more than in another, for each of so many parts."""
        return Work((self.calls - other.calls) / parts, (self.objects - other.objects) / parts)


@contextlib.contextmanager
def often_collected(passed: Callable[[], object]) -> Iterator[None]:
    """The garbage collector comes each `OBJECTS` objects, and visits the youngest of them only."""

    def collected(phase: str, _info: object) -> None:
        if phase == "stop":
            passed()

    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(collected)
    gc.set_threshold(OBJECTS, 1_000_000, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)


def counted(action: Callable[[], object]) -> Work:
    """What the calling thread does in an action."""
    calls, passes = itertools.count(), itertools.count()

    def called(_frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            next(calls)

    with often_collected(passes.__next__):
        sys.setprofile(called)
        try:
            action()
        finally:
            sys.setprofile(None)
    return Work(next(calls), OBJECTS * next(passes))


def of_a_run(layers: int) -> dict[str, Work]:
    """What the start, the first step and a later one take, the steps beyond a plain one."""
    training = Training(layers)
    plain = counted(training.step)
    exporters: list[Exporter] = []
    found = {"start": counted(lambda: exporters.append(training.start()))}
    with exporters[0]:
        found |= {name: counted(training.step).beyond(plain) for name in ("first step", "second step", "later step")}
    return found


@pytest.fixture(scope="module")
def for_each() -> dict[str, Work]:
    """The same for each parameter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundThread, "start", lambda _thread: None)  # what they make would count as well, whenever they come
        _, few, many = (of_a_run(layers) for layers in (SIZES[0], *SIZES))
    return {name: many[name].beyond(few[name], 2 * (SIZES[1] - SIZES[0])) for name in many}


BOUNDS = {
    "start": Work(calls=145, objects=7.5),
    "first step": Work(calls=44, objects=3.5),
    "second step": Work(calls=12, objects=0.7),
    "later step": Work(calls=9, objects=0.7),
}
"""Of a plain step 7.7 calls and 1.5 objects for each parameter."""


@pytest.mark.parametrize("what", BOUNDS)
def test_so_much_is_done_for_each_parameter_and_no_more(what: str, for_each: dict[str, Work]) -> None:
    """A start walks through the modules a few times; a sample passes through all parameters, but hardly by lines of Python."""
    assert for_each[what].calls <= BOUNDS[what].calls
    assert for_each[what].objects <= BOUNDS[what].objects


def test_what_is_counted_is_there(for_each: dict[str, Work]) -> None:
    """Each node's hook is called at each sample, so that not nothing is counted."""
    assert for_each["later step"].calls >= 2
