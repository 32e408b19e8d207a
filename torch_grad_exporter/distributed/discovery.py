"""How Prometheus finds the ranks: a file each, for `file_sd_configs`, and a list of all of them at rank 0, for `http_sd_configs`.

An entry stands for a running rank: a rank that ends cleanly removes its entry, one that is killed leaves it, so that `up` is 0.
Files and the job's store may hang, so daemon threads of `Discovery` do all of it.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch_grad_exporter import files
from torch_grad_exporter.distributed.store import JobStore, NoStoreError, StoreError
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop

READ_SECONDS = 10.0  # between two readings of what the ranks have published
TOUCH_SECONDS = 60.0  # between two checks of this rank's file
FEW = 256  # files of other ranks that are read at the start: a thousand ranks that read a thousand files each are too many

# The age since its last modification from which on the process of a file is taken to be gone. Prometheus sees a new time of
# modification when it reads the file again, by default every 5 minutes.
STALE_SECONDS = 900.0
CLOSE_SECONDS = 2.0  # how long the end of a rank waits until its entries are gone, at most

_Group = dict[str, object]


# Where a rank is


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """A rank as Prometheus sees it. `address`: host and port, an IPv6 address in brackets. `labels`: the user's."""

    address: str
    run: str
    rank: int
    local_rank: int
    host: str
    scheme: str = "http"
    labels: Mapping[str, str] = field(default_factory=dict)

    def group(self) -> _Group:
        """Return it as an element of the lists that Prometheus' file_sd and http_sd read."""
        own = {"run": self.run, "rank": str(self.rank), "local_rank": str(self.local_rank), "host": self.host}
        scheme = {} if self.scheme == "http" else {"__scheme__": self.scheme}
        return {"targets": [self.address], "labels": {**self.labels, **own, **scheme}}


def address(
    addr: str,
    port: int,
    advertise: str = "",
    *,
    hostname: Callable[[], str] = socket.gethostname,
    resolve: Callable[[str], Iterable[str]] | None = None,
    route: Callable[[], str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return where Prometheus reaches a server that listens on `addr`: `advertise` if given, else `addr` if it is one address.

    Else this host's name if that resolves to more than a loopback address, else the address from which this host reaches
    others. In a Kubernetes pod always the latter: no other host can resolve a pod's name.
    """
    host = advertise or ("" if addr in ("", "0.0.0.0", "::") else addr)  # noqa: S104 - these are what is left out
    if not host:
        name = hostname()
        known = not environment.get("KUBERNETES_SERVICE_HOST") and any(map(_reachable, (resolve or _addresses)(name)))
        host = name if known else (route or _outward)() or name
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _reachable(text: str) -> bool:
    ip = ipaddress.ip_address(text.partition("%")[0])
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def _addresses(name: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _outward() -> str:
    """Return this host's address on the way out, empty without one. Nothing is sent: connecting UDP only chooses a route."""
    # Addresses that are reserved for documentation take the default route.
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            outward = str(probe.getsockname()[0])
            if _reachable(outward):
                return outward
    return ""


# A file for each rank


class TargetFile:
    """This rank's file in a directory that Prometheus watches as `DIRECTORY/*.json`.

    The same rank of the same run overwrites it after a restart, on whichever host. As long as the rank runs, the file is never
    older than `TOUCH_SECONDS`; see `STALE_SECONDS`. Raises `OSError`.
    """

    def __init__(self, directory: str, target: ScrapeTarget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(directory) / files.file_name(target.run, target.rank, ".json")
        self._target = target
        self._content = json.dumps([target.group()], indent=1).encode()
        self._clock = clock
        self._inode: int | None = None
        self._next = -float("inf")

    def refresh(self) -> None:
        """Write the file if it is missing; else, once in a while, renew its time of modification.

        A file of another process at the same address is removed: the process that had the port is gone.
        """
        if self._clock() < self._next:
            return
        self._next = self._clock() + TOUCH_SECONDS
        first = self._inode is None
        if first or not self.path.exists() or _age(self.path) > STALE_SECONDS:
            self._inode = files.write(self.path, self._content)
        elif self._is_ours():
            os.utime(self.path)
        self._remove_predecessors(fresh_ones=first)

    def _remove_predecessors(self, *, fresh_ones: bool) -> None:
        """Remove other files with this address: stale ones, and fresh ones only if there are few, since each is read."""
        others = [file for file in self.path.parent.glob("*.json") if file != self.path]
        for file in others:
            # It may vanish at any moment, and reading or removing that of another user may be forbidden.
            with contextlib.suppress(OSError, ValueError):
                stale = _age(file) > 2 * TOUCH_SECONDS
                if (stale or (fresh_ones and len(others) <= FEW)) and self._is_of_this_address(file.read_bytes()):
                    file.unlink()

    def _is_of_this_address(self, content: bytes) -> bool:
        group = _parsed(content.strip().removeprefix(b"[").removesuffix(b"]"))
        return group is not None and _place(group) == _place(self._target.group())

    def close(self) -> None:
        """Remove the file, unless a later process has written it again."""
        if self._inode is not None and self._is_ours():
            self.path.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        # The content alone may be that of a restarted rank on the same port, the inode alone one that is used again.
        try:
            return self.path.stat().st_ino == self._inode and self.path.read_bytes() == self._content
        except FileNotFoundError:
            return False


def _place(group: _Group) -> tuple[object, object]:
    """Return where a target is: its address, and the host that it gives as its own."""
    labels = group["labels"]
    return group["targets"], labels.get("host") if isinstance(labels, dict) else None


def _age(file: Path) -> float:
    """Return the seconds since it was modified."""
    return time.time() - file.stat().st_mtime


# A list of all ranks


class RankList:
    """The ranks as published in the job's store; rank 0 reads all of them. Raises `StoreError`."""

    def __init__(self, store: JobStore, target: ScrapeTarget, world_size: int) -> None:
        self._store = store
        self._target = target
        self._world_size = world_size if target.rank == 0 else 0
        self._content = json.dumps(target.group()).encode()
        self._published = False
        self._read: Mapping[int, _Group] = {}

    def refresh(self) -> None:
        """Publish this rank, and read the others if this is rank 0. Does nothing without a store."""
        with contextlib.suppress(NoStoreError):
            self._publish()
            self._collect()

    def _publish(self) -> None:
        if not self._published:
            self._store.publish(_key(self._target.rank), self._content)
            self._published = True

    def _collect(self) -> None:
        if self._world_size > 1:
            ranks = {_key(rank): rank for rank in range(1, self._world_size)}
            values = self._store.collect(ranks, seconds=READ_SECONDS)
            self._read = {ranks[key]: group for key, value in values.items() if (group := _parsed(value)) is not None}

    def groups(self) -> list[_Group]:
        """Return this rank's group and those that were last read, by rank, without waiting."""
        return [self._target.group(), *(group for _, group in sorted(self._read.items()))]

    def close(self) -> None:
        """Take this rank out of the list. If the store is gone, so is the list."""
        if self._published:
            with contextlib.suppress(StoreError):
                self._store.remove(_key(self._target.rank))


def _key(rank: int) -> str:
    return f"target/{rank}"


def _parsed(value: bytes) -> _Group | None:
    """Return a group as published, None if it is not one."""
    with contextlib.suppress(ValueError):
        group = json.loads(value)
        if isinstance(group, dict) and isinstance(group.get("targets"), list) and isinstance(group.get("labels"), dict):
            return group
    return None


# The threads


class Discovery:
    """Keeps this rank's entries while it runs; `close()` removes them. Nothing here waits, except `close` for a limited time."""

    def __init__(
        self,
        target: ScrapeTarget,
        *,
        file: TargetFile | None = None,
        ranks: RankList | None = None,
        on_error: Callable[[BaseException], None],
        interval: float = READ_SECONDS,
    ) -> None:
        self._target = target
        self._ranks = ranks
        entries, guard = [entry for entry in (file, ranks) if entry is not None], Guard(on_error)
        self._leave = False
        self._threads = [
            BackgroundLoop("discovery", entry.refresh, guard=guard, pause=interval, last=functools.partial(self._end, entry))
            for entry in entries
        ]

    def start(self) -> None:
        """Start a thread for each entry: one may hang. Raises `RuntimeError` if no thread can be started."""
        for thread in self._threads:
            thread.wake()
            thread.start()

    def body(self) -> bytes:
        """Return what `/sd` answers, as `application/json`: the list of the ranks known here."""
        return json.dumps([self._target.group()] if self._ranks is None else self._ranks.groups()).encode()

    def close(self, seconds: float = CLOSE_SECONDS, *, leave: bool = False) -> None:
        """Remove the entries, unless `leave` is set; idempotent, from any thread, never raises.

        What hangs is left behind after `seconds`.
        """
        self._leave |= leave
        give_up_at = time.monotonic() + seconds
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(give_up_at - time.monotonic())

    def after_fork_in_child(self) -> None:
        """Leave the entries, which are the parent's."""
        self._threads = []

    def _end(self, entry: TargetFile | RankList) -> None:
        if not self._leave:
            entry.close()
