"""The content of a web configuration file, checked and complete: the seam between reading it and acting on it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pem:
    """PEM text where it is written: in the configuration itself (`text`) or in a file of its own (`path`).

    `place` is the file, line and key that name it, for error messages.
    """

    place: str
    path: str = ""
    text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """The section `tls_server_config`, with the names that OpenSSL uses; `place` is where it stands.

    `ciphers` are those of TLS 1.2; `None` leaves the choice to Python. `client_ca` is there exactly where
    `verify` is not `CERT_NONE`. Without `allowed_sans` any certificate of the CA is accepted.
    """

    place: str
    cert: Pem
    key: Pem
    verify: ssl.VerifyMode = ssl.CERT_NONE
    client_ca: Pem | None = None
    allowed_sans: frozenset[str] | None = None
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ciphers: tuple[str, ...] | None = None
    server_preference: bool = True
    curves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The section `rate_limit`: one request every `interval` seconds, after `burst` at once."""

    interval: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebSettings:
    """A whole web configuration; `headers` go on every response, `users` are names and bcrypt hashes."""

    tls: TlsSettings | None = None
    headers: tuple[tuple[str, str], ...] = ()
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    rate_limit: RateLimit | None = None

    def files(self) -> Iterator[str]:
        """The other files that the configuration names."""
        if self.tls is not None:
            for pem in (self.tls.cert, self.tls.key, self.tls.client_ca):
                if pem is not None and pem.path:
                    yield pem.path
