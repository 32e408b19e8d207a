"""An option of `start_exporter`: its values, where they come from, and its documentation.

Options are the fields of a dataclass, declared with `option()`, once each: `Settings` and `Arguments`. What reads the environment,
what checks, the signature of `start_exporter`, its docstring, the README's table, docs/options.md and `--help` follow from them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Generic, TypeVar

PREFIX = "TORCH_GRAD_EXPORTER_"
"""Of the environment variables; the rest is the option's name in capital letters."""


class Unset(enum.Enum):
    """The default of every argument that has an environment variable: take that, else the option's default."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET

_Value = TypeVar("_Value")
_Value_co = TypeVar("_Value_co", covariant=True)
_Options = TypeVar("_Options")


@dataclass(frozen=True, slots=True)
class Kind(Generic[_Value_co]):
    """A kind of value.

    `takes`: the argument's annotation. `expected`: the fix, such as "expected True or False"; empty where `check` says all.
    `check`: gives the value as the settings hold it; raises `TypeError` or `ValueError`, whose text takes the place of `expected`.
    `parse`: what the text of a variable stands for, before it is checked; raises `ValueError`. `spelled`: how a variable says it.
    """

    takes: str
    expected: str
    check: Callable[[object], _Value_co]
    parse: Callable[[str], object] = str
    spelled: str = "as it is"


@dataclass(frozen=True, slots=True)
class Option:
    """One keyword of `start_exporter`.

    `help`: one phrase, without a full stop, for tables and `--help`. `more`: further sentences, for the docs. `shown`: the
    default, as the docs show it. `variable`: the environment variable that stands for it, empty for none.
    """

    name: str
    kind: Kind[object]
    default: object
    help: str
    more: str
    shown: str
    variable: str

    @property
    def read(self) -> bool:
        """Whether `resolve` reads the variable, which is then the exporter's own."""
        return self.variable.startswith(PREFIX)

    @property
    def is_text(self) -> bool:
        """Whether a text can stand for it, as on a command line; else it takes objects."""
        return bool(self.variable)

    @property
    def is_switch(self) -> bool:
        """Whether its name alone means that it is on."""
        return self.kind.takes.startswith("bool")

    @property
    def may_be_several(self) -> bool:
        """Whether it takes several values of its kind."""
        return "Sequence[" in self.kind.takes

    @property
    def absent(self) -> Unset | None:
        """The default of the argument in the signature: what stands for "not given"."""
        return UNSET if self.read else None

    @property
    def annotation(self) -> str:
        """The argument's annotation, in which `None` stands last."""
        takes = self.kind.takes.removesuffix(" | None")
        return takes + (" | Unset" if self.read else "") + (" | None" if not self.read or takes != self.kind.takes else "")

    def from_argument(self, given: object, name: str = "") -> object:
        """The value that an argument stands for. Raises what names it, the value and the fix."""
        try:
            return self.kind.check(given)
        except (TypeError, ValueError) as error:
            if not self.kind.expected:
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name or self.name}={given!r}: {str(error) or self.kind.expected}") from None

    def from_variable(self, text: str) -> object:
        """The value that the text of the environment variable stands for. Raises what names the variable."""
        name = f"environment variable {self.variable}"
        try:
            value = self.kind.parse(text)
        except ValueError:
            raise ValueError(f"{name}={text!r}: {self.kind.expected}") from None
        return self.from_argument(value, name)


def from_command_line(declared: Option, texts: Sequence[str]) -> object:
    """The argument of `start_exporter` that an option of a command line stands for, given once or several times.

    Raises `ValueError` or `TypeError` that names the option, the value and the fix.
    """
    name = f"--{declared.name.replace('_', '-')}"
    values: list[object] = []
    for text in texts:
        try:
            values.append(declared.kind.parse(text))
        except ValueError:
            raise ValueError(f"{name}={text!r}: {declared.kind.expected or f'expected {declared.kind.spelled}'}") from None
    value = values if declared.may_be_several else values[-1]
    declared.from_argument(value, name)
    return value


def option(
    kind: Kind[_Value],
    default: _Value | Callable[[], _Value],
    help: str,  # noqa: A002 - as argparse calls it
    more: str = "",
    *,
    shown: str = "",
    variable: str | None = None,
) -> _Value:
    """The declaration of an option, as a field of a dataclass; typed as what the field holds, as `dataclasses.field` is.

    `default`: a function makes it anew each time. `shown`: what the docs show instead of it. `variable`: what else than the
    exporter's own variable stands for it, which is then for others to read; empty for none.
    """
    usual = str(default) if not isinstance(default, bool) else "on" if default else "off"
    said = {"kind": kind, "help": help, "more": more, "shown": shown or usual, "variable": variable}
    found: _Value = field(default_factory=default, metadata=said) if callable(default) else field(default=default, metadata=said)
    return found


def options_of(declared: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in its order."""
    return tuple(_option(one, **one.metadata) for one in fields(declared))


def _option(declared: Field[object], *, variable: str | None, **said: Any) -> Option:  # noqa: ANN401 - the metadata of a field
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    own = PREFIX + declared.name.upper()
    return Option(declared.name, default=default, variable=own if variable is None else variable, **said)


def resolve(declared: type[_Options], arguments: Mapping[str, object], environment: Mapping[str, str]) -> _Options:
    """What was chosen: the arguments that are not `UNSET`, else the environment, else the defaults.

    Raises `TypeError` or `ValueError` that names the argument or the variable, its value and the fix.
    """
    chosen: dict[str, object] = {}
    for one in options_of(declared):
        given = arguments.get(one.name, UNSET)
        text = environment.get(one.variable, "").strip() if one.read else ""
        if given is not UNSET:
            chosen[one.name] = one.from_argument(given)
        elif text:
            chosen[one.name] = one.from_variable(text)
    return declared(**chosen)


def source(arguments: Mapping[str, object], name: str) -> str:
    """Where a choice comes from, for error messages: the argument's name or the environment variable's."""
    return f"environment variable {PREFIX}{name.upper()}" if arguments.get(name, UNSET) is UNSET else name
