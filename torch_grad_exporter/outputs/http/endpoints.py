"""Endpoints: what is served, `/metrics`, `/healthz`, `/sd` and the live page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from torch_grad_exporter.outputs.http.message import Request, Response, plain
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError, SharedScrape
from torch_grad_exporter.outputs.http.workers import Workers
from torch_grad_exporter.outputs.prometheus.negotiation import accepts_gzip, negotiate

METHODS = ("GET", "HEAD")


class Endpoints:
    """Answers requests. Everything is read-only; a failure is counted and becomes a 500.

    Args:
        shared: The metrics.
        workers: Where everything else is computed.
        refusal: Asked first, whatever the request is for: a response that it returns is the answer. None: no request is refused.
        health: For `/healthz`.
        targets: What Prometheus' http_sd reads.
        page: Answers for all other paths, None where there is nothing.
        on_error: Gets failures.
    """

    def __init__(
        self,
        shared: SharedScrape,
        workers: Workers,
        *,
        refusal: Callable[[Request], Response | None] | None,
        health: Callable[[], Mapping[str, object]],
        targets: Callable[[], bytes],
        page: Callable[[Request], Response | None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._shared, self._workers, self._refusal = shared, workers, refusal
        self._health, self._targets, self._page, self._on_error = health, targets, page, on_error

    async def answer(self, request: Request) -> Response:
        """Return the answer."""
        try:
            if self._refusal is not None and (refused := await self._workers.run(self._refusal, request)) is not None:
                return refused
            if request.method not in METHODS:
                return plain(HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", ", ".join(METHODS)),))
            if request.path == "/metrics":
                return await self._metrics(request)
            return await self._workers.run(self._other, request)
        except ScrapeBusyError:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many wait for a scrape that is still running")
        except Exception as error:  # noqa: BLE001 - the boundary
            self._on_error(error)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; the training process' log says why")

    async def _metrics(self, request: Request) -> Response:
        form = negotiate(request.headers.get("accept", ""))
        compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
        body = await self._shared.body(form, compressed=compressed)
        encoding = (("Content-Encoding", "gzip"),) if compressed else ()
        return Response(HTTPStatus.OK, form.value, body, (("Vary", "Accept, Accept-Encoding"), *encoding))

    def _other(self, request: Request) -> Response:
        if request.path == "/healthz":
            return Response(HTTPStatus.OK, "application/json", json.dumps(dict(self._health()), allow_nan=False).encode())
        if request.path == "/sd":
            return Response(HTTPStatus.OK, "application/json", self._targets())
        return self._page(request) or plain(HTTPStatus.NOT_FOUND)
