"""Parameters that are written outside of the optimizer, under a scaler that overflows: a skipped step stays one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import REGIMES, all_regimes, watching
from tests.support.scrape import outcomes

ROUNDS = 24

BEFORE = {"sampled": 4, "counted": 120}
"""Plain rounds before the others, and after them. Under a scaler not all of them need be only counted."""


class Tokens(nn.Module):
    """An embedding, a linear layer and a head with the shape of the embedding."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, max_norm=max_norm)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(tokens)).relu())


Write = Callable[[nn.Module], None]


def nothing(_model: nn.Module) -> None:
    """Write nothing: the embedding does, or nobody."""


@torch.no_grad()
def tie(model: nn.Module) -> None:
    """Copy the embedding into the head."""
    model.head.weight.copy_(model.embedding.weight)


@torch.no_grad()
def clip(model: nn.Module) -> None:
    """Limit the weights."""
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def averaging() -> Write:
    """Return what swaps a moving average in, evaluates the model and swaps it out."""
    averages: list[torch.Tensor] = []

    @torch.no_grad()
    def swap(model: nn.Module) -> None:
        parameters = [*model.parameters()]
        if not averages:
            averages.extend(parameter.clone() for parameter in parameters)
        torch._foreach_lerp_(averages, parameters, 0.1)
        trained = copy.deepcopy(parameters)
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.copy_(average)
        model(torch.arange(11))
        for parameter, before in zip(parameters, trained, strict=True):
            parameter.copy_(before)

    return swap


class Scaled(RecordedLoop):
    """A loop under a gradient scaler. Each fifth loss overflows."""

    def __init__(self, write: Write, max_norm: float | None = None, *, early: bool) -> None:
        super().__init__(Tokens(max_norm))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
        self.write, self.early = write, early

    def round(self, *, overflow: bool) -> None:
        """Train one round, which the scaler skips on an overflow."""
        self.optimizer.zero_grad()
        tokens = torch.randint(11, (7,))
        loss = nn.functional.cross_entropy(self.model(tokens), tokens)
        self.scaler.scale(loss * (math.inf if overflow else 1.0)).backward()
        if self.early:
            self.write(self.model)
        if overflow:
            self.skipped += 1
        else:
            gradients = [p.grad.double() for p in self.model.parameters()]
            self.norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)) / self.scaler.get_scale())
            self.steps += 1
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if not self.early:
            self.write(self.model)

    def plain(self) -> None:
        """Train one round without an overflow."""
        self.round(overflow=False)


WRITES = {
    "nothing": lambda: nothing,
    "max_norm": lambda: nothing,
    "tied": lambda: tie,
    "clipped": lambda: clip,
    "averaged": averaging,
}


def scaled(written: str, *, early: bool = False) -> Scaled:
    """Return a loop by what is written to its parameters."""
    return Scaled(WRITES[written](), 0.5 if written == "max_norm" else None, early=early)


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("written", WRITES)
def test_overflows_before_the_first_step(written: str, given: bool, regime: str) -> None:
    """While a scaler looks for its scale no step is taken, and what is written meanwhile is none."""
    loop = scaled(written)
    with watching(loop.model, **REGIMES[regime], **({"grad_scaler": loop.scaler} if given else {})) as exporter:
        for number in range(15):
            loop.round(overflow=number < 3)
        if regime == "sampled":
            loop.check(exporter)
        loop.check_counts(exporter)
        if given:
            assert outcomes(exporter).keys() <= {"skipped"}
            assert exporter.problems() == []


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["sampled", "counted"])
@pytest.mark.parametrize(
    ("written", "early"),
    [("nothing", False), ("max_norm", False), ("tied", True), ("clipped", False), ("averaged", False)],
)
def test_overflows_now_and_then(written: str, early: bool, regime: str) -> None:
    """Steps and skipped steps are exact and the norm is that of a step, whatever is written to the parameters."""
    loop = scaled(written, early=early)
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for _ in range(BEFORE[regime]):
            loop.plain()
        for number in range(ROUNDS):
            overflow = number % 5 == 3
            loop.round(overflow=overflow)
            if regime == "sampled" and not overflow:
                loop.check(exporter)
        for _ in range(BEFORE[regime]):
            loop.plain()
        loop.check(exporter)
