"""Basic authentication: who passes, what a check costs, and that guessing costs the training next to nothing."""

from __future__ import annotations

import base64
import contextlib
import http.client
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import bcrypt
import pytest

from tests.support.tools import PATIENCE, eventually, find
from torch_grad_exporter.outputs.http.admission import TokenBucket
from torch_grad_exporter.outputs.http.basic_auth import BasicAuth, Verdict, matches
from torch_grad_exporter.outputs.http.listener import open_listener
from torch_grad_exporter.outputs.http.web_config import RateLimit

PASSES = Verdict(passes=True)
REFUSED = Verdict(passes=False)


def hashed(password: str | bytes, kind: bytes = b"2b") -> str:
    """A bcrypt hash at the lowest cost."""
    raw = password if isinstance(password, bytes) else password.encode()
    return bcrypt.hashpw(raw[:72], bcrypt.gensalt(4)).replace(b"2b", kind, 1).decode()


def basic(user: str, password: str | bytes) -> str:
    """An Authorization header."""
    raw = password if isinstance(password, bytes) else password.encode()
    return "Basic " + base64.b64encode(user.encode() + b":" + raw).decode()


@dataclass
class Checks:
    """Stands for bcrypt: a hash is right for the password that it ends with; each check takes `seconds`."""

    now: float = 0.0
    seconds: float = 0.0
    made: list[tuple[bytes, bytes]] = field(default_factory=list)
    before: Callable[[], object] = lambda: None

    def check(self, password: bytes, against: bytes) -> bool:
        self.made.append((password, against))
        self.before()
        self.now += self.seconds
        return against.endswith(b"$" + password)

    def auth(self) -> BasicAuth:
        return BasicAuth(self.check, clock=lambda: self.now)


USERS = {"alice": "$2b$10$secret", "bob": "$2y$12$sesame"}


@pytest.mark.parametrize("kind", [b"2a", b"2b", b"2y"])
def test_the_password_of_the_hash_passes(kind: bytes) -> None:
    """With bcrypt itself the right password passes, a wrong one, another user's and an unknown user do not."""
    users = {"alice": hashed("secret", kind), "bob": hashed("sesame")}
    for user, password, expected in [
        ("alice", "secret", PASSES),
        ("alice", "Secret", REFUSED),
        ("alice", "", REFUSED),
        ("alice", "sesame", REFUSED),
        ("carol", "secret", REFUSED),
        ("", "secret", REFUSED),
    ]:
        assert BasicAuth().judge(basic(user, password), users) == expected


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic",
        "Basic ",
        "Basic !!!!",
        "Basic YWxpY2U",
        "Bearer " + basic("alice", "secret")[6:],
        "Basic YWxpY2U=",
        "Basic ä",
        "x",
    ],
)
def test_what_is_no_basic_authentication_costs_no_check(header: str) -> None:
    """A header of another kind, or one that does not decode to a user and a password, is refused without a check."""
    checks = Checks()
    assert checks.auth().judge(header, USERS) == REFUSED
    assert checks.made == []


def test_the_scheme_may_be_in_any_case_and_a_password_may_have_colons() -> None:
    """`basic` is `Basic`; the first colon ends the name."""
    header = "bAsIc " + base64.b64encode(b"alice:a:b:").decode()
    assert Checks().auth().judge(header, {"alice": "$2b$10$a:b:"}) == PASSES


def test_names_and_passwords_are_utf8() -> None:
    """A user and a password beyond ASCII pass by their UTF-8 bytes, as do bytes that are no UTF-8."""
    assert BasicAuth().judge(basic("jörg", "größe"), {"jörg": hashed("größe")}) == PASSES
    assert BasicAuth().judge(basic("jörg", b"\xff\xfe"), {"jörg": hashed(b"\xff\xfe")}) == PASSES
    assert BasicAuth().judge("Basic " + base64.b64encode(b"j\xf6rg:x").decode(), {"jörg": hashed("x")}) == REFUSED


def test_passwords_are_compared_up_to_72_bytes() -> None:
    """Bcrypt knows no more than 72 bytes of a password: two that differ later are the same one, as for Prometheus."""
    users = {"alice": hashed(b"x" * 72)}
    for password, expected in [(b"x" * 72, PASSES), (b"x" * 73, PASSES), (b"x" * 500, PASSES), (b"x" * 71, REFUSED)]:
        assert BasicAuth().judge(basic("alice", password), users) == expected


def test_a_nul_in_a_password_is_a_character() -> None:
    """A password with a NUL is not the same as what comes before it."""
    assert matches(b"a\0b", hashed(b"a\0b").encode())
    assert not matches(b"a\0b", hashed(b"a").encode())
    assert not matches(b"a", hashed(b"a\0b").encode())


def test_right_credentials_are_checked_once() -> None:
    """100 requests with the same right credentials cost one check; another password of the user costs its own."""
    checks = Checks()
    auth = checks.auth()
    assert {auth.judge(basic("alice", "secret"), USERS) for _ in range(100)} == {PASSES}
    assert len(checks.made) == 1
    assert auth.judge(basic("alice", "wrong"), USERS) == REFUSED
    assert len(checks.made) == 2


def test_wrong_credentials_are_not_remembered() -> None:
    """A password that was wrong passes as soon as the hash is its own."""
    checks = Checks()
    auth = checks.auth()
    assert auth.judge(basic("alice", "new"), USERS) == REFUSED
    assert auth.judge(basic("alice", "new"), {"alice": "$2b$10$new"}) == PASSES


def test_a_removed_user_and_a_changed_hash_are_refused_at_once() -> None:
    """Remembered credentials hold for the hash that they were checked against, and for no other."""
    checks = Checks()
    auth = checks.auth()
    header = basic("alice", "secret")
    assert auth.judge(header, USERS) == PASSES
    assert auth.judge(header, {"bob": USERS["bob"]}) == REFUSED
    assert auth.judge(header, {"alice": "$2b$10$other"}) == REFUSED
    assert auth.judge(header, {"bob": USERS["alice"]}) == REFUSED
    assert auth.judge(header, USERS) == PASSES
    assert len(checks.made) == 4


def test_no_more_than_256_credentials_are_remembered() -> None:
    """The one that was not used for longest is forgotten, and costs a check again."""
    checks = Checks()
    auth = checks.auth()
    users = {f"u{i}": f"$2b$10$p{i}" for i in range(257)}
    for i in range(256):
        assert auth.judge(basic(f"u{i}", f"p{i}"), users) == PASSES
    assert auth.judge(basic("u0", "p0"), users) == PASSES  # used again: u1 is the oldest
    assert auth.judge(basic("u256", "p256"), users) == PASSES
    assert len(checks.made) == 257
    assert auth.judge(basic("u0", "p0"), users) == PASSES
    assert len(checks.made) == 257
    assert auth.judge(basic("u1", "p1"), users) == PASSES
    assert len(checks.made) == 258


def test_an_unknown_user_costs_the_same_check_as_a_known_one() -> None:
    """Each unknown name has one check like any other, against a hash of one of the users' costs, always the same."""
    checks = Checks()
    auth = checks.auth()
    costs = {}
    for name in (f"nobody{i}" for i in range(64)):
        assert {auth.judge(basic(name, "secret"), USERS) for _ in range(3)} == {REFUSED}
        assert len({against for _, against in checks.made}) == 1
        costs[name] = checks.made[0][1].split(b"$")[2]
        assert len(checks.made) == 3
        checks.made.clear()
    assert set(costs.values()) == {b"10", b"12"}


def test_the_dummy_hash_is_one_that_bcrypt_takes() -> None:
    """What unknown names are checked against is a hash for bcrypt, at the same cost, and no password is right."""
    seen = []

    def check(password: bytes, against: bytes) -> bool:
        seen.append(against)
        return matches(password, against)

    assert BasicAuth(check).judge(basic("nobody", "x"), {"alice": hashed("x")}) == REFUSED
    assert seen[0][:7] == b"$2b$04$"
    assert len(seen[0]) == 60


def test_an_unknown_user_is_refused_even_if_the_dummy_matches() -> None:
    """What the check against the dummy says does not matter."""
    assert BasicAuth(lambda *_: True).judge(basic("nobody", "x"), USERS) == REFUSED


# What guessing costs


def test_a_wrong_password_stops_checks_for_nine_times_as_long() -> None:
    """By a fake clock: after a failed check of 0.1 s unknown credentials wait for 0.9 s; those remembered pass."""
    checks = Checks(seconds=0.1)
    auth = checks.auth()
    assert auth.judge(basic("alice", "secret"), USERS) == PASSES
    assert auth.judge(basic("alice", "guess"), USERS) == REFUSED
    ended = checks.now
    for after in (0.0, 0.5, 0.89):
        checks.now = ended + after
        assert auth.judge(basic("bob", "sesame"), USERS) == Verdict(passes=False, wait=1.0)
        assert auth.judge(basic("alice", "secret"), USERS) == PASSES
    checks.now = ended + 0.91
    assert auth.judge(basic("bob", "sesame"), USERS) == PASSES
    assert len(checks.made) == 3


def test_a_right_password_delays_no_client() -> None:
    """Another user may be checked right after a check that succeeded."""
    checks = Checks(seconds=0.1)
    auth = checks.auth()
    assert auth.judge(basic("alice", "secret"), USERS) == PASSES
    assert auth.judge(basic("bob", "sesame"), USERS) == PASSES


def test_the_wait_is_told() -> None:
    """After a failed check of 2 s the client is told to wait for the 18 s that are left."""
    checks = Checks(seconds=2.0)
    auth = checks.auth()
    auth.judge(basic("alice", "guess"), USERS)
    assert auth.judge(basic("alice", "guess"), USERS).wait == pytest.approx(18.0)


def test_guessing_takes_a_tenth_of_a_core() -> None:
    """Of 1,000 s with a guess every 10 ms, checks of 70 ms take no more than 100 s."""
    checks = Checks(seconds=0.07)
    auth = checks.auth()
    while checks.now < 1000:
        auth.judge(basic("alice", "guess"), USERS)
        checks.now += 0.01
    assert 90 < len(checks.made) * 0.07 <= 100


def test_one_check_runs_at_a_time_and_no_other_client_waits_for_it() -> None:
    """While a check runs, 8 others with unknown credentials are told to come back, and remembered ones pass."""
    checks = Checks()
    auth = checks.auth()
    assert auth.judge(basic("alice", "secret"), USERS) == PASSES
    entered, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert may_go_on.wait(PATIENCE)

    checks.before = wait
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(auth.judge, basic("bob", "sesame"), USERS)
        assert entered.wait(PATIENCE)
        assert [auth.judge(basic("bob", f"guess{i}"), USERS).wait for i in range(8)] == [1.0] * 8
        assert auth.judge(basic("alice", "secret"), USERS) == PASSES
        may_go_on.set()
        assert running.result() == PASSES
    assert len(checks.made) == 2


def test_a_check_that_raises_lets_the_next_one_run() -> None:
    """A failure of bcrypt's passes on and counts as wrong, and does not block checks for ever."""
    checks = Checks(seconds=0.1)
    auth = checks.auth()

    def fail() -> None:
        checks.before = lambda: None
        raise RuntimeError

    checks.before = fail
    with pytest.raises(RuntimeError):
        auth.judge(basic("alice", "secret"), USERS)
    checks.now += 1
    assert auth.judge(basic("alice", "secret"), USERS) == PASSES


# The token bucket


def test_a_bucket_gives_its_burst_and_then_one_token_per_interval() -> None:
    """With an interval of 2 s and a burst of 3: three at once, then one every 2 s, and never more than three saved up."""
    now = 100.0
    bucket = TokenBucket(lambda: now)
    limit = RateLimit(2.0, 3)
    assert [bucket.wait(limit) for _ in range(4)] == [0.0, 0.0, 0.0, 2.0]
    now += 1.5
    assert bucket.wait(limit) == pytest.approx(0.5)
    now += 0.5
    assert [bucket.wait(limit) for _ in range(2)] == [0.0, 2.0]
    now += 1000
    assert [bucket.wait(limit) for _ in range(4)] == [0.0, 0.0, 0.0, 2.0]


def test_another_limit_starts_with_a_full_bucket_and_none_lets_all_through() -> None:
    """A limit that is changed counts from the change; without one no client waits."""
    bucket = TokenBucket(lambda: 0.0)
    assert [bucket.wait(RateLimit(1.0, 1)) for _ in range(2)] == [0.0, 1.0]
    assert [bucket.wait(RateLimit(1.0, 2)) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert [bucket.wait(None) for _ in range(100)] == [0.0] * 100


# Prometheus' own server as the reference

CREDENTIALS = [
    basic("alice", "secret"),
    basic("alice", "wrong"),
    basic("nobody", "secret"),
    basic("long", b"x" * 72),
    basic("long", b"x" * 100),
    basic("long", b"x" * 71),
    basic("long", b"x" * 71 + b"y" + b"x"),
    basic("nul", b"a\0b"),
    basic("nul", b"a"),
    basic("empty", ""),
    basic("jörg", "größe"),
    basic("colon", "a:b"),
    basic("alice", "secret").lower(),
    basic("alice", "secret").replace("Basic", "bASIC"),
    basic("alice", "secret").replace("Basic", "Bearer"),
    basic("alice", "secret").rstrip("="),
    "Basic " + base64.b64encode(b"alice").decode(),
    "",
]


@pytest.mark.server
def test_a_real_prometheus_lets_the_same_credentials_in(tmp_path: Path) -> None:
    """Prometheus' own web server, with the same users in its web configuration, gives the same verdict on each header."""
    users = {
        "alice": hashed("secret", b"2y"), "long": hashed(b"x" * 72), "nul": hashed(b"a\0b"), "empty": hashed("", b"2a"),
        "jörg": hashed("größe"), "colon": hashed("a:b"),
    }  # fmt: skip
    lines = [f"  {user}: {password}\n" for user, password in users.items()]
    (tmp_path / "web.yml").write_text("basic_auth_users:\n" + "".join(lines), "utf-8")
    (tmp_path / "prometheus.yml").write_text("{}")
    with contextlib.closing(open_listener("127.0.0.1", (0,))) as listener:
        port = listener.getsockname()[1]
    options = {"config.file": tmp_path / "prometheus.yml", "web.config.file": tmp_path / "web.yml", "storage.tsdb.path": tmp_path}
    command = [*(f"--{k}={v}" for k, v in options.items()), f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen([find("prometheus"), *command]) as process:
        try:
            assert eventually(lambda: status(port, basic("alice", "secret")) == 200)
            theirs = [status(port, header) == 200 for header in CREDENTIALS]
        finally:
            process.terminate()
    assert [BasicAuth().judge(header, users).passes for header in CREDENTIALS] == theirs
    assert True in theirs
    assert False in theirs


def status(port: int, authorization: str) -> int:
    """The status that a server answers with, 0 where there is none."""
    with (
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client,
        contextlib.suppress(OSError),
    ):
        client.request("GET", "/-/healthy", headers={"Authorization": authorization} if authorization else {})
        return client.getresponse().status
    return 0
