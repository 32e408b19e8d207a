"""TrainingThread: which thread trains the models, so that what happens on others is not taken for a part of it."""

from __future__ import annotations

import threading


class TrainingThread:
    """The thread of the last forward of a root, or of the last step of an optimizer of the models."""

    def __init__(self) -> None:
        self._ident: int | None = None

    def is_here(self) -> None:
        """The calling thread trains."""
        self._ident = threading.get_ident()

    def may_be_here(self) -> bool:
        """Whether the calling thread trains, or it is not known yet which one does."""
        return self._ident in (None, threading.get_ident())
