"""How options are checked, and how the text of an environment variable is read."""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from torch_grad_exporter.capture.schedule import LONGEST
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.torch_compat.optimizers import has_scale

# Labels that the exporter sets itself or Prometheus uses; those of the metrics are reserved too.
RESERVED_LABELS = frozenset({"run", "rank", "local_rank", "host", "le", "job", "instance"})

Check = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class OptionKind:
    """A kind of value.

    Attributes:
        expected: The fix, such as "expected True or False"; empty where errors of `check` have it.
        check: Returns the value as the settings hold it. Raises `TypeError` or `ValueError`, whose
            text, if there is any, takes the place of `expected`.
        parse: Reads the text of a variable, which is checked later. Raises `ValueError`.
        spelled: How a variable spells it, for the docs.
    """

    expected: str
    check: Check
    parse: Callable[[str], object] = str
    spelled: str = "as it is"


def typed(*types: type, right: Callable[[Any], bool] = lambda _: True, of: Check = lambda value: value) -> Check:
    """Return a check of the type and then of the value, of which `of` makes what settings hold."""

    def check(value: object) -> object:
        # To Python True is a number; as an option it is a mistake.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError
        if not right(value):
            raise ValueError
        return of(value)

    return check


# Numbers and words


def whole(low: int, high: int, of: str = "") -> OptionKind:
    """Return the kind of a whole number; `of` says of what."""
    check = typed(int, right=lambda value: low <= value <= high)
    return OptionKind(f"expected a whole number {of}from {low} to {high}", check, int, "a number")


def number(expected: str, right: Callable[[float], bool]) -> OptionKind:
    """Return the kind of a number."""
    return OptionKind(expected, typed(int, float, right=right, of=float), float, "a number")


SHARE = number("expected a share of training time above 0 and below 1, such as 0.01", lambda v: 0 < v < 1)
SECONDS = number("expected a number of seconds from 0 to 3600", lambda v: 0 <= v <= 3600)
PORT = OptionKind(
    "expected a port from 1 to 65535, 0 for any free one, or None to serve nothing",
    typed(int, NoneType, right=lambda value: value is None or 0 <= value <= 65535),
    lambda text: None if text.lower() in ("none", "off") else int(text),
    "a number, or `off`",
)
RANK = OptionKind(
    "expected a whole number from 0",
    typed(int, NoneType, right=lambda value: value is None or 0 <= value <= 10_000_000),
    int,
    "a number",
)
INTERVAL = OptionKind(
    f"expected 'auto' or a whole number of rounds from 1 to {LONGEST}",
    typed(
        int,
        str,
        right=lambda v: v.lower() == "auto" if isinstance(v, str) else 1 <= v <= LONGEST,
        of=lambda value: None if isinstance(value, str) else value,
    ),
    lambda text: text if text.lower() == "auto" else int(text),
    "a number, or `auto`",
)


def words(of: type[enum.Enum]) -> OptionKind:
    """Return the kind of one of several words, in any case."""
    values = [member.value for member in of]
    check = typed(str, right=lambda v: v.lower() in values, of=lambda v: of(v.lower()))
    *first, last = map(repr, values)
    return OptionKind(f"expected {', '.join(first)} or {last}", check, spelled="the word")


def on(text: str) -> bool:
    """Return whether a text means on. Raises `ValueError` if it means neither on nor off."""
    if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError
    return text.lower() in ("1", "true", "yes", "on")


SWITCH = OptionKind("expected True or False", typed(bool), on, "`on` or `off`")
ORIGIN = OptionKind(
    "expected True, False or 'always'",
    lambda v: "always" if isinstance(v, str) and v.lower() == "always" else typed(bool)(v),
    lambda text: text if text.lower() == "always" else on(text),
    "`on`, `off` or `always`",
)

# Texts


def path(of: str) -> OptionKind:
    """Return the kind of the path of something."""
    right = typed(str, right=bool)
    check = typed(str, os.PathLike, of=lambda value: right(os.fspath(value)))
    return OptionKind(f"expected the path of {of}", check)


def _is_address(text: str) -> bool:
    flags = socket.AI_PASSIVE
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(text or None, 0, type=socket.SOCK_STREAM, flags=flags))
    return False


def _is_host(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]")))
    return re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) is not None


NAME = OptionKind("expected a name of 1 to 200 characters", typed(str, right=lambda text: 1 <= len(text) <= 200))
ADDRESS = OptionKind("expected an address such as '127.0.0.1', or '' for all interfaces", typed(str, right=_is_address))
HOST = OptionKind(
    "expected a host name or address, without a port, under which Prometheus reaches this host",
    typed(str, right=_is_host),
)


def _pattern(value: object, expected: str) -> re.Pattern[str]:
    if not isinstance(value, str | re.Pattern) or isinstance(getattr(value, "pattern", ""), bytes):
        raise TypeError
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression ({error}); {expected}") from None


def _patterns(value: object) -> tuple[re.Pattern[str], ...]:
    several = [value] if isinstance(value, str | re.Pattern) else value
    if not isinstance(several, list | tuple):
        raise TypeError
    return tuple(_pattern(one, PATTERNS.expected) for one in several)


def _modules(value: object) -> bool | re.Pattern[str]:
    if value == "":
        raise TypeError
    return value if isinstance(value, bool) else _pattern(value, MODULES.expected)


def _on_or_pattern(text: str) -> bool | str:
    with contextlib.suppress(ValueError):
        return on(text)
    return text


PATTERNS = OptionKind("expected a regular expression on layer names, or several", _patterns, spelled="one, as it is")
MODULES = OptionKind(
    "expected True, False or a regular expression on names of modules",
    _modules,
    _on_or_pattern,
    "`on`, `off`, or a regular expression",
)

# Mappings


def pairs(text: str) -> dict[str, str]:
    """Return the mapping that `key=value,key=value` stands for. Raises `ValueError`."""
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not equals for _, equals, _ in parts):
        raise ValueError
    return {key.strip(): value.strip() for key, _, value in parts}


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(t, str) for t in (*value, *value.values())):
        raise TypeError
    for key in value:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", key) or key.startswith("__"):
            raise ValueError(f"{key!r} is not a label name; use letters, digits and underscores")
        if key in RESERVED_LABELS | REGISTRY.catalogue.labels:
            raise ValueError(f"{key!r} is a label of the exporter's own; choose another name")
    return dict(value)


def _collectors(value: object) -> frozenset[str]:
    fix = f"{COLLECTORS.expected}; there are {', '.join(REGISTRY.names)}"
    if not isinstance(value, Mapping) or not all(isinstance(on, bool) for on in value.values()):
        raise TypeError(fix)
    if "whole_run" in value:
        raise ValueError(
            "the collector whole_run was removed; values over all ranks come from the recording rules of "
            "dashboards/prometheus/ranks.rules.yml, see docs/distributed.md"
        )
    if not set(value) <= set(REGISTRY.names):
        raise ValueError(fix)
    return frozenset(name for name in REGISTRY.names if value.get(name, True))


LABELS = OptionKind("expected a mapping of label names such as {'team': 'vision'}", _labels, pairs, "`team=vision,cost=7`")
COLLECTORS = OptionKind(
    "expected collectors to disable, such as {'host': False}, or host=off in the environment",
    _collectors,
    lambda text: {name: on(word) for name, word in pairs(text).items()},
    "`host=off,gpu=off`",
)

# Objects, for which no variable can stand


def given(
    check: Check = lambda value: value,
    parse: Callable[[str], object] = str,
    spelled: str = "as it is",
) -> OptionKind:
    """Return the kind of what is checked elsewhere, with errors that have the fix."""
    return OptionKind("", check, parse, spelled)


def instance(expected: str, right: Callable[[object], bool]) -> OptionKind:
    """Return the kind of an object that looks right, or None."""

    def check(value: object) -> object:
        if value is not None and not right(value):
            raise TypeError
        return value

    return OptionKind(expected, check)


def scaler(value: object) -> object:
    """Check a gradient scaler."""
    if value is not None and not has_scale(value):
        raise TypeError(f"grad_scaler={type(value).__name__}: expected a torch.amp.GradScaler")
    return value
