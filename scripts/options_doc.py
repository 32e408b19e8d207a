"""Writes what follows from the declared options: docs/options.md, and the docstring of `start_exporter`.

`make golden` runs it, and a test compares.
"""

from __future__ import annotations

import inspect
import pathlib
import re
import textwrap

from torch_grad_exporter import start_exporter
from torch_grad_exporter.config.option import Option, options_of
from torch_grad_exporter.config.settings import PREFIX, Arguments, Settings
from torch_grad_exporter.config.values import described as described_type
from torch_grad_exporter.config.values import either

ROOT = pathlib.Path(__file__).resolve().parent.parent

PAGE = """# Options

<!-- `make golden` writes this page from `torch_grad_exporter/config/`. Edit the declarations. -->

Every option is a keyword of `start_exporter`. An argument wins over the environment variable, and the variable over the default. An
empty variable counts as not set. A wrong value raises `TypeError` or `ValueError` before the exporter registers anything; the
message names the argument or the variable, its value and the fix. A misspelt variable is named in the log with the nearest one. In
a variable, `true`, `yes` and `1` also mean `on`, and `false`, `no` and `0` also mean `off`.

## Options with a variable of the exporter

{settings}

## Options with a variable of OpenTelemetry, or with none

A wrong argument raises; a wrong variable of OpenTelemetry only costs a warning, see [OpenTelemetry](otlp.md). Options that take
objects have no variable.

{arguments}
"""

# The part of the docstring of `start_exporter` that describes the options.
DOCSTRING = re.compile(r"(?<=first part of the layer labels\.\n).*?(?=\n\n    Returns:)", re.DOTALL)


def every_option() -> tuple[Option, ...]:
    """All options, in the order of the signature."""
    return options_of(Settings) + options_of(Arguments)


def meaning(option: Option) -> str:
    """One or more sentences."""
    return f"{option.help}. {option.more}".strip()


def annotation(option: Option) -> str:
    """Return the type of an argument, as the signature of `start_exporter` has it."""
    return str(inspect.signature(start_exporter).parameters[option.name].annotation).replace("'", '"')


def cell(text: str) -> str:
    """As it may stand in a table."""
    return text.replace("|", "\\|")


def described(chosen: tuple[Option, ...]) -> str:
    """The table of options for their page."""
    lines = ["| option | type | default | environment | written as | meaning |", "|---|---|---|---|---|---|"]
    for option in chosen:
        variable = f"`{option.variable}`" if option.variable else ""
        spelled = either(described_type(option.type).written) if option.variable.startswith(PREFIX) else ""
        takes = f"`{cell(annotation(option))}`"
        lines.append(f"| `{option.name}` | {takes} | {option.shown} | {variable} | {spelled} | {cell(meaning(option))} |")
    return "\n".join(lines)


def page() -> str:
    """The whole of docs/options.md."""
    return PAGE.format(settings=described(options_of(Settings)), arguments=described(options_of(Arguments)))


def described_in_code(option: Option) -> str:
    """Return one or more sentences, with the default in the first."""
    return f"{option.help[0].upper()}{option.help[1:]} (default: {option.shown}). {option.more}".strip()


def docstring() -> str:
    """Return the options as they stand in the docstring of `start_exporter`."""
    texts = (f"{option.name}: {described_in_code(option)}" for option in every_option())
    return "\n".join(
        textwrap.fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False) for text in texts
    )


def written() -> dict[pathlib.Path, str]:
    """Each file with what it has to contain."""
    start = ROOT / "torch_grad_exporter" / "start.py"
    return {
        ROOT / "docs" / "options.md": page(),
        start: replaced(DOCSTRING, docstring(), start.read_text(encoding="utf-8")),
    }


def replaced(pattern: re.Pattern[str], new: str, text: str) -> str:
    """The text with its one place of this pattern written anew; raises `ValueError` where there is not exactly one."""
    result, count = pattern.subn(lambda _: new, text)
    if count != 1:
        raise ValueError(f"{pattern.pattern!r}: expected one place, found {count}")
    return result


if __name__ == "__main__":
    for target, content in written().items():
        target.write_text(content, encoding="utf-8")
