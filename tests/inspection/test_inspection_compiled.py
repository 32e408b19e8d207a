"""Under `torch.compile` activations and times of layers add no graph break and no compilation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.matrix.compiled import EAGER, compilations, dynamo
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, key, values
from torch_grad_exporter import start_exporter

Step = Callable[[torch.Tensor], torch.Tensor]


class Two(nn.Module):
    """Two blocks, of which one may be compiled on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block: nn.Module = Perceptron()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def whole(model: Two) -> Step:
    """Compile the model; the exporter has the original."""
    return torch.compile(model, backend=EAGER)


def a_block(model: Two) -> Step:
    """Replace a block by its compiled form."""
    model.block = torch.compile(model.block, backend=EAGER)
    return model


def a_function_around(model: Two) -> Step:
    """Compile a function that calls the model."""
    return torch.compile(lambda x: model(x) * 1, backend=EAGER)


def a_function_inside(model: Two) -> Step:
    """Compile a function within the model's forward, which shows only when it runs."""
    block = model.block
    inner = torch.compile(lambda x: block(x) * 1, backend=EAGER)
    model.forward = lambda x: model.head(inner(x))  # type: ignore[method-assign]
    return model


@pytest.fixture(autouse=True)
def scene() -> Iterator[None]:
    """Forget what was compiled, and let nothing be compiled a second time."""
    with dynamo(), torch._dynamo.config.patch(error_on_recompile=True):
        yield


WAYS = [whole, a_block, a_function_around, a_function_inside]
METRICS = {"activations": "torch_activation_rms", "layer_times": "torch_layer_seconds_total"}


def train(step: Step, optimizer: torch.optim.Optimizer) -> None:
    """Take eight steps."""
    for _ in range(8):
        optimizer.zero_grad()
        step(batch()).square().mean().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", WAYS)
def test_nothing_is_compiled_again(compiled: Callable[[Two], Step], caplog: pytest.LogCaptureFixture) -> None:
    """With both options as much is compiled as without; compiled modules are absent, counted and logged."""
    counts, shown = [], {}
    for options in ({}, dict.fromkeys(METRICS, True)):
        torch.compiler.reset()
        before = compilations()
        torch.manual_seed(0)
        model = Two()
        optimizer = sgd(model)
        with start_exporter(model, None, every=1, **options) if options else contextlib.nullcontext() as exporter:
            train(compiled(model), optimizer)
            if exporter is not None:
                assert errors(exporter) == {}
                shown = values(exporter)
        counts.append({name: count - before[name] for name, count in compilations().items()})
    assert counts[0] == counts[1]
    for metric in METRICS.values():
        layers = {dict(labels)["layer"] for name, labels in shown if name == metric}
        assert layers == (set() if compiled in (whole, a_function_around) else {"head"})
    if compiled is a_block:
        assert shown[key("torch_activation_modules_left_out", reason="compiled")] == 2
        for text in ("activations of 2 modules are not shown", "2 layers are not timed"):
            assert sum(f"{text}, since they are compiled" in record.message for record in caplog.records) == 1
