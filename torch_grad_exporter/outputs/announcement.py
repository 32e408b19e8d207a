"""Announcement: publishes where this rank is served, for Prometheus' service discovery."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_grad_exporter.distributed import identity as distributed
from torch_grad_exporter.distributed.discovery import Discovery, RankList, ScrapeTarget, TargetFile, address
from torch_grad_exporter.distributed.store import JobStore
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import BackgroundThread

# How long the start waits for the name service, at most.
NAME_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Rank:
    """The process that the values belong to. `labels`: those of every series."""

    run: str
    number: int
    identity: distributed.Identity
    labels: Mapping[str, str]


@dataclass(slots=True, eq=False, kw_only=True)
class Announcement:
    """The entries of one rank for discovery, by the user's options. `discovery`: has them, from `start` until its `close`.

    `store`: the job's, for the list of ranks. `labels`: the user's.
    """

    rank: Rank
    store: JobStore
    errors: ErrorLog
    addr: str
    advertise: str
    sd_dir: str
    labels: Mapping[str, str]
    discovery: Discovery | None = field(default=None, init=False)

    def start(self, port: int, scheme: str) -> None:
        """Begin to publish the server. Raises `RuntimeError` if no more threads can be started."""
        rank, identity = self.rank, self.rank.identity
        # Another thread asks the name service, which may hang while the training waits here.
        answers: list[str] = []
        guard = self.errors.boundary("discovery", limit=None)
        thread = BackgroundThread("address", lambda: guard(lambda: answers.append(address(self.addr, port, self.advertise))))
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            thread.start()
            thread.join(NAME_SECONDS)
        served = answers[0] if answers else f"{distributed.hostname()}:{port}"
        target = ScrapeTarget(
            address=served, scheme=scheme, run=rank.run, rank=rank.number, local_rank=identity.local_rank,
            host=distributed.hostname(), labels=self.labels,
        )  # fmt: skip
        self.discovery = Discovery(
            target,
            file=TargetFile(self.sd_dir, target) if self.sd_dir else None,
            ranks=RankList(self.store, target, identity.world_size) if identity.world_size > 1 else None,
            on_error=functools.partial(self.errors.count, "discovery"),
        )
        self.discovery.start()

    def body(self) -> bytes:
        """Return the body for http_sd: the ranks known here, this one first; empty before the start."""
        return b"[]" if self.discovery is None else self.discovery.body()
