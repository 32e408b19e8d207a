"""The file format of Prometheus' exporter-toolkit web configuration, read and checked.

Every key of the format is known here, and any other is an error. What Python's `ssl` cannot do, and what would
leave the server less protected than the file seems to say, is an error that says so. Nothing is constructed from the file but
text, numbers, switches and lists of text, so that no tag in it can run code. Every error is a `ValueError` that names the file and
the line, and shows no value that may be a secret.
"""

from __future__ import annotations

import difflib
import re
import ssl
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from torch_grad_exporter.outputs.http import tls
from torch_grad_exporter.outputs.http.web_config import RateLimit, WebSettings

_STANDARD = "tag:yaml.org,2002:"
_SCALARS = frozenset(_STANDARD + kind for kind in ("str", "int", "float", "bool", "timestamp"))
# As in YAML 1.1, which Prometheus' own files are written in.
_SWITCH = {
    **dict.fromkeys(("y", "yes", "true", "on"), True),
    **dict.fromkeys(("n", "no", "false", "off"), False),
}

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


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the file at `path`; `name`: what it is called in errors, mostly its key. `names`: takes a file that it names."""

    path: str
    names: Callable[[str], None]
    node: yaml.Node
    name: str

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.path}, line {self.node.start_mark.line + 1}"

    @property
    def is_null(self) -> bool:
        """Whether the key has no value."""
        return bool(self.node.tag == f"{_STANDARD}null")

    def error(self, message: str) -> ValueError:
        """An error there, to be raised."""
        return ValueError(f"{self.place}: {message}")

    def pairs(self) -> dict[str, _Value]:
        """The entries of a mapping by key, also those without a value. No key twice."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"{self.name} takes keys with values, such as 'key: value'")
        found: dict[str, _Value] = {}
        for key, value in self.node.value:
            place = replace(self, node=key, name=f"a key in {self.name}")
            name = place.text()
            if name in found:
                raise place.error(f"{name!r} stands twice in {self.name}; remove one of them")
            found[name] = replace(self, node=value, name=name)
        return found

    def keys(self, known: Collection[str]) -> dict[str, _Value]:
        """The entries of a mapping that have a value; none but the known ones."""
        found = {} if self.is_null else self.pairs()
        for name, value in found.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                fix = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise value.error(f"unknown key {name!r} in {self.name}; {fix}")
        return {name: value for name, value in found.items() if not value.is_null}

    def text(self) -> str:
        """A single value as it is written, also where it could be a number or a switch."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag not in _SCALARS:
            raise self.error(f"{self.name} takes text; put it in quotes if it has a special meaning in YAML")
        return str(self.node.value)

    def texts(self) -> list[tuple[_Value, str]]:
        """The entries of a list, and their texts."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"{self.name} takes a list, such as [a, b]")
        entries = [replace(self, node=node, name=f"an entry of {self.name}") for node in self.node.value]
        return [(entry, entry.text()) for entry in entries]

    def switch(self) -> bool:
        """A value that is on or off; in quotes it would be text."""
        plain = isinstance(self.node, yaml.ScalarNode) and self.node.style is None
        value = _SWITCH.get(self.node.value.lower()) if plain else None
        if value is None:
            raise self.error(f"{self.name} takes true or false, without quotes")
        return value

    def integer(self) -> int:
        """A whole number, in base 10."""
        if self.node.tag != f"{_STANDARD}int" or not re.fullmatch(r"[-+]?[0-9][0-9_]{0,18}", self.node.value):
            raise self.error(f"{self.name} takes a whole number, without quotes")
        return int(self.node.value.replace("_", ""))

    def chosen(self, choices: Mapping[str, str], wrong: str) -> list[str]:
        """What the entries of a list stand for."""
        for entry, name in self.texts():
            if name not in choices:
                raise entry.error(f"{self.name}: {name!r} is {wrong}; known are {', '.join(choices)}")
        return [choices[name] for _, name in self.texts()]


_Keys = Mapping[str, _Value]


def parse(path: str, names: Callable[[str], None]) -> WebSettings:
    """The settings of a file; relative paths in it are relative to it. Raises ValueError with file, line and fix.

    `names` is called with each other file before that is read.
    """
    try:
        root = yaml.compose(_text_of(path), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        # Not the whole error: it quotes the line, which may be a key or a hash.
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise ValueError(f"{path}, line {line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f"{path}: not valid YAML; it holds control characters, or is nested too deeply") from None
    sections = {} if root is None else _Value(path, names, root, "a web configuration").keys(_SECTIONS)
    section = sections.get
    return WebSettings(
        tls=_tls(tls_) if (tls_ := section("tls_server_config")) else None,
        headers=_headers(http) if (http := section("http_server_config")) else (),
        users={name: _hash(name, value) for name, value in users.pairs().items()} if (users := section("basic_auth_users")) else {},
        rate_limit=_rate_limit(limit) if (limit := section("rate_limit")) else None,
    )


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


def _tls(section: _Value) -> tls.Tls | None:
    keys = section.keys(_TLS_KEYS)
    if not keys:
        return None
    cert, key = _pem(keys, "cert"), _pem(keys, "key")
    if cert is None or key is None:
        missing = "cert_file" if cert is None else "key_file"
        raise section.error(f"tls_server_config has no {missing}; add it, or remove the section to serve without TLS")
    verify, authority = _client_auth(keys)
    minimum, maximum = _version(keys, "min_version", "TLS12"), _version(keys, "max_version", "TLS13")
    known = {**tls.CIPHERS, **dict.fromkeys(tls.TLS13_CIPHERS, "")}  # those of TLS 1.3 cannot be chosen
    suites = keys["cipher_suites"].chosen(known, "unknown or insecure") if "cipher_suites" in keys else []
    ciphers = [suite for suite in suites if suite]
    if suites and not ciphers:
        minimum = ssl.TLSVersion.TLSv1_3
    if minimum > maximum:
        raise section.error("these versions and cipher_suites leave no version of TLS; raise max_version to TLS13")
    prefer = keys.get("prefer_server_cipher_suites")
    return tls.load(
        cert,
        key,
        place=section.place,
        verify=verify,
        client_ca=authority,
        allowed_sans=_sans(keys["client_allowed_sans"], verify) if "client_allowed_sans" in keys else None,
        versions=(minimum, maximum),
        ciphers=ciphers,
        server_preference=prefer is None or prefer.switch(),
        curves=_curves(keys["curve_preferences"]) if "curve_preferences" in keys else [],
    )


def _pem(keys: _Keys, name: str) -> tls.Pem | None:
    """What stands under a key or in the file that `<key>_file` names; empty text counts as absent."""
    found = [keys[key] for key in (name, f"{name}_file") if key in keys and keys[key].text()]
    if len(found) > 1:
        raise found[1].error(f"{name} and {name}_file both stand here; remove one of them")
    for value in found:
        place, text = f"{value.place}: {value.name}", value.text()
        if value.name == name:
            return tls.Pem(place, text=text)
        value.names(path := str(Path(value.path).parent / text))
        return tls.Pem(place, path=path)
    return None


def _client_auth(keys: _Keys) -> tuple[ssl.VerifyMode, tls.Pem | None]:
    authority, value = _pem(keys, "client_ca"), keys.get("client_auth_type")
    kind = "" if value is None else value.text()
    if value is not None and kind in ("RequireAnyClientCert", "RequireClientCert"):
        raise value.error(f"client_auth_type {kind} {_ANY}")
    if value is not None and kind and kind not in _CLIENT_AUTH:
        raise value.error(f"client_auth_type {kind!r} is unknown; known are {', '.join(_CLIENT_AUTH)}")
    verify = _CLIENT_AUTH[kind or "NoClientCert"]
    if authority is not None and verify is ssl.CERT_NONE:
        raise ValueError(
            f"{authority.place} is of no use, as no certificate is verified; add client_auth_type: RequireAndVerifyClientCert"
        )
    if value is not None and authority is None and verify is not ssl.CERT_NONE:
        raise value.error(f"client_auth_type {kind} needs client_ca_file, the CA whose certificates are good")
    return verify, authority


def _sans(value: _Value, verify: ssl.VerifyMode) -> frozenset[str]:
    names = frozenset(name for _, name in value.texts())
    if verify is not ssl.CERT_REQUIRED:
        raise value.error("client_allowed_sans needs client_auth_type: RequireAndVerifyClientCert")
    if not names:
        raise value.error("client_allowed_sans is empty, so that no client could connect; name one, or remove the key")
    return names


def _version(keys: _Keys, key: str, default: str) -> ssl.TLSVersion:
    if key not in keys:
        return _VERSIONS[default]
    name = keys[key].text()
    if name in ("TLS10", "TLS11"):
        raise keys[key].error(f"{key} {name}: TLS 1.0 and 1.1 are broken (RFC 8996) and not served; use TLS12 or TLS13")
    if name not in _VERSIONS:
        raise keys[key].error(f"{key} {name!r} is unknown; use TLS12 or TLS13")
    return _VERSIONS[name]


def _curves(value: _Value) -> list[str]:
    curves = value.chosen(tls.CURVES, "unknown")
    if len(curves) > 1 and not tls.SEVERAL_CURVES:
        raise value.error(
            "curve_preferences: this Python can offer one curve or its default, not several; keep one, or remove the key"
        )
    return curves


def _headers(section: _Value) -> tuple[tuple[str, str], ...]:
    """The section `http_server_config`. Its `http2` is an offer that clients need not take; we speak HTTP/1.1."""
    keys = section.keys(("http2", "headers"))
    if "http2" in keys:
        keys["http2"].switch()
    headers = keys["headers"].keys(_HEADERS) if "headers" in keys else {}
    checked = [(name, _header(value)) for name, value in headers.items()]
    # Every response has `X-Content-Type-Options: nosniff`, the only value there is.
    return tuple((name, text) for name, text in checked if text and name != "X-Content-Type-Options")


def _header(value: _Value) -> str:
    text, choices = value.text().strip(), _HEADERS[value.name]
    if text and choices and text not in choices:
        raise value.error(f"{value.name} {text!r}: use {' or '.join(choices)}")
    if not text.isascii() or not text.isprintable():
        raise value.error(f"{value.name} has characters that no header may have; use printable ASCII on one line")
    return text


def _hash(user: str, value: _Value) -> str:
    if ":" in user:
        raise value.error(f"the user {user!r} could never log in: no name may have a colon in basic authentication")
    text = "" if value.is_null else replace(value, name=f"the hash of {user!r}").text()
    form = _BCRYPT.fullmatch(text)
    if form is None:
        raise value.error(f"the hash of {user!r} is no bcrypt hash; make one, e.g. with `htpasswd -nBC 10 USER`")
    if not _LOWEST_COST <= int(form[1]) <= _HIGHEST_COST:
        # Any client that reaches the port can cause a check, and nothing can end one: at 15 it takes seconds of a core.
        raise value.error(
            f"the hash of {user!r} has the cost {int(form[1])}; make one with a cost from 10 to {_HIGHEST_COST}, "
            "as each check takes the time of the training"
        )
    return text


def _rate_limit(section: _Value) -> RateLimit | None:
    keys = section.keys(("interval", "burst"))
    interval = _duration(keys["interval"]) if "interval" in keys else 0.0
    burst = keys["burst"].integer() if "burst" in keys else 0
    if interval and burst < 1:
        raise section.error("rate_limit without a burst of 1 or more refuses every request; add burst: 20")
    return RateLimit(interval, burst) if interval else None


def _duration(value: _Value) -> float:
    """Seconds of a duration in Go's form."""
    text = value.text().removeprefix("+")
    if text == "0":
        return 0.0
    amounts = _AMOUNT.findall(text)
    if not amounts or "".join(number + unit for number, unit in amounts) != text:
        raise value.error(f"interval {text!r} is no duration; give one with a unit, such as 500ms, 1s or 1m30s")
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in amounts)
