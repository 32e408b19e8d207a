"""A small model in training with its exporter, for tests of what the exporter does to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.capture.scenes import reads_after_backward, whole
from tests.support.models import batch, sgd
from tests.support.scrape import errors, key, value, values
from torch_grad_exporter import Exporter, start_exporter


def build() -> torch.nn.Sequential:
    """Return a model of torch's own modules, with buffers, so that it loads anywhere."""
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def by_root(model: torch.nn.Sequential, x: torch.Tensor) -> None:
    """Run a backward through the model's output."""
    model(x).square().mean().backward()


def by_parts(model: torch.nn.Sequential, x: torch.Tensor) -> None:
    """Run a backward that goes around the model's output."""
    for part in model:
        x = part(x)
    x.square().mean().backward()


def by_hand(model: torch.nn.Sequential, x: torch.Tensor) -> None:
    """Set gradients without a backward of the model."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


WAYS: dict[str, Callable[[torch.nn.Sequential, torch.Tensor], None]] = {"root": by_root, "parts": by_parts, "by_user": by_hand}
"""Ways to get gradients, each of which is seen in another way."""


@dataclass
class Attached:
    """A model in training, in one of the ways, with its exporter."""

    way: str
    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer
    exporter: Exporter

    def step(self, x: torch.Tensor | None = None) -> float:
        """Train once; return the float64 norm of the gradients."""
        self.optimizer.zero_grad()
        WAYS[self.way](self.model, batch() if x is None else x)
        expected = whole(self.model)
        self.optimizer.step()
        return expected

    def counted(self) -> dict[object, float]:
        """Return everything that is counted, but for times."""
        ours = ("torch_train_", "torch_grad_")
        return {
            k: v
            for k, v in values(self.exporter).items()
            if k[0].startswith(ours) and k[0].endswith(("_total", "_count")) and "_seconds" not in k[0]
        }

    def goes_on(self) -> None:
        """Assert that the next two steps are seen in the same way, counted once and shown with the right norm."""
        for _ in range(2):
            before = self.counted()
            expected = self.step()
            assert value(self.exporter, "torch_grad_global_norm") == pytest.approx(expected, rel=1e-5)
            for name in (key("torch_train_steps_total", optimizer="SGD"), key("torch_grad_captures_total", layer="0")):
                assert self.counted()[name] == before[name] + 1
        assert reads_after_backward(self.exporter) == (self.way != "by_user")
        assert errors(self.exporter) == {}


def attach(way: str, port: int | None = None, **options: object) -> Attached:
    """Return a model after six steps, which are enough to know how gradients come."""
    torch.manual_seed(0)
    model = build()
    exporter = start_exporter(model, port, **{"every": 1, "addr": "127.0.0.1", **options})
    attached = Attached(way, model, sgd(model), exporter)
    for _ in range(6):
        attached.step()
    assert reads_after_backward(exporter) == (way != "by_user")
    return attached


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether two models have the same state, to the last bit."""
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)
