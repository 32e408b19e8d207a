"""The kinds of values that options have: how each is checked, and how the text of an environment variable is read."""

from __future__ import annotations

import enum
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config.option import Kind, Source

_Choice = TypeVar("_Choice", bound=enum.Enum)
_Value = TypeVar("_Value")

RESERVED_LABELS = frozenset({"run", "rank", "local_rank", "host", "le", "job", "instance"})
"""Label names that the exporter sets itself or Prometheus uses; those of the metrics are reserved as well."""

# Numbers


def _integer(source: Source, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise source.wrong(TypeError, value)
    if not low <= value <= high:
        raise source.wrong(ValueError, value)
    return value


def whole(low: int, high: int, of: str = "") -> Kind[int]:
    """A whole number; `of` says what is counted."""
    expected = f"expected a whole number {f'of {of} ' if of else ''}from {low} to {high}"
    return Kind("int", expected, lambda source, value: _integer(source, value, low, high), int, "a number")


def port() -> Kind[int | None]:
    """A port, 0 for any free one, or `None`."""

    def parse(text: str) -> int | None:
        return None if text.lower() in ("none", "off") else int(text)

    def check(source: Source, value: object) -> int | None:
        return None if value is None else _integer(source, value, 0, 65535)

    expected = "expected a port from 1 to 65535, 0 for any free one, or None to serve nothing"
    return Kind("int | None", expected, check, parse, "a number, or `off`")


def rank() -> Kind[int | None]:
    """A rank in a job."""

    def check(source: Source, value: object) -> int | None:
        return None if value is None else _integer(source, value, 0, 10_000_000)

    return Kind("int", "expected a whole number from 0", check, int, "a number")


def interval(longest: int) -> Kind[int | None]:
    """A number of rounds, or "auto", which becomes `None`."""

    def parse(text: str) -> str | int:
        return text if text.lower() == "auto" else int(text)

    def check(source: Source, value: object) -> int | None:
        if isinstance(value, str):
            if value.lower() != "auto":
                raise source.wrong(ValueError, value)
            return None
        return _integer(source, value, 1, longest)

    expected = f"expected 'auto' or a whole number of rounds from 1 to {longest}"
    return Kind('Literal["auto"] | int', expected, check, parse, "a number, or `auto`")


def _real(source: Source, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise source.wrong(TypeError, value)
    return value


def share(of: str, example: str) -> Kind[float]:
    """A share above 0 and below 1."""

    def check(source: Source, value: object) -> float:
        number = _real(source, value)
        if not 0 < number < 1:
            raise source.wrong(ValueError, value)
        return float(number)

    return Kind("float", f"expected a share of {of} above 0 and below 1, such as {example}", check, float, "a number")


def seconds(most: int) -> Kind[float]:
    """A number of seconds from 0."""

    def check(source: Source, value: object) -> float:
        number = _real(source, value)
        if not 0 <= number <= most:
            raise source.wrong(ValueError, value)
        return float(number)

    return Kind("float", f"expected a number of seconds from 0 to {most}", check, float, "a number")


# Choices


def _on(text: str) -> bool:
    on, off = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
    if text.lower() not in on + off:
        raise ValueError
    return text.lower() in on


def switch() -> Kind[bool]:
    """On or off."""

    def check(source: Source, value: object) -> bool:
        if not isinstance(value, bool):
            raise source.wrong(TypeError, value)
        return value

    return Kind("bool", "expected True or False", check, _on, "`on` or `off`")


def choice(of: type[_Choice]) -> Kind[_Choice]:
    """One of several words, in whatever case."""
    words = [str(one.value) for one in of]

    def check(source: Source, value: object) -> _Choice:
        word = _text(source, value).lower()
        if word not in words:
            raise source.wrong(ValueError, value)
        return of(word)

    expected = f"expected {', '.join(map(repr, words[:-1]))} or {words[-1]!r}"
    takes = ", ".join(f'"{word}"' for word in words)
    return Kind(f"Literal[{takes}]", expected, check, spelled="the word")


def collectors() -> Kind[frozenset[str]]:
    """Collectors to switch; what is not named is as it is by default."""

    def parse(text: str) -> dict[str, bool]:
        pairs = _pairs(text)
        if not set(pairs) <= set(REGISTRY.names):
            raise ValueError
        return {name: _on(word) for name, word in pairs.items()}

    def check(source: Source, value: object) -> frozenset[str]:
        if not isinstance(value, Mapping) or not all(isinstance(on, bool) for on in value.values()):
            raise source.wrong(TypeError, value)
        if not set(value) <= set(REGISTRY.names):
            raise source.wrong(ValueError, dict(value))
        return frozenset(one.name for one in REGISTRY if value.get(one.name, one.default))

    def there_are() -> str:
        return f"; there are {', '.join(REGISTRY.names)}"

    expected = "expected collectors to switch, such as {'host': False}, or host=off in the environment"
    return Kind("Mapping[str, bool]", expected, check, parse, "`host=off,gpu=off`", there_are)


# Texts


def _text(source: Source, value: object) -> str:
    if not isinstance(value, str):
        raise source.wrong(TypeError, value)
    return value


def name(longest: int) -> Kind[str]:
    """A name of some characters."""

    def check(source: Source, value: object) -> str:
        if not 1 <= len(_text(source, value)) <= longest:
            raise source.wrong(ValueError, value)
        return str(value)

    return Kind("str", f"expected a name of 1 to {longest} characters", check)


def path(of: str) -> Kind[str]:
    """The path of something."""

    def check(source: Source, value: object) -> str:
        if not isinstance(value, str | os.PathLike):
            raise source.wrong(TypeError, value)
        text = os.fspath(value)
        if not isinstance(text, str) or not text:
            raise source.wrong(ValueError, value)
        return text

    return Kind("str | os.PathLike[str]", f"expected the path of {of}", check)


def address() -> Kind[str]:
    """An address of this host to listen on."""

    def check(source: Source, value: object) -> str:
        text = _text(source, value)
        try:
            socket.getaddrinfo(text or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError):
            raise source.wrong(ValueError, value) from None
        return text

    return Kind("str", "expected an address such as '127.0.0.1', or '' for all interfaces", check)


def host() -> Kind[str]:
    """A host by name or address."""

    def check(source: Source, value: object) -> str:
        text = _text(source, value)
        if not (_is_ipv6(text) if ":" in text else re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text)):
            raise source.wrong(ValueError, value)
        return text

    expected = "expected a host name or address, without a port, under which Prometheus reaches this host"
    return Kind("str", expected, check)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


# Several


def patterns(on: str) -> Kind[tuple[re.Pattern[str], ...]]:
    """One regular expression or several."""

    def compiled(source: Source, value: object) -> re.Pattern[str]:
        if not isinstance(value, str | re.Pattern) or isinstance(getattr(value, "pattern", ""), bytes):
            raise source.wrong(TypeError, value)
        try:
            return re.compile(value)
        except re.error as error:
            raise source.wrong(ValueError, value, f"not a regular expression ({error}); {source.expected}") from None

    def check(source: Source, value: object) -> tuple[re.Pattern[str], ...]:
        items = (value,) if isinstance(value, str | re.Pattern) else value
        if not isinstance(items, list | tuple):
            raise source.wrong(TypeError, value)
        return tuple(compiled(source, item) for item in items)

    return Kind("str | Sequence[str]", f"expected a regular expression on {on}, or several", check, spelled="one, as it is")


def _pairs(text: str) -> dict[str, str]:
    """What `key=value,key=value` stands for; raises `ValueError`."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not middle for _, middle, _ in pairs):
        raise ValueError
    return {key.strip(): value.strip() for key, _, value in pairs}


def labels() -> Kind[Mapping[str, str]]:
    """Labels by name, none of which the metrics themselves use."""

    def check(source: Source, value: object) -> Mapping[str, str]:
        if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
            raise source.wrong(TypeError, value)
        reserved = RESERVED_LABELS | REGISTRY.catalogue.labels
        for key in value:
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", key) or key.startswith("__"):
                raise source.wrong(ValueError, dict(value), f"{key!r} is no label name; use letters, digits and underscores")
            if key in reserved:
                raise source.wrong(ValueError, dict(value), f"{key!r} is a label of the exporter's own; choose another name")
        return dict(value)

    return Kind(
        "Mapping[str, str]", "expected a mapping of label names such as {'team': 'vision'}", check, _pairs, "`team=vision,cost=7`"
    )


# Objects


def given(takes: str, check: Callable[[object], _Value]) -> Kind[_Value]:
    """What no environment variable can hold: an object, or what is checked with others. `check` raises what names the argument."""
    return Kind(takes, "", lambda _source, value: check(value))
