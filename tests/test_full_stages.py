"""Stages that are full or blocked: what does not fit is skipped and counted, and training does not wait."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch

from tests.support.loops import PlainLoop, train
from tests.support.models import Perceptron
from tests.support.scrape import Key, errors, key, lost, value, values
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.errors import LIMIT

STEPS = "torch_train_steps_total"
CAPTURES = "torch_grad_exporter_captures_total"


def watching(model: torch.nn.Module, port: int | None = None, **options: object) -> Exporter:
    """Start an exporter that samples every round and by default serves nothing."""
    return start_exporter(model, port, **{"every": 1, "addr": "127.0.0.1", **options})


class Loop(PlainLoop):
    """A plain loop of many steps."""

    def train(self, steps: int) -> None:
        train(self.model, self.optimizer, steps)


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Refuse to start threads, like a process at its limit."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


# Where nothing takes what is measured


@pytest.mark.slow
def test_samples_are_skipped_where_none_is_taken() -> None:
    """Without a background thread samples beyond a limit are skipped and counted; a scrape lets them go on."""
    loop = Loop()
    with no_threads(), watching(loop.model) as exporter:
        loop.train(1_800)
        shown = values(exporter)
        captured, skipped = shown[key(CAPTURES)], sum(lost(exporter).values())
        assert 100 < captured < 1_800
        assert captured + skipped == shown[key(STEPS, optimizer="SGD")] == 1_800
        loop.train(5)
        assert value(exporter, CAPTURES) == captured + 5
        assert value(exporter, "torch_grad_captures_total", layer="first") == captured + 5
        assert sum(lost(exporter).values()) == skipped


def test_no_threads_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """Where the process may have no more threads training is watched; nothing is served, which is logged."""
    loop = Loop()
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), no_threads(), watching(loop.model, 0) as exporter:
        assert exporter.port is None
        loop.train(5)
        assert value(exporter, CAPTURES) == 5
        assert errors(exporter) == {"worker": 1, "history": 1}
    assert len([message for message in caplog.messages if "no metrics are served" in message]) == 1


@pytest.mark.slow
def test_blocked_consumers_do_not_hold_up_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a collector and a condition of the user hang, training loses no step and no sample."""
    entered, may_go_on = [threading.Event(), threading.Event()], threading.Event()
    real = psutil.Process.num_threads

    def hang(number: int) -> None:
        entered[number].set()
        assert may_go_on.wait(FOREVER)

    def hanging(process: psutil.Process) -> int:
        hang(0)
        return real(process)

    loop = Loop()
    with watching(loop.model) as exporter:
        monkeypatch.setattr(psutil.Process, "num_threads", hanging)
        exporter.on(lambda _values: hang(1) or False, lambda _event: None)
        scraper = threading.Thread(target=exporter.collect)
        scraper.start()
        assert all(event.wait(PATIENCE) for event in entered)
        loop.train(50)
        exporter.observe(loss=1.0, grad_norm=2.0)
        assert not may_go_on.is_set()
        may_go_on.set()
        scraper.join()
        assert value(exporter, CAPTURES) == value(exporter, STEPS, optimizer="SGD") == 50
        assert value(exporter, "torch_train_loss") == 1.0


# Series


def deep(blocks: int, layers: int) -> torch.nn.Module:
    """Return layers in blocks."""
    return torch.nn.Sequential(*(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers))) for _ in range(blocks)))


@pytest.mark.slow
def test_a_model_of_2000_layers(caplog: pytest.LogCaptureFixture) -> None:
    """Layers beyond the cap are folded by blocks; a warning and a gauge say how many."""
    loop = Loop(deep(299, 7))
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), watching(loop.model) as exporter:
        loop.train(2)
        loop.model.append(torch.nn.Linear(2, 2))
        loop.optimizer.add_param_group({"params": list(loop.model[-1].parameters())})
        loop.train(1)
        scrape: dict[Key, float] = {}

        def shows_its_own_size() -> bool:
            """Return whether a scrape has as many series as the one before, which is what it shows."""
            scrape.clear()
            scrape.update(values(exporter))
            return scrape.get(key("torch_grad_exporter_series")) == len(scrape)

        assert eventually(shows_its_own_size)
        assert scrape[key("torch_grad_exporter_layers")] == 300
        assert scrape[key("torch_grad_exporter_layers_folded")] >= 2000
        assert len(scrape) < 10_000
        assert errors(exporter) == {}
    assert len([message for message in caplog.messages if "max_layers" in message]) == 1


# The log


class Lines(logging.Handler):
    """Keeps what is logged, or raises at each line."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Send everything that the package logs to this handler alone."""
    log = logging.getLogger("torch_grad_exporter")
    before = log.level, log.propagate
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before
        handler.close()


def every_line() -> dict[str, float]:
    """Train so that many kinds of line are logged; return what was counted."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with watching(deep(10, 10), taken.getsockname()[1], max_layers=10):  # layers folded, port taken, metrics served
            pass
    loop = Loop()
    watching(loop.model)
    with watching(loop.model) as exporter:  # another exporter replaced
        loop.train(6)
        for _ in range(LIMIT + 2):
            exporter.observe(loss="abc")  # type: ignore[arg-type] # a failure
            exporter.step("abc")  # type: ignore[arg-type] # and one that is switched off
        return errors(exporter) | {"captures": value(exporter, CAPTURES) or 0.0}


@pytest.mark.slow
def test_a_log_that_raises() -> None:
    """Where each line raises, as on a full disk, nothing reaches the user, and no sample and no count is lost."""
    kept, full = Lines(), Lines(OSError(errno.ENOSPC, "No space left on device"))
    with logging_to(kept):
        expected = every_line()
    with logging_to(full):
        counted = every_line()
    assert counted == expected
    assert counted["captures"] >= 4
    assert len(full.lines) == len(kept.lines) >= 6


def test_an_interrupt_within_a_log_passes() -> None:
    """An interrupt while a failure is logged reaches the user."""
    with watching(Perceptron()) as exporter, logging_to(Lines(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        exporter.observe(loss="abc")  # type: ignore[arg-type]
