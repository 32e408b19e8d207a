"""Delivery: OpenTelemetry's own exporters, beside the user's own OpenTelemetry and outside of the user's log.

They read certificates, compression and headers from the environment, encode, compress, send and retry. They only log why a request
failed, which is where a failure gets its text from.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import netrc  # noqa: F401 - requests imports it in its first request, which no background thread may be the one to do
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from torch_grad_exporter.errors import ErrorLog, Guard, inform, warn
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings, Signal, without_password
from torch_grad_exporter.outputs.own_requests import mute, unlogged

# What helps against a limit of a proxy, such as nginx with its 1 MB, and where only log records are not permitted.
SMALLER = "set OTEL_EXPORTER_OTLP_COMPRESSION=gzip, or raise the limit of the receiver and of the proxies before it"
METRICS_ALONE = "OTEL_LOGS_EXPORTER=none sends metrics alone"

# Headers that every request has.
OWN_HEADERS = frozenset({"accept", "accept-encoding", "connection", "content-encoding", "content-type", "user-agent"})

# Of OpenTelemetry, their modules and classes, over HTTP and gRPC alike.
EXPORTERS = {Signal.METRICS: ("metric_exporter", "OTLPMetricExporter"), Signal.LOGS: ("_log_exporter", "OTLPLogExporter")}

# What a receiver answers that has nothing at this path, VictoriaMetrics the first of them.
NOT_TAKEN = frozenset({400, 404, 405, 501})

# Of gRPC and of HTTP: the receiver does not permit it.
DENIED = ("UNAUTHENTICATED", "PERMISSION_DENIED"), frozenset({401, 403})

# Of failures, and characters of what an exporter says.
SOURCE, NAMED = "otlp", 300

# For the last requests of a run, together, and for one that is under way when it ends.
LAST_SECONDS, GRACE = 1.1, 0.25

# In a forked child: connections of the parent, which gRPC must not end here.
_inherited: list[object] = []


class DeliveryError(Exception):
    """A request that has not arrived, as far as is known."""


class TooLargeError(DeliveryError):
    """A request that was refused because of its size."""


class NotTakenError(DeliveryError):
    """A request that must not be sent again: the receiver does not take this signal, or not this content."""


class RejectedError(Exception):
    """A request that has arrived, but not all of its points or records were accepted: it must not be sent again."""


class Delivery:
    """The way to one receiver. To be used by one thread at a time, but for `close`.

    `warnings`: what the exporter says of variables that it ignores. `seconds`: for each request, with all its retries. Raises
    where a variable that the exporter reads cannot be used.
    """

    def __init__(self, settings: PushSettings, seconds: float) -> None:
        seconds = min(seconds, settings.timeout)
        self._session = _Session(settings) if settings.protocol is push_settings.Protocol.HTTP else None
        self._signal = settings.signal
        module, name = EXPORTERS[settings.signal]
        with unlogged() as said:
            # Slow to import, and over gRPC optional.
            package = "grpc" if self._session is None else "http"
            exporter = getattr(importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}"), name)
            mute("opentelemetry", "urllib3")
            if self._session is not None:
                self._exporter = exporter(settings.endpoint, headers=settings.headers, timeout=seconds, session=self._session)
            else:
                headers = None if settings.headers is None else tuple(settings.headers.items())
                self._exporter = exporter(settings.endpoint, headers=headers, timeout=seconds)
        # It quotes a header that it cannot read, which may be a password.
        self.warnings = [_shown("a header of the environment cannot be read" if "eader" in text else text) for text in said]

    def send(self, data: object) -> None:
        """Return when a request has arrived. Raises `DeliveryError`, `TooLargeError`, `NotTakenError` or `RejectedError`."""
        arrived = False
        with unlogged() as said:
            try:
                arrived = self._exporter.export(data).name == "SUCCESS"
            except Exception as error:  # noqa: BLE001 - some versions raise where others return a failure
                said.append(f"{type(error).__name__}: {error}")
        text = _shown("; ".join(dict.fromkeys(said)) or "the export failed")
        session = self._session
        if not arrived:
            if session is not None and session.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                raise TooLargeError(f"{text}; {SMALLER}")
            if "UNIMPLEMENTED" in text if session is None else session.status in NOT_TAKEN:
                raise NotTakenError(text)
            denied = any(code in text for code in DENIED[0]) if session is None else session.status in DENIED[1]
            raise DeliveryError(f"{text}; {METRICS_ALONE}" if denied and self._signal is Signal.LOGS else text)
        if session is not None and session.rejected:
            raise RejectedError(_shown(session.rejected))

    def close(self) -> None:
        """Give the connection back; ends a pause between two tries. From any thread."""
        with unlogged():
            self._exporter.shutdown()


class DeliveryLoop(BackgroundLoop):
    """A thread that sends to one receiver, and what is left when the run is over over a connection of its own.

    A receiver that takes longer for a request than `close` waits does not get what is left: no second thread overtakes the first.
    """

    def __init__(self, settings: PushSettings, errors: ErrorLog, pause: float | Callable[[], float]) -> None:
        self._settings, self._errors = settings, errors
        self._way = Delivery(settings, settings.timeout)
        log = warn if settings.signal is Signal.METRICS else inform  # most of them were said for metrics
        for warning in self._way.warnings:
            log("OpenTelemetry's exporter: %s", warning)
        guard = Guard(functools.partial(errors.report_first, SOURCE))
        role = "push" if settings.signal is Signal.METRICS else "logs"
        super().__init__(role, lambda: self.send(self._way), guard=guard, pause=pause, last=self._send_last)

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if no more threads can be started."""
        super().start()
        if self._settings.signal is Signal.METRICS:
            inform("pushing metrics to %s every %g s", without_password(self._settings.endpoint), self._settings.interval)
        else:
            inform("pushing problems and actions to %s as log records", without_password(self._settings.endpoint))

    def send(self, way: Delivery) -> None:
        """Send what there is. If `stopping`, this is the last call, on which `LAST_SECONDS` may be spent."""
        raise NotImplementedError

    def _send_last(self) -> None:
        self._way.close()
        way = Delivery(self._settings, LAST_SECONDS)
        try:
            self.send(way)
        finally:
            way.close()

    def close(self, seconds: float) -> bool:
        """See `BackgroundLoop`. A pause between two tries of a request is ended, since the last request follows."""
        give_up_at = time.monotonic() + seconds
        self.stop()
        if not self.join(min(GRACE, seconds)):
            self._way.close()
        return self.join(give_up_at - time.monotonic())

    def after_fork_in_child(self) -> None:
        """Keep the parent's connection, which must not be touched; the child has no thread that would send anything."""
        _inherited.append(self._way)


class _Session(requests.Session):
    """Guards which headers and passwords are sent to a receiver, and looks at each answer.

    `status`: of the last one, 0 for none. `rejected`: what it says of points or records that were not accepted, empty if all were.
    """

    def __init__(self, settings: PushSettings) -> None:
        super().__init__()
        self.status, self.rejected = 0, ""
        self._content = "points" if settings.signal is Signal.METRICS else settings.signal.noun
        self._sent = None if settings.headers is None else OWN_HEADERS.union(settings.headers)
        user = requests.utils.get_auth_from_url(settings.endpoint)
        self.auth = user if any(user) else None  # else a password from `~/.netrc` would replace it
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))  # else a receiver could have ever more sent back

    def request(self, *arguments: Any, **options: Any) -> requests.Response:  # noqa: ANN401 - as `requests.Session` has it
        """See `requests.Session`. Raises `requests.RequestException` where the answer is not that of a receiver."""
        headers = {**self.headers, **(options.get("headers") or {})}
        if self._sent is not None:  # the exporter adds those of the environment, which may hold a password for another receiver
            headers = {name: value for name, value in headers.items() if name.lower() in self._sent}
            options["headers"] = headers
        if "authorization" in map(str.lower, headers):  # wins over any password
            options["auth"] = lambda request: request
        if isinstance(self.verify, str):  # else `REQUESTS_CA_BUNDLE` would win
            options["verify"] = self.verify
        self.status, self.rejected = 0, ""
        response = super().request(*arguments, **options | {"allow_redirects": False})
        self.status = response.status_code
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if 300 <= response.status_code < 400:
            raise requests.RequestException(f"redirected with status {response.status_code}, which is not followed")
        if response.ok and kind == "text/html":
            raise requests.RequestException("the answer is a web page, this is not an OTLP receiver")
        if response.ok and kind == "application/x-protobuf":
            with contextlib.suppress(DecodeError):  # the answer for log records is the same message, under other names
                partial = ExportMetricsServiceResponse.FromString(response.content).partial_success
                if partial.rejected_data_points > 0:
                    self.rejected = f"{partial.rejected_data_points} {self._content} were rejected: {partial.error_message!r}"
        return response


def _shown(said: str) -> str:
    """Return the text of an exporter in one line, without the user and the password of a URL, and without its query."""
    line = " ".join(re.sub(r"//[^/?#\s]*@", "//...@", said).split())
    return re.sub(r"\?[^\s'\")]*", "", line)[:NAMED]
