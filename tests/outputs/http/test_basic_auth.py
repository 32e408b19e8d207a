"""Basic authentication: which credentials pass, the cost of a check, and the small cost of guessing."""

from __future__ import annotations

import base64
import contextlib
import http.client
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.outputs.http.support import basic, hashed, running_prometheus
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.outputs.http.basic_auth import BasicAuth, Verdict

PASSES = Verdict(passes=True)
REFUSED = Verdict(passes=False)


@dataclass
class Checks:
    """Stands for bcrypt: a hash fits the password that it ends with, and each check takes `seconds`."""

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


def test_right_credentials_are_checked_once() -> None:
    """100 requests with the same right credentials cost one check; another password of the user costs its own."""
    checks = Checks()
    auth = checks.auth()
    assert {auth.judge(basic("alice", "secret"), USERS) for _ in range(100)} == {PASSES}
    assert len(checks.made) == 1
    assert auth.judge(basic("alice", "wrong"), USERS) == REFUSED
    assert len(checks.made) == 2


def test_an_unknown_user_costs_a_check_too() -> None:
    """Each unknown name has one check against a hash of one of the users' costs, always the same."""
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


# What guessing costs


@pytest.mark.slow
def test_guessing_takes_a_tenth_of_a_core() -> None:
    """Of 100 s with a guess every 10 ms, checks of 70 ms take no more than 10 s, and a check more; who is known passes."""
    checks = Checks(seconds=0.07)
    auth = checks.auth()
    assert auth.judge(basic("alice", "secret"), USERS) == PASSES
    while checks.now < 100:
        auth.judge(basic("alice", "guess"), USERS)
        assert auth.judge(basic("alice", "secret"), USERS) == PASSES
        checks.now += 0.01
    assert 9 < len(checks.made) * 0.07 <= 10.07 + 0.07


def test_one_check_runs_at_a_time() -> None:
    """While a check runs, 8 others with unknown credentials have to come back, and remembered ones pass."""
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


# Prometheus' own server as the reference

CREDENTIALS = [
    basic("alice", "secret"),
    basic("alice", "wrong"),
    basic("nobody", "secret"),
    basic("long", b"x" * 100),
    basic("long", b"x" * 71),
    basic("nul", b"a\0b"),
    basic("nul", b"a"),
    basic("empty", ""),
    basic("jörg", "größe"),
    basic("colon", "a:b"),
    basic("alice", "secret").replace("Basic", "bASIC"),
    basic("alice", "secret").replace("Basic", "Bearer"),
    basic("alice", "secret")[:-1],
    "Basic " + base64.b64encode(b"alice").decode(),
    "",
]
USERS_OF_BOTH = {
    "alice": hashed("secret", b"2y"), "long": hashed(b"x" * 72), "nul": hashed(b"a\0b"), "empty": hashed("", b"2a"),
    "jörg": hashed("größe"), "colon": hashed("a:b"),
}  # fmt: skip
EXPECTED = [True, False, False, True, False, True, False, True, True, True, True, False, False, False, False]


def test_the_password_of_the_hash_passes() -> None:
    """With bcrypt itself the right password passes up to its 72nd byte, and no other password, user or header does."""
    assert [BasicAuth().judge(header, USERS_OF_BOTH).passes for header in CREDENTIALS] == EXPECTED


@pytest.mark.server
def test_a_real_prometheus_takes_the_same_credentials(tmp_path: Path) -> None:
    """Prometheus' own web server with the same users gives the same verdict on each header."""
    lines = [f"  {user}: {password}\n" for user, password in USERS_OF_BOTH.items()]
    (tmp_path / "web.yml").write_text("basic_auth_users:\n" + "".join(lines), "utf-8")
    (tmp_path / "prometheus.yml").write_text("{}")
    with running_prometheus(tmp_path, f"--web.config.file={tmp_path / 'web.yml'}") as port:
        assert eventually(lambda: status(port, basic("alice", "secret")) == 200)
        assert [status(port, header) == 200 for header in CREDENTIALS] == EXPECTED


def status(port: int, authorization: str) -> int:
    """Return the status that a server answers with, 0 if there is none."""
    with (
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client,
        contextlib.suppress(OSError),
    ):
        client.request("GET", "/-/healthy", headers={"Authorization": authorization} if authorization else {})
        return client.getresponse().status
    return 0
