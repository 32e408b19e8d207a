"""50 scrapes a second beside a training loop with about 10,000 series: what comes of the scrapes, and what is left of the loop.

Stretches of several seconds take turns in one process: scraped, not scraped, and not scraped while the same client scrapes a
mirror in another process. That one shows what client and server take from the machine alone; the rest of the difference is
what they take of Python's lock in the training's own process. At the end there is one stretch of half a minute.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from benchmarks import record
from benchmarks.abuse_mirror import Mirror
from benchmarks.bars import verdict
from benchmarks.interleave import interval, trimmed_mean
from benchmarks.scraped import STEP_SECONDS, Training, batch_for
from benchmarks.scraper import Moments, Scraper, Scrapes

RATE = 50.0
BAR = 10.0
"""Percent of the throughput that may be lost."""

ROUNDS, SECONDS, LONG_SECONDS = 10, 6.0, 30.0

SCRAPED, ELSEWHERE, QUIET = "scraped", "another process is scraped", "not scraped"
LONG = "scraped, at one go"


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """One stretch. Seconds of processors: of the training's thread, of the exporter's threads, and of the client."""

    moments: Moments
    training: float
    exporter: float
    client: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return float(self.moments[-1] - self.moments[0])

    @property
    def steps_per_second(self) -> float:
        """The throughput."""
        return (len(self.moments) - 1) / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Everything that was measured. `own` and `mirrored`: the scrapes of the training's process and of the mirror's."""

    stretches: dict[str, list[Stretch]]
    own: Scrapes
    mirrored: Scrapes
    series: int
    batch: int


@dataclass(slots=True)
class _Meter:
    """Makes stretches of one training, with clients that scrape meanwhile."""

    training: Training
    clients: Mapping[str, Scraper]

    def stretch(self, name: str, seconds: float) -> Stretch:
        client = self.clients.get(name)
        on: Callable[[], AbstractContextManager[None]] = nullcontext if client is None else client.on
        gc.collect()
        with on():
            before = self._spent(client)
            moments = self.training.stretch(seconds)
            spent = [after - earlier for after, earlier in zip(self._spent(client), before, strict=True)]
        return Stretch(moments, *spent)

    def _spent(self, client: Scraper | None) -> tuple[float, float, float]:
        own = time.thread_time()
        return own, time.process_time() - own, 0.0 if client is None else client.seconds()


def run(rounds: int = ROUNDS, seconds: float = SECONDS, long_seconds: float = LONG_SECONDS) -> Load:
    """Trains and scrapes for all stretches."""
    batch = batch_for(STEP_SECONDS)
    training = Training(batch)
    training.watch()
    if training.exporter is None or training.exporter.url is None:
        raise RuntimeError("the exporter does not serve: no port is free")
    for _ in range(3):
        training.stretch(seconds / 2)  # until the sampling interval is found
    with Mirror(training.exporter.url) as mirror:
        own, mirrored = Scraper(training.exporter.url, RATE), Scraper(mirror.url, RATE)
        meter = _Meter(training, {SCRAPED: own, LONG: own, ELSEWHERE: mirrored})
        stretches: dict[str, list[Stretch]] = {name: [] for name in (SCRAPED, ELSEWHERE, QUIET)}
        names, chance = list(stretches), random.Random(0)  # noqa: S311 - an order, no secret
        for _ in range(rounds):
            chance.shuffle(names)
            for name in names:
                stretches[name].append(meter.stretch(name, seconds))
        stretches[LONG] = [meter.stretch(LONG, long_seconds)]
        series = sum(family.series for family in training.exporter.collect())
        load = Load(stretches, own.end(), mirrored.end(), series, batch)
    training.close()
    return load


@dataclass(frozen=True, slots=True)
class Kept:
    """Throughput beside that of quiet stretches, in percent: a trimmed mean and what holds 95 % of resampled rounds."""

    mean: float
    low: float
    high: float


def kept(load: Load, name: str) -> Kept:
    """How much of the throughput is left in stretches of that name, each beside the quiet one of its round."""
    quiet = [stretch.steps_per_second for stretch in load.stretches[QUIET]]
    ratios = [100 * stretch.steps_per_second / other for stretch, other in zip(load.stretches[name], quiet, strict=True)]
    return Kept(trimmed_mean(ratios), *interval(ratios, trimmed_mean))


def complaints(load: Load) -> list[str]:
    """What is beyond the bars; empty if all is well, or if the machine was too noisy to tell."""
    wrong = [f"scrapes that failed: {side.outcomes}" for side in (load.own, load.mirrored) if set(side.outcomes) - {"200"}]
    left = kept(load, SCRAPED)
    if left.high < 100 - BAR:
        wrong.append(
            f"{left.mean:.1f} % of the throughput are left [{left.low:.1f}, {left.high:.1f}], the bar is {100 - BAR:.0f} %"
        )
    return [f"{RATE:.0f} scrapes a second: {line}" for line in wrong]


def table(load: Load) -> record.Table:
    """Throughput and processors by kind of stretch."""
    columns = (
        "stretches", "steps", "steps a second", "left of 'not scraped' %", "training's thread", "exporter's threads", "client",
        "scrapes a second", "scrape p50 ms", "p99 ms", "max ms", "within the bar",
    )  # fmt: skip
    rows = [_row(load, name) for name in load.stretches]
    notes = [
        f"{load.series} series, a batch of {load.batch}. In brackets: what holds 95 % of resampled rounds.",
        "Threads and client: seconds of a processor per second. The mirror's own process is in none of them.",
        f"Answers: {_told(load.own)} of the training's process, {_told(load.mirrored)} of the mirror's.",
        f"At one go: a single stretch of {load.stretches[LONG][0].seconds:.0f} s.",
        f"Bar: at least {100 - BAR:.0f} % of the throughput, and no answer but 200.",
    ]
    return record.table("A loop that is scraped 50 times a second", columns, rows, notes)


def _row(load: Load, name: str) -> list[record.Cell]:
    stretches = load.stretches[name]
    seconds = sum(stretch.seconds for stretch in stretches)
    steps = sum(len(stretch.moments) - 1 for stretch in stretches)
    shares = [round(sum(getattr(stretch, who) for stretch in stretches) / seconds, 3) for who in ("training", "exporter", "client")]
    left, answer = "", ""
    if name in (SCRAPED, ELSEWHERE):
        found = kept(load, name)
        left = f"{found.mean:.1f} [{found.low:.1f}, {found.high:.1f}]"
        answer = verdict(100 - found.high, 100 - found.low, BAR) if name == SCRAPED else ""
    scrapes = _within(load.mirrored if name == ELSEWHERE else load.own, stretches)
    return [name, steps, round(steps / seconds, 1), left, *shares, *_times(scrapes, seconds), answer]


def _within(scrapes: Scrapes, stretches: list[Stretch]) -> Moments:
    """Milliseconds of the scrapes that began in the stretches."""
    began = scrapes.moments[:, 0]
    during = np.zeros(len(began), dtype=bool)
    for stretch in stretches:
        during |= (began >= stretch.moments[0]) & (began < stretch.moments[-1])
    return 1e3 * np.diff(scrapes.moments[during], axis=1)[:, 0]


def _times(milliseconds: Moments, seconds: float) -> list[record.Cell]:
    if not len(milliseconds):
        return [None] * 4
    slow = [round(float(np.percentile(milliseconds, share)), 1) for share in (50.0, 99.0, 100.0)]
    return [round(len(milliseconds) / seconds, 1), *slow]


def _told(scrapes: Scrapes) -> str:
    return ", ".join(f"{count} x {outcome}" for outcome, count in scrapes.outcomes.items())
