"""When `torch.compile` begins and ends to compile something, while the program waits for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from torch_grad_exporter.torch_compat.lost import gone, has

HANDLER = "torch._dynamo.callback.callback_handler"


class CompileEvents:
    """Calls `began` and `ended` around each compilation, from `attach` to `close`.

    Neither may raise: PyTorch calls them within the compilation, one pair for those that are nested.
    """

    def __init__(self, began: Callable[[], object], ended: Callable[[], object]) -> None:
        self._began, self._ended = began, ended
        self._closed = False

    # Older versions pass no arguments.

    def _begin(self, *_: object) -> None:
        self._began()

    def _end(self, *_: object) -> None:
        self._ended()

    def attach(self) -> None:
        """Register at PyTorch's compiler if it is imported, which takes seconds; again, since a reset of it forgets callbacks."""
        module = sys.modules.get("torch._dynamo.callback")
        if self._closed or module is None or "torch._dynamo" not in sys.modules:
            return
        handler = getattr(module, "callback_handler", None)
        if handler is None or not has(handler, "start_callbacks", "end_callbacks"):
            if getattr(sys.modules["torch._dynamo"], "reset", None) is not None:  # its import has come to an end
                gone(HANDLER)
            return
        if self._begin not in handler.start_callbacks:
            handler.start_callbacks.append(self._begin)
            handler.end_callbacks.append(self._end)

    def close(self) -> None:
        """Take the callbacks back; idempotent."""
        self._closed = True
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        for name, ours in (("start_callbacks", self._begin), ("end_callbacks", self._end)):
            with contextlib.suppress(ValueError):
                getattr(handler, name, []).remove(ours)
