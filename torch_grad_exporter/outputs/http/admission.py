"""Which requests reach the endpoints: first the rate limit, then authentication, for every path and method."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

from torch_grad_exporter.outputs.http.basic_auth import BasicAuth
from torch_grad_exporter.outputs.http.message import Request, Response, plain
from torch_grad_exporter.outputs.http.web_config import RateLimit, WebConfigFile

_CHALLENGE = (("WWW-Authenticate", 'Basic realm="torch_grad_exporter", charset="UTF-8"'),)


class Admission:
    """Applies the settings as they are at the moment of a request. Called in a worker, since a check is slow."""

    def __init__(self, config: WebConfigFile, clock: Callable[[], float]) -> None:
        self._config = config
        self._auth = BasicAuth(clock=clock)
        self._bucket = TokenBucket(clock)

    def refusal(self, request: Request) -> Response | None:
        """The answer to a request that is refused, `None` for all others."""
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
    """How many requests are answered in which time: full at the start, refilled by one token per interval. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._limit: RateLimit | None = None
        self._tokens = 0.0
        self._counted_at = 0.0

    def wait(self, limit: RateLimit | None) -> float:
        """Takes a token: 0.0, or the seconds until there is one. Another limit than before starts with a full bucket."""
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
