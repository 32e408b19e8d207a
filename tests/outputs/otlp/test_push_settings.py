"""What to push and where: arguments and OpenTelemetry's variables, right and wrong, and the resource."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.otlp.push import identified
from torch_grad_exporter.outputs.otlp.push_settings import DELTA, Protocol, PushSettings, resolve

WHERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
SECRET = "hunter2-hunter2"  # noqa: S105 - to be searched for in messages


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, from the level of information on."""
    with caplog.at_level(logging.INFO, logger="torch_grad_exporter"):
        yield caplog


def warnings(lines: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings, of whichever logger."""
    return [record.getMessage() for record in lines.records if record.levelno >= logging.WARNING]


def resolved(arguments: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> PushSettings:
    """Return the settings, which exist."""
    result = resolve(**(arguments or {}), environment=environment or {})  # type: ignore[arg-type]
    assert result is not None
    return result


# Right


def test_nothing_is_pushed_without_an_endpoint(lines: pytest.LogCaptureFixture) -> None:
    """Without an endpoint there is no push and no line in the log, whatever else is set."""
    others = {"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon", "OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": " "}
    assert resolve(protocol="http/protobuf", headers={"a": "b"}, interval=5, environment=others) is None
    assert lines.records == []


def test_endpoints() -> None:
    """An endpoint for all signals gets the path of metrics once, one for metrics does not, and an argument wins over both."""
    for arguments, variables, expected in (
        ({}, {"": "  http://h?tenant=7  "}, "http://h/v1/metrics?tenant=7"),
        ({}, {"": "http://h:4318/v1/metrics"}, "http://h:4318/v1/metrics"),
        ({}, {"": "http://all", "METRICS_": "http://h/api/v1/otlp/x"}, "http://h/api/v1/otlp/x"),
        ({"endpoint": "http://arg"}, {"": "no URL", "METRICS_": "http://mine"}, "http://arg/v1/metrics"),
        ({"endpoint": "[::1]:4317", "protocol": "grpc"}, {}, "[::1]:4317"),
    ):
        environment = {f"OTEL_EXPORTER_OTLP_{name}ENDPOINT": text for name, text in variables.items()}
        assert resolved(arguments, environment).endpoint == expected


def test_switches(lines: pytest.LogCaptureFixture) -> None:
    """`true` and `none` forbid all push, with a line where an argument asks for it; other exporters forbid it to variables."""
    for name, text, by_variable, by_argument in (
        ("OTEL_SDK_DISABLED", " TRUE ", False, False),
        ("OTEL_METRICS_EXPORTER", "None", False, False),
        ("OTEL_METRICS_EXPORTER", "console, OTLP", True, True),
        ("OTEL_METRICS_EXPORTER", "prometheus,console", False, True),
    ):
        lines.clear()
        assert (resolve(environment={name: text, **WHERE}) is not None) is by_variable
        assert lines.records == []
        assert (resolve("http://arg", environment={name: text}) is not None) is by_argument
        assert [name in record.getMessage() for record in lines.records] == [True] * (not by_argument)


RIGHT: list[tuple[dict[str, str], str, object]] = [
    ({"EXPORTER_OTLP_PROTOCOL": " gRPC "}, "protocol", Protocol.GRPC),
    ({"EXPORTER_OTLP_PROTOCOL": "udp", "EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}, "protocol", Protocol.GRPC),
    ({"EXPORTER_OTLP_TIMEOUT": "0.5", "EXPORTER_OTLP_METRICS_TIMEOUT": " "}, "timeout", 0.5),
    ({"METRIC_EXPORT_TIMEOUT": "2500"}, "timeout", 2.5),
    ({"METRIC_EXPORT_INTERVAL": "1500.5"}, "interval", 1.5005),
    ({"EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "Delta"}, "delta", DELTA["delta"]),
    # Our counters are asynchronous, which stay totals.
    ({"EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "LowMemory"}, "delta", {Kind.HISTOGRAM}),
    ({"EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram"}, "exponential", True),
]


def test_right_variables(lines: pytest.LogCaptureFixture) -> None:
    """A valid variable sets what it stands for, that for metrics first, without a line in the log."""
    for variables, setting, expected in RIGHT:
        environment = {**WHERE, **{f"OTEL_{name}": text for name, text in variables.items()}}
        assert getattr(resolved(environment=environment), setting) == expected, variables
    assert lines.records == []


# Wrong


def test_a_wrong_number_costs_itself(lines: pytest.LogCaptureFixture) -> None:
    """Push goes on with the default, and one warning names the variable and its text."""
    for name, text, setting in (("EXPORTER_OTLP_TIMEOUT", "nan", "timeout"), ("METRIC_EXPORT_INTERVAL", "0", "interval")):
        lines.clear()
        settings = resolved(environment={**WHERE, f"OTEL_{name}": text})
        assert getattr(settings, setting) == getattr(resolved(environment=WHERE), setting)
        (warning,) = warnings(lines)
        assert f"OTEL_{name}={text!r} is ignored" in warning


def test_a_wrong_variable_costs_the_push(lines: pytest.LogCaptureFixture) -> None:
    """Nothing raises, nothing is pushed, and one warning names the variable."""
    for name, text in (("ENDPOINT", "collector:4318"), ("PROTOCOL", "http/json")):
        lines.clear()
        assert resolve(environment={**WHERE, f"OTEL_EXPORTER_OTLP_{name}": text}) is None
        (warning,) = warnings(lines)
        assert f"no metrics are pushed: OTEL_EXPORTER_OTLP_{name}={text!r}" in warning


WRONG: list[tuple[str, object, type[Exception]]] = [
    ("endpoint", b"http://h", TypeError),
    ("endpoint", "ftp://h", ValueError),
    ("protocol", "http/json", ValueError),
    ("interval", "60", TypeError),
    ("interval", 0, ValueError),
    ("interval", math.nan, ValueError),
    ("headers", {"a": SECRET.encode()}, TypeError),
    ("headers", {"ok": "x", "a": f"{SECRET}\r\nx-b: c"}, ValueError),
]


def test_wrong_arguments_are_named() -> None:
    """A wrong argument raises with its name, also where variables forbid all push; values of headers are not shown."""
    for (name, value, kind), environment in itertools.product(WRONG, ({}, {"OTEL_SDK_DISABLED": "true"})):
        with pytest.raises((TypeError, ValueError)) as caught:
            resolve(**{"endpoint": "http://h", name: value}, environment=environment)  # type: ignore[arg-type]
        assert caught.type is kind
        assert str(caught.value).startswith("otlp_headers" if name == "headers" else f"otlp_{name}={value!r}: ")
        assert "hunter2" not in str(caught.value)


def test_a_password_in_an_endpoint_is_not_shown(lines: pytest.LogCaptureFixture) -> None:
    """No message about an endpoint, right or wrong, an argument or a variable, shows a password or a key; gRPC takes none."""
    refusals = []
    for endpoint, protocol in itertools.product(
        ("https://h/x?token=hunter2", "http://user:a@hunter2@h:1/p@q", "user:hunter2@h:4318", "http://user:a\nhunter2@h:4318"),
        ("http/protobuf", "grpc"),
    ):
        for value in (endpoint, endpoint.encode()):
            try:
                resolve(value, protocol, environment={})
            except (TypeError, ValueError) as error:
                refusals.append(str(error))
        resolve(environment={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    assert len(refusals) >= 8
    with pytest.raises(ValueError, match="password") as caught:  # which gRPC's libraries would log and not send
        resolve("http://me:hunter2@h:4317", "grpc", environment={"OTEL_SDK_DISABLED": "true"})
    assert "hunter2" not in "".join(refusals) + str(caught.value) + lines.text


@pytest.mark.parametrize("missing", ["grpc", "opentelemetry.exporter.otlp.proto.grpc"])
def test_a_missing_package_for_grpc_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    """Without gRPC an argument raises and a variable costs the push with one warning, each with the command to install it."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:  # noqa: ANN401 - as importlib's
        return None if name == missing else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ImportError, match=r"otlp_protocol='grpc'.*pip install opentelemetry-exporter-otlp-proto-grpc"):
        resolve("http://h:4317", "grpc", environment={})
    assert resolve(environment={**WHERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is None
    (warning,) = warnings(lines)
    assert "pip install opentelemetry-exporter-otlp-proto-grpc" in warning


# Through the front door


def ours() -> set[str]:
    """Return the names of our threads."""
    return {thread.name for thread in threading.enumerate() if "torch-grad-exporter" in thread.name}


def test_training_goes_on_with_a_wrong_variable(clean: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture) -> None:
    """With a wrong endpoint in the environment there is one warning and no push, and exporter and training go on."""
    clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nonsense")
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with start_exporter(model, port=None) as exporter:
        assert exporter.collect()
        assert not any("push" in name for name in ours())
        step(model)
    assert not torch.equal(model.weight, before)
    (warning,) = warnings(lines)
    assert "no metrics are pushed: OTEL_EXPORTER_OTLP_ENDPOINT='nonsense'" in warning


EXPORTERS: dict[str, tuple[str, str, str, str]] = {
    "a choice": ("http/protobuf", "COMPRESSION", "snappy", "snappy"),
    "a header": ("http/protobuf", "HEADERS", f"a:{SECRET}", "a header of the environment cannot be read"),
    "a choice over gRPC": ("grpc", "COMPRESSION", "deflate", "no metrics are pushed"),
}


@pytest.mark.parametrize("name", EXPORTERS)
def test_variables_of_exporters_are_warned_of(name: str, clean: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture) -> None:
    """A variable that OpenTelemetry's exporter reads and cannot use is one warning, without the value of a header."""
    protocol, variable, text, expected = EXPORTERS[name]
    clean.setenv(f"OTEL_EXPORTER_OTLP_{variable}", text)
    with start_exporter(torch.nn.Linear(2, 1), port=None, otlp_endpoint="http://127.0.0.1:9", otlp_protocol=protocol):
        pass
    assert [expected in line for line in warnings(lines)].count(True) == 1
    assert "hunter2" not in lines.text


def test_the_environment_starts_a_push(clean: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture) -> None:
    """The variable alone starts a push, which logs where to and how often and ends with the exporter."""
    clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    clean.setenv("OTEL_METRIC_EXPORT_INTERVAL", "7000")
    with start_exporter(torch.nn.Linear(2, 1), port=None):
        assert any("push" in name for name in ours())
    assert "pushing metrics to http://127.0.0.1:9/v1/metrics every 7 s" in lines.text
    assert eventually(lambda: not any("push" in name for name in ours()))


# The resource


def step(model: torch.nn.Module) -> None:
    """Take one step of training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def test_the_resource(clean: pytest.MonkeyPatch) -> None:
    """The resource has service, instance, host, process, run and rank; variables change all but run and rank."""
    _, result = identified({"run": "run 7", "rank": "3"}, "series")
    expected = {
        "service.name": "training", "service.instance.id": "run 7/3", "process.pid": os.getpid(), "run": "run 7", "rank": "3",
    }  # fmt: skip
    assert {name: result[name] for name in expected} == expected
    assert result["host.name"]
    clean.setenv("OTEL_RESOURCE_ATTRIBUTES", "nonsense,service.name=other,team=a%20b,run=x,rank=99,empty=,bad=%zz")
    _, result = identified({"run": "r", "rank": "0"}, "series")
    expected = {"service.name": "other", "team": "a b", "bad": "%zz", "run": "r", "rank": "0"}
    assert {name: result[name] for name in expected} == expected
    assert not {"nonsense", "empty"} & set(result)
    clean.setenv("OTEL_SERVICE_NAME", "mine")
    assert identified({"run": "r", "rank": "0"}, "series")[1]["service.name"] == "mine"
