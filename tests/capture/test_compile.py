"""Under `torch.compile` the exporter adds no graph break and no compilation; `tests/matrix/compiled.py` has the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import get_compilation_metrics

from tests.capture.scenes import Loop, reads_after_backward, watching
from tests.matrix.compiled import EAGER, compilations, dynamo
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter

STEPS = 20


@pytest.fixture
def scene() -> Iterator[None]:
    """Start with nothing compiled, and let nothing be compiled a second time."""
    with dynamo(), torch._dynamo.config.patch(error_on_recompile=True):
        yield


def root(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile the model itself."""
    compiled = torch.compile(model, backend=EAGER)

    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = compiled(x).square().mean()
        loss.backward()
        return loss.detach()

    return backward


def parent(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile a function that calls the model, with the model's hooks."""
    compiled = torch.compile(lambda x: model(x).square().mean(), backend=EAGER, fullgraph=True)

    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = compiled(x)
        loss.backward()
        return loss.detach()

    return backward


def forward_and_backward(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile a function that runs forward and backward."""

    @torch.compile(backend=EAGER)
    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return backward


def steps(backward: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, count: int = STEPS) -> None:
    """Train."""
    for _ in range(count):
        optimizer.zero_grad()
        backward(batch())
        optimizer.step()


def frames_of_ours() -> list[str]:
    """Return the functions of the exporter that dynamo compiled."""
    return [str(metrics.co_name) for metrics in get_compilation_metrics() if "torch_grad_exporter" in (metrics.co_filename or "")]


@pytest.mark.slow
@pytest.mark.usefixtures("scene")
@pytest.mark.parametrize("compiled", [root, pytest.param(parent, marks=pytest.mark.full), forward_and_backward])
def test_sampling_compiles_nothing_more(compiled: Callable[..., Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Hooks that come and go, and exporters, cost no graph, no break and no recompilation, and are not compiled."""
    model = Perceptron()
    optimizer, backward = sgd(model), compiled(model)
    steps(backward, optimizer, 3)
    expected = compilations()
    for _ in range(2):
        with start_exporter(model, port=None, every=1) as exporter:
            steps(backward, optimizer, 4)
            assert errors(exporter) == {}
        steps(backward, optimizer, 2)
    assert compilations() == expected
    torch.compiler.reset()
    model = Perceptron()
    with start_exporter(model, port=None, every=4, moments=True, weights=True) as exporter:
        steps(compiled(model), sgd(model))
        assert {name: count - expected[name] for name, count in compilations().items()} == expected
        assert frames_of_ours() == []
        assert errors(exporter) == {}
        assert reads_after_backward(exporter)
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == STEPS


@pytest.mark.slow
def test_counted_rounds_compile_nothing_more() -> None:
    """A model with a compiled part is compiled once, though rounds are sampled and counted in turn."""
    with dynamo():
        loop = Loop()
        loop.model.first = torch.compile(loop.model.first, backend=EAGER)
        with watching(loop.model, every=64, overhead_budget=0.0001) as exporter:
            loop.until_counted(exporter)
            for _ in range(128):
                loop.step()
            assert value(exporter, "torch_train_steps_total", optimizer="SGD") == loop.steps
        assert compilations()["graphs"] == 1
