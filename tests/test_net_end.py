"""How a run ends, seen from outside: answers that are under way, the state that is shown, a web configuration that recovers."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import bcrypt
import psutil
import pytest
import torch

from tests.support.models import Perceptron, sgd
from tests.support.scrape import errors, value
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter

QUIET = dict.fromkeys(("host", "container", "gpu", "cuda_memory"), False)
"""Collectors that ask the machine."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def threads_of_ours() -> set[threading.Thread]:
    """The exporters' threads that run now."""
    return {thread for thread in threading.enumerate() if "torch-grad-exporter" in thread.name}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads_of_ours()
    yield
    assert eventually(lambda: threads_of_ours() <= before)


def started(model: torch.nn.Module | None = None, port: int | None = 0, **options: object) -> Exporter:
    """An exporter on loopback that samples every round."""
    return start_exporter(
        Perceptron() if model is None else model, port, **{"every": 1, "addr": "127.0.0.1", "collectors": QUIET, **options}
    )


def train(model: torch.nn.Module, steps: int = 1) -> None:
    """Plain steps."""
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, next(model.parameters()).shape[1])).square().mean().backward()
        optimizer.step()


# An answer that is under way


class Client:
    """A client that has asked for a path, and reads no more than it is told to."""

    def __init__(self, exporter: Exporter, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", exporter.port or 0), timeout=PATIENCE)
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        self.received = bytearray()

    def read_some(self) -> None:
        """Waits for the answer's first bytes."""
        self.received += self._socket.recv(64)

    def read_all(self) -> None:
        """Reads to the server's end; raises where the connection is reset."""
        while data := self._socket.recv(1 << 20):
            self.received += data
        self._socket.close()

    def is_whole(self) -> bool:
        """Whether the answer is as long as it says."""
        head, _, body = bytes(self.received).partition(b"\r\n\r\n")
        (length,) = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        return head.startswith(b"HTTP/1.1 200 ") and len(body) == length


def refuses(port: int) -> bool:
    """Whether the port is closed."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
        return False
    return True


def with_a_large_scrape() -> Exporter:
    """An exporter whose scrape has some 18 MB."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(200)))
    exporter = started(model, labels={"long": "x" * 4000})
    train(model)
    return exporter


@contextlib.contextmanager
def closing(exporter: Exporter) -> Iterator[threading.Thread]:
    """Closes in another thread; comes back as soon as the port is free, and goes when `close` has returned."""
    port = exporter.port or 0
    thread = threading.Thread(target=exporter.close)
    thread.start()
    assert eventually(lambda: refuses(port))
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_answer_that_is_being_sent_when_the_run_ends_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has read the first bytes of a large scrape when `close` is called gets all of it, and the port is free."""
    monkeypatch.setattr("torch_grad_exporter.outputs.outputs.CLOSE_SECONDS", PATIENCE)
    monkeypatch.setattr("torch_grad_exporter.outputs.http.server._GRACE_SECONDS", PATIENCE)
    exporter = with_a_large_scrape()
    client = Client(exporter, "/metrics")
    client.read_some()
    with closing(exporter):
        client.read_all()
    assert client.is_whole()
    assert len(client.received) > 15 * 2**20  # more than the sockets hold, so it was under way
    assert errors(exporter) == {}


def test_a_client_that_does_not_read_its_answer_does_not_hold_up_the_end() -> None:
    """`close` comes back although a client has a large scrape under way of which it never reads the rest."""
    exporter = with_a_large_scrape()
    client = Client(exporter, "/metrics")
    client.read_some()
    with closing(exporter):
        pass
    with contextlib.suppress(ConnectionError):
        client.read_all()
    assert not client.is_whole()
    assert errors(exporter) == {}


def test_a_scrape_that_is_being_computed_when_the_run_ends_gets_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a collector that hangs amid a scrape `close` comes back, the client gets a whole answer or none, no half of one."""
    entered, may_go_on = threading.Event(), threading.Event()
    real = psutil.Process.num_threads

    def hangs(process: psutil.Process) -> int:
        entered.set()
        assert may_go_on.wait(FOREVER)
        return real(process)

    exporter = started()
    monkeypatch.setattr(psutil.Process, "num_threads", hangs)
    client = Client(exporter, "/metrics")
    assert entered.wait(PATIENCE)
    with closing(exporter) as thread:
        thread.join(PATIENCE)
        assert not thread.is_alive()  # though the collector hangs
        client.read_all()
        assert not client.received or client.is_whole()
        may_go_on.set()
    assert set(errors(exporter)) <= {"collector_process"}


def test_a_scrape_that_began_before_the_end_has_not_seen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `linger`, a scrape that is under way when the run ends is not the one that is waited for: the next one is."""
    entered, may_go_on = threading.Event(), threading.Event()
    real = psutil.Process.num_threads

    def waits(process: psutil.Process) -> int:
        entered.set()
        assert may_go_on.wait(PATIENCE)
        return real(process)

    exporter = started(linger=FOREVER)
    url = exporter.url or ""
    monkeypatch.setattr(psutil.Process, "num_threads", waits)
    client = Client(exporter, "/metrics")
    assert entered.wait(PATIENCE)
    thread = threading.Thread(target=exporter.close)
    thread.start()
    assert eventually(lambda: not any("history" in one.name for one in threads_of_ours()))  # its end comes before the outputs'
    may_go_on.set()
    client.read_all()
    assert client.is_whole()

    def tells_the_end() -> bool:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=PATIENCE) as response:
            return b'state="finished"} 1' in response.read()

    assert eventually(tells_the_end)
    thread.join(PATIENCE)
    assert not thread.is_alive()


# Which end it was


def state(exporter: Exporter) -> list[str]:
    """The state that is shown."""
    names = ("initialising", "training", "evaluating", "finished", "failed")
    return [name for name in names if value(exporter, "torch_train_state", state=name) == 1]


def ending(exporter: Exporter, folder: Path) -> tuple[object, ...]:
    """What the saved history says of the end."""
    exporter.save(folder / "run.json")
    status = json.loads((folder / "run.json").read_text())["status"]
    return status["state"], status["ended"], status["ended_by"]


def failing(exporter: Exporter, error: BaseException, *, closed: bool = False) -> None:
    """A run in a `with` that ends by the error, and is closed before."""
    with contextlib.suppress(type(error)), exporter:
        if closed:
            exporter.close()
        raise error


@pytest.mark.parametrize(
    ("error", "shown", "by"),
    [
        (ValueError("secret"), "failed", "ValueError"),
        (SystemExit(3), "failed", "SystemExit"),
        (SystemExit(0), "finished", None),
        (KeyboardInterrupt(), "finished", None),
    ],
)
def test_what_ended_a_run_is_shown_from_then_on(error: BaseException, shown: str, by: str | None, tmp_path: Path) -> None:
    """The end by an exception is told by state, time and type, and `close` after it changes none of them."""
    exporter = started(port=None)
    assert ending(exporter, tmp_path)[1:] == (None, None)
    before = time.time()
    failing(exporter, error)
    first = ending(exporter, tmp_path)
    assert (first[0], first[2]) == (shown, by)
    assert isinstance(first[1], float)
    assert before <= first[1] <= time.time()
    exporter.close()
    assert state(exporter) == [shown]
    assert ending(exporter, tmp_path) == first


def test_a_run_that_was_closed_has_finished_whatever_comes_after(tmp_path: Path) -> None:
    """After `close` an exception that leaves the `with`, and one that ends a second `with`, change neither state nor time."""
    exporter = started(port=None)
    failing(exporter, ValueError(), closed=True)
    first = ending(exporter, tmp_path)
    assert (first[0], first[2]) == ("finished", None)
    assert state(exporter) == ["finished"]
    failing(exporter, OSError())
    assert ending(exporter, tmp_path) == first
    assert state(exporter) == ["finished"]


def test_a_run_that_has_failed_has_not_finished_later(tmp_path: Path) -> None:
    """After an exception has ended a run neither another one nor a `with` that ends well makes it another end."""
    exporter = started(port=None)
    failing(exporter, ValueError())
    first = ending(exporter, tmp_path)
    with exporter:
        pass
    assert ending(exporter, tmp_path) == first
    failing(exporter, OSError())
    assert ending(exporter, tmp_path) == first
    assert state(exporter) == ["failed"]


def test_nothing_holds_an_exporter_that_was_closed() -> None:
    """With its model alive, which has been trained, an exporter is gone as soon as it is closed and not referenced."""
    model = Perceptron()
    exporter = started(model)
    train(model, 3)
    assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 3
    exporter.close()
    held = weakref.ref(exporter)
    del exporter

    def is_gone() -> bool:
        gc.collect()
        return held() is None

    assert eventually(is_gone)
    train(model)


# A web configuration that recovers


def password(word: bytes) -> str:
    """A configuration with one user who has this password."""
    return "basic_auth_users: {alice: " + bcrypt.hashpw(word, bcrypt.gensalt(4)).decode() + "}"


def lets_in(exporter: Exporter, word: str) -> bool:
    """Whether the server takes the password."""
    manager = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    manager.add_password(None, exporter.url or "", "alice", word)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPBasicAuthHandler(manager))
    try:
        with opener.open(exporter.url or "", timeout=PATIENCE) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False


def test_a_web_configuration_is_said_to_be_in_force_again_once_after_each_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state that is refused is followed by one line at the next good one, and by none at the good one after that."""
    file = tmp_path / "web.yml"
    file.write_text(password(b"first"))

    def again() -> int:
        return sum("in force again" in record.getMessage() for record in caplog.records)

    def written(text: str, then: Callable[[], bool]) -> None:
        file.write_text(text)
        assert eventually(then)

    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), started(web_config_file=file) as exporter:
        written(password(b"second"), lambda: lets_in(exporter, "second"))
        assert again() == 0
        written("basic_auth_users: [", lambda: lets_in(exporter, "second") and errors(exporter) == {"web_config": 1})
        assert again() == 0
        written(password(b"third"), lambda: lets_in(exporter, "third"))
        assert again() == 1
        written(password(b"fourth"), lambda: lets_in(exporter, "fourth"))
        assert again() == 1
        assert errors(exporter) == {"web_config": 1}
