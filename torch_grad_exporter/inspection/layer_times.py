"""LayerTimes: how long the forward and the backward of each layer took in sampled rounds."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch_grad_exporter.metrics.families import REMOVED
from torch_grad_exporter.store.records import Inspected

FORWARD, BACKWARD = PASSES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class PassTime:
    """The seconds of one pass of a layer, over `rounds` sampled rounds."""

    seconds: float = 0.0
    rounds: int = 0


# By layer and pass, those that were timed most recently last.
Times = dict[tuple[str, str], PassTime]


class LayerTimes:
    """From any thread. `most`: layers that are kept at most; the times of those that are gone go on in one remainder.

    `untimed`: sampled rounds that are in none of the times, see `torch_grad_exporter_untimed_steps_total`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Reentrant: a signal's handler may close the exporter while its own thread is in here.
        self._lock = threading.RLock()
        self._times: Times = {}
        self.untimed = 0

    def take(self, record: Inspected, values: object) -> None:  # noqa: ARG002 - like any `Taker`; times need no vectors
        """Count a round; the data are its seconds by layer and pass. Add the layers timed least recently to the remainder."""
        assert isinstance(record.data, dict)  # noqa: S101 - only `LayerTimer` sends records of this name
        seconds: dict[tuple[str, str], float] = record.data
        with self._lock:
            for key, new in seconds.items():
                self._add(key, PassTime(new, 1))
            recent = dict.fromkeys(layer for layer, _ in reversed(self._times) if layer != REMOVED)
            for layer in [*recent][self._most :]:
                for name in PASSES:
                    if (layer, name) in self._times:
                        self._add((REMOVED, name), self._times.pop((layer, name)))

    def _add(self, key: tuple[str, str], new: PassTime) -> None:
        old = self._times.pop(key, PassTime())
        self._times[key] = PassTime(old.seconds + new.seconds, old.rounds + new.rounds)

    def snapshot(self) -> Times:
        """Return all times as of now."""
        with self._lock:
            return dict(self._times)

    def after_fork_in_child(self) -> None:
        """Make a lock anew: the child has none of the threads that may hold the old one."""
        self._lock = threading.RLock()
