"""What to push and where: arguments and OpenTelemetry's variables, right and wrong; and the resource."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.otlp_receiver import HttpReceiver
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.outputs.otlp.otlp import Temporality
from torch_grad_exporter.outputs.otlp.push import connected, resource
from torch_grad_exporter.outputs.otlp.push_settings import (
    Certificates,
    Compression,
    Protocol,
    PushSettings,
    resolve,
    with_path,
    without_password,
)

WHERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
HERE = "http://collector:4318/v1/metrics"
SECRET = "hunter2-hunter2"  # noqa: S105 - to be searched for in messages
CUMULATIVE = {Kind.COUNTER: Temporality.CUMULATIVE, Kind.HISTOGRAM: Temporality.CUMULATIVE}
DELTA = {Kind.COUNTER: Temporality.DELTA, Kind.HISTOGRAM: Temporality.DELTA}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, from the level of information on."""
    with caplog.at_level(logging.INFO, logger="torch_grad_exporter"):
        yield caplog


def warnings(lines: pytest.LogCaptureFixture) -> list[str]:
    """The warnings, of whichever logger."""
    return [record.getMessage() for record in lines.records if record.levelno >= logging.WARNING]


def resolved(arguments: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> PushSettings:
    """The settings, of which there are some."""
    found = resolve(**(arguments or {}), environment=environment or {})  # type: ignore[arg-type]
    assert found is not None
    return found


# Where to


def test_nothing_is_pushed_without_an_endpoint(lines: pytest.LogCaptureFixture) -> None:
    """Without an endpoint there is no push and no line in the log, whatever else is set."""
    others = {
        "OTEL_EXPORTER_OTLP_HEADERS": f"a={SECRET}", "OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon", "OTEL_SERVICE_NAME": "s",
        "OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": "soon", "OTEL_EXPORTER_OTLP_ENDPOINT": "  ",
    }  # fmt: skip
    for environment in ({}, others):
        assert resolve(environment=environment) is None
        assert resolve(protocol="http/protobuf", headers={"a": "b"}, interval=5, environment=environment) is None
    assert lines.records == []


def test_the_defaults_are_those_of_opentelemetry() -> None:
    """HTTP every 60 s, 10 s for an export, no compression, totals, explicit buckets, and no headers."""
    found = resolved(environment=WHERE)
    assert {one.name: getattr(found, one.name) for one in fields(PushSettings)} == {
        "endpoint": HERE, "protocol": Protocol.HTTP, "headers": {}, "interval": 60.0, "timeout": 10.0,
        "compression": Compression.NONE, "certificates": Certificates(), "insecure": True, "temporality": CUMULATIVE,
        "exponential": False,
    }  # fmt: skip


ENDPOINTS: list[tuple[str, dict[str, object], dict[str, str], str]] = [
    ("a base gets the path", {}, {"": "http://h:4318"}, "http://h:4318/v1/metrics"),
    ("with one slash", {}, {"": "http://h:4318/"}, "http://h:4318/v1/metrics"),
    ("below another path", {}, {"": "https://h/opentelemetry/"}, "https://h/opentelemetry/v1/metrics"),
    ("which it may have already", {}, {"": "http://h:4318/v1/metrics"}, "http://h:4318/v1/metrics"),
    ("a query stays", {}, {"": "http://h?tenant=7"}, "http://h/v1/metrics?tenant=7"),
    ("blanks around", {}, {"": "  http://h  "}, "http://h/v1/metrics"),
    ("IPv6", {}, {"": "http://[::1]:4318"}, "http://[::1]:4318/v1/metrics"),
    ("the one for metrics is taken as it is", {}, {"METRICS_": "http://h:4318"}, "http://h:4318"),
    ("with its path", {}, {"METRICS_": "http://h/api/v1/otlp/x"}, "http://h/api/v1/otlp/x"),
    ("and wins", {}, {"": "http://all", "METRICS_": "http://mine/m"}, "http://mine/m"),
    ("unless it is empty", {}, {"": "http://all", "METRICS_": " "}, "http://all/v1/metrics"),
    ("an argument wins", {"endpoint": "http://arg"}, {"": "http://all", "METRICS_": "http://mine"}, "http://arg/v1/metrics"),
    ("also over a wrong one", {"endpoint": "http://arg"}, {"": "no URL"}, "http://arg/v1/metrics"),
    ("an argument with the path", {"endpoint": "http://arg/x/v1/metrics"}, {}, "http://arg/x/v1/metrics"),
    ("gRPC has no path", {"endpoint": "http://h:4317", "protocol": "grpc"}, {}, "http://h:4317"),
    ("and takes an address", {"endpoint": "h:4317", "protocol": "grpc"}, {}, "h:4317"),
    ("of IPv6 too", {"endpoint": "[::1]:4317", "protocol": "grpc"}, {}, "[::1]:4317"),
    ("and from a variable", {"protocol": "grpc"}, {"": "10.0.0.7:4317"}, "10.0.0.7:4317"),
]


@pytest.mark.parametrize(("arguments", "variables", "expected"), [row[1:] for row in ENDPOINTS], ids=[row[0] for row in ENDPOINTS])
def test_endpoints(arguments: dict[str, object], variables: dict[str, str], expected: str) -> None:
    """An endpoint for all signals gets the path of metrics, one for metrics does not, and an argument wins over both."""
    environment = {f"OTEL_EXPORTER_OTLP_{name}ENDPOINT": text for name, text in variables.items()}
    assert resolved(arguments, environment).endpoint == expected


def test_the_path_is_added_once() -> None:
    """What has the path already does not get it a second time, as long as it ends so."""
    assert with_path(with_path("http://h/a?b=c")) == with_path("http://h/a?b=c") == "http://h/a/v1/metrics?b=c"
    assert with_path("http://h/v1/metrics/x") == "http://h/v1/metrics/x/v1/metrics"


# Switches

SWITCHES: list[tuple[dict[str, str], bool, bool]] = [
    ({"OTEL_SDK_DISABLED": "true"}, False, False),
    ({"OTEL_SDK_DISABLED": " TRUE "}, False, False),
    ({"OTEL_SDK_DISABLED": "false"}, True, True),
    ({"OTEL_SDK_DISABLED": "1"}, True, True),
    ({"OTEL_SDK_DISABLED": ""}, True, True),
    ({"OTEL_METRICS_EXPORTER": "none"}, False, False),
    ({"OTEL_METRICS_EXPORTER": "None"}, False, False),
    ({"OTEL_METRICS_EXPORTER": "otlp"}, True, True),
    ({"OTEL_METRICS_EXPORTER": "console, OTLP"}, True, True),
    ({"OTEL_METRICS_EXPORTER": "console"}, False, True),
    ({"OTEL_METRICS_EXPORTER": "prometheus,console"}, False, True),
    ({"OTEL_METRICS_EXPORTER": ""}, True, True),
    ({"OTEL_METRICS_EXPORTER": ","}, False, True),
]


@pytest.mark.parametrize(("environment", "by_variable", "by_argument"), SWITCHES, ids=repr)
def test_switches(environment: dict[str, str], by_variable: bool, by_argument: bool, lines: pytest.LogCaptureFixture) -> None:
    """`true` and `none` forbid all push; a list of other exporters is none of OTLP's, but an argument asks for it all the same."""
    assert (resolve(environment={**environment, **WHERE}) is not None) is by_variable
    assert lines.records == []
    assert (resolve("http://arg", environment=environment) is not None) is by_argument
    (name, text), *_ = environment.items()
    said = [record.getMessage() for record in lines.records]
    # Who asks by an argument is told why nothing comes of it.
    assert said == ([] if by_argument else [f"torch_grad_exporter: no metrics are pushed: {name}={text.strip().lower()}"])


def test_a_wrong_argument_raises_also_where_a_variable_forbids_push() -> None:
    """The program is as wrong on the machine that switches push off as on the others."""
    with pytest.raises(ValueError, match="otlp_interval=0"):
        resolve("http://h", interval=0, environment={"OTEL_SDK_DISABLED": "true"})


# Everything else

RIGHT: list[tuple[str, str, str, object]] = [
    *[("OTLP_PROTOCOL", text, "protocol", Protocol.HTTP) for text in ("http/protobuf", "", "HTTP/Protobuf")],
    *[("OTLP_PROTOCOL", text, "protocol", Protocol.GRPC) for text in ("grpc", " gRPC ")],
    ("OTLP_METRICS_PROTOCOL", "grpc", "protocol", Protocol.GRPC),
    *[("OTLP_COMPRESSION", one.value, "compression", one) for one in Compression],
    ("OTLP_COMPRESSION", "GZip", "compression", Compression.GZIP),
    ("OTLP_METRICS_COMPRESSION", "deflate", "compression", Compression.DEFLATE),
    *[("OTLP_TIMEOUT", text, "timeout", seconds) for text, seconds in (("3", 3.0), ("0.5", 0.5), ("", 10.0), ("10000", 60.0))],
    ("OTLP_METRICS_TIMEOUT", "7", "timeout", 7.0),
    ("METRIC_EXPORT_TIMEOUT", "2500", "timeout", 2.5),
    ("METRIC_EXPORT_TIMEOUT", "30000", "timeout", 10.0),
    *[("METRIC_EXPORT_INTERVAL", text, "interval", seconds) for text, seconds in (("5000", 5.0), ("1500.5", 1.5005), ("", 60.0))],
    ("METRIC_EXPORT_INTERVAL", "1", "interval", 0.1),
    *[("OTLP_METRICS_TEMPORALITY_PREFERENCE", text, "temporality", CUMULATIVE) for text in ("cumulative", "Cumulative", "")],
    *[("OTLP_METRICS_TEMPORALITY_PREFERENCE", text, "temporality", DELTA) for text in ("delta", "DELTA")],
    ("OTLP_METRICS_METRICS_TEMPORALITY_PREFERENCE", "delta", "temporality", CUMULATIVE),  # a variable that there is not
    # Our counters are asynchronous, which stay totals.
    ("OTLP_METRICS_TEMPORALITY_PREFERENCE", "LowMemory", "temporality", {**CUMULATIVE, Kind.HISTOGRAM: Temporality.DELTA}),
    ("OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "base2_exponential_bucket_histogram", "exponential", True),
    ("OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "explicit_bucket_histogram", "exponential", False),
]


def variable(name: str) -> str:
    """The full name of one of OpenTelemetry's variables."""
    return f"OTEL_{name}" if name.startswith("METRIC") else f"OTEL_EXPORTER_{name}"


@pytest.mark.parametrize(
    ("name", "text", "setting", "expected"), RIGHT, ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_right_variables(name: str, text: str, setting: str, expected: object, lines: pytest.LogCaptureFixture) -> None:
    """A valid variable is taken for what it stands for, without a word."""
    assert getattr(resolved(environment={**WHERE, variable(name): text}), setting) == expected
    assert lines.records == []


TWO: list[tuple[str, str, str, object]] = [
    ("PROTOCOL", "grpc", "http/protobuf", Protocol.HTTP),
    ("COMPRESSION", "gzip", "none", Compression.NONE),
    ("TIMEOUT", "3", "4", 4.0),
    ("PROTOCOL", "carrier pigeon", "grpc", Protocol.GRPC),
    ("TIMEOUT", "soon", "4", 4.0),
    ("COMPRESSION", "gzip", " ", Compression.GZIP),
]


@pytest.mark.parametrize(("name", "all_signals", "metrics", "expected"), TWO, ids=str)
def test_the_variable_for_metrics_wins(
    name: str, all_signals: str, metrics: str, expected: object, lines: pytest.LogCaptureFixture
) -> None:
    """Of two variables the one for metrics counts, and the other one may say what it likes; an empty one is none."""
    environment = {f"OTEL_EXPORTER_OTLP_{name}": all_signals, f"OTEL_EXPORTER_OTLP_METRICS_{name}": metrics}
    assert getattr(resolved(environment={**WHERE, **environment}), name.lower()) == expected
    assert lines.records == []


# Wrong in itself only: the variable is as good as not set.
IGNORED: list[tuple[str, str, str]] = [
    *[("OTLP_TIMEOUT", text, "timeout") for text in ("soon", "0", "-1", "nan", "inf", "10s", "1e999")],
    ("OTLP_METRICS_TIMEOUT", "soon", "timeout"),
    *[("METRIC_EXPORT_TIMEOUT", text, "timeout") for text in ("soon", "0", "-30000", "nan")],
    *[("METRIC_EXPORT_INTERVAL", text, "interval") for text in ("soon", "0", "-60000", "nan", "inf", "1m")],
    *[("OTLP_COMPRESSION", text, "compression") for text in ("zstd", "gzip,deflate")],
    ("OTLP_METRICS_COMPRESSION", "snappy", "compression"),
    ("OTLP_METRICS_TEMPORALITY_PREFERENCE", "differences", "temporality"),
    ("OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "exponential", "exponential"),
]


@pytest.mark.parametrize(("name", "text", "setting"), IGNORED, ids=repr)
def test_a_wrong_number_or_choice_in_a_variable_costs_itself(
    name: str, text: str, setting: str, lines: pytest.LogCaptureFixture
) -> None:
    """Push goes on with the default, and one warning names the variable, its text, and what is expected instead."""
    found = resolved(environment={**WHERE, variable(name): text})
    assert getattr(found, setting) == getattr(resolved(environment=WHERE), setting)
    (warning,) = warnings(lines)
    assert f"{variable(name)}={text!r} is ignored: expected " in warning


# Wrong so that nothing can be pushed.
COSTS: list[tuple[str, str, str]] = [
    *[
        ("OTLP_ENDPOINT", text, "expected a URL")
        for text in ("collector:4318", "collector", "ftp://h", "http://", "http://:4318", "http://h:0", "http://h:70000",
                     "http://h:port", "http://a b", "http://h\x00", "http://[::1", "//h:1", "grpc://h:1")
    ],
    ("OTLP_METRICS_ENDPOINT", "localhost:4318", "expected a URL"),
    *[("OTLP_PROTOCOL", text, "expected 'http/protobuf' or 'grpc'") for text in ("http/json", "http", "https", "grpc,http")],
    ("OTLP_METRICS_PROTOCOL", "udp", "expected 'http/protobuf' or 'grpc'"),
    *[
        (f"OTLP_{signal}{name}", "/no/such/file.pem", "cannot be read")
        for signal in ("", "METRICS_")
        for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
    ],
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "fix"), COSTS, ids=repr)
def test_a_wrong_variable_costs_the_push(name: str, text: str, fix: str, lines: pytest.LogCaptureFixture) -> None:
    """Nothing raises, nothing is pushed, and one warning says so, with the variable, its text and what is expected."""
    assert resolve(environment={**WHERE, variable(name): text}) is None
    (warning,) = warnings(lines)
    assert warning.startswith(f"torch_grad_exporter: no metrics are pushed: environment variable {variable(name)}={text!r}: ")
    assert fix in warning


def test_a_wrong_variable_costs_the_push_also_to_an_endpoint_that_is_an_argument(lines: pytest.LogCaptureFixture) -> None:
    """A certificate that cannot be read is not left out silently, wherever the endpoint comes from."""
    assert resolve("https://h", environment={"OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such/file.pem"}) is None
    assert len(warnings(lines)) == 1


def test_certificates_that_can_be_read_are_right(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    """Files that are there cost nothing; what is in them, the connection finds out."""
    there = tmp_path / "ca.pem"
    there.touch()
    names = [f"OTEL_EXPORTER_OTLP_{name}" for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")]
    assert resolved(environment={**WHERE, **dict.fromkeys(names, str(there))}).endpoint == HERE
    assert lines.records == []


def test_an_interval_of_ages_is_one_that_a_thread_can_wait_for() -> None:
    """The largest number that is in use for "never" is no interval that no clock can hold."""
    found = resolved(environment={**WHERE, "OTEL_METRIC_EXPORT_INTERVAL": str(2**63 - 1)}).interval
    assert 86400 <= found < threading.TIMEOUT_MAX


PROVIDERS = [
    (protocol, f"OTEL_PYTHON_EXPORTER_OTLP_{protocol.name}_{signal}CREDENTIAL_PROVIDER")
    for protocol in Protocol
    for signal in ("", "METRICS_")
]


@pytest.mark.parametrize(("protocol", "name"), PROVIDERS, ids=lambda one: one if isinstance(one, str) else "")
def test_a_provider_of_credentials_is_ignored(protocol: Protocol, name: str, lines: pytest.LogCaptureFixture) -> None:
    """Push goes on, and one warning says so; for the other protocol, or if it is empty, nothing is said."""
    here, there = {"protocol": protocol.value}, {"protocol": next(one.value for one in Protocol if one is not protocol)}
    assert resolved(here, {**WHERE, name: "cloud"}).protocol is protocol
    (warning,) = warnings(lines)
    assert f"environment variable {name}='cloud' is ignored: requests are sent over a session of the exporter's own" in warning
    lines.clear()
    assert resolved(there, {**WHERE, name: "cloud"}).protocol is not protocol
    assert resolved(here, {**WHERE, name: ""}).protocol is protocol
    assert lines.records == []


# Headers

RIGHT_HEADERS = {
    "api-key=abc": {"api-key": "abc"},
    "api-key=abc,x-tenant=7": {"api-key": "abc", "x-tenant": "7"},
    "Authorization=Basic%20YTpi": {"authorization": "Basic YTpi"},
    "authorization=Bearer a=b==": {"authorization": "Bearer a=b=="},
    "a=": {"a": ""},
    " a = b , c = d ,": {"a": "b", "c": "d"},
    "a=b c": {"a": "b c"},
    "a=1,A=2": {"a": "2"},
    "a=" + "x" * 4000: {"a": "x" * 4000},
}
WRONG_HEADERS = [
    f"{SECRET}", f"={SECRET}", f"a={SECRET},{SECRET}", f"a b={SECRET}", f"a={SECRET}%0Ab", f"a={SECRET}%0D%0Ax-b:c", f"a={SECRET}ü",
    f"a={SECRET}%C3%BC", f"a={SECRET}\x7f", f"a={SECRET};b", f"a:{SECRET}", f"a=1,a={SECRET}\x7f", f"ä={SECRET}", f"a%20b={SECRET}",
]  # fmt: skip


@pytest.mark.parametrize("text", RIGHT_HEADERS, ids=lambda text: text[:30])
def test_right_headers_in_a_variable(text: str, lines: pytest.LogCaptureFixture) -> None:
    """Names, in lower case, and values, URL-encoded or nearly so."""
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS"):
        assert resolved(environment={**WHERE, name: text}).headers == RIGHT_HEADERS[text]
    assert lines.records == []


@pytest.mark.parametrize("text", WRONG_HEADERS, ids=ascii)
def test_wrong_headers_in_a_variable(text: str, lines: pytest.LogCaptureFixture) -> None:
    """What is no header costs the push and one warning, which names the variable and shows no value, and no other line follows."""
    assert resolve(environment={**WHERE, "OTEL_EXPORTER_OTLP_METRICS_HEADERS": text, "OTEL_EXPORTER_OTLP_HEADERS": "a=b"}) is None
    (warning,) = warnings(lines)
    assert "no metrics are pushed: environment variable OTEL_EXPORTER_OTLP_METRICS_HEADERS: expected header=value" in warning
    assert "hunter2" not in lines.text
    assert not logging.getLogger("opentelemetry.util.re").disabled


def test_headers_of_an_argument() -> None:
    """Names become small letters, as in HTTP/2, values stay as they are; an empty mapping is one; variables are then unread."""
    given = {"Api-Key": "a=b c", "x_1": ""}
    assert resolved({"headers": given}, {**WHERE, "OTEL_EXPORTER_OTLP_HEADERS": "nonsense"}).headers == {
        "api-key": "a=b c",
        "x_1": "",
    }
    assert resolved({"headers": {}}, WHERE).headers == {}


# Arguments

WRONG: list[tuple[str, object, type[Exception], str]] = [
    *[("endpoint", value, TypeError, "expected a URL such as") for value in (4318, b"http://h", True, ["http://h"])],
    *[
        ("endpoint", value, ValueError, "expected a URL such as")
        for value in ("", "collector", "localhost:4318", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://a b",
                      "http://h\n", " http://h")
    ],
    *[("protocol", value, TypeError, "expected 'http/protobuf' or 'grpc'") for value in (1, b"grpc", True, Protocol.GRPC)],
    *[("protocol", value, ValueError, "expected 'http/protobuf' or 'grpc'") for value in ("", "http", "GRPC", "http/json")],
    *[("interval", value, TypeError, "expected a number of seconds") for value in ("60", True, [60], b"1")],
    *[
        ("interval", value, ValueError, "expected a number of seconds from 0.1 to 86400")
        for value in (0, -1, 0.05, 86401, math.nan, math.inf, 10**400)
    ],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "kind", "fix"), WRONG, ids=lambda value: repr(value)[:40] if not isinstance(value, type) else ""
)
@pytest.mark.parametrize("environment", [{}, WHERE], ids=["alone", "with variables"])
def test_wrong_arguments_are_named(name: str, value: object, kind: type[Exception], fix: str, environment: dict[str, str]) -> None:
    """A wrong argument raises, and the message begins with its name and value and says what is expected instead."""
    with pytest.raises((TypeError, ValueError)) as caught:
        resolve(**{name: value}, environment=environment)  # type: ignore[arg-type]
    assert caught.type is kind
    assert str(caught.value).startswith(f"otlp_{name}={value!r}: ")
    assert fix in str(caught.value)


WRONG_ARGUMENTS_OF_HEADERS: list[tuple[object, type[Exception], str]] = [
    *[(value, TypeError, f"otlp_headers={type(value).__name__}: ") for value in (f"a={SECRET}", [("a", SECRET)], 3, True)],
    *[
        (value, TypeError, "otlp_headers=dict: ")
        for value in ({"a": 3, "b": SECRET}, {3: SECRET}, {"a": SECRET.encode()}, {"a": None})
    ],
    *[({name: SECRET}, ValueError, f"otlp_headers: {name!r} ") for name in ("", "a b", "ä", "a:", "a\n", "a=b")],
    *[
        ({"ok": "x", "a": value}, ValueError, "otlp_headers: 'a' ")
        for value in (f"{SECRET}\n", f"{SECRET}\r\nx-b: c", f"{SECRET}ü", f"{SECRET}\x00", f" {SECRET}", f"{SECRET} ")
    ],
]


@pytest.mark.parametrize(
    ("value", "kind", "begin"),
    WRONG_ARGUMENTS_OF_HEADERS,
    ids=lambda value: ascii(value)[:50] if not isinstance(value, type) else "",
)
def test_wrong_headers_are_named_and_not_shown(value: object, kind: type[Exception], begin: str) -> None:
    """What is wrong in headers raises with the name of the header and what is expected; values, perhaps passwords, stay unsaid."""
    with pytest.raises((TypeError, ValueError)) as caught:
        resolve("http://h", headers=value, environment={})
    assert caught.type is kind
    assert str(caught.value).startswith(begin)
    assert "expected a mapping of header names to printable ASCII texts" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_right_arguments_win_over_variables() -> None:
    """Protocol, headers and interval of the arguments count, also where the variables are wrong; nothing is said of those."""
    environment = {
        **WHERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "udp", "OTEL_EXPORTER_OTLP_HEADERS": "x", "OTEL_METRIC_EXPORT_INTERVAL": "soon",
    }  # fmt: skip
    found = resolved({"endpoint": "http://a", "protocol": "grpc", "headers": {"A": "b"}, "interval": 0.1}, environment)
    assert (found.endpoint, found.protocol, found.headers, found.interval) == ("http://a", Protocol.GRPC, {"a": "b"}, 0.1)
    assert resolved({"endpoint": "http://a", "interval": 86400}).interval == 86400.0


SHOWN = {
    "https://user:hunter2@h/x": "https://...@h/x", "HTTP://user:hunter2@h:1": "HTTP://...@h:1", "https://h/x?token=hunter2": "https://h/x",
    "http://user:a@hunter2@h:1/p@q": "http://...@h:1/p@q", "http://h:4318/p@q": "http://h:4318/p@q", "h:4317": "h:4317",
    "user:hunter2@h:4318": "...@h:4318", "https//user:hunter2@h:4318": "...@h:4318", "http:/user:hunter2@h:1": "http:/...@h:1",
    "http://user:a/hunter2@h": "http://...@h", "http://user:a?hunter2@h": "http://...@h", "http://a#hunter2@h b": "http://...@h b",
    "http://user:a\nhunter2@h:4318": "http://...@h:4318", "http:///user:hunter2@h": "http:///...@h",
}  # fmt: skip


@pytest.mark.parametrize("endpoint", SHOWN, ids=ascii)
def test_a_password_in_an_endpoint_is_not_shown(endpoint: str, lines: pytest.LogCaptureFixture) -> None:
    """In no message about an endpoint, right or wrong, whether an argument or a variable, is a password or a key."""
    assert without_password(endpoint) == SHOWN[endpoint]
    said = []
    for value in (endpoint, endpoint.encode()):
        for protocol in (None, "grpc"):
            try:
                resolve(value, protocol, environment={})
            except (TypeError, ValueError) as error:
                said.append(str(error))
    assert len(said) >= 2
    for protocol in ("http/protobuf", "grpc"):
        resolve(environment={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    assert "hunter2" not in "".join(said) + lines.text


def test_a_password_in_an_endpoint_is_refused_over_grpc(lines: pytest.LogCaptureFixture) -> None:
    """Its libraries would log it and not send it: two arguments raise, and where a variable has a part in it, it costs the push."""
    endpoint = "http://me:hunter2@h:4317"
    with pytest.raises(ValueError, match=r"^otlp_endpoint='http://\.\.\.@h:4317': over gRPC .* no password") as caught:
        resolve(endpoint, "grpc", environment={"OTEL_SDK_DISABLED": "true"})
    grpc = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert resolve(endpoint, environment=grpc) is None
    assert resolve(environment={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **grpc}) is None
    told = "torch_grad_exporter: no metrics are pushed: endpoint 'http://...@h:4317': over gRPC an endpoint has no user"
    assert [warning[: len(told)] for warning in warnings(lines)] == [told] * 2
    assert "hunter2" not in str(caught.value) + lines.text
    assert resolved({"endpoint": "http://h:4317/a@b", "protocol": "grpc"}).endpoint == "http://h:4317/a@b"


# gRPC


@pytest.fixture(params=["grpc", "google.rpc.error_details_pb2"])
def without_grpc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the modules that gRPC needs is not installed."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:  # noqa: ANN401 - as importlib's
        return None if name == request.param else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_a_missing_package_for_grpc_is_named_to_who_asks_by_an_argument(without_grpc: None) -> None:
    """The error names the argument, the extra and how to install it."""
    assert not push_settings.grpc_installed()
    with pytest.raises(ImportError, match=r"otlp_protocol='grpc'.*extra 'grpc'.*pip install 'torch-grad-exporter\[grpc\]'"):
        resolve("http://h:4317", "grpc", environment={})
    assert resolved({"endpoint": "http://h", "protocol": "http/protobuf"}).protocol is Protocol.HTTP


def test_a_missing_package_for_grpc_costs_the_push_that_a_variable_asks_for(
    without_grpc: None, lines: pytest.LogCaptureFixture
) -> None:
    """One warning names the extra; nothing raises, also where the endpoint is an argument."""
    environment = {**WHERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert resolve(environment=environment) is None
    assert resolve("http://h:4317", environment=environment) is None
    assert [("extra 'grpc'" in warning, "pip install" in warning) for warning in warnings(lines)] == [(True, True)] * 2


def test_a_package_whose_parents_are_missing_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for it below a package that is not there either does not raise."""

    def find_spec(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    assert push_settings.grpc_installed()
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert not push_settings.grpc_installed()


# Through the front door


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without OpenTelemetry's variables."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch


def ours() -> set[str]:
    """The names of our threads."""
    return {thread.name for thread in threading.enumerate() if "torch-grad-exporter" in thread.name}


def hooks(model: torch.nn.Module) -> int:
    """How many hooks a model has."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    "wrong",
    [{"otlp_endpoint": "collector"}, {"otlp_protocol": "udp"}, {"otlp_headers": {"a b": "c"}}, {"otlp_interval": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_argument_raises_before_anything_exists(wrong: dict[str, Any], clean: pytest.MonkeyPatch) -> None:
    """`start_exporter` names the argument, and leaves no hook, no thread and no server behind."""
    model, before = torch.nn.Linear(2, 1), ours()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        start_exporter(model, port=0, addr="127.0.0.1", **wrong)
    assert (hooks(model), ours()) == (0, before)


def test_a_wrong_variable_costs_one_warning_and_training_goes_on(
    clean: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    """With a nonsensical endpoint in the environment the exporter runs, without a thread that pushes, and so does the training."""
    clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nonsense")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with start_exporter(model, port=None):
        assert hooks(model) > 0
        assert not any("push" in name for name in ours())
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert not torch.equal(model.weight, before)
    (warning,) = warnings(lines)
    assert "no metrics are pushed: environment variable OTEL_EXPORTER_OTLP_ENDPOINT='nonsense'" in warning


READ_BY_THE_EXPORTERS = [
    f"OTEL_EXPORTER_OTLP_{signal}{name}"
    for signal in ("", "METRICS_")
    for name in ("ENDPOINT", "PROTOCOL", "HEADERS", "TIMEOUT", "COMPRESSION", "INSECURE", "CERTIFICATE", "CLIENT_KEY",
                 "CLIENT_CERTIFICATE")
]  # fmt: skip
WITHOUT_EFFECT = [*((variable(name), text) for name, text, _ in IGNORED), *((name, "") for name in READ_BY_THE_EXPORTERS)]


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize(("name", "text"), WITHOUT_EFFECT, ids=repr)
def test_a_variable_that_is_ignored_does_not_keep_the_exporters_from_being_made(
    name: str, text: str, protocol: str, clean: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's exporters read the environment too: they are made all the same, and it stays as it is."""
    clean.setenv(name, text)
    before = dict(os.environ)
    connected(resolved({"endpoint": "http://127.0.0.1:9", "protocol": protocol}, os.environ), 1).close()
    assert dict(os.environ) == before


def test_the_environment_of_the_process_switches_push_on(clean: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture) -> None:
    """The variable alone starts the thread that pushes, says where to and how often, and the thread ends with the exporter."""
    clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    clean.setenv("OTEL_METRIC_EXPORT_INTERVAL", "7000")
    with start_exporter(torch.nn.Linear(2, 1), port=None):
        assert any("push" in name for name in ours())
    assert "pushing metrics to http://127.0.0.1:9/v1/metrics every 7 s" in lines.text
    assert eventually(lambda: not any("push" in name for name in ours()))


# The facts of the process


def infos(points: Iterable[tuple[str, frozenset[tuple[str, str]]]]) -> list[str]:
    """The devices of each series of `torch_train_info`."""
    return [dict(labels)["devices"] for name, labels in points if name == "torch_train_info"]


def step(model: torch.nn.Module) -> None:
    """One step of training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def test_the_facts_of_a_run_are_one_series(clean: pytest.MonkeyPatch) -> None:
    """Those pushed before the first step have the labels of those after it: no store has a mark for a series that has ended."""
    model = torch.nn.Linear(2, 1)
    with HttpReceiver() as receiver:
        with start_exporter(model, port=None, every=1, otlp_endpoint=receiver.endpoint, otlp_interval=0.1):
            assert eventually(lambda: infos(receiver.points()) == ["cpu"])
            assert receiver.latest("torch_train_steps_total") is None
            step(model)
        assert receiver.latest("torch_train_steps_total") == 1
        assert infos(receiver.points()) == ["cpu"]


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_facts_that_are_not_known_are_not_told(kind: str, clean: pytest.MonkeyPatch) -> None:
    """A parameter that is yet to be made, or to get a device, does not say where gradients will be: there is no series at first."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(1) if kind == "lazy" else torch.nn.Linear(2, 1))
    if kind == "meta":
        model[1].to("meta")
    with start_exporter(model, port=None, every=1) as exporter:
        before = [len(family.labels) for family in exporter.collect() if family.spec.name == "torch_train_info"]
        assert before == [0]
        if kind == "meta":
            model[1].to_empty(device="cpu")
        model(torch.ones(3, 2))
        step(model)
        (facts,) = (family for family in exporter.collect() if family.spec.name == "torch_train_info")
        assert [dict(zip(facts.spec.labels, row, strict=True))["devices"] for row in facts.labels.rows] == ["cpu"]


# The resource


def test_the_resource_without_variables(clean: pytest.MonkeyPatch) -> None:
    """Service, instance, host, process and runtime are there, as are run and rank."""
    found = resource("run 7", "3")
    assert found.pop("host.name")
    assert found == {
        "service.name": "training", "service.instance.id": "run 7/3", "process.pid": os.getpid(),
        "process.runtime.name": "cpython", "process.runtime.version": ".".join(map(str, sys.version_info[:3])),
        "run": "run 7", "rank": "3",
    }  # fmt: skip


def test_the_users_resource_wins_and_run_and_rank_are_ours(clean: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's variables say what the service is called and add to it; run and rank stay those of every point."""
    clean.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "service.name=other,service.instance.id=i-7,host.name=h,team=a%20b,run=x,rank=99,empty="
    )
    found = resource("r", "0")
    expected = {"service.name": "other", "service.instance.id": "i-7", "host.name": "h", "team": "a b", "run": "r", "rank": "0"}
    assert {name: found[name] for name in expected} == expected
    assert (found.get("empty"), found["process.pid"]) == (None, os.getpid())
    clean.setenv("OTEL_SERVICE_NAME", "mine")
    assert resource("r", "0")["service.name"] == "mine"


def test_broken_resource_attributes_cost_themselves(clean: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture) -> None:
    """A pair without an equals sign is left out, and the others are taken."""
    clean.setenv("OTEL_RESOURCE_ATTRIBUTES", "nonsense,team=x,bad=%zz")
    found = resource("r", "0")
    assert (found["team"], found["bad"], found["service.name"]) == ("x", "%zz", "training")
    assert "nonsense" not in found
