"""Which requests reach the endpoints: first the rate limit, then authentication, for every path and method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from http import HTTPStatus

from torch_grad_exporter.outputs.http.basic_auth import BasicAuth
from torch_grad_exporter.outputs.http.message import Request, Response, plain
from torch_grad_exporter.outputs.http.rate_limit import TokenBucket
from torch_grad_exporter.outputs.http.web_settings import WebSettings

_CHALLENGE = (("WWW-Authenticate", 'Basic realm="torch_grad_exporter", charset="UTF-8"'),)


class Admission:
    """Applies the settings as they are at the moment of a request. Called in a worker, since a check is slow."""

    def __init__(
        self,
        settings: Callable[[], WebSettings],
        *,
        auth: BasicAuth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._auth = auth or BasicAuth()
        self._bucket = TokenBucket(clock)

    def refusal(self, request: Request) -> Response | None:
        """The answer to a request that is refused, `None` for all others."""
        settings = self._settings()
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
