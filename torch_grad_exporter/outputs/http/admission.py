"""Which requests are admitted: a limit of requests per time, and the judgement of passwords."""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch_grad_exporter.outputs.http.web_config import RateLimit

_REST = 9  # after a failed check there is none for this many times its duration
_REMEMBERED = 256  # credentials, at most

# A well-formed hash of no known password; the result of comparing with it is ignored.
_DECOY_HASH = "$2b${cost}$" + "." * 53


class TokenBucket:
    """A limit of requests per time: full at the start, refilled by one token per interval. From any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._limit: RateLimit | None = None
        self._tokens = self._counted_at = 0.0

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


class CredentialCheck(NamedTuple):
    """The outcome of a judgement. `wait`: seconds after which the client may retry, if nothing was checked."""

    passes: bool
    wait: float | None = None


class BasicAuth:
    """Judges the Authorization header. From any thread; takes as long as a check at most.

    A check of a password against its bcrypt hash costs 50 ms of a core and more, on purpose. Credentials that were right are
    remembered, so that a scraper costs one check and not one per scrape. One check runs at a time, and after one that failed none
    for nine times as long: guessing takes a tenth of one core at most. No client waits for the check of another. Neither an answer
    nor its duration shows whether a user exists.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock, self._key = clock, threading.Lock(), secrets.token_bytes(32)
        self._remembered: dict[bytes, None] = {}  # the last ones, in the order of their use
        self._checking, self._next_check = False, clock()

    def judge(self, header: str, users: Mapping[str, str]) -> CredentialCheck:
        """Return the verdict on a header, empty for none. `users`: bcrypt hashes by name."""
        credentials = _credentials(header)
        if credentials is None:
            return CredentialCheck(passes=False)
        name, password = credentials
        # For an unknown name a hash at the cost that one of the users has: always the same one for a name.
        costs = sorted(each.split("$")[2] for each in users.values())
        decoy = _DECOY_HASH.format(cost=costs[int.from_bytes(self._digest(name)) % len(costs)])
        hashed = users.get(name, decoy)
        digest = self._digest(name, hashed, password)
        with self._lock:
            if digest in self._remembered:
                self._remembered[digest] = self._remembered.pop(digest)
                return CredentialCheck(passes=True)
            began = self._clock()
            if self._checking or began < self._next_check:
                return CredentialCheck(passes=False, wait=max(1.0, self._next_check - began))
            self._checking = True
        passes = False
        try:
            import bcrypt  # noqa: PLC0415 - optional, and only needed where there are users

            # bcrypt itself uses no more than 72 bytes; its Python package raises beyond them, Go's ignores the rest. Checked also
            # where there is no such user: leaving it out would show in the time.
            passes = bcrypt.checkpw(password[:72], hashed.encode()) and name in users
        finally:
            with self._lock:
                self._checking = False
                if passes:
                    self._remembered[digest] = None
                    if len(self._remembered) > _REMEMBERED:
                        del self._remembered[next(iter(self._remembered))]
                else:
                    now = self._clock()
                    self._next_check = now + _REST * (now - began)
        return CredentialCheck(passes=passes)

    def _digest(self, *parts: str | bytes) -> bytes:
        """Return a fingerprint from which no password can be found outside of this process."""
        encoded = [part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts]
        return hmac.digest(self._key, b"".join(len(part).to_bytes(8) + part for part in encoded), "sha256")


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
