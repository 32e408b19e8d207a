"""What is served: `/metrics`, `/healthz`, `/sd`, and the live page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.outputs.http.message import Request, Response, plain
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError, SharedScrape
from torch_grad_exporter.outputs.prometheus.negotiation import accepts_gzip, negotiate

_METHODS = ("GET", "HEAD")

Respond = Callable[[Response | None], None]
"""Takes the response from any thread, `None` where there is none; what comes after the first has no effect."""


@dataclass(slots=True, eq=False, kw_only=True)
class Endpoints:
    """Answers requests. Everything is read-only; a failure is counted and becomes a 500.

    `targets`: what Prometheus' http_sd reads. `page`: answers for all other paths, `None` where there is nothing.

    `refusal` is asked first, whatever the request is for: a response that it returns is the answer.
    """

    shared: SharedScrape
    health: Callable[[], Mapping[str, object]]
    targets: Callable[[], bytes]
    page: Callable[[Request], Response | None]
    on_error: Callable[[str, BaseException], None]
    refusal: Callable[[Request], Response | None] = lambda _request: None

    def answer(self, request: Request, respond: Respond) -> None:
        """Has `respond` called with the response: from here, or from the thread of a scrape that runs already.

        Raises nothing but `BaseException`s that are no `Exception`.
        """
        Guard(lambda error: respond(self._failed(error)))(self._answer, request, respond)

    def _answer(self, request: Request, respond: Respond) -> None:
        try:
            refused = self.refusal(request)
            if refused is None and request.path == "/metrics" and request.method in _METHODS:
                self._metrics(request, respond)
            else:
                respond(refused or self._routed(request))
        except ScrapeBusyError:
            respond(plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many wait for a scrape that is still running"))

    def _failed(self, error: Exception) -> Response:
        self.on_error("request", error)
        return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; the training process' log says why")

    def _routed(self, request: Request) -> Response:
        if request.method not in _METHODS:
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", ", ".join(_METHODS)),))
        if request.path == "/healthz":
            body = json.dumps(dict(self.health()), allow_nan=False).encode()
            return Response(HTTPStatus.OK, "application/json", body)
        if request.path == "/sd":
            return Response(HTTPStatus.OK, "application/json", self.targets())
        return self.page(request) or plain(HTTPStatus.NOT_FOUND)

    def _metrics(self, request: Request, respond: Respond) -> None:
        form = negotiate(request.headers.get("accept", ""))
        compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
        encoding = (("Content-Encoding", "gzip"),) if compressed else ()
        headers = (("Vary", "Accept, Accept-Encoding"), *encoding)

        def take(outcome: bytes | BaseException) -> None:
            if isinstance(outcome, bytes):
                respond(Response(HTTPStatus.OK, form.value, outcome, headers))
            else:  # what is no Exception ends the thread of the scrape, and is no failure of ours
                respond(self._failed(outcome) if isinstance(outcome, Exception) else None)

        self.shared.ask(form, compressed=compressed, take=take)
