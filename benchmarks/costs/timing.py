"""How long single calls take."""

from __future__ import annotations

import time
from collections.abc import Callable


def times(
    action: Callable[[], object], seconds: float, *, clock: Callable[[], float] = time.perf_counter, least: int = 5
) -> list[float]:
    """Seconds of each call by `clock`, the first one included: `least` and one, or as many as begin within half of `seconds`."""
    found: list[float] = []
    end = time.monotonic() + seconds / 2
    while len(found) <= least or time.monotonic() <= end:
        start = clock()
        action()
        found.append(clock() - start)
    return found
