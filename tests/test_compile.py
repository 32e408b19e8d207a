"""Under `torch.compile` the exporter adds no graph break and no recompilation, and its numbers stay right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from record import norm
from scrape import errors, key, mode, value, values
from torch._dynamo.utils import counters

from torch_grad_exporter import start_exporter

STEPS = 8


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """What was compiled before does not count."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model() -> torch.nn.Sequential:
    """The same small model every time."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def train(compiled: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> tuple[float, dict[str, int]]:
    """Trains; the norm of the last gradient in float64, and what dynamo counted."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        compiled(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
    counted = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "recompiles": sum(counters["recompiles"].values()),
    }
    return norm(p.grad.double() for p in parameters if p.grad is not None), counted


@pytest.mark.parametrize("start", ["before", "after", "on the compiled module"])
def test_compile_is_not_disturbed(start: str) -> None:
    """Whether the exporter is started before compiling, after it or on its result: the same graphs, the right norm."""
    plain = model()
    _, expected = train(torch.compile(plain, backend="aot_eager"), list(plain.parameters()))
    torch._dynamo.reset()
    counters.clear()
    watched = model()
    parameters = list(watched.parameters())
    if start == "before":
        exporter = start_exporter(watched, port=None, every=1)
        compiled = torch.compile(watched, backend="aot_eager")
    else:
        compiled = torch.compile(watched, backend="aot_eager")
        exporter = start_exporter(watched if start == "after" else compiled, port=None, every=1)
    with exporter:
        last, counted = train(compiled, parameters)
        assert counted == expected
        assert counted["breaks"] == 0
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(last, rel=1e-5)
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == STEPS
        # Hooks on a module that is compiled are traced away; its backwards are seen at the parameters.
        assert mode(exporter) == ("output" if start == "on the compiled module" else "parameter")
        assert values(exporter)[key("torch_grad_captures_total", layer="0")] >= STEPS - 2
        assert errors(exporter) == {}
