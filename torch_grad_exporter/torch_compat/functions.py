"""Calls of a function of `torch.nn.functional` that are observed for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.nn import functional

from torch_grad_exporter.torch_compat.lost import find

Observer = Callable[[tuple[Any, ...], dict[str, Any]], None]

without_function_modes: Callable[[], contextlib.AbstractContextManager[object]] = (
    find("torch._C.DisableTorchFunction") or contextlib.nullcontext
)
"""Hides operations from modes of the user's that intercept functions, such as that of a default device."""


class ObservedFunction:
    """A function of `torch.nn.functional`; while it is observed, another stands in its place.

    Callers look it up by its name in the module; a name that was imported before is not observed. It calls the function with the
    arguments that it got, and then the observer with the same. Only calls of the thread that has begun to observe count.

    Args:
        name: The function's.
        observer: Takes the positional and the keyword arguments of a call that has returned. It must not raise.
    """

    def __init__(self, name: str, observer: Observer) -> None:
        self._name, self._observer = name, observer
        self._function: Callable[..., Any] = getattr(functional, name)
        self._replacement = functools.wraps(self._function)(lambda *args, **kwargs: self._call(args, kwargs))
        self._on = False
        self._thread = -1

    def begin(self) -> bool:
        """Observe it; return False where another library has replaced it, so its arguments may have another meaning."""
        if getattr(functional, self._name) not in (self._function, self._replacement):
            return False
        self._on, self._thread = True, threading.get_ident()
        self._replace()
        return True

    def _replace(self) -> None:
        setattr(functional, self._name, self._replacement)
        if not self._on:  # another thread has ended it meanwhile
            self.end()

    def end(self) -> None:
        """Put the function back; idempotent, from any thread. A replacement that was kept elsewhere calls the function only."""
        self._on = False
        if getattr(functional, self._name) is self._replacement:
            setattr(functional, self._name, self._function)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - the function's own
        if not self._on or threading.get_ident() != self._thread:
            return self._function(*args, **kwargs)
        # A mode or a subclass of the user's compares the function with the one that the module has.
        setattr(functional, self._name, self._function)
        try:
            result = self._function(*args, **kwargs)
        finally:
            if self._on:
                self._replace()
        self._observer(args, kwargs)
        return result
