"""The server with a web configuration: TLS, client certificates, users, and files that change while it runs."""

from __future__ import annotations

import contextlib
import functools
import http.client
import logging
import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.outputs.http.test_basic_auth import basic, hashed
from tests.outputs.http.test_server import (
    BIG_ROWS,
    GET_METRICS,
    Answer,
    Training,
    can_bind,
    connect,
    exchange,
    hangs_up,
    later,
    read_all,
    readable,
    running,
    serve,
    server_threads,
)
from tests.support.certificates import Authority, Issued, authority, client_context
from tests.support.real_prometheus import Prometheus
from tests.support.tools import FOREVER, PATIENCE, REPOSITORY, eventually, find, lasting_threads
from torch_grad_exporter.outputs.http import admission
from torch_grad_exporter.outputs.http.basic_auth import BasicAuth, matches
from torch_grad_exporter.outputs.http.connection import Connection
from torch_grad_exporter.outputs.http.endpoints import Endpoints
from torch_grad_exporter.outputs.http.listener import open_listener
from torch_grad_exporter.outputs.http.loop import ConnectionLoop
from torch_grad_exporter.outputs.http.message import Request, Response, plain
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.http.shared import SharedScrape
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.prometheus.text import Renderer

TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n"
ALICE = f"basic_auth_users:\n  alice: {hashed('secret')}\n"


class Site:
    """A directory with a web configuration and the files that it names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate(authority().issue("dns:localhost", "ip:127.0.0.1"))
        (directory / "ca.crt").write_text(authority().pem)

    def certificate(self, issued: Issued) -> None:
        """Gives the server this certificate."""
        issued.write(self.directory, "server")

    def write(self, text: str) -> None:
        """Makes this the web configuration."""
        (self.directory / "web.yml").write_text(text)

    def config(self, text: str) -> WebConfigFile:
        """The web configuration of this text."""
        self.write(text)
        return WebConfigFile(str(self.directory / "web.yml"))

    def client(self, *names: str, by: Authority | None = None) -> tuple[Path, Path]:
        """The certificate of a client with these names, and its key."""
        return (by or authority()).issue(*names).write(self.directory, "client")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A directory of the test's own."""
    return Site(tmp_path)


@pytest.fixture
def training() -> Iterator[Training]:
    """A training whose scrape can be told to fail or to hang."""
    made = Training()
    yield made
    made.may_go_on.set()


@contextlib.contextmanager
def serving(training: Training, site: Site, text: str, **options: object) -> Iterator[MetricsServer]:
    """A server with this web configuration, whose clock is the training's if one asks for `clock=...`."""
    with contextlib.closing(serve(training, web_config=site.config(text), **options)) as server:  # type: ignore[arg-type]
        yield server


def fetch(
    server: MetricsServer,
    context: ssl.SSLContext | None = None,
    path: str = "/metrics",
    method: str = "GET",
    authorization: str = "",
) -> Answer:
    """One request over TLS and its answer."""
    client = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=PATIENCE, context=context or client_context())
    with contextlib.closing(client):
        client.request(method, path, headers={"Authorization": authorization} if authorization else {})
        response = client.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def fetch_plain(server: MetricsServer, path: str = "/metrics", method: str = "GET", authorization: str = "") -> Answer:
    """One request over plain HTTP and its answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as client:
        client.request(method, path, headers={"Authorization": authorization} if authorization else {})
        response = client.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def tls_client(server: MetricsServer, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    """A client after its handshake."""
    return (context or client_context()).wrap_socket(connect(server), server_hostname="127.0.0.1", suppress_ragged_eofs=False)


def client_hello() -> bytes:
    """The first bytes of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


# TLS


def test_metrics_are_served_over_tls(training: Training, site: Site) -> None:
    """A client that verifies the certificate gets over TLS 1.3 what one gets over plain HTTP."""
    with contextlib.closing(serve(training)) as other:
        expected = fetch_plain(other)
    training.scrapes = 0
    with serving(training, site, TLS) as server:
        answer = fetch(server)
        with tls_client(server) as client:
            assert client.version() == "TLSv1.3"
    assert answer.body == expected.body
    assert {**answer.headers, "date": ""} == {**expected.headers, "date": ""}
    assert training.errors == []


def test_every_page_and_method_is_the_same_over_tls(training: Training, site: Site) -> None:
    """HEAD has no body, another path is a 404, another method a 405."""
    with serving(training, site, TLS) as server:
        head, get = fetch(server, method="HEAD"), fetch(server)
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", get.headers["content-length"])
        assert [fetch(server, path=path).status for path in ("/", "/healthz", "/x")] == [200, 200, 404]
        assert fetch(server, method="POST").status == 405


def test_tls_1_2_and_its_ciphers(training: Training, site: Site) -> None:
    """A client of TLS 1.2 is served with the cipher that the file names, and not with another one."""
    context = client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(training, site, TLS + "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384]\n") as server:
        with tls_client(server, context) as client:
            assert (client.version(), client.cipher()[0]) == ("TLSv1.2", "ECDHE-ECDSA-AES256-GCM-SHA384")  # type: ignore[index]
        context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        with pytest.raises(ssl.SSLError, match=r"(?i)handshake.failure"):
            tls_client(server, context)


@pytest.mark.filterwarnings("ignore:.*TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_tls_1_1_is_refused(training: Training, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A client that speaks TLS 1.1 at most gets the alert that says so, and nothing of ours counts as failed."""
    context = client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    with serving(training, site, TLS) as server, pytest.raises(ssl.SSLError, match=r"(?i)alert.protocol.version"):
        tls_client(server, context)
    assert training.errors == []
    assert caplog.records == []


def test_tls_1_3_can_be_demanded(training: Training, site: Site) -> None:
    """With min_version TLS13 a client of TLS 1.2 gets the same alert."""
    context = client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(training, site, TLS + "  min_version: TLS13\n") as server:
        with pytest.raises(ssl.SSLError, match=r"(?i)alert.protocol.version"):
            tls_client(server, context)
        assert fetch(server).status == 200


def test_the_curve_is_that_of_the_file(training: Training, site: Site) -> None:
    """A client that has only another curve is refused, one that has it is served."""
    with serving(training, site, TLS + "  curve_preferences: [CurveP384]\n") as server:
        for curve, served in (("secp384r1", True), ("prime256v1", False)):
            context = client_context()
            context.set_ecdh_curve(curve)
            with contextlib.nullcontext() if served else pytest.raises(ssl.SSLError, match=r"(?i)handshake.failure"):
                assert fetch(server, context).status == 200


def test_a_client_that_offers_http_2_gets_http_1_1(training: Training, site: Site) -> None:
    """With http2 on in the file the protocol agreed on is HTTP/1.1, also for a client that would rather not."""
    with serving(training, site, TLS + "http_server_config: {http2: true}\n") as server:
        for offered, agreed in ((["h2", "http/1.1"], "http/1.1"), (["h2"], None)):
            context = client_context()
            context.set_alpn_protocols(offered)
            with tls_client(server, context) as client:
                assert client.selected_alpn_protocol() == agreed


@pytest.mark.parametrize("memory", [True, False], ids=["in memory", "in a file"])
def test_certificate_and_key_may_stand_in_the_file(
    training: Training, site: Site, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """A server with its certificate, key and CA in the configuration serves, also where there are no files in memory.

    Nothing of it is left on the disk.
    """
    blocks = {"cert": "server.crt", "key": "server.key", "client_ca": "ca.crt"}
    text = "tls_server_config:\n  client_auth_type: RequireAndVerifyClientCert\n"
    for key, name in blocks.items():
        text += f"  {key}: |\n" + "".join(f"    {line}\n" for line in (site.directory / name).read_text().splitlines())
        (site.directory / name).unlink()
    temporary = site.directory / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    with serving(training, site, text) as server:
        assert list(temporary.iterdir()) == []
        assert fetch(server, client_context(shows=site.client())).status == 200


@pytest.mark.parametrize("sent", [GET_METRICS, b"GET / HTTP/1.0\r\n\r\n", b"x", b"\x80\x2e\x01\x00\x02"], ids=repr)
def test_plain_http_on_the_tls_port_is_told_so(training: Training, site: Site, sent: bytes) -> None:
    """Who does not speak TLS gets a plain 400 with a sentence, and no metrics."""
    with serving(training, site, TLS) as server:
        answer = exchange(server, sent)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b"\r\n\r\nthis port serves HTTPS; the request was plain HTTP\n")
    assert (training.scrapes, training.errors) == (0, [])


def test_bad_requests_over_tls_get_the_right_status(training: Training, site: Site) -> None:
    """A malformed request and one that is too long are answered over TLS as they are without."""
    with serving(training, site, TLS) as server:
        for sent, status in ((b"nonsense\r\n\r\n", b"400"), (b"GET /" + b"a" * 5000, b"414"), (b"PRI * HTTP/2.0\r\n\r\n", b"505")):
            with tls_client(server) as client:
                client.sendall(sent)
                assert client.recv(12) == b"HTTP/1.1 " + status


@pytest.mark.parametrize("size", [1, 16_300], ids=["a record for each byte", "one record for all"])
def test_a_request_in_any_records(training: Training, site: Site, size: int) -> None:
    """A head of 16,000 bytes arrives whole in a single TLS record, and a small one byte by byte, a record each."""
    head = GET_METRICS[:-2] + b"X: " + b"a" * (15_900 if size > 1 else 10) + b"\r\n\r\n"
    with serving(training, site, TLS) as server, tls_client(server) as client:
        for start in range(0, len(head), size):
            client.send(head[start : start + size])
        assert client.recv(12) == b"HTTP/1.1 200"


def test_a_handshake_byte_by_byte(training: Training, site: Site) -> None:
    """A client whose handshake comes in single bytes is served like any other."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secure = client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with serving(training, site, TLS) as server, connect(server) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def until_done(step: Callable[[], object]) -> object:
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    result = step()
                    drip(outgoing.read())
                    return result
                drip(outgoing.read())
                incoming.write(raw.recv(7))

        def drip(data: bytes) -> None:
            for byte in data:
                raw.sendall(bytes((byte,)))

        until_done(secure.do_handshake)
        until_done(lambda: secure.write(GET_METRICS))
        assert until_done(lambda: secure.read(12)) == b"HTTP/1.1 200"


def test_a_big_body_arrives_whole_and_is_ended_properly(training: Training, site: Site) -> None:
    """More than 10 MB are the same over TLS as over plain HTTP, for a client that reads slowly, and end with a close_notify."""
    training.rows = BIG_ROWS
    with serving(training, site, TLS) as server, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        raw.settimeout(PATIENCE)
        raw.connect(("127.0.0.1", server.port))
        with client_context().wrap_socket(raw, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as client:
            client.sendall(GET_METRICS)
            time.sleep(0.1)  # the sender's buffers fill meanwhile
            received = bytearray()
            while data := client.recv(1 << 20):  # raises if the end is not the protocol's
                received += data
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert len(body) > 10_000_000
    training.scrapes = 0
    with contextlib.closing(serve(training)) as other:
        assert fetch_plain(other).body == body


def test_an_empty_body_is_an_answer_like_any_other(training: Training, site: Site) -> None:
    """A scrape without a single family is a 200 without a body, and ends properly."""
    training.scrape = list  # type: ignore[method-assign,assignment]
    with serving(training, site, TLS) as server, tls_client(server) as client:
        client.sendall(GET_METRICS)
        received = bytearray()
        while data := client.recv(4096):
            received += data
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nContent-Length: 0\r\n" in received
    assert received.endswith(b"\r\n\r\n")
    assert training.errors == []


def test_no_tickets_and_no_renegotiation(training: Training, site: Site) -> None:
    """A client of TLS 1.3 gets no ticket, which no scrape would use, and no client may negotiate again."""
    with serving(training, site, TLS) as server, tls_client(server) as client:
        client.sendall(GET_METRICS)
        while client.recv(4096):
            pass
        assert client.session is None or not client.session.has_ticket
    secure = site.config(TLS).current.tls
    assert secure is not None
    assert secure.context.options & ssl.OP_NO_RENEGOTIATION


def test_a_handshake_that_does_not_fit_the_buffers(training: Training, site: Site) -> None:
    """With a certificate that is larger than what the system buffers, the handshake goes on when the client reads."""
    site.certificate(authority().issue("ip:127.0.0.1", *(f"dns:{i:060}.example" for i in range(800))))
    listener = open_listener("127.0.0.1", (0,))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)

    def dispatch(connection: Connection, request: Request | None) -> bool:
        if request is not None:
            loop.respond(connection, plain(http.HTTPStatus.OK))
        return request is not None

    loop = ConnectionLoop(listener, dispatch, on_error=training.on_error, web_config=site.config(TLS))
    with running(loop), socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.settimeout(PATIENCE)
        raw.connect(listener.getsockname())
        with client_context().wrap_socket(raw, server_hostname="127.0.0.1") as client:
            client.sendall(GET_METRICS)
            assert client.recv(12) == b"HTTP/1.1 200"
    assert training.errors == []


# Client certificates


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_only_certificates_of_the_ca_are_let_in(training: Training, site: Site, version: ssl.TLSVersion) -> None:
    """With mutual TLS a client without a certificate and one of another CA get an alert, one of ours is served."""
    with serving(training, site, MUTUAL) as server:
        for shows, alert in (
            (None, "(?i)certificate.required|handshake.failure"),
            (site.client(by=authority("theirs")), "(?i)unknown.ca"),
        ):
            context = client_context(shows=shows)
            context.minimum_version = context.maximum_version = version
            with pytest.raises(ssl.SSLError, match=alert):
                fetch(server, context)
        context = client_context(shows=site.client())
        context.minimum_version = context.maximum_version = version
        assert fetch(server, context).status == 200
    assert training.errors == []
    assert training.scrapes == 1


def test_a_certificate_may_be_optional(training: Training, site: Site) -> None:
    """With VerifyClientCertIfGiven a client without one is served, and a wrong one is refused."""
    text = MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    with serving(training, site, text) as server:
        assert fetch(server).status == 200
        assert fetch(server, client_context(shows=site.client())).status == 200
        with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca"):
            fetch(server, client_context(shows=site.client(by=authority("theirs"))))


def test_a_single_client_certificate_can_stand_in_for_a_ca(training: Training, site: Site) -> None:
    """A client's own certificate as client_ca_file lets in that client and no other of its CA, as with Go."""
    (site.directory / "ca.crt").write_text(site.client(by=authority("theirs"))[0].read_text())
    with serving(training, site, MUTUAL) as server:
        shown = (site.directory / "client.crt", site.directory / "client.key")
        assert fetch(server, client_context(shows=shown)).status == 200
        with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca"):
            fetch(server, client_context(shows=site.client(by=authority("theirs"))))


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (("dns:prometheus.example",), True),
        (("dns:other.example", "email:ops@example.org"), True),
        (("ip:10.1.2.3",), True),
        (("ip:2001:db8:0:0:0:0:0:1",), True),
        (("uri:spiffe://example.org/prometheus",), True),
        (("dns:other.example",), False),
        (("dns:a.prometheus.example",), False),
        (("dns:PROMETHEUS.example",), False),
        (("dns:10.1.2.3",), True),
        (("ip:10.1.2.4",), False),
        ((), False),
    ],
)
def test_the_names_of_a_certificate(training: Training, site: Site, names: tuple[str, ...], allowed: bool) -> None:
    """With client_allowed_sans a certificate of the CA needs one of the names exactly, else it is a 403 without a scrape."""
    sans = "[prometheus.example, 10.1.2.3, '2001:db8::1', ops@example.org, 'spiffe://example.org/prometheus']"
    with serving(training, site, MUTUAL + f"  client_allowed_sans: {sans}\n" + ALICE) as server:
        answer = fetch(server, client_context(shows=site.client(*names)), authorization=basic("alice", "secret"))
    assert (answer.status, training.scrapes) == ((200, 1) if allowed else (403, 0))
    assert training.errors == []


# Users, headers, rate limit


def test_a_failure_while_a_request_is_judged_admits_no_client(training: Training) -> None:
    """If judging raises, the answer is a 500 without a scrape, and it is counted."""

    def fail(_request: Request) -> None:
        raise RuntimeError

    shared = SharedScrape(training.scrape, Renderer({}))
    endpoints = Endpoints(shared=shared, health=dict, targets=bytes, page=lambda _: None, on_error=training.on_error, refusal=fail)
    answers: list[Response | None] = []
    endpoints.answer(Request("GET", "/metrics", {}), answers.append)
    assert [answer and answer.status for answer in answers] == [500]
    assert (training.scrapes, [source for source, _ in training.errors]) == (0, ["request"])


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/", "/nothing"])
def test_nothing_is_said_without_a_password(training: Training, site: Site, path: str, method: str) -> None:
    """Every path and method is a 401 with a challenge and the same body, before anything else is looked at."""
    with serving(training, site, ALICE) as server:
        answer = fetch_plain(server, path, method)
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert "allow" not in answer.headers
    assert answer.body == (b"" if method == "HEAD" else b"Unauthorized\n")
    assert training.scrapes == 0


def test_the_right_password_opens_every_page(training: Training, site: Site) -> None:
    """With the right password paths and methods are what they are without users, also over TLS."""
    right = basic("alice", "secret")
    with serving(training, site, TLS + ALICE) as server:
        assert [fetch(server, path=path, authorization=right).status for path in ("/metrics", "/healthz", "/", "/x")] == [
            200, 200, 200, 404,
        ]  # fmt: skip
        assert fetch(server, method="POST", authorization=right).status == 405
        assert fetch(server).status == 401


def test_guesses_are_told_to_come_later(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fake clock: after a wrong password, a 401 that took 0.5 s, the next one is a 429 that says when to retry."""

    def check(password: bytes, known: bytes) -> bool:
        training.now += 0.5
        return matches(password, known)

    monkeypatch.setattr(admission, "BasicAuth", functools.partial(BasicAuth, check))
    with serving(training, site, ALICE, clock=lambda: training.now) as server:
        assert fetch_plain(server, authorization=basic("alice", "guess1")).status == 401
        answer = fetch_plain(server, authorization=basic("alice", "guess2"))
        assert fetch_plain(server).status == 401
    assert answer.status == 429
    assert answer.headers["retry-after"] == "5"
    assert training.scrapes == 0


def test_a_slow_check_delays_no_other_client(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While 20 clients guess and the first one's check does not come to its end, who is known already is served."""
    checking, checked = threading.Event(), threading.Event()

    def check(password: bytes, known: bytes) -> bool:
        if password != b"secret":
            checking.set()
            assert checked.wait(FOREVER)
        return matches(password, known)

    monkeypatch.setattr(admission, "BasicAuth", functools.partial(BasicAuth, check))
    with serving(training, site, f"{ALICE}  bob: {hashed('x')}\n", timeout=FOREVER) as server:
        right = basic("alice", "secret")
        assert fetch_plain(server, authorization=right).status == 200
        with contextlib.ExitStack() as stack:
            for i in range(20):
                guessing = stack.enter_context(connect(server))
                guessing.sendall(f"GET / HTTP/1.1\r\nAuthorization: {basic('bob', str(i))}\r\n\r\n".encode())
            assert checking.wait(PATIENCE)
            assert fetch_plain(server, authorization=right).status == 200
            checked.set()


HEADERS = "http_server_config:\n  headers:\n    X-Frame-Options: deny\n    Strict-Transport-Security: max-age=9\n"


def test_headers_are_on_every_response(training: Training, site: Site) -> None:
    """The file's headers are on a 200, a 401, a 404, on what never becomes a request, and on the answer to plain HTTP."""
    right = basic("alice", "secret")
    with serving(training, site, TLS + ALICE + HEADERS) as server:
        answers = [fetch(server, authorization=right), fetch(server), fetch(server, path="/x", authorization=right)]
        with tls_client(server) as client:
            client.sendall(b"nonsense\r\n\r\n")
            malformed = client.recv(4096)
        answered = [malformed, exchange(server, GET_METRICS)]
    assert [answer.status for answer in answers] == [200, 401, 404]
    for answer in answers:
        assert (answer.headers["x-frame-options"], answer.headers["strict-transport-security"]) == ("deny", "max-age=9")
    for head in answered:
        assert b"\r\nX-Frame-Options: deny\r\nStrict-Transport-Security: max-age=9\r\n" in head


def test_a_rate_limit_comes_before_passwords(training: Training, site: Site) -> None:
    """By a fake clock: two at once, then a 429 that says when to retry, whatever the password; after 5 s there is room again."""
    limit = "rate_limit: {interval: 5s, burst: 2}\n"
    with serving(training, site, ALICE + limit, clock=lambda: training.now) as server:
        assert [fetch_plain(server).status for _ in range(2)] == [401, 401]
        answer = fetch_plain(server, authorization=basic("alice", "secret"))
        assert (answer.status, answer.headers["retry-after"]) == (429, "5")
        training.now += 5
        assert fetch_plain(server, authorization=basic("alice", "secret")).status == 200
        assert fetch_plain(server, authorization=basic("alice", "secret")).status == 429


# Clients that do harm


def test_100_silent_tls_clients_delay_no_other(training: Training, site: Site) -> None:
    """Beside 100 clients that say nothing, or half of their first message, a scrape is answered while they stay."""
    half = client_hello()[:100]
    with serving(training, site, TLS, timeout=FOREVER) as server, contextlib.ExitStack() as stack:
        assert fetch(server).status == 200
        threads = len(server_threads())
        silent = [stack.enter_context(connect(server)) for _ in range(100)]
        for client in silent[::2]:
            client.sendall(half)
        assert fetch(server).status == 200
        assert readable(silent) == 0
        assert len(server_threads()) == threads <= 8
    assert training.errors == []


def test_300_silent_tls_clients_make_room_for_new_ones(training: Training, site: Site) -> None:
    """Of 300 clients in their handshake the oldest are dropped, and a scrape works."""
    half = client_hello()[:100]
    with serving(training, site, TLS) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(300)]
        for client in silent:
            with contextlib.suppress(ConnectionError):
                client.sendall(half)
        assert fetch(server).status == 200
        assert all(read_all(client) == b"" for client in silent[:150])
        assert not hangs_up(silent[-1])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["silent", "half a hello", "no answer"])
def test_a_handshake_that_stops_is_dropped_at_the_timeout(training: Training, site: Site, share: float) -> None:
    """A client that stops in its handshake is gone after the timeout, whatever it has sent, and it is no failure of ours."""
    hello = client_hello()
    with serving(training, site, TLS, clock=lambda: training.now) as server, connect(server) as client:
        client.sendall(hello[: int(len(hello) * share)])
        assert fetch(server).status == 200  # by then the other one has come in
        later(server, training, 10.0, ask=fetch)
        answered = read_all(client)
    assert (answered[:1] == b"\x16") is (share == 1.0)
    assert training.errors == []


def test_handshake_and_request_share_one_timeout(training: Training, site: Site) -> None:
    """A client that drips through its handshake and then its request has the time of one request for both."""
    with serving(training, site, TLS, clock=lambda: training.now) as server:
        raw = connect(server)
        assert fetch(server).status == 200  # by then the other one has come in
        later(server, training, 6.0, ask=fetch)
        with client_context().wrap_socket(raw, server_hostname="127.0.0.1") as client:
            client.sendall(b"GET /")
            later(server, training, 3.9, ask=fetch)
            assert readable([client]) == 0
            later(server, training, 0.1, ask=fetch)
            assert ended(client)


def test_bytes_that_break_the_protocol_cost_one_connection(
    training: Training, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Junk in the handshake and after it, resets and half-closed ends leave the server as it was, and nothing in the log."""
    hello = client_hello()
    with serving(training, site, TLS) as server:
        for sent in (
            b"\x16",
            b"\x16" + b"\xff" * 4000,
            hello[:-1] + b"x" * 500,
            hello + b"\x17\x03\x03\x00\x05junkk",
            hello + hello,
        ):
            with connect(server) as client:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                read_all(client)
        for stop_at in (0, 3, len(hello)):
            client = connect(server)
            client.sendall(hello[:stop_at])
            reset(client)
        with tls_client(server) as client:
            client.sendall(b"GET /")
            socket.socket.sendall(client, b"not a record at all")
            with contextlib.suppress(OSError):
                client.recv(100)
        assert fetch(server).status == 200
    assert training.errors == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def reset(client: socket.socket) -> None:
    """Ends a connection with a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_resets_in_mid_body_do_no_harm(training: Training, site: Site) -> None:
    """20 clients that reset while they get megabytes over TLS leave the next scrape whole."""
    training.rows = BIG_ROWS
    with serving(training, site, TLS) as server:
        for _ in range(20):
            client = tls_client(server)
            client.sendall(GET_METRICS)
            assert client.recv(1000)
            reset(client)
        answer = fetch(server)
        assert (answer.status, str(len(answer.body))) == (200, answer.headers["content-length"])
    assert training.errors == []


def test_tls_clients_that_do_not_read_delay_no_other(training: Training, site: Site) -> None:
    """20 clients that ask for megabytes over TLS and read nothing leave the next scrape unhindered, and are dropped."""
    training.rows = BIG_ROWS
    with serving(training, site, TLS, clock=lambda: training.now) as server, contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(tls_client(server)) for _ in range(20)]
        for client in deaf:
            client.sendall(GET_METRICS)
        assert fetch(server).status == 200
        assert not any(dropped(client) for client in deaf)
        later(server, training, 10.0, ask=fetch)
        assert all(eventually(lambda client=client: dropped(client)) for client in deaf)
    assert training.errors == []


def dropped(client: ssl.SSLSocket) -> bool:
    """Whether the other end is closed, found out below TLS and without reading what it has sent."""
    try:
        socket.socket.send(client, b"x")
    except ConnectionError:
        return True
    return False


def test_handshakes_and_requests_make_room_in_the_order_of_arrival(training: Training, site: Site) -> None:
    """With a table of two, a silent client after its handshake, older than one before it, is the one to go for a third."""
    listener = open_listener("127.0.0.1", (0,))

    def dispatch(connection: Connection, request: Request | None) -> bool:
        if request is not None:
            loop.respond(connection, plain(http.HTTPStatus.OK))
        return request is not None

    loop = ConnectionLoop(listener, dispatch, on_error=training.on_error, max_connections=2, web_config=site.config(TLS))
    address = listener.getsockname()
    with running(loop), contextlib.ExitStack() as stack:
        older = stack.enter_context(knocking(address))
        older.do_handshake()
        newer, third = (stack.enter_context(knocking(address)) for _ in range(2))
        third.do_handshake()
        assert ended(older)
        newer.do_handshake()
        for client in (newer, third):
            client.sendall(GET_METRICS)
            assert client.recv(12) == b"HTTP/1.1 200"


def knocking(address: tuple[str, int]) -> ssl.SSLSocket:
    """A client that has connected and not said anything yet."""
    raw = socket.create_connection(address, timeout=PATIENCE)
    return client_context().wrap_socket(raw, server_hostname="127.0.0.1", do_handshake_on_connect=False)


def ended(client: ssl.SSLSocket) -> bool:
    """Whether the server ends the connection."""
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        return client.recv(1) == b""
    return True


def test_close_in_mid_handshake(training: Training, site: Site) -> None:
    """Closing the server ends handshakes at once, frees the port and ends the threads."""
    # The time for answers in progress does not pass: who waits for one of these never comes back.
    with serving(training, site, TLS, clock=lambda: training.now) as server, connect(server) as silent, connect(server) as halfway:
        halfway.sendall(client_hello()[:50])
        with tls_client(server):
            closing = threading.Thread(target=server.close, args=(FOREVER,), daemon=True)
            closing.start()
            closing.join(PATIENCE)
            assert not closing.is_alive()
            assert (read_all(silent), read_all(halfway)) == (b"", b"")
            assert can_bind(server.port)
            assert server_threads() == []


def test_descriptors_and_threads_are_back_to_the_start(training: Training, site: Site) -> None:
    """After a server that met all kinds of clients is closed, the process has the descriptors and threads that it had."""
    process = psutil.Process()
    with serving(training, site, MUTUAL):
        pass
    before, threads = process.num_fds(), lasting_threads()
    with serving(training, site, MUTUAL + ALICE) as server:
        for _ in range(20):
            assert fetch(server, client_context(shows=site.client()), authorization=basic("alice", "secret")).status == 200
            with contextlib.suppress(OSError):
                fetch(server)
            with connect(server) as client:
                client.sendall(client_hello())
            exchange(server, GET_METRICS)
            reset(connect(server))
        assert eventually(lambda: process.num_fds() <= before + 12)
    assert eventually(lambda: (process.num_fds(), lasting_threads()) == (before, threads))


FORKING_PROGRAM = """
import os, sys
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.prometheus.text import Renderer
from torch_grad_exporter.outputs.http.web_config import WebConfigFile

server = MetricsServer(list, Renderer({}), addr="127.0.0.1", ports=(0,), on_error=print, health=dict,
                       web_config=WebConfigFile(sys.argv[1]))
print(server.port, flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    server.after_fork_in_child()
    del server
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_says_nothing_on_the_parents_connections(site: Site) -> None:
    """A child that closes what it inherited sends no TLS byte: the parent's connection, open meanwhile, goes on."""
    site.config(TLS)
    command = [sys.executable, "-W", "ignore", "-c", FORKING_PROGRAM, str(site.directory / "web.yml")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        address = ("127.0.0.1", int(parent.stdout.readline()))
        raw = socket.create_connection(address, timeout=PATIENCE)
        with client_context().wrap_socket(raw, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as client:
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "0\n"
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            received = bytearray()
            while data := client.recv(4096):
                received += data
        parent.communicate("\n")
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(b"\r\n\r\n{}")


# Files that change


@contextlib.contextmanager
def changing(training: Training, site: Site, text: str) -> Iterator[MetricsServer]:
    """A server that looks at its files once in a second of the training's own clock, and has looked just now."""
    with serving(training, site, text, clock=lambda: training.now) as server:
        assert exchange(server, b"x\r\n\r\n").startswith(b"HTTP/1.1 400 ")  # plain HTTP, or HTTP at all
        yield server


def shown(server: MetricsServer) -> str:
    """The certificate that the server shows."""
    with tls_client(server) as client:
        return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True) or b"")


def test_a_replaced_certificate_is_shown_to_the_next_client(training: Training, site: Site) -> None:
    """Within a second of the last look the old one is shown; the first client after it gets the new one."""
    with changing(training, site, TLS) as server:
        old = shown(server)
        issued = authority().issue("ip:127.0.0.1")
        site.certificate(issued)
        training.now += 0.9
        assert shown(server) == old
        training.now += 0.2
        assert shown(server) == issued.cert != old
    assert training.errors == []


def test_a_certificate_that_is_moved_into_place_is_seen(training: Training, site: Site) -> None:
    """A file of the same size and time, moved over the old one, counts as a change, and so does a link that points elsewhere."""
    other = site.directory / "other"
    other.mkdir()
    issued = authority().issue("dns:localhost", "ip:127.0.0.1")
    with changing(training, site, TLS) as server:
        paths = issued.write(other, "server")
        for path in paths:
            kept = (site.directory / path.name).stat()
            os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
            path.replace(site.directory / path.name)
        training.now += 1
        assert shown(server) == issued.cert
        linked = authority().issue("ip:127.0.0.1")
        for path in linked.write(other, "server"):
            (site.directory / path.name).unlink()
            (site.directory / path.name).symlink_to(path)
        training.now += 1
        assert shown(server) == linked.cert


def test_a_changed_password_holds_from_the_next_client_on(training: Training, site: Site) -> None:
    """A changed password and a removed user are refused, though remembered, and new ones pass."""
    bob, carol = basic("bob", "sesame"), basic("carol", "new")
    users = f"basic_auth_users:\n  alice: {hashed('secret')}\n  bob: {hashed('sesame')}\n"
    with changing(training, site, users) as server:
        old, new = basic("alice", "secret"), basic("alice", "changed")
        assert [fetch_plain(server, authorization=a).status for a in (old, bob)] == [200, 200]
        site.write(f"basic_auth_users:\n  alice: {hashed('changed')}\n  carol: {hashed('new')}\n")
        training.now += 1
        assert [fetch_plain(server, authorization=a).status for a in (old, bob, new, carol)] == [401, 401, 200, 200]
    assert training.errors == []


def test_a_changed_ca_and_changed_names_hold(training: Training, site: Site) -> None:
    """After another CA is put in place its clients are let in and those of the old one are not; then names are demanded."""
    ours, theirs = (client_context(shows=site.client(by=by)) for by in (authority(), authority("theirs")))
    with changing(training, site, MUTUAL) as server:
        assert fetch(server, ours).status == 200
        (site.directory / "ca.crt").write_text(authority("theirs").pem)
        training.now += 1
        assert fetch(server, theirs).status == 200
        with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca"):
            fetch(server, ours)
        site.write(MUTUAL + "  client_allowed_sans: [a]\n")
        training.now += 1
        assert fetch(server, theirs).status == 403


def test_a_broken_change_keeps_the_last_good_and_is_told_once(training: Training, site: Site) -> None:
    """With a broken file the server goes on with what it had and reports each change once; a good one is taken again."""
    right = basic("alice", "secret")

    def seen() -> list[str]:
        training.now += 1
        assert fetch(server, authorization=right).status == 200
        return [f"{source}: {error}" for source, error in training.errors]

    with changing(training, site, TLS + ALICE) as server:
        site.write(TLS + ALICE + "oops: 1\n")
        (only,) = seen()
        assert only.startswith(f"web_config: {site.directory / 'web.yml'}, line ")
        assert "unknown key 'oops'" in only
        assert len(seen()) == 1
        (site.directory / "server.key").write_text("junk")
        assert len(seen()) == 2  # the configuration is still the broken one, but this is another change
        site.write(TLS + ALICE)
        assert "holds no private key" in seen()[2]
        assert len(seen()) == 3
        renewed = authority().issue("ip:127.0.0.1")
        site.certificate(renewed)
        assert len(seen()) == 3
        assert shown(server) == renewed.cert


def test_a_file_that_is_yet_to_come_is_waited_for(training: Training, site: Site) -> None:
    """A configuration that names a file which is not there is taken as soon as it is."""
    with changing(training, site, TLS) as server:
        site.write(TLS.replace("server.", "next."))
        training.now += 1
        old = shown(server)
        assert [source for source, _ in training.errors] == ["web_config"]
        issued = authority().issue("ip:127.0.0.1")
        issued.write(site.directory, "next")
        training.now += 1
        assert shown(server) == issued.cert != old
        (site.directory / "web.yml").unlink()
        training.now += 1
        assert shown(server) == issued.cert
        assert "cannot be read" in str(training.errors[1][1])


@pytest.mark.parametrize(
    ("weaker", "says"),
    [
        ("", "TLS is not turned on or off"),
        (ALICE, "TLS is not turned on or off"),
        (MUTUAL + "  client_allowed_sans: [a]\n", "basic_auth_users are not removed"),
        (MUTUAL + ALICE, "client_allowed_sans are not removed"),
        (TLS + ALICE, "required client certificates are, client_allowed_sans are not removed"),
        (MUTUAL.replace("RequireAnd", "").replace("ClientCert", "ClientCertIfGiven") + ALICE, "required client certificates are"),
    ],
    ids=["nothing left", "no TLS", "no users", "no names", "no client certificates", "client certificates if given"],
)
def test_no_change_takes_protection_away(training: Training, site: Site, weaker: str, says: str) -> None:
    """A file that is cut off, as while it is written, opens nothing: what was demanded is demanded on, and it is told."""
    with changing(training, site, MUTUAL + "  client_allowed_sans: [a]\n" + ALICE) as server:
        site.write(weaker)
        training.now += 1
        known = client_context(shows=site.client("dns:a"))
        assert fetch(server, known).status == 401
        assert fetch(server, known, authorization=basic("alice", "secret")).status == 200
        assert fetch(server, client_context(shows=site.client("dns:b"))).status == 403
        with pytest.raises(ssl.SSLError):
            fetch(server)
    ((source, error),) = training.errors
    assert source == "web_config"
    assert says in str(error)


def test_tls_is_not_turned_on_while_running(training: Training, site: Site) -> None:
    """A server of plain HTTP stays one, since its address is known as http; what else changed waits with it."""
    with changing(training, site, "") as server:
        site.write(TLS + ALICE)
        training.now += 1
        assert fetch_plain(server).status == 200
        site.write(ALICE)
        training.now += 1
        assert fetch_plain(server).status == 401
    assert len(training.errors) == 1


class SlowDisk(WebConfigFile):
    """A configuration whose files take their time to be looked at."""

    entered: threading.Event
    may_go_on: threading.Event

    def reload(self, on_error: Callable[[str, BaseException], None]) -> None:
        self.entered.set()
        assert self.may_go_on.wait(PATIENCE)
        super().reload(on_error)


def test_a_slow_disk_holds_up_no_other_client(training: Training, site: Site) -> None:
    """While the files are looked at, other clients are served with what was read before; the one that waits gets the new state."""
    site.write(TLS)
    config = SlowDisk(str(site.directory / "web.yml"))
    config.entered, config.may_go_on = threading.Event(), threading.Event()
    with contextlib.closing(serve(training, web_config=config, clock=lambda: training.now)) as server, connect(server) as raw:
        assert config.entered.wait(PATIENCE)
        old = shown(server)
        issued = authority().issue("ip:127.0.0.1")
        site.certificate(issued)
        assert fetch(server).status == 200
        config.may_go_on.set()
        with client_context().wrap_socket(raw, server_hostname="127.0.0.1") as client:
            assert ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True) or b"") == issued.cert != old


def test_two_threads_do_not_look_at_once(site: Site) -> None:
    """While one look is under way another one returns at once, and a failure of it is not told twice."""
    config = site.config(TLS)
    site.write("oops: 1\n")
    told: list[str] = []

    def on_error(source: str, _error: BaseException) -> None:
        told.append(source)
        config.reload(on_error)

    config.reload(on_error)
    assert told == ["web_config"]


def test_looks_are_a_second_apart(site: Site) -> None:
    """It is time for a look at once, then a second after the last one."""
    config = site.config("")
    assert [config.due(now) for now in (5.0, 5.0, 5.9, 6.0, 6.5, 7.5)] == [True, False, False, True, False, True]


# A real Prometheus

SCRAPING = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: training
    scheme: https
    tls_config: {{ca_file: ca.crt, cert_file: client.crt, key_file: client.key, server_name: localhost}}
    basic_auth: {{username: alice, password: secret}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: unknown
    scheme: https
    tls_config: {{ca_file: ca.crt, server_name: localhost}}
    basic_auth: {{username: alice, password: secret}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: guesser
    scheme: https
    tls_config: {{ca_file: ca.crt, cert_file: client.crt, key_file: client.key, server_name: localhost}}
    basic_auth: {{username: alice, password: guess}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.mark.server
def test_a_real_prometheus_scrapes_over_mutual_tls_with_a_password(training: Training, site: Site) -> None:
    """With client certificate, name and password a real Prometheus gets every sample; without one of them its target is down."""
    site.client("dns:prometheus")
    with serving(training, site, MUTUAL + "  client_allowed_sans: [prometheus]\n" + ALICE) as server:
        (site.directory / "prometheus.yml").write_text(SCRAPING.format(port=server.port))
        with running_prometheus(site.directory) as real:
            assert eventually(lambda: known(real, "count by (job) (up)") == 3)
            assert eventually(lambda: known(real, 'up{job="training"}') == 1)
            assert real.value('count(norm{job="training"})') == len(training.rows)
            assert real.value('up{job="unknown"}') == 0
            assert real.value('up{job="guesser"}') == 0
    assert training.errors == []


def known(real: Prometheus, expression: str) -> float | None:
    """The number of series of an expression, or the value of a single one; `None` as long as there is none."""
    with contextlib.suppress(OSError):
        found = real.query(expression)
        return len(found) if len(found) != 1 else float(found[0][1])
    return None


@contextlib.contextmanager
def running_prometheus(directory: Path) -> Iterator[Prometheus]:
    """Runs a Prometheus with the configuration in this directory."""
    with contextlib.closing(open_listener("127.0.0.1", (0,))) as listener:
        port = listener.getsockname()[1]
    options = [f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory}", "--log.level=error"]
    with subprocess.Popen([find("prometheus"), *options, f"--web.listen-address=127.0.0.1:{port}"]) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
