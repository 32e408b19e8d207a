"""Endpoints: which answer a request gets, under the web configuration of the moment."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

from torch_grad_exporter.errors import BusyError, ErrorLog
from torch_grad_exporter.lifecycle import THREAD_TIME
from torch_grad_exporter.outputs.http.admission import BasicAuth, TokenBucket
from torch_grad_exporter.outputs.http.messages import Request, Response, plain
from torch_grad_exporter.outputs.http.scrapers import is_scraper
from torch_grad_exporter.outputs.http.shared import Content, SharedScrape, Workers
from torch_grad_exporter.outputs.http.web_config import WebConfigFile, WebSettings
from torch_grad_exporter.outputs.prometheus.negotiation import accepts_gzip, negotiate
from torch_grad_exporter.outputs.prometheus.text import Renderer

_CHALLENGE = (("WWW-Authenticate", 'Basic realm="torch_grad_exporter", charset="UTF-8"'),)
_ALLOWED = (("Allow", "GET, HEAD, OPTIONS"),)


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
