"""Whatever a loop does between plain steps, counts are the same whether rounds are sampled or only counted."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from tests.capture.scenes import (
    BACKWARDS,
    REGIMES,
    SKIPPED,
    STEPS,
    Loop,
    each_regime,
    watching,
)
from tests.support.models import batch
from tests.support.scrape import outcomes, value
from torch_grad_exporter import Exporter

Counts = tuple[int, int, int]
"""Backwards, steps of the loop's optimizer, and skipped steps."""


class Odd:
    """What may come between plain steps, each as a method that returns what it adds to the counts."""

    def __init__(self, loop: Loop, exporter: Exporter) -> None:
        self.loop, self.exporter = loop, exporter
        self.second = torch.optim.Adam(loop.model.second.parameters())
        self.other = Loop()

    def skipped(self) -> Counts:
        for _ in range(3):
            self.loop.backward()
        return 3, 0, 3

    def longer(self) -> Counts:
        self.loop.backward()
        self.loop.add()
        self.loop.optimizer.step()
        return 2, 1, 0

    def longer_with_zeros(self) -> Counts:
        self.loop.optimizer.zero_grad()
        for _ in range(2):  # gradients that are zero by themselves were not cleared
            (0 * self.loop.model(batch())).sum().backward()
        self.loop.optimizer.step()
        return 2, 1, 0

    def evaluation(self) -> Counts:
        self.loop.model.eval()
        with torch.no_grad():
            self.loop.model(batch())
        self.loop.model.train()
        return 0, 0, 0

    def evaluation_between(self) -> Counts:
        self.loop.optimizer.zero_grad()
        outputs = self.loop.model(batch())
        self.evaluation()
        outputs.sum().backward()
        self.loop.optimizer.step()
        return 1, 1, 0

    def forward_alone(self) -> Counts:
        self.loop.model(batch())
        return 0, 0, 0

    def two_forwards(self) -> Counts:
        self.loop.optimizer.zero_grad()
        (self.loop.model(batch()) + self.loop.model(batch())).sum().backward()
        self.loop.optimizer.step()
        return 1, 1, 0

    def second_derivative(self) -> Counts:
        self.loop.optimizer.zero_grad()
        inputs = batch().requires_grad_()
        (slope,) = torch.autograd.grad(self.loop.model(inputs).square().sum(), inputs, create_graph=True)
        (slope.square().sum() + self.loop.model(inputs).sum()).backward()
        self.loop.optimizer.step()
        return 1, 1, 0

    def kept_graph(self) -> Counts:
        self.loop.optimizer.zero_grad()
        loss = self.loop.model(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        self.loop.optimizer.step()
        return 2, 1, 0

    def step_raises(self) -> Counts:
        self.loop.backward()

        def fails(*_arguments: object) -> None:
            raise ValueError

        handle = self.loop.optimizer.register_step_pre_hook(fails)
        with contextlib.suppress(ValueError):
            self.loop.optimizer.step()
        handle.remove()
        return 1, 0, 1

    def forward_raises(self) -> Counts:
        with contextlib.suppress(RuntimeError):
            self.loop.model(batch(inputs=7))
        return 0, 0, 0

    def second_optimizer(self) -> Counts:
        self.loop.backward()
        self.loop.optimizer.step()
        self.second.step()
        return 1, 1, 0

    def other_model(self) -> Counts:
        self.other.step()
        return 0, 0, 0

    def closure(self) -> Counts:
        def evaluated() -> torch.Tensor:
            self.loop.optimizer.zero_grad()
            loss = self.loop.model(batch()).square().mean()
            loss.backward()
            return loss

        self.loop.optimizer.step(evaluated)
        return 1, 1, 0

    def numbered(self) -> Counts:
        self.loop.backward()
        self.loop.optimizer.step()
        self.exporter.step()
        return 1, 1, 0

    def other_model_within(self) -> Counts:
        self.loop.backward()
        self.other.optimizer.step()
        self.loop.add()
        self.loop.optimizer.step()
        return 2, 1, 0

    def gradient_alone(self) -> Counts:
        self.loop.optimizer.zero_grad()
        torch.autograd.grad(self.loop.model(batch()).sum(), self.loop.model.first.weight)
        return 0, 0, 0

    def layer_without_gradient(self) -> Counts:
        self.loop.optimizer.zero_grad()
        self.loop.model.second(torch.randn(5, 8)).sum().backward()
        self.loop.optimizer.step()
        return 1, 1, 0

    def other_size(self) -> Counts:
        self.loop.backward(3)
        self.loop.optimizer.step()
        return 1, 1, 0


KINDS = [name for name in vars(Odd) if not name.startswith("_")]
SHUFFLED = random.Random(0).sample(KINDS, len(KINDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("regime", "kinds"),
    [
        ("sampled", SHUFFLED),
        ("mixed", SHUFFLED[::2]),
        ("counted", SHUFFLED[1::2]),
        pytest.param("mixed", SHUFFLED[1::2], marks=pytest.mark.full),
        pytest.param("counted", SHUFFLED[::2], marks=pytest.mark.full),
    ],
    ids=["sampled", "mixed", "counted", "mixed again", "counted again"],
)
def test_odd_rounds_are_counted_exactly(regime: str, kinds: list[str]) -> None:
    """Backwards, steps and skipped steps are those of the loop after each kind of oddity, in any order."""
    loop = Loop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        odd = Odd(loop, exporter)
        backwards = steps = skipped = 0
        loop.warm_up(exporter, regime)
        for kind in kinds:
            more = getattr(odd, kind)()
            backwards, steps, skipped = backwards + more[0], steps + more[1], skipped + more[2]
            loop.go_on(regime)
            shown = [value(exporter, BACKWARDS), value(exporter, STEPS, optimizer="SGD"), value(exporter, SKIPPED)]
            assert shown == [backwards + loop.steps, steps + loop.steps, skipped], kind
        assert outcomes(exporter) == {}
        assert value(exporter, STEPS, optimizer="manual") is None


@pytest.mark.slow
@each_regime
def test_a_backward_that_raises_ends_nothing(regime: str) -> None:
    """After a backward that raised in a hook of the user the next steps are counted exactly."""

    def fails(_gradient: torch.Tensor) -> None:
        raise ValueError

    loop = Loop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        handle = loop.model.first.weight.register_hook(fails)
        with contextlib.suppress(ValueError):
            loop.backward()
        handle.remove()
        loop.go_on(regime)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert loop.steps <= value(exporter, BACKWARDS) <= loop.steps + 1
        assert value(exporter, SKIPPED) <= 1
