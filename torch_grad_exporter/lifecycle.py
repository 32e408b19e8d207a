"""The exporters that nobody has closed, for the process' fork and exit handlers.

They live on, like their hooks, though nobody may hold them. The handlers are registered with the first exporter, and the process
has one set of them: there is no way to take them back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Protocol


class Living(Protocol):
    """What is to be told of the process' end, and of its double."""

    def end(self, error: BaseException | None) -> None:
        """Gives everything back at the end of the process; never raises. `error`: what has ended it, if an exception has."""

    def after_fork_in_child(self) -> None:
        """Lets go, in a forked child, of everything that is the parent's."""


_living: dict[Living, None] = {}
_handled = False


def add(one: Living) -> None:
    """Remembers it until `discard`."""
    global _handled  # noqa: PLW0603 - see above
    _living[one] = None
    if not _handled:
        _handled = True
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork_in_child)
        atexit.register(_at_exit)


def discard(one: Living) -> None:
    """Forgets it; one that is not known is none too."""
    _living.pop(one, None)


def everyone() -> list[Living]:
    """All that are not closed, in the order of their start."""
    return list(_living)


def _after_fork_in_child() -> None:
    for one in everyone():
        # Nothing can be counted or logged here: what the parent's threads held at the fork is held for ever.
        with contextlib.suppress(Exception):
            one.after_fork_in_child()
    _living.clear()


def _at_exit() -> None:
    # What the interpreter has reported last; in a notebook this may have been an earlier cell.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    error = None if isinstance(last, KeyboardInterrupt) or hasattr(sys, "ps1") else last
    for one in everyone():
        one.end(error)
