"""What sends notifications, and what it may fail of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_grad_exporter.actions.notify.notification import Notification

Send = Callable[[Sequence[Notification], Callable[[], float]], None]
"""Sends notifications together, in the seconds that the function gives. Raises `SendError`; anything else is a fault."""


class SendError(Exception):
    """Something was not sent. `passing`: another try may succeed, after `pause` seconds if the receiver has said so."""

    def __init__(self, message: str, *, passing: bool = False, pause: float | None = None) -> None:
        super().__init__(message)
        self.passing = passing
        self.pause = pause
