"""Problems and actions as log records: what receivers get, from receivers without logs, within spans, and at the end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest
import torch
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.sdk.trace import TracerProvider

from tests.outputs.otlp.support import BUSY, PROTOCOLS, Training, closing, every_protocol, warned
from tests.support import otlp_receiver as liars
from tests.support.otlp_receiver import Answer, HttpReceiver, Liar, attributes
from tests.support.scrape import errors
from tests.support.tools import PATIENCE, eventually, threads_of_ours
from torch_grad_exporter import __version__
from torch_grad_exporter.actions import ScaleLearningRate
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.outputs.otlp.push import LogPush
from torch_grad_exporter.outputs.otlp.push_settings import Signal, resolve
from torch_grad_exporter.store.journal import MOST, Journal, JournalEvent

WARN, ERROR, INFO = 13, 17, 9  # OpenTelemetry's severity numbers
NONFINITE = "TrainingNonFiniteGradients"


def spoiled(training: Training) -> None:
    """Let a training have a NaN in a gradient."""
    training.step(3)
    handle = next(training.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    training.step()
    handle.remove()


def judge(training: Training) -> None:
    """Have the rules judged now."""
    with tempfile.TemporaryDirectory() as folder:
        training.exporter.save(f"{folder}/run.json")


def named(records: list[LogRecord], name: str, **wanted: str) -> list[LogRecord]:
    """Return the records of an event that have these attributes."""
    return [record for record in records if record.event_name == name and wanted.items() <= attributes(record.attributes).items()]


# What arrives


@every_protocol
def test_a_problem_begins_and_ends(protocol: str) -> None:
    """A NaN is a record once it is judged, and one more at the end of the run; resource and scope are those of the metrics."""
    with PROTOCOLS[protocol]() as receiver:
        with closing(Training(receiver.endpoint, protocol)) as training:
            spoiled(training)
            judge(training)
            (problem,) = [each for each in training.exporter.problems() if each.alert == NONFINITE]
            assert eventually(lambda: bool(named(receiver.records, "torch.problem.start", alert=NONFINITE)))
            assert not named(receiver.records, "torch.problem.end")
        (start,) = named(receiver.records, "torch.problem.start", alert=NONFINITE)
        (end,) = named(receiver.records, "torch.problem.end", alert=NONFINITE)
        metrics = receiver.taken[-1].resource_metrics[0]
    assert (start.severity_number, start.severity_text, start.body.string_value) == (ERROR, "critical", problem.text)
    facts = attributes(start.attributes)
    assert {name: facts[name] for name in ("run", "rank", "severity", "step", "start_step", "first_steps")} == {
        "run": "a run", "rank": "0", "severity": "critical", "step": "4", "start_step": "4", "first_steps": problem.first_steps,
    }  # fmt: skip
    assert (end.severity_number, end.severity_text) == (INFO, "info")
    assert end.body.string_value == f"Ended: {problem.text} The run has ended."
    assert attributes(end.attributes)["start_step"] == "4"
    assert 0 < start.time_unix_nano <= start.observed_time_unix_nano <= end.observed_time_unix_nano <= time.time_ns()
    for resource in receiver.logs:
        assert attributes(resource.resource.attributes) == attributes(metrics.resource.attributes)
        (scope,) = resource.scope_logs
        assert (scope.scope.name, scope.scope.version) == ("torch_grad_exporter", __version__)
    assert not any(record.trace_id or record.span_id for record in receiver.records)


def test_a_healthy_run_sends_no_record() -> None:
    """A run without problems and actions sends metrics alone."""
    with HttpReceiver() as receiver:
        with closing(Training(receiver.endpoint)) as training:
            training.step(5)
        assert receiver.taken
        assert (receiver.log_requests, receiver.records) == (0, [])


def test_actions_within_spans() -> None:
    """An action is a record with the span of its step; the end of a problem at the end of the run has the span of that."""
    tracer = TracerProvider().get_tracer("test")
    with HttpReceiver() as receiver:
        with closing(Training(receiver.endpoint)) as training:
            training.exporter.on(lambda m: m.last("torch_grad_global_norm") >= 0, ScaleLearningRate(0.5), name="halve")
            with tracer.start_as_current_span("step") as step:

                def acted() -> bool:
                    training.step()
                    return bool(receiver.records)

                assert eventually(acted)
            spoiled(training)
            with tracer.start_as_current_span("the end") as end:
                training.exporter.close()
        records = receiver.records
    (action,) = named(records, "torch.action")
    facts = attributes(action.attributes)
    assert (facts["condition"], facts["result"], action.severity_number) == ("halve", "done", WARN)
    assert facts["action"] in action.body.string_value
    assert f"step {facts['step']}" in action.body.string_value
    context = step.get_span_context()
    assert (action.trace_id, action.span_id) == (context.trace_id.to_bytes(16), context.span_id.to_bytes(8))
    assert action.flags & 1
    context = end.get_span_context()
    (ended,) = named(records, "torch.problem.end", alert=NONFINITE)
    assert (ended.trace_id, ended.span_id) == (context.trace_id.to_bytes(16), context.span_id.to_bytes(8))


def test_a_black_box_is_a_record(tmp_path: Path) -> None:
    """What was written of a problem is a record with the path of the file."""
    with HttpReceiver() as receiver:
        with closing(Training(receiver.endpoint, black_box=tmp_path)) as training:
            spoiled(training)
        (record,) = named(receiver.records, "torch.black_box", alert=NONFINITE)
    assert Path(attributes(record.attributes)["path"]).is_relative_to(tmp_path)
    assert attributes(record.attributes)["path"] in record.body.string_value


# Delivery

LABELS = {"run": "r1", "rank": "0"}


def event(number: int, **facts: str | float | None) -> JournalEvent:
    """Return an event with this number in its sentence."""
    return JournalEvent(1e9 + number, "torch.test", "warning", f"event {number}", facts)


class Sender:
    """A push of the events of a journal. `count`: how many failures were counted."""

    def __init__(self, endpoint: str, protocol: str = "http/protobuf", interval: float = 0.1, **variables: str) -> None:
        settings = resolve(endpoint, protocol, None, interval, signal=Signal.LOGS, environment=variables)
        assert settings is not None
        self.journal, self._errors = Journal(), ErrorLog(("otlp",))
        self.push = LogPush(self.journal, settings, LABELS, self._errors)
        self.push.start()

    @property
    def count(self) -> int:
        return self._errors.counts()["otlp"]


@contextlib.contextmanager
def sending(endpoint: str, protocol: str = "http/protobuf", **options: float) -> Iterator[Sender]:
    """Push a journal's events ten times a second, and close it."""
    sender = Sender(endpoint, protocol, **options)
    try:
        yield sender
    finally:
        assert sender.push.close(PATIENCE)


def bodies(receiver: liars.Receiver) -> list[str]:
    """Return the sentences that a receiver has."""
    return [record.body.string_value for record in receiver.records]


def test_attributes_that_cannot_be_sent() -> None:
    """What is unknown or not finite is left out, and half a character becomes a question mark."""
    with HttpReceiver() as receiver:
        with sending(receiver.endpoint) as sender:
            sender.journal.add(event(1, layer="a\ud800", value=math.nan, other=None, step=7, ratio=0.5))
        (record,) = receiver.records
    assert {item.key: item.value.WhichOneof("value") for item in record.attributes} == {
        "layer": "string_value", "step": "int_value", "ratio": "double_value", "run": "string_value", "rank": "string_value",
    }  # fmt: skip
    assert attributes(record.attributes)["layer"] == "a?"
    assert record.time_unix_nano == 1_000_000_001 * 10**9


def test_labels_of_the_target() -> None:
    """With `labels_on="target"` the resource has run, rank and the user's labels, and the records have none of them."""
    with HttpReceiver() as receiver:
        with closing(Training(receiver.endpoint, labels_on="target", labels={"team": "a"})) as training:
            spoiled(training)
        metrics = receiver.taken[-1].resource_metrics[0]
    assert receiver.records
    assert not any({"run", "rank", "team"} & attributes(record.attributes).keys() for record in receiver.records)
    for resource in receiver.logs:
        assert attributes(resource.resource.attributes) == attributes(metrics.resource.attributes)
        assert attributes(resource.resource.attributes)["team"] == "a"


REFUSALS: Mapping[str, Answer] = {
    "http/protobuf": Answer(404), "grpc": Answer(code=grpc.StatusCode.UNIMPLEMENTED),
}  # fmt: skip


@every_protocol
def test_receivers_without_logs(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """A receiver that takes no log records costs one failure, one line and one request; metrics go on."""
    with PROTOCOLS[protocol]() as receiver, caplog.at_level(logging.WARNING):
        receiver.log_answer = REFUSALS[protocol]
        with closing(Training(receiver.endpoint, protocol)) as training:
            spoiled(training)
            judge(training)
            assert eventually(lambda: receiver.log_requests == 1)
            before = len(receiver.taken)
            assert eventually(lambda: len(receiver.taken) > before + 1)
            assert errors(training.exporter)["otlp"] == 1
        assert receiver.latest("torch_train_state", state="finished") == 1
        assert (receiver.log_requests, receiver.records) == (1, [])
    (line,) = [text for text in warned(caplog) if "otlp" in text]
    assert "takes no log records" in line
    assert "OTEL_LOGS_EXPORTER=none" in line


@every_protocol
def test_receivers_that_deny_logs(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """The line for log records that a receiver does not permit names the variable that disables them."""
    denials = {"http/protobuf": Answer(401), "grpc": Answer(code=grpc.StatusCode.PERMISSION_DENIED)}
    with PROTOCOLS[protocol]() as receiver, caplog.at_level(logging.WARNING), sending(receiver.endpoint, protocol) as sender:
        receiver.log_answer = denials[protocol]
        sender.journal.add(event(1))
        assert eventually(lambda: sender.count > 0)
    (line,) = [text for text in warned(caplog) if "otlp" in text]
    assert "OTEL_LOGS_EXPORTER=none" in line


def test_a_single_refusal_costs_its_records() -> None:
    """A receiver that has accepted records and refuses some gets later ones; the refused are not sent again."""
    with HttpReceiver() as receiver, sending(receiver.endpoint) as sender:
        for number, answer in enumerate((Answer(), Answer(400), Answer())):
            receiver.log_answer = answer
            sender.journal.add(event(number))
            assert eventually(lambda expected=number + 1: receiver.log_requests == expected)  # type: ignore[misc]
        assert eventually(lambda: bodies(receiver) == ["event 0", "event 2"])
        assert sender.count == 1


@every_protocol
def test_nothing_is_lost_while_a_receiver_is_busy(protocol: str) -> None:
    """What a receiver could not take is sent later, in order and once, with what followed."""
    with PROTOCOLS[protocol]() as receiver, sending(receiver.endpoint, protocol) as sender:
        receiver.log_answer = BUSY
        for number in range(700):
            sender.journal.add(event(number))
        assert eventually(lambda: sender.count > 1)
        receiver.log_answer = Answer()
        sender.journal.add(event(700))
        assert eventually(lambda: len(receiver.records) > 700)
        assert bodies(receiver) == [f"event {number}" for number in range(701)]
        assert max(len(scope.log_records) for each in receiver.logs for scope in each.scope_logs) <= 512


def test_too_large_requests_of_records() -> None:
    """A request that a proxy refuses as too large is lost and costs a failure; later ones arrive."""
    with HttpReceiver(most=20_000) as receiver:
        with sending(receiver.endpoint) as sender:
            sender.journal.add(event(0, layer="x" * 30_000))
            assert eventually(lambda: sender.count == 1)
            sender.journal.add(event(1))
        assert bodies(receiver) == ["event 1"]
        assert sender.count == 1


def test_rejected_records_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A receiver that accepts a part of a request costs a failure, whose line says that records were rejected."""
    with HttpReceiver() as receiver, caplog.at_level(logging.WARNING):
        receiver.log_answer = Answer(rejected=3)
        with sending(receiver.endpoint) as sender:
            sender.journal.add(event(1))
        assert sender.count == 1
    (line,) = warned(caplog)
    assert "3 log records were rejected" in line


def test_the_latest_are_kept() -> None:
    """Of more than 2048 events that wait, the latest are sent."""
    journal = Journal()
    for number in range(MOST + 10):
        journal.add(event(number))
    assert [each.text for each in journal.take()] == [f"event {number}" for number in range(10, MOST + 10)]
    assert journal.take() == []


def test_the_end_sends_what_is_left() -> None:
    """`close` sends at once what waits for the next try, and what came last."""
    with HttpReceiver() as receiver:
        receiver.log_answer = BUSY
        sender = Sender(receiver.endpoint, interval=600)
        sender.journal.add(event(1))
        assert eventually(lambda: sender.count == 1)
        receiver.log_answer = Answer()
        sender.journal.add(event(2))
        assert sender.push.close(PATIENCE)
        assert bodies(receiver) == ["event 1", "event 2"]


@pytest.mark.parametrize("treat", [liars.black_hole, liars.ENDLESS_BODY], ids=["silent", "endless"])
def test_a_faulty_receiver_does_not_delay_the_end(treat: Callable[[Liar, liars.socket.socket], None]) -> None:
    """With a receiver that never answers, the end takes no longer than it may."""
    with Liar(treat) as liar:
        training = Training(liar.endpoint)
        spoiled(training)
        began = time.monotonic()
        training.exporter.close()
        assert time.monotonic() - began < 10  # the limits together are below 3 s; the machine may be busy
        liar.over.set()
    assert eventually(lambda: not any("logs" in thread.name for thread in threads_of_ours()))


def test_a_forked_child_sends_nothing() -> None:
    """A child has no thread that would send, also what its copy of the journal has, and its close returns."""
    with HttpReceiver() as receiver, closing(Training(receiver.endpoint)) as training:
        receiver.log_answer = BUSY
        spoiled(training)
        judge(training)
        assert eventually(lambda: receiver.log_requests > 0)
        with pytest.warns(DeprecationWarning, match="fork") if os.sys.version_info >= (3, 12) else contextlib.nullcontext():  # type: ignore[attr-defined]
            child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                training.exporter.close()
                os._exit(7 if any("logs" in thread.name for thread in threads_of_ours()) else 0)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert receiver.records == []
        receiver.log_answer = Answer()
        training.exporter.close()
        assert len(named(receiver.records, "torch.problem.start", alert=NONFINITE)) == 1


# When


@pytest.mark.parametrize(
    ("arguments", "variables", "endpoints"),
    [
        ({"endpoint": "http://h"}, {}, ("http://h/v1/metrics", "http://h/v1/logs")),
        ({"endpoint": "http://h/v1/metrics?a=b"}, {}, ("http://h/v1/metrics?a=b", "http://h/v1/logs?a=b")),
        ({"endpoint": "h:4317", "protocol": "grpc"}, {}, ("h:4317", "h:4317")),
        ({"endpoint": "http://h"}, {"OTEL_LOGS_EXPORTER": "none"}, ("http://h/v1/metrics", None)),
        ({"endpoint": "http://h"}, {"OTEL_METRICS_EXPORTER": "none"}, (None, None)),
        ({"endpoint": "http://h"}, {"OTEL_METRICS_EXPORTER": "prometheus"}, ("http://h/v1/metrics", "http://h/v1/logs")),
        ({"endpoint": "http://h"}, {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "otlp"}, (None, "http://h/v1/logs")),
        ({"endpoint": "http://h"}, {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://l/x"}, ("http://h/v1/metrics", "http://l/x")),
        ({}, {"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, (None, None)),
        ({}, {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, (None, None)),
        (
            {},
            {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"},
            (None, "http://h/v1/logs"),
        ),
        ({}, {"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://h/x"}, (None, "http://h/x")),
        ({}, {"OTEL_LOGS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h/x"}, ("http://h/x", None)),
        ({"endpoint": "http://h"}, {"OTEL_SDK_DISABLED": "true"}, (None, None)),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1/a"}, ("http://h:1/a/v1/metrics", "http://h:1/a/v1/logs")),
        ({}, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h/x"}, ("http://h/x", None)),
        ({}, {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://h/x"}, (None, "http://h/x")),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_LOGS_EXPORTER": "console"}, ("http://h/v1/metrics", None)),
        ({}, {}, (None, None)),
    ],
)
def test_where_each_signal_goes(
    arguments: dict[str, str], variables: dict[str, str], endpoints: tuple[str | None, str | None]
) -> None:
    """Metrics and log records have the same endpoint, unless a variable of one of them names another, or forbids it."""
    each = [resolve(**arguments, signal=signal, environment=variables) for signal in Signal]  # type: ignore[arg-type]
    assert tuple(None if settings is None else settings.endpoint for settings in each) == endpoints


OWN_LOGS, OWN_METRICS = "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


@pytest.mark.parametrize(
    ("endpoint", "variables", "sent"),
    [
        ("http://h", {}, True),
        ("http://h", {OWN_LOGS: "http://other/x"}, False),
        ("http://h", {OWN_LOGS: "http://H:80/x"}, True),
        ("https://h", {OWN_LOGS: "http://h/x"}, False),
        ("http://h", {OWN_LOGS: "http://other/x", "OTEL_METRICS_EXPORTER": "none"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        (None, {OWN_METRICS: "https://vendor/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, False),
        (None, {OWN_METRICS: "http://[h", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        (None, {OWN_METRICS: "http://h/x", OWN_LOGS: "http://h/y"}, True),
        (None, {OWN_LOGS: "http://h/x"}, True),
    ],
)
def test_headers_reach_no_other_receiver(
    endpoint: str | None, variables: dict[str, str], sent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Headers of the argument go with log records only to the receiver of metrics; else a line says so."""
    with caplog.at_level(logging.INFO, logger="torch_grad_exporter"):
        settings = resolve(endpoint, headers={"Authorization": "hunter2"}, signal=Signal.LOGS, environment=variables)
    assert settings is not None
    assert settings.headers == ({"authorization": "hunter2"} if sent else None)
    assert ["otlp_headers" in line for line in caplog.messages] == [True] * (not sent)
    assert "hunter2" not in caplog.text


def test_a_label_replaces_no_fact() -> None:
    """A record keeps its own attributes beside a label of the same name, and has the other labels."""
    with HttpReceiver() as receiver:
        with closing(Training(receiver.endpoint, labels={"step": "abc", "team": "a"})) as training:
            spoiled(training)
        (start,) = named(receiver.records, "torch.problem.start", alert=NONFINITE)
    facts = attributes(start.attributes)
    assert (facts["step"], facts["team"]) == ("4", "a")


def test_variables_of_log_records(clean: pytest.MonkeyPatch) -> None:
    """Headers and compression of log records have variables of their own, which win over those of all signals."""
    clean.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-all=a")
    clean.setenv("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "x-own=b")
    clean.setenv("OTEL_EXPORTER_OTLP_LOGS_COMPRESSION", "gzip")
    seen: list[Mapping[str, str]] = []
    with HttpReceiver() as receiver:
        take = receiver.take

        def noted(path: str, headers: Mapping[str, str], body: bytes) -> Answer:
            seen.append(headers)
            return take(path, headers, body)

        receiver.take = noted  # type: ignore[method-assign]
        with sending(receiver.endpoint) as sender:
            sender.journal.add(event(1))
        assert bodies(receiver) == ["event 1"]
    (headers,) = seen
    assert (headers["x-own"], headers["content-encoding"]) == ("b", "gzip")
    settings = resolve("http://h", signal=Signal.LOGS, environment={"OTEL_EXPORTER_OTLP_LOGS_TIMEOUT": "3"})
    assert settings is not None
    assert settings.timeout == 3


def test_training_is_unchanged() -> None:
    """Weights are the same to the last bit with and without log records."""

    def weights(**options: object) -> list[torch.Tensor]:
        with closing(Training(**options)) as training:  # type: ignore[arg-type]
            training.step(3)
            return [parameter.detach().clone() for parameter in training.model.parameters()]

    with HttpReceiver() as receiver:
        with_logs = weights(endpoint=receiver.endpoint)
    for ours, theirs in zip(with_logs, weights(endpoint=None), strict=True):
        assert torch.equal(ours, theirs)
