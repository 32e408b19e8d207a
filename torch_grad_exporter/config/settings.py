"""Settings: what the user may choose, checked completely before anything is registered.

An argument wins over its environment variable `TORCH_GRAD_EXPORTER_<NAME>`, and that over the default. What
is wrong raises `ValueError` or `TypeError` and names the argument or variable, its value and the fix.
"""

from __future__ import annotations

import enum
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_grad_exporter.capture.schedule import LONGEST
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.model.replicas import Ranks

PREFIX = "TORCH_GRAD_EXPORTER_"

DEFAULT_PORT = 9100


class Unset(enum.Enum):
    """The default of every argument of `start_exporter`: take the environment variable, else the default."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All choices, valid. `every` is `None` for "auto"; `run` is empty and `rank` `None` where nobody chose.

    `collectors`: those that are on. `linger`: in seconds. `web_config_file`, `sd_dir`, `advertise`, `textfile_dir`: empty for
    none.
    """

    port: int | None = DEFAULT_PORT
    addr: str = ""
    every: int | None = None
    overhead_budget: float = 0.01
    include: tuple[re.Pattern[str], ...] = ()
    exclude: tuple[re.Pattern[str], ...] = ()
    max_layers: int = 300
    dead_window: int = 100
    moments: bool = False
    weights: bool = False
    local_norm: bool = False
    collectors: frozenset[str] = field(default_factory=lambda: REGISTRY.on_by_default)
    web_config_file: str = ""
    run: str = ""
    rank: int | None = None
    ranks: Ranks = Ranks.AUTO
    labels: Mapping[str, str] = field(default_factory=dict)
    sd_dir: str = ""
    advertise: str = ""
    linger: float = 0.0
    textfile_dir: str = ""


def resolve(arguments: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """Settings from the arguments that are not `UNSET`, the environment and the defaults."""
    chosen: dict[str, Any] = {}
    for name, check in _CHECKS.items():
        given = arguments.get(name, UNSET)
        text = environment.get(PREFIX + name.upper())
        if given is not UNSET:
            chosen[name] = check(name, given)
        elif text is not None and text.strip():
            variable = PREFIX + name.upper()
            chosen[name] = check(f"environment variable {variable}", _parsed(name, variable, text.strip()))
    return Settings(**chosen)


def source(arguments: Mapping[str, object], name: str) -> str:
    """Where a choice comes from, for error messages: the argument's name or the environment variable's."""
    return f"environment variable {PREFIX}{name.upper()}" if arguments.get(name, UNSET) is UNSET else name


def _parsed(name: str, variable: str, text: str) -> object:
    """The value that the text of an environment variable stands for."""
    if name == "port" and text.lower() in ("none", "off"):
        return None
    try:
        return _PARSERS.get(name, str)(text)
    except ValueError:
        raise ValueError(f"environment variable {variable}={text!r}: {_expected(name)}") from None


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not middle for _, middle, _ in pairs):
        raise ValueError
    return {key.strip(): value.strip() for key, _, value in pairs}


def _switch(text: str) -> bool:
    try:
        return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
            text.lower()
        ]
    except KeyError:
        raise ValueError from None


def _collector(name: str) -> str:
    if name not in REGISTRY.names:
        raise ValueError
    return name


_PARSERS: dict[str, Callable[[str], object]] = {
    "port": int,
    "every": lambda text: text if text.lower() == "auto" else int(text),
    "overhead_budget": float,
    "max_layers": int,
    "dead_window": int,
    "moments": _switch,
    "weights": _switch,
    "local_norm": _switch,
    "collectors": lambda text: {_collector(name): _switch(value) for name, value in _pairs(text).items()},
    "rank": int,
    "linger": float,
    "labels": _pairs,
}

_EXPECTED = {
    "port": "expected a port from 1 to 65535, 0 for any free one, or None to serve nothing",
    "addr": "expected an address such as '127.0.0.1', or '' for all interfaces",
    "every": f"expected 'auto' or a whole number of rounds from 1 to {LONGEST}",
    "overhead_budget": "expected a share of training time above 0 and below 1, such as 0.01",
    "include": "expected a regular expression on layer names, or several",
    "exclude": "expected a regular expression on layer names, or several",
    "max_layers": "expected a whole number from 1 to 100000",
    "dead_window": "expected a whole number of samples from 1 to 1000000",
    "moments": "expected True or False",
    "weights": "expected True or False",
    "local_norm": "expected True or False",
    "collectors": "expected collectors to switch, such as {'host': False}, or host=off in the environment",
    "web_config_file": "expected the path of a web configuration file",
    "run": "expected a name of 1 to 200 characters",
    "rank": "expected a whole number from 0",
    "ranks": "expected 'auto', 'all' or 'first'",
    "sd_dir": "expected the path of a directory that Prometheus reads with file_sd_configs",
    "advertise": "expected a host name or address, without a port, under which Prometheus reaches this host",
    "linger": "expected a number of seconds from 0 to 3600",
    "textfile_dir": "expected the path of a directory of node_exporter's textfile collector",
    "labels": "expected a mapping of label names such as {'team': 'vision'}",
}


def _expected(name: str) -> str:
    """What is expected of a choice, as an error message says it."""
    return _EXPECTED[name] + (f"; there are {', '.join(REGISTRY.names)}" if name == "collectors" else "")


def _wrong(kind: type[Exception], source: str, name: str, value: object) -> Exception:
    return kind(f"{source}={value!r}: {_expected(name)}")


def _name_of(source: str) -> str:
    return source.removeprefix("environment variable ").removeprefix(PREFIX).lower()


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    def check(source: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(TypeError, source, _name_of(source), value)
        if not low <= value <= high:
            raise _wrong(ValueError, source, _name_of(source), value)
        return value

    return check


def _or_none(check: Callable[[str, object], int]) -> Callable[[str, object], int | None]:
    return lambda source, value: None if value is None else check(source, value)


def _every(source: str, value: object) -> int | None:
    if isinstance(value, str):
        if value.lower() != "auto":
            raise _wrong(ValueError, source, "every", value)
        return None
    return _integer(1, LONGEST)(source, value)


def _budget(source: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(TypeError, source, "overhead_budget", value)
    if not 0 < value < 1:
        raise _wrong(ValueError, source, "overhead_budget", value)
    return float(value)


def _boolean(source: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(TypeError, source, _name_of(source), value)
    return value


def _text(source: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(TypeError, source, _name_of(source), value)
    return value


def _address(source: str, value: object) -> str:
    text = _text(source, value)
    try:
        socket.getaddrinfo(text or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise _wrong(ValueError, source, "addr", value) from None
    return text


def _switches(source: str, value: object) -> frozenset[str]:
    if not isinstance(value, Mapping) or not all(isinstance(on, bool) for on in value.values()):
        raise _wrong(TypeError, source, "collectors", value)
    if not set(value) <= set(REGISTRY.names):
        raise _wrong(ValueError, source, "collectors", dict(value))
    return frozenset(one.name for one in REGISTRY if value.get(one.name, one.default))


def _path(source: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise _wrong(TypeError, source, _name_of(source), value)
    text = os.fspath(value)
    if not isinstance(text, str) or not text:
        raise _wrong(ValueError, source, _name_of(source), value)
    return text


def _host(source: str, value: object) -> str:
    text = _text(source, value)
    if not (_is_ipv6(text) if ":" in text else re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text)):
        raise _wrong(ValueError, source, "advertise", value)
    return text


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _seconds(source: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(TypeError, source, _name_of(source), value)
    if not 0 <= value <= 3600:
        raise _wrong(ValueError, source, _name_of(source), value)
    return float(value)


def _run(source: str, value: object) -> str:
    text = _text(source, value)
    if not 1 <= len(text) <= 200:
        raise _wrong(ValueError, source, "run", value)
    return text


def _ranks(source: str, value: object) -> Ranks:
    text = _text(source, value).lower()
    if text not in {one.value for one in Ranks}:
        raise _wrong(ValueError, source, "ranks", value)
    return Ranks(text)


def _patterns(source: str, value: object) -> tuple[re.Pattern[str], ...]:
    items = (value,) if isinstance(value, str | re.Pattern) else value
    if not isinstance(items, list | tuple):
        raise _wrong(TypeError, source, _name_of(source), value)
    return tuple(_pattern(source, item) for item in items)


def _pattern(source: str, value: object) -> re.Pattern[str]:
    if not isinstance(value, str | re.Pattern) or isinstance(getattr(value, "pattern", ""), bytes):
        raise _wrong(TypeError, source, _name_of(source), value)
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{source}={value!r}: not a regular expression ({error}); {_EXPECTED[_name_of(source)]}") from None


def _labels(source: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise _wrong(TypeError, source, "labels", value)
    reserved = RESERVED_LABELS | REGISTRY.catalogue.labels
    for key in value:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", key) or key.startswith("__"):
            raise ValueError(f"{source}={dict(value)!r}: {key!r} is no label name; use letters, digits and underscores")
        if key in reserved:
            raise ValueError(f"{source}={dict(value)!r}: {key!r} is a label of the exporter's own; choose another name")
    return dict(value)


RESERVED_LABELS = frozenset({"run", "rank", "local_rank", "host", "le", "job", "instance"})
"""Label names that the exporter sets itself or Prometheus uses; those of the metrics are reserved as well."""

_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "port": _or_none(_integer(0, 65535)),
    "addr": _address,
    "every": _every,
    "overhead_budget": _budget,
    "include": _patterns,
    "exclude": _patterns,
    "max_layers": _integer(1, 100_000),
    "dead_window": _integer(1, 1_000_000),
    "moments": _boolean,
    "weights": _boolean,
    "local_norm": _boolean,
    "collectors": _switches,
    "web_config_file": _path,
    "run": _run,
    "rank": _or_none(_integer(0, 10_000_000)),
    "ranks": _ranks,
    "labels": _labels,
    "sd_dir": _path,
    "advertise": _host,
    "linger": _seconds,
    "textfile_dir": _path,
}

CHOICES = tuple(_CHECKS)
"""What can be chosen."""
