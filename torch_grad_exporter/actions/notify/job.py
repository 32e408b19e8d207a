"""Job: with a store that all ranks reach, rank 0 tells for all of them, each problem once.

Every rank publishes what it has found, and rank 0 that it is there. No rank waits for another: one that does not hear of rank 0
for some time tells its own problems, and so does one whose job has no store.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from torch_grad_exporter.actions.notify.notification import SEVERITIES, Notification
from torch_grad_exporter.distributed.store import JobStore, NoStoreError, StoreError
from torch_grad_exporter.rules.episodes import Key

GONE_SECONDS = 10.0
"""Without a report, after which a rank is taken to be gone; that many ranks more make it longer by as much."""

RANKS = 256

STORE_SECONDS = 1.0
"""How long an evaluation waits for the store, at most, for each of two questions."""

LAST_SECONDS = 0.2
"""The same at the end, which leaves time to tell people."""

MOST = 100
"""Problems in the report of a rank."""

Told = Mapping[Key, Notification]
"""Problems that are active."""


@dataclass(slots=True)
class _Heard:
    """The last report of a rank and when it came; what identifies it; what the rank had found."""

    stamp: tuple[int, int]
    at: float
    found: Told


class Job:
    """This rank's part of it. For one thread. `started`: distinguishes its process from the one before."""

    def __init__(
        self,
        store: JobStore,
        rank: int,
        world_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        started: int | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._keys = {_key(one): one for one in range(world_size) if one != 0} if rank == 0 else {_key(0): 0}
        self._gone = GONE_SECONDS * max(1.0, world_size / RANKS)
        self._clock = clock
        self._started = time.time_ns() if started is None else started
        self._number = 0
        self._begun = clock()
        self._heard: dict[int, _Heard] = {}
        self._own: Told = {}
        self._store_is_there = True

    def exchange(self, own: Told, *, last: bool = False) -> Told | None:
        """What this rank is to tell, which has found `own`; `None` while rank 0 tells it, or may be about to.

        `last`: the run of this rank is over. What that has brought it tells itself, since rank 0 may be gone as well.
        """
        new = {key: one for key, one in own.items() if key not in self._own} if last else {}
        self._own = own
        report = {} if self._rank == 0 else {key: one for key, one in own.items() if key not in new}
        self._ask(report, LAST_SECONDS if last else STORE_SECONDS)
        now = self._clock()
        fresh = {rank: one for rank, one in self._heard.items() if now - one.at <= self._gone}
        if self._rank == 0 and last:  # what the others have ends with the run, as far as rank 0 can tell
            return own
        if self._rank == 0:
            return {key: one for rank in sorted(fresh, reverse=True) for key, one in fresh[rank].found.items()} | dict(own)
        waits = self._store_is_there and now - self._begun <= self._gone
        return (new if last else None) if fresh or waits else own

    def _ask(self, report: Told, seconds: float) -> None:
        """Publishes, and hears what the others have published."""
        self._number += 1
        content = json.dumps([self._started, self._number, [[*key, asdict(one)] for key, one in list(report.items())[:MOST]]])
        try:
            self._store.publish(_key(self._rank), content.encode(), seconds=seconds)
            found = self._store.collect(self._keys, seconds=seconds)
        except StoreError as error:  # the others are heard again when it answers again
            self._store_is_there = not isinstance(error, NoStoreError)
            return
        self._store_is_there = True
        for key, reported in found.items():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # no report of ours
                self._hear(self._keys[key], reported)

    def _hear(self, rank: int, content: bytes) -> None:
        started, number, entries = json.loads(content)
        before = self._heard.get(rank)
        if before is None or before.stamp != (started, number):
            found = {(str(alert), str(severity), layer): _decoded(fields) for alert, severity, layer, fields in entries}
            # The first that is heard may be of a process that has ended: a store outlives a restart of the ranks.
            self._heard[rank] = _Heard((int(started), int(number)), -math.inf if before is None else self._clock(), found)


def _decoded(fields: Mapping[str, object]) -> Notification:
    """The notification of another rank. Raises where it is none."""
    one = Notification(**fields)  # type: ignore[arg-type]
    if one.severity not in SEVERITIES:
        raise ValueError
    return one


def _key(rank: int) -> str:
    return f"notify/{rank}"


class Announced:
    """What has been told to begin and not yet to end. For one thread."""

    def __init__(self) -> None:
        self._told: dict[Key, Notification] = {}

    @property
    def active(self) -> list[Notification]:
        """As they are now, the oldest first."""
        return list(self._told.values())

    def changes(self, active: Told | None, at: float, *, ended: str = "") -> list[Notification]:
        """What begins and ends with these problems, at a Unix time; `None`: another rank tells from now on.

        `ended`: said of each end.
        """
        if active is None:
            self._told = {}
            return []
        before, self._told = self._told, {}
        changes = []
        for key, one in active.items():
            first = before.get(key)
            if first is None:
                changes.append(one)
            # At its end it has to have the labels that it had at its beginning.
            self._told[key] = one if first is None else replace(one, rank=first.rank, started=first.started)
        over = [one for key, one in before.items() if key not in active]
        return changes + [replace(one, status="resolved", timestamp=at, summary=one.summary + ended) for one in over]
