"""What monitors cost per step: `python -m benchmarks.overhead`.

Each row of each workload is measured in a process of its own, in which blocks of plain steps and of monitored ones take turns
(`interleave.py`). So no monitor's threads, helpers or patches are there while another is measured. The process of the exporter
at its defaults has a second plain arm, the control: what that differs from the first by is what cannot be told from nothing.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from benchmarks import overhead_tables, record
from benchmarks.arms import Arm, settle
from benchmarks.interleave import compare, interleave, trimmed_mean
from benchmarks.monitor import Plain
from benchmarks.monitors import MONITORS, ThisExporter
from benchmarks.overhead_tables import Cell
from benchmarks.workloads import WORKLOADS

BLOCK_SECONDS = 0.4
"""A block is at least so long: beside it, filling the caches after another arm's block and reading the clock are nothing."""

DOUBLED_BELOW = 1.5
"""The exporter's blocks are two of its intervals long where one takes fewer seconds than this."""

LEAST_ROUNDS = 3

LONGEST = 75.0
"""The blocks of a row other than the exporter's may take this many seconds; what would take longer is not measured."""

OTHERS_SHARE = 0.15
"""Of the exporter's seconds, what each other row takes: that costs 10 % or 12 % is good enough to know."""


OURS = ("exporter", "exporter_activations")
"""The exporter where it chooses its interval: these rows are measured for longer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell of the table. `seconds`: how long its blocks take together, `settling`: what the exporter's interval may take."""

    workload: str
    monitor: str
    seconds: float
    settling: float
    cpu: bool = False
    """Whether the CPU time of the training thread is measured, without its helpers, which other programs change less."""

    def clock(self) -> float:
        """Returns the seconds of what is measured."""
        return time.thread_time() if self.cpu else time.perf_counter()

    @property
    def ours(self) -> bool:
        """Whether this is the exporter with its own interval: measured beside the control, however long it takes."""
        return self.monitor in OURS


def measure(plan: Plan) -> Cell:
    """Measures one cell in this process; of one that would take too long only why it was not measured."""
    torch.set_num_threads(1)
    workload, monitor = WORKLOADS[plan.workload], MONITORS[plan.monitor].make()
    arms = {"plain": Arm(workload, Plain()), "monitored": Arm(workload, monitor)}
    if plan.ours:
        arms["control"] = Arm(workload, Plain())
    try:
        step = min(arms[name].warm_up(plan.seconds / 30, clock=plan.clock) for name in ("plain", *arms))
        cycle = settle(arms["monitored"], monitor, plan.settling) if isinstance(monitor, ThisExporter) else monitor.cycle
        if plan.ours and cycle * step < DOUBLED_BELOW:
            cycle *= 2  # so that there is a sample in each block even if the interval doubles meanwhile
        steps = cycle * math.ceil(BLOCK_SECONDS / (cycle * step))
        per_round = steps * step * len(arms)
        if not plan.ours and LEAST_ROUNDS * per_round > min(LONGEST, 10 * plan.seconds):
            return {"reason": f"not measured: {LEAST_ROUNDS} rounds of {steps} steps would take {LEAST_ROUNDS * per_round:.0f} s"}
        # Long rounds get more than their seconds, that there are enough of them, but not without end.
        rounds = min(max(int(3 * plan.seconds / per_round), LEAST_ROUNDS), 10)
        return _measured(plan, arms, steps, rounds)
    finally:
        for arm in arms.values():
            arm.close()


def _measured(plan: Plan, arms: dict[str, Arm], steps: int, rounds: int) -> Cell:
    watched = arms["monitored"]
    watched.align(steps)
    count = _Samples(watched)
    blocks = interleave(
        {name: arm.step for name, arm in arms.items()},
        steps_per_block=steps,
        seconds=plan.seconds,
        least_rounds=rounds,
        around={name: count.around if arm is watched else arm.running for name, arm in arms.items()},
        clock=plan.clock,
    )
    compared = {name: asdict(comparison) for name, comparison in compare(blocks).items()}
    training = watched.training
    return {
        "steps_per_block": steps,
        "plain": trimmed_mean(blocks["plain"]),
        **compared,
        "exporter": count.summary(),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "tensors": len(list(training.model.parameters())),
        "blocks": {name: [round(seconds, 9) for seconds in values] for name, values in blocks.items()},
    }


class _Samples:
    """Counts the exporter's samples in each of an arm's blocks by what it says itself; of no other monitor."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._exporter = arm.monitor if isinstance(arm.monitor, ThisExporter) else None
        self._scrapes = [] if self._exporter is None else [self._exporter.scrape()]

    @contextmanager
    def around(self) -> Iterator[None]:
        """The context of a block of the arm. Scraped after it only: a scrape just before it would be seen in its time."""
        with self._arm.running():
            yield
        if self._exporter is not None:
            self._scrapes.append(self._exporter.scrape())

    def summary(self) -> Cell | None:
        """Intervals and samples of the measured blocks; `own_ratio` is the overhead that the exporter says it had itself."""
        if self._exporter is None:
            return None
        captures = [scrape["torch_grad_exporter_captures_total"] for scrape in self._scrapes]
        per_block = [later - earlier for earlier, later in pairwise(captures)]
        intervals = [scrape["torch_grad_exporter_sampling_interval_steps"] for scrape in self._scrapes]
        return {
            "interval_at_start": int(intervals[0]),
            "interval_at_end": int(intervals[-1]),
            "samples": int(sum(per_block)),
            "fewest_in_a_block": int(min(per_block)),
            "most_in_a_block": int(max(per_block)),
            "own_ratio": self._scrapes[-1]["torch_grad_exporter_overhead_ratio"],
        }


# All cells, one process each


def measure_all(plans: Sequence[Plan]) -> dict[str, dict[str, Cell]]:
    """By workload and monitor. A row whose package is missing, or that fails, holds the reason instead of numbers."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    cells: dict[str, dict[str, Cell]] = {}
    for number, plan in enumerate(plans, 1):
        start = time.monotonic()
        cell = cells.setdefault(plan.workload, {})[plan.monitor] = _apart(plan)
        said = cell.get("reason") or overhead_tables.overhead(cell["monitored"])
        print(f"{number}/{len(plans)} {plan.workload} {plan.monitor}: {said} ({time.monotonic() - start:.0f} s)", file=sys.stderr)
    return cells


def _apart(plan: Plan) -> Cell:
    entry = MONITORS[plan.monitor]
    if entry.missing:
        return {"reason": f"not installed: {entry.package}"}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, plan).result()
        except BrokenProcessPool:
            return {"reason": "failed: the process died"}
        except Exception as error:  # noqa: BLE001 - another package's failure is a result; the other rows are measured
            return {"reason": f"failed: {type(error).__name__}: {error}"}


# The command


def main() -> None:
    """Measures, prints the tables and writes `results/overhead.json`; what was not everything goes to another file."""
    options = _options()
    quick = options.quick
    workloads = options.workload or (["mlp"] if quick else list(WORKLOADS))
    monitors = options.monitor or list(MONITORS)
    seconds = options.seconds or (6.0 if quick else 45.0)
    plans = [
        Plan(
            workload=workload,
            monitor=monitor,
            seconds=seconds if monitor in OURS else OTHERS_SHARE * seconds,
            settling=seconds / 2,
            cpu=options.cpu,
        )
        for workload in workloads
        for monitor in monitors
    ]
    start = time.monotonic()
    torch.set_num_threads(1)
    cells = measure_all(plans)
    found = overhead_tables.tables(cells)
    print("\n".join(map(overhead_tables.printed, found)))
    took = round(time.monotonic() - start)
    complete = not (quick or options.workload or options.monitor or options.seconds or options.cpu)
    results = {"tables": found, "took_seconds": took, "cells": cells}
    path = record.save(options.save or ("overhead" if complete else "overhead-trial"), results)
    print(f"\n{took} s; written to {path.relative_to(record.ROOT)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="What monitors cost per step.")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only this one; may be repeated")
    parser.add_argument("--monitor", action="append", choices=MONITORS, help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, help="of measuring the exporter, per workload; the others take 15 % of it each")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the training thread, where other programs run")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json, for a part of the page of its own")
    parser.add_argument("--quick", action="store_true", help="one workload and few rounds, in about two minutes: a smoke test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
