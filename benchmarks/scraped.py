"""What a scrape each second does to a training loop: `python -m benchmarks.scraped`, about four minutes.

Steps of some 2.5 ms, an exporter at its defaults with about 10,000 series, scraped over HTTP by another process. Stretches of
several seconds take turns in one process: with scrapes, without, and a second training without an exporter. Rendering runs in
a thread of the training's own process, so what it takes from the loop is Python's lock; that shows in single steps rather than
in the mean, so the slowest are reported too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch

from benchmarks import record
from benchmarks.apart import OptimizerHooks
from benchmarks.bars import verdict
from benchmarks.interleave import interval, trimmed_mean
from benchmarks.scraper import Moments, Scraper
from torch_grad_exporter import Exporter, start_exporter

STEP_SECONDS = 2.5e-3
SERIES = 10_000
SERIES_PER_LAYER = 28
BAR = 0.01
ROUNDS, SECONDS = 12, 6.0

SCRAPED, QUIET, PLAIN = "scraped each second", "not scraped", "no exporter"


Stretches = dict[str, list[Moments]]
"""The moments between the steps of each stretch, by arm."""


class Model(torch.nn.Module):
    """A perceptron that is trained, and many small layers that were trained for a while: for their series."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = (256, 256, 256, 10)
        parts = [(torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.perceptron = torch.nn.Sequential(*(module for part in parts for module in part))
        self.others = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))

    def forward(self, inputs: torch.Tensor, *, everything: bool = False) -> torch.Tensor:
        """The perceptron's output, to which the other layers add if `everything` is to be trained."""
        outputs: torch.Tensor = self.perceptron(inputs)
        return outputs + sum(layer(inputs[:, :2]).sum() for layer in self.others) if everything else outputs


@dataclass(slots=True)
class Training:
    """One training with the global optimizer hooks that are its own."""

    batch: int
    exporter: Exporter | None = None
    hooks: OptimizerHooks = field(default_factory=OptimizerHooks)
    model: Model = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    inputs: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model(SERIES // SERIES_PER_LAYER)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.inputs = torch.randn(self.batch, 256)

    def watch(self) -> None:
        """Starts an exporter, and trains everything until all layers have been seen."""
        with self.hooks.there():
            self.exporter = start_exporter(self.model, port=0, addr="127.0.0.1", max_layers=1000)
            for _ in range(30):
                self.step(everything=True)

    def step(self, *, everything: bool = False) -> None:
        """An ordinary training step."""
        self.optimizer.zero_grad()
        self.model(self.inputs, everything=everything).square().mean().backward()
        self.optimizer.step()

    def stretch(self, seconds: float) -> Moments:
        """Steps for so long; the moments between them, and before the first and after the last."""
        gc.collect()
        with self.hooks.there():
            moments = [time.monotonic()]
            while moments[-1] - moments[0] < seconds:
                self.step()
                moments.append(time.monotonic())
        return np.array(moments)

    def close(self) -> None:
        """Ends the exporter, if there is one."""
        with self.hooks.there():
            if self.exporter is not None:
                self.exporter.close()


def batch_for(seconds: float) -> int:
    """The batch whose faster steps take about so long: the slower ones are other people's use of the machine."""
    batch = 32
    while True:
        training = Training(batch)
        training.stretch(0.1)
        found = float(np.percentile(np.diff(training.stretch(0.3)), 25))
        if found >= 0.9 * seconds or batch >= 8192:
            return batch
        batch = max(batch + 8, min(2 * batch, int(batch * seconds / found)))


def run(rounds: int, seconds: float) -> tuple[Stretches, Moments, int, int]:
    """The steps of all stretches, the moments of each scrape, the series that a scrape has and the batch."""
    batch = batch_for(STEP_SECONDS)
    watched, plain = Training(batch), Training(batch)
    watched.watch()
    if watched.exporter is None or watched.exporter.url is None:
        raise RuntimeError("the exporter does not serve: no port is free")
    scraper = Scraper(watched.exporter.url)
    arms: Mapping[str, Callable[[], Moments]] = {
        SCRAPED: lambda: _scraped(watched, scraper, seconds),
        QUIET: lambda: watched.stretch(seconds),
        PLAIN: lambda: plain.stretch(seconds),
    }
    plain.stretch(1.0)
    for _ in range(3):
        watched.stretch(seconds / 2)  # until the sampling interval is found
    found: Stretches = {name: [] for name in arms}
    names, chance = list(arms), random.Random(0)  # noqa: S311 - an order, no secret
    for _ in range(rounds):
        chance.shuffle(names)
        for name in names:
            found[name].append(arms[name]())
    series = sum(family.series for family in watched.exporter.collect())
    watched.close()
    return found, scraper.close(), series, batch


def _scraped(training: Training, scraper: Scraper, seconds: float) -> Moments:
    with scraper.on():
        return training.stretch(seconds)


def table(stretches_by_name: Stretches, scrapes: Moments, series: int, batch: int) -> record.Table:
    """Mean, slow steps and the comparison of means, stretch by stretch of the same round."""
    base = [_mean(stretch) for stretch in stretches_by_name[QUIET]]
    rows: list[list[record.Cell]] = []
    for name, stretches in stretches_by_name.items():
        means = [_mean(stretch) for stretch in stretches]
        ratios = [100 * (mean / other - 1) for mean, other in zip(means, base, strict=True)]
        low, high = interval(ratios, trimmed_mean)
        beside = "" if name == QUIET else f"{trimmed_mean(ratios):+.2f} [{low:+.2f}, {high:+.2f}]"
        steps = [np.diff(stretch) for stretch in stretches]
        slow = [_slow(steps, share) for share in (50.0, 99.0, 99.9)]
        answer = verdict(low, high, 100 * BAR) if name == SCRAPED else ""
        longest = round(1e3 * max(float(one.max()) for one in steps), 2)
        rows.append([name, sum(map(len, steps)), round(1e3 * fmean(means), 3), beside, *slow, longest, answer])
    taken = 1e3 * np.diff(scrapes, axis=1)
    lost = [1e3 * seconds for stretch in stretches_by_name[SCRAPED] for seconds in lost_to(scrapes, stretch)]
    low, high = interval(lost, trimmed_mean)
    columns = ("stretches", "steps", "mean ms", f"beside '{QUIET}' %", "p50 ms", "p99 ms", "p99.9 ms", "max ms", "within the bar")
    notes = [
        f"{series} series, {len(scrapes)} scrapes of {taken.mean():.1f} ms in the mean and {taken.max():.1f} ms at most.",
        f"A scrape cost the loop {trimmed_mean(lost):.2f} ms [{low:.2f}, {high:.2f}]: steps during it, less as many ordinary ones.",
        f"{len(base)} stretches each, a batch of {batch}. In brackets: what holds 95 % of resampled stretches or scrapes.",
        f"Bar: the mean at most {100 * BAR:.0f} % above that of stretches without scrapes.",
    ]
    return record.table("A loop that is scraped each second", columns, rows, notes)


def lost_to(scrapes: Moments, stretch: Moments) -> list[float]:
    """By how many seconds the steps during each scrape of the stretch took longer than the median step."""
    usual = float(np.median(np.diff(stretch)))
    seconds = []
    for began, ended in scrapes:
        if stretch[0] <= began and ended <= stretch[-1]:
            first, last = np.searchsorted(stretch, began, "right") - 1, np.searchsorted(stretch, ended)
            seconds.append(float(stretch[last] - stretch[first]) - usual * int(last - first))
    return seconds


def _mean(stretch: Moments) -> float:
    return float(stretch[-1] - stretch[0]) / (len(stretch) - 1)


def _slow(steps: Sequence[Moments], share: float) -> str:
    """A percentile of all steps in milliseconds; in brackets what holds 95 % of resampled stretches."""
    places = range(len(steps))
    low, high = interval(places, lambda chosen: _percentile([steps[int(i)] for i in chosen], share), resamples=300)
    return f"{_percentile(steps, share):.2f} [{low:.2f}, {high:.2f}]"


def _percentile(steps: Sequence[Moments], share: float) -> float:
    return 1e3 * float(np.percentile(np.concatenate(steps), share))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it and writes `results/scraped.json`, or `scraped-trial.json` if it was shorter than usual."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scraped", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a stretch")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_grad_exporter").setLevel(logging.ERROR)
    found = table(*run(chosen.rounds, chosen.seconds))
    for row in (found["columns"], *found["rows"], *found["notes"]):
        print(row if isinstance(row, str) else " | ".join(map(str, row)))
    name = "scraped" if chosen.rounds >= ROUNDS and chosen.seconds >= SECONDS else "scraped-trial"
    print(f"written to {record.save(name, {'tables': [found]})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
