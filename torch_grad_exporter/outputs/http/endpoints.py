"""Endpoints: which requests are admitted, and which answer one gets, under the web configuration of the moment."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import NamedTuple

from torch_grad_exporter.errors import BusyError, ErrorLog
from torch_grad_exporter.lifecycle import THREAD_TIME
from torch_grad_exporter.outputs.http.messages import Request, Response, plain
from torch_grad_exporter.outputs.http.scrapers import is_scraper
from torch_grad_exporter.outputs.http.shared import Content, SharedScrape, Workers
from torch_grad_exporter.outputs.http.web_config import RateLimit, WebConfigFile, WebSettings
from torch_grad_exporter.outputs.prometheus.negotiation import accepts_gzip, negotiate
from torch_grad_exporter.outputs.prometheus.text import Renderer

_CHALLENGE = (("WWW-Authenticate", 'Basic realm="torch_grad_exporter", charset="UTF-8"'),)
_REST = 9  # after a failed check there is none for this many times its duration
_REMEMBERED = 256
_ALLOWED = (("Allow", "GET, HEAD, OPTIONS"),)
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


class Endpoints:
    """Answers requests, in the thread of the event loop. Everything is read-only; a failure is counted and becomes a 500.

    What is slow is computed by the `workers`. Without a `web_config` plain HTTP is served to every client.
    """

    def __init__(
        self,
        content: Content,
        renderer: Renderer,
        errors: ErrorLog,
        workers: Workers,
        *,
        web_config: WebConfigFile | None,
        clock: Callable[[], float],
    ) -> None:
        self._content, self._errors, self._workers = content, errors, workers
        self._shared = SharedScrape(content, renderer, workers, clock)
        self._config, self._clock = web_config, clock
        self._auth, self._bucket = BasicAuth(clock), TokenBucket(clock)

    async def settings(self) -> WebSettings:
        """Return the web configuration for the next client, which is the first to get the state of changed files."""
        config = self._config
        if config is None:
            return WebSettings()
        if config.due(self._clock()):
            await self._workers.run(config.reload, self._errors)
        return config.current

    async def answer(self, request: Request, sock: socket.socket) -> Response:
        """Return the answer to a request that came over this connection."""
        settings = WebSettings() if self._config is None else self._config.current
        if settings.tls is None or settings.tls.admits(sock):
            response = await self._guarded(request, sock)
        else:
            response = plain(HTTPStatus.FORBIDDEN, "no name in the client's certificate is allowed here")
        THREAD_TIME.note()
        return replace(response, headers=(*response.headers, *settings.headers))

    async def _guarded(self, request: Request, sock: socket.socket) -> Response:
        try:
            if self._config is not None and (refusal := await self._workers.run(self._refusal, request, self._config.current)):
                return refusal
            if request.method not in ("GET", "HEAD"):
                # Some load balancers check the health of a target by OPTIONS.
                status = HTTPStatus.OK if request.method == "OPTIONS" else HTTPStatus.METHOD_NOT_ALLOWED
                return plain(status, headers=_ALLOWED)
            if request.path == "/metrics":
                return await self._metrics(request, sock)
            return await self._workers.run(self._other, request)
        except BusyError:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many wait for a scrape that is still running")
        except Exception as error:  # noqa: BLE001 - the boundary
            self._errors.count("request", error)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; the training process' log says why")

    def _refusal(self, request: Request, settings: WebSettings) -> Response | None:
        """Return the answer to a request that is refused, None for all others: of any path and method.

        First the rate limit, then basic authentication. In a worker, since a check is slow.
        """
        if wait := self._bucket.wait(settings.rate_limit):
            return _later("too many requests", wait)
        if not settings.users:
            return None
        verdict = self._auth.judge(request.headers.get("authorization", ""), settings.users)
        if verdict.passes:
            return None
        if verdict.wait is not None:
            return _later("passwords are checked one at a time, and seldom after a wrong one", verdict.wait)
        return plain(HTTPStatus.UNAUTHORIZED, headers=_CHALLENGE)

    async def _metrics(self, request: Request, sock: socket.socket) -> Response:
        form = negotiate(request.headers.get("accept", ""))
        compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
        body, saw_end = await self._shared.body(form, compressed=compressed)
        with contextlib.suppress(OSError):  # the client has gone
            peer = str(sock.getpeername()[0])
            self._content.scraped(peer if is_scraper(request.headers) else "", saw_end=saw_end)
        encoding = (("Content-Encoding", "gzip"),) if compressed else ()
        return Response(HTTPStatus.OK, form.value, body, (("Vary", "Accept, Accept-Encoding"), *encoding))

    def _other(self, request: Request) -> Response:
        if request.path == "/healthz":
            return Response(HTTPStatus.OK, "application/json", json.dumps(dict(self._content.health()), allow_nan=False).encode())
        if request.path == "/sd":
            return Response(HTTPStatus.OK, "application/json", self._content.targets())
        return self._content.page(request) or plain(HTTPStatus.NOT_FOUND)


def _later(reason: str, wait: float) -> Response:
    return plain(HTTPStatus.TOO_MANY_REQUESTS, reason, (("Retry-After", str(math.ceil(wait))),))
