"""Requests on their way to a receiver, by OpenTelemetry's own exporters: their tries, timeouts, certificates and variables.

The exporters encode what they send, which takes them sixteen microseconds a point. So each is called with empty data, and
finished bytes replace those at the last moment: over HTTP in the session that it is given, over gRPC where it turns its data
into a message. A version that works in another way is detected and reported as a failure.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import io
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from http.cookiejar import DefaultCookiePolicy
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry.context import attach, detach, set_value
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.util.re import parse_env_headers

if TYPE_CHECKING:
    import requests

ANSWER_BYTES = 65536
"""Bytes of an answer that are read, at most."""

_COMPRESSED = {"gzip": lambda body: gzip.compress(body, 1, mtime=0), "deflate": lambda body: zlib.compress(body, 1)}


class DeliveryError(Exception):
    """A request has not arrived, as far as is known. `permanent`: the receiver refuses it permanently; else a retry may work."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class RejectedError(DeliveryError):
    """A request has arrived, and the receiver did not take all of its points: it must not be sent again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, permanent=True)


class Delivery(Protocol):
    """The way to one receiver. To be used by one thread at a time."""

    def send(self, body: bytes) -> None:
        """Returns when a request has arrived. Raises `DeliveryError`; takes as long as the exporter tries, or longer."""

    def close(self) -> None:
        """Gives the connection back."""


class _Official:
    """Sends by an exporter that takes from `_Body` what to send."""

    def __init__(self, exporter: MetricExporter, body: _Body) -> None:
        self._exporter = exporter
        self._body = body

    def send(self, body: bytes) -> None:
        """As of `Delivery`."""
        self._body.fill(body)
        token = attach(set_value("suppress_instrumentation", True))
        try:
            with _unheard() as said:
                result = self._exporter.export(MetricsData(resource_metrics=[]))
        except Exception as error:
            raise DeliveryError(_shown(f"{type(error).__name__}: {error}")) from error
        finally:
            detach(token)
        if result is not MetricExportResult.SUCCESS:
            why = self._body.failure or " / ".join(said[-1:]) or "no reason was given"
            raise DeliveryError(_shown(why), permanent=self._body.permanent)
        if not self._body.taken:
            raise DeliveryError(f"{type(self._exporter).__module__} did not send the request: this version is not supported")
        if self._body.rejected:
            raise RejectedError(self._body.rejected)

    def close(self) -> None:
        """As of `Delivery`."""
        with _unheard():
            self._exporter.shutdown()


class _Body:
    """What is to be sent, and what became of it. `failure`, `rejected`: texts for the user, empty for none.

    `permanent`: whether the receiver has refused it permanently.
    """

    def __init__(self) -> None:
        self.fill(b"")

    def fill(self, content: bytes) -> None:
        """Begins with another request."""
        self._content = content
        self._compressed: dict[str, bytes] = {}
        self.taken = self.permanent = False
        self.failure = self.rejected = ""

    def take(self, encoding: str = "") -> bytes:
        """The request, compressed if there is an encoding; once for all tries."""
        self.taken = True
        if encoding not in _COMPRESSED:
            return self._content
        if encoding not in self._compressed:
            self._compressed[encoding] = _COMPRESSED[encoding](self._content)
        return self._compressed[encoding]

    def answered(self, response: Any) -> None:  # noqa: ANN401 - an `ExportMetricsServiceResponse`
        """Notes what the receiver says of a request that has arrived."""
        partial = response.partial_success
        if partial.rejected_data_points > 0:
            self.rejected = f"{partial.rejected_data_points} points were rejected: {partial.error_message[:500]!r}"


def http(endpoint: str, headers: Mapping[str, str], *, timeout: float, compression: str) -> Delivery:
    """Delivery over HTTP. `headers`: no others are sent, whatever the environment says; `timeout`: of a request with all tries."""
    from opentelemetry.exporter.otlp.proto.http import Compression  # noqa: PLC0415 - only push needs it
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415

    body = _Body()
    with _unheard():  # it may show headers of the environment, which may be passwords
        exporter = OTLPMetricExporter(
            endpoint,
            headers=dict(headers),
            timeout=timeout,
            compression=Compression(compression),
            session=_session(endpoint, body, frozenset(headers), timeout),
            **_unmeasured(OTLPMetricExporter),
        )
    return _Official(exporter, body)


def _unmeasured(exporter: type[MetricExporter]) -> dict[str, Any]:
    """For newer versions, which may measure themselves: not in the global provider, which belongs to the user."""
    known = "meter_provider" in inspect.signature(exporter).parameters
    return {"meter_provider": NoOpMeterProvider()} if known else {}


def _shown(text: str) -> str:
    """A message without the user and the password of a URL in it."""
    return re.sub(r"//[^/?#\s]*@", "//...@", text)


def _session(endpoint: str, body: _Body, headers: frozenset[str], timeout: float) -> requests.Session:
    """A session that sends `body` whatever it is asked to post, and gives up an answer after `timeout` seconds.

    Of the environment's headers, which the exporter adds to its own, only `headers` are sent: others may be for another receiver.
    """
    # `netrc` and `json_format` are for later: no background thread may be the one that imports them.
    import netrc  # noqa: F401, PLC0415 - requests does so in its first request

    import requests  # noqa: PLC0415 - a dependency of the exporter
    from google.protobuf import json_format  # noqa: F401, PLC0415

    class Session(requests.Session):
        def merge_environment_settings(self, url: str, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:  # noqa: ANN401
            # Else `REQUESTS_CA_BUNDLE` would win over OpenTelemetry's own variable.
            return super().merge_environment_settings(url, proxies, stream, self.verify if verify is None else verify, cert)

        def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # noqa: ANN401 - as requests has it
            content = body.take(str(request.headers.get("Content-Encoding", "")))
            for name in _of_environment() - headers - _OWN:
                request.headers.pop(name, None)
            request.body = content
            request.headers["Content-Length"] = str(len(content))
            give_up_at = time.monotonic() + timeout
            try:
                with super().send(request, **{**options, "allow_redirects": False, "stream": True}) as response:
                    return _checked(response, give_up_at, body)
            except Exception as error:
                path = request.path_url  # whose query may be a key
                body.failure = f"{type(error).__name__}: {error}".replace(path, path.partition("?")[0])
                raise

    session = Session()
    # Else a password from `~/.netrc` would replace the chosen header.
    user = requests.utils.get_auth_from_url(endpoint)
    if "authorization" in headers:
        session.auth = _as_it_is
    elif any(user):
        session.auth = user
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))  # else a receiver could have ever more sent back
    return session


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


_PASSING = frozenset({408, 429})
"""The statuses below 500 that do not concern the request itself."""

_OWN = frozenset({"content-type", "content-encoding", "content-length", "user-agent", "host"})


def _of_environment() -> frozenset[str]:
    """The names of the headers that the exporter takes from the environment."""
    text = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_HEADERS") or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    return frozenset(parse_env_headers(text, liberal=True))


def _checked(response: requests.Response, give_up_at: float, body: _Body) -> requests.Response:
    """The answer with its content, of which no more is read than an answer to a request like this one has."""
    import requests  # noqa: PLC0415

    if 300 <= response.status_code < 400:
        raise requests.exceptions.TooManyRedirects(f"redirected with status {response.status_code}, which is not followed")
    content = bytearray()
    for piece in _pieces(response):
        content += piece
        if len(content) >= ANSWER_BYTES:
            break
        if time.monotonic() > give_up_at:
            raise requests.exceptions.ReadTimeout("the answer did not come to its end")
    if response.status_code == 200:
        _check_success(response, bytes(content), body)
    else:
        body.failure = _refusal(response, bytes(content))
        body.permanent = 400 <= response.status_code < 500 and response.status_code not in _PASSING
    read = requests.Response()
    read.status_code, read.reason, read.url = response.status_code, response.reason, response.url
    read.headers, read.raw = response.headers, io.BytesIO(content)
    return read


def _pieces(response: requests.Response) -> Iterator[bytes]:
    """The content of an answer as it comes in: reading more at a time would wait for it."""
    if not hasattr(response.raw, "read1"):  # older versions of urllib3
        yield from response.iter_content(1)
        return
    while piece := response.raw.read1(4096, decode_content=True):
        yield piece


def _refusal(response: requests.Response, content: bytes) -> str:
    """What a failure says of a status: which address answered, and the beginning of its answer."""
    said = " ".join(content[:200].decode("utf-8", "replace").split())
    hint = "; is this the path of OTLP's metrics?" if response.status_code in (404, 405) else ""
    answered = f"HTTP {response.status_code} {response.reason or ''}".strip()
    return f"{answered} from {response.url.partition('?')[0]}{hint}" + (f": {said}" if said.isprintable() and said else "")


def _check_success(response: requests.Response, content: bytes, body: _Body) -> None:
    """Detects points that were rejected, and a server that is no receiver."""
    import requests  # noqa: PLC0415
    from google.protobuf import json_format  # noqa: PLC0415
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse  # noqa: PLC0415

    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "text/html":
        raise requests.exceptions.InvalidURL("the answer is a web page, so that this is no OTLP receiver")
    response_of: dict[str, Callable[[], ExportMetricsServiceResponse]] = {
        "application/x-protobuf": lambda: ExportMetricsServiceResponse.FromString(content),
        "application/json": lambda: json_format.Parse(content, ExportMetricsServiceResponse(), ignore_unknown_fields=True),
    }
    if kind in response_of:
        # Older versions of protobuf do not make one error of all that can be wrong in JSON.
        with contextlib.suppress(DecodeError, json_format.Error, ValueError, TypeError, RecursionError):  # the status counts
            body.answered(response_of[kind]())


def grpc(endpoint: str, headers: Mapping[str, str], *, timeout: float, compression: str) -> Delivery:
    """Delivery over gRPC, otherwise as `http`. Raises `ImportError` where OpenTelemetry's exporter for it is not installed."""
    from grpc import Compression  # noqa: PLC0415 - optional
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest  # noqa: PLC0415

    body = _Body()

    class Exporter(OTLPMetricExporter):
        __init__ = _of_clean_environment(OTLPMetricExporter.__init__)

        def _translate_data(self, _data: MetricsData) -> ExportMetricsServiceRequest:
            request: ExportMetricsServiceRequest = ExportMetricsServiceRequest.FromString(body.take())
            return request

        @property
        def _client(self) -> Any:  # noqa: ANN401 - a stub that is made at run time
            return self._listening

        @_client.setter
        def _client(self, stub: Any) -> None:  # noqa: ANN401 - as above
            self._listening = None if stub is None else _Listening(stub, body)

    with _unheard():
        exporter = Exporter(
            endpoint,
            insecure=_is_insecure(endpoint),
            headers=tuple(headers.items()),
            timeout=timeout,
            compression={"gzip": Compression.Gzip, "deflate": Compression.Deflate}.get(compression, Compression.NoCompression),
            **_unmeasured(OTLPMetricExporter),
        )
    exporter._headers = tuple(headers.items())  # without headers it takes those of the environment
    return _Official(exporter, body)


_UNREAD = frozenset({"OTEL_EXPORTER_OTLP_METRICS_TIMEOUT"})
"""Variables that the exporter for gRPC reads, and fails on if they are wrong, even where arguments replace them."""


def _of_clean_environment(function: Callable[..., None]) -> Callable[..., None]:
    """The same function, for which variables that are empty or must not be read are not set.

    It is a copy that has another `environ` among its global names: all threads share that of the process.
    """
    there = {name: text for name, text in os.environ.items() if text.strip() and name not in _UNREAD}
    original: Any = inspect.unwrap(function)
    clean = {**original.__globals__, "environ": there}
    copy = FunctionType(original.__code__, clean, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


def _is_insecure(endpoint: str) -> bool:
    """Whether there is no TLS: by the scheme, or for an address without one by OpenTelemetry's variables."""
    scheme = endpoint.partition("://")[0].lower() if "://" in endpoint else ""
    names = ("OTEL_EXPORTER_OTLP_METRICS_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
    insecure = next((text for name in names if (text := os.environ.get(name, "").strip())), "")
    return scheme == "http" or (scheme != "https" and insecure.lower() == "true")


class _Listening:
    """A stub of the metrics service that listens to the answers."""

    def __init__(self, stub: Any, body: _Body) -> None:  # noqa: ANN401 - a stub that is made at run time
        self._stub = stub
        self._body = body

    def Export(self, **call: Any) -> Any:  # noqa: ANN401, N802 - as the stub has it
        """Sends a request."""
        from grpc import RpcError  # noqa: PLC0415 - optional

        try:
            response = self._stub.Export(**call)
        except RpcError as error:
            self._body.failure = f"gRPC {error.code().name}: {(error.details() or '')[:200]!r}"
            self._body.permanent = _is_permanent(error)
            raise
        self._body.answered(response)
        return response


_RETRYABLE = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
"""The codes of gRPC after which OpenTelemetry's specification has a request sent again."""


def _is_permanent(error: Any) -> bool:  # noqa: ANN401 - an `RpcError`, whose type has not what it has
    """Whether a call was refused permanently, as by a receiver that is out of resources and does not say when to retry."""
    if error.code().name == "RESOURCE_EXHAUSTED":
        trailers = dict(error.trailing_metadata() or ())
        details = trailers.get("grpc-status-details-bin", b"")
        return "google.rpc.retryinfo-bin" not in trailers and b"google.rpc.RetryInfo" not in details
    return error.code().name not in _RETRYABLE


# What the exporters log


class _Unheard(logging.Filter):
    """Takes the lines that are logged while one of our threads exports: a dead receiver would fill the log of the training."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        lines: list[str] | None = getattr(self._here, "lines", None)
        if lines is None:
            return True
        lines.append(record.getMessage())
        return False

    @contextlib.contextmanager
    def lines(self) -> Iterator[list[str]]:
        """The lines of this thread from now on."""
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("opentelemetry.", "urllib3.")):
                filters = logging.getLogger(name).filters
                if self not in filters:
                    filters.insert(0, self)  # before one that drops repeated lines: a line of ours must not cost the user theirs
        self._here.lines = []
        try:
            yield self._here.lines
        finally:
            self._here.lines = None


_unheard = _Unheard().lines
