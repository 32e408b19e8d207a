"""Loads a saved run from a file or from a running exporter, and checks that it is one."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import io
import ipaddress
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Never
from urllib.parse import unquote, urlsplit

from torch_grad_exporter.errors import UserError
from torch_grad_exporter.outputs.live.saved import FORMAT, LONGEST, VERSION, Saved, check

# Seconds for the answer of a running exporter.
TIMEOUT = 30.0

# Limits of a history, before and after decompression: one of 300 layers has 2 MB, one of 3,000 with all options 28 MB and 500,000
# values. A value takes up to 100 bytes of memory, so they are counted before any is made.
MOST_BYTES = 48 * 2**20
MOST_VALUES = 1_000_000

# A text may be longer than `LONGEST` only where it has cells of a heatmap, in base64. The pattern takes any bytes in one pass.
TEXTS = re.compile(rb'"[\w+/]*+=*+"|"([^"\\]*+(?:\\.[^"\\]*+)*+)"?', re.DOTALL)

# Bytes that are read at a time.
CHUNK = 2**20


def loaded(source: str | os.PathLike[str], cacert: str | None = None) -> Saved:
    """Return the content of a file, or the answer of a running exporter, once it has been checked.

    Args:
        source: Path, or address.
        cacert: File of a certificate authority to trust in addition to the system's.

    Raises:
        UserError: It cannot be read, or is not a saved run.
    """
    address = os.fspath(source)
    source = _without_password(address)
    try:
        # Without a name, none of it outlives its use: bytes, text and values are large.
        saved = json.loads(
            _text(_fetched(address, cacert) if re.match(r"https?://", address) else _read(address), source), parse_constant=_refused
        )
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError):
        saved = None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise UserError(f"{source} is not a history of torch_grad_exporter; exporter.save(path) writes one")
    if saved.get("version") != VERSION:
        raise UserError(f"{source} has version {saved.get('version')!r:.40} of the format; this program reads version {VERSION}")
    try:
        check(saved)
    except KeyError as error:
        raise UserError(f"{source} is damaged: it has no {error.args[0]!r:.100}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{source} is damaged: {error!s:.200}") from None
    return saved


def _refused(name: str) -> Never:
    """Refuse what only Python accepts as JSON: the page could not read it."""
    raise ValueError(f"{name} is not JSON")


def _without_password(source: str) -> str:
    """Return what messages call a source: they end up in logs, and in files that CI keeps."""
    return re.sub(r"^(https?://).*@", r"\1", source, flags=re.DOTALL)


def _collected(chunks: Iterable[bytes], source: str) -> bytearray:
    """Return all chunks in one. Raises `UserError` if they become too many, or take too long."""
    content, give_up_at = bytearray(), time.monotonic() + TIMEOUT
    for chunk in chunks:
        content += chunk
        if len(content) > MOST_BYTES:
            raise UserError(f"{source} is larger than {MOST_BYTES // 2**20} MiB, so it is not a history")
        if time.monotonic() > give_up_at:
            raise UserError(f"{source} did not end within {TIMEOUT:g} s")
    return content


def _text(content: bytearray, source: str) -> str:
    """Return the JSON. Raises `UserError` if its values would take far more memory than those of any history."""
    if content.startswith(b"\x1f\x8b"):
        content = _collected(_unpacked(content), f"{source}, unpacked,")
    if not content.isascii() and len(content) > MOST_BYTES // 4:  # a character beyond ASCII makes all of a text 4 times as large
        raise UserError(f"{source} is larger than {MOST_BYTES // 2**22} MiB and not ASCII, unlike what exporter.save(path) writes")
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES or content.count(b'"') > 4 * MOST_VALUES:
        raise UserError(f"{source} has more than {MOST_VALUES:,} values, so it is not a history")
    if any(text.end(1) - text.start(1) > LONGEST for text in TEXTS.finditer(content)):
        raise UserError(f"{source} has a text of more than {LONGEST // 2**10} KiB, so it is not a history")
    return content.decode("utf-8-sig")


def _unpacked(content: bytearray) -> Iterator[bytes]:
    """Yield what was compressed, a part at a time. Raises `EOFError` if its end is missing."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        yield from iter(partial(file.read, CHUNK), b"")


def _read(source: str) -> bytearray:
    path = Path(source)
    try:
        if path.exists() and not path.is_file():  # a pipe may never answer, a device never ends
            raise UserError(f"cannot read {source}: it is a folder, a pipe or a device, not a file")
        with path.open("rb") as file:
            return _collected(iter(partial(file.read, CHUNK), b""), source)
    except OSError as error:
        address = f"; for an address write http://{source}" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", source) else ""
        raise UserError(f"cannot read {source}: {error.strerror or error}{address}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirection: the password is only for the server that was named."""

    def redirect_request(self, *_arguments: object) -> None:
        """Return None, which makes it an error."""


def _fetched(address: str, cacert: str | None) -> bytearray:
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - raises, too
    except ValueError:  # whose text may have the password in it
        raise UserError(f"{_without_password(address)} is not an address such as http://localhost:9100") from None
    path = re.sub(r"(/metrics)?/?$", "", parts.path)
    where = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path, query="", fragment="").geturl()
    headers = {"Accept-Encoding": "gzip"}
    if parts.username is not None:
        credentials = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
        headers["Authorization"] = f"Basic {credentials}"
    request = urllib.request.Request(f"{where}/api/v1/saved", headers=headers)  # noqa: S310 - http and https alone come here
    host, proxy = parts.hostname or "", _proxy(parts.scheme, parts.hostname or "")
    proxies = urllib.request.ProxyHandler({} if proxy is None else {parts.scheme: proxy})
    opener = urllib.request.build_opener(_NoRedirects, proxies, urllib.request.HTTPSHandler(context=_context(cacert)))
    # A proxy's answer looks like the exporter's, so the message names it in any case.
    via = "" if proxy is None else f", asked through the proxy {proxy.rpartition('@')[2]},"
    direct = "" if proxy is None else f"; to ask the exporter itself, set no_proxy={host}"
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            return _collected(iter(partial(answer.read1, CHUNK), b""), where)
    except urllib.error.HTTPError as error:
        fix = _fix(error) or direct
        error.close()
        raise UserError(f"{where}{via} answers {error.code} {error.reason}{fix}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # urllib's own are, too
        fix = "; --cacert names the authority of its certificate" if "CERTIFICATE_VERIFY_FAILED" in str(error) else direct
        raise UserError(f"{where}{via} does not answer: {error}{fix}") from None


def _proxy(scheme: str, host: str) -> str | None:
    """Return the proxy for an address, None for none. One that exporters of this host are asked through could not find them."""
    local = host == "localhost" or host.endswith(".localhost")
    with contextlib.suppress(ValueError):
        local |= ipaddress.ip_address(host).is_loopback
    return None if local or urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)


def _fix(error: urllib.error.HTTPError) -> str:
    """Return what can be done about an answer."""
    if error.code == HTTPStatus.UNAUTHORIZED:
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
        raise UserError(f"cannot read certificates from {cacert}: {error}") from None
    return context
