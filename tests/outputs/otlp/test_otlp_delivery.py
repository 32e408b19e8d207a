"""Delivery by OpenTelemetry's exporters: what arrives, what every answer means, and what a liar can do."""

from __future__ import annotations

import base64
import gzip
import itertools
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import requests
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry import context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult, MetricsData

from tests.support import otlp_receiver as liars
from tests.support.certificates import authority
from tests.support.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, Liar, Receiver, expected, refused, retry_info
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter.collectors.gradients import GRAD_CAPTURES, GRAD_NORM, GRAD_NORM_DISTRIBUTION
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows
from torch_grad_exporter.outputs.otlp import delivery
from torch_grad_exporter.outputs.otlp.delivery import FIRST_PAUSE, TRIES, Delivery, DeliveryError, RejectedError
from torch_grad_exporter.outputs.otlp.otlp import REQUEST_BYTES, Encoder, Temporality
from torch_grad_exporter.outputs.otlp.push import connected
from torch_grad_exporter.outputs.otlp.push_settings import Compression, resolve

CUMULATIVE = {Kind.COUNTER: Temporality.CUMULATIVE, Kind.HISTOGRAM: Temporality.CUMULATIVE}
LABELS = {"run": "a run", "rank": "0"}
QUICK = 0.7
"""Seconds for a request to a receiver that does not come to its end."""

Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def _one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no time for a pause before another try, however long a request takes, unless a test or a receiver says otherwise."""
    monkeypatch.setattr(delivery, "FIRST_PAUSE", FOREVER)


def families(layers: int) -> list[Family]:
    """A gauge, a counter and a histogram of so many layers, a row of each absent."""
    random = np.random.default_rng(8)
    rows = LabelRows(tuple((f"model.blocks.{number}.attention.weight",) for number in range(layers)))
    present = np.arange(layers) != 1
    counts = random.integers(0, 1 << 40, (layers, len(GRAD_NORM_DISTRIBUTION.buckets) + 1)).astype(float)
    return [
        Family(GRAD_NORM, random.random(layers), rows, present=present),
        Family(GRAD_CAPTURES, random.integers(0, 1 << 50, layers).astype(float), rows, present=present),
        Family(GRAD_NORM_DISTRIBUTION, counts, rows, present=present, sums=random.random(layers)),
    ]


def encoded(found: list[Family]) -> list[bytes]:
    """The requests that carry families."""
    resource: dict[str, object] = {"service.name": "training"}
    return Encoder(LABELS, resource, version="1", temporality=CUMULATIVE).encode(found, start=5, since=6, at=7)


(BODY,) = encoded(families(3))


def http(endpoint: str, compression: str = "none", timeout: float = PATIENCE, headers: dict[str, str] | None = None) -> Delivery:
    """Delivery to a receiver over HTTP."""
    return way_to(endpoint, "http/protobuf", compression, timeout, headers)


def over_grpc(
    endpoint: str, compression: str = "none", timeout: float = PATIENCE, headers: dict[str, str] | None = None
) -> Delivery:
    """Delivery to a receiver over gRPC."""
    return way_to(endpoint, "grpc", compression, timeout, headers)


def way_to(endpoint: str, protocol: str, compression: str, timeout: float, headers: dict[str, str] | None) -> Delivery:
    """Delivery as a user gets it who gives the endpoint, with the certificates of the environment."""
    settings = resolve(endpoint, protocol, headers or {})
    assert settings is not None
    return connected(replace(settings, compression=Compression(compression), timeout=timeout), timeout)


WAYS: dict[str, tuple[type[HttpReceiver | GrpcReceiver], Callable[..., Delivery]]] = {
    "http": (HttpReceiver, http),
    "grpc": (GrpcReceiver, over_grpc),
}


def failure(way: Delivery, body: bytes = BODY) -> str:
    """What is wrong with a request that fails."""
    with pytest.raises(DeliveryError) as caught:
        way.send(body)
    return str(caught.value)


@contextmanager
def closing(way: Delivery) -> Iterator[Delivery]:
    """The connection is given back."""
    try:
        yield way
    finally:
        way.close()


# What arrives


@pytest.mark.parametrize(
    ("protocol", "compression"), [("http", "none"), ("http", "gzip"), ("http", "deflate"), ("grpc", "none"), ("grpc", "gzip")]
)
def test_every_point_arrives(protocol: str, compression: str) -> None:
    """Each as it was, also of a request that is sent again over the same connection; no more bytes go out than are announced."""
    receiver_of, way_of = WAYS[protocol]
    found = families(40)
    with receiver_of() as receiver, closing(way_of(receiver.endpoint, compression)) as way:
        for _ in range(2):
            for body in encoded(found):
                way.send(body)
    assert len(receiver.received) == 2
    assert receiver.points() == expected(found, LABELS)
    assert len(receiver.points()) == 3 * 39
    if protocol == "http":
        assert [one.headers.get("content-encoding", "none") for one in receiver.received] == [compression] * 2


def bytes_sent(way_of: Callable[..., Delivery], compression: str, body: bytes) -> int:
    """How many bytes a request has on the wire, as a server that only counts them sees it."""
    received = bytearray()

    def counting(liar: Liar, connection: socket.socket) -> None:
        while len(received) < whole(received) and (more := liars.heard(liar, connection)):
            received.extend(more)
        liar.send(connection, b"HTTP/1.1 500 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with Liar(counting) as liar, closing(way_of(liar.endpoint, compression)) as way:
        failure(way, body)
    return len(received)


def whole(received: bytes | bytearray) -> float:
    """How many bytes a request has that has begun like this."""
    head, end, _ = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return len(head + end) + int(length[1]) if end and length else math.inf


def test_compression_over_http_makes_it_small() -> None:
    """Half at most of what is sent without, and without, it is the request and a few headers."""
    (body,) = encoded(families(200))
    plain = bytes_sent(http, "none", body)
    assert len(body) < plain < len(body) + 1000
    assert 0 < 2 * bytes_sent(http, "gzip", body) < plain
    assert 0 < 2 * bytes_sent(http, "deflate", body) < plain


@pytest.mark.parametrize("protocol", WAYS)
def test_headers_are_those_given(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No others are sent, such as those of the environment: no password goes where it was not meant to go."""
    receiver_of, way_of = WAYS[protocol]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret,x-team=a,x-own=c")
    with receiver_of() as receiver:
        for headers in ({}, {"x-own": "b"}):
            with closing(way_of(receiver.endpoint, headers=headers)) as way:
                way.send(BODY)
    none, given = (one.headers for one in receiver.received)
    assert given["x-own"] == "b"
    assert not {"authorization", "x-team", "x-own"} & none.keys()
    assert not {"authorization", "x-team"} & given.keys()


def test_requests_are_of_bounded_size() -> None:
    """Of 8,000 layers too, beside the many that a receiver takes: each request stands for itself, and no point is lost."""
    found = families(8_000)
    requests_of_it = encoded(found)
    assert len(requests_of_it) >= 3
    assert max(map(len, requests_of_it)) <= REQUEST_BYTES < 4 * 1024 * 1024
    receiver = Receiver()
    parsed = [liars.ExportMetricsServiceRequest.FromString(body) for body in requests_of_it]
    assert sum(len(list(liars.points(one))) for one in parsed) == 3 * 7_999
    assert {one.resource_metrics[0].resource.attributes[0].key for one in parsed} == {"service.name"}
    assert {one.resource_metrics[0].scope_metrics[0].scope.name for one in parsed} == {"torch_grad_exporter"}
    assert {key: point for one in parsed for key, point in liars.points(one)} == expected(found, LABELS)
    assert receiver.points() == {}


# Answers over HTTP

OK_ANSWERS = {
    "empty": Answer(body=b""),
    "garbage": Answer(body=b"\xff\xff\xff\xff"),
    "another type": Answer(body=b"{}", kind="application/json"),
    "none rejected, in JSON": Answer(body=b'{"partialSuccess": {"rejectedDataPoints": "0"}}', kind="application/json"),
    "broken JSON": Answer(body=b'{"partialSuccess": {"rej\xff', kind="application/json"),
    "endless JSON": Answer(body=b"[" * 60_000, kind="application/json"),
    "a number in JSON": Answer(body=b"3", kind="application/json"),
    "JSON of something else": Answer(body=b'{"partialSuccess": [3], "ok": 1}', kind="application/json"),
    "no type": Answer(body=b"ok", kind=""),
    "202": Answer(202),
    "204": Answer(204, body=b""),
}


@pytest.mark.parametrize("name", OK_ANSWERS)
def test_a_success_is_one_whatever_the_body(name: str) -> None:
    """The status counts: nothing is sent again."""
    with HttpReceiver() as receiver, closing(http(receiver.endpoint)) as way:
        receiver.answer(OK_ANSWERS[name])
        way.send(BODY)
        way.send(BODY)
    assert len(receiver.received) == 2


FAILURES: dict[str, tuple[Answer, str]] = {
    **{str(n): (Answer(n), f"HTTP {n} ") for n in (400, 401, 403, 404, 405, 413, 415, 429, 500, 501, 502, 503, 504)},
    **{str(n): (Answer(n, {"Location": "/v1/metrics"}), f"redirected with status {n}") for n in (301, 302, 303, 307, 308)},
    "503, much later": (Answer(503, {"Retry-After": "3600"}), "HTTP 503 "),
    "429, another day": (Answer(429, {"Retry-After": "Fri, 31 Dec 2099 23:59:59 GMT"}), "HTTP 429 "),
    "web page": (Answer(body=b"<html>log in</html>", kind="text/html; charset=utf-8"), "is a web page"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_answer_that_is_a_failure(name: str) -> None:
    """It is told with its number; where there is no time for the exporter's pause, there is one try. The next one may succeed."""
    answer, told = FAILURES[name]
    with HttpReceiver() as receiver, closing(http(receiver.endpoint)) as way:
        receiver.answer(answer, Answer())
        said = failure(way)
        assert told in said
        assert "\n" not in said
        assert len(receiver.received) == 1
        way.send(BODY)
    assert len(receiver.received) == 2


@pytest.mark.parametrize("protocol", WAYS)
def test_rejected_points_are_not_sent_again(protocol: str) -> None:
    """A partial success is a failure of its own kind, which names the number and the receiver's reason."""
    receiver_of, way_of = WAYS[protocol]
    with receiver_of() as receiver, closing(way_of(receiver.endpoint)) as way:
        receiver.answer(Answer(rejected=3), Answer())
        with pytest.raises(RejectedError, match=r"3 points were rejected: 'not these'"):
            way.send(BODY)
        assert len(receiver.received) == 1
        way.send(BODY)


@pytest.mark.parametrize("number", ['"3"', "3"])
def test_rejected_points_in_json(number: str) -> None:
    """A receiver that answers in JSON, with the number as a text or not, is understood as one that answers in protobuf."""
    body = f'{{"partialSuccess": {{"rejectedDataPoints": {number}, "errorMessage": "not these"}}}}'.encode()
    with HttpReceiver() as receiver, closing(http(receiver.endpoint)) as way:
        receiver.answer(Answer(body=body, kind="application/json; charset=utf-8"), Answer())
        with pytest.raises(RejectedError, match=r"3 points were rejected: 'not these'"):
            way.send(BODY)
        way.send(BODY)


def is_permanent(way: Delivery) -> bool:
    """Whether a request that fails is refused for good."""
    with pytest.raises(DeliveryError) as caught:
        way.send(BODY)
    return caught.value.permanent


def test_what_is_refused_for_good_over_http() -> None:
    """Statuses from 400 to 499 say so, but 408 and 429; a later failure of another kind is none of them."""
    statuses = (400, 401, 403, 404, 408, 411, 413, 415, 422, 429, 499, 500, 501, 502, 503, 504, 302)
    with HttpReceiver() as receiver, closing(http(receiver.endpoint)) as way:
        receiver.answer(*map(Answer, statuses))
        found = {status for status in statuses if is_permanent(way)}
        assert found == {400, 401, 403, 404, 411, 413, 415, 422, 499}
        receiver.answer(Answer(400), Answer(rejected=1), Answer(body=b"", kind="text/html"))
        assert [is_permanent(way) for _ in range(3)] == [True, True, False]
        receiver.answer(Answer(400))
        assert is_permanent(way)
    assert not is_permanent(way)  # no receiver is there any more


def test_what_is_refused_for_good_over_grpc() -> None:
    """All codes but those that the specification calls retryable; exhausted is for now only if the server says for how long."""
    codes = [code for code in Code if code is not Code.OK]
    later = Answer(code=Code.RESOURCE_EXHAUSTED, trailers=retry_info(3600))
    details = Answer(code=Code.RESOURCE_EXHAUSTED, trailers=status_details(3600))
    with GrpcReceiver() as receiver, closing(over_grpc(receiver.endpoint)) as way:
        receiver.answer(*(Answer(code=code) for code in codes), later, details)
        found = {code.name for code in codes if is_permanent(way)}
        assert [is_permanent(way) for _ in range(2)] == [False, False]
    assert found == {
        "UNKNOWN", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION", "UNIMPLEMENTED", "INTERNAL",
    }  # fmt: skip


def status_details(seconds: int) -> tuple[tuple[str, bytes], ...]:
    """The trailers with which gRPC's richer errors say the same as `retry_info`."""
    status = Status(code=Code.RESOURCE_EXHAUSTED.value[0], message="refused by the test")
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return (("grpc-status-details-bin", status.SerializeToString()),)


def test_tries_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the exporter makes them: 429, 502, 503 and 504 once more after about a second, or when the receiver says so."""
    check_tries(
        monkeypatch,
        "http",
        [*((Answer(status), 0.8) for status in (429, 502, 503, 504)), (Answer(503, {"Retry-After": "0.3"}), 0.3)],
    )


def test_tries_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the exporter makes them: every code that the specification calls retryable."""
    codes = (Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.ABORTED, Code.OUT_OF_RANGE, Code.UNAVAILABLE, Code.DATA_LOSS)
    told = (Answer(code=Code.RESOURCE_EXHAUSTED, trailers=retry_info(0.3)), 0.3)
    check_tries(monkeypatch, "grpc", [*((Answer(code=code), 0.8) for code in codes), told])


def test_tries_are_bounded() -> None:
    """A receiver that wants each request again at once gets it a few times."""
    with HttpReceiver() as receiver, closing(http(receiver.endpoint)) as way:
        receiver.answer(*[Answer(503, {"Retry-After": "0"})] * (TRIES + 1))
        assert "HTTP 503 " in failure(way)
    assert len(receiver.received) == TRIES


@pytest.mark.parametrize("protocol", WAYS)
def test_closing_ends_a_pause(protocol: str) -> None:
    """A request whose next try is due in ten minutes fails as soon as the connection is given back."""
    receiver_of, way_of = WAYS[protocol]
    later = {
        "http": Answer(503, {"Retry-After": "600"}),
        "grpc": Answer(code=Code.RESOURCE_EXHAUSTED, trailers=retry_info(600)),
    }
    with receiver_of() as receiver, ThreadPoolExecutor(1) as pool:
        way = way_of(receiver.endpoint, timeout=FOREVER)
        receiver.answer(later[protocol])
        sending = pool.submit(failure, way)
        assert eventually(lambda: len(receiver.received) == 1)
        way.close()
        assert "503" in sending.result(PATIENCE) or "RESOURCE_EXHAUSTED" in sending.result(PATIENCE)


def check_tries(monkeypatch: pytest.MonkeyPatch, protocol: str, answers: list[tuple[Answer, float]]) -> None:
    """All of them at a time: each request succeeds with its second try, not before so many seconds, but soon after."""
    monkeypatch.setattr(delivery, "FIRST_PAUSE", FIRST_PAUSE)
    receiver_of, way_of = WAYS[protocol]

    def pause(answer: Answer, least: float) -> float:
        with receiver_of() as receiver, closing(way_of(receiver.endpoint)) as way:
            receiver.answer(answer, Answer())
            way.send(BODY)
            first, second = receiver.received
            assert first.request == second.request
            assert second.at - first.at >= least
            return second.at - first.at

    def is_soon(answer: Answer, least: float) -> bool:
        return eventually(lambda: pause(answer, least) < least + 1.2)

    with ThreadPoolExecutor(len(answers)) as pool:
        assert all(pool.map(is_soon, *zip(*answers, strict=True)))


# Answers over gRPC


@pytest.mark.parametrize("code", [code.name for code in Code if code is not Code.OK])
def test_a_code_that_is_a_failure(code: str) -> None:
    """It is told by its name and with the server's text, also the second time, with one try where there is no time for more."""
    with GrpcReceiver() as receiver, closing(over_grpc(receiver.endpoint)) as way:
        receiver.answer(Answer(code=Code[code]), Answer(code=Code[code]), Answer())
        for number in (1, 2):
            told = failure(way)
            assert code in told
            assert "refused by the test" in told
            assert len(receiver.received) == number
        way.send(BODY)


# Liars

LIARS: dict[str, Callable[[Liar, socket.socket], None]] = {
    "black hole": liars.black_hole,
    "slow body": liars.SLOW_BODY,
    "endless headers": liars.ENDLESS_HEADERS,
    "cut body": liars.CUT_BODY,
    "another protocol": liars.NO_HTTP,
    "broken headers": liars.BROKEN_HEADERS,
}
"""Those that an exporter notices within its time; slow headers and the others are in `test_push.py`."""


@pytest.mark.parametrize("name", LIARS)
def test_liars_over_http(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A failure in time, for little of this thread's time, and with few bytes taken; nothing is logged."""

    def is_bounded() -> bool:
        with Liar(LIARS[name]) as liar, closing(http(liar.endpoint, timeout=QUICK)) as way:
            start, used = time.monotonic(), time.thread_time()
            failure(way)
            took, used = time.monotonic() - start, time.thread_time() - used
        assert liar.connections <= 2  # the exporter tries once more at once, as a kept connection may just have been closed
        assert liar.sent < 16_000_000  # what the two sides of a connection buffer
        return liar.connections > 0 and took < 2 * QUICK + 0.3 and used < 0.15

    with caplog.at_level(logging.INFO):
        assert eventually(is_bounded)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("name", LIARS)
def test_liars_over_grpc(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As over HTTP."""

    def is_bounded() -> bool:
        with Liar(LIARS[name]) as liar, closing(over_grpc(liar.endpoint, timeout=QUICK)) as way:
            start = time.monotonic()
            told = failure(way)
            took = time.monotonic() - start
        assert "UNAVAILABLE" in told or "DEADLINE_EXCEEDED" in told
        assert liar.sent < 16_000_000
        return liar.connections > 0 and took < 2 * QUICK

    with caplog.at_level(logging.INFO):
        assert eventually(is_bounded)
    assert [record.getMessage() for record in caplog.records] == []


def test_an_endless_answer() -> None:
    """A success has a body that never ends: it is left after a small part, which costs little of this thread's time."""

    def is_bounded() -> bool:
        with Liar(liars.ENDLESS_BODY) as liar, closing(http(liar.endpoint)) as way:
            start, used = time.monotonic(), time.thread_time()
            way.send(BODY)
            took, used = time.monotonic() - start, time.thread_time() - used
        assert liar.sent < 16_000_000  # what the two sides of a connection buffer
        return took < QUICK and used < 0.1

    assert eventually(is_bounded)


def test_an_answer_in_pieces() -> None:
    """One that comes slowly, in chunks and compressed, is read to its end."""
    response = liars.ExportMetricsServiceResponse()
    response.partial_success.rejected_data_points = 7
    content = gzip.compress(response.SerializeToString())

    def treat(liar: Liar, connection: socket.socket) -> None:
        liars.heard(liar, connection)
        liar.send(connection, liars.OK + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in content:
            liar.send(connection, b"1\r\n" + bytes([byte]) + b"\r\n")
        liar.send(connection, b"0\r\n\r\n")

    with Liar(treat) as liar, closing(http(liar.endpoint)) as way, pytest.raises(RejectedError, match="7 points"):
        way.send(BODY)


def test_a_receiver_that_reads_nothing() -> None:
    """A request that does not fit into the buffers between is given up in time."""

    def seconds() -> float:
        with Liar(liars.deaf) as liar, closing(http(liar.endpoint, timeout=QUICK)) as way:
            start = time.monotonic()
            failure(way, bytes(30_000_000))
            return time.monotonic() - start

    assert eventually(lambda: seconds() < 2 * QUICK + 0.3)


@pytest.mark.parametrize("protocol", WAYS)
def test_no_receiver_there(protocol: str) -> None:
    """A refused connection is a failure at once, and what is told has no secret that is part of the endpoint."""

    def seconds() -> float:
        start = time.monotonic()
        with closing(WAYS[protocol][1](refused())) as way:
            told = failure(way)
        assert "efused" in told or "UNAVAILABLE" in told
        return time.monotonic() - start

    assert eventually(lambda: seconds() < QUICK)


def test_no_secret_is_told() -> None:
    """The query of an endpoint may be a key: it is in no message."""
    with closing(http(refused() + "/v1/metrics?key=secret")) as way:
        told = failure(way)
    assert "efused" in told
    assert "secret" not in told


def test_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nor is it in the lines that urllib3 logs of each request; those of another's request are logged as ever."""

    def treat(liar: Liar, connection: socket.socket) -> None:
        liars.heard(liar, connection)
        liar.send(connection, liars.OK + b"Content-Length: 0\r\nConnection: close\r\n\r\n")

    with caplog.at_level(logging.DEBUG), Liar(treat) as liar, closing(http(f"{liar.endpoint}?key=secret")) as way:
        way.send(BODY)
        assert "secret" not in caplog.text
        assert requests.post(f"{liar.endpoint}/of-another", timeout=PATIENCE).ok
        assert "/of-another" in caplog.text


def test_no_password_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the one before the host, which some errors of the libraries have in them."""

    def send(self: requests.adapters.HTTPAdapter, request: requests.PreparedRequest, **_: object) -> requests.Response:
        raise requests.exceptions.InvalidURL(f"Failed to parse: {request.url}")

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    with closing(http("http://me:secret@h:4318")) as way:
        assert failure(way) == "InvalidURL: Failed to parse: http://...@h:4318/v1/metrics"


def test_what_is_given_wins_over_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header is sent as it is, else the endpoint's user; the file counts where there is neither, as it does in `requests`."""
    file = tmp_path / "netrc"
    file.write_text("machine 127.0.0.1 login file password secret\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    with HttpReceiver() as receiver:
        with_user = receiver.endpoint.replace("//", "//me:secret@")
        ways = [
            http(receiver.endpoint, headers={"authorization": "Bearer ours"}),
            http(with_user, headers={"authorization": "Bearer ours"}),
            http(receiver.endpoint, headers={"x-own": "a"}),
            http(with_user),
        ]
        for one in ways:
            with closing(one) as way:
                way.send(BODY)
    sent = [one.headers["authorization"] for one in receiver.received]
    basic = [f"Basic {base64.b64encode(user).decode()}" for user in (b"file:secret", b"me:secret")]
    assert sent == ["Bearer ours", "Bearer ours", *basic]


def test_cookies_are_not_kept() -> None:
    """A receiver that sets another one with each answer does not make the requests grow."""
    with HttpReceiver() as receiver, closing(http(receiver.endpoint)) as way:
        for number in range(3):
            receiver.answer(Answer(headers={"Set-Cookie": f"name{number}=value"}))
            way.send(BODY)
    assert [one.headers.get("cookie") for one in receiver.received] == [None] * 3


# TLS

NAMES = ("OTEL_EXPORTER_OTLP_INSECURE", "OTEL_EXPORTER_OTLP_METRICS_INSECURE")


def test_a_scheme_over_grpc_says_whether_there_is_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variables say, which count for an address without one: there the first that is not empty, that for metrics."""
    texts = (None, "", "true", "False")
    with GrpcReceiver() as receiver:
        schemes = {"http": "http://", "https": "https://", "HTTP": "HTTP://", "none": ""}
        ways: dict[tuple[str, str | None, str | None], Delivery] = {}
        for (scheme, begin), both, own in itertools.product(schemes.items(), texts, texts):
            with monkeypatch.context() as patch:
                for name, text in zip(NAMES, (both, own), strict=True):
                    patch.delenv(name, raising=False) if text is None else patch.setenv(name, text)
                ways[scheme, both, own] = over_grpc(f"{begin}127.0.0.1:{receiver.port}")
        with ThreadPoolExecutor(16) as pool:
            arrived = dict(zip(ways, pool.map(arrives, ways.values()), strict=True))
    plain = {case for case, there in arrived.items() if there}
    assert plain == {case for case in ways if case[0].lower() == "http" or (case[0] == "none" and (case[2] or case[1]) == "true")}
    assert len(plain) == 32 + 4 + 2


def arrives(way: Delivery) -> bool:
    """Whether a request over it is a success."""
    with closing(way):
        try:
            way.send(BODY)
        except DeliveryError:
            return False
        return True


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> Path:
    (tmp_path / "ca.crt").write_text(authority().pem)
    (tmp_path / "other.crt").write_text(authority("another").pem)
    authority().issue("ip:127.0.0.1", "dns:localhost").write(tmp_path, "server")
    authority().issue("ip:127.0.0.9", "dns:elsewhere").write(tmp_path, "elsewhere")
    authority().issue("dns:client").write(tmp_path, "client")
    return tmp_path


def tls_receiver(protocol: str, files: Path, name: str = "server", *, asks: bool = False) -> HttpReceiver | GrpcReceiver:
    """A receiver with this certificate, that may ask for the client's."""
    if protocol == "http":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(files / f"{name}.crt", files / f"{name}.key")
        if asks:
            tls.verify_mode = ssl.CERT_REQUIRED
            tls.load_verify_locations(files / "ca.crt")
        return HttpReceiver(tls=tls)
    pair = (files / f"{name}.key").read_bytes(), (files / f"{name}.crt").read_bytes()
    roots = (files / "ca.crt").read_bytes()
    return GrpcReceiver(credentials=grpc.ssl_server_credentials([pair], roots, require_client_auth=asks))


@pytest.mark.parametrize("protocol", WAYS)
def test_tls(protocol: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the authority of `OTEL_EXPORTER_OTLP_CERTIFICATE` and, where the receiver asks for it, the client's own certificate."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(files / "ca.crt"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", "")  # as good as none
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(files / "other.crt"))  # for whatever else the program asks
    with tls_receiver(protocol, files) as receiver, closing(WAYS[protocol][1](receiver.endpoint)) as way:
        way.send(BODY)
    with tls_receiver(protocol, files, asks=True) as asking:
        with closing(WAYS[protocol][1](asking.endpoint)) as way:
            failure(way)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(files / "client.crt"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(files / "client.key"))
        with closing(WAYS[protocol][1](asking.endpoint)) as way:
            way.send(BODY)
    assert len(receiver.received) == len(asking.received) == 1


@pytest.mark.parametrize(("name", "trusted"), [("server", "other"), ("elsewhere", "ca")])
@pytest.mark.parametrize("protocol", WAYS)
def test_a_certificate_that_does_not_fit(
    protocol: str, name: str, trusted: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to a server that an unknown authority has signed, or that has another one's name."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", str(files / f"{trusted}.crt"))
    with tls_receiver(protocol, files, name) as receiver, closing(WAYS[protocol][1](receiver.endpoint)) as way:
        told = failure(way)
    assert "ertificate" in told or "UNAVAILABLE" in told
    assert receiver.received == []


# Beside the user's own OpenTelemetry


def test_no_span_is_made_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request is under way, instrumentation of HTTP and gRPC is told to keep out; before and after, it is not."""
    seen: list[object] = []

    class Interceptor(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        def intercept_unary_unary(self, follow: Callable[..., object], details: object, request: object) -> object:
            seen.append(context.get_value("suppress_instrumentation"))
            return follow(details, request)

    channel = grpc.insecure_channel

    known = requests.adapters.HTTPAdapter.send

    def send(self: requests.adapters.HTTPAdapter, *arguments: object, **options: object) -> requests.Response:
        seen.append(context.get_value("suppress_instrumentation"))
        return known(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    monkeypatch.setattr(grpc, "insecure_channel", lambda *given: grpc.intercept_channel(channel(*given), Interceptor()))
    for receiver_of, way_of in WAYS.values():
        with receiver_of() as receiver, closing(way_of(receiver.endpoint)) as way:
            way.send(BODY)
            seen.append(context.get_value("suppress_instrumentation"))
    assert seen == [True, None, True, None]


@pytest.mark.parametrize("protocol", WAYS)
def test_the_global_provider_hears_nothing_of_us(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the exporters are told to measure themselves, the user's own do so, in the global provider, and ours does not."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr("opentelemetry.exporter.otlp.common._exporter_metrics.get_meter_provider", lambda: provider)
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "true")
    receiver_of, way_of = WAYS[protocol]
    with receiver_of() as receiver:
        with closing(way_of(receiver.endpoint)) as way:
            way.send(BODY)
        assert reader.get_metrics_data() is None
        exporter = GrpcExporter if protocol == "grpc" else HttpExporter
        own = exporter(receiver.endpoint + (liars.PATH if protocol == "http" else ""), timeout=PATIENCE)
        assert own.export(MetricsData(resource_metrics=[])) is MetricExportResult.SUCCESS
        assert reader.get_metrics_data() is not None
        own.shutdown()
    provider.shutdown()


@pytest.mark.parametrize("protocol", WAYS)
def test_the_users_own_exporters_are_heard(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of a failure of ours nothing is logged; of one of theirs, right after it and at the same time, all is."""
    endpoint = refused()
    own = GrpcExporter(endpoint, timeout=QUICK) if protocol == "grpc" else HttpExporter(endpoint, timeout=QUICK)
    with caplog.at_level(logging.INFO):
        with closing(WAYS[protocol][1](endpoint)) as way:
            failure(way)
            assert caplog.records == []
            thread = threading.Thread(target=failure, args=(way,))
            thread.start()
            assert own.export(MetricsData(resource_metrics=[])) is MetricExportResult.FAILURE
            thread.join()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "Failed to export" in said[0]
    own.shutdown()
