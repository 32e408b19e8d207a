"""TLS of the server: the section `tls_server_config` of the web configuration, and the context that it stands for.

Names are those of Go, which Prometheus' exporter-toolkit uses. TLS 1.2 is the minimum. Every error is a `ValueError` that names the
key and the fix, and shows no key.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torch_grad_exporter.outputs.http.web_config import Tls, WatchedFiles

SECTION = "tls_server_config"

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    # Asks for a certificate and checks nothing in it: not asking is equivalent.
    "RequestClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

# OpenSSL's names of the cipher suites of TLS 1.2 that Go counts as secure. Those of TLS 1.3 are always on, as in Go.
CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_{name}": f"ECDHE-{key}-{openssl}"
    for key in ("ECDSA", "RSA")
    for name, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
} | dict.fromkeys(("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"), "")

CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}

_Value = TypeVar("_Value")

_BEGIN = "-----BEGIN CERTIFICATE-----"
_CERTIFICATE = re.compile(rf"{_BEGIN}.+?-----END CERTIFICATE-----", re.DOTALL)


class TlsSection(msgspec.Struct, forbid_unknown_fields=True):
    """The section `tls_server_config`."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = "NoClientCert"
    client_allowed_sans: list[str] | None = None
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: list[str] = []
    prefer_server_cipher_suites: bool = True
    curve_preferences: list[str] = []


@dataclass(frozen=True, slots=True)
class Pem:
    """PEM text. `place`: the key that names it, for errors. `path`: its file, empty where it is in the configuration itself."""

    place: str
    path: str
    text: str = field(repr=False)

    @contextlib.contextmanager
    def file(self) -> Iterator[str]:
        """Yield a path at which OpenSSL finds the text."""
        if self.path:
            yield self.path
            return
        if (memory := _memory_file()) is not None:  # a key goes to no disk
            with os.fdopen(memory, "w") as file:
                file.write(self.text)
                file.flush()
                yield f"/proc/self/fd/{memory}"
            return
        with tempfile.TemporaryDirectory() as directory:  # readable by this user only, and removed at once
            path = Path(directory, "pem")
            path.write_text(self.text)
            yield str(path)


def _memory_file() -> int | None:
    """Return the descriptor of a file in memory, None where there is none, or a sandbox such as seccomp denies it."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
        with contextlib.suppress(OSError):
            return os.memfd_create("pem")
    return None


def load(section: TlsSection, directory: Path, files: WatchedFiles) -> Tls:
    """Return the TLS of a section.

    Args:
        section: Of the configuration.
        directory: Of the configuration, which paths are relative to.
        files: Read the files that it names.

    Raises:
        ValueError: The key and the fix.
    """
    cert, key, authority = (_pem(section, name, directory, files) for name in ("cert", "key", "client_ca"))
    if cert is None or key is None:
        missing = "cert_file" if cert is None else "key_file"
        raise ValueError(f"{SECTION} has no {missing}; add it, or remove the section to serve without TLS")
    verify = _verify_mode(section.client_auth_type, authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Each scrape is a connection of its own and asks for no ticket; sending one may only meet a client that has left.
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    if not section.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    _choose(context, section)
    _load_certificate(context, cert, key)
    if authority is not None:
        context.verify_mode = verify
        # All certificates of the file are trusted, be it a root, an authority below one or a client's own: as in Go.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        # Taken out of the text around them: bundles have comments, in any language.
        certificates = _CERTIFICATE.findall(authority.text)
        if not certificates:
            raise ValueError(f"{authority.place} holds no certificate; give the CA's certificates in PEM")
        try:
            context.load_verify_locations(cadata="\n".join(certificates))
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or "not PEM"
            raise ValueError(
                f"{authority.place} has a certificate that cannot be read ({reason}); all must be intact PEM"
            ) from None
    names = section.client_allowed_sans
    if names is not None and verify is not ssl.CERT_REQUIRED:
        raise ValueError("client_allowed_sans needs client_auth_type: RequireAndVerifyClientCert")
    if names is not None and not names:
        raise ValueError("client_allowed_sans is empty, so that no client could connect; name one, or remove the key")
    return Tls(context, None if names is None else frozenset(names))


def _pem(section: TlsSection, name: str, directory: Path, files: WatchedFiles) -> Pem | None:
    inline, file = getattr(section, name), getattr(section, f"{name}_file")
    if inline and file:
        raise ValueError(f"{SECTION}: both {name} and {name}_file are given; remove one of them")
    if inline:
        return Pem(f"{SECTION}.{name}", "", inline)
    if not file:
        return None
    place, path = f"{SECTION}.{name}_file", str(directory / file)
    try:
        return Pem(place, path, files.read(path).decode("utf-8", "replace"))
    except OSError as error:
        raise ValueError(f"{place}: {path} cannot be read: {error.strerror}; give the path of a readable PEM file") from None


def _choose(context: ssl.SSLContext, section: TlsSection) -> None:
    """Set versions, ciphers and curves."""
    for version in (section.min_version, section.max_version):
        if version in ("TLS10", "TLS11"):
            raise ValueError(f"{version}: TLS 1.0 and 1.1 are broken (RFC 8996) and not served; use TLS12 or TLS13")
    minimum = _known("min_version", section.min_version, VERSIONS)
    maximum = _known("max_version", section.max_version, VERSIONS)
    suites = [_known("cipher_suites", suite, CIPHERS) for suite in section.cipher_suites]
    ciphers = [suite for suite in suites if suite]
    curves = [_known("curve_preferences", curve, CURVES) for curve in section.curve_preferences]
    if suites and not ciphers:
        minimum = ssl.TLSVersion.TLSv1_3
    if minimum > maximum:
        raise ValueError("these versions and cipher_suites leave no version of TLS; raise max_version to TLS13")
    context.minimum_version, context.maximum_version = minimum, maximum
    newer: Any = context  # than the types of our lowest Python
    if len(curves) > 1 and not hasattr(newer, "set_groups"):
        raise ValueError("curve_preferences: this Python can offer one curve or its default; keep one, or remove the key")
    try:
        if ciphers:
            context.set_ciphers(":".join(ciphers))
        if len(curves) == 1:
            context.set_ecdh_curve(curves[0])
        elif curves:
            newer.set_groups(":".join(curves))
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{SECTION}: this Python's OpenSSL does not have these ciphers or curves: {error}") from None


def _known(key: str, name: str, known: Mapping[str, _Value]) -> _Value:
    if name not in known:
        raise ValueError(f"{key}: {name!r} is unknown or insecure; known are {', '.join(known)}")
    return known[name]


def _verify_mode(kind: str, authority: Pem | None) -> ssl.VerifyMode:
    if kind in ("RequireAnyClientCert", "RequireClientCert"):
        raise ValueError(
            f"client_auth_type {kind} accepts any certificate, which Python cannot do and which proves nothing; "
            "use RequireAndVerifyClientCert with client_ca_file"
        )
    verify = _known("client_auth_type", kind, CLIENT_AUTH)
    if authority is not None and verify is ssl.CERT_NONE:
        raise ValueError(
            f"{authority.place} has no effect, as no certificate is verified; add client_auth_type: RequireAndVerifyClientCert"
        )
    if authority is None and verify is not ssl.CERT_NONE:
        raise ValueError(f"client_auth_type {kind} needs client_ca_file, the CA whose certificates are accepted")
    return verify


def _load_certificate(context: ssl.SSLContext, cert: Pem, key: Pem) -> None:
    if _BEGIN not in cert.text:
        raise ValueError(f"{cert.place} holds no certificate; give a PEM file with '{_BEGIN}'")
    if "PRIVATE KEY-----" not in key.text:
        raise ValueError(f"{key.place} holds no private key; give a PEM file with '-----BEGIN PRIVATE KEY-----'")

    def refuse() -> str:
        # Without this OpenSSL would ask on the terminal, and the training would wait.
        raise ValueError(f"{key.place} is encrypted; decrypt it, e.g. with `openssl pkey -in KEY -out NEW`")

    try:
        with cert.file() as cert_path, key.file() as key_path:
            context.load_cert_chain(cert_path, key_path, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key.place} does not belong to the certificate; give the certificate's own key") from None
        raise ValueError(f"{cert.place} and its key cannot be used ({error.reason}); both must be intact PEM") from None
    except OSError as error:
        raise ValueError(f"{cert.place} and its key cannot be used: {error.strerror}") from None
