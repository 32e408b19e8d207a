"""The user's own functions, called in threads of ours, and what they raise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

# Also as urllib3 tells them, in parts.
_ADDRESSES = re.compile(r"\b[a-zA-Z][\w+.-]*://\S+|(?<=\burl: )\S+|(?<=\bhost=)'[^']*'")


def contained(function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Calls a function. What is to end the program, such as `sys.exit`, would end only the thread, and becomes a `RuntimeError`."""
    try:
        return function(argument)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it raised {type(error).__name__}, which ends no training from here; use Stop()") from error


def without_addresses(text: str) -> str:
    """A message without the addresses in it, which may hold secrets, as those of webhooks do."""
    return _ADDRESSES.sub("<address>", text)
