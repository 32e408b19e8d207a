"""Where to push and how often: by arguments of `start_exporter`, and by OpenTelemetry's variables.

OpenTelemetry's exporters read variables of headers, certificates and compression themselves.

Push is on where an endpoint is given. A wrong argument raises before anything is registered. A wrong variable never ends a run: an
endpoint or a protocol that cannot be used costs the push and a warning, a number only itself. A variable
`OTEL_EXPORTER_OTLP_METRICS_<NAME>` wins over `OTEL_EXPORTER_OTLP_<NAME>`, for log records `OTEL_EXPORTER_OTLP_LOGS_<NAME>`. Log
records are pushed if metrics are pushed, or if a variable of their own asks for them.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from torch_grad_exporter.arguments import check_number, shown
from torch_grad_exporter.errors import inform, warn
from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.own_requests import with_path

GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"

# Seconds between two exports, and for one request with all its retries, as in OpenTelemetry's SDKs; and at most.
INTERVAL, TIMEOUT, LONGEST = 60.0, 10.0, 60.0

# The kinds that are sent as differences. Our counters are read at an export, which OpenTelemetry calls asynchronous: with
# `lowmemory` they stay totals.
DELTA = {"delta": frozenset({Kind.COUNTER, Kind.HISTOGRAM}), "lowmemory": frozenset({Kind.HISTOGRAM})}

# Names of exporters that push over OTLP; the longer ones are those of Python's SDK.
OTLP = {"otlp", "otlp_proto_http", "otlp_proto_grpc"}


class Signal(enum.Enum):
    """What is sent, by its name in the path at which a receiver takes it over HTTP."""

    METRICS = "metrics"
    LOGS = "logs"

    @property
    def noun(self) -> str:
        """Its name in a sentence."""
        return "metrics" if self is Signal.METRICS else "log records"


class Protocol(enum.Enum):
    """How requests are sent, by the names that `OTEL_EXPORTER_OTLP_PROTOCOL` has."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """All choices, valid.

    Attributes:
        endpoint: A URL, over gRPC also `host:port`.
        headers: Sent instead of those of the environment, names in lower case; None for those of the environment.
        interval: Seconds between two exports, of log records after one that failed.
        timeout: Seconds for a request with its retries.
        delta: The kinds of metrics that are sent as differences.
        exponential: Whether distributions of norms have exponential buckets.
    """

    endpoint: str
    signal: Signal = Signal.METRICS
    protocol: Protocol = Protocol.HTTP
    headers: Mapping[str, str] | None = None
    interval: float = INTERVAL
    timeout: float = TIMEOUT
    delta: frozenset[Kind] = frozenset()
    exponential: bool = False


def resolve(
    endpoint: object = None,
    protocol: object = None,
    headers: object = None,
    interval: object = None,
    *,
    signal: Signal = Signal.METRICS,
    environment: Mapping[str, str] = os.environ,
) -> PushSettings | None:
    """Return the settings of a signal, None where nothing is to be pushed. An argument that is None is left to the environment.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is wrong.
        ImportError: `protocol` asks for gRPC, which is not installed.
    """
    chosen = None if protocol is None else _protocol("otlp_protocol", protocol)
    given = None if endpoint is None else _endpoint("otlp_endpoint", endpoint, chosen or Protocol.HTTP)
    checked = None if headers is None else _headers(headers)
    seconds = None
    if interval is not None:
        what = "a number of seconds"
        seconds = check_number(f"otlp_interval={shown(interval)}", interval, least=0.1, most=86400.0, what=what, example=60)
    variables, metrics = _Variables(environment, signal), _Variables(environment, Signal.METRICS)
    # Log records follow metrics, unless their own variables ask for them or disable them.
    enabled, disabled_by = variables.enabled(argument=given is not None)
    if enabled and not (variables.exporters & OTLP or signal.name in variables.specific("ENDPOINT")[0]):
        enabled, disabled_by = metrics.enabled(argument=given is not None)
    if given is not None and disabled_by:
        inform("no %s are pushed: %s", signal.noun, disabled_by)
    if not enabled:
        return None
    try:
        name, text = variables.specific("PROTOCOL")
        used = chosen or _protocol(name, text.lower() or Protocol.HTTP.value)
        name, text = variables.endpoint(given)
        target = _endpoint(name, text, used)
    except (ValueError, ImportError) as error:
        # What is wrong with a variable of all signals is said for metrics.
        (warn if signal is Signal.METRICS or signal.name in name else inform)("no %s are pushed: %s", signal.noun, error)
        return None
    url = target
    if used is Protocol.HTTP and signal.name not in name:  # it is for all signals, and may already have the path of metrics
        parts = urlsplit(with_path(target, "/v1/metrics"))
        url = parts._replace(path=parts.path.removesuffix("metrics") + signal.value).geturl()
    if checked is not None and _receiver(target) != _receiver(metrics.endpoint(given)[1] or target):
        inform("log records are sent without otlp_headers: they go to another receiver than metrics")
        checked = None
    # No thread can wait for 2 ** 63 ms, which some write for "never".
    often = min(max(0.1, variables.number("OTEL_METRIC_EXPORT_INTERVAL", 1e3 * INTERVAL) / 1e3), 86400.0)
    limits = [LONGEST, variables.number(variables.specific("TIMEOUT")[0], TIMEOUT)]
    if signal is Signal.METRICS:
        limits.append(variables.number("OTEL_METRIC_EXPORT_TIMEOUT", 1e3 * LONGEST) / 1e3)
    temporality = variables.text("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE").lower()
    buckets = variables.text("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION").lower()
    return PushSettings(
        endpoint=url,
        signal=signal,
        protocol=used,
        headers=checked,
        interval=seconds or (often if signal is Signal.METRICS else INTERVAL),
        timeout=min(limits),
        delta=DELTA.get(temporality, frozenset()),
        exponential=buckets == "base2_exponential_bucket_histogram",
    )


class _Variables:
    """Reads OpenTelemetry's variables for a signal; an empty one counts as unset."""

    def __init__(self, environment: Mapping[str, str], signal: Signal) -> None:
        self._environment, self._signal = environment, signal
        names = self.text(f"OTEL_{signal.name}_EXPORTER").lower().split(",")
        self.exporters = {name.strip() for name in names} - {""}

    def text(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def specific(self, name: str) -> tuple[str, str]:
        """Return the name and the text of the variable for the signal, or else of the one for all signals."""
        own = f"OTEL_EXPORTER_OTLP_{self._signal.name}_{name}"
        variable = own if self.text(own) else f"OTEL_EXPORTER_OTLP_{name}"
        return variable, self.text(variable)

    def endpoint(self, argument: str | None) -> tuple[str, str]:
        """Return the name and the text of the endpoint: the argument wins, except over the variable for log records alone."""
        name, text = self.specific("ENDPOINT")
        return (name, text) if argument is None or Signal.LOGS.name in name else ("otlp_endpoint", argument)

    def number(self, name: str, default: float) -> float:
        """Return a number above 0; another text logs a warning, for log records only of a variable of their own."""
        text = self.text(name)
        with contextlib.suppress(ValueError):
            if 0 < (number := float(text or default)) < math.inf:
                return number
        if self._signal is Signal.METRICS or self._signal.name in name:
            warn("environment variable %s=%r is ignored: expected a number above 0; using %g", name, text, default)
        return default

    def enabled(self, *, argument: bool) -> tuple[bool, str]:
        """Return whether the signal is enabled, and which variable disables it whatever an argument says."""
        if self.text("OTEL_SDK_DISABLED").lower() == "true":
            return False, "OTEL_SDK_DISABLED=true"
        if "none" in self.exporters:
            return False, f"OTEL_{self._signal.name}_EXPORTER=none"
        return argument or bool(self.specific("ENDPOINT")[1] and (self.exporters & OTLP or not self.exporters)), ""


def _protocol(name: str, value: object) -> Protocol:
    if value not in [protocol.value for protocol in Protocol]:
        raise (ValueError if isinstance(value, str) else TypeError)(f"{name}={shown(value)}: expected 'http/protobuf' or 'grpc'")
    packages = ("grpc", "opentelemetry.exporter.otlp.proto.grpc")
    if value == Protocol.GRPC.value and None in map(importlib.util.find_spec, packages):
        raise ImportError(f"{name}={value!r}: over gRPC it needs a package; pip install {GRPC_PACKAGE}")
    return Protocol(value)


def _endpoint(name: str, value: object, protocol: Protocol) -> str:
    if isinstance(value, str) and _is_endpoint(value, protocol):
        return value
    text = repr(without_password(value)) if isinstance(value, str) else without_password(shown(value))
    expected = "expected a URL such as 'http://localhost:4318', or over gRPC also 'host:port'; there a password belongs in a header"
    raise (ValueError if isinstance(value, str) else TypeError)(f"{name}={text}: {expected}")


def _is_endpoint(text: str, protocol: Protocol) -> bool:
    address = protocol is Protocol.GRPC and "/" not in text
    try:
        parts = urlsplit(f"http://{text}" if address else text)
        port = parts.port
    except ValueError:
        return False
    if protocol is Protocol.GRPC and ("@" in text or (address and port is None)):  # gRPC would log a password, and not send it
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and text.isprintable() and " " not in text


def _receiver(endpoint: str) -> str:
    """Return scheme, host and port of an endpoint, which may be wrong."""
    receiver = re.sub(r"^([a-z]+://)?(?:[^/?#]*@)?([^/?#]*).*", r"\1\2", endpoint.lower(), flags=re.DOTALL)
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", receiver)


def without_password(endpoint: str) -> str:
    """Return an endpoint as it may be shown: without its query and all before its last `@`, which may be a password."""
    return re.sub(r"^([a-z]+:/+)?.*@", r"\1...@", endpoint, flags=re.IGNORECASE | re.DOTALL).partition("?")[0]


def _headers(headers: object) -> dict[str, str]:
    expected = "expected a mapping of header names to printable ASCII texts"
    if not isinstance(headers, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in headers.items()):
        raise TypeError(f"otlp_headers={type(headers).__name__}: {expected}")
    for name, value in headers.items():
        valid = re.fullmatch(r"[0-9A-Za-z_.-]+", name) and value.isascii() and value.isprintable() and value == value.strip()
        if not valid:  # the message does not show the value, which may be a password
            raise ValueError(f"otlp_headers: {name!r} cannot be sent; {expected}")
    return {name.lower(): value for name, value in headers.items()}
