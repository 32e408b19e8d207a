"""Job: with a store that all ranks reach, rank 0 sends the notifications of all ranks, each problem once.

Each rank publishes its problems, and rank 0 publishes that it is alive. No rank waits for another: one that has not heard from
rank 0 for some time sends its own notifications, and so does each rank of a job without a store.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from torch_grad_exporter.actions.notify.notification import Notification
from torch_grad_exporter.distributed.store import JobStore, NoStoreError, StoreError
from torch_grad_exporter.rules.declaration import SEVERITIES
from torch_grad_exporter.rules.episodes import Key

# A rank without a report for this time is gone; with more ranks than RANKS, it is longer in proportion.
GONE_SECONDS, RANKS = 10.0, 256

# An evaluation waits this long for each of two answers of the store; at the end less, which leaves time to send.
STORE_SECONDS, LAST_SECONDS = 1.0, 0.2

MOST = 100  # problems in the report of a rank

Active = Mapping[Key, Notification]


@dataclass(slots=True)
class _RankReport:
    stamp: tuple[int, int]  # distinguishes the process and its report from earlier ones
    at: float
    active: Active


class Job:
    """This rank's part in the notifications of a job. For one thread.

    Args:
        store: The store that the ranks share.
        rank: This rank.
        world_size: The number of ranks.
        clock: Returns seconds.
        started: A number that distinguishes this process from the one before a restart, by default the time.
    """

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
        self._keys = {_key(other): other for other in range(1, world_size)} if rank == 0 else {_key(0): 0}
        self._gone = GONE_SECONDS * max(1.0, world_size / RANKS)
        self._clock = clock
        self._started = time.time_ns() if started is None else started
        self._number = 0
        self._begun = clock()
        self._reports: dict[int, _RankReport] = {}
        self._own: Active = {}
        self._has_store = True

    def exchange(self, own: Active, *, last: bool = False) -> Active | None:
        """Return the active problems that this rank has to send.

        Args:
            own: The active problems of this rank.
            last: Whether the run of this rank is over. Rank 0 may be gone as well, so the rank itself sends what the end brought.

        Returns:
            The problems, or None while rank 0 sends them, or may be about to.
        """
        new = {key: problem for key, problem in own.items() if key not in self._own} if last else {}
        self._own = own
        report = {} if self._rank == 0 else {key: problem for key, problem in own.items() if key not in new}
        self._ask(report, LAST_SECONDS if last else STORE_SECONDS)
        now = self._clock()
        fresh = {rank: report.active for rank, report in self._reports.items() if now - report.at <= self._gone}
        if self._rank == 0:
            if last:  # for rank 0 the problems of the others end with its run
                return own
            # The lowest rank that has a problem comes last and wins.
            return {key: problem for rank in sorted(fresh, reverse=True) for key, problem in fresh[rank].items()} | dict(own)
        starting = self._has_store and now - self._begun <= self._gone
        return (new if last else None) if fresh or starting else own

    def _ask(self, report: Active, seconds: float) -> None:
        """Publish a report, and read the reports of the others."""
        self._number += 1
        problems = [[*key, asdict(problem)] for key, problem in list(report.items())[:MOST]]
        content = json.dumps([self._started, self._number, problems])
        try:
            self._store.publish(_key(self._rank), content.encode(), seconds=seconds)
            published = self._store.collect(self._keys, seconds=seconds)
        except StoreError as error:
            self._has_store = not isinstance(error, NoStoreError)
            return
        self._has_store = True
        for key, value in published.items():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # not a report of ours
                self._read(self._keys[key], value)

    def _read(self, rank: int, content: bytes) -> None:
        started, number, problems = json.loads(content)
        before = self._reports.get(rank)
        if before is None or before.stamp != (started, number):
            active = {(str(alert), str(severity), layer): _decoded(fields) for alert, severity, layer, fields in problems}
            # The first report may be that of an ended process: a store outlives a restart of the ranks.
            at = -math.inf if before is None else self._clock()
            self._reports[rank] = _RankReport((int(started), int(number)), at, active)


def _decoded(fields: Mapping[str, object]) -> Notification:
    """Return the notification of another rank. Raises if it is not one."""
    notification = Notification(**fields)  # type: ignore[arg-type]
    if notification.severity not in SEVERITIES:
        raise ValueError
    return notification


def _key(rank: int) -> str:
    return f"notify/{rank}"


class Announced:
    """The problems whose beginning was sent and whose end was not. For one thread."""

    def __init__(self) -> None:
        self._active: dict[Key, Notification] = {}

    @property
    def active(self) -> list[Notification]:
        """Them as they are now, the oldest first."""
        return list(self._active.values())

    def changes(self, active: Active | None, at: float, *, ended: str = "") -> list[Notification]:
        """Return what begins and ends.

        Args:
            active: The problems now; None if another rank sends them from now on.
            at: Unix time.
            ended: A sentence to add to the summary of each end.
        """
        if active is None:
            self._active = {}
            return []
        before, self._active = self._active, {}
        changes = []
        for key, problem in active.items():
            first = before.get(key)
            if first is None:
                changes.append(problem)
            # The end must have the labels of the beginning.
            self._active[key] = problem if first is None else replace(problem, rank=first.rank, started=first.started)
        over = [problem for key, problem in before.items() if key not in active]
        return changes + [replace(problem, status="resolved", timestamp=at, summary=problem.summary + ended) for problem in over]
