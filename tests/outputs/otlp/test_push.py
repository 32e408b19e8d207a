"""Push from a training: what arrives, what happens without a receiver, the end, and forked children."""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from tests.outputs.otlp.test_otlp_delivery import tls_receiver
from tests.support import otlp_receiver as liars
from tests.support.certificates import authority
from tests.support.models import Perceptron, batch, sgd
from tests.support.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, Key, Liar, Point, Receiver, expected, refused
from tests.support.scrape import errors, values
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.collectors.gradients import GRAD_NORM
from torch_grad_exporter.collectors.training import TRAIN_LOSS, TRAIN_STATE
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows, Spec, scalar
from torch_grad_exporter.outputs import outputs as outputs_module
from torch_grad_exporter.outputs.otlp import delivery as delivery_module
from torch_grad_exporter.outputs.otlp import delivery_grpc, otlp
from torch_grad_exporter.outputs.otlp import push as push_module
from torch_grad_exporter.outputs.otlp.delivery import Delivery, DeliveryError
from torch_grad_exporter.outputs.otlp.otlp import Temporality
from torch_grad_exporter.outputs.otlp.push import GRACE, LAST_SECONDS, LEFT_BEHIND, Push, connected
from torch_grad_exporter.outputs.otlp.push_settings import Protocol, PushSettings, resolve
from torch_grad_exporter.outputs.outputs import CLOSE_SECONDS

PROTOCOLS: dict[str, type[HttpReceiver | GrpcReceiver]] = {"http/protobuf": HttpReceiver, "grpc": GrpcReceiver}
STEPS, CAPTURES = "torch_train_steps_total", "torch_grad_captures_total"
VOLATILE = ("process_", "python_gc_", "torch_process_", "torch_host_", "torch_container_", "torch_grad_exporter_", "torch_gpu_")
"""Metrics that change by themselves."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of OpenTelemetry."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way at the end arrives, and so does the last export, however slow the machine is just now."""
    for name in ("GRACE", "LAST_SECONDS"):
        monkeypatch.setattr(push_module, name, PATIENCE)
    monkeypatch.setattr(outputs_module, "CLOSE_SECONDS", PATIENCE)


@pytest.fixture(name="hurried")
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end has the time that it has."""
    for name, seconds in (("GRACE", GRACE), ("LAST_SECONDS", LAST_SECONDS)):
        monkeypatch.setattr(push_module, name, seconds)
    monkeypatch.setattr(outputs_module, "CLOSE_SECONDS", CLOSE_SECONDS)


@pytest.fixture(name="one_try")
def _one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export fails at once where there would be a pause before another try."""
    monkeypatch.setattr(delivery_module, "FIRST_PAUSE", FOREVER)


class Clock:
    """The time of the push, which passes when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0
        self._looks = 0

    def monotonic(self) -> float:
        """As of `time`."""
        self._looks += 1
        return self._now

    def time_ns(self) -> int:
        """As of `time`."""
        return time.time_ns()

    def pass_by(self, seconds: float) -> None:
        """So many seconds pass."""
        self._now += seconds

    def is_noticed(self) -> bool:
        """Whether who waits looks at the time, twice: what it does about the first look is done."""
        looks = self._looks
        return eventually(lambda: self._looks >= looks + 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The push has this one."""
    made = Clock()
    monkeypatch.setattr(push_module, "time", made)
    return made


@pytest.fixture(name="only_the_end")
def _only_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no export soon after the start."""
    monkeypatch.setattr("torch_grad_exporter.outputs.otlp.push.FIRST_SECONDS", math.inf)


class Training:
    """A small model in training, with an exporter that only pushes, ten times a second."""

    def __init__(self, endpoint: str, protocol: str = "http/protobuf", **options: object) -> None:
        torch.manual_seed(8)
        self.model = Perceptron()
        self._optimizer = sgd(self.model)
        chosen = {"port": None, "run": "a run", "rank": 0, "every": 1, "otlp_interval": 0.1, **options}
        self.exporter: Exporter = start_exporter(
            self.model, otlp_endpoint=endpoint, otlp_protocol=protocol, **chosen  # type: ignore[arg-type]
        )  # fmt: skip
        self.steps = 0

    def step(self, times: int = 1) -> None:
        """Some steps."""
        for _ in range(times):
            self._optimizer.zero_grad()
            self.model(batch()).square().mean().backward()
            self._optimizer.step()
            self.steps += 1

    def failures(self) -> float:
        """Exports that failed so far."""
        return errors(self.exporter).get("otlp", 0.0)


@contextmanager
def closing(training: Training) -> Iterator[Training]:
    """Ends it."""
    try:
        yield training
    finally:
        training.exporter.close()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that say that something is wrong."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def written(points: dict[Key, Point]) -> dict[Key, str]:
    """Points as texts, since NaN is not equal to itself."""
    return {key: repr(point) for key, point in points.items()}


def still(points: dict[Key, Point]) -> dict[Key, Point]:
    """Those that do not change by themselves."""
    return {key: point for key, point in points.items() if not key[0].startswith(VOLATILE)}


# What arrives


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_series_arrives(protocol: str) -> None:
    """A push of what a scrape shows has every point of it, with the same value, histograms included."""
    with closing(Training(refused(), labels={"team": "x"})) as training:
        training.step(5)
        assert eventually(lambda: any(name == CAPTURES for name, _ in values(training.exporter)))
        families = training.exporter.collect()
    labels = {"run": "a run", "rank": "0", "team": "x"}
    with PROTOCOLS[protocol]() as receiver:
        push, log = pushing(receiver, protocol, lambda: families, labels)
        assert eventually(lambda: len(receiver.received) > 1)
        push.close(PATIENCE)
    wanted = expected(families, labels)
    assert written(receiver.points()) == written(wanted)
    assert len(wanted) > 100
    assert any(isinstance(point, tuple) for point in wanted.values())
    assert log.counts()["otlp"] == 0


def pushing(receiver: Receiver, protocol: str, scrape: Callable[[], list[Family]], labels: dict[str, str]) -> tuple[Push, ErrorLog]:
    """A push of these families."""
    settings = resolve(receiver.endpoint, protocol, {}, 0.1)
    assert settings is not None
    log = ErrorLog(("otlp",))
    push = Push(scrape, settings, labels, on_error=lambda error: log.tell_once("otlp", error))
    push.start()
    return push, log


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_last_push_is_the_last_scrape(protocol: str) -> None:
    """After the end the receiver has what `collect()` shows of all series that stand still by themselves, no more and no fewer."""
    with PROTOCOLS[protocol]() as receiver, closing(Training(receiver.endpoint, protocol)) as training:
        training.step(7)
        training.exporter.close()
        wanted = expected(training.exporter.collect(), {"run": "a run", "rank": "0"})
        found = receiver.points()
        (resource,) = {one.resource_metrics[0].resource.SerializeToString() for one in receiver.taken}
    assert written(still(found)) == written(still(wanted))
    assert len(still(found)) > 50
    assert {name for name, _ in found} >= {"process_cpu_seconds_total", "torch_grad_exporter_errors_total"}
    assert receiver.latest(STEPS) == 7
    assert receiver.latest("torch_train_state", state="finished") == 1
    found_pid = {pair.key: pair.value.int_value for pair in Resource.FromString(resource).attributes}["process.pid"]
    assert found_pid == os.getpid()


@pytest.mark.parametrize(("error", "state"), [(None, "finished"), (ZeroDivisionError, "failed"), (SystemExit, "finished")])
@pytest.mark.usefixtures("only_the_end")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_last_push_says_how_the_run_ended(protocol: str, error: type[BaseException] | None, state: str) -> None:
    """In a run that is over before the first interval is, too."""
    with PROTOCOLS[protocol]() as receiver:
        training = Training(receiver.endpoint, protocol, otlp_interval=3600)
        with ExitStack() as stack:
            if error is not None:
                stack.enter_context(pytest.raises(error))
            with training.exporter as exporter:
                assert (exporter.port, exporter.url) == (None, None)
                training.step(2)
                if error is not None:
                    raise error
        first, second = (dict(liars.points(one.request)) for one in receiver.received)
        assert any(name == "torch_train_state" for name, _ in first)
        assert all("layer" in dict(labels) for _, labels in second)
        assert receiver.latest("torch_train_state", state=state) == 1
        assert receiver.latest(STEPS) == 2


@pytest.mark.usefixtures("only_the_end")
def test_the_end_is_pushed_before_a_scrape_is_waited_for() -> None:
    """With `linger` the receiver knows how the run ended while the end still waits: a launcher may end the process before."""
    with HttpReceiver() as receiver, closing(Training(receiver.endpoint, port=0, linger=FOREVER, otlp_interval=3600)) as training:
        training.step(2)
        url = training.exporter.url or ""
        ending = threading.Thread(target=training.exporter.close)
        ending.start()
        assert eventually(lambda: bool(receiver.received))
        assert ending.is_alive()
        assert receiver.latest("torch_train_state", state="finished") == 1
        urllib.request.urlopen(url, timeout=PATIENCE).close()
        ending.join(PATIENCE)
        assert not ending.is_alive()


def test_the_first_export_does_not_wait_for_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong endpoint is told within two seconds of the start, by its address; the second export is an interval later."""
    assert push_module.FIRST_SECONDS == 2
    monkeypatch.setattr(push_module, "FIRST_SECONDS", 0.1)
    with HttpReceiver() as receiver, closing(Training(receiver.endpoint, otlp_interval=3600)) as training:
        assert eventually(lambda: bool(receiver.received))
        time.sleep(0.5)
        assert len(receiver.received) == 1
        assert training.failures() == 0


def test_a_refusal_names_the_address(caplog: pytest.LogCaptureFixture) -> None:
    """And what was answered, as text; a password is not shown."""
    with HttpReceiver() as receiver:
        receiver.answer(Answer(404, body="nichts für\nuns".encode()))
        endpoint = receiver.endpoint.replace("http://", "http://me:s3cret@")
        with closing(Training(endpoint)) as training:
            assert eventually(lambda: training.failures() > 0)
    (line,) = told(caplog)
    shown = receiver.endpoint.replace("http://", "http://...@")
    assert f"HTTP 404 Not Found from {shown}/v1/metrics; is this the path of OTLP's metrics?: nichts für uns" in line
    assert "s3cret" not in line


def test_a_scrape_and_a_push_at_a_time() -> None:
    """With a port, both are there."""
    with HttpReceiver() as receiver:
        model = Perceptron()
        with start_exporter(model, 0, addr="127.0.0.1", otlp_endpoint=receiver.endpoint, otlp_interval=0.1) as exporter:
            assert exporter.port
            assert eventually(lambda: len(receiver.received) >= 2)


# Failures

ANSWERS = {
    "bad request": ("http/protobuf", Answer(400)),
    "unauthorized": ("http/protobuf", Answer(401)),
    "not found": ("http/protobuf", Answer(404)),
    "busy": ("http/protobuf", Answer(503)),
    "redirect": ("http/protobuf", Answer(307, {"Location": "http://127.0.0.1:1/v1/metrics"})),
    "web page": ("http/protobuf", Answer(kind="text/html", body=b"<html>")),
    "partial": ("http/protobuf", Answer(rejected=1)),
    "code: invalid": ("grpc", Answer(code=grpc.StatusCode.INVALID_ARGUMENT)),
    "code: unavailable": ("grpc", Answer(code=grpc.StatusCode.UNAVAILABLE)),
    "code: unknown": ("grpc", Answer(code=grpc.StatusCode.UNKNOWN)),
    "code: partial": ("grpc", Answer(rejected=1)),
}


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize("name", ANSWERS)
def test_failures_are_counted_and_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each export that fails counts one; the log has a single line of it, ours; what comes after is pushed as ever."""
    protocol, answer = ANSWERS[name]
    with (
        caplog.at_level(logging.INFO),
        PROTOCOLS[protocol]() as receiver,
        closing(Training(receiver.endpoint, protocol)) as training,
    ):
        receiver.answer(answer)
        training.step()
        assert eventually(lambda: training.failures() >= 3)
        receiver.answer(Answer())
        calls = len(receiver.received)
        assert eventually(lambda: len(receiver.received) >= calls + 2)
        failed = sum(one.answer is answer for one in receiver.received)
        assert training.failures() == failed
        assert receiver.latest("torch_grad_exporter_errors_total", source="otlp") == failed
    (line,) = told(caplog)
    assert line.startswith("torch_grad_exporter: otlp: ")
    assert line.endswith("training goes on, further failures are only counted")
    assert "\n" not in line
    assert all(record.name == "torch_grad_exporter" and record.exc_info is None for record in caplog.records)


# Without a receiver

LIARS: dict[str, Callable[[Liar, socket.socket], None]] = {
    "black hole": liars.black_hole,
    "slow headers": liars.SLOW_HEADERS,
    "slow body": liars.SLOW_BODY,
    "endless body": liars.ENDLESS_BODY,
    "endless headers": liars.ENDLESS_HEADERS,
    "cut body": liars.CUT_BODY,
    "another protocol": liars.NO_HTTP,
}


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_end_is_not_held_up(protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an export that has a minute: `close()` takes at most two seconds with every liar."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setattr(delivery_module, "FIRST_PAUSE", 0.05)  # all tries without a receiver are soon over
    authority("another").issue("ip:127.0.0.1").write(tmp_path, "server")
    with ExitStack() as stack:
        told = {name: stack.enter_context(Liar(treat)) for name, treat in LIARS.items()}
        silent = stack.enter_context(Liar(liars.black_hole))
        (tmp_path / "ca.crt").write_text(authority().pem)
        unfit = stack.enter_context(tls_receiver(protocol, tmp_path))
        pausing = stack.enter_context(PROTOCOLS[protocol]())
        pausing.answer(Answer(503, {"Retry-After": "50"}, code=grpc.StatusCode.UNAVAILABLE, trailers=liars.retry_info(50)))
        cases: dict[str, tuple[str, Callable[[], int]]] = {
            **{name: (liar.endpoint, lambda liar=liar: liar.connections) for name, liar in told.items()},  # type: ignore[misc]
            "TLS": (silent.endpoint.replace("http:", "https:"), lambda: silent.connections),
            "pause": (pausing.endpoint, lambda: len(pausing.received)),
            "refused": (refused(), lambda: 0),
            "certificate": (unfit.endpoint, lambda: 0),
        }
        with ThreadPoolExecutor(3) as pool:  # each end is to be held up by its own receiver, not by the other ten
            soon = dict(zip(cases, pool.map(lambda case: ends_soon(protocol, *case), cases.values()), strict=True))
    assert all(soon.values()), soon
    assert unfit.received == []


def ends_soon(protocol: str, endpoint: str, begun: Callable[[], int]) -> bool:
    """Whether a training comes to its end within two seconds, in the middle of an export that has begun, or has failed at once."""

    def seconds() -> float:
        before = begun()
        training = Training(endpoint, protocol)
        training.step(3)
        assert eventually(lambda: begun() > before or training.failures() > 0)
        training.step(3)
        start = time.monotonic()
        training.exporter.close()
        return time.monotonic() - start

    return eventually(lambda: seconds() <= 2)


class Hanging:
    """A way to a receiver on which nothing comes to its end. `sending`: how many try."""

    over = threading.Event()
    sending = 0

    def send(self, body: bytes) -> None:
        type(self).sending += 1
        self.over.wait(FOREVER)
        type(self).sending -= 1

    def close(self) -> None:
        """Nothing of it ends anything."""


def test_exports_that_hang_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at most are left behind, and exports that are not tried count as failures, too; when they end, there are new ones."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.01")
    settings = resolve(refused(), None, None, 0.1)
    assert settings is not None
    failures: list[BaseException] = []
    ways: list[Hanging] = []

    def connect(seconds: float) -> Hanging:
        ways.append(Hanging())
        return ways[-1]

    labels = {"run": "a run", "rank": "0"}
    push = Push(lambda: [scalar(TRAIN_LOSS, 1.0)], settings, labels, on_error=failures.append, connect=connect)
    push.start()
    assert eventually(lambda: len(failures) >= LEFT_BEHIND + 3)
    assert Hanging.sending == LEFT_BEHIND == len(ways)
    assert "did not finish within" in str(failures[0])
    assert "3 exports hang" in str(failures[-1])
    Hanging.over.set()
    assert eventually(lambda: len(ways) > LEFT_BEHIND)
    push.close(PATIENCE)
    assert eventually(lambda: Hanging.sending == 0)


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_receiver_that_comes_back(protocol: str, temporality: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time without it, and one in which it refuses all, it has every step; the sum of differences is the total, too."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality)
    with PROTOCOLS[protocol]() as first:
        training = Training(first.endpoint, protocol)
        training.step(4)
        assert eventually(lambda: total(temporality, STEPS, first) == 4)
    failed = training.failures()
    training.step(5)
    assert eventually(lambda: training.failures() >= failed + 2)
    with PROTOCOLS[protocol](port=first.port) as second:
        second.answer(Answer(503, code=grpc.StatusCode.UNAVAILABLE))
        assert eventually(lambda: len(second.received) >= 2)
        training.step(6)
        second.answer(Answer())
        calls = len(second.received)
        assert eventually(lambda: len(second.received) >= calls + 2)  # the first one may have begun before the last step
        assert total(temporality, STEPS, first, second) == 15
        training.step(2)
        training.exporter.close()
        assert total(temporality, STEPS, first, second) == 17
        captures = sum(number for (name, _), number in values(training.exporter).items() if name == CAPTURES)
        assert total(temporality, CAPTURES, first, second) == captures >= 2 * 17


def total(temporality: str, name: str, *receivers: Receiver) -> float:
    """A counter over all its series, as a store has it that these receivers write to."""
    if temporality == "delta":
        return sum(receiver.total(name) for receiver in receivers)
    known = {key: point for receiver in receivers for key, point in receiver.points().items() if key[0] == name}
    return math.fsum(point for point in known.values() if isinstance(point, float))


def test_differences_that_are_on_their_way_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that is under way when the run ends is waited for a little: what it carries is not sent once more."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    with HttpReceiver() as receiver, closing(Training(receiver.endpoint)) as training:
        receiver.answer(Answer(after=0.1))
        training.step(5)
        assert eventually(lambda: receiver.total(STEPS) > 0)  # and is not answered yet
        training.exporter.close()
        assert receiver.total(STEPS) == 5
        assert receiver.latest("torch_train_state", state="finished") == 1


def test_rejected_differences_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a receiver does not take, it has seen."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    with HttpReceiver() as receiver, closing(Training(receiver.endpoint)) as training:
        receiver.answer(Answer(rejected=1))
        training.step(5)
        assert eventually(lambda: receiver.total(STEPS) == 5)
        calls = len(receiver.received)
        assert eventually(lambda: len(receiver.received) > calls + 2)
        assert receiver.total(STEPS) == 5


# Several requests

COUNTERS = [Spec(f"{name}_total", Kind.COUNTER, "Counted.") for name in "abc"]
DIFFERENCES = {Kind.COUNTER: Temporality.DELTA, Kind.HISTOGRAM: Temporality.DELTA}


@pytest.fixture(name="each_alone")
def _each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each metric is a request of its own."""
    monkeypatch.setattr(otlp, "REQUEST_BYTES", 1)


class Counting:
    """Counters that have counted one more, each of them, at every scrape."""

    def __init__(self) -> None:
        self.scraped: list[float] = []

    def __call__(self) -> list[Family]:
        self.scraped.append(time.monotonic())
        return [scalar(spec, float(len(self.scraped))) for spec in COUNTERS]

    def totals(self) -> dict[str, float]:
        """What a receiver should have."""
        return {spec.name: float(len(self.scraped)) for spec in COUNTERS}


class Ways:
    """A receiver that is no further away than a call. `react` does to a request, by its number, what is done to it."""

    def __init__(self, react: Callable[[int], None] = lambda _: None) -> None:
        self._react = react
        self.seconds: list[float] = []
        self.closed: list[int] = []
        self.sent: list[ExportMetricsServiceRequest] = []
        self.taken: list[ExportMetricsServiceRequest] = []

    def connect(self, seconds: float) -> Delivery:
        """One more way to it."""
        self.seconds.append(seconds)
        self.closed.append(0)
        return Way(self, len(self.closed) - 1)

    def take(self, request: ExportMetricsServiceRequest) -> None:
        """What a way sends."""
        self.sent.append(request)
        self._react(len(self.sent) - 1)
        self.taken.append(request)

    def names(self) -> list[str]:
        """The metrics that were sent, in order."""
        return [metric.name for request in self.sent for metric in liars.metrics(request)]

    def push(self, scrape: Callable[[], list[Family]], **options: Any) -> tuple[Push, list[BaseException]]:  # noqa: ANN401
        """A push of differences that has not begun, and what goes wrong in it."""
        failures: list[BaseException] = []
        settings = PushSettings(**{"endpoint": refused(), "interval": 0.1, "temporality": DIFFERENCES, **options})
        return Push(scrape, settings, {"run": "r", "rank": "0"}, on_error=failures.append, connect=self.connect), failures


@dataclass
class Way:
    """One way to it, by its number."""

    ways: Ways
    number: int

    def send(self, body: bytes) -> None:
        """As of `Delivery`."""
        self.ways.take(ExportMetricsServiceRequest.FromString(body))

    def close(self) -> None:
        """As of `Delivery`."""
        self.ways.closed[self.number] += 1


def summed(requests: Iterable[ExportMetricsServiceRequest]) -> dict[str, float]:
    """The sum of all points of each metric."""
    found: dict[str, float] = {}
    for request in requests:
        for (name, _), point in liars.points(request):
            assert isinstance(point, float)
            found[name] = found.get(name, 0.0) + point
    return found


@pytest.mark.usefixtures("one_try", "each_alone")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_export_that_arrives_in_part_is_not_sent_again_in_that_part(protocol: str) -> None:
    """Of three requests the second one is not taken: the third one is left to the next export, and the sums are the totals."""
    busy = Answer(503, code=grpc.StatusCode.UNAVAILABLE)
    with PROTOCOLS[protocol]() as receiver:
        receiver.answer(Answer(), busy, Answer(), Answer(), Answer(), Answer(), busy, Answer())
        counting, failures = Counting(), list[BaseException]()
        settings = resolve(receiver.endpoint, protocol, {}, 0.1)
        assert settings is not None
        settings = replace(settings, temporality=DIFFERENCES)
        push = Push(counting, settings, {"run": "r", "rank": "0"}, on_error=failures.append)
        push.start()
        assert eventually(lambda: len(receiver.received) > 12)
        push.close(PATIENCE)
        assert len(failures) == 2
        names = [metric.name[0] for one in receiver.received for metric in liars.metrics(one.request)]
        assert "".join(names).startswith("ab" + "abc" + "ab" + "abc")
        assert summed(receiver.taken) == counting.totals()


@pytest.mark.usefixtures("each_alone")
def test_a_slow_receiver_has_its_time_for_each_request(clock: Clock) -> None:
    """Three requests that take 0.4 s each are no failure where one may take 1.02 s, and nothing is sent twice."""

    def react(number: int) -> None:
        if number < 3:
            clock.pass_by(0.4)
            assert clock.is_noticed()

    ways, counting = Ways(react), Counting()
    push, failures = ways.push(counting, timeout=0.01)
    push.start()
    assert eventually(lambda: len(ways.taken) > 6)
    push.close(PATIENCE)
    assert failures == []
    assert summed(ways.sent) == summed(ways.taken) == counting.totals()


@pytest.mark.usefixtures("each_alone")
def test_what_hangs_costs_what_had_arrived_before_it_nothing(clock: Clock) -> None:
    """A second request that hangs: the first one is not sent again, and the third one by the next export alone.

    That goes on with the second one, too: it is not known that it arrives in the end.
    """
    released, too_late = threading.Event(), threading.Event()

    def react(number: int) -> None:
        if number == 1:
            clock.pass_by(1.03)
            released.wait(FOREVER)
            too_late.set()

    ways, counting = Ways(react), Counting()
    push, failures = ways.push(counting, timeout=0.01, interval=0.2)
    push.start()
    assert eventually(lambda: len(failures) == 1)
    released.set()
    assert too_late.wait(PATIENCE)
    assert eventually(lambda: len(ways.taken) > 8)
    push.close(PATIENCE)
    assert [str(one) for one in failures] == ["a request did not finish within 1.02 s"]
    assert ways.names() == ["a_total", "b_total", *[spec.name for spec in COUNTERS] * (len(counting.scraped) - 1)]
    assert summed(ways.taken) == counting.totals() | {"b_total": counting.totals()["b_total"] + 1}
    assert ways.closed == [1] * len(ways.closed)


@pytest.mark.usefixtures("each_alone")
def test_the_end_waits_for_the_request_that_is_on_its_way_alone() -> None:
    """What an export has not begun to send when the run ends is left to the last one."""
    begun, ended = threading.Event(), threading.Event()

    def react(number: int) -> None:
        if number == 0:
            begun.set()
            ended.wait(FOREVER)

    ways, counting = Ways(react), Counting()
    push, failures = ways.push(counting)
    push.start()
    assert begun.wait(PATIENCE)
    push.end()
    ended.set()
    push.close(PATIENCE)
    assert failures == []
    assert ways.names() == ["a_total", "a_total", "b_total", "c_total"]
    assert summed(ways.taken) == counting.totals() == dict.fromkeys(counting.totals(), 2.0)


@pytest.mark.usefixtures("one_try", "each_alone")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_that_is_refused_holds_up_no_other(protocol: str) -> None:
    """Of three the second one is refused for good in each export: the third one arrives, and no difference is sent twice."""
    refusal = Answer(400, code=grpc.StatusCode.INVALID_ARGUMENT)
    with PROTOCOLS[protocol]() as receiver:
        receiver.answer(*[Answer(), refusal, Answer()] * 100)
        counting, failures = Counting(), list[BaseException]()
        settings = resolve(receiver.endpoint, protocol, {}, 3600)
        assert settings is not None
        push = Push(counting, replace(settings, temporality=DIFFERENCES), {"run": "r", "rank": "0"}, on_error=failures.append)
        push.start()
        for number in (1, 2):
            push._thread.wake()
            assert eventually(lambda number=number: len(failures) == number)  # type: ignore[misc]
        push.close(PATIENCE)
        assert len(failures) == len(counting.scraped) == 3
        truth = counting.totals()
        assert summed(one.request for one in receiver.received) == truth
        assert summed(receiver.taken) == {name: total for name, total in truth.items() if name != "b_total"}


@pytest.mark.usefixtures("hurried")
def test_the_last_export_begins_with_the_state(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request takes 0.6 s: what has no layer is the first one, and all of them have 1.1 s together."""
    monkeypatch.setattr(otlp, "REQUEST_BYTES", 2000)
    monkeypatch.setattr(otlp, "BLOCK_BYTES", 2000)
    rows = LabelRows(tuple((f"layer {i}",) for i in range(100)))
    ended = Family(TRAIN_STATE, np.ones(1), LabelRows((("finished",),)))
    families = [Family(GRAD_NORM, np.ones(100), rows), scalar(TRAIN_LOSS, 1.0), ended]
    ways = Ways(lambda _: clock.pass_by(0.6))
    push, failures = ways.push(lambda: families, interval=3600)
    push.start()
    push.close(PATIENCE)
    sent = [[metric.name for metric in liars.metrics(one)] for one in ways.sent]
    assert sent == [["torch_train_loss", "torch_train_state"], ["torch_grad_norm"]]
    assert ways.seconds[1:] == pytest.approx([1.1, 0.5])
    assert [str(one) for one in failures] == ["there was no time left for all of the last export"]


# Time and connections


def test_differences_count_since_the_export_before_that_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start is the time of that export, also after one that was lost; where the clock is set back, time stands still."""
    clock = iter([100, 110, 120, 130, 60, 70, 140])  # the first one is the start
    monkeypatch.setattr(push_module, "time", SimpleNamespace(monotonic=time.monotonic, time_ns=lambda: next(clock, 150)))

    def react(number: int) -> None:
        if number == 1:
            raise DeliveryError("lost")

    ways = Ways(react)
    push, failures = ways.push(lambda: [scalar(COUNTERS[0], 1.0)], interval=0.05)
    push.start()
    assert eventually(lambda: len(ways.sent) >= 6)
    push.close(PATIENCE)
    found = [point for request in ways.sent for metric in liars.metrics(request) for point in metric.sum.data_points]
    times = [(point.start_time_unix_nano, point.time_unix_nano) for point in found]
    assert times[:6] == [(100, 110), (110, 120), (110, 130), (130, 130), (130, 130), (130, 140)]
    assert len(failures) == 1


def test_there_is_an_export_in_each_interval_and_none_before() -> None:
    """The nth begins n intervals after the start, or later; after one that took three of them, they are not made up for."""
    ways, counting = Ways(lambda number: time.sleep(0.45 if number == 1 else 0)), Counting()
    push, _ = ways.push(counting, interval=0.15)
    before = time.monotonic()
    push.start()
    assert eventually(lambda: len(counting.scraped) >= 6)
    push.close(PATIENCE)
    late = [at - before for at in counting.scraped[:6]]
    assert all(at >= (number + 1) * 0.15 for number, at in enumerate(late)), late
    assert late[5] >= late[1] + 0.45 + 2 * 0.15


@pytest.mark.usefixtures("each_alone", "hurried")
def test_the_last_export_has_its_own_connections_and_leaves_none(clock: Clock) -> None:
    """Each request of it has one, for what is left of 1.1 s; all of them are closed, and so is that of the exports before."""
    ways = Ways(lambda number: clock.pass_by(0.1 if number > 2 else 0))
    push, failures = ways.push(Counting(), timeout=7.0, interval=3600)
    push._thread.wake()
    push.start()
    assert eventually(lambda: len(ways.taken) >= 3)
    push.close(PATIENCE)
    assert failures == []
    assert ways.closed == [1, 1, 1, 1]
    assert ways.seconds == pytest.approx([7.0, LAST_SECONDS, LAST_SECONDS - 0.1, LAST_SECONDS - 0.2])


@pytest.mark.parametrize("protocol", list(Protocol))
def test_a_request_has_the_smaller_of_two_times(protocol: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last export has 1.1 s, or what the settings give an export if that is less."""
    found: list[float] = []

    def made(_settings: PushSettings, seconds: float) -> Delivery:
        found.append(seconds)
        return Ways().connect(seconds)

    monkeypatch.setattr(push_module, "HttpDelivery", made)
    monkeypatch.setattr(delivery_grpc, "GrpcDelivery", made)
    for timeout in (10.0, 0.7):
        connected(PushSettings(endpoint="http://h", protocol=protocol, timeout=timeout), LAST_SECONDS)
    assert found == [LAST_SECONDS, 0.7]


def test_a_metric_that_cannot_be_sent_is_told_and_the_others_are_sent() -> None:
    """A family with more labels than it has names costs itself alone; when it is right again, its differences are all there."""
    spec = Spec("wrong_total", Kind.COUNTER, "Wrong.", ("layer",))
    counted = itertools.count(1)

    def scrape() -> list[Family]:
        wrong = LabelRows((("a", "b") if len(ways.sent) < 2 else ("a",),))
        return [scalar(COUNTERS[0], float(next(counted))), Family(spec, np.array([7.0]), wrong)]

    ways = Ways()
    push, failures = ways.push(scrape)
    push.start()
    assert eventually(lambda: len(ways.taken) >= 4)
    push.close(PATIENCE)
    assert [str(one).partition(":")[0] for one in failures] == ["wrong_total cannot be encoded"] * 2
    assert summed(ways.taken) == {"a_total": next(counted) - 1.0, "wrong_total": 7.0}


# Forks

PROGRAM = """
import os, sys, threading, time, torch
from torch.utils.data import DataLoader
from torch_grad_exporter import start_exporter

def train(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

# What gRPC says in a child, at a fork amid a call, is not looked at; what Python says is.
sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
os.register_at_fork(after_in_child=lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))

def ended(child):
    give_up_at = time.monotonic() + 120
    while time.monotonic() < give_up_at:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    return "hangs"

torch.set_num_threads(1)
made = []
for endpoint, protocol in zip(sys.argv[1:], ("http/protobuf", "grpc")):
    model = torch.nn.Linear(2, 2)
    options = {"otlp_endpoint": endpoint, "otlp_protocol": protocol, "otlp_interval": 0.1}
    made.append((model, torch.optim.SGD(model.parameters(), lr=0.1), start_exporter(model, None, run=protocol, **options)))
sys.stdin.readline()
ready, done = os.pipe()
child = os.fork()
for model, optimizer, exporter in made:
    train(model, optimizer)
if child == 0:
    exporter.close()
    os.close(ready)
    sys.exit(0)
print("child", ended(child), flush=True)
for x in DataLoader(torch.ones(64, 2), batch_size=8, num_workers=2, multiprocessing_context="fork"):
    for model, optimizer, exporter in made:
        train(model, optimizer)
print("loader", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    os.close(1)
    for model, optimizer, exporter in made:
        train(model, optimizer)
    sys.stdin.readline()
    sys.exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_forked_children_send_nothing() -> None:
    """Over HTTP and gRPC, in the middle of pushes: children and workers of a DataLoader come to their end as ever.

    The parent's pushes go on, also at an end without `close()`, and a child that outlives it sends nothing.
    """
    with HttpReceiver() as http, GrpcReceiver() as over_grpc:
        receivers = (http, over_grpc)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), http.endpoint, over_grpc.endpoint],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            assert eventually(lambda: all(len(one.received) > 2 for one in receivers))
            process.stdin.write("go\n")
            process.stdin.flush()
            lines = [process.stdout.readline(), process.stdout.readline()]
            assert lines == ["child 0\n", "loader\n"]
            counts = [len(one.received) for one in receivers]
            assert eventually(lambda: all(len(one.received) > n + 2 for one, n in zip(receivers, counts, strict=True)))
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.wait(PATIENCE) == 0
            counts = [len(one.received) for one in receivers]
            assert not eventually(lambda: [len(one.received) for one in receivers] != counts, 0.5)
            process.stdin.write("go\n")
            process.stdin.close()
            said = process.stderr.read()  # to its end, which the child that is left has come to as well
            assert [line for line in said.splitlines() if "fork_posix.cc" not in line] == []  # gRPC's own, at a fork amid a call
        for one in receivers:
            assert one.latest("torch_train_state", state="finished") == 1
            assert one.latest(STEPS) == 9
            assert one.latest("torch_grad_exporter_errors_total", source="otlp") == 0
            steps = [point for request in one.taken for (name, _), point in liars.points(request) if name == STEPS]
            assert all(a <= b for a, b in itertools.pairwise(steps))
