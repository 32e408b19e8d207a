"""Requests to a receiver over HTTP: one try each, within a time. Nothing of an address, a header or an answer is ever told."""

from __future__ import annotations

import contextlib
import email.utils
import http
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import requests

from torch_grad_exporter.actions.notify.address import Address
from torch_grad_exporter.actions.notify.sending import SendError
from torch_grad_exporter.errors import caught
from torch_grad_exporter.lifecycle import BackgroundThread
from torch_grad_exporter.outputs.otlp.delivery import AGENT, mute, unheard

LEFT_BEHIND = 3
"""Requests of a receiver that hang, at most; while there are so many, none is begun."""

GRACE = 0.25
"""Seconds that a request may take in addition to its timeout, until it is left behind."""

SLICE = 0.05
"""Seconds between two looks at whether the run ends."""

_PASSING = frozenset({408, 429})
"""The statuses below 500 that do not concern the request itself."""


class Poster:
    """Posts to one address, with these headers, in so many seconds. For one thread at a time."""

    def __init__(self, address: Address, headers: Mapping[str, str], timeout: float, path: str = "") -> None:
        self._address = address
        self._headers = headers
        self._timeout = timeout
        self._path = path
        self._hanging: list[BackgroundThread] = []
        mute("urllib3")

    def post(self, body: bytes, kind: str, left: Callable[[], float]) -> None:
        """Sends a body of a content type. Raises `SendError`. `left`: the seconds that there are, which may become fewer meanwhile.

        A connection of its own for each: problems are rare, and a connection that was open for hours is often dead. A receiver
        that sends its answer byte by byte could take any time: the request is left behind then, with its thread.
        """
        self._hanging = [thread for thread in self._hanging if thread.running]
        if len(self._hanging) >= LEFT_BEHIND:
            raise SendError(f"{LEFT_BEHIND} earlier requests hang", passing=True)
        seconds = min(self._timeout, left())
        outcome: list[SendError | None] = []

        def attempt() -> None:
            error = caught(self._attempt, body, kind, seconds)
            outcome.append(error if error is None or isinstance(error, SendError) else _said(error, seconds))

        thread, begun = BackgroundThread("notify-request", attempt), time.monotonic()
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had; Python 3.12 has none for what ends at its exit
            attempt()
        while thread.running and time.monotonic() - begun < seconds + GRACE and left() > 0:
            thread.join(SLICE)
        if not outcome:
            self._hanging.append(thread)
            raise SendError(_late(seconds) if left() > 0 else "no answer before the run ended", passing=True)
        if outcome[0] is not None:
            raise outcome[0]

    def _attempt(self, body: bytes, kind: str, seconds: float) -> None:
        try:
            url = self._address.text()
        except ValueError as error:  # a file that was right at the start
            raise SendError(str(error)) from None
        if self._path:
            parts = urlsplit(url)
            url = parts._replace(path=parts.path.rstrip("/").removesuffix(self._path) + self._path).geturl()
        headers = {"User-Agent": AGENT, "Content-Type": kind, "Connection": "close", **self._headers}
        with unheard(), requests.Session() as session:
            # Else a password from `~/.netrc` would replace what was chosen.
            user = requests.utils.get_auth_from_url(url)
            named = any(name.lower() == "authorization" for name in headers)
            session.auth = user if any(user) and not named else _as_it_is
            # The answer's status says all; its content is not read.
            with session.post(url, body, headers=headers, timeout=seconds, allow_redirects=False, stream=True) as response:
                _judge(response)


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _judge(response: requests.Response) -> None:
    """Raises `SendError` where an answer is no success."""
    status = response.status_code
    if 200 <= status < 300:
        return
    phrase = ""
    with contextlib.suppress(ValueError):
        phrase = f" {http.HTTPStatus(status).phrase}"
    if 300 <= status < 400:
        raise SendError(f"HTTP {status}{phrase}: a redirect, which is not followed; give the address that it leads to")
    pause = retry_after(response.headers.get("Retry-After", ""))
    raise SendError(f"HTTP {status}{phrase}", passing=status >= 500 or status in _PASSING, pause=pause)


def retry_after(text: str) -> float | None:
    """Return the seconds until the next try, which a receiver gives as a number or as a date; None if it gives none."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None


def _late(seconds: float) -> str:
    return f"no answer within {seconds:.3g} s"


def _said(error: Exception, seconds: float) -> SendError:
    """What is wrong, in words of our own: those of libraries have the address in them."""
    if isinstance(error, requests.exceptions.SSLError):
        return SendError("no secure connection; does the receiver's certificate verify on this host?")
    if isinstance(error, requests.Timeout):
        return SendError(_late(seconds), passing=True)
    if isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError):
        return SendError(f"no connection, or none that lasted ({_cause(error)})", passing=True)
    return SendError(type(error).__name__, passing=isinstance(error, OSError))


def _cause(error: BaseException) -> str:
    """The kind of the first error of all, such as `ConnectionRefusedError`."""
    seen = {id(error)}
    while (before := error.__cause__ or error.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        error = before
    return type(error).__name__
