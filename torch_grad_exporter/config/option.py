"""An option of `start_exporter`: its values, where they come from, and its documentation."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from torch_grad_exporter.config.kinds import SWITCH, OptionKind, words

# Of the exporter's variables; the rest is the option's name in capital letters.
PREFIX = "TORCH_GRAD_EXPORTER_"


class Unset(enum.Enum):
    """The default of every argument that has a variable of the exporter: take that, if it is set."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET

_Value = TypeVar("_Value")
_Options = TypeVar("_Options")


@dataclass(frozen=True, slots=True)
class Option:
    """One keyword of `start_exporter`.

    Attributes:
        name: The keyword.
        kind: How it is checked and read.
        default: Its value where nothing is given.
        help: One phrase without a full stop, for tables and `--help`.
        more: Further sentences, for the docs.
        shown: The default, as the docs show it.
        variable: The environment variable that stands for it, empty for none.
    """

    name: str
    kind: OptionKind
    default: object
    help: str
    more: str
    shown: str
    variable: str

    @property
    def read(self) -> bool:
        """Whether the variable is the exporter's own, which `resolve` reads."""
        return self.variable.startswith(PREFIX)

    @property
    def is_text(self) -> bool:
        """Whether a text can stand for it, as on a command line; else it takes objects."""
        return bool(self.variable)

    @property
    def is_switch(self) -> bool:
        """Whether its name alone means that it is on."""
        return isinstance(self.default, bool)

    @property
    def may_be_several(self) -> bool:
        """Whether it takes several values of its kind."""
        return isinstance(self.default, tuple)

    def from_argument(self, given: object, name: str = "") -> object:
        """Return the value of an argument. Errors name the argument, the value and the fix."""
        try:
            return self.kind.check(given)
        except (TypeError, ValueError) as error:
            if not self.kind.expected:
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name or self.name}={given!r}: {str(error) or self.kind.expected}") from None

    def from_text(self, text: str, name: str) -> object:
        """Return the argument that a text stands for. Errors name `name`, the text and the fix."""
        try:
            return self.kind.parse(text)
        except ValueError:
            expected = self.kind.expected or f"expected {self.kind.spelled}"
            raise ValueError(f"{name}={text!r}: {expected}") from None


def option(
    default: _Value | Callable[[], _Value],
    help: str,  # noqa: A002 - as argparse calls it
    more: str = "",
    *,
    kind: OptionKind | None = None,
    shown: str = "",
    variable: str | None = None,
) -> _Value:
    """Declare an option, as a field of a dataclass; typed as what the field holds.

    Args:
        default: The default, or what makes a new one each time.
        help: One phrase without a full stop.
        more: Further sentences.
        kind: How it is checked; by default a switch or a choice of words, by the default's type.
        shown: What the docs show instead of the default.
        variable: Another variable than the exporter's own, which is for others to read; empty for
            none.
    """
    usual = str(default)
    if isinstance(default, bool):
        kind, usual = kind or SWITCH, "on" if default else "off"
    elif isinstance(default, enum.Enum):
        kind, usual = kind or words(type(default)), f'"{default.value}"'
    metadata = {"kind": kind, "help": help, "more": more, "shown": shown or usual, "variable": variable}
    made: _Value = (
        field(default_factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)
    )
    return made


def options_of(declared: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in its order."""
    return tuple(_option(one, **one.metadata) for one in fields(declared))


def _option(declared: Field[object], variable: str | None, **metadata: Any) -> Option:  # noqa: ANN401 - of a field
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    own = PREFIX + declared.name.upper()
    return Option(declared.name, default=default, variable=own if variable is None else variable, **metadata)


def resolve(declared: type[_Options], arguments: Mapping[str, object], environment: Mapping[str, str]) -> _Options:
    """Return the arguments that are not `UNSET`, else the environment, else the defaults, checked.

    Raises:
        TypeError: An argument is of a wrong type; the message names it, the value and the fix.
        ValueError: An argument or a variable is wrong; the message names it, the value and the fix.
    """
    chosen: dict[str, object] = {}
    for one in options_of(declared):
        given, name = arguments.get(one.name, UNSET), one.name
        text = environment.get(one.variable, "").strip() if one.read else ""
        if given is UNSET and text:
            name = f"environment variable {one.variable}"
            given = one.from_text(text, name)
        if given is not UNSET:
            chosen[one.name] = one.from_argument(given, name)
    return declared(**chosen)


def source(arguments: Mapping[str, object], name: str) -> str:
    """Return where a choice comes from, for errors: the argument's name or the variable's."""
    unset = arguments.get(name, UNSET) is UNSET
    return f"environment variable {PREFIX}{name.upper()}" if unset else name


def from_command_line(declared: Option, texts: Sequence[str]) -> object:
    """Return the argument that an option of a command line stands for, given once or several times.

    Raises:
        TypeError: It is of a wrong type.
        ValueError: A text is wrong; the message names the option, the value and the fix.
    """
    name = f"--{declared.name.replace('_', '-')}"
    values = [declared.from_text(text, name) for text in texts]
    value = values if declared.may_be_several else values[-1]
    declared.from_argument(value, name)
    return value
