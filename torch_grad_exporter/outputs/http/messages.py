"""A request and its answer, as the server passes them to those that answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus


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
