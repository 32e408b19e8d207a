"""Receiver: where notifications are posted. Its address and headers are secrets, which no error and no log line shows."""

from __future__ import annotations

import contextlib
import http
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from torch_grad_exporter.actions.notify.notification import SendError
from torch_grad_exporter.arguments import check_number, shown
from torch_grad_exporter.outputs.own_requests import AGENT, mute, unlogged, with_path

HIDDEN = "<hidden>"  # shown in place of an address

LONGEST_TIMEOUT = 60.0

_PASSING = frozenset({408, 429})  # statuses below 500 after which another try may succeed

_EXPECTED = "expected an address that begins with https:// or http:// and names a host"


class Receiver:
    """A receiver of HTTP posts. For one thread at a time.

    Args:
        url: The address.
        url_file: A file with the address, which is read for each request, so that it can be replaced.
        variable: The environment variable with the address, for when neither is given.
        headers: Headers of each request.
        timeout: Seconds for a request.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is wrong. No error contains the address or a header's value.
    """

    def __init__(self, url: object, url_file: object, variable: str, *, headers: object, timeout: object) -> None:
        self.timeout = check_number(
            f"timeout={hidden_address(timeout)}", timeout, above=0.0, most=LONGEST_TIMEOUT, what="a number of seconds", example=5
        )
        self._headers = _headers(headers)
        if url is not None and url_file is not None:
            raise ValueError(f"url={HIDDEN}, url_file={hidden_address(url_file)}: give one of them")
        self._file = os.fspath(url_file) if isinstance(url_file, str | os.PathLike) else None
        if url_file is not None and not (isinstance(self._file, str) and self._file):
            raise TypeError(f"url_file={hidden_address(url_file)}: expected the path of a file with the address in it")
        source = "url"
        if url is None and url_file is None:
            url, source = os.environ.get(variable, "").strip() or None, f"environment variable {variable}"
            if url is None:
                raise ValueError(f"url=None: {_EXPECTED}; or give url_file=, or set the {source}")
        self._url = "" if url is None else _address(url, source)
        self._current_url()
        mute("urllib3")

    def post(self, body: bytes, kind: str, seconds: float, path: str = "") -> None:
        """Post a body of a content type. `path` is appended to the address unless it is there.

        Each request opens a connection: problems are rare, and an old connection is often dead.

        Raises:
            SendError: The receiver did not take it within `seconds`. The message is in words of our own,
                since those of libraries contain the address.
        """
        seconds = min(self.timeout, seconds)
        headers = {"User-Agent": AGENT, "Content-Type": kind, "Connection": "close", **self._headers}
        try:
            url = self._current_url()
        except ValueError as error:  # the file was right at the start
            raise SendError(str(error)) from None
        try:
            with unlogged(), requests.Session() as session:
                user = requests.utils.get_auth_from_url(url)
                chosen = any(name.lower() == "authorization" for name in headers)
                # An authentication that changes nothing keeps a password of ~/.netrc out.
                session.auth = user if any(user) and not chosen else lambda request: request
                url = with_path(url, path) if path else url
                # The status says all, so the content of the answer is not read.
                with session.post(url, body, headers=headers, timeout=seconds, allow_redirects=False, stream=True) as response:
                    return _check(response)
        except SendError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it may contain the address
            failed = _in_our_words(error, seconds)
        raise failed  # outside of `except`, so that the library's error is not its context

    def _current_url(self) -> str:
        if self._file is None:
            return self._url
        try:
            content = Path(self._file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = type(error).__name__
        else:
            return _address(content, f"url_file={hidden_address(self._file)}, its content")
        raise ValueError(f"url_file={hidden_address(self._file)}: cannot be read: {reason}; give a file with the address in it")


def hidden_address(value: object) -> str:
    """Return an argument as an error shows it, hidden if it may be an address in the wrong place."""
    return HIDDEN if isinstance(value, str) and "//" in value else shown(value)


def _check(response: requests.Response) -> None:
    """Raise `SendError` unless an answer is a success."""
    status = response.status_code
    if 200 <= status < 300:
        return
    phrase = ""
    with contextlib.suppress(ValueError):
        phrase = f" {http.HTTPStatus(status).phrase}"
    if 300 <= status < 400:
        raise SendError(f"HTTP {status}{phrase}: a redirect, which is not followed; give the address that it leads to")
    pause = None
    with contextlib.suppress(InvalidHeader):
        pause = Retry().get_retry_after(response.raw)
    raise SendError(f"HTTP {status}{phrase}", passing=status >= 500 or status in _PASSING, pause=pause)


def _in_our_words(error: Exception, seconds: float) -> SendError:
    if isinstance(error, requests.exceptions.SSLError):
        return SendError("no secure connection; does the receiver's certificate verify on this host?")
    if isinstance(error, requests.Timeout):
        return SendError(f"no answer within {seconds:.3g} s", passing=True)
    if isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError):
        first: BaseException = error
        while (cause := first.__cause__ or first.__context__) is not None:
            first = cause
        return SendError(f"no connection, or it broke ({type(first).__name__})", passing=True)
    return SendError(type(error).__name__, passing=isinstance(error, OSError))


# Checks of arguments


def _address(url: object, source: str) -> str:
    """Return an address if it is one. The error does not say what is wrong with it: that may be its secret part."""
    if not isinstance(url, str):
        raise TypeError(f"{source}={type(url).__name__}: {_EXPECTED}")
    right = url.isascii() and all(" " < character < "\x7f" for character in url)
    try:
        parts = urlsplit(url)
        right = right and parts.scheme.lower() in ("http", "https") and bool(parts.hostname) and parts.port != 0
        requests.Request("POST", url).prepare()
    except ValueError:  # also those of requests
        right = False
    if not right:
        raise ValueError(f"{source}={HIDDEN}: {_EXPECTED}")
    return url


def _headers(headers: object) -> Mapping[str, str]:
    """Return headers that HTTP can carry. An error names the header, not its value."""
    expected = "expected a mapping of names to texts, such as {'Authorization': 'Bearer ...'}"
    if headers is None:
        return {}
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise TypeError(f"headers={type(headers).__name__}: {expected}")
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ValueError(f"headers: {HIDDEN} is not a name of a header; {expected}")
        if not isinstance(value, str):
            raise TypeError(f"headers[{name!r}]={type(value).__name__}: {expected}")
        if not re.fullmatch(r"(?:[!-~\x80-\xff](?:[ \t!-~\x80-\xff]*[!-~\x80-\xff])?)?", value):
            raise ValueError(f"headers[{name!r}]={HIDDEN}: it has a line break, a space at its end or a sign that no header takes")
    return dict(cast("Mapping[str, str]", headers))
