"""Calls the user's own functions in threads of ours, and reports what they raise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

# Also in parts, as urllib3 reports them.
_ADDRESSES = re.compile(r"\b[a-zA-Z][\w+.-]*://\S+|(?<=\burl: )\S+|(?<=\bhost=)'[^']*'")


def contained(function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Call a function. An end of the program, such as `sys.exit`, would end only the thread: it becomes a `RuntimeError`."""
    try:
        return function(argument)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it raised {type(error).__name__}, which ends no training from here; use Stop()") from error


def without_addresses(text: str) -> str:
    """Return a message without the addresses in it, which may hold secrets, such as those of webhooks."""
    return _ADDRESSES.sub("<address>", text)
