"""Checks of what users give, and the parts of their errors, which name the argument, its value and the fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence


def near(name: str, names: Iterable[str], *, prefix: str = "") -> str:
    """Return what a wrong name may have meant, as the end of a sentence. `prefix`: in what all are alike."""
    matches = difflib.get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in names])
    return f"; did you mean {' or '.join(prefix + match for match in matches)}?" if matches else ""


def shown(value: object) -> str:
    """Return a wrong argument as an error shows it: of one that is as long as a model its class."""
    text = repr(value)
    return text if isinstance(value, str) or (len(text) <= 200 and "\n" not in text) else type(value).__name__


def some(names: Collection[str], most: int, *, between: str = ", ") -> str:
    """Return names as a text; of many the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join([*names][:most]) + more


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names with a number from the second time of one on: `Linear`, `Linear-2`."""
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


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
