"""Where the time of a call goes, by function: own time as cProfile counts it.

The profiler costs about a microsecond per call of a Python function, so what makes many small calls looks worse than it is.
What an operator does, such as numpy's `==`, counts as the function's in which it stands.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path

from benchmarks import record

ROWS = 14


def table(title: str, action: Callable[[], object], times: int) -> record.Table:
    """The functions with the most own time in `times` calls of `action`, per call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(times):
        action()
    profiler.disable()
    found: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total = sum(entry[2] for entry in found.values())
    largest = sorted(found.items(), key=lambda item: -item[1][2])[:ROWS]
    rows: list[list[record.Cell]] = [
        [_name(*where), round(entry[1] / times, 1), round(1e6 * entry[2] / times, 1), f"{entry[2] / total:.0%}"]
        for where, entry in largest
    ]
    notes = [f"All together {1e6 * total / times:.0f} us per call under the profiler, which slows down many small calls most."]
    return record.table(title, ("function", "calls", "own time us", "share"), rows, notes)


def _name(file: str, line: int, function: str) -> str:
    """`statistics/host.py:83 _split`, or a built-in's name as it is."""
    if not line:
        return function.removeprefix("<").removesuffix(">")
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"
