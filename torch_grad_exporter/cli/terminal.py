"""What the commands read from the command line, and print."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO, TypeVar

from torch_grad_exporter.config.option import Option
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.gate.rows import one_line

Number = TypeVar("Number", int, float)


def option_help(option: Option, default: object = None) -> str:
    """Return the help of an option of `start_exporter`. `default`: the command's own."""
    text = f"{option.help} (default: {option.shown if default is None else default})"
    return text.replace("`", "").replace("%", "%%")


class HelpAll(argparse.Action):
    """Prints the help with the options that `--help` leaves out, so that it fits a screen. See `leave_out`."""

    hidden: Mapping[argparse.Action, str | None]
    epilog: str

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        for action, text in self.hidden.items():
            action.help = text
        parser.epilog = self.epilog or parser.epilog
        parser.print_help()
        parser.exit()


def leave_out(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action], *, epilog: str = "") -> None:
    """Leave options out of `--help`, and add `--help-all` with all of them, and this `epilog`."""
    hidden = {action: action.help for action in actions}
    for action in hidden:
        action.help = argparse.SUPPRESS
    parser.set_defaults(left_out=[name for action in hidden for name in action.option_strings])
    text = f"show {len(hidden)} more options and exit"
    added = parser.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=text)
    vars(added).update(hidden=hidden, epilog=epilog)


def number(text: str, read: type[Number], least: float, most: float, wrong: str) -> Number:
    """Return the number that a text stands for. Raises `ArgumentTypeError` with the message `wrong`."""
    with contextlib.suppress(ValueError):
        value = read(text)
        if least <= value <= most:
            return value
    raise argparse.ArgumentTypeError(wrong)


def whole(least: int, most: float = float("inf")) -> Callable[[str], int]:
    """Return an argument type: a whole number from `least` to `most`."""
    limits = f"of at least {least}" if most == float("inf") else f"from {least} to {most}"
    return lambda text: number(text, int, least, most, f"{text!r} is not a whole number {limits}")


def matching(pattern: str, wrong: str) -> Callable[[str], str]:
    """Return an argument type: a text that matches, so that it goes into YAML and JSON as it is."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is {wrong}")
        return text

    return parse


def show(text: str) -> None:
    """Print a text at once; characters that standard output cannot have become escapes. Raises `UserError`."""
    if sys.stdout is None:  # closed from the start
        raise UserError("cannot print: standard output is closed")
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
        _abandon(sys.stdout)
        raise UserError(f"cannot print: {getattr(error, 'strerror', None) or error}") from None


def complain(program: str, error: object) -> None:
    """Print an error in one line on standard error, if that takes it: names in it may be anything."""
    try:
        sys.stderr.write(f"{program}: error: {one_line(str(error))}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        _abandon(sys.stderr)


def _abandon(stream: TextIO) -> None:
    """Let the interpreter's own flush at the end succeed: it would print a traceback and change the exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
