"""What is served: `/metrics`, `/healthz` and a landing page, each a method from request to response."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from torch_grad_exporter.exposition.message import Request, Response, plain
from torch_grad_exporter.exposition.negotiation import accepts_gzip, negotiate
from torch_grad_exporter.exposition.shared import ScrapeBusyError, SharedScrape

_METHODS = ("GET", "HEAD")

_LANDING_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>torch_grad_exporter</title></head>
<body>
<h1>torch_grad_exporter</h1>
<p>Version {version}</p>
<ul>
<li><a href="metrics">Metrics</a></li>
<li><a href="healthz">Health</a></li>
</ul>
</body>
</html>
"""


class Endpoints:
    """Answers requests. Everything is read-only; a failure is counted and becomes a 500."""

    def __init__(
        self,
        shared: SharedScrape,
        *,
        health: Callable[[], Mapping[str, object]],
        version: str,
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self._shared = shared
        self._health = health
        self._version = version
        self._on_error = on_error
        self._routes = {"/": self._landing_page, "/metrics": self._metrics, "/healthz": self._healthz}

    def answer(self, request: Request) -> Response:
        """The response; raises nothing but `BaseException`s that are no `Exception`."""
        if request.method not in _METHODS:
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", ", ".join(_METHODS)),))
        route = self._routes.get(request.path)
        if route is None:
            return plain(HTTPStatus.NOT_FOUND)
        try:
            return route(request)
        except ScrapeBusyError:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "an earlier scrape is still running")
        except Exception as exc:  # noqa: BLE001 the boundary of a request: a scrape must not end the server
            self._on_error("request", exc)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; the training process' log says why")

    def _metrics(self, request: Request) -> Response:
        form = negotiate(request.headers.get("accept", ""))
        compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
        encoding = (("Content-Encoding", "gzip"),) if compressed else ()
        headers = (("Vary", "Accept, Accept-Encoding"), *encoding)
        return Response(HTTPStatus.OK, form.value, self._shared.body(form, compressed=compressed), headers)

    def _healthz(self, _request: Request) -> Response:
        return Response(HTTPStatus.OK, "application/json", json.dumps(dict(self._health()), allow_nan=False).encode())

    def _landing_page(self, _request: Request) -> Response:
        body = _LANDING_PAGE.format(version=html.escape(self._version))
        return Response(HTTPStatus.OK, "text/html; charset=utf-8", body.encode())
