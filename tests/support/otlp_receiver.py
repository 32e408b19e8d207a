"""A receiver of OTLP metrics on the official protobuf service, over HTTP and over gRPC, whose answers a test chooses; and liars.

What does not follow the specification is refused and noted in `violations`, which have to be empty at the end.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import math
import select
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceServicer, add_LogsServiceServicer_to_server
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint, HistogramDataPoint, Metric, NumberDataPoint

from tests.support.tools import PATIENCE
from torch_grad_exporter.metrics.families import Family

TYPE = "application/x-protobuf"
DECODERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}

Point = float | tuple[object, ...]
"""A number; of a histogram its counts, sum and bounds; of an exponential one scale, zeros, offset, counts and sum."""

Key = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name and a point's attributes."""


# Answers


@dataclass(frozen=True)
class Answer:
    """What a request gets; without a `body`, over HTTP the message of success or a text."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    kind: str = TYPE
    code: grpc.StatusCode = grpc.StatusCode.OK
    trailers: tuple[tuple[str, bytes], ...] = ()
    rejected: int = 0
    """Points that a partial success does not take."""
    after: float = 0.0
    """Seconds until the answer."""


def retry_info(seconds: float) -> tuple[tuple[str, bytes], ...]:
    """Return the trailers with which a gRPC server says when to try again."""
    delay = Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    return (("google.rpc.retryinfo-bin", RetryInfo(retry_delay=delay).SerializeToString()),)


@dataclass(frozen=True)
class Received:
    """A request as it was read. `at`: monotonic time; `headers`: by lower-case names, over gRPC the metadata."""

    at: float
    headers: Mapping[str, str]
    request: ExportMetricsServiceRequest
    answer: Answer

    @property
    def taken(self) -> bool:
        """Return whether the receiver has kept it."""
        return self.answer.status < 300 and self.answer.code is grpc.StatusCode.OK


class Receiver:
    """What both receivers have. `received`: all requests that were well-formed, whatever they got as an answer."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.logs: list[ResourceLogs] = []
        self.log_answer, self.log_requests = Answer(), 0
        self.violations: list[str] = []
        self._answers: Iterator[Answer] = itertools.repeat(Answer())
        self._lock = threading.Lock()
        self._over = threading.Event()

    def answer(self, *answers: Answer) -> None:
        """What the next requests get, each the next answer, and the last one for all further ones."""
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def take_logs(self, request: ExportLogsServiceRequest) -> Answer:
        """Take log records, and return what their request gets."""
        answer = self.log_answer
        if answer.status < 300 and answer.code is grpc.StatusCode.OK:
            self.logs.extend(request.resource_logs)
        self.log_requests += 1
        self._over.wait(answer.after)
        return answer

    @property
    def records(self) -> list[LogRecord]:
        """The log records that were taken."""
        return [record for resource in list(self.logs) for scope in resource.scope_logs for record in scope.log_records]

    def _next(self, headers: Mapping[str, str], request: ExportMetricsServiceRequest) -> Answer:
        with self._lock:
            answer = next(self._answers)
            self.received.append(Received(time.monotonic(), headers, request, answer))
        self._over.wait(answer.after)
        return answer

    @property
    def taken(self) -> list[ExportMetricsServiceRequest]:
        """The requests that were answered with success."""
        return [item.request for item in list(self.received) if item.taken]

    def points(self) -> dict[Key, Point]:
        """Return the latest point of every series."""
        return {key: point for request in self.taken for key, point in points(request)}

    def total(self, name: str) -> float:
        """Return the sum of all points of a counter, for one that sends differences."""
        sent = (point for request in self.taken for (known, _), point in points(request) if known == name)
        return sum(point for point in sent if isinstance(point, float))

    def latest(self, name: str, **labels: str) -> float | None:
        """Return the latest point of a metric with these among its attributes, if any."""
        known = [point for (other, own), point in self.points().items() if other == name and labels.items() <= set(own)]
        return known[0] if known and isinstance(known[0], float) else None


def response(answer: Answer) -> ExportMetricsServiceResponse:
    """Return the message of success of this answer."""
    result = ExportMetricsServiceResponse()
    if answer.rejected:
        result.partial_success.rejected_data_points = answer.rejected
        result.partial_success.error_message = "not these"
    return result


# Reading requests


def points(request: ExportMetricsServiceRequest) -> Iterator[tuple[Key, Point]]:
    """Yield every point, in order."""
    for metric in metrics(request):
        for point in getattr(metric, str(metric.WhichOneof("data"))).data_points:
            yield (metric.name, frozenset(attributes(point.attributes).items())), value(point)


def metrics(request: ExportMetricsServiceRequest) -> list[Metric]:
    """Return all metrics of a request."""
    return [metric for resource in request.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics]


def attributes(pairs: Iterable[KeyValue]) -> dict[str, str]:
    """Return attributes as texts."""
    return {pair.key: str(getattr(pair.value, str(pair.value.WhichOneof("value")))) for pair in pairs}


def value(point: NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint) -> Point:
    """Return what a point says."""
    match point:
        case NumberDataPoint():
            return float(point.as_double)
        case HistogramDataPoint():
            return tuple(point.bucket_counts), point.sum, tuple(point.explicit_bounds)
        case _:
            buckets = point.positive
            return point.scale, point.zero_count, buckets.offset, tuple(buckets.bucket_counts), point.sum


def expected(families: Iterable[Family], constant: Mapping[str, str]) -> dict[Key, Point]:
    """Return what a receiver has to have of families; an empty label is absent."""
    result: dict[Key, Point] = {}
    for family in families:
        for row, labels in enumerate(family.labels.rows):
            if family.present is not None and not family.present[row]:
                continue
            own = {name: text for name, text in zip(family.spec.labels, labels, strict=True) if text}
            key = family.spec.name, frozenset({**constant, **own}.items())
            assert key not in result
            if family.sums is None:
                result[key] = float(family.values[row])
            else:
                result[key] = (tuple(np.int64(family.values[row]).tolist()), float(family.sums[row]), family.spec.buckets)
    return result


# HTTP


class HttpReceiver(Receiver):
    """Takes `POST /v1/metrics` and `/v1/logs`. `tls`: for a server that has it; `port`: 0 for a free one.

    `most`: bytes of a body, as proxies have; `refused`: how many were larger.
    """

    def __init__(self, *, port: int = 0, tls: ssl.SSLContext | None = None, most: float = math.inf) -> None:
        super().__init__()
        self._most = most
        self.refused = 0
        self._server = _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"receiver": self}), tls)
        self.port = self._server.server_port
        self.endpoint = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Return what a request gets."""
        if path not in ("/v1/metrics", "/v1/logs") or headers.get("content-type") != TYPE:
            self.violations.append(f"{path} {headers.get('content-type')}")
            return Answer(404)
        if len(body) > self._most:
            self.refused += 1
            return Answer(413)
        try:
            content = DECODERS[headers.get("content-encoding", "")](body)
            if path == "/v1/logs":
                return self.take_logs(ExportLogsServiceRequest.FromString(content))
            request = ExportMetricsServiceRequest.FromString(content)
        except (KeyError, OSError, zlib.error, DecodeError) as error:
            self.violations.append(f"{type(error).__name__}: {error}")
            return Answer(400)
        return self._next(headers, request)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.close_all()
        self._thread.join()
        assert self.violations == []


class _Server(ThreadingHTTPServer):
    """One that can close the connections that are open, as a process does that ends."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None) -> None:
        super().__init__(address, handler)
        self._tls = tls
        self._open: set[socket.socket] = set()

    def finish_request(self, request: socket.socket, address: object) -> None:  # type: ignore[override]
        connection = request if self._tls is None else self._tls.wrap_socket(request, server_side=True)
        self._open.add(connection)
        try:
            super().finish_request(connection, address)  # type: ignore[arg-type]
        finally:
            self._open.discard(connection)
            self.shutdown_request(connection)

    def handle_error(self, *_: object) -> None:
        """Ignore a client that leaves or refuses the certificate."""

    def close_all(self) -> None:
        """End all connections."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    receiver: HttpReceiver

    def do_POST(self) -> None:
        headers = {name.lower(): text for name, text in self.headers.items()}
        answer = self.receiver.take(self.path, headers, self.rfile.read(int(headers.get("content-length", 0))))
        usual = response(answer).SerializeToString() if answer.status == 200 else b"refused by the test"
        body = usual if answer.body is None else answer.body
        self.send_response(answer.status)
        for name, text in {"Content-Type": answer.kind, "Content-Length": str(len(body)), **answer.headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.receiver.violations.append(f"GET {self.path}")
        self.send_error(405)

    def log_message(self, *_: object) -> None:
        pass


# gRPC


class GrpcReceiver(Receiver, MetricsServiceServicer):
    """The metrics service. `credentials`: for a server with TLS; `port`: 0 for a free one."""

    def __init__(self, *, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool, options=(("grpc.so_reuseport", 0),))
        add_MetricsServiceServicer_to_server(self, self._server)
        add_LogsServiceServicer_to_server(_LogsService(self), self._server)
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self.endpoint = f"{'http' if credentials is None else 'https'}://127.0.0.1:{self.port}"

    def Export(self, request: ExportMetricsServiceRequest, context: grpc.ServicerContext) -> ExportMetricsServiceResponse:
        answer = self._next(dict(context.invocation_metadata()), request)
        context.set_trailing_metadata(answer.trailers)
        if answer.code is not grpc.StatusCode.OK:
            context.abort(answer.code, "refused by the test")
        return response(answer)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.stop(0).wait()
        self._pool.shutdown()  # else its threads end at any time, also while another test lists threads
        assert self.violations == []


class _LogsService(LogsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: ExportLogsServiceRequest, context: grpc.ServicerContext) -> ExportLogsServiceResponse:
        answer = self._receiver.take_logs(request)
        context.set_trailing_metadata(answer.trailers)
        if answer.code is not grpc.StatusCode.OK:
            context.abort(answer.code, "refused by the test")
        return ExportLogsServiceResponse()


# Liars


class Liar:
    """A server that treats each connection in one way, in a thread of its own, until it is left.

    `connections`: how many there were; `sent`: bytes that went out over all of them.
    """

    def __init__(self, treat: Callable[[Liar, socket.socket], None]) -> None:
        self._treat = treat
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.over, self._full = threading.Event(), threading.Event()
        self.connections = self.sent = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def send(self, connection: socket.socket, content: bytes) -> None:
        connection.sendall(content)
        self.sent += len(content)

    def _accept(self) -> None:
        while not self._full.is_set():
            if not select.select([self._socket], [], [], 0.02)[0]:
                continue
            connection, _ = self._socket.accept()
            connection.settimeout(0.5)
            self.connections += 1
            self._threads.append(threading.Thread(target=self._treated, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _treated(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._treat(self, connection)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        # A client whose connection ends comes again at once, and must find no server.
        self._full.set()
        self._threads[0].join(PATIENCE)
        self._socket.close()
        self.over.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def refused() -> str:
    """Return an endpoint without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def heard(liar: Liar, connection: socket.socket) -> bytes:
    """Return what comes next, as soon as it does."""
    while not liar.over.is_set():
        with contextlib.suppress(TimeoutError):
            return connection.recv(65536)
    return b""


def black_hole(liar: Liar, connection: socket.socket) -> None:
    """Take everything and say nothing."""
    while heard(liar, connection):
        pass


def drips(start: bytes, drop: bytes, pause: float = 0.05) -> Callable[[Liar, socket.socket], None]:
    """Begin an answer and go on with a drop at a time."""

    def treat(liar: Liar, connection: socket.socket) -> None:
        heard(liar, connection)
        liar.send(connection, start)
        while not liar.over.wait(pause):
            liar.send(connection, drop)

    return treat


def cut_body(liar: Liar, connection: socket.socket) -> None:
    """Say a part of the answer and close."""
    heard(liar, connection)
    liar.send(connection, OK + b"Content-Length: 100\r\n\r\n\x00\x00")


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\n"

ENDLESS_BODY = drips(OK + b"\r\n", bytes(65536), 0)
