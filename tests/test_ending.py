"""How a run ends, seen from outside: answers that are under way, the state that is shown, and who gives everything back."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.models import Perceptron
from tests.support.scrape import errors, value
from tests.support.tools import FOREVER, PATIENCE, eventually, get, threads_of_ours
from torch_grad_exporter import Exporter, start_exporter

QUIET = dict.fromkeys(("host", "container", "gpu", "cuda_memory"), False)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads_of_ours()
    yield
    assert eventually(lambda: threads_of_ours() <= before)


def started(model: torch.nn.Module | None = None, port: int | None = 0, **options: object) -> Exporter:
    """Start an exporter on loopback that samples every round."""
    return start_exporter(model or Perceptron(), port, **{"every": 1, "addr": "127.0.0.1", "collectors": QUIET, **options})


# An answer that is under way


class Client:
    """A client that has asked for the metrics and reads on request."""

    def __init__(self, exporter: Exporter) -> None:
        self._socket = socket.create_connection(("127.0.0.1", exporter.port or 0), timeout=PATIENCE)
        self._socket.sendall(b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n")
        self.received = bytearray()

    def read_some(self) -> None:
        """Wait for the answer's first bytes."""
        self.received += self._socket.recv(64)

    def read_all(self) -> None:
        """Read to the server's end; raises if the connection is reset."""
        while data := self._socket.recv(1 << 20):
            self.received += data
        self._socket.close()

    def is_whole(self) -> bool:
        """Return whether the answer is as long as its header says."""
        head, _, body = bytes(self.received).partition(b"\r\n\r\n")
        (length,) = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        return head.startswith(b"HTTP/1.1 200 ") and len(body) == length


def refuses(port: int) -> bool:
    """Return whether the port is closed."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
        return False
    return True


@contextlib.contextmanager
def closing(exporter: Exporter) -> Iterator[threading.Thread]:
    """Close in another thread; enter the block when the port is free, leave it when `close` has returned."""
    port = exporter.port or 0
    thread = threading.Thread(target=exporter.close)
    thread.start()
    assert eventually(lambda: refuses(port))
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive()


@contextlib.contextmanager
def hanging_collector(monkeypatch: pytest.MonkeyPatch, exporter: Exporter) -> Iterator[tuple[Client, threading.Event]]:
    """Let a scrape hang in a collector until the event is set."""
    entered, may_go_on = threading.Event(), threading.Event()
    real = psutil.Process.num_threads

    def hangs(process: psutil.Process) -> int:
        entered.set()
        assert may_go_on.wait(FOREVER)
        return real(process)

    monkeypatch.setattr(psutil.Process, "num_threads", hangs)
    client = Client(exporter)
    assert entered.wait(PATIENCE)
    yield client, may_go_on
    may_go_on.set()


@pytest.mark.slow
def test_linger_waits_for_a_scrape_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `linger`, a scrape that began before the end does not count; the next one shows the end."""
    exporter = started(linger=FOREVER)
    url = exporter.url or ""
    with hanging_collector(monkeypatch, exporter) as (client, may_go_on):
        thread = threading.Thread(target=exporter.close)
        thread.start()
        assert eventually(lambda: not any("history" in running.name for running in threads_of_ours()))  # it ends before the outputs
        may_go_on.set()
        client.read_all()
        assert client.is_whole()

    def shows_the_end() -> bool:
        return 'state="finished"} 1' in get(url)

    assert eventually(shows_the_end)
    thread.join(PATIENCE)
    assert not thread.is_alive()


# The end that counts


def ending(exporter: Exporter, folder: Path) -> tuple[object, ...]:
    """Return the state that is shown, and what the saved history says of the end."""
    exporter.save(folder / "run.json")
    status = json.loads((folder / "run.json").read_text())["status"]
    names = ("initialising", "training", "evaluating", "finished", "failed")
    states = [name for name in names if value(exporter, "torch_train_state", state=name) == 1]
    return states, status["state"], status["ended"], status["ended_by"]


def fail(exporter: Exporter, error: BaseException | None) -> None:
    """End a run in a `with` by an error."""
    with contextlib.suppress(BaseException), exporter:
        if error is not None:
            raise error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "state", "by"),
    [
        (ValueError("secret"), "failed", "ValueError"),
        (SystemExit(3), "failed", "SystemExit"),
        (SystemExit(0), "finished", None),
        (KeyboardInterrupt(), "finished", None),
        (None, "finished", None),
    ],
)
def test_the_first_end_of_a_run_counts(error: BaseException | None, state: str, by: str | None, tmp_path: Path) -> None:
    """State, time and type of the exception are those of the first end; `close` and later exceptions change none."""
    exporter = started(port=None)
    assert ending(exporter, tmp_path)[2:] == (None, None)
    before = time.time()
    fail(exporter, error)
    first = ending(exporter, tmp_path)
    assert (first[0], first[1], first[3]) == ([state], state, by)
    assert isinstance(first[2], float)
    assert before <= first[2] <= time.time()
    exporter.close()
    fail(exporter, OSError())
    fail(exporter, None)
    assert ending(exporter, tmp_path) == first


class Handle:
    """A handle that counts its removals."""

    removed = 0

    def remove(self) -> None:
        self.removed += 1


def test_many_threads_close_at_once() -> None:
    """Of many threads that close at once one gives everything back, and all return."""
    exporter, ready = started(), threading.Barrier(8)
    handle, port = exporter.adopt(Handle()), exporter.port or 0

    def close() -> None:
        ready.wait(PATIENCE)
        exporter.close()

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: refuses(port))
    assert (handle.removed, errors(exporter)) == (1, {})
