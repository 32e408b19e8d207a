"""A started server, the files of its web configuration, and clients that talk to it over sockets."""

from __future__ import annotations

import base64
import contextlib
import http.client
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import bcrypt
import numpy as np

from tests.support.certificates import Authority, Issued, authority, client_context
from tests.support.tools import PATIENCE
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.http.messages import Request, Response
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.prometheus.text import Renderer

NORM = Spec("norm", Kind.GAUGE, "A norm.", ("layer",))
ROWS = LabelRows(tuple((f"layers.{i}",) for i in range(100)))
BIG_ROWS = LabelRows(tuple((f"layers.{i}" * 20,) for i in range(60_000)))
GET_METRICS = b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n"

TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n"


@dataclass
class Training:
    """The content of a server, and its log of errors: counts its scrapes, can fail and hang, and keeps what was reported."""

    rows: LabelRows = ROWS
    failure: BaseException | None = None
    scrapes: int = 0
    ended: bool = False
    scraped_by: list[tuple[str, bool]] = field(default_factory=list)
    takes: float = 0.0
    now: float = 0.0
    errors: list[tuple[str, BaseException]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_go_on.set()

    def clock(self) -> float:
        return self.now

    def scrape(self) -> Iterable[Family]:
        self.scrapes += 1
        self.entered.set()
        assert self.may_go_on.wait(PATIENCE)
        self.now += self.takes
        if self.failure is not None:
            raise self.failure
        yield Family(NORM, np.full(len(self.rows), float(self.scrapes)), self.rows)

    def scraped(self, by: str, *, saw_end: bool) -> None:
        self.scraped_by.append((by, saw_end))

    def health(self) -> Mapping[str, object]:
        return {"state": "training", "step": 7}

    def targets(self) -> bytes:
        return b"[]"

    def page(self, request: Request) -> Response | None:
        """Return the path and the query for one path."""
        asked = f"{request.path} {request.query}"
        return Response(HTTPStatus.OK, "text/html; charset=utf-8", asked.encode()) if request.path == "/" else None

    def count(self, source: str, error: BaseException) -> None:
        self.errors.append((source, error))

    report = count


@contextlib.contextmanager
def serving(
    training: Training,
    *,
    addr: str = "127.0.0.1",
    ports: Iterable[int] = (0,),
    timeout: float = PATIENCE,
    clock: Callable[[], float] | None = None,
    config: WebConfigFile | None = None,
) -> Iterator[MetricsServer]:
    """Run a server of this training, on loopback and without timeouts unless given."""
    server = MetricsServer(
        training,
        Renderer({"run": "r"}),
        training,  # type: ignore[arg-type]
        addr=addr,
        ports=ports,
        timeout=timeout,
        web_config=config,
        **({} if clock is None else {"clock": clock}),  # type: ignore[arg-type]
    )
    with contextlib.closing(server):
        yield server


@contextlib.contextmanager
def changing(training: Training, site: Site, text: str) -> Iterator[MetricsServer]:
    """Run a server that has looked at its files just now, by the clock of the training, and has finished doing so."""
    with serving(training, config=site.config(text), clock=training.clock) as server:
        with connect(server) as first:
            first.sendall(b"x\r\n\r\n")
            first.recv(1)
        yield server


class Site:
    """A directory with a web configuration and the files that it names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "web.yml"
        self.certificate(authority().issue("dns:localhost", "ip:127.0.0.1"))
        (directory / "ca.crt").write_text(authority().pem)

    def certificate(self, issued: Issued) -> None:
        """Give the server this certificate."""
        issued.write(self.directory, "server")

    def config(self, text: str) -> WebConfigFile:
        """Write and load a web configuration."""
        self.path.write_text(text)
        return WebConfigFile(str(self.path))

    def client(self, *names: str, by: Authority | None = None) -> tuple[Path, Path]:
        """Return the certificate and the key of a client with these names."""
        return (by or authority()).issue(*names).write(self.directory, "client")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def fetch(
    server: MetricsServer,
    path: str = "/metrics",
    method: str = "GET",
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """Send one request, over TLS if the server has it, and return its answer."""
    if server.scheme == "https":
        client = http.client.HTTPSConnection(host, server.port, timeout=PATIENCE, context=tls or client_context())
    else:
        client = http.client.HTTPConnection(host, server.port, timeout=PATIENCE)  # type: ignore[assignment]
    with contextlib.closing(client):
        client.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = client.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def connect(server: MetricsServer) -> socket.socket:
    """Connect and send nothing."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def tls_client(server: MetricsServer, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    """Return a client after its handshake."""
    return (context or client_context()).wrap_socket(connect(server), server_hostname="127.0.0.1")


def client_hello() -> bytes:
    """Return the first bytes of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


def read_all(client: socket.socket) -> bytes:
    """Read to the server's end; a reset counts as the end."""
    received = bytearray()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := client.recv(65536):
            received += data
    return bytes(received)


def exchange(server: MetricsServer, sent: bytes) -> bytes:
    """Send these bytes, end the sending side, and return everything that comes back."""
    with connect(server) as client:
        with contextlib.suppress(OSError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
        return read_all(client)


def hangs_up(client: socket.socket) -> bool:
    """Return whether the other end is closed, without reading what it has sent and below TLS."""
    try:
        socket.socket.sendall(client, b"x")
    except ConnectionError:
        return True
    return False


def reset(client: socket.socket) -> None:
    """End a connection with a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@contextlib.contextmanager
def scrapers(server: MetricsServer, number: int) -> Iterator[list[socket.socket]]:
    """Connect clients that have asked for the metrics."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(number)]
        for client in clients:
            client.sendall(GET_METRICS)
        yield clients


def statuses(clients: Iterable[socket.socket]) -> list[int]:
    """Return the status that each client gets."""
    return [int(read_all(client).split(b" ", 2)[1]) for client in clients]


def readable(clients: list[socket.socket]) -> int:
    """Return how many have an answer or are closed."""
    return len(select.select(clients, [], [], 0)[0])


def server_threads() -> list[threading.Thread]:
    """Return the server's own threads."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("torch-grad-exporter-http")]


def can_bind(port: int) -> bool:
    """Return whether the port is free."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def hashed(password: str | bytes, kind: bytes = b"2b") -> str:
    """Return a bcrypt hash at the lowest cost."""
    raw = password if isinstance(password, bytes) else password.encode()
    return bcrypt.hashpw(raw[:72], bcrypt.gensalt(4)).replace(b"2b", kind, 1).decode()


def basic(user: str, password: str | bytes) -> str:
    """Return an Authorization header."""
    raw = password if isinstance(password, bytes) else password.encode()
    return "Basic " + base64.b64encode(user.encode() + b":" + raw).decode()


ALICE = f"basic_auth_users:\n  alice: {hashed('secret')}\n"
RIGHT = basic("alice", "secret")
