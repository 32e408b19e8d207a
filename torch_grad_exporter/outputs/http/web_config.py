"""A web configuration file that is followed while the server runs.

The last state of the files that could be loaded is in force; a state that could not is reported once. No change removes protection
that was there at the start (TLS, verified client certificates, users), since a file may look empty while it is written.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_grad_exporter.errors import ErrorLog, caught, warn

_CHECK_SECONDS = 1.0

# Time, size and inode of a file: enough to see that it was written again. None: it is not there.
_Stamp = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS of connections: the context, and the names of clients that are admitted, None for all."""

    context: ssl.SSLContext
    allowed_sans: frozenset[str] | None = None

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """Return the socket with TLS, before its handshake. The old one is used up, also where this raises OSError."""
        return self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def admits(self, sock: socket.socket) -> bool:
        """Return whether the client's verified certificate has one of the names, after the handshake."""
        if self.allowed_sans is None:
            return True
        try:
            certificate = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
        except ValueError:  # names that are not text
            return False
        names: Any = (certificate or {}).get("subjectAltName", ())
        return any((_short(name) if kind == "IP Address" else name) in self.allowed_sans for kind, name in names)


def _short(address: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address.strip()))
    return address


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The section `rate_limit`: one request every `interval` seconds, after `burst` at once."""

    interval: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebSettings:
    """A whole web configuration.

    Attributes:
        tls: None for plain HTTP.
        headers: Of every response.
        users: Bcrypt hashes by name.
        rate_limit: None for no limit.
    """

    tls: Tls | None = None
    headers: tuple[tuple[str, str], ...] = ()
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    rate_limit: RateLimit | None = None


class WatchedFiles:
    """Reads files, and knows which of all that were ever read have changed since the last `begin`."""

    def __init__(self) -> None:
        self._stamps: dict[str, _Stamp] = {}

    def begin(self) -> None:
        """Take the present state of all files as the one that is read next, whether or not that succeeds."""
        self._stamps = {path: _stamp(path) for path in self._stamps}

    def read(self, path: str) -> bytes:
        """Return the content of a file. Raises OSError."""
        self._stamps[path] = _stamp(path)  # before it is read: a change meanwhile is then another change
        return Path(path).read_bytes()

    def changed(self) -> bool:
        """Return whether any file has changed."""
        return any(_stamp(path) != stamp for path, stamp in self._stamps.items())


def _stamp(path: str) -> _Stamp:
    try:
        status = os.stat(path)  # noqa: PTH116 - a string here, as everywhere in this file
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


class WebConfigFile:
    """The configuration in force, `current`, which may be read from any thread at any time.

    Args:
        path: Of the file; everything is read at once.

    Raises:
        ValueError: The file, the key and the fix, also where a package is missing.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)  # noqa: PTH100 - the same file after a chdir, and symbolic links stay
        self._files = WatchedFiles()
        self._reloading = threading.Lock()
        self._next_check: float | None = None
        self._refused = False
        self.current = self._load()

    @property
    def authenticates(self) -> bool:
        """Whether clients must authenticate, by password or certificate."""
        return any(_protection(self.current).values())

    def due(self, now: float) -> bool:
        """Return whether it is time for a `reload`: once in a second at most. By one thread only."""
        if self._next_check is not None and now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        return True

    def reload(self, errors: ErrorLog) -> None:
        """Load what has changed since the last check; a failure is logged, and counted under `web_config`.

        Reads files, which may be slow; while one thread does so, others return at once.
        """
        if not self._reloading.acquire(blocking=False):
            return
        try:
            failure = caught(self._follow)
            if failure is not None:  # the server keeps the configuration that it has
                self._refused = True
                errors.report("web_config", failure)
        finally:
            self._reloading.release()

    def _follow(self) -> None:
        if self._files.changed():
            loaded = self._load()
            if (self.current.tls is None) is not (loaded.tls is None):
                raise ValueError(f"{self.path}: TLS is not turned on or off while running; start the training again for that")
            after = _protection(loaded)
            if lost := [name for name, there in _protection(self.current).items() if there and not after[name]]:
                raise ValueError(f"{self.path}: {', '.join(lost)} not removed while running; start the training again for that")
            self.current = loaded
            if self._refused:
                self._refused = False
                warn("%s: web configuration reloaded", self.path)

    def _load(self) -> WebSettings:
        try:
            import bcrypt  # noqa: F401, PLC0415 - optional; its absence must show now and not at the first request

            from torch_grad_exporter.outputs.http import web_yaml  # noqa: PLC0415 - needs PyYAML, which is optional
        except ImportError as error:
            needs = "a web configuration needs PyYAML, msgspec and bcrypt"
            raise ValueError(f"{self.path}: {needs}, and {error.name} is missing; pip install pyyaml msgspec bcrypt") from None
        self._files.begin()
        return web_yaml.parse(self.path, self._files)


def _protection(settings: WebSettings) -> dict[str, bool]:
    tls = settings.tls
    return {
        "basic_auth_users are": bool(settings.users),
        "required client certificates are": tls is not None and tls.context.verify_mode is ssl.CERT_REQUIRED,
        "client_allowed_sans are": tls is not None and tls.allowed_sans is not None,
    }
