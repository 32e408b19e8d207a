"""Push from a training: failures, the end of the run, receivers that come back, and forked children."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from tests.outputs.otlp.support import BUSY, PREFERENCE, PROTOCOLS, Training, closing, every_protocol, total, warned
from tests.support import otlp_receiver as liars
from tests.support.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, Key, Liar, Point, expected
from tests.support.programs import Starter
from tests.support.scrape import values
from tests.support.tools import PATIENCE, eventually, threads_of_ours

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


class Held(HttpReceiver):
    """Answers its first request when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.may_answer = threading.Event(), threading.Event()

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Hold the first request."""
        if not self.first.is_set():
            self.first.set()
            assert self.may_answer.wait(PATIENCE)
        return super().take(path, headers, body)


def test_a_request_under_way_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last export waits for a request under way, also beyond the end; nothing fails, and each step arrives once."""
    monkeypatch.setenv(PREFERENCE, "delta")
    with Held() as receiver:
        training = Training(receiver.endpoint)
        training.step(3)
        assert receiver.first.wait(PATIENCE)
        training.exporter.close()
        receiver.may_answer.set()
        assert eventually(lambda: not threads_of_ours())
        assert training.failures() == 0
        assert receiver.total(STEPS) == 3


# Failures

ANSWERS = {"busy": ("http/protobuf", BUSY), "code: invalid": ("grpc", Answer(code=grpc.StatusCode.INVALID_ARGUMENT))}


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
        failed = training.failures()
        # An exporter sends again at once where a connection breaks, as it may on a busy machine.
        assert 3 <= failed <= sum(item.answer is answer for item in receiver.received)
        assert receiver.latest("torch_grad_exporter_errors_total", source="otlp") == failed
        (line,) = warned(caplog)  # before the end, whose export may be late on a busy machine
    assert line.startswith("torch_grad_exporter: otlp: ")
    assert "\n" not in line
    assert all(record.name == "torch_grad_exporter" and record.exc_info is None for record in caplog.records)


@pytest.mark.process
@pytest.mark.parametrize(("protocol", "temporality"), [("http/protobuf", "delta"), ("grpc", "cumulative")])
def test_a_receiver_that_comes_back(protocol: str, temporality: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time without it, and one in which it refuses all, it has every step; the sum of differences is the total, too."""
    monkeypatch.setenv(PREFERENCE, temporality)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    with PROTOCOLS[protocol]() as first:
        training = Training(first.endpoint, protocol)
        training.step(4)
        assert eventually(lambda: total(temporality, CAPTURES, first) == 2 * 4)
        exports = len(first.received)
        assert eventually(lambda: len(first.received) > exports)  # else that answer may be lost, and what it was for comes again
        assert total(temporality, STEPS, first) == 4
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


# Forks

PROGRAM = """
import os, sys, time, torch
from torch.utils.data import DataLoader
from torch_grad_exporter import start_exporter

def train(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

# What gRPC says in a child, at a fork amid a call, is not looked at; what Python says is.
sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
os.register_at_fork(after_in_child=lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))

def wait(number):
    while not os.path.exists(f"{sys.argv[1]}/{number}"):
        time.sleep(0.01)

def ended(child):
    give_up_at = time.monotonic() + 120
    while time.monotonic() < give_up_at:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    return "hangs"

made = []
for endpoint, protocol in zip(sys.argv[2:], ("http/protobuf", "grpc")):
    model = torch.nn.Linear(2, 2)
    options = {"otlp_endpoint": endpoint, "otlp_protocol": protocol, "otlp_interval": 0.1}
    made.append((model, torch.optim.SGD(model.parameters(), lr=0.1), start_exporter(model, None, run=protocol, **options)))
wait(1)
child = os.fork()
for model, optimizer, exporter in made:
    train(model, optimizer)
if child == 0:
    exporter.close()
    sys.exit(0)
print("child", ended(child), flush=True)
for x in DataLoader(torch.ones(64, 2), batch_size=32, num_workers=1, multiprocessing_context="fork"):
    for model, optimizer, exporter in made:
        train(model, optimizer)
print("loader", flush=True)
wait(2)
if os.fork() == 0:
    os.close(1)
    for model, optimizer, exporter in made:
        train(model, optimizer)
    wait(3)
    open(f"{sys.argv[1]}/over", "w").close()
    sys.exit(0)
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.parametrize("kinds", [(HttpReceiver,), pytest.param((HttpReceiver, GrpcReceiver), marks=pytest.mark.full)])
def test_forked_children_send_nothing(
    starter: Starter, tmp_path: Path, kinds: tuple[type[HttpReceiver | GrpcReceiver], ...]
) -> None:
    """Forked children and workers of a DataLoader send nothing and end as ever amid pushes; the parent pushes its end."""
    with ExitStack() as stack:
        receivers = [stack.enter_context(kind()) for kind in kinds]
        program = starter.start(PROGRAM, str(tmp_path), *(item.endpoint for item in receivers))
        assert eventually(lambda: all(len(item.received) > 2 for item in receivers))
        (tmp_path / "1").touch()
        assert [program.line(0), program.line(1)] == ["child 0", "loader"]
        counts = [len(item.received) for item in receivers]
        assert eventually(lambda: all(len(item.received) > n + 2 for item, n in zip(receivers, counts, strict=True)))
        (tmp_path / "2").touch()
        assert program.wait() == 0
        counts = [len(item.received) for item in receivers]
        assert not eventually(lambda: [len(item.received) for item in receivers] != counts, 0.5)
        (tmp_path / "3").touch()
        assert eventually((tmp_path / "over").exists)
        said = program.err.read_text().splitlines()
        assert [line for line in said if "fork_posix.cc" not in line] == []  # gRPC's own, at a fork amid a call
        for item in receivers:
            assert item.latest("torch_train_state", state="finished") == 1
            assert item.latest(STEPS) == 3
            assert item.latest("torch_grad_exporter_errors_total", source="otlp") == 0
            steps = [point for request in item.taken for (name, _), point in liars.points(request) if name == STEPS]
            assert all(a <= b for a, b in itertools.pairwise(steps))
