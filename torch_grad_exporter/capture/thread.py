"""TrainingThread: which thread trains."""

from __future__ import annotations

import sys
import threading
import types


class TrainingThread:
    """The thread of the last step of an optimizer of the models: before the first one it may be any."""

    def __init__(self) -> None:
        self._ident: int | None = None

    def is_here(self) -> None:
        """The calling thread trains."""
        self._ident = threading.get_ident()

    def may_be_here(self) -> bool:
        """Whether the calling thread trains, or it is not known yet which one does."""
        return self._ident in (None, threading.get_ident())

    def frame(self) -> types.FrameType | None:
        """Return what that thread executes; the calling thread's own frame if it is not known yet which one trains."""
        return sys._current_frames().get(threading.get_ident() if self._ident is None else self._ident)
