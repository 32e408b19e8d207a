"""Windows of conditions hold every sample of the gradients, however many a second, compared with float64 over all steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.capture.scenes import watching
from tests.support.models import Perceptron, batch, sgd
from tests.support.record import gradients_of, norm
from tests.support.tools import eventually
from torch_grad_exporter import Exporter
from torch_grad_exporter.actions import Measurements
from torch_grad_exporter.lifecycle import BackgroundLoop

NORM, LAYER_NORM = "torch_grad_global_norm", "torch_grad_norm"
STEPS = 250


class Judged:
    """A condition that never holds and keeps what it reads. `reads`: by name."""

    def __init__(self, exporter: Exporter, **reads: Callable[[Measurements], float]) -> None:
        self._reads = reads
        self.found: list[dict[str, float]] = []
        exporter.on(self.holds, lambda _event: None)

    def holds(self, m: Measurements) -> bool:
        """Keep what is read now."""
        self.found.append({name: read(m) for name, read in self._reads.items()})
        return False

    def next(self, more: int = 1) -> dict[str, float]:
        """Return what the condition reads at an evaluation that begins from now on."""
        before = len(self.found)
        assert eventually(lambda: len(self.found) > before + more)
        return self.found[-1]


class Recorded:
    """A training that keeps the float64 norms of all of its steps."""

    def __init__(self) -> None:
        self.model = Perceptron()
        self.optimizer = sgd(self.model)
        self.norms: list[float] = []
        self.of_first: list[float] = []

    def step(self, spike: float = 1.0) -> None:
        """Train one step, with a loss that is this many times as large."""
        self.optimizer.zero_grad()
        (self.model(batch()).square().mean() * spike).backward()
        self.norms.append(norm(gradients_of(self.model).values()))
        self.of_first.append(norm(p.grad.double() for p in self.model.first.parameters()))
        self.optimizer.step()


@pytest.mark.slow
def test_a_window_holds_the_last_samples() -> None:
    """In a fast loop `samples=100` are the last 100 sampled steps, of the run and of a layer."""
    training = Recorded()
    with watching(training.model) as exporter:
        training.step()
        judged = Judged(
            exporter,
            mean=lambda m: m.mean(NORM, samples=100),
            largest=lambda m: m.max(NORM, samples=100),
            smallest=lambda m: m.min(NORM, samples=100),
            growth=lambda m: m.increase("torch_grad_captures_total", samples=100, layer="first"),
            of_layer=lambda m: m.mean(LAYER_NORM, samples=100, layer="first"),
            longer=lambda m: m.mean(NORM, samples=10 * STEPS),
        )
        judged.next()
        for _ in range(STEPS):
            training.step()
        seen = judged.next()
        last = np.array(training.norms[-100:], dtype=np.float64)
        assert math.isnan(seen.pop("longer"))
        expected = {
            "mean": last.mean(),
            "largest": last.max(),
            "smallest": last.min(),
            "growth": 100.0,
            "of_layer": np.mean(training.of_first[-100:]),
        }
        assert seen == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_no_sample_escapes_a_window_in_seconds() -> None:
    """One step with a norm of 1,000 times the others is the largest value of a window in seconds."""
    training = Recorded()
    with watching(training.model) as exporter:
        training.step()
        judged = Judged(exporter, largest=lambda m: m.max(NORM, seconds=1))
        judged.next(2)
        for step in range(STEPS):
            training.step(1000.0 if step == STEPS // 2 else 1.0)
        peak = training.norms[1 + STEPS // 2]
        assert eventually(lambda: any(one["largest"] == pytest.approx(peak, rel=1e-5) for one in judged.found))


@pytest.mark.slow
def test_two_optimizers_have_windows_of_their_own() -> None:
    """A sample of one optimizer is none of another that steps less often."""
    model = Perceptron()
    often, rarely = (torch.optim.SGD(part.parameters(), lr=0.05) for part in (model.first, model.second))
    norms: list[float] = []
    with watching(model) as exporter:

        def step(*optimizers: torch.optim.Optimizer) -> None:
            model.zero_grad()
            model(batch()).square().mean().backward()
            if rarely in optimizers:
                norms.append(norm(p.grad.double() for p in model.second.parameters()))
            for optimizer in optimizers:
                optimizer.step()

        for _ in range(8):
            step(often, rarely)
        judged = Judged(exporter, mean=lambda m: m.mean(LAYER_NORM, samples=10, layer="second"))
        judged.next()
        for _ in range(20):
            for _ in range(3):
                step(often)
            step(often, rarely)
        assert judged.next()["mean"] == pytest.approx(np.mean(norms[-10:]), rel=1e-5)


@pytest.mark.slow
def test_observed_norms_are_values_of_a_window() -> None:
    """Where `observe` gives the norm and hardly a step is sampled, a new norm is a value at the next evaluation."""
    training = Recorded()
    with watching(training.model, every=4096) as exporter:
        training.step()
        exporter.observe(grad_norm=1.0)
        judged = Judged(exporter, mean=lambda m: m.mean(NORM, samples=2))
        assert math.isnan(judged.next()["mean"])
        exporter.observe(grad_norm=3.0)
        assert judged.next()["mean"] == 2.0


@pytest.mark.slow
def test_a_removed_condition_is_not_fed() -> None:
    """After `remove()` training goes on, and a condition that comes later begins with an empty window."""
    training = Recorded()
    with watching(training.model) as exporter:
        training.step()
        seen: list[float] = []
        handle = exporter.on(lambda m: seen.append(m.mean(NORM, samples=50)), lambda _event: None)
        assert eventually(lambda: len(seen) > 1)
        handle.remove()
        for _ in range(STEPS):
            training.step()
        judged = Judged(exporter, mean=lambda m: m.mean(NORM, samples=50))
        assert math.isnan(judged.next()["mean"])
        for _ in range(STEPS):
            training.step()
        assert judged.next()["mean"] == pytest.approx(np.mean(training.norms[-50:]), rel=1e-5)


@pytest.mark.slow
def test_a_condition_after_a_removed_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that judges sleeps while there are no conditions; a new one wakes it, however soon the thread runs then."""
    wake = BackgroundLoop.wake

    def runs_at_once(loop: BackgroundLoop) -> None:
        wake(loop)
        time.sleep(0.1)  # so that the thread wakes up and looks before the call goes on

    with watching(Recorded().model) as exporter:
        handle = exporter.on(lambda _: False, lambda _event: None)
        handle.remove()
        monkeypatch.setattr(BackgroundLoop, "wake", runs_at_once)
        assert Judged(exporter).next(0) == {}
