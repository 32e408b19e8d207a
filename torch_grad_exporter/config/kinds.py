"""The kinds of values that options have: how each is checked, and how the text of an environment variable is read.

A check raises `TypeError` or `ValueError`, with a text only where it says more than what was expected; the option names the source.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from torch_grad_exporter.capture.reader import Scaler
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config.option import Kind
from torch_grad_exporter.model import given as model_given
from torch_grad_exporter.torch_compat.optimizers import has_scale

_Choice = TypeVar("_Choice", bound=enum.Enum)
_Value = TypeVar("_Value")

RESERVED_LABELS = frozenset({"run", "rank", "local_rank", "host", "le", "job", "instance"})
"""Label names that the exporter sets itself or Prometheus uses; those of the metrics are reserved as well."""

# Numbers


def _integer(value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    if not low <= value <= high:
        raise ValueError
    return value


def whole(low: int, high: int, of: str = "") -> Kind[int]:
    """A whole number; `of` says what is counted."""
    expected = f"expected a whole number {f'of {of} ' if of else ''}from {low} to {high}"
    return Kind("int", expected, lambda value: _integer(value, low, high), int, "a number")


def port() -> Kind[int | None]:
    """A port, 0 for any free one, or `None`."""
    return Kind(
        "int | None",
        "expected a port from 1 to 65535, 0 for any free one, or None to serve nothing",
        lambda value: None if value is None else _integer(value, 0, 65535),
        lambda text: None if text.lower() in ("none", "off") else int(text),
        "a number, or `off`",
    )


def rank() -> Kind[int | None]:
    """A rank in a job."""
    return Kind(
        "int",
        "expected a whole number from 0",
        lambda value: None if value is None else _integer(value, 0, 10_000_000),
        int,
        "a number",
    )


def interval(longest: int) -> Kind[int | None]:
    """A number of rounds, or "auto", which becomes `None`."""

    def parse(text: str) -> str | int:
        return text if text.lower() == "auto" else int(text)

    def check(value: object) -> int | None:
        if isinstance(value, str) and value.lower() != "auto":
            raise ValueError
        return None if isinstance(value, str) else _integer(value, 1, longest)

    expected = f"expected 'auto' or a whole number of rounds from 1 to {longest}"
    return Kind('Literal["auto"] | int', expected, check, parse, "a number, or `auto`")


def _real(expected: str, right: Callable[[float], bool]) -> Kind[float]:
    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError
        if not right(value):
            raise ValueError
        return float(value)

    return Kind("float", expected, check, float, "a number")


def share(of: str, example: str) -> Kind[float]:
    """A share above 0 and below 1."""
    return _real(f"expected a share of {of} above 0 and below 1, such as {example}", lambda value: 0 < value < 1)


def seconds(most: int) -> Kind[float]:
    """A number of seconds from 0."""
    return _real(f"expected a number of seconds from 0 to {most}", lambda value: 0 <= value <= most)


# Choices


_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _on(text: str) -> bool:
    if text.lower() not in _ON + _OFF:
        raise ValueError
    return text.lower() in _ON


def switch() -> Kind[bool]:
    """On or off."""
    return Kind("bool", "expected True or False", lambda value: _of(bool, value), _on, "`on` or `off`")


def switch_or(word: str) -> Kind[bool | str]:
    """On, off, or a word for more than on."""

    def check(value: object) -> bool | str:
        if isinstance(value, str) and value.lower() == word:
            return word
        return _of(bool, value)

    def parse(text: str) -> bool | str:
        return word if text.lower() == word else _on(text)

    return Kind(f'bool | Literal["{word}"]', f"expected True, False or {word!r}", check, parse, f"`on`, `off` or `{word}`")


def choice(of: type[_Choice]) -> Kind[_Choice]:
    """One of several words, in whatever case."""
    words = [str(one.value) for one in of]

    def check(value: object) -> _Choice:
        word = _of(str, value).lower()
        if word not in words:
            raise ValueError
        return of(word)

    expected = f"expected {', '.join(map(repr, words[:-1]))} or {words[-1]!r}"
    takes = ", ".join(f'"{word}"' for word in words)
    return Kind(f"Literal[{takes}]", expected, check, spelled="the word")


def collectors() -> Kind[frozenset[str]]:
    """Collectors to switch; what is not named is as it is by default."""
    expected = "expected collectors to switch, such as {'host': False}, or host=off in the environment"

    def check(value: object) -> frozenset[str]:
        there_are = f"{expected}; there are {', '.join(REGISTRY.names)}"
        if not isinstance(value, Mapping) or not all(isinstance(on, bool) for on in value.values()):
            raise TypeError(there_are)
        if not set(value) <= set(REGISTRY.names):
            raise ValueError(there_are)
        return frozenset(one.name for one in REGISTRY if value.get(one.name, one.default))

    def parse(text: str) -> dict[str, bool]:
        return {name: _on(word) for name, word in pairs(text).items()}

    return Kind("Mapping[str, bool]", expected, check, parse, "`host=off,gpu=off`")


# Texts


def _of(kind: type[_Value], value: object) -> _Value:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _text(expected: str, right: Callable[[str], bool]) -> Kind[str]:
    def check(value: object) -> str:
        text = _of(str, value)
        if not right(text):
            raise ValueError
        return text

    return Kind("str", expected, check)


def name(longest: int) -> Kind[str]:
    """A name of some characters."""
    return _text(f"expected a name of 1 to {longest} characters", lambda text: 1 <= len(text) <= longest)


def path(of: str) -> Kind[str]:
    """The path of something."""

    def check(value: object) -> str:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else _of(str, value)
        if not isinstance(text, str) or not text:
            raise ValueError
        return text

    return Kind("str | os.PathLike[str]", f"expected the path of {of}", check)


def address() -> Kind[str]:
    """An address of this host to listen on."""
    return _text("expected an address such as '127.0.0.1', or '' for all interfaces", _is_address)


def host() -> Kind[str]:
    """A host by name or address."""
    return _text("expected a host name or address, without a port, under which Prometheus reaches this host", _is_host)


def _is_address(text: str) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(text or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    return False


def _is_host(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]")))
    return re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) is not None


# Several


def patterns(on: str) -> Kind[tuple[re.Pattern[str], ...]]:
    """One regular expression or several."""
    expected = f"expected a regular expression on {on}, or several"

    def compiled(value: object) -> re.Pattern[str]:
        if not isinstance(value, str | re.Pattern) or isinstance(getattr(value, "pattern", ""), bytes):
            raise TypeError
        try:
            return re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression ({error}); {expected}") from None

    def check(value: object) -> tuple[re.Pattern[str], ...]:
        items = [value] if isinstance(value, str | re.Pattern) else value
        if not isinstance(items, list | tuple):
            raise TypeError
        return tuple(map(compiled, items))

    return Kind("str | Sequence[str]", expected, check, spelled="one, as it is")


def activations() -> Kind[bool | re.Pattern[str]]:
    """On, off, or a regular expression on names of modules."""
    expected = "expected True, False or a regular expression on names of modules"

    def check(value: object) -> bool | re.Pattern[str]:
        if isinstance(value, bool):
            return value
        if not isinstance(value, str | re.Pattern) or isinstance(getattr(value, "pattern", ""), bytes) or value == "":
            raise TypeError
        try:
            return re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error}); {expected}") from None

    def parse(text: str) -> bool | str:
        return _on(text) if text.lower() in (*_ON, *_OFF) else text

    return Kind("bool | str", expected, check, parse, "`on`, `off`, or a regular expression")


def pairs(text: str) -> dict[str, str]:
    """What `key=value,key=value` stands for; raises `ValueError`."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not middle for _, middle, _ in pairs):
        raise ValueError
    return {key.strip(): value.strip() for key, _, value in pairs}


def labels() -> Kind[Mapping[str, str]]:
    """Labels by name, none of which the metrics themselves use."""

    def check(value: object) -> Mapping[str, str]:
        if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
            raise TypeError
        reserved = RESERVED_LABELS | REGISTRY.catalogue.labels
        for key in value:
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", key) or key.startswith("__"):
                raise ValueError(f"{key!r} is no label name; use letters, digits and underscores")
            if key in reserved:
                raise ValueError(f"{key!r} is a label of the exporter's own; choose another name")
        return dict(value)

    expected = "expected a mapping of label names such as {'team': 'vision'}"
    return Kind("Mapping[str, str]", expected, check, pairs, "`team=vision,cost=7`")


# Objects, which no environment variable can hold


def given(
    takes: str, check: Callable[[object], object] = lambda value: value, parse: Callable[[str], object] = str, spelled: str = ""
) -> Kind[Any]:
    """What is checked here alone, or with others. `check` raises what names the argument; `parse` reads it from a command line."""
    return Kind(takes, "", check, parse, spelled or "as it is")


def optimizers() -> Kind[dict[str, torch.optim.Optimizer]]:
    """One optimizer or several; those without a name get that of their class."""

    def check(value: object) -> dict[str, torch.optim.Optimizer]:
        return model_given.optimizers(value, otherwise="for anything else call exporter.step() after each step")

    one = "torch.optim.Optimizer"
    return given(f"{one} | Sequence[{one}] | Mapping[str, {one}] | None", check)


def scaler() -> Kind[Scaler | None]:
    """A gradient scaler."""

    def check(value: object) -> Scaler | None:
        if value is not None and not has_scale(value):
            raise TypeError(f"grad_scaler={type(value).__name__}: expected a torch.amp.GradScaler")
        return cast("Scaler | None", value)

    return given("Scaler | None", check)


def instance(takes: str, of: str, is_one: Callable[[object], bool]) -> Kind[Any]:
    """An object of a class."""

    def check(value: object) -> object:
        if value is not None and not is_one(value):
            raise TypeError
        return value

    return Kind(f"{takes} | None", f"expected {of}", check)
