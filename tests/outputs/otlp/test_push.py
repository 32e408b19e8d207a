"""Push from a training: failures, the end of the run, receivers that come back, and forked children."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack

import grpc
import numpy as np
import pytest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from tests.outputs.otlp.support import BUSY, PREFERENCE, PROTOCOLS, Training, closing, every_protocol, pushing, total, warned
from tests.support import otlp_receiver as liars
from tests.support.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, Key, Liar, Point, expected
from tests.support.scrape import values
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows, Spec, scalar

STEPS, CAPTURES = "torch_train_steps_total", "torch_grad_captures_total"
VOLATILE = ("process_", "python_gc_", "torch_process_", "torch_host_", "torch_container_", "torch_grad_exporter_", "torch_gpu_")
"""Metrics that change by themselves."""


def still(points: dict[Key, Point]) -> dict[Key, str]:
    """Return the points that do not change by themselves, as texts, since NaN is not equal to itself."""
    return {key: repr(point) for key, point in points.items() if not key[0].startswith(VOLATILE)}


# The end, which has about a second: on a busy machine the last export may be late in some of the attempts.


@every_protocol
def test_the_last_push_is_the_last_scrape(protocol: str) -> None:
    """After the end the receiver has the series and values that `collect()` shows, and the labels of the user."""

    def is_in_time() -> bool:
        with PROTOCOLS[protocol]() as receiver, closing(Training(receiver.endpoint, protocol, labels={"team": "x"})) as training:
            training.step(7)
            training.exporter.close()
            if receiver.latest("torch_train_state", state="finished") != 1:
                return False
            wanted = expected(training.exporter.collect(), {"run": "a run", "rank": "0", "team": "x"})
            received = receiver.points()
            (resource,) = {item.resource_metrics[0].resource.SerializeToString() for item in receiver.taken}
        if still(received).keys() != still(wanted).keys():
            return False
        assert still(received) == still(wanted)
        assert len(still(received)) > 50
        assert {name for name, _ in received} >= {"process_cpu_seconds_total", "torch_grad_exporter_errors_total"}
        assert receiver.latest(STEPS) == 7
        assert {pair.key: pair.value.int_value for pair in Resource.FromString(resource).attributes}["process.pid"] == os.getpid()
        return True

    assert eventually(is_in_time)


@pytest.mark.parametrize(
    ("protocol", "error", "state"), [("http/protobuf", ZeroDivisionError, "failed"), ("grpc", SystemExit, "finished")]
)
def test_the_last_push_says_how_the_run_ended(protocol: str, error: type[BaseException], state: str) -> None:
    """A run that is over before the first interval still pushes its state and its steps."""

    def is_in_time() -> bool:
        with (
            PROTOCOLS[protocol]() as receiver,
            pytest.raises(error),
            Training(receiver.endpoint, protocol, otlp_interval=3600).exporter,
        ):
            raise error
        return receiver.latest("torch_train_state", state=state) == 1

    assert eventually(is_in_time)


def test_the_end_is_pushed_before_lingering() -> None:
    """With `linger` the receiver learns how the run ended while the end still waits, and a scrape ends that wait."""
    with HttpReceiver() as receiver, closing(Training(receiver.endpoint, port=0, addr="127.0.0.1", linger=FOREVER)) as training:
        training.step(2)
        url = training.exporter.url or ""
        ending = threading.Thread(target=training.exporter.close)
        ending.start()
        assert eventually(lambda: receiver.latest("torch_train_state", state="finished") == 1)
        assert ending.is_alive()
        urllib.request.urlopen(url, timeout=PATIENCE).close()
        ending.join(PATIENCE)
        assert not ending.is_alive()


@pytest.mark.process
@every_protocol
def test_the_end_is_not_held_up(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an export that has a minute `close()` takes at most two seconds, whatever the receiver does."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    pause = Answer(503, {"Retry-After": "50"}, code=grpc.StatusCode.RESOURCE_EXHAUSTED, trailers=liars.retry_info(50))
    with Liar(liars.black_hole) as silent, Liar(liars.ENDLESS_BODY) as endless, PROTOCOLS[protocol]() as pausing:
        pausing.answer(pause)
        assert ends_soon(protocol, endless.endpoint, lambda: endless.connections)
        assert ends_soon(protocol, silent.endpoint.replace("http:", "https:"), lambda: silent.connections)
        assert ends_soon(protocol, pausing.endpoint, lambda: len(pausing.received))


def ends_soon(protocol: str, endpoint: str, begun: Callable[[], int]) -> bool:
    """Return whether a training ends within two seconds in the middle of an export that has begun or failed at once."""

    def seconds() -> float:
        before = begun()
        training = Training(endpoint, protocol)
        assert eventually(lambda: begun() > before or training.failures() > 0)
        start = time.monotonic()
        training.exporter.close()
        return time.monotonic() - start

    return eventually(lambda: seconds() <= 2)


# Failures

ANSWERS = {
    "busy": ("http/protobuf", BUSY),
    "partial": ("http/protobuf", Answer(rejected=1)),
    "code: invalid": ("grpc", Answer(code=grpc.StatusCode.INVALID_ARGUMENT)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_failures_are_counted_and_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each export that fails counts one, and the log has a single line of it, ours; later ones are pushed as ever."""
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
        failed = sum(item.answer is answer for item in receiver.received)
        assert training.failures() == failed
        assert receiver.latest("torch_grad_exporter_errors_total", source="otlp") == failed
    (line,) = warned(caplog)
    assert line.startswith("torch_grad_exporter: otlp: ")
    assert "\n" not in line
    assert all(record.name == "torch_grad_exporter" and record.exc_info is None for record in caplog.records)


@pytest.mark.process
def test_a_wrong_address_is_logged_soon(caplog: pytest.LogCaptureFixture) -> None:
    """The first export does not wait for the interval; a refusal is logged with the address and without the password."""
    with HttpReceiver() as receiver:
        receiver.answer(Answer(404, body="nichts für\nuns".encode()))
        endpoint = receiver.endpoint.replace("http://", "http://me:s3cret@")
        with closing(Training(endpoint, otlp_interval=3600)) as training:
            assert eventually(lambda: training.failures() > 0)
            assert len(receiver.received) == 1
    (line,) = warned(caplog)
    for part in ("404", receiver.endpoint.removeprefix("http://"), "nichts für uns"):
        assert part in line
    assert "s3cret" not in line


@pytest.mark.process
def test_exports_that_hang_are_few_and_end() -> None:
    """Three exports at most hang at a time, those not tried count as failures, and when they end there are new ones."""
    spec = Spec("a_total", Kind.COUNTER, "Counted.")
    with Liar(liars.SLOW_HEADERS) as liar:
        port = liar.port
        with pushing(liar.endpoint, lambda: [scalar(spec, 1.0)], EXPORTER_OTLP_TIMEOUT="0.3") as failures:
            assert eventually(lambda: any("3 exports hang" in str(failure) for failure in failures))
            assert sum("did not finish within" in str(failure) for failure in failures) >= 3
            liar.__exit__()
            with HttpReceiver(port=port) as receiver:
                assert eventually(lambda: bool(receiver.received))


@pytest.mark.process
@pytest.mark.parametrize(("protocol", "temporality"), [("http/protobuf", "delta"), ("grpc", "cumulative")])
def test_a_receiver_that_comes_back(protocol: str, temporality: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time without it, and one in which it refuses all, it has every step; the sum of differences is the total, too."""
    monkeypatch.setenv(PREFERENCE, temporality)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    with PROTOCOLS[protocol]() as first:
        training = Training(first.endpoint, protocol)
        training.step(4)
        assert eventually(lambda: total(temporality, STEPS, first) == 4)
    failed = training.failures()
    training.step(5)
    assert eventually(lambda: training.failures() > failed)
    with PROTOCOLS[protocol](port=first.port) as second, closing(training):
        second.answer(BUSY)
        assert eventually(lambda: len(second.received) >= 2)
        training.step(6)
        second.answer(Answer())
        assert eventually(lambda: total(temporality, STEPS, first, second) == 15)
        captures = sum(number for (name, _), number in values(training.exporter).items() if name == CAPTURES)
        assert captures >= 2 * 15
        assert eventually(lambda: total(temporality, CAPTURES, first, second) == captures)


@pytest.mark.process
def test_a_busy_receiver_is_tried_again() -> None:
    """A request that a receiver refuses for a moment is sent again, not before the moment is over."""
    soon = Answer(503, {"Retry-After": "1"}, code=grpc.StatusCode.RESOURCE_EXHAUSTED, trailers=liars.retry_info(1))
    for protocol, receiver_of in PROTOCOLS.items():
        with receiver_of() as receiver, closing(Training(receiver.endpoint, protocol, otlp_interval=3600)) as training:
            receiver.answer(soon, Answer())
            assert eventually(lambda: len(receiver.received) >= 2)
            first, second = receiver.received[:2]
            assert first.request == second.request
            assert second.at - first.at >= 0.95
            assert training.failures() == 0


# Differences


COUNTERS = [Spec(f"{name}_total", Kind.COUNTER, "Counted.", ("layer",)) for name in "abc"]
MANY = LabelRows(tuple((f"model.blocks.{number}.attention.weight" * 40,) for number in range(2000)))


@pytest.mark.slow
def test_an_export_may_arrive_in_part() -> None:
    """Of an export of several requests the second is refused: no difference is sent twice, or lost."""
    scrapes = 0

    def scrape() -> list[Family]:
        nonlocal scrapes
        scrapes += 1
        return [Family(spec, np.full(len(MANY), float(scrapes)), MANY) for spec in COUNTERS]

    with HttpReceiver() as receiver:
        receiver.answer(Answer(), BUSY, Answer())
        with pushing(receiver.endpoint, scrape, EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE="delta") as failures:
            assert eventually(lambda: scrapes >= 4)
            receiver.answer(BUSY)
            assert eventually(lambda: len(failures) > 1)
            before = scrapes
            receiver.answer(Answer())
            assert eventually(lambda: scrapes > before + 2)
        received: dict[Key, float] = {}
        for request in receiver.taken:
            for key, point in liars.points(request):
                assert isinstance(point, float)
                received[key] = received.get(key, 0.0) + point
    assert len(received) == 3 * len(MANY)
    assert set(received.values()) <= {scrapes - 1, scrapes}  # the end may come amid the last one


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
for x in DataLoader(torch.ones(64, 2), batch_size=32, num_workers=1, multiprocessing_context="fork"):
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


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.parametrize("kinds", [(HttpReceiver,), pytest.param((HttpReceiver, GrpcReceiver), marks=pytest.mark.full)])
def test_forked_children_send_nothing(kinds: tuple[type[HttpReceiver | GrpcReceiver], ...]) -> None:
    """Forked children and workers of a DataLoader send nothing and end as ever in the middle of pushes, which go on.

    The parent pushes its end also without `close()`, and a child that outlives it sends nothing.
    """
    with ExitStack() as stack:
        receivers = [stack.enter_context(kind()) for kind in kinds]
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), *(item.endpoint for item in receivers)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            assert eventually(lambda: all(len(item.received) > 2 for item in receivers))
            process.stdin.write("go\n")
            process.stdin.flush()
            lines = [process.stdout.readline(), process.stdout.readline()]
            assert lines == ["child 0\n", "loader\n"]
            counts = [len(item.received) for item in receivers]
            assert eventually(lambda: all(len(item.received) > n + 2 for item, n in zip(receivers, counts, strict=True)))
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.wait(PATIENCE) == 0
            counts = [len(item.received) for item in receivers]
            assert not eventually(lambda: [len(item.received) for item in receivers] != counts, 0.5)
            process.stdin.write("go\n")
            process.stdin.close()
            said = process.stderr.read()  # to its end, which the child that is left has come to as well
            assert [line for line in said.splitlines() if "fork_posix.cc" not in line] == []  # gRPC's own, at a fork amid a call
        for item in receivers:
            assert item.latest("torch_train_state", state="finished") == 1
            assert item.latest(STEPS) == 3
            assert item.latest("torch_grad_exporter_errors_total", source="otlp") == 0
            steps = [point for request in item.taken for (name, _), point in liars.points(request) if name == STEPS]
            assert all(a <= b for a, b in itertools.pairwise(steps))
