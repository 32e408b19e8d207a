"""Endpoints: which answer a request gets, under the web configuration of the moment."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

from torch_grad_exporter.errors import BusyError, ErrorLog
from torch_grad_exporter.lifecycle import THREAD_TIME
from torch_grad_exporter.outputs.http.admission import Admission
from torch_grad_exporter.outputs.http.message import Content, Request, Response, plain
from torch_grad_exporter.outputs.http.shared import SharedScrape, Workers
from torch_grad_exporter.outputs.http.web_config import WebConfigFile, WebSettings
from torch_grad_exporter.outputs.prometheus.text import Renderer, accepts_gzip, negotiate
from torch_grad_exporter.outputs.scrapers import is_scraper

ALLOWED = (("Allow", "GET, HEAD, OPTIONS"),)


class Endpoints:
    """Answers requests, in the thread of the event loop. Everything is read-only; a failure is counted and becomes a 500.

    Args:
        content: What is shown.
        renderer: Makes text of metrics.
        errors: Counts failures under `request` and `web_config`.
        workers: Where everything slow is computed.
        web_config: TLS, users and the rest; None serves plain HTTP to every client.
        clock: Seconds from any origin.
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
        self._admission = None if web_config is None else Admission(web_config, clock)

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
            if self._admission is not None and (refusal := await self._workers.run(self._admission.refusal, request)):
                return refusal
            if request.method not in ("GET", "HEAD"):
                # Some load balancers check the health of a target by OPTIONS.
                status = HTTPStatus.OK if request.method == "OPTIONS" else HTTPStatus.METHOD_NOT_ALLOWED
                return plain(status, headers=ALLOWED)
            if request.path == "/metrics":
                return await self._metrics(request, sock)
            return await self._workers.run(self._other, request)
        except BusyError:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many wait for a scrape that is still running")
        except Exception as error:  # noqa: BLE001 - the boundary
            self._errors.count("request", error)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; the training process' log says why")

    async def _metrics(self, request: Request, sock: socket.socket) -> Response:
        form = negotiate(request.headers.get("accept", ""))
        compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
        body = await self._shared.body(form, compressed=compressed)
        with contextlib.suppress(OSError):  # the client has gone
            peer = str(sock.getpeername()[0])
            self._content.scraped(peer if is_scraper(request.headers) else "", saw_end=body.saw_end)
        encoding = (("Content-Encoding", "gzip"),) if compressed else ()
        return Response(HTTPStatus.OK, form.value, body.content, (("Vary", "Accept, Accept-Encoding"), *encoding))

    def _other(self, request: Request) -> Response:
        if request.path == "/healthz":
            return Response(HTTPStatus.OK, "application/json", json.dumps(dict(self._content.health()), allow_nan=False).encode())
        if request.path == "/sd":
            return Response(HTTPStatus.OK, "application/json", self._content.targets())
        return self._content.page(request) or plain(HTTPStatus.NOT_FOUND)
