"""What is left over after many steps: resident memory, threads, descriptors and hooks, and whether the counters are exact.

A tiny model is trained with AdamW, clipped, observed, evaluated now and then and scraped over HTTP; the same loop runs without
an exporter, so that what torch itself keeps is known. Each arm is a process of its own. Exits with status 1 if the exporter's
memory grew by more than `BAR` after the warm-up, a thread, descriptor or hook is left after `close()`, or a counter is not
what the loop has counted. Takes half an hour, most of it for the last arm, a million steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression, median

import torch

from benchmarks import census, record, soak_counts
from benchmarks.census import Census
from benchmarks.soak_counts import Counts
from torch_grad_exporter import Exporter, start_exporter

BAR = 2 * 2**20
"""Bytes that resident memory may grow by after the warm-up."""

WARM_UP = 0.2
"""Share of the steps that is the warm-up: buffers are made, the host's windows fill, the allocator settles."""

READINGS = 200
STEPS = {"plain": 100_000, "defaults": 100_000, "every=1": 20_000, "million": 1_000_000}
ARMS = {"plain": None, "defaults": "auto", "every=1": 1, "million": "auto"}
SCRAPE_EVERY = 250
EVALUATE_EVERY = 1000
BATCH = 4
FINAL_SECONDS = 5.0
"""For which the last scrape may take to be up to date: the server's body may be a second old."""


class Training:
    """A loop as users write it, on a model so small that 100,000 steps take minutes. `exporter`: `None` for plain training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.exporter: Exporter | None = None
        self._inputs, self._targets = torch.randn(BATCH, 8), torch.randn(BATCH, 4)

    def step(self, number: int) -> None:
        """One training step, with what comes every so many steps."""
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(self._inputs), self._targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.exporter is not None:
            self.exporter.observe(loss=loss, tokens=BATCH, grad_norm=norm, epoch=number / 1000)
            if number % SCRAPE_EVERY == 0:
                scrape(self.exporter)
        if number % EVALUATE_EVERY == 0:
            self.evaluate()

    def census(self) -> Census:
        """What the process holds, once everything that is under way has been taken in."""
        if self.exporter is not None:
            list(self.exporter.collect())
        return census.take(self.model, self.optimizer, self.exporter)

    def evaluate(self) -> None:
        """A forward pass that is none of the training's."""
        self.model.eval()
        with torch.no_grad():
            self.model(self._inputs)
        self.model.train()


@dataclass(frozen=True, slots=True)
class Soaked:
    """One arm. `before` the exporter and `after` its `close()`; `readings` during the steps, each with its step.

    `grown`: types of which there are more live objects at the end than after the warm-up, the exporter's and all others.
    `counts`: of the last scrape; `None` without an exporter.
    """

    steps: int
    seconds: float
    before: Census
    readings: list[tuple[int, Census]]
    after: Census
    grown: dict[str, int]
    counts: Counts | None


def scrape(exporter: Exporter) -> bytes:
    """A scrape over HTTP, as Prometheus does it."""
    if exporter.url is None:
        return b""
    request = urllib.request.Request(exporter.url, headers={"Accept-Encoding": "gzip"})  # noqa: S310 - our own server
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - as above
        body: bytes = answer.read()
    return body


def soak(steps: int, every: object, *, readings: int = READINGS) -> Soaked:
    """Trains that many steps; `every` as in `start_exporter`, `None` for no exporter."""
    training = Training()
    for number in range(1, 101):
        training.step(number)
    before = training.census()
    if every is not None:
        training.exporter = start_exporter(training.model, port=0, addr="127.0.0.1", every=every)  # type: ignore[arg-type]
    found: list[tuple[int, Census]] = []
    live = census.live()
    start = time.perf_counter()
    for number in range(1, steps + 1):
        training.step(number)
        if number % max(1, steps // readings) == 0:
            found.append((number, training.census()))
        if number == int(WARM_UP * steps):
            live = census.live()
    seconds = time.perf_counter() - start
    grown = dict((census.live() - live).most_common(12))
    counts = None if training.exporter is None else _counts(training, training.exporter, steps)
    if training.exporter is not None:
        training.exporter.close()
        training.exporter = None
    return Soaked(steps, seconds, before, found, _settled(training, before.threads), grown, counts)


def _settled(training: Training, threads: int) -> Census:
    """The census once no more than `threads` are left, or after a second: a joined thread may take a moment to be gone."""
    end = time.monotonic() + 1.0
    while (now := training.census()).threads > threads and time.monotonic() < end:
        time.sleep(0.01)
    return now


def _counts(training: Training, exporter: Exporter, steps: int) -> Counts:
    """Those of a scrape over HTTP once they are exact, or after some seconds.

    Where steps are only counted, their durations come with the first thing that is no step, here an evaluation.
    """
    end = time.monotonic() + FINAL_SECONDS
    while True:
        training.evaluate()
        counts = soak_counts.read(scrape(exporter))
        if not _wrong(counts, steps) or time.monotonic() > end:
            return counts
        time.sleep(0.1)


def _wrong(counts: Counts, steps: int) -> list[str]:
    return soak_counts.complaints(counts, soak_counts.expected(steps, BATCH, BATCH, counts.captures))


@dataclass(frozen=True, slots=True)
class Growth:
    """Of resident memory after the warm-up, in bytes.

    `growth`: median of the last tenth of the readings less that of the first tenth; `fitted`: the same by a straight line
    through all of them; `spread`: the largest less the smallest.
    """

    growth: float
    fitted: float
    spread: float


def growth(soaked: Soaked) -> Growth:
    """How much resident memory grew after the warm-up."""
    settled = [(step, reading.resident) for step, reading in soaked.readings if step > WARM_UP * soaked.steps]
    steps, sizes = [s for s, _ in settled], [r for _, r in settled]
    tenth = max(1, len(sizes) // 10)
    fitted = linear_regression(steps, sizes).slope * (steps[-1] - steps[0])
    return Growth(median(sizes[-tenth:]) - median(sizes[:tenth]), fitted, max(sizes) - min(sizes))


def complaints(name: str, soaked: Soaked, bar: float = BAR) -> list[str]:
    """What an arm kept that it should not have; empty if all is well."""
    wrong = []
    grew = growth(soaked).growth
    if grew > bar:
        wrong.append(f"{name}: resident memory grew by {grew / 2**20:.2f} MiB after the warm-up, the bar is {bar / 2**20:.0f}")
    settled = [reading for step, reading in soaked.readings if step > WARM_UP * soaked.steps]
    for field in ("threads", "descriptors", "hooks"):
        if getattr(soaked.after, field) > getattr(soaked.before, field):
            wrong.append(f"{name}: {getattr(soaked.after, field)} {field} after close(), {getattr(soaked.before, field)} before")
        counts = [getattr(reading, field) for reading in settled]
        # The fewest: a scrape that was just answered holds a descriptor a moment longer, but a leak is always there.
        early, late = min(counts[: len(counts) // 2]), min(counts[-len(counts) // 4 :])
        if late > early:
            wrong.append(f"{name}: {field} grew from {early} to {late} during the steps")
    if soaked.counts is not None:
        wrong += [f"{name}: {line}" for line in _wrong(soaked.counts, soaked.steps)]
    return wrong


def results(arms: dict[str, Soaked]) -> dict[str, object]:
    """Everything in the form that `record.save` takes."""
    rows = [_row(name, arm) for name, arm in arms.items()]
    columns = (
        "arm", "steps", "samples", "seconds", "resident at the end MiB", "growth MiB", "fitted MiB", "spread MiB",
        "threads", "descriptors", "hooks", "objects behind the exporter", "counters",
    )  # fmt: skip
    notes = [
        f"Growth of resident memory after the first {WARM_UP:.0%} of the steps: the last tenth less the first, by medians.",
        f"The bar is {BAR / 2**20:.0f} MiB. `plain` is the same loop without an exporter: what it grows by is not the exporter's.",
        "`a > b > c > d`: before the exporter, after the warm-up, at the last step, after close().",
        "Counters: steps, backward passes, samples, tokens and step durations of a last scrape, beside the loop's own count.",
    ]
    return {
        "tables": [record.table("Many steps", columns, rows, notes)],
        "grown": {name: arm.grown for name, arm in arms.items()},
        "resident": {name: [(step, reading.resident) for step, reading in arm.readings] for name, arm in arms.items()},
    }


def _row(name: str, arm: Soaked) -> list[record.Cell]:
    settled = [reading for step, reading in arm.readings if step > WARM_UP * arm.steps]
    moments = (arm.before, settled[0], settled[-1], arm.after)
    grew = growth(arm)
    sizes = [round(value / 2**20, 2) for value in (settled[-1].resident, grew.growth, grew.fitted, grew.spread)]
    fields = ("threads", "descriptors", "hooks", "objects")
    counts = [" > ".join(str(getattr(reading, field)) for reading in moments) for field in fields]
    captures = 0 if arm.counts is None else int(arm.counts.captures)
    exact = "" if arm.counts is None else "; ".join(_wrong(arm.counts, arm.steps)) or "exact"
    return [name, arm.steps, captures, round(arm.seconds, 1), *sizes, *counts, exact]


def _in_a_process_of_its_own(name: str, share: float) -> Soaked:
    command = [sys.executable, "-m", "benchmarks.soak", "--arm", name, "--share", str(share)]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, cwd=record.ROOT, check=True).stdout)  # noqa: S603
    readings = [(step, Census(**reading)) for step, reading in told.pop("readings")]
    counts = told.pop("counts")
    return Soaked(
        before=Census(**told.pop("before")),
        after=Census(**told.pop("after")),
        readings=readings,
        counts=None if counts is None else Counts(**counts),
        **told,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the arms one after the other and writes `results/soak.json`, or `soak-trial.json`; 0 if nothing was left behind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the usual steps of each arm")
    parser.add_argument("--arm", choices=ARMS, help="run this arm in this process and print what was found as JSON")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    steps = {name: int(chosen.share * usual) for name, usual in STEPS.items()}
    if chosen.arm is not None:
        print(json.dumps(asdict(soak(steps[chosen.arm], ARMS[chosen.arm]))))
        return 0
    arms = {}
    for name in ARMS:
        arms[name] = _in_a_process_of_its_own(name, chosen.share)
        print(f"{name}: {_row(name, arms[name])}", flush=True)
    complete = chosen.share >= 1.0
    print(f"written to {record.save('soak' if complete else 'soak-trial', results(arms))}")
    wrong = [line for name, arm in arms.items() if name != "plain" for line in complaints(name, arm)]
    print("\n".join(wrong) or "nothing is left behind")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
