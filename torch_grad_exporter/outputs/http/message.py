"""A request, its answer, and the content that a server answers with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from torch_grad_exporter.metrics.families import Family


@dataclass(frozen=True, slots=True)
class Request:
    """A request without its body. `headers`: names in any case. `query`: the part of its target after the question mark."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: str = ""

    @classmethod
    def of(cls, method: str, target: str, headers: Mapping[str, str]) -> Request:
        """Return the request for a target, which is a path, or a whole address where a proxy sends it."""
        without_origin = re.sub(r"^https?://[^/?#]*", "", target, flags=re.IGNORECASE)
        path, _, query = without_origin.partition("#")[0].partition("?")
        return cls(method, path or "/", headers, query)


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer; its length is known before its first byte is sent."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def plain(status: HTTPStatus, text: str = "", headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return a one-line answer for people; without a text the status alone."""
    return Response(status, "text/plain; charset=utf-8", f"{text or status.phrase}\n".encode(), headers)


class Content(Protocol):
    """Everything that a server shows. Its methods but `scraped` are called in the server's worker threads, and may take long.

    `ended`: whether a scrape that begins now shows the end of the run.
    """

    ended: bool

    def scraped(self, by: str, *, saw_end: bool) -> None:
        """Note who is about to get a scrape: a scraper's address, empty for anybody else. In the thread of the loop."""

    def scrape(self) -> Iterable[Family]:
        """Return the metrics. Called by one thread at a time, and at most once a second."""

    def health(self) -> Mapping[str, object]:
        """Return the object of `/healthz`."""

    def targets(self) -> bytes:
        """Return the body of `/sd`, which Prometheus' http_sd reads."""

    def page(self, request: Request) -> Response | None:
        """Return the answer for any other path, None where there is nothing."""
