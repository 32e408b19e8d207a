"""An exporter that another thread starts and closes while one trains: nothing is raised into the training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import REGIMES, STEPS, each_regime
from tests.support.models import batch
from tests.support.scrape import OFF, errors, value
from tests.support.torch_hooks import all_hooks
from torch_grad_exporter import Exporter, start_exporter

ROUNDS = 60
MOMENTS = ("cleared", "forward", "backward", "step")


@pytest.fixture(name="other")
def _other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def reference() -> list[torch.Tensor]:
    """Return the parameters after the rounds without an exporter."""
    torch.manual_seed(1)
    loop = RecordedLoop()
    for _ in range(ROUNDS):
        loop.step()
    return [parameter.detach() for parameter in loop.model.parameters()]


@pytest.mark.slow
@each_regime
@pytest.mark.parametrize("started", MOMENTS)
@pytest.mark.parametrize("closed", MOMENTS)
def test_at_each_moment_of_a_round(started: str, closed: str, regime: str, other: ThreadPoolExecutor) -> None:
    """Started at one moment of a round and closed at another one, it changes no parameter and leaves no hook."""
    expected = reference()
    torch.manual_seed(1)
    loop = RecordedLoop()
    before = all_hooks(loop.model, loop.optimizer)
    exporters: list[Exporter] = []

    def start() -> None:
        exporters.append(start_exporter(loop.model, port=None, collectors=OFF, **REGIMES[regime]))

    def at(moment: str, number: int) -> None:
        if moment == started and number == 10:
            other.submit(start).result()
        if moment == closed and number == 40:
            other.submit(exporters[0].close).result()

    for number in range(ROUNDS):
        loop.optimizer.zero_grad()
        at("cleared", number)
        loss = loop.model(batch()).square().mean()
        at("forward", number)
        loss.backward()
        at("backward", number)
        loop.take()
        at("step", number)
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), expected, strict=True))
    assert all_hooks(loop.model, loop.optimizer) == before
    assert errors(exporters[0]) == {}
    # The rounds in which it came and went may count or not.
    assert 29 <= (value(exporters[0], STEPS, optimizer="SGD") or 0) <= 31


@pytest.mark.slow
@each_regime
def test_again_and_again(regime: str) -> None:
    """Twenty exporters, one after the other, while the training never waits."""
    loop, over = RecordedLoop(), threading.Event()
    before = all_hooks(loop.model, loop.optimizer)
    failed: list[dict[str, float]] = []

    def start_and_close() -> None:
        try:
            for _ in range(20):
                exporter = start_exporter(loop.model, port=None, collectors=OFF, **REGIMES[regime])
                exporter.close()
                failed.append(errors(exporter))
        finally:
            over.set()

    thread = threading.Thread(target=start_and_close)
    thread.start()
    while not over.is_set():
        loop.step()
    thread.join()
    assert failed == [{}] * 20
    assert all_hooks(loop.model, loop.optimizer) == before
