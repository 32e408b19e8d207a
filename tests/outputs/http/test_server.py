"""What the server answers, its ports and addresses, and its end."""

from __future__ import annotations

import errno
import gc
import gzip
import json
import logging
import os
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.outputs.http.support import (
    GET_METRICS,
    ROWS,
    Training,
    can_bind,
    connect,
    fetch,
    read_all,
    readable,
    scrapers,
    server_threads,
    serving,
    statuses,
)
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.outputs.http.server import MetricsServer


def test_metrics_are_served_as_text(server: MetricsServer) -> None:
    """A plain GET gets text 0.0.4 with the headers that the docs name; gzip and OpenMetrics are there for who accepts them."""
    answer = fetch(server)
    (metric,) = text_string_to_metric_families(answer.body.decode())
    assert [sample.labels["layer"] for sample in metric.samples] == [row[0] for row in ROWS.rows]
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not {"server", "content-encoding"} & answer.headers.keys()
    packed = fetch(server, Accept_Encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["content-length"] == str(len(packed.body))
    assert gzip.decompress(packed.body) == answer.body
    openmetrics = fetch(server, Accept="application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3")
    assert openmetrics.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert openmetrics.body.endswith(b"\n# EOF\n")


def test_paths_and_methods(server: MetricsServer, training: Training) -> None:
    """Every path has its answer, HEAD is GET without the body, OPTIONS names the methods, any other is a 405; none scrapes."""
    health = fetch(server, "/healthz")
    assert (health.status, health.headers["content-type"]) == (200, "application/json")
    assert json.loads(health.body) == {"state": "training", "step": 7}
    page = fetch(server, "/?a=1&b=%20#c?d")
    assert (page.headers["content-type"], page.body) == ("text/html; charset=utf-8", b"/ a=1&b=%20")
    for path in ("/metrics/", "/../etc/passwd"):
        assert fetch(server, path).status == 404
    for method in ("POST", "get"):
        answer = fetch(server, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    for path in ("*", "/metrics"):  # as load balancers check a target's health
        answer = fetch(server, path, "OPTIONS")
        assert (answer.status, answer.headers["allow"]) == (200, "GET, HEAD, OPTIONS")
    assert training.scrapes == 0
    for path in ("/metrics", "/healthz", "/", "/nothing"):
        get, head = fetch(server, path), fetch(server, path, "HEAD")
        assert head.body == b""
        for name in ("content-length", "content-type"):
            assert head.headers[name] == get.headers[name]
        assert head.status == get.status


# Failures and scrapes that hang


def test_a_failing_scrape_is_a_500(server: MetricsServer, training: Training) -> None:
    """A scrape that raises costs its requests a 500 without the reason and one error; the next scrape works."""
    training.failure = ValueError("secret path")
    training.may_go_on.clear()
    with scrapers(server, 3) as waiting:
        assert training.entered.wait(PATIENCE)
        training.may_go_on.set()
        answers = [read_all(client) for client in waiting]
    assert all(answer.startswith(b"HTTP/1.1 500 ") and b"secret" not in answer for answer in answers)
    assert set(training.errors) == {("request", training.failure)}
    assert fetch(server, "/healthz").status == 200
    training.failure = None
    assert fetch(server).status == 200


def test_a_hanging_scrape_delays_no_other_answer(server: MetricsServer, training: Training) -> None:
    """With 30 clients waiting for a scrape that hangs, other paths answer; then all get the one body."""
    training.may_go_on.clear()
    with scrapers(server, 30) as clients:
        assert training.entered.wait(PATIENCE)
        for path, status in (("/healthz", 200), ("/", 200), ("/nothing", 404)):
            assert fetch(server, path).status == status
        assert readable(clients) == 0
        training.may_go_on.set()
        bodies = {read_all(client).split(b"\r\n\r\n", 1)[1] for client in clients}
    assert (len(bodies), training.scrapes, training.errors) == (1, 1, [])


@pytest.mark.slow
def test_a_scrape_without_an_end_is_a_503(training: Training) -> None:
    """Each client of a scrape that hangs gets a 503 at the timeout, and the next scrape works when it is over."""
    training.may_go_on.clear()
    with serving(training, timeout=0.3) as server:
        for _ in range(3):
            with scrapers(server, 30) as clients:
                assert set(statuses(clients)) == {503}
        training.may_go_on.set()
        assert eventually(lambda: fetch(server).status == 200)
    assert training.errors == []


def test_a_body_is_shared_for_one_second(training: Training) -> None:
    """Requests within a second of the end of a scrape share it, in every format and encoding; then there is a new one."""
    training.takes = 3.0
    with serving(training, clock=training.clock) as server:
        first = fetch(server).body
        training.now += 0.99
        assert fetch(server).body == first
        assert gzip.decompress(fetch(server, Accept_Encoding="gzip").body) == first
        assert fetch(server, Accept="application/openmetrics-text").body == first + b"# EOF\n"
        assert training.scrapes == 1
        training.now += 0.01
        assert fetch(server).body != first
        assert training.scrapes == 2


# Ports and addresses


def test_a_taken_port_is_stepped_over(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """If the first port is taken the next free one serves, one warning names both, and without any OSError is raised."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "torch_grad_exporter"), serving(training, ports=(first, 0)) as server:
            assert server.port != first
            assert fetch(server).status == 200
        (record,) = caplog.records
        assert f"port {first} is taken" in record.getMessage()
        assert f"port {server.port} instead" in record.getMessage()
        assert eventually(lambda: server_threads() == [])
        with pytest.raises(OSError, match=str(first)) as raised, serving(training, ports=(first,)):
            pass
    assert raised.value.errno == errno.EADDRINUSE
    assert server_threads() == []


def has_ipv6() -> bool:
    """Return whether a socket can listen on the IPv6 loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ADDRESSES = {"": ["127.0.0.1", "::1"], "::": ["127.0.0.1", "::1"], "localhost": ["localhost"], "0.0.0.0": ["127.0.0.1"]}  # noqa: S104


@pytest.mark.parametrize("addr", ADDRESSES)
def test_addresses(training: Training, addr: str) -> None:
    """By default the one port serves on IPv4 and IPv6, and an address or a name where it says."""
    if "::1" in ADDRESSES[addr] and not has_ipv6():
        pytest.skip("no IPv6 on this host")
    with serving(training, addr=addr) as server:
        assert [fetch(server, host=host).status for host in ADDRESSES[addr]] == [200] * len(ADDRESSES[addr])
        if "::1" not in ADDRESSES[addr]:
            with pytest.raises(OSError, match=r"refused|assign"):
                fetch(server, host="::1")


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this host")
def test_a_name_serves_on_all_its_addresses(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with an address of each family, as localhost often has, serves on both, with one port."""
    known = socket.getaddrinfo

    def resolve(host: str | None, *arguments: object, **options: object) -> object:
        names = ("::1", "127.0.0.1") if host == "both.test" else (host,)
        return [item for name in names for item in known(name, *arguments, **options)]  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with serving(training, addr="both.test") as server:
        assert [fetch(server, host=host).status for host in ("127.0.0.1", "::1")] == [200, 200]


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_host_without_ipv6_serves_on_ipv4(training: Training, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no socket of IPv6 can be made, or none has an address, the default address serves on IPv4."""
    bind = socket.socket.bind

    def refuse(sock: socket.socket, address: tuple[str, int]) -> None:
        if sock.family == socket.AF_INET6:
            raise OSError(number, os.strerror(number))
        bind(sock, address)

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with serving(training, addr="") as server:
        assert fetch(server, host="127.0.0.1").status == 200


# The end


def test_close_frees_the_port_and_ends_the_threads(training: Training) -> None:
    """After close, also twice and from several threads, no thread of ours lives and the port can be bound."""
    with serving(training) as server, connect(server), ThreadPoolExecutor(3) as pool:
        assert fetch(server).status == 200
        assert all(thread.daemon for thread in server_threads())
        list(pool.map(lambda _: server.close(), range(3)))
        assert eventually(lambda: server_threads() == [])
        with serving(training, ports=(server.port,)) as second:
            assert fetch(second).status == 200


def test_close_lets_a_running_answer_out(training: Training) -> None:
    """A scrape that is running when close is called still reaches its client whole."""
    training.may_go_on.clear()
    with serving(training, clock=training.clock) as server, connect(server) as client:
        client.sendall(GET_METRICS)
        assert training.entered.wait(PATIENCE)
        closing = threading.Thread(target=server.close, args=(PATIENCE,))
        closing.start()
        training.may_go_on.set()
        assert len(read_all(client).split(b"\r\n\r\n", 1)[1].splitlines()) == 2 + len(ROWS)
        closing.join(PATIENCE)


def test_nothing_keeps_a_closed_server(training: Training) -> None:
    """`close` returns at its timeout while a scrape hangs, the port is free, and the server is freed with what waited for it."""

    def closed() -> weakref.ref[MetricsServer]:
        with serving(training) as server, connect(server) as client:
            client.sendall(GET_METRICS)
            assert training.entered.wait(PATIENCE)
            server.close(timeout=0.2)
            assert can_bind(server.port)
            return weakref.ref(server)

    training.may_go_on.clear()
    left = closed()
    training.may_go_on.set()
    assert eventually(lambda: gc.collect() >= 0 and left() is None)
    assert training.errors == []
