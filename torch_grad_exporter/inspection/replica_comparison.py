"""ReplicaComparison: ranks publish the checksums of their copies in the job's store, and rank 0 compares them.

A thread does it. Each rank has one key, with its last few measurements, so that the store does not grow; it removes the key at its
end. Rank 0 waits for no rank: what has not come `GRACE` seconds after the first of a step is left out.

The store may outlive the ranks, as under torchrun. So rank 0 names its session by a random token, with which the others mark what
they publish; what an earlier start of the job has left is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from torch_grad_exporter.distributed.store import SECONDS, JobStore, StoreError
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.replica_probe import KINDS, ReplicaMeasurement
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.checksums import Sums, combined, joined
from torch_grad_exporter.store.records import Inspected

# Measurements that a rank publishes; seconds between two looks at the store, and until what is not there is left out.
KEPT, POLL, GRACE = 4, 1.0, 10.0

# Ranks that have differed, and layers of a kind, that are shown at most, and the label of all others.
RANKS, LAYERS, OTHERS = 32, 2000, "(other)"

# Exporters of this process by run and rank: in the store, each one's keys are apart.
STARTED: Counter[tuple[str, int]] = Counter()


class ReplicaSums(NamedTuple):
    """The checksums of one kind on one rank after one step: what they are of, and those of each layer in their order.

    Attributes:
        of: Equal on ranks that are compared: the step, the kind, the layers and shapes, and the ranks with a copy.
        kind: One of `KINDS`.
        sums: 16 hexadecimal digits for each layer.
        ranks: The ranks with a copy.
        layers: Their names; empty where another of these ranks says them.
    """

    of: str
    kind: str
    sums: str
    ranks: tuple[int, ...]
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaTotals:
    """What rank 0 has compared. Replaced, never changed.

    Attributes:
        compared: By kind, the comparisons.
        differing: By layer and kind, those in which not all ranks had the same.
        odd: By rank, those in which it differed from the majority.
    """

    compared: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    differing: Mapping[tuple[str, str], int] = field(default_factory=dict)
    odd: Mapping[str, int] = field(default_factory=dict)


class ReplicaComparison:
    """Takes records from the worker, and compares in a thread of its own. A rank other than 0 has no `totals`."""

    def __init__(self, store: JobStore, run: str, rank: int, world_size: int, guard: Guard) -> None:
        self._store, self._rank, self._all = store, rank, tuple(range(world_size))
        STARTED[run, rank] += 1
        self._base = f"replicas/{run}/{STARTED[run, rank]}"
        self._session = secrets.token_hex(8)
        self._published = False
        self._own: deque[list[ReplicaSums]] = deque(maxlen=KEPT)
        self._new = False  # something is to be published, or to be compared
        self._open: dict[str, tuple[float, dict[int, ReplicaSums]]] = {}
        self._done: set[str] = set()
        self.totals = ReplicaTotals() if rank == 0 else None
        self._loop = BackgroundLoop(
            "replicas", self._work, guard=guard, pause=lambda: POLL if self._new else math.inf, last=self._work
        )

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the checksums of this rank."""
        measured = record.data
        assert isinstance(measured, ReplicaMeasurement)  # noqa: S101 - only `ReplicaProbe` sends records of this name
        # What does not exist has a checksum, too: else it would equal a zero.
        sums = np.ones(len(measured.copied), dtype=np.uint64)
        for places, vector in zip(measured.places, values, strict=True):
            sums[[*places]] = joined(vector)
        self._own.append([self._sums(measured, kind, sums) for kind in KINDS if any(c.kind == kind for c in measured.copied)])
        self._new = True
        self._loop.wake()

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def close(self, seconds: float) -> None:
        """End the thread and remove this rank's key, within about these seconds. Idempotent."""
        self._loop.close(seconds)
        if self._published:
            self._published = False
            with contextlib.suppress(StoreError):  # its host may have ended first
                self._store.remove(self._base if self._rank == 0 else self._key(self._rank), seconds=seconds)

    def _sums(self, measured: ReplicaMeasurement, kind: str, sums: Sums) -> ReplicaSums:
        """Return those of one kind, by layer."""
        ranks = self._all if measured.ranks is None else measured.ranks
        members: dict[str, list[int]] = {}
        for place, copied in enumerate(measured.copied):
            if copied.kind == kind:
                members.setdefault(copied.layer, []).append(place)
        forms = [(layer, [measured.copied[place].form for place in places]) for layer, places in members.items()]
        of = hashlib.blake2b(repr((measured.step, kind, ranks, forms)).encode(), digest_size=12).hexdigest()
        by_layer = np.array([combined(sums[places]) for places in members.values()], dtype="<u8")
        layers = tuple(members) if self._rank in (0, min(ranks)) else ()
        return ReplicaSums(of, kind, by_layer.tobytes().hex(), ranks, layers)

    # The thread

    def _work(self) -> None:
        if not self._new:
            return
        try:
            if self._rank == 0:
                self._compare()
            else:
                self._publish()
        except StoreError:
            if not self._loop.stopping:
                raise

    def _key(self, rank: int) -> str:
        return f"{self._base}/{rank}"

    def _publish(self) -> None:
        """Publish what this rank has, once rank 0 has begun its session."""
        session = self._store.collect([self._base]).get(self._base)
        if session is not None:
            self._new, self._published = False, True
            rounds = [sums for kinds in [*self._own] for sums in kinds]
            self._store.publish(self._key(self._rank), json.dumps([session.decode(), rounds]).encode())

    def _compare(self) -> None:
        """Collect what ranks have published, and compare what is complete or has waited for long enough."""
        if not self._published:
            self._store.publish(self._base, self._session.encode())
            self._published = True
        self._new = False  # a record may come meanwhile
        now, keys = time.monotonic(), {self._key(rank): rank for rank in self._all[1:]}
        copies = [(0, sums) for kinds in [*self._own] for sums in kinds]
        for key, text in self._store.collect(keys, seconds=SECONDS * (1 + len(keys) / 1000)).items():
            session, rounds = json.loads(text)
            if session == self._session:
                for of, kind, sums_of_layers, ranks, layers in rounds:
                    copies.append((keys[key], ReplicaSums(of, kind, sums_of_layers, tuple(ranks), tuple(layers))))
        self._done &= {sums.of for _, sums in copies}
        for rank, sums in copies:
            if sums.of not in self._done and rank in sums.ranks:
                self._open.setdefault(sums.of, (now, {}))[1][rank] = sums
        for of, (since, by_rank) in [*self._open.items()]:
            if len(by_rank) == len(next(iter(by_rank.values())).ranks) or now - since >= GRACE:
                del self._open[of]
                self._done.add(of)
                if len(by_rank) > 1:
                    self._count(by_rank)
        self._new |= bool(self._open)

    def _count(self, by_rank: Mapping[int, ReplicaSums]) -> None:
        """Compare what ranks have of one kind after one step."""
        totals, kind = self.totals or ReplicaTotals(), next(iter(by_rank.values())).kind
        layers = max((sums.layers for sums in by_rank.values()), key=len)
        if not layers:  # the rank that says them is gone
            return
        differing = dict(totals.differing)
        labels = [layer if (layer, kind) in differing or len(differing) < LAYERS else OTHERS for layer in layers]
        differing |= {(label, kind): differing.get((label, kind), 0) for label in labels}
        odd: set[int] = set()
        if len({sums.sums for sums in by_rank.values()}) > 1:
            table = np.array([np.frombuffer(bytes.fromhex(sums.sums), dtype="<u8") for sums in by_rank.values()])
            for column in np.flatnonzero((table != table[0]).any(axis=0)).tolist():
                differing[labels[column], kind] += 1
                odd |= _minority(dict(zip(by_rank, table[:, column].tolist(), strict=True)))
        shown = dict(totals.odd)
        for rank in sorted(odd):
            label = str(rank) if str(rank) in shown or len(shown) < RANKS else OTHERS
            shown[label] = shown.get(label, 0) + 1
        self.totals = ReplicaTotals({**totals.compared, kind: totals.compared[kind] + 1}, differing, shown)


def _minority(by_rank: Mapping[int, int]) -> set[int]:
    """Return the ranks whose value most others do not have; none where no value is more frequent than every other."""
    frequent = Counter(by_rank.values()).most_common(2)
    if len(frequent) > 1 and frequent[0][1] == frequent[1][1]:
        return set()
    return {rank for rank, value in by_rank.items() if value != frequent[0][0]}
