"""Under `torch.compile` activations add no graph break and no compilation; what is compiled is absent, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.matrix.compiled import EAGER, compilations, dynamo
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value, values
from torch_grad_exporter import start_exporter

Step = Callable[[torch.Tensor], torch.Tensor]


class Two(nn.Module):
    """Two blocks, of which one may be compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block: nn.Module = Perceptron()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def whole(model: Two) -> Step:
    """The model is compiled, and the exporter has the original."""
    return torch.compile(model, backend=EAGER)


def in_place(model: Two) -> Step:
    """The same by `compile()`."""
    model.compile(backend=EAGER)
    return model


def a_block(model: Two) -> Step:
    """A block is replaced by its compiled form."""
    model.block = torch.compile(model.block, backend=EAGER)
    return model


def a_block_in_place(model: Two) -> Step:
    """The same by `compile()`."""
    model.block.compile(backend=EAGER)
    return model


def a_forward(model: Two) -> Step:
    """The forward of a block is replaced."""
    model.block.forward = torch.compile(model.block.forward, backend=EAGER)  # type: ignore[method-assign]
    return model


def a_function_around(model: Two) -> Step:
    """A function that calls the model."""
    return torch.compile(lambda x: model(x) * 1, backend=EAGER)


def a_function_inside(model: Two) -> Step:
    """A function that the model's forward calls, with a block in it: nothing shows that it is compiled until it runs."""
    block = model.block
    inner = torch.compile(lambda x: block(x) * 1, backend=EAGER)
    model.forward = lambda x: model.head(inner(x))  # type: ignore[method-assign]
    return model


@pytest.fixture(autouse=True)
def scene() -> Iterator[None]:
    """Nothing was compiled before, and nothing may be compiled a second time."""
    with dynamo(), torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("compiled", [whole, in_place, a_block, a_block_in_place, a_forward, a_function_around, a_function_inside])
def test_nothing_is_compiled_anew(compiled: Callable[[Two], Step], every: int) -> None:
    """As many graphs, breaks and compilations as without an exporter, with hooks that come and go."""
    counts, shown = [], {}
    for watched in (False, True):
        torch._dynamo.reset()
        before = compilations()
        torch.manual_seed(0)
        model = Two()
        optimizer = sgd(model)
        if watched:
            with start_exporter(model, None, every=every, activations=True) as exporter:
                train(compiled(model), optimizer)
                assert errors(exporter) == {}
                shown = values(exporter)
        else:
            train(compiled(model), optimizer)
        counts.append({name: count - before[name] for name, count in compilations().items()})
    assert counts[0] == counts[1]
    layers = {dict(labels)["layer"] for name, labels in shown if name == "torch_activation_rms"}
    assert layers == (set() if compiled in (whole, in_place, a_function_around) else {"head"})


def train(step: Step, optimizer: torch.optim.Optimizer) -> None:
    """Twelve steps."""
    for _ in range(12):
        optimizer.zero_grad()
        step(batch()).square().mean().backward()
        optimizer.step()


def test_what_is_compiled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A metric has how many modules are left out, and the log says so once."""
    model = Two()
    step, optimizer = a_block(model), sgd(model)
    with caplog.at_level(logging.WARNING), start_exporter(model, None, every=1, activations=True) as exporter:
        train(step, optimizer)
        assert value(exporter, "torch_activation_modules_left_out", reason="compiled") == 2
    assert [record.message for record in caplog.records].count(
        "torch_grad_exporter: activations of 2 modules are not shown, since they are compiled; a hook in compiled code would "
        "compile it anew"
    ) == 1


def test_a_compiled_model_that_is_watched_itself_is_absent() -> None:
    """Given to `start_exporter` compiled, it has no activations, and starts all the same."""
    model = torch.compile(Two(), backend=EAGER)
    optimizer = sgd(model)
    with start_exporter(model, None, every=1, activations=True) as exporter:
        train(model, optimizer)
        assert value(exporter, "torch_activation_modules_left_out", reason="compiled") == 3
        assert value(exporter, "torch_activation_rms", layer="head") is None
        assert errors(exporter) == {}
