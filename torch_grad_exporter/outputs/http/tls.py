"""TLS of the exporter's own server: the names that the file format uses, the context, and what a socket needs.

TLS 1.2 is the minimum. Nothing here waits for a client.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TLS13_CIPHERS = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
"""Cipher suites of TLS 1.3, by Go's names. All three are always on, as in Go."""

CIPHERS: Mapping[str, str] = {
    f"TLS_ECDHE_{key}_WITH_{name}": f"ECDHE-{key}-{openssl}"
    for key in ("ECDSA", "RSA")
    for name, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
}
"""OpenSSL's names of the cipher suites of TLS 1.2 that Go counts as secure, by Go's names."""

CURVES: Mapping[str, str] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
"""OpenSSL's names of the curves, by Go's names."""

SEVERAL_CURVES = hasattr(ssl.SSLContext, "set_groups")
"""Whether this Python can offer more than one curve of our choice."""

_BEGIN = "-----BEGIN CERTIFICATE-----"
_CERTIFICATE = re.compile(rf"{_BEGIN}.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pem:
    """PEM text where it is written: in the configuration itself (`text`) or in a file of its own (`path`).

    `place` is the file, line and key that name it, for error messages.
    """

    place: str
    path: str = ""
    text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Tls:
    """What a connection needs: the context, and which clients are allowed: any, or those with one of these names."""

    context: ssl.SSLContext
    allowed_sans: frozenset[str] | None = None

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """The socket with TLS, the handshake yet to be done. The old one is used up, also where this raises OSError."""
        return self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def admits(self, sock: socket.socket) -> bool:
        """Whether the client's verified certificate, if it has to be a certain one, is that one. After the handshake."""
        if self.allowed_sans is None:
            return True
        try:
            certificate = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
        except ValueError:  # names that are no text
            return False
        return not self.allowed_sans.isdisjoint(_names(certificate or {}))


def load(
    cert: Pem,
    key: Pem,
    *,
    place: str,
    verify: ssl.VerifyMode,
    client_ca: Pem | None,
    allowed_sans: frozenset[str] | None,
    versions: tuple[ssl.TLSVersion, ssl.TLSVersion],
    ciphers: Sequence[str],
    curves: Sequence[str],
    server_preference: bool,
) -> Tls:
    """A TLS section, put together from what it names, with OpenSSL's names. Raises ValueError, naming the place and the fix.

    `ciphers` are those of TLS 1.2; none leave the choice to Python, as do no curves. `client_ca` goes with a `verify`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = versions
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Each scrape is a connection of its own and asks for no ticket; sending one may only meet a client that has left.
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    if not server_preference:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    try:
        if ciphers:
            context.set_ciphers(":".join(ciphers))
        if len(curves) == 1:
            context.set_ecdh_curve(curves[0])
        elif curves:
            newer: Any = context  # than what the types of our lowest Python know
            newer.set_groups(":".join(curves))
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{place}: this Python's OpenSSL has not the ciphers or curves that are named: {error}") from None
    _load_certificate(context, cert, key)
    if client_ca is not None:
        context.verify_mode = verify
        # What the file lists is trusted, be it a root, an authority below one or a client's own certificate: as in Go.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _load_authorities(context, client_ca)
    return Tls(context, allowed_sans)


def _load_certificate(context: ssl.SSLContext, cert: Pem, key: Pem) -> None:
    if _BEGIN not in _text_of(cert):
        raise ValueError(f"{cert.place} holds no certificate; give a PEM file with '{_BEGIN}'")
    if "PRIVATE KEY-----" not in _text_of(key):
        raise ValueError(f"{key.place} holds no private key; give a PEM file with '-----BEGIN PRIVATE KEY-----'")

    def refuse() -> str:
        # Without this OpenSSL would ask on the terminal, and the training would wait.
        raise ValueError(f"{key.place} is encrypted; decrypt it, e.g. with `openssl pkey -in KEY -out NEW`")

    try:
        with _file_of(cert) as cert_path, _file_of(key) as key_path:
            context.load_cert_chain(cert_path, key_path, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key.place} does not belong to the certificate; give the certificate's own key") from None
        raise ValueError(f"{cert.place} and its key cannot be used ({error.reason}); both have to be intact PEM") from None
    except OSError as error:
        raise ValueError(f"{cert.place} and its key cannot be used: {error.strerror}") from None


def _load_authorities(context: ssl.SSLContext, pem: Pem) -> None:
    # Taken out of what surrounds them: bundles have comments, in any language.
    found = _CERTIFICATE.findall(_text_of(pem))
    if not found:
        raise ValueError(f"{pem.place} holds no certificate; give the CA's certificates in PEM")
    try:
        context.load_verify_locations(cadata="\n".join(found))
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not PEM"
        raise ValueError(f"{pem.place} has a certificate that cannot be read ({reason}); all have to be intact PEM") from None


def _text_of(pem: Pem) -> str:
    if not pem.path:
        return pem.text
    try:
        return Path(pem.path).read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(
            f"{pem.place}: {pem.path} cannot be read: {error.strerror}; give the path of a readable PEM file"
        ) from None


@contextlib.contextmanager
def _file_of(pem: Pem) -> Iterator[str]:
    """A path at which OpenSSL finds the text: a key in the configuration goes to no disk where there is another way."""
    if pem.path:
        yield pem.path
        return
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
        with os.fdopen(os.memfd_create("pem"), "w") as file:
            file.write(pem.text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.TemporaryDirectory() as directory:  # readable by this user only, and removed at once
        path = Path(directory, "pem")
        path.write_text(pem.text)
        yield str(path)


def _names(certificate: Mapping[str, Any]) -> set[str]:
    """The subject alternative names of a certificate, addresses in their short form."""
    return {_short(value) if kind == "IP Address" else value for kind, value in certificate.get("subjectAltName", ())}


def _short(address: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address.strip()))
    return address
