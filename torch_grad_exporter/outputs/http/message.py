"""HTTP/1.1 messages as pure functions of bytes: a request's head in, a response's bytes out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

MAX_REQUEST_LINE = 4096
MAX_HEAD = 16384

_HEAD_END = re.compile(rb"\n\r?\n")
_REQUEST_LINE = re.compile(r"([!#-'*+\-.^-z|~0-9A-Z]+) (\S+) HTTP/(\d)\.\d")
_FIELD_NAME = re.compile(r"[!#-'*+\-.^-z|~0-9A-Z]+")
_TLS_HANDSHAKE = b"\x16"


class RequestError(Exception):
    """A request that is answered with this status and read no further."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request's method, the path and the query of its target, and its header fields by lower-case name."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer; its length is known before its first byte is sent."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    def head(self, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
        """The status line and the header section, with the empty line that ends it; `extra` fields are added to its own."""
        fields = (
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", self.content_type),
            ("Content-Length", str(len(self.body))),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
            *self.headers,
            *extra,
        )
        lines = (f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{name}: {value}" for name, value in fields))
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")


def plain(status: HTTPStatus, text: str = "", headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """A one-line answer for people; without a text the status alone."""
    return Response(status, "text/plain; charset=utf-8", f"{text or status.phrase}\n".encode(), headers)


def complete_head(received: bytes | bytearray, scanned: int = 0) -> bytes | None:
    """The request's head once all of it is there, `None` before that. Raises `RequestError` beyond the limits.

    `scanned`: so many of the bytes were there when the last answer was `None`; they are not searched again, as a
    client that sends byte by byte would else cost a time that grows with their square.
    """
    if received.startswith(_TLS_HANDSHAKE):
        # With an answer in plain HTTP the client reports what is wrong: it spoke TLS to a server without.
        raise RequestError(HTTPStatus.BAD_REQUEST)
    if scanned <= MAX_REQUEST_LINE < len(received) and received.find(b"\n", 0, MAX_REQUEST_LINE) < 0:
        raise RequestError(HTTPStatus.REQUEST_URI_TOO_LONG)
    end = _HEAD_END.search(received, max(0, scanned - 2), MAX_HEAD)  # two bytes of it may have been there
    if end is None and len(received) >= MAX_HEAD:
        raise RequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    return bytes(received[: end.start()]).removesuffix(b"\r") if end else None


def parse(head: bytes) -> Request:
    """The request of a complete head. Raises `RequestError` where it is not HTTP/1."""
    text = head.decode("latin-1").replace("\r\n", "\n")
    first, *rest = text.split("\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None or "\r" in text or "\0" in text:  # which others may take for the end of a line
        raise RequestError(HTTPStatus.BAD_REQUEST)
    method, target, major = line.groups()
    if major != "1":
        raise RequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    headers: dict[str, str] = {}
    for field in rest:
        name, colon, value = field.partition(":")
        if not colon or not _FIELD_NAME.fullmatch(name):
            raise RequestError(HTTPStatus.BAD_REQUEST)
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    path, query = _path_and_query(target)
    return Request(method, path, headers, query)


def _path_and_query(target: str) -> tuple[str, str]:
    """The path, also where a proxy sends the whole address, and what follows its question mark."""
    without_origin = re.sub(r"^https?://[^/?#]*", "", target, flags=re.IGNORECASE)
    path, _, query = without_origin.partition("#")[0].partition("?")
    return path or "/", query
