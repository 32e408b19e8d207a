"""Types and helps of arguments that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable
from typing import TypeVar

from torch_grad_exporter.config.option import Option

Number = TypeVar("Number", int, float)


def option_help(option: Option, default: object = None) -> str:
    """Return the help of an option of `start_exporter`. `default`: the command's own."""
    text = f"{option.help} (default: {option.shown if default is None else default})"
    return text.replace("`", "").replace("%", "%%")


def number(text: str, read: type[Number], least: float, most: float, wrong: str) -> Number:
    """Return the number that a text stands for.

    Raises:
        argparse.ArgumentTypeError: It is not a number, or beyond the limits; `wrong` is the message.
    """
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
