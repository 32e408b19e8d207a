"""Checks of numbers that users give. An error names the argument, its value and the fix."""

from __future__ import annotations

import math


def check_number(
    shown: str,
    value: object,
    *,
    above: float | None = None,
    least: float = 0.0,
    most: float = math.inf,
    what: str = "a finite number",
    example: float,
) -> float:
    """Return a finite number within bounds.

    Args:
        shown: The argument with its value, as the error shows them, such as `timeout=-1`.
        value: What the user gave. `True` and `False` are not numbers.
        above: The bound that the number must exceed; it replaces `least`.
        least: The smallest number allowed.
        most: The largest number allowed.
        what: What is expected, in the error.
        example: A right value, in the error.

    Raises:
        TypeError: The value is not a number.
        ValueError: The number is not finite or out of bounds.
    """
    bounds = f"of at least {least:g}" if above is None else f"above {above:g}"
    expected = f"{shown}: expected {what} {bounds}{'' if most == math.inf else f' and at most {most:g}'}, such as {example:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(expected)
    if not math.isfinite(value) or value > most or (value < least if above is None else value <= above):
        raise ValueError(expected)
    return float(value)


def check_whole(shown: str, value: object, *, least: int = 1, what: str = "a whole number", example: int) -> int:
    """Return a whole number of at least `least`. Raises like `check_number`, whose arguments these are."""
    expected = f"{shown}: expected {what} of at least {least}, such as {example}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(expected)
    if value < least:
        raise ValueError(expected)
    return value
