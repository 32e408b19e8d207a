"""Loads a saved run from a file or from a running exporter, and checks that it is one."""

from __future__ import annotations

import base64
import gzip
import http.client
import io
import json
import re
import ssl
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import Never
from urllib.parse import unquote, urlsplit

from torch_grad_exporter.outputs.live.saved import FORMAT, VERSION, Saved, check

# Seconds for the answer of a running exporter.
TIMEOUT = 30.0

# Of a history, before and after decompression; one of 300 layers has 2 MB.
MOST_BYTES = 256 * 2**20


class PlotError(Exception):
    """A source or target that cannot be used; the message is for the user."""


def loaded(source: str, cacert: str | None = None) -> Saved:
    """Return the content of a file, or the answer of a running exporter, once it has been checked.

    Args:
        source: Path, or address.
        cacert: File of a certificate authority to trust in addition to the system's.

    Raises:
        PlotError: It cannot be read, or is not a saved run.
    """
    content = _fetched(source, cacert) if re.match(r"https?://", source) else _read(source)
    source = _without_password(source)
    try:
        text = _decompressed(content) if content.startswith(b"\x1f\x8b") else content
        saved = json.loads(text, parse_constant=_refused)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError):
        saved = None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise PlotError(f"{source} is not a history of torch_grad_exporter; exporter.save(path) writes one")
    if saved.get("version") != VERSION:
        raise PlotError(f"{source} has version {saved.get('version')!r} of the format; this program reads version {VERSION}")
    try:
        check(saved)
    except KeyError as error:
        raise PlotError(f"{source} is damaged: it has no {error.args[0]!r}") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise PlotError(f"{source} is damaged: {error}") from None
    return saved


def _refused(name: str) -> Never:
    """Refuse what only Python accepts as JSON: the page could not read it."""
    raise ValueError(f"{name} is not JSON")


def _without_password(source: str) -> str:
    """Return what messages call a source: they end up in logs, and in files that CI keeps."""
    return re.sub(r"^(https?://).*@", r"\1", source, flags=re.DOTALL)


def _decompressed(content: bytes) -> bytes:
    """Decompress. Raises `ValueError` if it becomes larger than any history."""
    with gzip.open(io.BytesIO(content)) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError("too large")
    return content


def _read(source: str) -> bytes:
    try:
        with Path(source).open("rb") as file:
            return _limited(file.read(MOST_BYTES + 1), source)
    except OSError as error:
        address = f"; for an address write http://{source}" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", source) else ""
        raise PlotError(f"cannot read {source}: {error}{address}") from None


def _limited(content: bytes, source: str) -> bytes:
    if len(content) > MOST_BYTES:
        raise PlotError(f"{source} is larger than {MOST_BYTES // 2**20} MiB, so not a history")
    return content


class _Stay(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirection: the password is only for the server that was named."""

    def redirect_request(self, *_arguments: object) -> None:
        """Return None, which makes it an error."""


def _fetched(address: str, cacert: str | None) -> bytes:
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - raises, too
    except ValueError:  # whose text may have the password in it
        raise PlotError(f"{_without_password(address)} is not an address such as http://localhost:9100") from None
    path = re.sub(r"(/metrics)?/?$", "", parts.path)
    where = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path, query="", fragment="").geturl()
    headers = {"Accept-Encoding": "gzip"}
    if parts.username is not None:
        credentials = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
        headers["Authorization"] = f"Basic {credentials}"
    request = urllib.request.Request(f"{where}/api/v1/saved", headers=headers)  # noqa: S310 - http and https alone come here
    opener = urllib.request.build_opener(_Stay, urllib.request.HTTPSHandler(context=_context(cacert)))
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            return _limited(answer.read(MOST_BYTES + 1), where)
    except urllib.error.HTTPError as error:
        fix = _fix(error)
        error.close()
        raise PlotError(f"{where} answers {error.code} {error.reason}{fix}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # urllib's own are, too
        fix = "; --cacert names the authority of its certificate" if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""
        raise PlotError(f"{where} does not answer: {error}{fix}") from None


def _fix(error: urllib.error.HTTPError) -> str:
    """Return what can be done about an answer."""
    if error.code in (401, 403):
        return "; give user and password in the address: https://user:password@host:9100"
    if 300 <= error.code < 400:
        return f", which is not followed; it points to {error.headers.get('Location', 'nothing')[:200]!r}"
    return ""


def _context(cacert: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        if cacert is not None:
            context.load_verify_locations(cacert)
    except OSError as error:  # ssl's own are, too
        raise PlotError(f"cannot read certificates from {cacert}: {error}") from None
    return context
