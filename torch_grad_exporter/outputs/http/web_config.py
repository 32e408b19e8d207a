"""A web configuration file that is followed while the server runs.

Guarantees: what is in force is the last state of the files that could be loaded; a state that could not is
reported once; protection that was there at the start (TLS, verified client certificates, users) is never lost by a
change, as a file that is just being written may look empty.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_grad_exporter.errors import ErrorLog, Guard, say
from torch_grad_exporter.outputs.http.tls import Tls

_CHECK_SECONDS = 1.0

_log = logging.getLogger("torch_grad_exporter")

# When and how big a file is, and which one: enough to see that it was written anew. None: it is not there.
_Stamp = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The section `rate_limit`: one request every `interval` seconds, after `burst` at once."""

    interval: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebSettings:
    """A whole web configuration with all that its files held.

    `tls`: `None` where plain HTTP is served; `headers` go on every response, `users` are names and bcrypt hashes.
    """

    tls: Tls | None = None
    headers: tuple[tuple[str, str], ...] = ()
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    rate_limit: RateLimit | None = None


class WebConfigFile:
    """The configuration in force, `current`, which may be read from any thread at any time."""

    def __init__(self, path: str) -> None:
        """Reads everything. Raises ValueError with the file, the key and the fix, also where a package is missing."""
        self.path = os.path.abspath(path)  # noqa: PTH100 - the same file after a chdir, and symbolic links stay
        self._seen: dict[str, _Stamp] = {}
        self._reloading = threading.Lock()
        self._check_again_at: float | None = None
        self._refused = False
        self.current = self._load()

    @property
    def authenticates(self) -> bool:
        """Whether clients have to say who they are, by password or certificate."""
        return any(_protection(self.current).values())

    def due(self, now: float) -> bool:
        """Whether it is time for a `reload`: once in a second at most. By one thread only."""
        if self._check_again_at is not None and now < self._check_again_at:
            return False
        self._check_again_at = now + _CHECK_SECONDS
        return True

    def reload(self, errors: ErrorLog) -> None:
        """Load what has changed since the last check; a failure is logged, and counted under `web_config`.

        Reads files, which may be slow; while one thread does so, others return at once.
        """

        def refused(error: Exception) -> None:
            self._refused = True
            errors.tell("web_config", error)

        if not self._reloading.acquire(blocking=False):
            return
        try:
            Guard(refused)(self._follow)  # the server keeps the configuration that it has
        finally:
            self._reloading.release()

    def _follow(self) -> None:
        """Loads what has changed, if anything has."""
        if any(_stamp(path) != seen for path, seen in self._seen.items()):
            loaded = self._load()
            _refuse_weaker(self.path, self.current, loaded)
            self.current = loaded
            if self._refused:
                self._refused = False
                say(_log, logging.WARNING, "%s: the web configuration is in force again as it stands in its files", self.path)

    def _load(self) -> WebSettings:
        # Stamped before they are read: what changes meanwhile is then another change. If this fails, the files that were
        # watched before stay watched, and with them those that the new state names: one of them may appear later.
        self._seen = {path: _stamp(path) for path in (self.path, *self._seen)}
        named: dict[str, _Stamp] = {}

        def names(path: str) -> None:
            named[path] = self._seen[path] = _stamp(path)

        settings = _parse(self.path, names)
        self._seen = {self.path: self._seen[self.path], **named}
        return settings


def _parse(path: str, names: Callable[[str], None]) -> WebSettings:
    try:
        import bcrypt  # noqa: F401, PLC0415 - optional; its absence is to show now and not at the first request

        from torch_grad_exporter.outputs.http import web_yaml  # noqa: PLC0415 - needs PyYAML, which is optional
    except ImportError as error:
        raise ValueError(
            f"{path}: a web configuration needs the package {error.name}; install it with pip install 'torch-grad-exporter[web]'"
        ) from None
    return web_yaml.parse(path, names)


def _stamp(path: str) -> _Stamp:
    try:
        found = os.stat(path)  # noqa: PTH116 - a string here, as everywhere in this file
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _refuse_weaker(path: str, old: WebSettings, new: WebSettings) -> None:
    """Raises ValueError where the new state protects less than the old one, or in another way."""
    if (old.tls is None) is not (new.tls is None):
        raise ValueError(f"{path}: TLS is not turned on or off while running; start the training again for that")
    before, after = _protection(old), _protection(new)
    lost = [name for name, there in before.items() if there and not after[name]]
    if lost:
        raise ValueError(f"{path}: {', '.join(lost)} not removed while running; start the training again for that")


def _protection(settings: WebSettings) -> dict[str, bool]:
    tls = settings.tls
    return {
        "basic_auth_users are": bool(settings.users),
        "required client certificates are": tls is not None and tls.context.verify_mode is ssl.CERT_REQUIRED,
        "client_allowed_sans are": tls is not None and tls.allowed_sans is not None,
    }
