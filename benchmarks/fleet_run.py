"""A fleet of ranks before a real Prometheus: how it is discovered, run and measured. The program is `benchmarks.fleet`."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.fleet_job import Recording, recordings
from benchmarks.fleet_prometheus import FILES, HTTP, JOB, Prometheus, Reading, prometheus, seconds_until
from benchmarks.fleet_server import TARGETS, Fleet
from torch_grad_exporter.distributed.discovery import TargetFile
from torch_grad_exporter.files import write

POLL = 2.0

SPARE = 12
"""Scrapes that are recorded beyond those of the measured time, for the time until all ranks are up."""

Pair = tuple[Recording, Recording]
"""What rank 0 shows, and what every other rank shows."""
QUERIES = {
    "samples per second, of the run": "sum by (run) (rate(torch_train_samples_total[1m]))",
    "slowest rank": "topk(1, rate(torch_train_step_duration_seconds_sum[1m]) / rate(torch_train_step_duration_seconds_count[1m]))",
    "RMS norm of each layer": "sqrt(sum by (run, layer) (rate(torch_grad_norm_squared_accumulated_total[1m]))"
    " / on (run, layer) max by (run, layer) (rate(torch_grad_captures_total[1m])))",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet: so many ranks, each layer's series on rank 0 alone or, `sharded`, on each rank."""

    ranks: int
    layers: int
    sharded: bool

    @property
    def name(self) -> str:
        """How such training is called."""
        return "FSDP2" if self.sharded else "DDP"


@dataclass(frozen=True, slots=True)
class Found:
    """How Prometheus took a change among the targets: when it scraped as it should, and for how long it read files after that.

    In seconds; `reads` of all files, `reading` the time that these took, `cpu` what Prometheus took until it was at rest.
    """

    way: str
    up_after: float
    read_on: float
    reads: int
    reading: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case, over its measured time: between the readings `settled` and `end`; `empty` is one without ranks.

    `durations` and `of_rank_0`: median and 99th percentile of what Prometheus says that a scrape took, in seconds.
    `expected` and `series`: those that were served, counted here, and those that Prometheus took from the last scrapes.
    `served`: share of the scrapes' time that was spent here; `serving`: processors that this took. `load`: that of the machine.
    """

    case: Case
    recorded: Pair
    expected: int
    series: int
    least_up: int
    failed: int
    durations: tuple[float, float]
    of_rank_0: tuple[float, float]
    empty: Reading
    settled: Reading
    end: Reading
    peak: float
    served: float
    serving: float
    sent_per_second: float
    bytes_per_sample: float
    load: float
    queries: dict[str, float]
    found: Found


def measure(case: Case, tell: Tell, seconds: float, interval: float, recorded: Pair | None = None) -> Outcome:
    """Runs one fleet, of which a Prometheus without ranks is told. `recorded`: what ranks show, if it is there already."""
    if recorded is None:
        recorded = recordings(case.layers, int(seconds / interval) + SPARE, sharded=case.sharded)
    first, others = recorded
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(first, others, case.ranks))
        files, data = stack.enter_context(_folders())
        server = stack.enter_context(prometheus(data, FILES.format(files), interval))
        empty = server.reading()
        found = discovered(server, case.ranks, tell.__doc__ or "", lambda: tell(fleet, files))
        time.sleep(interval)
        settled, at_start = server.reading(), _spent(fleet)
        least_up, peak = watched(server, seconds)
        end = server.reading()
        spent, worked, sent = (now - then for now, then in zip(_spent(fleet), at_start, strict=True))
        all_scrapes = server.all_of(f'scrape_duration_seconds{{job="{JOB}"}}', seconds)
        return Outcome(
            case=case,
            recorded=recorded,
            expected=_lines(first) + (case.ranks - 1) * _lines(others),
            series=int(server.value(f'sum(scrape_samples_scraped{{job="{JOB}"}})')),
            least_up=least_up,
            failed=server.down(),
            durations=_percentiles(all_scrapes),
            of_rank_0=_percentiles(server.all_of(f'scrape_duration_seconds{{job="{JOB}",rank="0"}}', seconds)),
            empty=empty,
            settled=settled,
            end=end,
            peak=max(peak, end.resident),
            served=spent / float(all_scrapes.sum()),
            serving=worked / (end.at - settled.at),
            sent_per_second=sent / (end.at - settled.at),
            bytes_per_sample=server.bytes_per_sample(),
            load=os.getloadavg()[0],
            queries={name: server.seconds_for(query) for name, query in QUERIES.items()},
            found=found,
        )


def discovered(server: Prometheus, ranks: int, way: str, tell: Callable[[], None]) -> Found:
    """Changes what Prometheus is told, waits until so many ranks are up and all is read, and says what that took of it."""
    before = server.reading()
    start = time.monotonic()
    tell()
    seconds_until(lambda: server.up() == ranks)
    up_after = read_until = time.monotonic() - start
    while not server.at_rest():
        read_until = time.monotonic() - start
    after = server.reading()
    reads, seconds = int(after.file_reads - before.file_reads), after.file_seconds - before.file_seconds
    return Found(way, up_after, read_until - up_after, reads, seconds, after.cpu - before.cpu)


def ways(case: Case, interval: float) -> list[Found]:
    """Other ways in which Prometheus can be told of all ranks, and changes of single ones."""
    first, others = recordings(1, 2, sharded=case.sharded)
    with Fleet(first, others, case.ranks) as fleet:
        return [_beside(fleet, interval), *_there(fleet, interval), _listed(fleet, interval)]


def _beside(fleet: Fleet, interval: float) -> Found:
    with _folders() as (files, data), prometheus(data, FILES.format(files), interval) as server:
        return discovered(server, len(fleet.targets), str(beside.__doc__), lambda: beside(fleet, files))


def _there(fleet: Fleet, interval: float) -> list[Found]:
    ranks = len(fleet.targets)
    with _folders() as (files, data):
        one_each(fleet, files)
        last = TargetFile(str(files), fleet.targets[-1])
        with prometheus(data, FILES.format(files), interval) as server:
            return [
                discovered(server, ranks, "a file of each rank, there when it starts", lambda: None),
                discovered(server, ranks, "all files touched, as each minute", lambda: _touch(files)),
                discovered(server, ranks - 1, "one of them removed", last.path.unlink),
                discovered(server, ranks, "that file back in its place", last.refresh),
            ]


def _listed(fleet: Fleet, interval: float) -> Found:
    address = f"http://{fleet.targets[0].address}{TARGETS.decode()}"
    with _folders() as (_, data), prometheus(data, HTTP.format(address), interval) as server:
        return discovered(server, len(fleet.targets), f"http_sd, a list of {len(fleet.listed()):,} bytes", lambda: None)


# How the ranks become known; the docstrings are shown in the table.

Tell = Callable[[Fleet, Path], None]


def one_each(fleet: Fleet, files: Path) -> None:
    """a file of each rank, written as the exporter does"""  # noqa: D400, D403
    for target in fleet.targets:
        TargetFile(str(files), target).refresh()


def beside(fleet: Fleet, files: Path) -> None:
    """a file of each rank, written beside the final one and renamed"""  # noqa: D400, D403
    (below := files / "new").mkdir()
    one_each(fleet, below)
    for path in sorted(below.glob("*.json")):
        temporary = files / f".{path.name}.tmp"
        temporary.write_bytes(path.read_bytes())
        temporary.rename(files / path.name)


def together(fleet: Fleet, files: Path) -> None:
    """one file with all ranks"""  # noqa: D400, D403
    write(files / "all.json", fleet.listed())


def _touch(files: Path) -> None:
    for path in files.glob("*.json"):
        os.utime(path)


def watched(server: Prometheus, seconds: float) -> tuple[int, float]:
    """Lets it run for so long; the fewest ranks that were up and the most memory that it held at one time."""
    least, peak, end = sys.maxsize, 0.0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(POLL, left))
        least, peak = min(least, server.up()), max(peak, server.reading().resident)
    return least, peak


@contextlib.contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """One for the files of the ranks, and a name for one for Prometheus."""
    with tempfile.TemporaryDirectory() as folder:
        (files := Path(folder, "ranks")).mkdir()
        yield files, Path(folder, "prometheus")


def _spent(fleet: Fleet) -> tuple[float, float, int]:
    return fleet.seconds, fleet.cpu_seconds(), fleet.sent


def _lines(recording: Recording) -> int:
    """The series of the last scrape, counted in its text."""
    return sum(not line.startswith(b"#") for line in recording.bodies[-1].splitlines())


def _percentiles(durations: NDArray[np.float64]) -> tuple[float, float]:
    median, slow = np.percentile(durations, (50, 99)).tolist()
    return median, slow
