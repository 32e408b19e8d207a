"""Which requests reach the endpoints: first the rate limit, then basic authentication, for every path and method.

A check of a password against its bcrypt hash costs 50 ms of a core and more, on purpose. Credentials that were right are
remembered, so that a scraper costs one check and not one per scrape. One check runs at a time, and after one that failed none
for nine times as long: guessing takes a tenth of one core at most. No client waits for the check of another. Neither an answer
nor its duration shows whether a user exists.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from torch_grad_exporter.outputs.http.message import Request, Response, plain
from torch_grad_exporter.outputs.http.web_config import RateLimit, WebConfigFile

_CHALLENGE = (("WWW-Authenticate", 'Basic realm="torch_grad_exporter", charset="UTF-8"'),)
# How much longer than a failed check there is none.
_REST = 9
_REMEMBERED = 256
# A well-formed hash of no known password; the result of comparing with it is ignored.
_DECOY_HASH = "$2b${cost}$" + "." * 53


class Admission:
    """Applies the settings as they are at the moment of a request. Called in a worker, since a check is slow."""

    def __init__(self, config: WebConfigFile, clock: Callable[[], float]) -> None:
        self._config = config
        self._auth = BasicAuth(clock)
        self._bucket = TokenBucket(clock)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused, None for all others."""
        settings = self._config.current
        wait = self._bucket.wait(settings.rate_limit)
        if wait:
            return _later("too many requests", wait)
        if not settings.users:
            return None
        verdict = self._auth.judge(request.headers.get("authorization", ""), settings.users)
        if verdict.passes:
            return None
        if verdict.wait is not None:
            return _later("passwords are checked one at a time, and seldom after a wrong one", verdict.wait)
        return plain(HTTPStatus.UNAUTHORIZED, headers=_CHALLENGE)


def _later(reason: str, wait: float) -> Response:
    return plain(HTTPStatus.TOO_MANY_REQUESTS, reason, (("Retry-After", str(math.ceil(wait))),))


class TokenBucket:
    """A limit of requests per time: full at the start, refilled by one token per interval. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._limit: RateLimit | None = None
        self._tokens = 0.0
        self._counted_at = 0.0

    def wait(self, limit: RateLimit | None) -> float:
        """Take a token; return the seconds until there is one. Another limit than before starts with a full bucket."""
        if limit is None:
            return 0.0
        with self._lock:
            now = self._clock()
            if limit != self._limit:
                self._limit, self._tokens, self._counted_at = limit, float(limit.burst), now
            self._tokens = min(float(limit.burst), self._tokens + (now - self._counted_at) / limit.interval)
            self._counted_at = now
            if self._tokens < 1.0:
                return (1.0 - self._tokens) * limit.interval
            self._tokens -= 1.0
            return 0.0


@dataclass(frozen=True, slots=True)
class CredentialCheck:
    """The outcome of a judgement. `wait`: seconds after which the client may retry, if nothing was checked."""

    passes: bool
    wait: float | None = None


class BasicAuth:
    """Judges the Authorization header. From any thread; takes as long as a check at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self._checking = False
        self._next_check = clock()

    def judge(self, header: str, users: Mapping[str, str]) -> CredentialCheck:
        """Return the verdict on a header, empty for none. `users`: bcrypt hashes by name."""
        credentials = _credentials(header)
        if credentials is None:
            return CredentialCheck(passes=False)
        name, password = credentials
        hashed = users.get(name, self._decoy(name, users))
        digest = self._digest(name, hashed, password)
        with self._lock:
            if digest in self._remembered:
                self._remembered.move_to_end(digest)
                return CredentialCheck(passes=True)
            began = self._clock()
            if self._checking or began < self._next_check:
                return CredentialCheck(passes=False, wait=max(1.0, self._next_check - began))
            self._checking = True
        passes = False
        try:
            # Checked also where there is no such user: leaving it out would show in the time.
            passes = _matches(password, hashed) and name in users
        finally:
            with self._lock:
                self._checking = False
                if passes:
                    self._remembered[digest] = None
                    while len(self._remembered) > _REMEMBERED:
                        self._remembered.popitem(last=False)
                else:
                    now = self._clock()
                    self._next_check = now + _REST * (now - began)
        return CredentialCheck(passes=passes)

    def _decoy(self, name: str, users: Mapping[str, str]) -> str:
        """Return a hash for an unknown name, at the cost that one of the users has: always the same one for a name."""
        costs = sorted(hashed.split("$")[2] for hashed in users.values())
        chosen = int.from_bytes(self._digest(name)) % len(costs)
        return _DECOY_HASH.format(cost=costs[chosen])

    def _digest(self, *parts: str | bytes) -> bytes:
        """Return a fingerprint from which no password can be found outside of this process."""
        encoded = [part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts]
        return hmac.digest(self._key, b"".join(len(part).to_bytes(8) + part for part in encoded), "sha256")


def _matches(password: bytes, hashed: str) -> bool:
    import bcrypt  # noqa: PLC0415 - optional, and only needed where there are users

    # bcrypt itself uses no more than 72 bytes; its Python package raises beyond them, Go's ignores the rest.
    return bcrypt.checkpw(password[:72], hashed.encode())


def _credentials(header: str) -> tuple[str, bytes] | None:
    """Return user and password, None if the header is not of basic authentication."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):  # ValueError: not even ASCII
        return None
    return (name.decode("utf-8", "surrogateescape"), password) if colon else None
