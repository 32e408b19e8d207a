"""Options as the docs and the command line see them, and where their values come from."""

from __future__ import annotations

import enum
import inspect
import logging
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields

from torch_grad_exporter.arguments import near, shown
from torch_grad_exporter.config.settings import HELP, PREFIX, Arguments, Settings
from torch_grad_exporter.config.values import checked, described, either, parsed
from torch_grad_exporter.errors import say

logger = logging.getLogger("torch_grad_exporter")

# What Kubernetes puts into <SERVICE>_PORT of every container in the namespace of a Service.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+")


class Unset(enum.Enum):
    """The default of every argument that has a variable of the exporter: take that, if it is set."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET

F = typing.TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Option:
    """One keyword of `start_exporter`.

    Attributes:
        name: The keyword.
        type: Its annotated type, by which texts are read and values are checked.
        default: Its value where nothing is given.
        help: One phrase without a full stop, for tables and `--help`.
        more: Further sentences, for the docs.
        shown: The default, as the docs show it.
        variable: The environment variable that stands for it, empty for none.
    """

    name: str
    type: object
    default: object
    help: str
    more: str
    shown: str
    variable: str

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
        """Whether it takes several values of its type."""
        return isinstance(self.default, tuple)

    def from_argument(self, given: object, name: str = "", text: str = "") -> object:
        """Return the value of an argument, as the settings hold it.

        Args:
            given: The argument.
            name: What errors call it, by default its name.
            text: The text that it was read from, which errors show instead of it.

        Raises:
            TypeError: The type is wrong; the message names the argument, the value and the fix.
            ValueError: The value is wrong; likewise.
        """
        try:
            return checked(self.type, given)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            fix = str(error) or f"expected {described(self.type).expected}"
            raise kind(f"{name or self.name}={repr(text) if text else shown(given)}: {fix}") from None

    def from_text(self, text: str, name: str) -> object:
        """Return the argument that a text stands for.

        Raises:
            ValueError: The text is wrong; the message names `name`, the text and the fix.
        """
        try:
            return parsed(self.type, text)
        except ValueError:
            raise ValueError(f"{name}={text!r}: expected {either(described(self.type).written).replace('`', '')}") from None


def options_of(declared: type[Settings | Arguments]) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in its order."""
    hints = typing.get_type_hints(declared, include_extras=True)
    options: list[Option] = []
    for field in fields(declared):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        row = HELP[field.name]
        variable = row.variable or (PREFIX + field.name.upper() if declared is Settings else "")
        shown = row.default or _shown(default)
        options.append(Option(field.name, hints[field.name], default, row.help, row.more, shown, variable))
    return tuple(options)


class _ShownDefault(str):
    """A default in a signature, as a reader sees it."""

    __slots__ = ()

    __repr__ = str.__str__


def with_shown_defaults(function: F) -> F:
    """Let `help()` show the defaults that hold in place of `UNSET`."""
    defaults = {option.name: _ShownDefault(option.shown) for option in options_of(Settings)}
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=parameter.annotation.replace(" | Unset", ""), default=defaults[name])
        if parameter.default is UNSET
        else parameter
        for name, parameter in signature.parameters.items()
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f'"{default.value}"' if isinstance(default, enum.Enum) else str(default)


def resolve(arguments: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """Return the arguments that are not `UNSET`, else the environment, else the defaults, checked.

    Raises:
        TypeError: An argument is of a wrong type; the message names it, the value and the fix.
        ValueError: An argument or a variable is wrong; the message names it, the value and the fix.
    """
    chosen: dict[str, typing.Any] = {}
    for option in options_of(Settings):
        given = arguments.get(option.name, UNSET)
        if given is not UNSET:
            chosen[option.name] = option.from_argument(given)
        elif text := environment.get(option.variable, "").strip():
            name = f"environment variable {option.variable}"
            if SERVICE_LINK.fullmatch(text):
                message = "%s=%r is ignored: Kubernetes sets it for a Service of this name; see enableServiceLinks"
                say(logger, logging.WARNING, message, name, text)
                continue
            chosen[option.name] = option.from_argument(option.from_text(text, name), name, text)
    return Settings(**chosen)


def check_names(names: Iterable[str]) -> None:
    """Raise `TypeError` if one of the names is not a keyword of `start_exporter`, with the nearest one."""
    known = [option.name for option in (*options_of(Settings), *options_of(Arguments))]
    for name in names:
        if name not in known:
            raise TypeError(f"{name}=: unknown option{near(name, known)}")


# Variables of the exporter that are not options; notifiers read them.
OTHER_VARIABLES = (f"{PREFIX}WEBHOOK_URL", f"{PREFIX}ALERTMANAGER_URL")


def misspelt(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that is nearly one of the exporter's."""
    known = [*(option.variable for option in options_of(Settings)), *OTHER_VARIABLES]
    for name in environment.keys() - known:
        # Kubernetes sets further ones for a Service of this name, such as SERVICE_PORT, which are not near.
        if name.startswith(PREFIX) and (meant := near(name, known, prefix=PREFIX)):
            yield f"environment variable {name} is unknown and ignored{meant}"


def source(arguments: Mapping[str, object], name: str) -> str:
    """Return where a choice comes from, for errors: the argument's name or the variable's."""
    unset = arguments.get(name, UNSET) is UNSET
    return f"environment variable {PREFIX}{name.upper()}" if unset else name


def from_command_line(option: Option, texts: Sequence[str]) -> object:
    """Return the argument that an option of a command line stands for, given once or several times.

    Raises:
        TypeError: It is of a wrong type.
        ValueError: A text is wrong; the message names the option, the value and the fix.
    """
    name = f"--{option.name.replace('_', '-')}"
    values = [option.from_text(text, name) for text in texts]
    value = values if option.may_be_several else values[-1]
    option.from_argument(value, name)
    return value
