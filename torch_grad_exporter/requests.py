"""Requests: the only way back of data, from the worker to the training thread."""

from __future__ import annotations

from collections import deque

SURPRISE = "surprise"
"""The reason of those that want samples: something was seen that no sample shows."""

PENDING = 64
"""Requests that are kept until they are taken; beyond, the oldest is dropped."""


class Requests:
    """What the worker asks of the training thread.

    A deque takes no lock, so each method may be called from any thread, in a signal's handler and after a fork.

    Attributes:
        pending: Reasons and rounds that were not taken yet; read only.
    """

    def __init__(self) -> None:
        self.pending: deque[tuple[str, int]] = deque(maxlen=PENDING)

    def arm(self, rounds: int, why: str) -> None:
        """Ask for this many of the next rounds to be armed."""
        self.pending.append((why, rounds))

    def take(self) -> dict[str, int]:
        """Take what was requested: how many rounds to arm, by the reason. On the training thread."""
        rounds: dict[str, int] = {}
        while self.pending:
            why, number = self.pending.popleft()
            rounds[why] = max(number, rounds.get(why, 0))
        return rounds
