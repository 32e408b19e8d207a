"""Stages that are full, or behind which no thread works: what does not fit is skipped and counted, and the training never waits."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import Key, errors, key, lost, value, values
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.aggregation import worker as host
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import HostSide
from torch_grad_exporter.capture import reader
from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics.layout import ORDINARY, Packing
from torch_grad_exporter.transfer import events, transfer
from torch_grad_exporter.transfer.events import Captured, Mailbox, Observed, Part
from torch_grad_exporter.transfer.transfer import SENTINEL, Arrived, HostTransfer, Ticket

STEPS = "torch_train_steps_total"
CAPTURES = "torch_grad_exporter_captures_total"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def watching(model: torch.nn.Module, port: int | None = None, **options: object) -> Exporter:
    """An exporter that samples every round and by itself serves nothing."""
    return start_exporter(model, port, **{"every": 1, "addr": "127.0.0.1", **options})


class Loop:
    """A plain loop."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.model = model or Perceptron()
        self.optimizer = sgd(self.model)
        self.steps = 0

    def train(self, steps: int) -> None:
        """Plain steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(batch()).square().mean().backward()
            self.optimizer.step()
            self.steps += 1


def without_worker(exporter: Exporter) -> Exporter:
    """Ends the worker's thread, as if it were starved."""
    exporter._host._thread.stop()
    exporter._host._thread.join()
    return exporter


# The mailbox


def test_samples_are_skipped_where_they_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mailbox half full, samples are skipped and counted; a scrape empties it, and samples go on; steps are exact."""
    monkeypatch.setattr(reader, "CROWDED", 60)
    loop = Loop()
    with without_worker(watching(loop.model)) as exporter:
        loop.train(50)
        captured = exporter._training.capture.samples
        assert 5 < captured < 30  # of each sample there are a few records
        assert value(exporter, STEPS, optimizer="SGD") == 50
        assert value(exporter, CAPTURES) == captured
        assert sum(lost(exporter).values()) == 50 - captured
        loop.train(5)
        assert value(exporter, CAPTURES) == captured + 5
        assert value(exporter, "torch_grad_captures_total", layer="first") == captured + 5
        assert errors(exporter) == {}


def test_a_full_mailbox_leaves_out_and_counts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond its room the mailbox takes nothing; each record that was left out is a failure of the worker, logged once."""
    assert reader.CROWDED < events.ROOM  # what is left is for records without which a sample would be wrong
    monkeypatch.setattr(events, "ROOM", 20)
    loop = Loop()
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), without_worker(watching(loop.model, every=100)) as exporter:
        post = exporter._training.clock._mailbox
        loop.train(2)
        values(exporter)
        for _ in range(50):
            exporter.observe(tokens=1)
        assert len(post) == 20
        assert value(exporter, "torch_train_tokens_total") == 20
        assert errors(exporter) == {"worker": 30}
        loop.train(5)
        exporter.observe(tokens=1)
        assert value(exporter, "torch_train_tokens_total") == 21
        assert value(exporter, "torch_train_step_duration_seconds_count") == 6
        for _ in range(30):
            exporter.observe(tokens=1)
        assert errors(exporter) == {"worker": 40}
    assert len([record for record in caplog.records if "did not fit" in record.getMessage()]) == 1


def test_vectors_that_are_not_taken_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no worker at all the vectors that wait hold no more memory than they may; samples beyond are skipped and counted."""
    monkeypatch.setattr(transfer, "HELD_BYTES", 4096)
    loop = Loop()
    with without_worker(watching(loop.model)) as exporter:
        loop.train(50)
        waiting = [event for event in exporter._training.clock._mailbox if isinstance(event, Captured)]
        held = sum(part.ticket.values.nbytes for event in waiting for part in event.parts)
        captured = len(waiting)
        del waiting
        assert 0 < held <= 4096
        assert value(exporter, CAPTURES) == captured
        assert sum(lost(exporter).values()) == 50 - captured
        loop.train(3)
        assert value(exporter, CAPTURES) == captured + 3


def test_one_vector_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector that is larger than all that may wait is sent where nothing waits, and one that is kept hides none behind it."""
    monkeypatch.setattr(transfer, "HELD_BYTES", 100)
    sender = HostTransfer()
    first = sender.send(torch.zeros(1000))
    assert first is not None
    assert sender.send(torch.zeros(1)) is None
    del first
    kept = sender.send(torch.zeros(1))
    assert kept is not None
    for _ in range(100):
        assert sender.send(torch.zeros(10)) is not None


def test_the_loop_goes_on_while_the_host_side_is_held() -> None:
    """A thread that holds the host side's lock for long costs the training nothing: it ends while the lock is held."""
    loop = Loop()
    with watching(loop.model) as exporter:
        with exporter._host._lock:
            loop.train(50)
            exporter.observe(loss=1.0, grad_norm=2.0)
        assert value(exporter, CAPTURES) == 50
        assert value(exporter, "torch_train_loss") == 1.0


# The ring of buffers


class Device(HostTransfer):
    """Takes the CPU for an accelerator: vectors travel through the ring."""

    def _hand_over(self, vector: torch.Tensor) -> Ticket | None:
        buffer = self._free(vector.device, vector.numel())
        if buffer is None:
            return None
        buffer.memory[: vector.numel()] = vector
        return buffer.lend(vector.numel())


def test_a_full_ring_skips_and_counts() -> None:
    """With a ring of eight buffers and no worker, eight vectors wait; each sample beyond is skipped and counted."""
    loop = Loop()
    with without_worker(watching(loop.model)) as exporter:
        exporter._training.capture._parts.reader._transfer = Device(ring=8)
        loop.train(40)
        captured = exporter._training.capture.samples
        assert 4 <= captured <= 8  # a sample that was measured again before the step has two
        assert value(exporter, CAPTURES) == captured
        assert sum(lost(exporter).values()) == 40 - captured
        assert value(exporter, STEPS, optimizer="SGD") == 40
        for _ in range(5):
            loop.train(1)
            values(exporter)
        assert value(exporter, CAPTURES) == captured + 5
        assert errors(exporter) == {}


def test_a_ring_that_fills_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When half of the ring is taken the worker is woken, which looks every hour here: no sample is lost in short steps."""
    for name in ("IDLE_SECONDS", "HURRIED_SECONDS"):
        monkeypatch.setattr(host, name, 3600.0)
    loop = Loop()
    with watching(loop.model) as exporter:
        reader = exporter._training.capture._parts.reader
        reader._transfer = Device(ring=8, pressed=reader._transfer.pressed)
        for _ in range(100):
            loop.train(1)
            assert eventually(lambda: not exporter._training.mailbox.pressing)
        assert exporter._training.capture.samples == value(exporter, CAPTURES) == 100
        assert lost(exporter) == {}
        assert errors(exporter) == {}


def test_a_ticket_that_is_lost_gives_its_buffer_back() -> None:
    """Where what was sent is never read, as after a failure in between, the buffer is used again, once its copy has arrived."""

    class Slow(Device):
        def _hand_over(self, vector: torch.Tensor) -> Ticket | None:
            ticket = super()._hand_over(vector)
            if ticket is not None and vector[0] < 0:  # the copy is still under way
                ticket.buffer.bits[: vector.numel()] = SENTINEL
            return ticket

    sender = Slow(ring=2)
    assert sender.send(torch.tensor([-1.0, 1.0])) is not None  # and is dropped
    for number in range(100):
        assert sender.send(torch.tensor([float(number)])) is not None
    assert sender.send(torch.tensor([-1.0])) is not None
    assert sender.send(torch.tensor([1.0])) is None
    (buffers,) = sender._rings.values()
    buffers[0].memory[:2] = 1.0  # it arrives after all
    kept = sender.send(torch.tensor([5.0, 6.0]))
    assert kept is not None
    assert kept.ready().tolist() == [5, 6]


# What waits for vectors on the host side


class Never:
    """A vector that never arrives."""

    def ready(self) -> None:
        return None


@pytest.mark.parametrize("name", ["grad_norm", "loss"])
def test_what_waits_on_the_host_side_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much comes behind a vector that is still under way, a bounded number of records waits; those behind are taken."""
    monkeypatch.setattr(host, "MOST_WAITING", 100)
    post, errors = Mailbox(), ErrorLog(("worker",))
    table = LayerIndex({"": torch.nn.Linear(2, 2, bias=False)}).table
    gradients = GradientAggregation()
    gradients.use(table)
    side = HostSide(post, gradients, TrainingTotals(), errors, now=lambda: 1_800_000_000.0)
    zero = np.zeros(1, dtype=np.int64)
    part = Part(zero, np.array([4]), np.array([2]), Never(), Packing(ORDINARY))
    post.append(Captured(1, table, (part,), zero[:0], zero, 0.0, likely_last=True, usual=frozenset()))
    post.append(Observed("loss", Never()))
    for _ in range(3):
        for _ in range(80):
            post.append(Observed(name, Arrived(np.ones(1))))
        side.drain()
    assert max(len(side._waiting), len(side._observed)) <= 100
    snapshot = side.snapshot()
    if name == "grad_norm":
        assert snapshot.gradients.undelivered == 1
        assert snapshot.gradients.totals["norm"].tolist() == [1]
    else:
        assert snapshot.totals.last == {"loss": 1}
    assert errors.counts() == {"worker": 0}


# Series


def deep(blocks: int, layers: int) -> torch.nn.Module:
    """Layers in blocks."""
    return torch.nn.Sequential(*(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers))) for _ in range(blocks)))


@pytest.mark.parametrize(("blocks", "layers", "shown"), [(299, 7, 300), (2000, 1, 201)], ids=["in blocks", "in a row"])
def test_a_model_of_2000_layers(blocks: int, layers: int, shown: int, caplog: pytest.LogCaptureFixture) -> None:
    """Layers beyond the cap are folded, by blocks or in ranges; a warning and a gauge say how many; series stay below 10,000."""
    loop = Loop(deep(blocks, layers))
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), watching(loop.model) as exporter:
        for _ in range(2):
            loop.optimizer.zero_grad()
            loop.model(torch.randn(3, 2)).square().mean().backward()
            loop.optimizer.step()
        loop.model.append(torch.nn.Linear(2, 2))
        loop.optimizer.add_param_group({"params": list(loop.model[-1].parameters())})
        loop.model(torch.randn(3, 2)).square().mean().backward()
        loop.optimizer.step()
        found: dict[Key, float] = {}

        def tells_its_own_size() -> bool:
            """What a scrape tells of is the one before, and the thread that judges each second may bring another series."""
            found.clear()
            found.update(values(exporter))
            return found.get(key("torch_grad_exporter_series")) == len(found)

        assert eventually(tells_its_own_size)
        by_name = {name: one for (name, labels), one in found.items() if not labels}
        assert by_name["torch_grad_exporter_layers"] == shown
        assert by_name["torch_grad_exporter_layers_folded"] >= 2000
        assert len(found) < 10_000
        assert errors(exporter) == {}
    assert len([record for record in caplog.records if "max_layers" in record.getMessage()]) == 1


# Threads


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the process may have no more threads, the training starts and is watched; nothing is served, which is logged."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = Loop()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        patch.setattr(threading.Thread, "start", start)
        with watching(loop.model, 0) as exporter:
            assert exporter.port is None
            loop.train(5)
            assert value(exporter, CAPTURES) == 5
            assert errors(exporter) == {"worker": 1, "history": 1}
    assert len([record for record in caplog.records if "no metrics are served" in record.getMessage()]) == 1
    assert loop.steps == 5


# The log


class Full(logging.Handler):
    """A handler that raises, as one on a full disk may."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.asked = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.asked += 1
        raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """All that we log goes there, and there alone."""
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
    """A training in which everything is logged that ever is; returns what was counted."""
    loop = Loop(deep(10, 10))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with watching(loop.model, port, max_layers=10):  # layers folded, port taken, metrics served
            pass
    frozen = Perceptron().requires_grad_(False)
    watching(frozen).close()  # nothing is trained yet
    model = Perceptron()
    optimizer = sgd(model)
    watching(model)
    with watching(model) as exporter:  # another exporter replaced
        for _ in range(6):
            optimizer.zero_grad()
            model.second(model.first(batch()).relu()).square().mean().backward()  # another rung
            optimizer.step()
        for _ in range(LIMIT + 2):
            exporter.observe(loss="abc")  # type: ignore[arg-type] # a failure
            exporter.step("abc")  # type: ignore[arg-type] # and one that is switched off
        counted = errors(exporter) | {"captures": value(exporter, CAPTURES) or 0.0}
    lost = Perceptron()
    with watching(lost):
        for _ in range(101):  # no step is ever seen
            lost(batch()).square().mean().backward()
    return counted


def test_a_log_that_raises() -> None:
    """With a handler that raises at each line nothing reaches the user, and no sample and no count is lost by it."""
    kept = Lines()
    with logging_to(kept):
        expected = every_line()
    full = Full()
    with logging_to(full):
        found = every_line()
    assert found == expected
    assert found["captures"] >= 4
    assert full.asked == len(kept.lines) >= 9


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_log_on_a_full_disk(capfd: pytest.CaptureFixture[str]) -> None:
    """With a log file on a device that is full, `logging` itself says so on stderr; nothing reaches the training."""
    with contextlib.suppress(OSError), logging_to(logging.FileHandler("/dev/full", delay=True)):
        assert every_line()["captures"] >= 4
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_an_interrupt_within_a_log_passes(level: int) -> None:
    """What is no failure, such as an interrupt while a line is written, is the user's."""

    class Interrupted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise KeyboardInterrupt

    with logging_to(Interrupted()), pytest.raises(KeyboardInterrupt):
        ErrorLog(()).count("capture", OSError())


def test_thousands_of_failures_are_few_lines() -> None:
    """A failure that comes again 5,000 times is counted each time and logged once, or twice where it is switched off."""
    kept = Lines()
    with logging_to(kept), watching(Perceptron()) as exporter:
        for _ in range(5000):
            exporter.observe(loss="abc")  # type: ignore[arg-type]
            exporter.step("abc")  # type: ignore[arg-type]
        assert errors(exporter)["observe"] == 5000 + LIMIT
    assert len(kept.lines) == 2
