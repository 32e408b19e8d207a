"""Loads a saved run from a file or from a running exporter, and checks that it is one.

A file has at most `MOST_BYTES`, plain and unpacked, and `MOST_VALUES`: a history of 3,000 layers with all options has 28 MB and
500,000 values. A value takes up to 100 bytes of memory.
"""

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
import urllib.error
import urllib.request
import zlib
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Never
from urllib.parse import unquote, urlsplit

from torch_grad_exporter.errors import UserError
from torch_grad_exporter.outputs.live.saved import FORMAT, VERSION, Saved, check

# Seconds for each part of the answer of a running exporter.
TIMEOUT = 30.0

MOST_BYTES, MOST_VALUES = 48 * 2**20, 1_000_000


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
    content = _fetched(address, cacert) if re.match(r"https?://", address) else _read(address)
    try:
        if content.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = _limited(file, f"{source}, unpacked,")
        if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
            raise UserError(f"{source} has more than {MOST_VALUES:,} values, so it is not a history")
        saved = json.loads(content.decode("utf-8-sig"), parse_constant=_refused)
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


def _limited(file: BinaryIO | http.client.HTTPResponse | gzip.GzipFile, source: str) -> bytes:
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{source} is larger than {MOST_BYTES // 2**20} MiB, so it is not a history")
    return content


def _read(source: str) -> bytes:
    path = Path(source)
    try:
        if path.exists() and not path.is_file():  # a pipe may never answer, a device never ends
            raise UserError(f"cannot read {source}: it is a folder, a pipe or a device, not a file")
        with path.open("rb") as file:
            return _limited(file, source)
    except OSError as error:
        address = f"; for an address write http://{source}" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", source) else ""
        raise UserError(f"cannot read {source}: {error.strerror or error}{address}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirection: the password is only for the server that was named."""

    def redirect_request(self, *_arguments: object) -> None:
        """Return None, which makes it an error."""


def _fetched(address: str, cacert: str | None) -> bytes:
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
    context = ssl.create_default_context()
    try:
        if cacert is not None:
            context.load_verify_locations(cacert)
    except OSError as error:  # ssl's own are, too
        raise UserError(f"cannot read certificates from {cacert}: {error}") from None
    host = parts.hostname or ""
    direct = _is_local(host) or urllib.request.proxy_bypass(host)  # a proxy elsewhere would not find an exporter of this host
    proxy = None if direct else urllib.request.getproxies().get(parts.scheme)
    handlers = (
        _NoRedirects,
        urllib.request.HTTPSHandler(context=context),
        urllib.request.ProxyHandler({parts.scheme: proxy} if proxy else {}),
    )
    # A proxy's answer looks like the exporter's.
    via = f", asked through the proxy {proxy.rpartition('@')[2]}," if proxy else ""
    help_ = f"; to ask the exporter itself, set no_proxy={host}" if proxy else ""
    request = urllib.request.Request(f"{where}/api/v1/saved", headers=headers)  # noqa: S310 - http and https alone come here
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as answer:
            return _limited(answer, where)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.UNAUTHORIZED:
            help_ = "; give user and password in the address: https://user:password@host:9100"
        elif 300 <= error.code < 400:
            help_ = f", which is not followed; it points to {error.headers.get('Location', 'nothing')[:200]!r}"
        raise UserError(f"{where}{via} answers {error.code} {error.reason}{help_}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # urllib's own are, too
        help_ = "; --cacert names the authority of its certificate" if "CERTIFICATE_VERIFY_FAILED" in str(error) else help_
        raise UserError(f"{where}{via} does not answer: {error}{help_}") from None


def _is_local(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
