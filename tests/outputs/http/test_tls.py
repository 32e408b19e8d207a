"""TLS, client certificates, users, headers and the rate limit, as clients see them."""

from __future__ import annotations

import base64
import contextlib
import ssl
import tempfile
import threading
from pathlib import Path

import bcrypt
import pytest

from tests.outputs.http.support import (
    ALICE,
    BIG_ROWS,
    MUTUAL,
    RIGHT,
    TLS,
    Site,
    Training,
    basic,
    connect,
    fetch,
    hashed,
    serving,
    tls_client,
)
from tests.support.certificates import UNREADABLE_ADDRESS, authority, client_context
from tests.support.real_prometheus import running
from tests.support.tools import FOREVER, PATIENCE, eventually
from torch_grad_exporter.outputs.http.admission import BasicAuth


def speaking(minimum: ssl.TLSVersion, maximum: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Return a client of these versions only."""
    context = client_context()
    context.minimum_version, context.maximum_version = minimum, maximum or minimum
    return context


@pytest.mark.slow
def test_metrics_are_the_same_over_tls(training: Training, site: Site) -> None:
    """A client that verifies the certificate gets over TLS 1.3 megabytes that equal those of plain HTTP, and its headers."""
    training.rows = BIG_ROWS
    with serving(training) as other:
        expected = fetch(other)
    training.scrapes = 0
    with serving(training, config=site.config(TLS)) as server:
        answer = fetch(server)
        with tls_client(server) as client:
            assert client.version() == "TLSv1.3"
        assert fetch(server, method="HEAD").body == b""
        assert [fetch(server, path).status for path in ("/", "/healthz", "/x")] == [200, 200, 404]
        assert fetch(server, method="POST").status == 405
    assert answer.body == expected.body
    assert {**answer.headers, "date": ""} == {**expected.headers, "date": ""}
    assert training.errors == []


@pytest.mark.filterwarnings("ignore:.*TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_versions_ciphers_and_curves(training: Training, site: Site) -> None:
    """The file's versions, ciphers and curve are those that a client may use; TLS 1.1 is always refused."""
    older, old, new = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
    ancient, named, other = speaking(older), speaking(old), speaking(old)
    ancient.set_ciphers("DEFAULT@SECLEVEL=0")
    other.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    right, wrong = client_context(), client_context()
    right.set_ecdh_curve("secp384r1")
    wrong.set_ecdh_curve("prime256v1")
    for options, served, refused in (
        ("", [speaking(old), speaking(new)], [ancient]),
        ("  max_version: TLS12\n", [speaking(old)], [speaking(new)]),
        ("  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384]\n", [named, speaking(new)], [other]),
        ("  curve_preferences: [CurveP384]\n", [right], [wrong]),
    ):
        with serving(training, config=site.config(TLS + options)) as server:
            assert [fetch(server, tls=context).status for context in served] == [200] * len(served)
            for context in refused:
                with pytest.raises(ssl.SSLError):
                    fetch(server, tls=context)
    assert training.errors == []


def test_certificates_may_stand_in_the_configuration(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate, key and CA in the configuration serve, and leave nothing on the disk."""
    blocks = {"cert": "server.crt", "key": "server.key", "client_ca": "ca.crt"}
    text = "tls_server_config:\n  client_auth_type: RequireAndVerifyClientCert\n"
    for key, name in blocks.items():
        text += f"  {key}: |\n" + "".join(f"    {line}\n" for line in (site.directory / name).read_text().splitlines())
        (site.directory / name).unlink()
    temporary = site.directory / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with serving(training, config=site.config(text)) as server:
        assert list(temporary.iterdir()) == []
        assert fetch(server, tls=client_context(shows=site.client())).status == 200


# Client certificates


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_only_certificates_of_the_ca_are_let_in(training: Training, site: Site, version: ssl.TLSVersion) -> None:
    """With mutual TLS a client without a certificate and one of another CA are refused, and one of ours is served."""

    def client(shows: tuple[Path, Path] | None) -> ssl.SSLContext:
        context = client_context(shows=shows)
        context.minimum_version = context.maximum_version = version
        return context

    with serving(training, config=site.config(MUTUAL)) as server:
        for shows in (None, site.client(by=authority("theirs"))):
            with pytest.raises(OSError, match=r".+"):
                fetch(server, tls=client(shows))
        assert fetch(server, tls=client(site.client())).status == 200
    assert (training.scrapes, training.errors) == (1, [])


def test_a_certificate_needs_an_allowed_name(training: Training, site: Site) -> None:
    """With client_allowed_sans a certificate of the CA needs one of the names exactly, else it is a 403 without a scrape."""
    sans = "[prometheus.example, 10.1.2.3, '2001:db8::1', ops@example.org, 'spiffe://example.org/prometheus']"
    with serving(training, config=site.config(MUTUAL + f"  client_allowed_sans: {sans}\n" + ALICE)) as server:
        for names, status in (
            ([], 403),
            (["dns:a.prometheus.example"], 403),
            (["dns:prometheus.example"], 200),
            (["dns:other.example", "email:ops@example.org"], 200),
            (["ip:2001:db8:0:0:0:0:0:1"], 200),
            (["uri:spiffe://example.org/prometheus"], 200),
        ):
            shown = client_context(shows=site.client(*names))
            assert fetch(server, tls=shown, Authorization=RIGHT).status == status, names
            assert (training.scrapes > 0) is (status == 200)
        unreadable = authority().issue(extension=UNREADABLE_ADDRESS).write(site.directory, "client")
        assert fetch(server, tls=client_context(shows=unreadable), Authorization=RIGHT).status == 200
    assert training.errors == []


# Users, headers, rate limit


def test_nothing_is_said_without_a_password(training: Training, site: Site) -> None:
    """Every path and method is a 401 with a challenge and the same body; with the password each is what it is without users.

    The headers of the file are on every answer.
    """
    with serving(training, config=site.config(ALICE)) as server:
        for path in ("/metrics", "/healthz", "/", "/nothing"):
            for method in ("GET", "HEAD", "POST"):
                answer = fetch(server, path, method)
                assert answer.status == 401
                assert answer.headers["www-authenticate"].startswith("Basic ")
                assert "allow" not in answer.headers
                assert answer.body == (b"" if method == "HEAD" else b"Unauthorized\n")
        assert training.scrapes == 0
    headers = "http_server_config:\n  headers:\n    X-Frame-Options: deny\n"
    with serving(training, config=site.config(TLS + ALICE + headers)) as server:
        for answer in (fetch(server, Authorization=RIGHT), fetch(server), fetch(server, "/x", Authorization=RIGHT)):
            assert answer.headers["x-frame-options"] == "deny"
        paths = ("/metrics", "/healthz", "/", "/x")
        assert [fetch(server, path, Authorization=RIGHT).status for path in paths] == [200, 200, 200, 404]
        assert fetch(server, method="POST", Authorization=RIGHT).status == 405
        assert fetch(server).status == 401


CREDENTIALS = {
    basic("alice", "secret"): True,
    basic("alice", "wrong"): False,
    basic("nobody", "secret"): False,
    basic("long", b"x" * 100): True,  # bcrypt looks at 72 bytes
    basic("long", b"x" * 71): False,
    basic("nul", b"a\0b"): True,
    basic("nul", b"a"): False,
    basic("empty", ""): True,
    basic("jörg", "größe"): True,
    basic("colon", "a:b"): True,
    basic("alice", "secret").replace("Basic", "bASIC"): True,
    basic("alice", "secret").replace("Basic", "Bearer"): False,
    basic("alice", "secret")[:-1]: False,
    "Basic " + base64.b64encode(b"alice").decode(): False,
    "": False,
}
USERS = {
    "alice": hashed("secret", b"2y"), "long": hashed(b"x" * 72), "nul": hashed(b"a\0b"), "empty": hashed("", b"2a"),
    "jörg": hashed("größe"), "colon": hashed("a:b"),
}  # fmt: skip


def test_the_password_of_the_hash_passes() -> None:
    """The right password passes up to its 72nd byte, and no other password, user or header does."""
    assert {header: BasicAuth().judge(header, USERS).passes for header in CREDENTIALS} == CREDENTIALS


def test_a_password_is_checked_once(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with the same right password cost one check of bcrypt; an unknown user and a wrong password cost one each."""
    checks, check = list[bytes](), bcrypt.checkpw

    def counted(password: bytes, known: bytes) -> bool:
        checks.append(known)
        return check(password, known)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    with serving(training, config=site.config(ALICE), clock=training.clock) as server:
        assert [fetch(server, Authorization=RIGHT).status for _ in range(10)] == [200] * 10
        assert len(checks) == 1
        assert fetch(server, Authorization=basic("nobody", "secret")).status == 401
        assert len(checks) == 2
        assert checks[0][:7] == checks[1][:7]  # of the same cost
        training.now += 60  # guesses are limited
        assert fetch(server, Authorization=basic("alice", "wrong")).status == 401
        assert len(checks) == 3


def test_a_failure_of_a_check_admits_no_client(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """If checking a password raises, the answer is a 500 without a scrape, and it is counted."""

    def fail(*_: object) -> bool:
        raise RuntimeError

    monkeypatch.setattr(bcrypt, "checkpw", fail)
    with serving(training, config=site.config(ALICE)) as server:
        assert fetch(server, Authorization=RIGHT).status == 500
    assert (training.scrapes, [source for source, _ in training.errors]) == (0, ["request"])


def test_guesses_have_to_come_later(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wrong password that took 0.5 s to check, the next guess is a 429 that says when to retry."""
    check = bcrypt.checkpw

    def slow(password: bytes, known: bytes) -> bool:
        training.now += 0.5
        return check(password, known)

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    with serving(training, config=site.config(ALICE), clock=training.clock) as server:
        assert fetch(server, Authorization=basic("alice", "guess1")).status == 401
        answer = fetch(server, Authorization=basic("alice", "guess2"))
        assert fetch(server).status == 401
    assert (answer.status, answer.headers["retry-after"], training.scrapes) == (429, "5", 0)


def test_a_slow_check_delays_no_other_client(training: Training, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While 20 clients guess and the check of the first does not end, a client that is known already is served."""
    checking, checked = threading.Event(), threading.Event()
    check = bcrypt.checkpw

    def hanging(password: bytes, known: bytes) -> bool:
        if password != b"secret":
            checking.set()
            assert checked.wait(FOREVER)
        return check(password, known)

    monkeypatch.setattr(bcrypt, "checkpw", hanging)
    with serving(training, config=site.config(f"{ALICE}  bob: {hashed('x')}\n")) as server, contextlib.ExitStack() as stack:
        assert fetch(server, Authorization=RIGHT).status == 200
        for number in range(20):
            guessing = stack.enter_context(connect(server))
            guessing.sendall(f"GET / HTTP/1.1\r\nHost: t\r\nAuthorization: {basic('bob', str(number))}\r\n\r\n".encode())
        assert checking.wait(PATIENCE)
        assert fetch(server, Authorization=RIGHT).status == 200
        checked.set()


def test_a_rate_limit_comes_before_passwords(training: Training, site: Site) -> None:
    """A burst is answered, then a 429 says when to retry, whatever the password; an interval later there is room for one more."""
    limit = "rate_limit: {interval: 5s, burst: 2}\n"
    with serving(training, config=site.config(ALICE + limit), clock=training.clock) as server:
        assert [fetch(server).status for _ in range(2)] == [401, 401]
        answer = fetch(server, Authorization=RIGHT)
        assert (answer.status, answer.headers["retry-after"]) == (429, "5")
        training.now += 4
        assert fetch(server, Authorization=RIGHT).headers["retry-after"] == "1"
        training.now += 1
        assert [fetch(server, Authorization=RIGHT).status for _ in range(2)] == [200, 429]
        training.now += 1000
        assert [fetch(server, Authorization=RIGHT).status for _ in range(3)] == [200, 200, 429]


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
def test_a_real_prometheus_scrapes_over_mutual_tls(training: Training, site: Site) -> None:
    """With client certificate, name and password a real Prometheus gets every sample; without one of them its target is down."""
    site.client("dns:prometheus")
    with (
        serving(training, config=site.config(MUTUAL + "  client_allowed_sans: [prometheus]\n" + ALICE)) as server,
        running(site.directory, SCRAPING.format(port=server.port)) as real,
    ):
        assert eventually(lambda: real.value("count(up)") == 3)
        assert eventually(lambda: real.value('up{job="training"}') == 1)
        assert real.value('count(norm{job="training"})') == len(training.rows)
        assert real.value('up{job="unknown"}') == 0
        assert real.value('up{job="guesser"}') == 0
    assert training.errors == []
