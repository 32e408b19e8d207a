"""Values of options by their annotated type: read from text, checked, and described.

A type is one of `TYPES`, a choice of words (an enum or `Literal`), or a union of these. `Annotated` adds what is right for one
option: a `Range` of numbers, or a function that returns the value or raises `ValueError` with the fix.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import re
import socket
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType

from torch_grad_exporter.collectors import REGISTRY

FilePath = NewType("FilePath", str)
"""A path that the user gives as a string or a `PathLike`; `NO_PATH` for none."""

NO_PATH = FilePath("")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, or between them where `inside`."""

    low: float
    high: float
    inside: bool = False

    def __contains__(self, number: float) -> bool:
        return self.low < number < self.high if self.inside else self.low <= number <= self.high

    def __str__(self) -> str:
        return f"above {self.low:g} and below {self.high:g}" if self.inside else f"from {self.low} to {self.high}"


class Described(typing.NamedTuple):
    """How errors and the docs describe a type: `expected` of an argument, `written` in a variable, which may be one of several."""

    expected: str
    written: list[str]


TYPES: dict[object, Described] = {
    bool: Described("True or False", ["`on`", "`off`"]),
    int: Described("a whole number", ["a number"]),
    float: Described("a number", ["a number"]),
    str: Described("a string", ["as it is"]),
    types.NoneType: Described("None", ["`off`"]),
    FilePath: Described("a path", ["as it is"]),
    re.Pattern[str]: Described("a regular expression", ["a regular expression"]),
    tuple[re.Pattern[str], ...]: Described("a regular expression or a list of them", ["one, as it is"]),
    Mapping[str, str]: Described("a mapping such as {'team': 'vision'}", ["`team=vision,cost=7`"]),
    Mapping[str, bool]: Described("a mapping such as {'host': False}", ["`host=off,gpu=off`"]),
}


def described(hint: object) -> Described:
    """Return the description of an annotated type, with its range or its words."""
    members, extras = _taken_apart(hint)
    if len(members) > 1:
        each = [described(member) for member in members]
        return Described(either(text.expected for text in each), [written for text in each for written in text.written])
    if words := _words(members[0]):
        return Described(either(map(repr, words)), [f"`{word}`" for word in words])
    expected, written = TYPES[members[0]]
    return Described(" ".join([expected, *(str(extra) for extra in extras if isinstance(extra, Range))]), written)


def either(choices: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def parsed(hint: object, text: str) -> object:
    """Return the argument that a text stands for; `checked` checks it.

    Raises:
        ValueError: The text stands for no value of the type.
    """
    members, _ = _taken_apart(hint)
    if len(members) == 1:
        return _parsed(members[0], text)
    for member in members:
        with contextlib.suppress(ValueError):
            return parsed(member, text)
    raise ValueError


def _parsed(kind: object, text: str) -> object:
    if kind is bool:
        return _is_on(text)
    if kind is int or kind is float:
        return int(text) if kind is int else float(text)
    if kind is types.NoneType:
        if text.lower() not in ("none", "off"):
            raise ValueError
        return None
    if kind == Mapping[str, str]:
        return _pairs(text)
    if kind == Mapping[str, bool]:
        return {name: _is_on(word) for name, word in _pairs(text).items()}
    if typing.get_origin(kind) is Literal and text.lower() not in _words(kind):
        raise ValueError
    return text


def _is_on(text: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError
    return text.lower() in ("1", "true", "yes", "on")


def _pairs(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not equals for _, equals, _ in parts):
        raise ValueError
    return {key.strip(): value.strip() for key, _, value in parts}


def checked(hint: object, value: object) -> object:
    """Return an argument as the settings hold it, such as a word as a member of its enum.

    Raises:
        TypeError: The type is wrong.
        ValueError: The value is wrong. Errors have a text where `described` does not say enough.
    """
    members, extras = _taken_apart(hint)
    right = _checked(members[0], value) if len(members) == 1 else _any_of(members, value)
    for extra in extras:
        if isinstance(extra, Range) and isinstance(right, int | float) and right not in extra:
            raise ValueError
        if callable(extra):
            right = extra(right)
    return right


def _any_of(members: Iterable[object], value: object) -> object:
    """Return what the first member that takes the value makes of it; a wrong value counts more than a wrong type."""
    errors: list[TypeError | ValueError] = []
    for member in members:
        try:
            return checked(member, value)
        except (TypeError, ValueError) as error:
            errors.append(error)
    raise next((error for error in errors if isinstance(error, ValueError)), errors[0])


def _checked(kind: Any, value: Any) -> object:  # noqa: ANN401 - of annotations, and of users
    if words := _words(kind):
        word = _of_type(str, value).lower()
        if word not in words:
            raise ValueError
        return kind(word) if isinstance(kind, type) else word
    if kind == re.Pattern[str]:
        return _pattern(value)
    if kind == tuple[re.Pattern[str], ...]:
        several = [value] if isinstance(value, str | re.Pattern) else value
        return tuple(_pattern(each) for each in _of_type(list | tuple, several))
    if kind is FilePath:
        if not (path := _of_type(str, os.fspath(value) if isinstance(value, os.PathLike) else value)):
            raise ValueError
        return path
    if typing.get_origin(kind) is Mapping:
        for item in _of_type(Mapping, value).values():
            _of_type(typing.get_args(kind)[1], item)
        return value
    return float(_of_type(int | float, value)) if kind is float else _of_type(kind, value)


def _of_type(kind: Any, value: Any) -> Any:  # noqa: ANN401 - as above
    # To Python True is a number; as an option it is a mistake.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _pattern(value: object) -> re.Pattern[str]:
    if not isinstance(value, str | re.Pattern) or isinstance(getattr(value, "pattern", ""), bytes):
        raise TypeError
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}; expected one") from None


def _taken_apart(hint: object) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the members of a union, or the type alone, and what `Annotated` adds."""
    extras: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *rest = typing.get_args(hint)
        extras = tuple(rest)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return (typing.get_args(hint) if is_union else (hint,)), extras


def _words(kind: object) -> list[str]:
    if typing.get_origin(kind) is Literal:
        return [*typing.get_args(kind)]
    return [member.value for member in kind] if isinstance(kind, type) and issubclass(kind, enum.Enum) else []


# What is right for one option

# Labels that the exporter sets itself or Prometheus uses; those of the metrics are reserved too.
RESERVED_LABELS = frozenset({"run", "rank", "local_rank", "host", "le", "job", "instance"})


def address(text: str) -> str:
    """Check the address to listen on."""
    with contextlib.suppress(OSError, UnicodeError):
        if socket.getaddrinfo(text or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            return text
    raise ValueError("expected an address such as '127.0.0.1', or '' for all interfaces")


def host(text: str) -> str:
    """Check the host name or address of this host."""
    with contextlib.suppress(ValueError):
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
        return text
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text):
        raise ValueError("expected a host name or address, without a port, under which Prometheus reaches this host")
    return text


def run_name(text: str) -> str:
    """Check the name of a run."""
    if not 1 <= len(text) <= 200:
        raise ValueError("expected a name of 1 to 200 characters")
    return text


def not_empty(pattern: bool | re.Pattern[str]) -> bool | re.Pattern[str]:
    """Refuse the empty pattern, which would match every module."""
    if isinstance(pattern, re.Pattern) and not pattern.pattern:
        raise ValueError
    return pattern


def labels(mapping: Mapping[object, str]) -> dict[object, str]:
    """Check names of labels: that they are names, and not those of the exporter."""
    for name in mapping:
        if not isinstance(name, str):
            raise TypeError
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
            raise ValueError(f"{name!r} is not a label name; use letters, digits and underscores")
        if name in RESERVED_LABELS | REGISTRY.catalogue.labels:
            raise ValueError(f"{name!r} is a label of the exporter's own; choose another name")
    return dict(mapping)


def collectors(mapping: Mapping[str, bool]) -> dict[str, bool]:
    """Return of every collector whether it is enabled; those that are not named are."""
    if "whole_run" in mapping:
        raise ValueError(
            "the collector whole_run was removed; values over all ranks come from the recording rules of "
            "dashboards/prometheus/ranks.rules.yml, see docs/distributed.md"
        )
    if not set(mapping) <= set(REGISTRY.names):
        raise ValueError(f"expected names of collectors; there are {', '.join(REGISTRY.names)}")
    return {name: mapping.get(name, True) for name in REGISTRY.names}
