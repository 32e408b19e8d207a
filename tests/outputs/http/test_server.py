"""The HTTP server: what it answers, and that no client holds up another one."""

from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import http.client
import json
import logging
import os
import random
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.tools import PATIENCE, REPOSITORY, eventually
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.http.connection import Connection
from torch_grad_exporter.outputs.http.listener import candidate_ports, open_listener
from torch_grad_exporter.outputs.http.loop import ConnectionLoop
from torch_grad_exporter.outputs.http.message import MAX_HEAD, Request, RequestError, Response, complete_head, parse, plain
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError, SharedScrape
from torch_grad_exporter.outputs.http.web_config import WebConfigFile, WebSettings
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

NORM = Spec("norm", Kind.GAUGE, "A norm.", ("layer",))
ROWS = LabelRows(tuple((f"layers.{i}",) for i in range(100)))
BIG_ROWS = LabelRows(tuple((f"layers.{i}" * 20,) for i in range(100_000)))
THREAD_PREFIX = "torch-grad-exporter-http-"
GET_METRICS = b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n"


@dataclass
class Training:
    """The other side of the server: counts its scrapes and keeps what went wrong."""

    rows: LabelRows = ROWS
    failure: BaseException | None = None
    scrapes: int = 0
    now: float = 0.0
    errors: list[tuple[str, BaseException]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_go_on.set()

    def scrape(self) -> Iterable[Family]:
        self.scrapes += 1
        self.entered.set()
        assert self.may_go_on.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        yield Family(NORM, np.full(len(self.rows), float(self.scrapes)), self.rows)

    def health(self) -> Mapping[str, object]:
        return {"state": "training", "step": 7}

    def on_error(self, source: str, error: BaseException) -> None:
        self.errors.append((source, error))


def front(request: Request) -> Response | None:
    """A page with one path, which shows what was asked for."""
    asked = f"{request.path} {request.query}"
    return Response(HTTPStatus.OK, "text/html; charset=utf-8", asked.encode()) if request.path == "/" else None


def serve(training: Training, *, addr: str = "127.0.0.1", ports: Iterable[int] = (0,), **options: object) -> MetricsServer:
    """A server of this training, on loopback unless said otherwise."""
    return MetricsServer(
        training.scrape,
        Renderer({"run": "r"}),
        addr=addr,
        ports=ports,
        on_error=training.on_error,
        health=training.health,
        **{"page": front, **options},  # type: ignore[arg-type]
    )


@pytest.fixture
def training() -> Iterator[Training]:
    """A training whose scrape can be told to fail or to hang."""
    made = Training()
    yield made
    made.may_go_on.set()


@pytest.fixture
def server(training: Training) -> Iterator[MetricsServer]:
    """A running server of the training, in whose time no client runs out of its own."""
    with contextlib.closing(serve(training, timeout=PATIENCE)) as made:
        yield made


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def request(server: MetricsServer, path: str = "/metrics", method: str = "GET", host: str = "127.0.0.1", **headers: str) -> Answer:
    """One request and its answer."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(http.client.HTTPConnection(host, server.port, timeout=PATIENCE)) as client:
        client.request(method, path, headers=fields)
        response = client.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def connect(server: MetricsServer) -> socket.socket:
    """A connection on which nothing has been sent."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def read_all(client: socket.socket) -> bytes:
    """Everything up to the server's end; a reset counts as the end."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := client.recv(65536):
            received += data
    return bytes(received)


def exchange(server: MetricsServer, sent: bytes) -> bytes:
    """What the server answers to these bytes before it closes."""
    with connect(server) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(sent)
        return read_all(client)


def hangs_up(client: socket.socket) -> bool:
    """Whether the other end is closed, found out without reading what it has sent."""
    try:
        client.sendall(b"x")
    except ConnectionError:
        return True
    return False


def later(server: MetricsServer, training: Training, seconds: float = 10.0, ask: Callable[..., Answer] = request) -> None:
    """Sets a server's fake clock forward, and has it looked at."""
    training.now += seconds
    assert ask(server, path="/healthz").status == 200


def server_threads() -> list[threading.Thread]:
    """The server's own threads."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


# What is answered


def test_metrics_are_served_as_text(server: MetricsServer) -> None:
    """A plain GET gets text 0.0.4 that prometheus_client parses, with all headers that the contract names."""
    answer = request(server)
    (metric,) = text_string_to_metric_families(answer.body.decode())
    assert [sample.labels["layer"] for sample in metric.samples] == [row[0] for row in ROWS.rows]
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "server" not in answer.headers
    assert "content-encoding" not in answer.headers


def test_openmetrics_is_served_to_who_asks_for_it(server: MetricsServer) -> None:
    """The Accept header of Prometheus 2 and 3 gets OpenMetrics with its content type."""
    answer = request(server, Accept="application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3")
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.body.endswith(b"\n# EOF\n")


def test_gzip_is_used_where_accepted(server: MetricsServer) -> None:
    """With gzip accepted the body is the same text compressed; at quality 0 it is not compressed."""
    packed = request(server, Accept_Encoding="gzip")
    plain_body = request(server, Accept_Encoding="gzip;q=0").body
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["content-length"] == str(len(packed.body))
    assert gzip.decompress(packed.body) == plain_body
    assert len(packed.body) < len(plain_body) / 3


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/", "/nothing"])
def test_head_is_get_without_the_body(server: MetricsServer, path: str) -> None:
    """HEAD has the status, the length and the type of GET and no body."""
    get, head = request(server, path), request(server, path, "HEAD")
    kept = ("content-length", "content-type")
    assert head.body == b""
    assert (head.status, [head.headers[name] for name in kept]) == (get.status, [get.headers[name] for name in kept])


def test_health_is_json(server: MetricsServer) -> None:
    """/healthz answers 200 with the given facts as JSON."""
    answer = request(server, "/healthz")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert json.loads(answer.body) == {"state": "training", "step": 7}


def test_the_page_is_asked_for_what_is_left(server: MetricsServer) -> None:
    """A path that the server itself does not know goes to the page, with the query and without the fragment."""
    answer = request(server, "/?a=1&b=%20#c?d")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body == b"/ a=1&b=%20"


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "/../etc/passwd", "/favicon.ico", "//metrics"])
def test_other_paths_are_not_found(server: MetricsServer, path: str) -> None:
    """Any path beyond the three is a 404."""
    assert request(server, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get"])
def test_other_methods_are_refused(server: MetricsServer, training: Training, method: str) -> None:
    """Any method but GET and HEAD is a 405 that names both, and runs no scrape."""
    answer = request(server, method=method)
    assert (answer.status, answer.headers["allow"], training.scrapes) == (405, "GET, HEAD", 0)


def test_a_request_with_a_large_body_gets_its_answer(server: MetricsServer) -> None:
    """A client that is still sending its body reads the 405 to the end: the connection is not reset under it."""
    with connect(server) as client:
        client.sendall(b"POST /metrics HTTP/1.1\r\nHost: t\r\nContent-Length: 262144\r\n\r\n")
        received = client.recv(65536)
        client.sendall(b"x" * 262144)
        client.shutdown(socket.SHUT_WR)
        while data := client.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics?collect[]=x HTTP/1.1\r\nHost: t\r\n\r\n", 200),
        (b"GET http://host:9100/metrics HTTP/1.1\r\nHost: t\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.0\n\n", 200),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: t\r\n folded\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: a\0b\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: a\rY: b\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * MAX_HEAD + b"\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: a\r\n" * 4000 + b"\r\n", 431),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_requests_beyond_the_rules_get_the_right_status(
    server: MetricsServer, training: Training, sent: bytes, status: int
) -> None:
    """Odd but valid requests are served; malformed and oversized ones get a 4xx or 505 and are no failure of ours."""
    assert exchange(server, sent).startswith(b"HTTP/1.1 %d " % status)
    assert training.errors == []


def test_no_bytes_break_the_parser() -> None:
    """Of 20,000 random and mutated heads each is parsed or refused; nothing else is raised."""
    source = random.Random(5)
    for _ in range(20_000):
        sent = bytearray(GET_METRICS if source.random() < 0.7 else source.randbytes(source.randint(0, 60)))
        for _ in range(source.randint(0, 4)):
            sent.insert(source.randint(0, len(sent)), source.choice(b"\r\n :/\x00\xff?%"))
        with contextlib.suppress(RequestError):
            head = complete_head(sent)
            assert head is None or parse(head).path


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A connection that has received nothing."""
    with socket.socket() as sock:
        yield Connection(sock, 0.0)


def test_a_head_may_come_in_pieces() -> None:
    """Of 5,000 random ones, come byte by byte, each ends where a search in the whole finds its end."""
    source = random.Random(7)
    with socket.socket() as sock:
        for _ in range(5_000):
            sent = bytes(source.choices(b"\r\na", (3, 3, 1), k=12))
            connection = Connection(sock, 0.0)
            found = next((head for byte in sent if (head := connection.receive(bytes([byte]))) is not None), None)
            end = re.search(rb"\r?\n\r?\n", sent)
            assert found == (sent[: end.start()] if end else None)


def test_no_byte_of_a_head_is_looked_at_twice(connection: Connection) -> None:
    """Of a head of 16,384 bytes that comes byte by byte all but the last two may turn into line ends, and none is found.

    So each step has looked at three bytes; and the line's limit is looked at once, with the byte that exceeds it.
    """
    connection.receive(b"GET / HTTP/1.1\r\nA: ")
    for size in range(len(connection.received), MAX_HEAD - 1):
        connection.received[:-2] = b"\n" * (size - 2)
        assert connection.receive(b"x") is None
        if size == 5000:
            connection.received[:] = b"x" * len(connection.received)
            assert connection.receive(b"") is None  # no 414 either: the line has ended within its limit
    with pytest.raises(RequestError):
        connection.receive(b"x")


# Failures


def test_a_failing_scrape_is_a_500_and_the_next_one_works(server: MetricsServer, training: Training) -> None:
    """A scrape that raises costs that request: 500 without the reason, one error of source "request", then 200 again."""
    training.failure = ValueError("secret path")
    answer = request(server)
    assert (answer.status, answer.headers["content-type"]) == (500, "text/plain; charset=utf-8")
    assert b"secret" not in answer.body
    assert training.errors == [("request", training.failure)]
    assert request(server, "/healthz").status == 200
    training.failure = None
    assert request(server).status == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_scrape_that_exits_passes_and_the_client_is_let_go(server: MetricsServer, training: Training) -> None:
    """SystemExit is not swallowed as an error; the client's connection ends and the server goes on."""
    training.failure = SystemExit()
    assert exchange(server, GET_METRICS) == b""
    assert training.errors == []
    training.failure = None
    assert request(server).status == 200


def test_health_answers_while_a_scrape_hangs(training: Training) -> None:
    """While one scrape hangs, /healthz is a 200, and its own and a second scraper get a 503 at the timeout; then all is well."""
    training.may_go_on.clear()
    with contextlib.closing(serve(training, clock=lambda: training.now)) as server, scrapers(server, 2) as hanging:
        assert training.entered.wait(PATIENCE)
        later(server, training, 9.9)
        assert readable(hanging) == 0
        assert eventually(lambda: later(server, training) or readable(hanging) == 2)
        assert statuses(hanging) == [503, 503]
        training.may_go_on.set()
        assert eventually(lambda: request(server).status == 200)
    assert training.errors == []


@contextlib.contextmanager
def scrapers(server: MetricsServer, number: int) -> Iterator[list[socket.socket]]:
    """Clients that have asked for the metrics and not been answered yet."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(number)]
        for client in clients:
            client.sendall(GET_METRICS)
        yield clients


def statuses(clients: Iterable[socket.socket]) -> list[int]:
    """What each is answered with."""
    return [int(read_all(client).split(b" ", 2)[1]) for client in clients]


def readable(clients: list[socket.socket]) -> int:
    """How many have an answer."""
    return len(select.select(clients, [], [], 0)[0])


@pytest.mark.parametrize("number", [4, 12, 64])
def test_a_client_that_waits_for_a_scrape_delays_no_other(server: MetricsServer, training: Training, number: int) -> None:
    """With as many as that waiting for a scrape that hangs, quick answers come before it ends; then all get the one body."""
    training.may_go_on.clear()
    with scrapers(server, number) as clients:
        assert training.entered.wait(PATIENCE)
        for path, status in (("/healthz", 200), ("/", 200), ("/nothing", 404)):
            assert request(server, path).status == status
        assert readable(clients) == 0
        training.may_go_on.set()
        bodies = {read_all(client).split(b"\r\n\r\n", 1)[1] for client in clients}
    assert (len(bodies), training.scrapes, training.errors) == (1, 1, [])


def test_a_web_configuration_is_looked_at_while_a_scrape_hangs(training: Training, tmp_path: Path) -> None:
    """With 12 waiting for a scrape that hangs, the next client is meanwhile served with what the file says now."""
    path = tmp_path / "web.yml"
    header = "http_server_config:\n  headers: {X-Frame-Options: %s}\n"
    path.write_text(header % "deny")
    config = WebConfigFile(str(path))
    training.may_go_on.clear()
    with (
        contextlib.closing(serve(training, clock=lambda: training.now, web_config=config)) as server,
        scrapers(server, 12) as waiting,
    ):
        assert training.entered.wait(PATIENCE)
        path.write_text(header % "sameorigin")
        training.now = 1.0
        assert request(server, "/healthz").headers["x-frame-options"] == "sameorigin"
        assert readable(waiting) == 0
        training.may_go_on.set()


def test_a_scrape_that_hangs_for_ever_is_waited_for_until_the_timeout(training: Training) -> None:
    """Of 3 x 30 clients, more than may wait at a time, each gets the 503 of its timeout, and the server goes on when it is over."""
    training.may_go_on.clear()
    with contextlib.closing(serve(training, timeout=0.3)) as server:
        for _ in range(3):
            with scrapers(server, 30) as clients:
                assert all(b"no answer in time" in read_all(client) for client in clients)
        training.may_go_on.set()
        assert eventually(lambda: request(server).status == 200)
    assert (training.scrapes, training.errors) == (1, [])


def test_requests_beyond_the_cap_get_a_503(server: MetricsServer, training: Training) -> None:
    """While a scrape takes its time 64 requests wait for it, the rest of 100 is refused at once, and all get an answer."""
    training.may_go_on.clear()
    with scrapers(server, 100) as clients:
        assert eventually(lambda: readable(clients) == 36)
        training.may_go_on.set()
        found = statuses(clients)
    assert (found.count(200), found.count(503), training.scrapes) == (64, 36, 1)


def test_waiting_has_a_time_of_its_own(training: Training) -> None:
    """By a fake clock: a client that asks after 9 of its 10 seconds still waits at 12, and gets its body."""
    training.may_go_on.clear()
    with contextlib.closing(serve(training, clock=lambda: training.now)) as server, connect(server) as late:
        assert request(server, "/healthz").status == 200
        training.now = 9.0
        late.sendall(GET_METRICS)
        assert training.entered.wait(PATIENCE)
        training.now = 12.0
        assert request(server, "/healthz").status == 200
        training.may_go_on.set()
        assert statuses([late]) == [200]


@dataclass
class StuckDisk:
    """A web configuration of which reading the files hangs, and which is due once."""

    training: Training
    looks: int = 0
    current: WebSettings = field(default_factory=WebSettings)
    authenticates: bool = False

    def due(self, _now: float) -> bool:
        self.looks += 1
        return self.looks == 1

    def reload(self, _on_error: object) -> None:
        self.training.entered.set()
        assert self.training.may_go_on.wait(PATIENCE)


def test_a_disk_that_hangs_costs_one_client(training: Training) -> None:
    """The client for which the files are read is dropped at its timeout, also if it has asked; those after it are served."""
    training.may_go_on.clear()
    stuck = serve(training, clock=lambda: training.now, web_config=StuckDisk(training))
    with contextlib.closing(stuck) as server, connect(server) as unlucky:
        unlucky.sendall(GET_METRICS)
        assert training.entered.wait(PATIENCE)
        later(server, training, 9.9)
        assert readable([unlucky]) == 0
        later(server, training, 0.1)
        assert read_all(unlucky) == b""
        training.may_go_on.set()
    assert training.errors == []


# Clients that do harm


def test_300_half_open_connections_delay_no_other(server: MetricsServer) -> None:
    """With 300 silent connections the number of threads is what it was, the oldest are dropped, and a scrape works."""
    threads = len(server_threads())
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(300)]
        assert request(server).status == 200
        assert len(server_threads()) == threads <= 8
        assert all(client.recv(1) == b"" for client in silent[:150])
        silent[-1].sendall(GET_METRICS)
        assert read_all(silent[-1]).startswith(b"HTTP/1.1 200 ")


def test_a_silent_client_is_dropped_at_the_timeout(training: Training) -> None:
    """A client that sends nothing finds its connection closed, without an answer."""
    with contextlib.closing(serve(training, timeout=0.2)) as server:
        assert exchange(server, b"") == b""


def test_a_dripping_client_is_dropped_at_the_timeout(training: Training) -> None:
    """A byte now and then does not extend the time for a request: the deadline is for the whole head."""
    with contextlib.closing(serve(training, timeout=0.3)) as server, connect(server) as client:

        def dropped() -> bool:
            client.settimeout(0.05)
            try:
                client.sendall(b"G")
                return client.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        assert eventually(dropped)


def test_clients_that_do_not_read_delay_no_other(training: Training) -> None:
    """40 clients that ask for megabytes and read nothing leave the next scrape unhindered, and are dropped at the timeout."""
    training.rows = BIG_ROWS
    with contextlib.closing(serve(training, clock=lambda: training.now)) as server, contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(socket.socket()) for _ in range(40)]
        for client in deaf:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(PATIENCE)
            client.connect(("127.0.0.1", server.port))
            client.sendall(GET_METRICS)
        whole = request(server)
        assert (whole.status, str(len(whole.body))) == (200, whole.headers["content-length"])
        assert len(whole.body) > 10_000_000
        assert not any(hangs_up(client) for client in deaf)
        later(server, training)
        assert all(eventually(lambda client=client: hangs_up(client)) for client in deaf)
    assert training.errors == []


class NoDescriptorsLeft(socket.socket):
    """A listening socket that fails for 0.2 s as if the process had no file descriptor left."""

    recovers_at: float | None = None

    def accept(self) -> tuple[socket.socket, object]:
        if self.recovers_at is None:
            self.recovers_at = time.monotonic() + 0.2
        if time.monotonic() < self.recovers_at:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


@contextlib.contextmanager
def running(loop: ConnectionLoop) -> Iterator[None]:
    """Runs a connection loop in a thread."""
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.stop(1.0)
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_running_out_of_file_descriptors_is_survived(training: Training) -> None:
    """An accept that fails is counted once, not in a busy loop, and the waiting client is served afterwards."""
    listener = NoDescriptorsLeft(fileno=open_listener("127.0.0.1", (0,)).detach())
    address = listener.getsockname()

    def dispatch(connection: Connection, _request: Request) -> bool:
        loop.respond(connection, plain(http.HTTPStatus.OK))
        return True

    loop = ConnectionLoop(listener, dispatch, on_error=training.on_error)
    with running(loop), socket.create_connection(address, timeout=PATIENCE) as client:
        client.sendall(GET_METRICS)
        assert read_all(client).startswith(b"HTTP/1.1 200 ")
    assert [(source, type(error)) for source, error in training.errors] == [("request", OSError)]


class UnexpectedError(Exception):
    """An unexpected error."""


@dataclass
class Troubled:
    """A web configuration of plain HTTP for all that fails once, in the part that is named."""

    fails: str = ""
    authenticates: bool = False

    def due(self, _now: float) -> bool:
        self.trip("due")
        return False

    @property
    def current(self) -> WebSettings:
        self.trip("current")
        return WebSettings()

    def trip(self, part: str) -> None:
        if self.fails == part:
            self.fails = ""
            raise UnexpectedError


@pytest.mark.parametrize("where", ["accepting", "beginning", "reading", "responding", "giving up"])
def test_an_unexpected_error_costs_one_connection(training: Training, where: str) -> None:
    """Wherever one connection fails, it is closed and that is counted, and the next one is served."""
    listener = open_listener("127.0.0.1", (0,))
    config = Troubled({"accepting": "due", "beginning": "current"}.get(where, ""))
    pending = {"reading", "responding", "giving up"} & {where}

    def dispatch(connection: Connection, _request: Request | None) -> bool:
        trouble = pending.pop() if pending else ""
        if trouble == "reading":
            raise UnexpectedError
        if trouble:
            config.fails = "current"
        if trouble != "giving up":
            loop.respond(connection, plain(http.HTTPStatus.OK))
        return True

    loop = ConnectionLoop(listener, dispatch, on_error=training.on_error, timeout=0.3, web_config=config)  # type: ignore[arg-type]
    with running(loop):
        for answer in (b"", b"HTTP/1.1 200"):
            with socket.create_connection(listener.getsockname(), timeout=PATIENCE) as client:
                with contextlib.suppress(ConnectionError):
                    client.sendall(GET_METRICS)
                assert read_all(client)[:12] == answer
    assert [(source, type(error)) for source, error in training.errors] == [("request", UnexpectedError)]


def test_the_first_response_counts(training: Training) -> None:
    """A second one for the same request, be it another or none, has no effect."""
    listener = open_listener("127.0.0.1", (0,))

    def dispatch(connection: Connection, _request: Request | None) -> bool:
        for response in (plain(http.HTTPStatus.OK), plain(http.HTTPStatus.NOT_FOUND), None):
            loop.respond(connection, response)
        return True

    loop = ConnectionLoop(listener, dispatch, on_error=training.on_error)
    with running(loop), socket.create_connection(listener.getsockname(), timeout=PATIENCE) as client:
        client.sendall(GET_METRICS)
        assert read_all(client).count(b"HTTP/1.1 200 OK") == 1
    assert training.errors == []


def test_a_client_that_speaks_while_it_is_dropped_does_no_harm(training: Training) -> None:
    """A connection that makes room for a new one and has bytes waiting at that moment is forgotten, and the loop goes on."""
    listener = open_listener("127.0.0.1", (0,))
    address = listener.getsockname()

    def dispatch(connection: Connection, _request: Request) -> bool:
        training.entered.set()
        training.may_go_on.wait(PATIENCE)
        loop.respond(connection, plain(http.HTTPStatus.OK))
        return True

    training.may_go_on.clear()
    loop = ConnectionLoop(listener, dispatch, on_error=training.on_error, max_connections=2)
    with running(loop), contextlib.ExitStack() as stack:
        idle, busy = (stack.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(2))
        busy.sendall(GET_METRICS)
        assert training.entered.wait(PATIENCE)
        # The loop stands still. What it finds when it goes on: a new client first, then bytes of the one it drops for it.
        new = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
        idle.sendall(GET_METRICS)
        new.sendall(GET_METRICS)
        training.may_go_on.set()
        assert [read_all(client)[:12] for client in (idle, busy, new)] == [b"", b"HTTP/1.1 200", b"HTTP/1.1 200"]
    assert training.errors == []


# One rendering for all


def test_a_body_is_shared_for_one_second(training: Training) -> None:
    """By a fake clock: requests 0.99 s apart share a scrape, in every format and encoding; after 1 s there is a new one."""
    with contextlib.closing(serve(training, clock=lambda: training.now)) as server:
        first = request(server).body
        training.now = 0.99
        assert request(server).body == first
        assert gzip.decompress(request(server, Accept_Encoding="gzip").body) == first
        assert request(server, Accept="application/openmetrics-text").body == first + b"# EOF\n"
        assert training.scrapes == 1
        training.now = 1.0
        assert request(server).body != first
        assert training.scrapes == 2


def test_simultaneous_scrapes_run_once(server: MetricsServer, training: Training) -> None:
    """Of 16 scrapes at the same moment one runs, and all get its body."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: request(server), range(16)))
    assert len({answer.body for answer in answers}) == training.scrapes == 1


def asked(shared: SharedScrape, form: Format = Format.TEXT, *, compressed: bool = False) -> Future[bytes]:
    """What comes of asking, now or later."""
    future: Future[bytes] = Future()

    def take(outcome: bytes | BaseException) -> None:
        if isinstance(outcome, bytes):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    shared.ask(form, compressed=compressed, take=take)
    return future


def test_no_scrape_runs_beside_another() -> None:
    """While one scrape runs, a second one that asks waits for its result and does not start its own."""
    second_entered = threading.Event()
    calls = 0

    def scrape() -> Iterable[Family]:
        nonlocal calls
        calls += 1
        if calls > 1:
            second_entered.set()
        assert not second_entered.wait(0.3)
        return []

    shared = SharedScrape(scrape, Renderer({}))
    with ThreadPoolExecutor(4) as pool:
        bodies = [future.result(PATIENCE) for future in pool.map(lambda _: asked(shared, Format.OPENMETRICS), range(4))]
    assert (calls, bodies) == (1, [b"# EOF\n"] * 4)


def test_an_empty_scrape_is_shared_too() -> None:
    """A scrape without families is a body like any other and not repeated within the second."""
    calls: list[int] = []
    shared = SharedScrape(lambda: calls.append(1) or [], Renderer({}), clock=lambda: 0.0)  # type: ignore[func-returns-value]
    assert [asked(shared).result(0) for _ in range(3)] == [b""] * 3
    assert calls == [1]


@dataclass
class Crowd:
    """Scrapers of whom all but the first ask while the first one's scrape runs, and what that scrape then does."""

    others: int
    failure: BaseException | None = None
    scrapes: int = 0
    futures: list[Future[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = SharedScrape(self.scrape, Renderer({}))

    def scrape(self) -> Iterable[Family]:
        self.scrapes += 1
        for _ in range(self.others):
            self.ask()
        if self.failure is not None:
            raise self.failure
        return [Family(NORM, np.zeros(len(ROWS)), ROWS)]

    def ask(self) -> None:
        self.futures.append(asked(self.shared))


def test_who_asks_while_a_scrape_runs_gets_its_body() -> None:
    """Even from within the scrape itself: it does not wait, and is given the same bytes as who asked first."""
    crowd = Crowd(others=3)
    first = asked(crowd.shared).result(0)
    assert [future.result(0) for future in crowd.futures] == [first] * 3
    assert crowd.scrapes == 1


def test_who_asks_while_a_body_is_handed_out_gets_one_too() -> None:
    """A client that comes between the end of a scrape and the end of its serving is answered."""
    shared = SharedScrape(list, Renderer({}))
    second: list[Future[bytes]] = []
    shared.ask(Format.TEXT, compressed=False, take=lambda _: second.append(asked(shared)))
    assert second[0].result(0) == b""


@pytest.mark.parametrize("failure", [ValueError(), SystemExit()])
def test_a_scrape_that_fails_does_so_for_all_who_wait(failure: BaseException) -> None:
    """All are told what it raised, after one try; the next one who asks starts anew."""
    crowd = Crowd(others=3, failure=failure)
    with contextlib.suppress(SystemExit):
        crowd.ask()
    assert [future.exception(0) for future in crowd.futures] == [failure] * len(crowd.futures)
    assert (crowd.scrapes, len(crowd.futures)) == (1, 4 if isinstance(failure, Exception) else 3)
    crowd.failure = None
    crowd.others = 0
    assert asked(crowd.shared).result(0)


def test_a_format_that_fails_does_so_for_who_wants_it() -> None:
    """If one body cannot be made, the clients of the other one get it."""

    class TextOnly(Renderer):
        def render(self, families: Iterable[Family], form: Format) -> bytes:
            if form is Format.OPENMETRICS:
                raise UnexpectedError
            return super().render(families, form)

    wanting: list[Future[bytes]] = []

    def scrape() -> Iterable[Family]:
        wanting.extend([asked(shared, Format.OPENMETRICS), asked(shared, compressed=True)])
        return []

    shared = SharedScrape(scrape, TextOnly({}))
    assert asked(shared).result(0) == b""
    assert isinstance(wanting[0].exception(0), UnexpectedError)
    assert gzip.decompress(wanting[1].result(0)) == b""


def test_only_so_many_wait_for_a_scrape_and_only_so_long() -> None:
    """Of four that may, the fifth is refused while it runs; once their patience of 10 s is over four others may."""
    moments = (0.0, 9.9, 10.0, 19.9, 20.0)
    now = 0.0
    refused: list[float] = []

    def scrape() -> Iterable[Family]:
        nonlocal now
        for now in moments:
            for _ in range(5):
                try:
                    asked(shared)
                except ScrapeBusyError:
                    refused.append(now)
        return []

    shared = SharedScrape(scrape, Renderer({}), patience=10.0, max_waiting=4, clock=lambda: now)
    asked(shared)
    assert [refused.count(moment) for moment in moments] == [2, 5, 1, 5, 1]


# Ports and addresses


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((9100, 0, 1), tuple(range(9100, 9164))),
        ((9100, 3, 8), tuple(range(9103, 9103 + 512, 8))),
        ((0, 3, 8), (0,)),
        ((65530, 1, 2), (65531, 65533, 65535)),
        ((65535, 0, 1), (65535,)),
        ((65535, 1, 2), ()),
    ],
)
def test_candidate_ports(arguments: tuple[int, int, int], expected: tuple[int, ...]) -> None:
    """64 candidates in steps of the local world size, none above 65535, and any free port for 0."""
    assert candidate_ports(*arguments) == expected


def test_ranks_of_one_host_share_no_candidate() -> None:
    """8 ranks try 512 different ports."""
    assert len({port for rank in range(8) for port in candidate_ports(9100, rank, 8)}) == 512


def free_port() -> int:
    """A free port."""
    with contextlib.closing(open_listener("127.0.0.1", (0,))) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_a_taken_port_is_stepped_over_with_a_warning(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """If the first port is taken the next free one is used, known by `port`, and named in one warning."""
    other = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
            server = serve(training, ports=(first, other))
        with contextlib.closing(server):
            assert server.port == other
            assert request(server).status == 200
    assert [record.getMessage() for record in caplog.records] == [
        f"torch_grad_exporter: port {first} is taken, metrics are served on port {other} instead"
    ]


def test_no_free_port_raises_and_leaves_nothing(training: Training) -> None:
    """With every candidate taken OSError names them, and no thread was started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(first)) as raised:
            serve(training, ports=(first,))
    assert raised.value.errno == errno.EADDRINUSE
    assert server_threads() == []


def test_an_address_of_another_host_raises_at_once(training: Training) -> None:
    """An address that this host does not have is no taken port: it raises as what it is."""
    with pytest.raises(OSError, match=r"[Cc]annot assign|not available"):
        serve(training, addr="192.0.2.1", ports=range(20000, 20064))


@pytest.mark.parametrize("addr", ["", "0.0.0.0", "127.0.0.1", "localhost"])  # noqa: S104 the default of the product
def test_ipv4_addresses(training: Training, addr: str) -> None:
    """An empty address, all interfaces, one address and a host name serve on IPv4."""
    with contextlib.closing(serve(training, addr=addr)) as server:
        host = "localhost" if addr == "localhost" else "127.0.0.1"
        assert request(server, host=host).status == 200


def has_ipv6() -> bool:
    """Whether this machine has IPv6 on loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this host")
def test_ipv6_addresses(training: Training) -> None:
    """`::1` serves on IPv6 alone, `::` on both."""
    with contextlib.closing(serve(training, addr="::1")) as server:
        assert request(server, host="::1").status == 200
    with contextlib.closing(serve(training, addr="::")) as server:
        assert [request(server, host=host).status for host in ("::1", "127.0.0.1")] == [200, 200]


# The end


def test_close_frees_the_port_and_ends_the_threads(training: Training) -> None:
    """After close, also twice and from several threads, no thread of ours lives and the port can be bound at once."""
    server = serve(training)
    assert request(server).status == 200
    with connect(server), ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: server.close(), range(3)))
        server.close()
        assert eventually(lambda: server_threads() == [])
        with contextlib.closing(serve(training, ports=(server.port,))) as second:
            assert second.port == server.port
            assert request(second).status == 200


def test_all_threads_are_daemons(server: MetricsServer) -> None:
    """No thread of the server keeps the process from ending."""
    assert server.port
    assert server_threads()
    assert all(thread.daemon for thread in server_threads())


def test_close_lets_a_running_answer_out(training: Training) -> None:
    """A scrape that is running when close is called still reaches its client whole."""
    training.may_go_on.clear()
    server = serve(training, clock=lambda: training.now)
    with connect(server) as client:
        client.sendall(GET_METRICS)
        assert training.entered.wait(PATIENCE)
        closing = threading.Thread(target=server.close, args=(PATIENCE,))
        closing.start()
        training.may_go_on.set()
        assert len(read_all(client).split(b"\r\n\r\n", 1)[1].splitlines()) == 2 + len(ROWS)
        closing.join(PATIENCE)


def test_close_does_not_wait_for_a_hanging_scrape(training: Training) -> None:
    """With a scrape that hangs, close returns at its timeout and the port is free."""
    training.may_go_on.clear()
    server = serve(training)
    with connect(server) as client:
        client.sendall(GET_METRICS)
        assert training.entered.wait(PATIENCE)
        server.close(timeout=0.2)
        with contextlib.closing(open_listener("127.0.0.1", (server.port,))):
            assert read_all(client) == b""
    training.may_go_on.set()
    assert eventually(lambda: server_threads() == [])


def test_close_from_within_a_scrape(training: Training) -> None:
    """A scrape may close the server that it runs in, without a deadlock."""
    closed: list[bool] = []

    def scrape() -> Iterable[Family]:
        server.close(timeout=0.2)
        closed.append(True)
        return []

    training.scrape = scrape  # type: ignore[method-assign]
    server = serve(training)
    exchange(server, GET_METRICS)
    assert eventually(lambda: closed == [True] and server_threads() == [])


FORKING_PROGRAM = """
import http.client, os, sys
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.prometheus.text import Renderer

server = MetricsServer(list, Renderer({}), addr="127.0.0.1", ports=(0,),
                       on_error=lambda source, error: None, health=dict)
ready, said = os.pipe()
if os.fork() == 0:
    if sys.argv[1] == "handled":
        server.after_fork_in_child()
        server.after_fork_in_child()
        server.close()
    os.write(said, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
for _ in range(3):
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    client.request("GET", "/healthz")
    assert client.getresponse().read() == b"{}"
print(server.port, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize(("handling", "taken"), [("handled", False), ("ignored", True)])
def test_a_forked_child_does_not_keep_the_port(handling: str, taken: bool) -> None:
    """With the parent gone and its child alive the port is free if the child closed what it inherited, and only then.

    The parent serves on after the child has closed its copies.
    """
    command = [sys.executable, "-W", "ignore", "-c", FORKING_PROGRAM, handling]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        assert parent.wait(PATIENCE) == 0
        assert can_bind(port) is not taken
        parent.communicate()


def can_bind(port: int) -> bool:
    """Whether the port is free."""
    try:
        open_listener("127.0.0.1", (port,)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("sent", [b"HEAD /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", b"HEAD / HTTP/2.0\r\n\r\n", b"HEAD /\r\n\r\n"])
def test_a_refused_head_has_no_body(server: MetricsServer, sent: bytes) -> None:
    """A HEAD that cannot be understood is still a HEAD: its answer ends with its head."""
    assert exchange(server, sent).endswith(b"\r\n\r\n")


def test_idle_workers_hold_no_client(server: MetricsServer, training: Training) -> None:
    """Once everything is answered nothing of the clients is left but what is shared."""
    for _ in range(8):
        assert request(server).status == 200

    def held() -> list[Connection]:
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) is Connection]

    assert eventually(lambda: held() == [])
