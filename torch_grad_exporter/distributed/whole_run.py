"""The whole run on one endpoint: each rank publishes the sums over its samples, and rank 0 adds up the ranks.

The norm of a part of a gradient does not give the norm of the whole, and ranks are not sampled at the same moments. The mean
of the squares is exact nevertheless: each rank takes it of its part, over the samples between two of its reports, and rank 0
sums it over all ranks. Its root is the root mean square of the norm. No rank waits for another: a rank that is dead, or
has no exporter, only makes the values incomplete, and then there are none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import compress

import numpy as np

from torch_grad_exporter.distributed.store import JobStore, NoStoreError
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.snapshots import Snapshot

REPORT_SECONDS = 5.0
"""Between two reports of a rank."""

RANKS = 256
"""From here on, ranks report less often, so that rank 0 has no more to add up in a second."""

MISSED = 6
"""Reports of a rank that may be missed before it is taken to be gone."""

COLUMNS = ("squared_total", "captures", "nans", "infs", "units", "dead_ratio")
"""What is reported of each layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What one rank reported. `started`: distinguishes its process from the one before; `number`: its reports from each other.

    `steps`: optimizer steps. `values`: shape (columns, layers), NaN for what is not known.
    """

    started: int
    number: int
    steps: int
    layers: tuple[str, ...]
    values: FloatArray

    def encoded(self) -> bytes:
        """As bytes, for the store: lengths of the two parts in JSON, these, and the values."""
        head, layers = (json.dumps(part).encode() for part in ([self.started, self.number, self.steps], self.layers))
        lengths = len(head).to_bytes(4, "big") + len(layers).to_bytes(4, "big")
        return zlib.compress(lengths + head + layers + self.values.astype("<f8").tobytes(), 1)

    @classmethod
    def decoded(cls, content: bytes) -> Report:
        """What `encoded` gave; anything else raises `ValueError`."""
        try:
            plain = zlib.decompress(content)
            middle = 8 + int.from_bytes(plain[:4], "big")
            end = middle + int.from_bytes(plain[4:8], "big")
            started, number, steps = json.loads(plain[8:middle])
            layers = _layers(plain[middle:end])
            values = np.frombuffer(plain[end:], dtype="<f8").reshape(len(COLUMNS), len(layers))
            return cls(int(started), int(number), int(steps), layers, values.astype(np.float64))
        except (zlib.error, TypeError, UnicodeDecodeError) as error:
            raise ValueError("no report of a rank") from error

    @property
    def captures(self) -> FloatArray:
        """Samples of each layer; that which was captured most often was in each sample."""
        captures: FloatArray = self.values[COLUMNS.index("captures")]
        return captures


@functools.lru_cache(maxsize=64)
def _layers(content: bytes) -> tuple[str, ...]:
    """The names in a report. Ranks have the same ones: there is one object of all that are equal."""
    return tuple(str(layer) for layer in json.loads(content))


def report_of(snapshot: Snapshot, started: int, number: int, steps: int) -> Report:
    """The report of what this rank has seen so far, of the layers of which it has parameters that count: no copies.

    Of a layer that is not tracked at present, and of the removed ones together, it has the elements that were not finite.
    """
    table, layer_values, more = snapshot.gradients.table, snapshot.gradients.layer_values, snapshot.gradients.untracked
    here, there = layer_values["summed"], more.values["summed"]
    layers = (*compress(table.layers, here.tolist()), *compress(more.labels, there.tolist()))
    values = np.stack([layer_values[column][here] for column in COLUMNS])
    rest = np.stack([more.values[column][there] if column in ("nans", "infs") else np.zeros(there.sum()) for column in COLUMNS])
    return Report(started, number, steps, layers, np.concatenate([values, rest], axis=1).astype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """The run as of the last reports. Per layer, shape (layers,): `rms` and `dead_ratio`, NaN where they are not known.

    `global_rms`: over all layers. `nans`, `infs`: since the ranks' starts. `fewest_steps`, `most_steps`: of the ranks that
    report. All but `reporting` is `None` or empty where a rank is missing.
    """

    reporting: int
    layers: tuple[str, ...] = ()
    rms: FloatArray | None = None
    dead_ratio: FloatArray | None = None
    nans: FloatArray | None = None
    infs: FloatArray | None = None
    global_rms: float | None = None
    fewest_steps: int | None = None
    most_steps: int | None = None


@dataclass(slots=True)
class _Heard:
    """What is known of one rank: its last report and when, and the last one that had fewer samples."""

    last: Report
    at: float
    before: Report | None = None

    def hear(self, report: Report, now: float) -> None:
        if (report.started, report.number) == (self.last.started, self.last.number):
            return
        captures, before = report.captures, self.last.captures
        # A layer that was removed and added again counts from 0.
        if report.started != self.last.started or report.layers != self.last.layers or (captures < before).any():
            self.before = None
        elif captures.max(initial=0.0) > before.max(initial=0.0):
            self.before = self.last
        self.last, self.at = report, now

    def window(self) -> tuple[FloatArray, FloatArray] | None:
        """By layer, the sum of squares over the last samples and how many of them had it; `None` before there are any."""
        if self.before is None:
            return None
        squares, captures = self.last.values[:2] - self.before.values[:2]
        return squares, captures


class Combination:
    """Adds up the reports of all ranks. `fresh_seconds`: for which a rank without a new report is taken to be there.

    For one thread at a time; `view` from any thread.
    """

    def __init__(self, world_size: int, fresh_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._world_size = world_size
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._heard: dict[int, _Heard] = {}
        self.view = RunView(0)

    def hear(self, reports: Mapping[int, bytes]) -> None:
        """Takes the latest reports, by rank; anything else is left out."""
        now = self._clock()
        for rank, content in reports.items():
            with contextlib.suppress(ValueError):
                report = Report.decoded(content)
                self._heard.setdefault(rank, _Heard(report, now)).hear(report, now)
        fresh = [one for one in self._heard.values() if now - one.at <= self._fresh_seconds]
        self.view = _added_up(fresh) if len(fresh) == self._world_size else RunView(len(fresh))


def _added_up(ranks: list[_Heard]) -> RunView:
    layers = tuple(dict.fromkeys(itertools.chain.from_iterable({one.last.layers for one in ranks})))
    row = {layer: position for position, layer in enumerate(layers)}
    rows_of = {some: np.array([row[layer] for layer in some], dtype=np.int64) for some in {one.last.layers for one in ranks}}
    squares, captures, nans, infs, units, dead = np.zeros((6, len(layers)))
    whole = 0.0
    for one in ranks:
        rows = rows_of[one.last.layers]
        last = dict(zip(COLUMNS, one.last.values, strict=True))
        nans[rows] += last["nans"]
        infs[rows] += last["infs"]
        known = last["units"] > 0
        units[rows[known]] += last["units"][known]
        dead[rows[known]] += (last["units"] * last["dead_ratio"])[known]
        window = one.window()
        if window is None:
            squares[rows] = np.nan
            whole += math.nan if len(rows) else 0.0
        elif (samples := window[1].max(initial=0.0)) > 0:
            # A layer's mean is over the samples that had it; in the norm over all layers it is 0 in the others.
            squares[rows] += window[0] / np.maximum(window[1], 1.0)
            captures[rows] += window[1]
            whole += float(window[0].sum() / samples)
    steps = [one.last.steps for one in ranks]
    with np.errstate(invalid="ignore", divide="ignore"):
        return RunView(
            len(ranks), layers, np.sqrt(np.where(captures > 0, squares, np.nan)), dead / np.where(units > 0, units, np.nan),
            nans, infs, float(np.sqrt(whole)) if captures.any() else math.nan, min(steps), max(steps),
        )  # fmt: skip


class WholeRun:
    """Publishes this rank's reports, and on rank 0 combines those of all, from `start()` to `close()`, in a thread.

    `snapshot`: this rank's values as of now; `steps`: its optimizer steps. Failures go to `on_error`. `interval`: seconds
    between two reports.
    """

    def __init__(
        self,
        store: JobStore,
        rank: int,
        world_size: int,
        *,
        snapshot: Callable[[], Snapshot],
        steps: Callable[[], int],
        on_error: Callable[[BaseException], None],
        interval: float | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._keys = {_key(one): one for one in range(world_size)} if rank == 0 else {}
        self._snapshot = snapshot
        self._steps = steps
        self._on_error = on_error
        self._interval = REPORT_SECONDS * max(1.0, world_size / RANKS) if interval is None else interval
        self._number = 0
        self._started = time.time_ns()
        self._combination = Combination(world_size, MISSED * self._interval)
        self._thread = BackgroundLoop("whole-run", self._work, guard=Guard(self._failed), pause=self._interval)

    def start(self) -> None:
        """Begins to report. Raises `RuntimeError` if there are no more threads to be had."""
        self._thread.start()

    @property
    def view(self) -> RunView | None:
        """The run as of the last reports; `None` on other ranks than 0."""
        return self._combination.view if self._rank == 0 else None

    def report(self) -> None:
        """Publishes what this rank has seen. Raises `StoreError`, `NoStoreError` while the job has none yet."""
        self._number += 1
        report = report_of(self._snapshot(), self._started, self._number, self._steps())
        self._store.publish(_key(self._rank), report.encoded(), seconds=self._interval)

    def combine(self) -> None:
        """On rank 0, combines what the ranks have published. Raises as `report`."""
        if self._keys:
            found = self._store.collect(self._keys, seconds=self._interval)
            self._combination.hear({self._keys[key]: content for key, content in found.items()})

    def close(self) -> None:
        """Ends the thread, without waiting for it; idempotent."""
        self._thread.stop()

    def _work(self) -> None:
        with contextlib.suppress(NoStoreError):
            self.report()
            self.combine()

    def _failed(self, error: Exception) -> None:
        self._on_error(error)
        self._combination.hear({})  # time goes on


def _key(rank: int) -> str:
    return f"report/{rank}"
