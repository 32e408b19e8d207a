"""Whose method is calling: for frameworks that call a callback without telling which of their objects does."""

from __future__ import annotations

import sys
from typing import TypeVar

_Kind = TypeVar("_Kind")

DEPTH = 6
"""Callers that are looked at. The nearest ones are the framework's own: what lies behind them may hold a batch, which a look at
a frame's variables would keep alive."""


def calling(kind: type[_Kind]) -> _Kind | None:
    """The nearest object of this type one of whose methods is being run by the current thread; `None` if there is none near."""
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        if frame.f_code.co_varnames[:1] == ("self",):  # of a function of the script's, a look may change what `locals()` returned
            found = frame.f_locals.get("self")
            if issubclass(type(found), kind):
                return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
