"""`observe(grad_divisor=)`: the number by which a loop divides its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.record import gradients_of, norm
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter

NORM = "torch_grad_global_norm"


class Loop:
    """A loop whose gradients are sums over tokens. `whole`: the norm after the last division."""

    def __init__(self) -> None:
        self.model = Perceptron()
        self.optimizer = sgd(self.model)
        self.whole = 0.0

    def backward(self, tokens: float) -> None:
        (self.model(batch()).square().mean() * tokens).backward()

    def divide(self, tokens: float) -> None:
        for parameter in self.model.parameters():
            parameter.grad.div_(tokens)
        self.whole = norm(gradients_of(self.model).values())

    def step(self, tokens: float, told: Callable[[], object] = lambda: None) -> None:
        """Train one step; `told` is called between the backward and the division."""
        self.optimizer.zero_grad()
        self.backward(tokens)
        told()
        self.divide(tokens)
        self.optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_sample_has_the_divisor_of_its_own_round(early: bool) -> None:
    """Where few rounds are sampled, each norm shown is one after the division of its own round."""
    loop, shown, truths = Loop(), set(), set()
    with start_exporter(loop.model, port=None, every=4) as exporter:
        for step in range(24):
            tokens = 50.0 + step

            def tell(tokens: float = tokens) -> None:
                exporter.observe(grad_divisor=tokens)

            if early:
                tell()
            loop.step(tokens, (lambda: None) if early else tell)
            truths.add(f"{loop.whole:.4g}")
            shown.add(f"{value(exporter, NORM):.4g}")
        assert len(shown) >= 4
        assert shown <= truths
        assert not errors(exporter)


def test_a_bad_divisor_is_an_error() -> None:
    """A bad divisor is a counted error in any round, raises nothing, and norms are as without it."""
    bad = [0, -1.0, math.nan, math.inf, "12", torch.zeros(()), torch.ones(3)]
    loop = Loop()
    with start_exporter(loop.model, port=None, every=1) as exporter:
        for number, wrong in enumerate(bad, start=1):
            loop.step(1.0)
            exporter.observe(grad_divisor=wrong, tokens=5)  # type: ignore[arg-type]
            loop.step(1.0, lambda wrong=wrong: exporter.observe(grad_divisor=wrong))
            assert errors(exporter) == {"observe": 2 * number}
            assert value(exporter, "torch_train_tokens_total") == 5 * number
            assert value(exporter, NORM) == pytest.approx(loop.whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_skipped_step_leaves_no_divisor(early: bool) -> None:
    """After a skipped step, with divisors before or after the backward, each norm shown has its own divisor."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=1) as exporter:
        absent = 0
        for step in range(16):
            tokens = 50.0 + 7 * step
            loop.optimizer.zero_grad()
            if early:
                exporter.observe(grad_divisor=tokens)
            loop.backward(tokens)
            if not early:
                exporter.observe(grad_divisor=tokens)
            loop.divide(tokens)
            if step in (5, 9, 10):
                continue
            loop.optimizer.step()
            shown = value(exporter, NORM)
            assert shown is None or shown == pytest.approx(loop.whole, rel=1e-5)
            absent += shown is None
        assert absent <= (2 if early else 0)
        assert not errors(exporter)
