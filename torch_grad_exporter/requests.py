"""Requests: the only way back, from the worker to the training thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

PENDING = 64
"""Requests that are kept until they are taken; beyond, the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was requested since the last `take`. `rounds`: how many to arm, by the reason; `costs`: in seconds."""

    rounds: dict[str, int]
    costs: tuple[float, ...]


class Requests:
    """What the worker asks of the training thread.

    A deque takes no lock, so each method may be called from any thread, in a signal's handler and after a fork.
    """

    def __init__(self) -> None:
        self._arming: deque[tuple[str, int]] = deque(maxlen=PENDING)
        self._costs: deque[float] = deque(maxlen=PENDING)

    def arm(self, rounds: int, why: str) -> None:
        """Ask for this many of the next rounds to be armed."""
        self._arming.append((why, rounds))

    def learn(self, cost: float) -> None:
        """Report what a sample has cost, in seconds."""
        self._costs.append(cost)

    def take(self) -> Wanted | None:
        """Take what was requested, None if nothing was. On the training thread; two checks where nothing was."""
        if not self._arming and not self._costs:
            return None
        rounds: dict[str, int] = {}
        while self._arming:
            why, number = self._arming.popleft()
            rounds[why] = max(number, rounds.get(why, 0))
        costs = []
        while self._costs:
            costs.append(self._costs.popleft())
        return Wanted(rounds, tuple(costs))
