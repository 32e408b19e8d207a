"""The live page over HTTP: its files, and its JSON by path and query."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from torch_grad_exporter.outputs.http.messages import Request, Response, plain
from torch_grad_exporter.outputs.live.encoding import Json, encoded
from torch_grad_exporter.outputs.live.history import VIEWS, UnknownLayerError, Window
from torch_grad_exporter.outputs.prometheus.negotiation import accepts_gzip

if TYPE_CHECKING:
    from torch_grad_exporter.outputs.live.live import Live

# Nothing from elsewhere, nothing inline, and no page may frame it.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = (("Content-Security-Policy", CSP), ("Referrer-Policy", "no-referrer"), ("Cross-Origin-Opener-Policy", "same-origin"))

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

# Found at import: finding it imports modules, which no background thread does while the training may fork.
FOLDER = files(__package__).joinpath("page")

# Of the answers that stay as they are.
SCHEMAS = files("torch_grad_exporter").joinpath("schemas", "v1")

INDEX = "index.html"
HTML = {"/": INDEX, "/runbook": "runbook.html"}
BUNDLE = "page"
STATIC = "/static/"
API = "/api/v1/"

# How the page names its files, in the order in which they need each other.
SCRIPT = re.compile(r'<script src="static/([^"]+)"></script>')
STYLE = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')


@cache
def names() -> frozenset[str]:
    """Return the names of all files that are served."""
    return frozenset(path.name for path in FOLDER.iterdir() if path.is_file()) | {f"{BUNDLE}.js", f"{BUNDLE}.css"}


def source(name: str) -> bytes | None:
    """Return a file of the page as it is in the package, None if there is none of this name."""
    path = FOLDER.joinpath(name)
    return path.read_bytes() if name in names() and path.is_file() else None


@cache
def served(name: str) -> tuple[bytes, bytes] | None:
    """Return what is sent under a name, plain and compressed; None if there is nothing.

    One script and one style join all of the page's own: a request costs more than bytes.
    """
    index = (source(INDEX) or b"").decode()
    head, body = index[: index.index("<body")], index[index.index("<body") :]  # a script in the head stays
    if name == INDEX:
        head = STYLE.sub("", head).replace("</head>", f'<link rel="stylesheet" href="static/{BUNDLE}.css">\n</head>')
        content = (head + SCRIPT.sub("", body).replace("</body>", f'<script src="static/{BUNDLE}.js"></script>\n</body>')).encode()
    elif name in (f"{BUNDLE}.js", f"{BUNDLE}.css"):
        files = SCRIPT.findall(body) if name.endswith(".js") else STYLE.findall(index)
        content = b"\n".join(source(file) or b"" for file in files)
    elif (file := source(name)) is not None:
        content = file
    else:
        return None
    return content, gzip.compress(content, 9, mtime=0)


def answer(live: Live, request: Request) -> Response | None:
    """Return the answer to a request for the page or its data; None if the path does not belong to it."""
    path = request.path
    if path in HTML or path.startswith(STATIC):
        return _file(request, HTML.get(path) or path.removeprefix(STATIC))
    return _data(live, request, path.removeprefix(API)) if path.startswith(API) else None


def _data(live: Live, request: Request, name: str) -> Response:
    if name not in ANSWERS:
        return plain(HTTPStatus.NOT_FOUND, headers=HEADERS)
    try:
        body = encoded(ANSWERS[name](live, _query(request.query)))
    except UnknownLayerError:
        return plain(HTTPStatus.NOT_FOUND, "there is no such layer", HEADERS)
    except WrongQueryError as error:
        return plain(HTTPStatus.BAD_REQUEST, f"this cannot be answered: {error}", HEADERS)
    compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
    return _response("application/json", gzip.compress(body, 1, mtime=0) if compressed else body, compressed=compressed)


class WrongQueryError(Exception):
    """A query that cannot be answered; the message says why."""


def _query(text: str) -> Mapping[str, str]:
    """Return the last value of each key."""
    try:
        return {key: values[-1] for key, values in parse_qs(text, max_num_fields=10, errors="strict").items()}
    except ValueError as error:
        raise WrongQueryError(error) from None


def _one_of(query: Mapping[str, str], name: str, default: str, known: Collection[str]) -> str:
    value = query.get(name, default)
    if value not in known:
        raise WrongQueryError(f"{name} is one of {', '.join(known)}")
    return value


def _window(query: Mapping[str, str]) -> Window:
    """Return which records are wanted."""
    view = _one_of(query, "view", "recent", VIEWS)
    given = [query.get(name, "0") for name in ("since", "stride")]
    if not all(re.fullmatch(r"[0-9]{1,4000}", text) for text in given):
        raise WrongQueryError("since and stride are whole numbers from 0 on")
    since, stride = map(int, given)
    return Window(whole=view == "whole", since=since, stride=stride)


ANSWERS: Mapping[str, Callable[[Live, Mapping[str, str]], Json]] = {
    "status": lambda live, _: live.status(),
    "run": lambda live, query: live.run(_window(query)),
    "layers": lambda live, query: live.layers(_one_of(query, "quantity", "norm", live.quantities), _window(query)),
    "layer": lambda live, query: live.layer(query.get("name", "")),
    "problems": lambda live, _: live.wrong_now(),
    "values": lambda live, query: live.values(_window(query)),
    "schema": lambda _live, _query: {path.name.removesuffix(".json"): json.loads(path.read_bytes()) for path in SCHEMAS.iterdir()},
    "saved": lambda live, _: live.everything(),
}


def _file(request: Request, name: str) -> Response:
    content = served(name) if name in names() else None  # the cache has an entry for each name that is asked for
    if content is None:
        return plain(HTTPStatus.NOT_FOUND, headers=HEADERS)
    kind = TYPES.get(name[name.rfind(".") :], "application/octet-stream")
    compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
    return _response(kind, content[compressed], compressed=compressed)


def _response(kind: str, body: bytes, *, compressed: bool) -> Response:
    encoding = (("Content-Encoding", "gzip"),) if compressed else ()
    return Response(HTTPStatus.OK, kind, body, (("Vary", "Accept-Encoding"), *encoding, *HEADERS))
