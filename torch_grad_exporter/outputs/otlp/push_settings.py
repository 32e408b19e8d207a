"""What to push and where: OpenTelemetry's own environment variables, and the arguments that win over them.

Push is on where an endpoint is given. What is wrong in an argument raises, before anything is registered; what is wrong in a
variable costs the push and a warning, or, if it is only a number or a choice, just that variable: a variable must not end a run.
Variables of the form `OTEL_EXPORTER_OTLP_METRICS_<NAME>` win over `OTEL_EXPORTER_OTLP_<NAME>`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from torch_grad_exporter.errors import say
from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.otlp.points import Temporality

logger = logging.getLogger("torch_grad_exporter")

PATH = "/v1/metrics"
"""Where a receiver takes metrics over HTTP, below its endpoint."""

INTERVAL = 60.0
"""Seconds between two exports, as in OpenTelemetry's SDKs."""

TIMEOUT = 10.0
"""Seconds for one request of an export, with all its tries, as in OpenTelemetry's exporters."""

LONGEST = 60.0
"""Seconds for one request, at most."""

_Value = TypeVar("_Value")


class Protocol(enum.Enum):
    """How requests are sent, by the names that `OTEL_EXPORTER_OTLP_PROTOCOL` has."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


class Compression(enum.Enum):
    """How requests are compressed, by the names that `OTEL_EXPORTER_OTLP_COMPRESSION` has."""

    NONE = "none"
    GZIP = "gzip"
    DEFLATE = "deflate"


_TEMPORALITIES = {
    "cumulative": {Kind.COUNTER: Temporality.CUMULATIVE, Kind.HISTOGRAM: Temporality.CUMULATIVE},
    "delta": {Kind.COUNTER: Temporality.DELTA, Kind.HISTOGRAM: Temporality.DELTA},
    # Our counters are read when there is an export, which is what OpenTelemetry calls asynchronous.
    "lowmemory": {Kind.COUNTER: Temporality.CUMULATIVE, Kind.HISTOGRAM: Temporality.DELTA},
}

_NAMES = {one.value for one in Protocol}

_OTLP = {"otlp", "otlp_proto_http", "otlp_proto_grpc"}
"""Names of exporters that push over OTLP; the longer ones are those of Python's SDK."""

_HISTOGRAMS = {"explicit_bucket_histogram": False, "base2_exponential_bucket_histogram": True}


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of files in PEM format: of whom to trust, and of the client's own certificate and its key; empty for none."""

    authority: str = ""
    client: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """All choices, valid. `endpoint`: a URL, over gRPC also `host:port`. `headers`: all of them, names in lower case.

    `interval`, `timeout`: in seconds. `insecure`: over gRPC, whether there is no TLS. `exponential`: whether distributions of
    norms have exponential buckets.
    """

    endpoint: str
    protocol: Protocol = Protocol.HTTP
    headers: Mapping[str, str] = field(default_factory=dict)
    interval: float = INTERVAL
    timeout: float = TIMEOUT
    compression: Compression = Compression.NONE
    certificates: Certificates = Certificates()
    insecure: bool = False
    temporality: Mapping[Kind, Temporality] = field(default_factory=lambda: _TEMPORALITIES["cumulative"])
    exponential: bool = False


class _UnusableError(Exception):
    """A variable makes it impossible to push."""


def resolve(
    endpoint: object = None,
    protocol: object = None,
    headers: object = None,
    interval: object = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> PushSettings | None:
    """The settings, `None` where nothing is to be pushed. `None` as an argument: what the environment says.

    Raises `TypeError` and `ValueError` for an argument, and `ImportError` where it asks for gRPC and that is not installed.
    """
    chosen = None if protocol is None else _checked_protocol(protocol)
    where = None if endpoint is None else _checked_endpoint(endpoint, chosen)
    metadata = None if headers is None else _checked_headers(headers)
    seconds = None if interval is None else _checked_interval(interval)
    variables = _Variables(environment)
    asked = variables.text("OTEL_METRICS_EXPORTER")
    exporters = {name.strip().lower() for name in asked.split(",")}
    off = "OTEL_METRICS_EXPORTER=none" if "none" in exporters else ""
    if variables.text("OTEL_SDK_DISABLED").lower() == "true":
        off = "OTEL_SDK_DISABLED=true"
    try:
        if off and where is not None:
            say(logger, logging.INFO, "no metrics are pushed: %s", off)
        wanted = variables.found("ENDPOINT")[1] and (exporters & _OTLP or not asked)
        return _resolved(where, chosen, metadata, seconds, variables) if not off and (wanted or where is not None) else None
    except _UnusableError as error:
        say(logger, logging.WARNING, "no metrics are pushed: %s", error)
        return None


# Arguments

_PROTOCOLS = "expected 'http/protobuf' or 'grpc'"
_ENDPOINT = "expected a URL such as 'http://localhost:4318', or with otlp_protocol='grpc' also 'host:port'"
_INTERVAL = "expected a number of seconds from 0.1 to 86400"
_HEADERS = "expected a mapping of header names to printable ASCII texts"
_OWN_SESSION = "requests are sent over a session of the exporter's own; expected a header or a certificate"
_NO_USER = "over gRPC an endpoint has no user and no password; such as these belong in a header"
_NO_GRPC = "OTLP over gRPC needs the extra 'grpc'; pip install 'torch-grad-exporter[grpc]'"


def _checked_protocol(protocol: object) -> Protocol:
    if not isinstance(protocol, str) or protocol not in _NAMES:
        raise (ValueError if isinstance(protocol, str) else TypeError)(f"otlp_protocol={protocol!r}: {_PROTOCOLS}")
    if protocol == Protocol.GRPC.value and not grpc_installed():
        raise ImportError(f"otlp_protocol={protocol!r}: {_NO_GRPC}")
    return Protocol(protocol)


def _checked_endpoint(endpoint: object, protocol: Protocol | None) -> str:
    if not isinstance(endpoint, str):
        raise TypeError(f"otlp_endpoint={without_password(repr(endpoint))}: {_ENDPOINT}")
    wrong = "" if _is_endpoint(endpoint, protocol) else _ENDPOINT
    if wrong or _has_user(endpoint, protocol):
        raise ValueError(f"otlp_endpoint={without_password(endpoint)!r}: {wrong or _NO_USER}")
    return endpoint


def _checked_interval(interval: object) -> float:
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        raise TypeError(f"otlp_interval={interval!r}: {_INTERVAL}")
    if not 0.1 <= interval <= 86400:
        raise ValueError(f"otlp_interval={interval!r}: {_INTERVAL}")
    return float(interval)


def _checked_headers(headers: object) -> dict[str, str]:
    if not isinstance(headers, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in headers.items()):
        raise TypeError(f"otlp_headers={type(headers).__name__}: {_HEADERS}")
    # A header may be a password: a message shows its name and not its value.
    for name, value in headers.items():
        if not _is_header(name, value):
            raise ValueError(f"otlp_headers: {name!r} is no header that can be sent; {_HEADERS}")
    return {name.lower(): value for name, value in headers.items()}


def grpc_installed() -> bool:
    """Return whether OpenTelemetry's exporter over gRPC can be imported."""
    try:
        return all(importlib.util.find_spec(name) for name in ("grpc", "opentelemetry.exporter.otlp.proto.grpc"))
    except ModuleNotFoundError:
        return False


def without_password(endpoint: str) -> str:
    """An endpoint as it may be shown, without user and query. In what is no URL all before the last `@` may be a password."""
    user = r"^([a-z]+://)[^/?#]*@" if _is_endpoint(endpoint) else r"^([a-z]+:/+)?.*@"
    return re.sub(user, r"\1...@", endpoint, flags=re.IGNORECASE | re.DOTALL).partition("?")[0]


def _is_endpoint(text: str, protocol: Protocol | None = None) -> bool:
    """Whether it is a URL; over gRPC a host and a port will do."""
    address = protocol is Protocol.GRPC and not set("/@?#") & set(text)
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"http://{text}" if address else text)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and text.isprintable() and " " not in text
        return right and parts.port != 0 and not (address and parts.port is None)
    return False


def _has_user(endpoint: str, protocol: Protocol | None) -> bool:
    """Whether a user or a password is part of it, which gRPC would not send, but log."""
    return protocol is Protocol.GRPC and "@" in urlsplit(endpoint).netloc


def _is_header(name: str, value: str) -> bool:
    named = re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) is not None
    return named and value.isascii() and value.isprintable() and value == value.strip()


# Variables


_METRICS = "OTEL_EXPORTER_OTLP_METRICS_"


class _Variables:
    """OpenTelemetry's variables for an exporter of metrics over OTLP. An empty one counts as unset."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        """A variable, empty if it is not set."""
        return self._environment.get(name, "").strip()

    def found(self, name: str) -> tuple[str, str]:
        """The variable for metrics or else the one for all signals: its name and text."""
        own = f"{_METRICS}{name}"
        variable = own if self.text(own) else f"OTEL_EXPORTER_OTLP_{name}"
        return variable, self.text(variable)

    def number(self, variable: str, default: float) -> float:
        """A number above 0; any other text logs a warning."""
        text = self.text(variable)
        try:
            number = float(text) if text else default
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.ignored(variable, f"expected a number above 0, and {default:g} is taken")
            return default
        return number

    def choice(self, variable: str, choices: Mapping[str, _Value], default: str) -> _Value:
        """What one of several texts stands for, in whatever case; any other logs a warning."""
        text = self.text(variable)
        if text and text.lower() not in choices:
            self.ignored(variable, f"expected one of {', '.join(choices)}")
        return choices.get(text.lower(), choices[default])

    def file(self, name: str) -> str:
        """The path of a file that can be read."""
        variable, path = self.found(name)
        if path and not os.access(path, os.R_OK):
            raise _UnusableError(f"environment variable {variable}={path!r}: this file cannot be read")
        return path

    def ignored(self, variable: str, why: str) -> None:
        """Warns that a variable has no effect, if it is set."""
        if text := self.text(variable):
            say(logger, logging.WARNING, "environment variable %s=%r is ignored: %s", variable, text, why)


def _resolved(
    where: str | None,
    chosen: Protocol | None,
    metadata: Mapping[str, str] | None,
    interval: float | None,
    variables: _Variables,
) -> PushSettings:
    """The settings by the arguments, checked, and by variables where they are `None`."""
    protocol = chosen or _protocol(variables)
    endpoint = _endpoint(where, protocol, variables)
    headers = _headers(*variables.found("HEADERS")) if metadata is None else metadata
    if protocol is Protocol.GRPC:
        _check_metadata(headers, argument=metadata is not None)
    for signal in ("METRICS_", ""):
        variables.ignored(f"OTEL_PYTHON_EXPORTER_OTLP_{protocol.name}_{signal}CREDENTIAL_PROVIDER", _OWN_SESSION)
    return PushSettings(
        endpoint=endpoint,
        protocol=protocol,
        headers=headers,
        interval=interval or _interval(variables),
        timeout=_timeout(variables),
        compression=variables.choice(variables.found("COMPRESSION")[0], {one.value: one for one in Compression}, "none"),
        certificates=Certificates(*map(variables.file, ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"))),
        insecure=_is_insecure(endpoint, variables),
        temporality=variables.choice(f"{_METRICS}TEMPORALITY_PREFERENCE", _TEMPORALITIES, "cumulative"),
        exponential=variables.choice(f"{_METRICS}DEFAULT_HISTOGRAM_AGGREGATION", _HISTOGRAMS, "explicit_bucket_histogram"),
    )


def _protocol(variables: _Variables) -> Protocol:
    variable, text = variables.found("PROTOCOL")
    if text.lower() not in {"", *_NAMES}:
        raise _UnusableError(f"environment variable {variable}={text!r}: {_PROTOCOLS}")
    if text.lower() == Protocol.GRPC.value and not grpc_installed():
        raise _UnusableError(_NO_GRPC)
    return Protocol(text.lower() or Protocol.HTTP)


def _endpoint(where: str | None, protocol: Protocol, variables: _Variables) -> str:
    """Where to, as the exporter of the protocol wants it; a variable says so where there is no argument."""
    variable, endpoint = variables.found("ENDPOINT")
    if where is not None:
        variable, endpoint = "", where
    elif not _is_endpoint(endpoint, protocol):
        raise _UnusableError(f"environment variable {variable}={without_password(endpoint)!r}: {_ENDPOINT}")
    if _has_user(endpoint, protocol):
        raise _UnusableError(f"endpoint {without_password(endpoint)!r}: {_NO_USER}")
    return endpoint if protocol is Protocol.GRPC or "METRICS" in variable else with_path(endpoint)


def with_path(endpoint: str) -> str:
    """An endpoint for all signals as the one for metrics, which one that ends so is already."""
    parts = urlsplit(endpoint)
    return parts._replace(path=parts.path.rstrip("/").removesuffix(PATH) + PATH).geturl()


def _check_metadata(headers: Mapping[str, str], *, argument: bool) -> None:
    """GRPC takes fewer names of headers than HTTP does."""
    wrong = [name for name in headers if not re.fullmatch(r"[0-9a-z_.-]+", name) or name.endswith("-bin")]
    if wrong and argument:
        raise ValueError(f"otlp_headers: {wrong[0]!r} is no header that can be sent over gRPC")
    if wrong:
        raise _UnusableError(f"header {wrong[0]!r} cannot be sent over gRPC")


def _headers(variable: str, text: str) -> dict[str, str]:
    from opentelemetry.util.re import parse_env_headers  # noqa: PLC0415 - only push needs it

    pairs = [pair for pair in text.split(",") if pair.strip()]
    quiet = logging.getLogger("opentelemetry.util.re")
    was, quiet.disabled = quiet.disabled, True  # its message shows the values, which may be passwords
    try:
        found = [header for pair in pairs for header in parse_env_headers(pair, liberal=True).items()]
    finally:
        quiet.disabled = was
    if len(found) != len(pairs) or not all(_is_header(name, value) for name, value in found):
        raise _UnusableError(f"environment variable {variable}: expected header=value, several with commas, each value URL-encoded")
    return dict(found)


def _is_insecure(endpoint: str, variables: _Variables) -> bool:
    """Whether there is no TLS over gRPC: by the scheme, or for an address without one by OpenTelemetry's variables."""
    scheme = urlsplit(endpoint).scheme if "://" in endpoint else ""
    return scheme == "http" or (scheme != "https" and variables.found("INSECURE")[1].lower() == "true")


def _interval(variables: _Variables) -> float:
    # No thread can wait for 2 ** 63 ms, which some write for "never".
    return min(max(0.1, variables.number("OTEL_METRIC_EXPORT_INTERVAL", 1000 * INTERVAL) / 1000), 86400.0)


def _timeout(variables: _Variables) -> float:
    """Of one export. OpenTelemetry's Python exporters read their own variable in seconds, and the reader's in milliseconds."""
    reader = variables.number("OTEL_METRIC_EXPORT_TIMEOUT", 1000 * LONGEST) / 1000
    return min(variables.number(variables.found("TIMEOUT")[0], TIMEOUT), reader, LONGEST)
