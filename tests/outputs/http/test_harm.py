"""Clients that do harm: they cost themselves, and delay no other client."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.outputs.http.support import (
    ALICE,
    BIG_ROWS,
    GET_METRICS,
    MUTUAL,
    RIGHT,
    TLS,
    Site,
    Training,
    changing,
    client_hello,
    connect,
    exchange,
    fetch,
    hangs_up,
    read_all,
    reset,
    serving,
    tls_client,
)
from tests.support.certificates import client_context
from tests.support.tools import PATIENCE, eventually, lasting_threads
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.http.web_config import WebConfigFile

with_and_without_tls = pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])


def configured(site: Site, tls: bool) -> WebConfigFile | None:
    """Return the configuration of a server with or without TLS."""
    return site.config(TLS) if tls else None


CROWD = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (2048 if hard == resource.RLIM_INFINITY else min(2048, hard), hard))

clients = []
for _ in range(1000):
    clients.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60))
    clients[-1].sendall(b"GET /metrics HTTP/1.1\\r\\nHost: t\\r\\n\\r\\n")
answers = [client.makefile("rb").read()[9:12] for client in clients]
print(set(answers) - {b"200", b"503"}, len(answers))
"""


@pytest.mark.process
def test_each_of_1000_clients_gets_an_answer(training: Training) -> None:
    """All of 1,000 clients at once get the metrics or a 503, though the process may have few descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        with serving(training, addr="") as server:
            crowd = subprocess.run(
                [sys.executable, "-c", CROWD, str(server.port)], capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            assert (crowd.stdout, crowd.stderr) == ("set() 1000\n", "")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert training.errors == []


def drip(client: socket.socket) -> bool:
    """Send a byte, and return whether the connection has ended."""
    client.settimeout(0.05)
    try:
        client.sendall(b"G")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
@with_and_without_tls
def test_half_open_clients_are_closed_at_the_timeout(training: Training, site: Site, tls: bool) -> None:
    """A client that says nothing, stops in its handshake or head, or drips a byte now and then is closed without an error."""
    with serving(training, timeout=0.3, config=configured(site, tls)) as server:
        hello = client_hello() if tls else GET_METRICS[:-1]
        for sent in (b"", hello[: len(hello) // 2], hello):
            with connect(server) as client:
                client.sendall(sent)
                read_all(client)
        with connect(server) as client:
            assert eventually(lambda: drip(client))
    assert training.errors == []


@pytest.mark.slow
@with_and_without_tls
def test_clients_that_do_not_read_delay_no_other(training: Training, site: Site, tls: bool) -> None:
    """8 clients that ask for megabytes and read nothing or reset leave the next scrape whole."""
    training.rows = BIG_ROWS
    with serving(training, config=configured(site, tls)) as server, contextlib.ExitStack() as stack:
        for number in range(8):
            client = stack.enter_context(asking(server, tls))
            if number % 2:
                assert client.recv(1000)
                reset(client)
        whole = fetch(server)
        assert (whole.status, str(len(whole.body))) == (200, whole.headers["content-length"])
        assert len(whole.body) > 8_000_000
    assert training.errors == []


@pytest.mark.slow
def test_clients_that_do_not_read_are_dropped(training: Training) -> None:
    """A client that asks for megabytes and reads nothing is dropped at the timeout."""
    training.rows = BIG_ROWS
    with serving(training, timeout=1.0) as server:

        def is_dropped() -> bool:
            """Return whether a client is dropped that was served in time, as it may not be on a busy machine."""
            with asking(server, tls=False) as client:
                served = client.recv(12) == b"HTTP/1.1 200"
                return eventually(lambda: hangs_up(client)) and served

        assert eventually(is_dropped)
    assert training.errors == []


def asking(server: MetricsServer, tls: bool) -> socket.socket:
    """Connect a client with a small window that has asked for the metrics."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    client.connect(("127.0.0.1", server.port))
    if tls:
        client = client_context().wrap_socket(client, server_hostname="127.0.0.1")
    client.sendall(GET_METRICS)
    return client


def test_junk_over_tls_costs_one_connection(training: Training, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Plain HTTP, junk in the handshake and after it, resets and half-closed ends get no metrics and no line in the log."""
    hello = client_hello()
    with serving(training, config=site.config(TLS)) as server:
        for sent in (
            GET_METRICS,
            b"\x16" + b"\xff" * 4000,
            hello[:-1] + b"x" * 500,
            hello + b"\x17\x03\x03\x00\x05junkk",
            hello + hello,
        ):
            assert b"200 OK" not in exchange(server, sent)
        for stop_at in (0, 3, len(hello)):
            client = connect(server)
            client.sendall(hello[:stop_at])
            reset(client)
        with tls_client(server) as client:
            client.sendall(b"GET /")
            socket.socket.sendall(client, b"not a record at all")
            with contextlib.suppress(OSError):
                client.recv(100)
        assert training.scrapes == 0
        assert fetch(server).status == 200
    assert training.errors == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_nothing_is_left_of_a_closed_server(training: Training, site: Site) -> None:
    """After a server that met all kinds of clients is closed, the process has its former descriptors and threads."""
    process = psutil.Process()
    with serving(training, config=site.config(MUTUAL)):
        pass
    before, threads = process.num_fds(), lasting_threads()
    with serving(training, config=site.config(MUTUAL + ALICE)) as server:
        shown = client_context(shows=site.client())
        for _ in range(10):
            assert fetch(server, tls=shown, Authorization=RIGHT).status == 200
            with contextlib.suppress(OSError):
                fetch(server)
            with connect(server) as client:
                client.sendall(client_hello())
            exchange(server, GET_METRICS)
            reset(connect(server))
        assert eventually(lambda: process.num_fds() <= before + 12)
    # What an earlier test of this process left may be gone as well by now.
    assert eventually(lambda: process.num_fds() <= before and not Counter(lasting_threads()) - Counter(threads))


def test_a_slow_disk_holds_up_no_other_client(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While reading the changed files of the web configuration hangs, other clients are served."""
    headers = "http_server_config:\n  headers: {X-Frame-Options: %s}\n"
    read_bytes = Path.read_bytes

    def slow(path: Path) -> bytes:
        if path == site.path:
            training.entered.set()
            assert training.may_go_on.wait(PATIENCE)
        return read_bytes(path)

    with changing(training, site, headers % "deny") as server:
        training.may_go_on.clear()
        monkeypatch.setattr(Path, "read_bytes", slow)
        site.path.write_text(headers % "sameorigin")
        training.now += 1
        with connect(server):
            assert training.entered.wait(PATIENCE)
            assert fetch(server, "/healthz").headers["x-frame-options"] == "deny"
            training.may_go_on.set()
        assert eventually(lambda: fetch(server, "/healthz").headers["x-frame-options"] == "sameorigin")
    assert training.errors == []
