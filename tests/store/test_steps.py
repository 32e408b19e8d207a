"""Steps between scrapes: each scrape has all up to it and none twice, and records without room are counted."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time

import pytest
import torch

from tests.support.loops import PlainLoop
from tests.support.models import batch
from tests.support.scrape import OFF, Key, errors, key, value, values
from torch_grad_exporter import Exporter, start_exporter

DURATION = "torch_train_step_duration_seconds"
STEPS = "torch_train_steps_total"


def started(loop: PlainLoop, every: int = 4096) -> Exporter:
    """Return an exporter that only counts most rounds."""
    return start_exporter(loop.model, None, every=every, overhead_budget=0.0001, collectors=OFF)


def test_each_scrape_has_all_steps_up_to_it() -> None:
    """Between any numbers of steps, evaluations and reports of the loop, no duration is missing, and none is there twice."""
    chance, loop = random.Random(0), PlainLoop()
    with started(loop) as exporter:
        before = time.perf_counter()
        loop.step()
        first, last = time.perf_counter(), 0.0
        for _ in range(200):
            loop.step()
        for _ in range(40):
            for _ in range(chance.choice([0, 1, 1, 2, 7, 40])):
                loop.step()
            if chance.random() < 0.1:
                with torch.no_grad():
                    loop.model.eval()(batch())
                loop.model.train()
            found = values(exporter)
            assert (found[key(f"{DURATION}_count")], found[key(STEPS, optimizer="SGD")]) == (loop.steps - 1, loop.steps)
            assert last <= found[key(f"{DURATION}_sum")] <= time.perf_counter() - before
            last = found[key(f"{DURATION}_sum")]
        loop.step()
        assert (value(exporter, f"{DURATION}_sum") or 0.0) >= last
        now = time.perf_counter()
        loop.step()
        assert (value(exporter, f"{DURATION}_sum") or 0.0) >= now - first
        assert errors(exporter) == {}


@pytest.mark.slow
def test_scrapes_on_threads_beside_a_training() -> None:
    """Scrapes on three threads beside a training never see a total fall, and lose or repeat no step and no sample."""
    loop, over = PlainLoop(), threading.Event()
    wrong: list[object] = []

    def scrape() -> None:
        before: dict[Key, float] = {}
        while not over.is_set():
            with contextlib.suppress(TimeoutError):  # where a busy machine lets the others wait
                found = values(exporter)
                fallen = {k: (found.get(k), v) for k, v in before.items() if found.get(k, 0.0) < v}
                wrong.extend(fallen.items())
                before = {k: v for k, v in found.items() if k[0].startswith("torch_") and k[0].endswith(("_total", "_count"))}

    with started(loop, every=5) as exporter:
        threads = [threading.Thread(target=scrape) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            loop.step()
            exporter.observe(tokens=1)
        over.set()
        for thread in threads:
            thread.join()
        found = values(exporter)
        assert found[key(STEPS, optimizer="SGD")] == found[key("torch_train_tokens_total")] == loop.steps
        assert found[key(f"{DURATION}_count")] == loop.steps - 1
        assert found[key("torch_grad_exporter_captures_total")] == found[key("torch_grad_captures_total", layer="first")]
        assert errors(exporter) == {}
    assert wrong == []


def test_records_without_room_are_counted() -> None:
    """Where the training leaves other threads no time, what the exporter has no room for counts as its failures, each."""
    loop, observed = PlainLoop(), 0
    with started(loop) as exporter:
        before = sys.getswitchinterval()
        for more in (10_000, 15_000):
            sys.setswitchinterval(1000)
            try:
                for _ in range(more):
                    exporter.observe(samples=1)
            finally:
                sys.setswitchinterval(before)
            observed += more
            kept = value(exporter, "torch_train_samples_total") or 0.0
            lost = errors(exporter).get("worker", 0.0)
            assert kept + lost == observed
        assert lost > 0


def test_a_signal_handler_may_scrape() -> None:
    """A handler that asks for values while its own thread reads them hangs nothing and changes no total."""
    loop, asked = PlainLoop(), [0]

    def handler(*_: object) -> None:
        asked[0] += 1
        with contextlib.suppress(TimeoutError):
            exporter.values("torch_train_tokens_total")

    with started(loop, every=1) as exporter:
        before = signal.signal(signal.SIGALRM, handler)
        try:
            for number in range(20):
                for _ in range(200):
                    exporter.observe(tokens=1)
                loop.step()
                signal.setitimer(signal.ITIMER_REAL, 0.0001 * (number % 10 + 1))
                with contextlib.suppress(TimeoutError):
                    exporter.values()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert asked[0] > 0
        assert value(exporter, "torch_train_tokens_total") == 4000
        assert value(exporter, "torch_grad_captures_total", layer="first") == 20
