"""What the exporter's threads take while nothing scrapes: `python -m benchmarks.idle`, about seven minutes.

No scrape, no page, no push. A small model and one of 100 MB, each while it trains, at 100 steps a second at most, and while the
program does nothing after some steps. Each case has a process of its own; what is taken is the CPU time of the exporter's threads
alone, also of those that have ended meanwhile, as those that run collectors. So a busy machine changes little; but what a sample
costs decides how many there are, and each costs these threads as well: the table says how many there were.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch

from benchmarks import record
from torch_grad_exporter import Exporter, start_exporter

WINDOW_SECONDS = 15.0
"""Each has one judgement of the run by a scrape."""

WINDOWS = 6
WARM_UP_SECONDS = 20.0
"""Until what is paced by its cost has its pace, and the sampling interval is found."""

STEP_SECONDS = 0.01
FIRST_STEPS = 50
BAR = 1e-3
PREFIX = "torch-grad-exporter-"

SIZES: Mapping[str, int] = {"small": 64, "100 MB": 5000}
"""Features in and out of the one layer, in 32 bits."""

DOING = ("training", "idle")


class Found(TypedDict):
    """What a case has come to. `shares`: for each window the share of a core by thread; `samples`: in a second."""

    shares: list[dict[str, float]]
    samples: float


class Ended:
    """CPU seconds of the exporter's threads that have ended, by role."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        run = threading.Thread.run

        def counted(thread: threading.Thread) -> None:
            try:
                run(thread)
            finally:
                self.seconds[thread.name] += time.thread_time()

        threading.Thread.run = counted  # type: ignore[method-assign, assignment]


def spent(ended: Ended) -> defaultdict[str, float]:
    """CPU seconds until now of all threads of the exporter, by role."""
    seconds_of = defaultdict(float, ended.seconds)
    for thread in threading.enumerate():
        if thread.ident is not None and thread.name.startswith(PREFIX):
            seconds_of[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    named = {name.removeprefix(PREFIX): seconds for name, seconds in seconds_of.items() if name.startswith(PREFIX)}
    return defaultdict(float, named)


def stepper(width: int) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A model of one layer, and a training step of it."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width))
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-6), torch.randn(1, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, step


def windows(step: Callable[[], None] | None, seconds: Sequence[float], ended: Ended) -> Iterator[dict[str, float]]:
    """For each window the share of a core by thread."""
    for length in seconds:
        before, begin = spent(ended), time.monotonic()
        while (left := begin + length - time.monotonic()) > 0:
            start = time.monotonic()
            if step is not None:
                step()
            time.sleep(max(0.0, min(left, STEP_SECONDS - (time.monotonic() - start)) if step else left))
        now, passed = spent(ended), time.monotonic() - begin
        yield {name: (now[name] - before[name]) / passed for name in now}


def case(size: str, doing: str, count: int) -> dict[str, object]:
    """One case, in this process."""
    torch.set_num_threads(1)
    logging.getLogger("torch_grad_exporter").setLevel(logging.ERROR)
    ended = Ended()
    model, step = stepper(SIZES[size])
    with start_exporter(model, port=0, addr="127.0.0.1") as exporter:
        for _ in range(FIRST_STEPS):
            step()
        of_windows = windows(step if doing == "training" else None, (WARM_UP_SECONDS, *[WINDOW_SECONDS] * count), ended)
        next(of_windows)
        before = sampled(exporter)
        shares = list(of_windows)
        samples = sampled(exporter) - before
    return {"shares": shares, "samples": samples / (count * WINDOW_SECONDS)}


def sampled(exporter: Exporter) -> float:
    """How many samples there were. To be asked between windows, as it is a look."""
    return sum(exporter.values("^torch_grad_exporter_captures_total").values())


def measured(size: str, doing: str, count: int) -> Found:
    """One case, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.idle", "--case", size, doing, "--windows", str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=record.ROOT)  # noqa: S603 - our own
    found: Found = json.loads(done.stdout)
    return found


def table(cases: Mapping[tuple[str, str], Found]) -> record.Table:
    """A row for each case: all threads together, with the least and the most of any window, and each thread."""
    every = [shares for measurement in cases.values() for shares in measurement["shares"]]
    roles = sorted({role for shares in every for role, share in shares.items() if share >= 5e-7})
    rows: list[list[record.Cell]] = []
    for (size, doing), measurement in cases.items():
        shares = measurement["shares"]
        sums = [sum(window.values()) for window in shares]
        by_role = [_percent(_mean([window.get(role, 0.0) for window in shares])) for role in roles]
        within = "yes" if _mean(sums) < BAR else "no"
        rows.append(
            [
                size,
                doing,
                round(measurement["samples"], 2),
                _percent(_mean(sums)),
                f"{_percent(min(sums))} to {_percent(max(sums))}",
                *by_role,
                within,
            ]
        )
    notes = [
        f"CPU time of the exporter's own threads in percent of a core, over windows of {WINDOW_SECONDS:g} s; bar {BAR:.1%}.",
        "No scrape, no page and no push. `collect` runs the collectors of each judgement by a scrape.",
    ]
    columns = ("model", "the program", "samples per s", "all threads %", "of a window", *roles, "within the bar")
    return record.table("The exporter's threads while nobody looks", columns, rows, notes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(share: float) -> float:
    return round(100 * share, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all cases, or prints one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"of {WINDOW_SECONDS:g} s each")
    chosen = parser.parse_args(arguments)
    if chosen.case:
        size, doing = chosen.case
        print(json.dumps(case(size, doing, chosen.windows)))
        return 0
    torch.set_num_threads(1)  # as in each case: the head of the results says how many there are
    cases = {}
    for size in SIZES:
        for doing in DOING:
            print(f"{size}, {doing} ...", flush=True)
            cases[size, doing] = measured(size, doing, chosen.windows)
    results = table(cases)
    for row in (results["columns"], *results["rows"]):
        print(" | ".join(str(cell) for cell in row))
    trial = "-trial" if chosen.windows < WINDOWS else ""
    print(f"written to {record.save(f'idle{trial}', {'tables': [results]})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
