"""A receiver of notifications over HTTP that refuses, hangs, drips, redirects or dies, and runs that notify it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.tools import FOREVER, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Notification, Notifier
from torch_grad_exporter.actions.notify import notify
from torch_grad_exporter.actions.notify.notify import JobReports
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.rules import Alert, Problem, Rule

SECRET = "T0KEN-that-nothing-shows"  # noqa: S105 - what tests look for
"""Part of every address and header here."""


def notification(**changed: Any) -> Notification:  # noqa: ANN401 - of each field its own
    """Return a notification with usual values."""
    usual: dict[str, Any] = {
        "timestamp": 1_700_000_000.0, "started": 1_700_000_000.0, "status": "firing", "alert": "LossSpike", "severity": "warning",
        "summary": "The loss jumped 3 times.", "layer": None, "value": 3.0, "step": 7, "run": "r", "rank": 0,
        "first_steps": "Look.",
    }  # fmt: skip
    return Notification(**usual | changed)


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401 - whatever was sent
        """Decode the body."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """The answer to a request. `drips`: it never ends; `dies`: the connection ends without an answer."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    drips: bool = False
    hangs: bool = False
    dies: bool = False


OK = Answer()


class Receiver:
    """Takes posts. The first answers are those given, all others `then`."""

    def __init__(self, *answers: Answer, then: Answer = OK) -> None:
        self.asked: list[Asked] = []
        self._answers = list(answers)
        self._then = then
        self._closed = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.root = f"http://127.0.0.1:{self._server.server_port}"
        self.url = f"{self.root}/{SECRET}?key={SECRET}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        answer = self._answers.pop(0) if self._answers else self._then
        self.asked.append(Asked(request.path, dict(request.headers), body))
        if answer.dies:
            request.close_connection = True
            return
        if answer.hangs:
            self._closed.wait(FOREVER)
            return
        if answer.drips:
            with contextlib.suppress(OSError):
                request.connection.sendall(b"HTTP/1.1 200 OK\r\nX-Drip: ")
                while not self._closed.wait(0.02):
                    request.connection.sendall(b"x")
            return
        request.send_response(answer.status)
        for name, value in {"Content-Length": "0", **answer.headers}.items():
            request.send_header(name, value)
        request.end_headers()

    def got(self, count: int) -> bool:
        """Wait until this many requests came."""
        return eventually(lambda: len(self.asked) >= count)

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def receiver(*answers: Answer, then: Answer = OK) -> Iterator[Receiver]:
    """Run a receiver within the block."""
    with contextlib.closing(Receiver(*answers, then=then)) as running:
        yield running


def refused_url() -> str:
    """Return an address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/{SECRET}?key={SECRET}"


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


RULE = Rule(name="Slow", alerts=(Alert("warning", "x", for_="10m", keep_firing_for="5m", summary="It is slow."),))
"""A rule whose problem has to last."""


class Judged:
    """A Notify whose problems and clock the test chooses, and which judges when the test says so."""

    def __init__(self, *notifiers: Notifier, rank: int = 0, job: JobReports | None = None, begun: float = 1_700_000_000) -> None:
        self.problems: list[Problem] = []
        self.clock, self.totals = Clock(), notify.totals(notifiers, [RULE])
        self.errors = ErrorLog(("notify", "close"))
        self.notify = notify.Notify(
            notifiers, SimpleNamespace(judged=lambda last: self), self.totals, self.errors, run="r", rank=rank,
            steps=SimpleNamespace(number=7), job=job, rules=[RULE], clock=self.clock, now=lambda: begun + self.clock(),
        )  # fmt: skip

    def at(self, now: float, *problems: Problem, last: bool = False) -> None:
        """Judge once, for the last time if `last`, and let the sinks work."""
        self.clock.time, self.problems = now, list(problems)
        self.notify.evaluate(last=last)
        for sink in self.notify.sinks:  # whose threads do not run here, so that times are exact
            sink.work()


class Trained:
    """A small training with an exporter; the loss that it observes is NaN when the test says so, and nothing else."""

    def __init__(self, *notifiers: Notifier, **options: Any) -> None:  # noqa: ANN401 - any option
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        chosen: dict[str, Any] = {
            "port": None,
            "every": 1,
            "collectors": dict.fromkeys(("host", "process", "gpu"), False),
            **options,
        }
        self.exporter: Exporter = start_exporter(self.model, alerts=list(notifiers) or None, **chosen)

    def train(self, steps: int = 3, *, nan: bool = False) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(2, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.exporter.observe(loss=float("nan") if nan else loss.detach())

    def value(self, name: str, *labels: str) -> float | None:
        """Return the value of a series, by the values of its labels."""
        for family in self.exporter.collect():
            if family.spec.name == name:
                return next((float(family.values[row]) for row in family.row_numbers if family.labels.rows[row] == labels), None)
        return None
