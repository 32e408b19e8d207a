"""The file format of Prometheus' exporter-toolkit web configuration, read into types and checked.

Every key of the format is known here, and any other is an error. What Python's `ssl` cannot do, and what would leave the server
less protected than the file seems to say, is an error that says so. Every value is read as text, so that no tag in the file can
run code. Every error is a `ValueError` that names the file and the key, and shows no value that may be a secret.
"""

from __future__ import annotations

import re
import ssl
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec
import yaml

from torch_grad_exporter.outputs.http import tls
from torch_grad_exporter.outputs.http.web_config import RateLimit, WebSettings

# As in YAML 1.1, which Prometheus' own files are written in.
Yes = Literal["true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", "y", "Y"]
No = Literal["false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", "n", "N"]

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    # Asks for a certificate and checks nothing in it: not asking is equivalent.
    "RequestClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

# The values that some headers may have.
HEADERS = {"X-Content-Type-Options": ("nosniff",), "X-Frame-Options": ("deny", "sameorigin")}

# The last character of a salt carries two bits; one with more is none that a program has made.
BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
LOWEST_COST, HIGHEST_COST = 4, 14

UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
AMOUNT = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(UNIT_SECONDS)})")


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
    prefer_server_cipher_suites: Yes | No = "true"
    curve_preferences: list[str] = []


class HttpSection(msgspec.Struct, forbid_unknown_fields=True):
    """The section `http_server_config`. Its `http2` is an offer that clients need not take; we speak HTTP/1.1."""

    http2: Yes | No = "true"
    headers: HeaderSection | None = None


class HeaderSection(msgspec.Struct, forbid_unknown_fields=True, rename=lambda name: name.replace("_", "-")):
    """Headers of each response."""

    Strict_Transport_Security: str = ""
    X_Content_Type_Options: str = ""
    X_Frame_Options: str = ""
    X_XSS_Protection: str = ""
    Content_Security_Policy: str = ""


class LimitSection(msgspec.Struct, forbid_unknown_fields=True):
    """The section `rate_limit`."""

    interval: str = "0"
    burst: int = 0


class WebFile(msgspec.Struct, forbid_unknown_fields=True):
    """A whole web configuration."""

    tls_server_config: TlsSection | None = None
    http_server_config: HttpSection | None = None
    basic_auth_users: dict[str, str] = {}
    rate_limit: LimitSection | None = None


class _Loader(yaml.BaseLoader):
    """Reads every value as text, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(problem=f"{name!r} stands twice", problem_mark=node.start_mark)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping


def parse(path: str, names: Callable[[str], None]) -> WebSettings:
    """Return the settings of a file; relative paths in it are relative to it.

    Args:
        path: Of the file.
        names: Called with each other file before that is read.

    Raises:
        ValueError: The file, the key and the fix.
    """
    try:
        content = yaml.load(_text_of(path), Loader=_Loader)  # noqa: S506 - it makes nothing but text
        web = msgspec.convert(_without_blanks(content or {}), WebFile, strict=False)
    except yaml.MarkedYAMLError as error:
        # Not the whole error: it quotes the line, which may be a key or a hash.
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise ValueError(f"{path}, line {line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f"{path}: not valid YAML; it holds control characters, or is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {str(error).replace('`$.', '`')}") from None
    try:
        return WebSettings(
            tls=None if web.tls_server_config is None else _tls(web.tls_server_config, path, names),
            headers=() if web.http_server_config is None else _headers(web.http_server_config.headers or HeaderSection()),
            users={name: _checked_hash(name, text) for name, text in web.basic_auth_users.items()},
            rate_limit=None if web.rate_limit is None else _rate_limit(web.rate_limit),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _text_of(path: str) -> str:
    try:
        # Opening a pipe would wait for a writer, here and again at each check for changes.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ValueError(f"{path}: not a regular file; give the path of a web configuration in YAML")
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; give the path of a web configuration in YAML") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8; save the file in UTF-8") from None


def _without_blanks(content: object, name: str = "") -> object:
    """Leave out keys without a value, but for users: one without a hash is a mistake."""
    if not isinstance(content, dict) or name == "basic_auth_users":
        return content
    return {key: _without_blanks(value, key) for key, value in content.items() if value != ""}


# Sections


def _tls(section: TlsSection, path: str, names: Callable[[str], None]) -> tls.Tls | None:
    if section == TlsSection():
        return None

    def pem(name: str) -> tls.Pem | None:
        inline, file = getattr(section, name), getattr(section, f"{name}_file")
        if inline and file:
            raise ValueError(f"tls_server_config: {name} and {name}_file both stand here; remove one of them")
        if not (inline or file):
            return None
        if inline:
            return tls.Pem(f"tls_server_config.{name}", text=inline)
        names(where := str(Path(path).parent / file))
        return tls.Pem(f"tls_server_config.{name}_file", path=where)

    cert, key, authority = pem("cert"), pem("key"), pem("client_ca")
    if cert is None or key is None:
        missing = "cert_file" if cert is None else "key_file"
        raise ValueError(f"tls_server_config has no {missing}; add it, or remove the section to serve without TLS")
    verify = _verify_mode(section.client_auth_type, authority)
    minimum, maximum = _version(section.min_version), _version(section.max_version)
    known = {**tls.CIPHERS, **dict.fromkeys(tls.TLS13_CIPHERS, "")}  # those of TLS 1.3 cannot be chosen
    suites = _chosen("cipher_suites", section.cipher_suites, known)
    ciphers = [suite for suite in suites if suite]
    if suites and not ciphers:
        minimum = ssl.TLSVersion.TLSv1_3
    if minimum > maximum:
        raise ValueError("these versions and cipher_suites leave no version of TLS; raise max_version to TLS13")
    curves = _chosen("curve_preferences", section.curve_preferences, tls.CURVES)
    if len(curves) > 1 and not tls.SEVERAL_CURVES:
        raise ValueError("curve_preferences: this Python can offer one curve or its default; keep one, or remove the key")
    return tls.load(
        cert,
        key,
        place="tls_server_config",
        verify=verify,
        client_ca=authority,
        allowed_sans=_sans(section.client_allowed_sans, verify),
        versions=(minimum, maximum),
        ciphers=ciphers,
        server_preference=section.prefer_server_cipher_suites in get_args(Yes),
        curves=curves,
    )


def _verify_mode(kind: str, authority: tls.Pem | None) -> ssl.VerifyMode:
    if kind in ("RequireAnyClientCert", "RequireClientCert"):
        raise ValueError(
            f"client_auth_type {kind} accepts any certificate, which Python cannot do and which proves nothing; "
            "use RequireAndVerifyClientCert with client_ca_file"
        )
    (name,) = _chosen("client_auth_type", [kind], {name: name for name in CLIENT_AUTH})
    verify = CLIENT_AUTH[name]
    if authority is not None and verify is ssl.CERT_NONE:
        raise ValueError(
            f"{authority.place} is of no use, as no certificate is verified; add client_auth_type: RequireAndVerifyClientCert"
        )
    if authority is None and verify is not ssl.CERT_NONE:
        raise ValueError(f"client_auth_type {kind} needs client_ca_file, the CA whose certificates are good")
    return verify


def _version(name: str) -> ssl.TLSVersion:
    if name in ("TLS10", "TLS11"):
        raise ValueError(f"{name}: TLS 1.0 and 1.1 are broken (RFC 8996) and not served; use TLS12 or TLS13")
    if name not in VERSIONS:
        raise ValueError(f"the version {name!r} is unknown; use TLS12 or TLS13")
    return VERSIONS[name]


def _chosen(key: str, entries: list[str], known: Mapping[str, str]) -> list[str]:
    """Return what the entries of a list stand for."""
    for entry in entries:
        if entry not in known:
            raise ValueError(f"{key}: {entry!r} is unknown or insecure; known are {', '.join(known)}")
    return [known[entry] for entry in entries]


def _sans(names: list[str] | None, verify: ssl.VerifyMode) -> frozenset[str] | None:
    if names is None:
        return None
    if verify is not ssl.CERT_REQUIRED:
        raise ValueError("client_allowed_sans needs client_auth_type: RequireAndVerifyClientCert")
    if not names:
        raise ValueError("client_allowed_sans is empty, so that no client could connect; name one, or remove the key")
    return frozenset(names)


def _headers(section: HeaderSection) -> tuple[tuple[str, str], ...]:
    headers = []
    for name, value in msgspec.to_builtins(section).items():
        text = value.strip()
        if text and text not in HEADERS.get(name, (text,)):
            raise ValueError(f"{name} {text!r}: use {' or '.join(HEADERS[name])}")
        if not text.isascii() or not text.isprintable():
            raise ValueError(f"{name} has characters that no header may have; use printable ASCII on one line")
        # Every response has `X-Content-Type-Options: nosniff`, the only value there is.
        if text and name != "X-Content-Type-Options":
            headers.append((name, text))
    return tuple(headers)


def _checked_hash(user: str, text: str) -> str:
    if ":" in user:
        raise ValueError(f"the user {user!r} could never log in: no name may have a colon in basic authentication")
    form = BCRYPT.fullmatch(text)
    if form is None:
        raise ValueError(f"the hash of {user!r} is no bcrypt hash; make one, e.g. with `htpasswd -nBC 10 USER`")
    if not LOWEST_COST <= int(form[1]) <= HIGHEST_COST:
        # Any client that reaches the port can cause a check, and nothing can end one: at 15 it takes seconds of a core.
        raise ValueError(
            f"the hash of {user!r} has the cost {int(form[1])}; make one with a cost from 10 to {HIGHEST_COST}, "
            "as each check takes the time of the training"
        )
    return text


def _rate_limit(section: LimitSection) -> RateLimit | None:
    interval = _duration(section.interval)
    if interval and section.burst < 1:
        raise ValueError("rate_limit without a burst of 1 or more refuses every request; add burst: 20")
    return RateLimit(interval, section.burst) if interval else None


def _duration(text: str) -> float:
    """Return the seconds of a duration in Go's form."""
    text = text.removeprefix("+")
    if text == "0":
        return 0.0
    amounts = AMOUNT.findall(text)
    if not amounts or "".join(number + unit for number, unit in amounts) != text:
        raise ValueError(f"rate_limit.interval {text!r} is no duration; give one with a unit, such as 500ms, 1s or 1m30s")
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in amounts)
