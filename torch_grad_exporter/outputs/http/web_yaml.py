"""The file format of Prometheus' exporter-toolkit web configuration, read and checked.

Every key of the format is known here, and any other is an error. What Python's `ssl` cannot do, and what would
leave the server less protected than the file seems to say, is an error that says so.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import yaml

from torch_grad_exporter.outputs.http import tls
from torch_grad_exporter.outputs.http.web_settings import Pem, RateLimit, TlsSettings, WebSettings
from torch_grad_exporter.outputs.http.yaml_nodes import Document, Fields, is_null

_SECTIONS = ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
_TLS_KEYS = (
    "cert", "key", "client_ca", "cert_file", "key_file", "client_ca_file", "client_auth_type", "client_allowed_sans",
    "min_version", "max_version", "cipher_suites", "prefer_server_cipher_suites", "curve_preferences",
)  # fmt: skip

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

_ANY = (
    "accepts any certificate, which Python cannot do and which proves nothing; use RequireAndVerifyClientCert with client_ca_file"
)
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    # Asks for a certificate and checks nothing in it: not asking is equivalent.
    "RequestClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

_HEADERS = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}

# The last character of a salt carries two bits; one with more is none that a program has made.
_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
_LOWEST_COST, _HIGHEST_COST = 4, 14

_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_AMOUNT = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(_UNIT_SECONDS)})")


def parse(path: str) -> WebSettings:
    """The settings of a file; relative paths in it are relative to it. Raises ValueError with file, line and fix."""
    document = Document(path)
    if document.root is None:
        return WebSettings()
    sections = document.fields(document.root, "a web configuration", _SECTIONS)
    http = sections.get("http_server_config")
    return WebSettings(
        tls=_tls(document, sections.get("tls_server_config")),
        headers=() if http is None else _headers(document, http),
        users=_users(document, sections.get("basic_auth_users")),
        rate_limit=_rate_limit(document, sections.get("rate_limit")),
    )


def _tls(document: Document, node: yaml.Node | None) -> TlsSettings | None:
    fields = {} if node is None else document.fields(node, "tls_server_config", _TLS_KEYS)
    if node is None or not fields:
        return None
    cert, key = _pem(document, fields, "cert"), _pem(document, fields, "key")
    if cert is None or key is None:
        missing = "cert_file" if cert is None else "key_file"
        raise document.error(node, f"tls_server_config has no {missing}; add it, or remove the section to serve without TLS")
    verify, authority, sans = _client_auth(document, fields)
    minimum = _version(document, fields, "min_version", "TLS12")
    maximum = _version(document, fields, "max_version", "TLS13")
    ciphers = _ciphers(document, fields)
    if ciphers == ():
        minimum, ciphers = ssl.TLSVersion.TLSv1_3, None
    if minimum > maximum:
        raise document.error(node, "these versions and cipher_suites leave no version of TLS; raise max_version to TLS13")
    prefer = fields.get("prefer_server_cipher_suites")
    return TlsSettings(
        place=document.place(node),
        cert=cert,
        key=key,
        verify=verify,
        client_ca=authority,
        allowed_sans=sans,
        min_version=minimum,
        max_version=maximum,
        ciphers=ciphers,
        server_preference=prefer is None or document.switch(prefer, "prefer_server_cipher_suites"),
        curves=_curves(document, fields),
    )


def _pem(document: Document, fields: Fields, name: str) -> Pem | None:
    """What stands under a key or in the file that `<key>_file` names; empty text counts as absent."""
    found = [
        (key, fields[key], text) for key in (name, f"{name}_file") if key in fields and (text := document.text(fields[key], key))
    ]
    if not found:
        return None
    if len(found) > 1:
        raise document.error(found[1][1], f"{name} and {name}_file both stand here; remove one of them")
    key, node, text = found[0]
    place = f"{document.place(node)}: {key}"
    if key == name:
        return Pem(place, text=text)
    return Pem(place, path=str(Path(document.path).parent / text))


def _client_auth(document: Document, fields: Fields) -> tuple[ssl.VerifyMode, Pem | None, frozenset[str] | None]:
    authority = _pem(document, fields, "client_ca")
    node = fields.get("client_auth_type")
    kind = "" if node is None else document.text(node, "client_auth_type")
    if node is not None and kind in ("RequireAnyClientCert", "RequireClientCert"):
        raise document.error(node, f"client_auth_type {kind} {_ANY}")
    if node is not None and kind and kind not in _CLIENT_AUTH:
        raise document.error(node, f"client_auth_type {kind!r} is unknown; known are {', '.join(_CLIENT_AUTH)}")
    verify = _CLIENT_AUTH[kind or "NoClientCert"]
    if authority is not None and verify is ssl.CERT_NONE:
        raise ValueError(
            f"{authority.place} is of no use, as no certificate is verified; add client_auth_type: RequireAndVerifyClientCert"
        )
    if node is not None and authority is None and verify is not ssl.CERT_NONE:
        raise document.error(node, f"client_auth_type {kind} needs client_ca_file, the CA whose certificates are good")
    return verify, authority, _sans(document, fields, verify)


def _sans(document: Document, fields: Fields, verify: ssl.VerifyMode) -> frozenset[str] | None:
    node = fields.get("client_allowed_sans")
    if node is None:
        return None
    names = frozenset(name for _, name in document.texts(node, "client_allowed_sans"))
    if verify is not ssl.CERT_REQUIRED:
        raise document.error(node, "client_allowed_sans needs client_auth_type: RequireAndVerifyClientCert")
    if not names:
        raise document.error(node, "client_allowed_sans is empty, so that no client could connect; name one, or remove the key")
    return names


def _version(document: Document, fields: Fields, key: str, default: str) -> ssl.TLSVersion:
    node = fields.get(key)
    if node is None:
        return _VERSIONS[default]
    name = document.text(node, key)
    if name in ("TLS10", "TLS11"):
        raise document.error(node, f"{key} {name}: TLS 1.0 and 1.1 are broken (RFC 8996) and not served; use TLS12 or TLS13")
    if name not in _VERSIONS:
        raise document.error(node, f"{key} {name!r} is unknown; use TLS12 or TLS13")
    return _VERSIONS[name]


def _ciphers(document: Document, fields: Fields) -> tuple[str, ...] | None:
    """Those of TLS 1.2; none at all if the list names only some of TLS 1.3, which cannot be chosen; `None` without a list."""
    node = fields.get("cipher_suites")
    names = [] if node is None else document.texts(node, "cipher_suites")
    for entry, name in names:
        if name not in tls.CIPHERS and name not in tls.TLS13_CIPHERS:
            raise document.error(entry, f"cipher_suites: {name!r} is unknown or insecure; known are {', '.join(tls.CIPHERS)}")
    return tuple(tls.CIPHERS[name] for _, name in names if name in tls.CIPHERS) if names else None


def _curves(document: Document, fields: Fields) -> tuple[str, ...]:
    node = fields.get("curve_preferences")
    names = [] if node is None else document.texts(node, "curve_preferences")
    for entry, name in names:
        if name not in tls.CURVES:
            raise document.error(entry, f"curve_preferences: {name!r} is unknown; known are {', '.join(tls.CURVES)}")
    if node is not None and len(names) > 1 and not tls.SEVERAL_CURVES:
        raise document.error(
            node, "curve_preferences: this Python can offer one curve or its default, not several; keep one, or remove the key"
        )
    return tuple(tls.CURVES[name] for _, name in names)


def _headers(document: Document, node: yaml.Node) -> tuple[tuple[str, str], ...]:
    """The section `http_server_config`. Its `http2` is an offer that clients need not take; we speak HTTP/1.1."""
    fields = document.fields(node, "http_server_config", ("http2", "headers"))
    if "http2" in fields:
        document.switch(fields["http2"], "http2")
    headers = document.fields(fields["headers"], "headers", _HEADERS) if "headers" in fields else {}
    checked = [(name, _header(document, name, value)) for name, value in headers.items()]
    # Every response has `X-Content-Type-Options: nosniff`, the only value there is.
    return tuple((name, value) for name, value in checked if value and name != "X-Content-Type-Options")


def _header(document: Document, name: str, node: yaml.Node) -> str:
    value = document.text(node, name).strip()
    if value and _HEADERS[name] and value not in _HEADERS[name]:
        raise document.error(node, f"{name} {value!r}: use {' or '.join(_HEADERS[name])}")
    if not value.isascii() or not value.isprintable():
        raise document.error(node, f"{name} has characters that no header may have; use printable ASCII on one line")
    return value


def _users(document: Document, node: yaml.Node | None) -> dict[str, str]:
    users = {} if node is None else document.pairs(node, "basic_auth_users")
    return {name: _hash(document, name, value) for name, value in users.items()}


def _hash(document: Document, name: str, node: yaml.Node) -> str:
    if ":" in name:
        raise document.error(node, f"the user {name!r} could never log in: no name may have a colon in basic authentication")
    text = "" if is_null(node) else document.text(node, f"the hash of {name!r}")
    form = _BCRYPT.fullmatch(text)
    if form is None:
        raise document.error(node, f"the hash of {name!r} is no bcrypt hash; make one, e.g. with `htpasswd -nBC 10 USER`")
    if not _LOWEST_COST <= int(form[1]) <= _HIGHEST_COST:
        # Any client that reaches the port can cause a check, and nothing can end one: at 15 it takes seconds of a core.
        raise document.error(
            node,
            f"the hash of {name!r} has the cost {int(form[1])}; make one with a cost from 10 to {_HIGHEST_COST}, "
            "as each check takes the time of the training",
        )
    return text


def _rate_limit(document: Document, node: yaml.Node | None) -> RateLimit | None:
    fields = {} if node is None else document.fields(node, "rate_limit", ("interval", "burst"))
    interval = _duration(document, fields["interval"]) if "interval" in fields else 0.0
    burst = document.integer(fields["burst"], "burst") if "burst" in fields else 0
    if node is None or not interval:
        return None
    if burst < 1:
        raise document.error(node, "rate_limit without a burst of 1 or more refuses every request; add burst: 20")
    return RateLimit(interval, burst)


def _duration(document: Document, node: yaml.Node) -> float:
    """Seconds of a duration in Go's form."""
    text = document.text(node, "interval").removeprefix("+")
    if text == "0":
        return 0.0
    amounts = _AMOUNT.findall(text)
    if not amounts or "".join(number + unit for number, unit in amounts) != text:
        raise document.error(node, f"interval {text!r} is no duration; give one with a unit, such as 500ms, 1s or 1m30s")
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in amounts)
