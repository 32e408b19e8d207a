"""A seeded run is the same to the last bit with and without the exporter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.scrape import errors
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.slow

STEPS = 40

Result = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    """Convolution, normalisation, dropout and a tied weight: whatever keeps state or draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.3)
        self.mid = torch.nn.Linear(32, 32)
        self.tied = torch.nn.Linear(32, 32)
        self.tied.weight = self.mid.weight
        self.out = torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.conv(x[:, None])).relu()).flatten(1)
        return self.out(self.tied(self.mid(x).relu()))


def run(kind: str, options: dict[str, Any] | None) -> Result:
    """Return the losses, the final state and the random state of a seeded run."""
    torch.manual_seed(3)
    model = Net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    losses: list[torch.Tensor] = []
    watched = contextlib.nullcontext() if options is None else start_exporter(model, port=None, **options)
    with watched as exporter:
        for step in range(STEPS):
            x = torch.randn(8, 8)
            loss = STEP[kind](model, adam, scaler, x, step)
            losses.append(loss.detach().clone())
            if exporter is not None:
                exporter.observe(loss=loss, tokens=8, epoch=step)
                if step % 20 == 0:
                    assert errors(exporter) == {}
    state = [t.clone() for t in model.state_dict().values()]
    return losses, state, torch.get_rng_state()


def plain(model: Net, optimizer: torch.optim.Optimizer, _scaler: object, x: torch.Tensor, _step: int) -> torch.Tensor:
    """Make a step with clipping."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss


def accumulating(model: Net, optimizer: torch.optim.Optimizer, _scaler: object, x: torch.Tensor, step: int) -> torch.Tensor:
    """Run one of three micro-batches."""
    loss = model(x).square().mean()
    loss.backward()
    if step % 3 == 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loss


def closure(model: Net, optimizer: torch.optim.Optimizer, _scaler: object, x: torch.Tensor, _step: int) -> torch.Tensor:
    """Make a step by a closure."""

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(evaluate)


def amp(model: Net, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: torch.Tensor, step: int) -> torch.Tensor:
    """Make a step in mixed precision, with two overflows in the run."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean() * (torch.inf if step in (10, 30) else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def penalty(model: Net, optimizer: torch.optim.Optimizer, _scaler: object, x: torch.Tensor, _step: int) -> torch.Tensor:
    """Make a step with a gradient penalty."""
    x = x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    optimizer.zero_grad()
    loss = out.square().mean() + slope.square().mean()
    loss.backward()
    optimizer.step()
    return loss


def parts(model: Net, optimizer: torch.optim.Optimizer, _scaler: object, x: torch.Tensor, _step: int) -> torch.Tensor:
    """Make a step that never calls the root."""
    optimizer.zero_grad()
    loss = model.out(model.mid(x.repeat(1, 4)).relu()).square().mean()
    loss.backward()
    optimizer.step()
    return loss


STEP: dict[str, Callable[..., torch.Tensor]] = {
    "plain": plain,
    "accumulating": accumulating,
    "closure": closure,
    "amp": amp,
    "penalty": penalty,
    "parts": parts,
}


@pytest.mark.parametrize("kind", STEP)
@pytest.mark.parametrize(
    "options", [{}, {"every": 1, "moments": True, "weights": True, "dead_window": 5}], ids=["defaults", "everything"]
)
def test_bit_identical(kind: str, options: dict[str, Any]) -> None:
    """Losses, parameters, buffers and the random numbers of 40 steps are equal in every bit."""
    losses, state, random = run(kind, None)
    watched_losses, watched_state, watched_random = run(kind, options)
    for step, (a, b) in enumerate(zip(losses, watched_losses, strict=True)):
        assert torch.equal(a, b) or (a.isinf() and b.isinf()), f"step {step}"
    assert all(torch.equal(a, b) for a, b in zip(state, watched_state, strict=True))
    assert torch.equal(random, watched_random)
