"""The file format of Prometheus' exporter-toolkit web configuration, read into types and checked.

Every key of the format is known here, and any other is an error. So is what Python's `ssl` cannot do, and what would leave the
server less protected than the file seems to say. Every value is read as text, so that no tag in the file can run code. Every error
is a `ValueError` that names the file and the key, and shows no value that may be a secret.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

import msgspec
import yaml

from torch_grad_exporter.outputs.http.tls import TlsSection, load
from torch_grad_exporter.outputs.http.web_config import RateLimit, WatchedFiles, WebSettings

# The values that some headers may have.
HEADERS = {"X-Content-Type-Options": ("nosniff",), "X-Frame-Options": ("deny", "sameorigin")}

# The last character of a salt carries two bits; no program makes one with more.
BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
LOWEST_COST, HIGHEST_COST = 4, 14

UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
AMOUNT = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(UNIT_SECONDS)})")


class HttpSection(msgspec.Struct, forbid_unknown_fields=True):
    """The section `http_server_config`. Its `http2` is an offer that clients need not take; we speak HTTP/1.1."""

    http2: bool = True
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
    """Reads every value as text, and refuses a duplicate key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(problem=f"duplicate key {name!r}", problem_mark=node.start_mark)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping


def parse(path: str, files: WatchedFiles) -> WebSettings:
    """Return the settings of a file; relative paths in it are relative to it.

    Args:
        path: Of the file.
        files: Read this file and those that it names.

    Raises:
        ValueError: The file, the key and the fix.
    """
    try:
        content = yaml.load(_read(path, files), Loader=_Loader)  # noqa: S506 - it makes nothing but text
        web = msgspec.convert(_without_blanks(content or {}), WebFile, strict=False)
    except yaml.MarkedYAMLError as error:
        # Not the whole error: it quotes the line, which may be a key or a hash.
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise ValueError(f"{path}, line {line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f"{path}: not valid YAML; it is not in UTF-8, holds control characters, or is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {str(error).replace('`$.', '`')}") from None
    try:
        return WebSettings(
            tls=None if web.tls_server_config in (None, TlsSection()) else load(web.tls_server_config, Path(path).parent, files),
            headers=() if web.http_server_config is None else _headers(web.http_server_config.headers or HeaderSection()),
            users={name: _checked_hash(name, text) for name, text in web.basic_auth_users.items()},
            rate_limit=_rate_limit(web.rate_limit or LimitSection()),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path: str, files: WatchedFiles) -> bytes:
    try:
        # Opening a pipe would wait for a writer, here and again at each check for changes.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ValueError(f"{path}: not a regular file; give the path of a web configuration in YAML")
        return files.read(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; give the path of a web configuration in YAML") from None


def _without_blanks(content: object, name: str = "") -> object:
    """Leave out keys without a value, but for users: one without a hash is a mistake."""
    if not isinstance(content, dict) or name == "basic_auth_users":
        return content
    return {key: _without_blanks(value, key) for key, value in content.items() if value != ""}


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
        raise ValueError(f"the hash of {user!r} is not a bcrypt hash; make one, e.g. with `htpasswd -nBC 10 USER`")
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
        raise ValueError(f"rate_limit.interval {text!r} is not a duration; give one with a unit, such as 500ms, 1s or 1m30s")
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in amounts)
