"""A live page's server side with values chosen by the test, and the decoding of its answers as docs/live.md describes it."""

from __future__ import annotations

import base64
import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np

from tests.support.tools import FOREVER, PATIENCE
from torch_grad_exporter.collectors.outcomes import ActionMarks
from torch_grad_exporter.metrics.families import Family, LabelRows, Spec
from torch_grad_exporter.outputs.http.messages import Request, Response
from torch_grad_exporter.outputs.live import pages
from torch_grad_exporter.outputs.live.history import QUANTITIES, History, Moment
from torch_grad_exporter.outputs.live.live import Live, Run
from torch_grad_exporter.rules import Record
from torch_grad_exporter.store.journal import Journal

NOW = 1_800_000_000.0
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Json = dict[str, Any]


def family(spec: Spec, rows: Mapping[tuple[str, ...], float] | float) -> Family:
    """Return a metric with these rows, or without labels."""
    rows = rows if isinstance(rows, Mapping) else {(): rows}
    return Family(spec, np.array(list(rows.values()), dtype=np.float64), LabelRows(tuple(rows)))


def decoded(answer: Json) -> np.ndarray:
    """Return the values of `api/v1/layers`, shape (records, layers)."""
    raw, shape = base64.b64decode(answer["codes"]), (len(answer["times"]), len(answer["layers"]))
    if answer["scale"] == "raw":
        return np.frombuffer(raw, dtype="<f4").reshape(shape).astype(float)
    codes = np.frombuffer(raw, dtype="<u2").reshape(shape).astype(float)
    shown = answer["low"] + (codes - 1) / 65533 * (answer["high"] - answer["low"])
    values = 10**shown if answer["scale"] == "log" else shown
    return np.where(codes == 0, np.nan, np.where(codes == 65535, np.inf, values))


def number(value: object) -> float:
    """Return a number of the JSON, NaN for null."""
    return math.nan if value is None else NUMBERS[value] if isinstance(value, str) else float(value)  # type: ignore[arg-type]


def strict(body: bytes) -> Json:
    """Parse JSON as browsers do, which accept no NaN."""

    def refuse(text: str) -> float:
        raise ValueError(text)

    answer: Json = json.loads(body.decode(), parse_constant=refuse)
    return answer


@dataclass
class Made:
    """A page without a training: `families` are its metrics, `rows` and `scalars` the next record."""

    names: list[str] = field(default_factory=lambda: ["a", "b"])
    families: list[Family] = field(default_factory=list)
    now: float = NOW
    steps: int = 0
    scrapes: int = 0
    targets: bytes = b"[]"
    rows: np.ndarray | None = None
    scalars: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)
    sharded: frozenset[str] = frozenset()
    failure: Exception | None = None
    hold: threading.Event | None = None
    """The next scrape waits for this event."""

    def __post_init__(self) -> None:
        self.holding = threading.Event()
        self.journal = Journal()
        self.history = History(self.moment, now=lambda: self.now)
        run = Run("run", 0, 3, "node0", "0.1.0")
        record = Record(journal=self.journal)
        self.live = Live(
            run, self.history, self, targets=lambda: self.targets, marks=ActionMarks(), record=record, now=lambda: self.now
        )

    def moment(self) -> Moment:
        count = len(self.names) * len(QUANTITIES)
        rows = np.arange(1, count + 1).reshape(-1, len(QUANTITIES)) * (1 + self.steps) if self.rows is None else self.rows
        scalars = np.array(self.scalars, dtype=np.float32)
        return Moment(self.steps, self.steps, self.names, rows.astype(np.float32), scalars, sharded=self.sharded)

    def __call__(self) -> list[Family]:
        """Scrape, as `Live` does."""
        self.scrapes += 1
        families, hold, self.hold = self.families, self.hold, None
        if hold is not None:
            self.holding.set()
            assert hold.wait(FOREVER)
        if self.failure is not None:
            raise self.failure
        return families

    for_rules = __call__

    def record(self, times: int = 1) -> Made:
        for _ in range(times):
            self.steps += 1
            self.now += 1
            self.history.record_if_due()
        return self

    def ask(self, target: str) -> Response:
        path, _, query = target.partition("?")
        answer = pages.answer(self.live, Request("GET", path, {}, query))
        assert answer is not None
        return answer

    def json(self, target: str) -> Json:
        answer = self.ask(f"/api/v1/{target}")
        assert answer.status == HTTPStatus.OK, answer.body
        return strict(answer.body)


@contextmanager
def held(made: Made) -> Iterator[None]:
    """Keep one scrape of the page hanging."""
    go_on = made.hold = threading.Event()
    thread = threading.Thread(target=made.live.remember)
    thread.start()
    assert made.holding.wait(PATIENCE)
    try:
        yield
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join()
