"""One sample on the CPU, in one thread, beside one `torch._foreach_norm` over the same gradients and one read of their bytes.

Two views. The parts: the statistics alone on the gradients of a real backward, with and without what can be left out, in turns.
The whole: steps with `every=1` against plain steps, interleaved, so with hooks, clipping probes and bookkeeping.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from benchmarks import record
from benchmarks.apart import OptimizerHooks
from benchmarks.bars import verdict
from benchmarks.costs import profiled
from benchmarks.interleave import compare, interleave, interval
from benchmarks.workloads import WORKLOADS, Training
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.declared import MOMENTS
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.layout import Layout

BARS: Mapping[str, float | None] = {"decoder": 3.0, "small_layers": 4.0, "resnet18": None}
"""Most that the statistics of a sample may take, in times of one `torch._foreach_norm`."""

FULL = "all default statistics"
FLOOR = "torch._foreach_norm"

Gradients = list[tuple[int, torch.Tensor]]


def measure(seconds: float) -> list[record.Table]:
    """Each workload, each view for about this many seconds, and a profile."""
    torch.set_num_threads(1)
    tables = []
    for name, bar in BARS.items():
        training = Training(WORKLOADS[name])
        table, gradients = gradients_of(training)
        tables.append(parts(name, table, gradients, seconds, bar))
        statistics, sample = EagerStatistics(100), itertools.count()
        tables.append(
            profiled.table(
                f"Where the statistics of one sample spend their time: {WORKLOADS[name].title}",
                lambda: statistics.measure(table, gradients, next(sample)),  # noqa: B023 - called before the next one
                5 if name == "decoder" else 50,
            )
        )
    rows = [whole(name, seconds) for name in BARS]
    return [_whole_table(rows), *tables]


def gradients_of(training: Training) -> tuple[ParameterTable, Gradients]:
    """The table of the model, and the gradients that a few steps have led to with their positions in it."""
    for _ in range(3):
        training.backward()
        training.optimizer.step()
    training.backward()
    table = LayerIndex({"": training.model}).table
    return table, [(i, g) for i, parameter in enumerate(table.tracked) if (g := parameter.gradient()) is not None]


def parts(name: str, table: ParameterTable, gradients: Gradients, seconds: float, bar: float | None) -> record.Table:
    """The statistics alone: all of them, and what is left when some are left out or asked for."""
    found = _in_turns(_candidates(table, gradients), seconds)
    floor = median(found[FLOOR])
    rows: list[list[record.Cell]] = []
    for label, values in found.items():
        ratios = [value / other for value, other in zip(values, found[FLOOR], strict=True)]
        low, high = interval(ratios, median, resamples=1000)
        answer = "" if label != FULL or bar is None else verdict(low, high, bar)
        rows.append([label, round(1e3 * median(values), 3), f"{median(values) / floor:.2f} [{low:.2f}, {high:.2f}]", answer])
    size = sum(g.numel() * g.element_size() for _, g in gradients)
    notes = [
        f"{len(gradients)} gradients, {size / 1e6:.1f} MB. Medians of {len(found[FLOOR])} turns, in each turn every row once.",
        "In brackets: what holds 95 % of resampled medians of the ratio within a turn.",
        f"One read of the bytes: {size / median(found['one read of the bytes']) / 1e9:.1f} GB/s.",
    ]
    columns = ("what", "ms", f"times {FLOOR}", f"within the bar of {bar}" if bar else "no bar")
    return record.table(f"The statistics of one sample: {WORKLOADS[name].title}", columns, rows, notes)


def _candidates(table: ParameterTable, gradients: Gradients) -> dict[str, Callable[[], object]]:
    plain, moments = EagerStatistics(100), EagerStatistics(100, Layout([MOMENTS]))
    broken, tiny = EagerStatistics(100), EagerStatistics(100)
    sample = itertools.count()
    tensors = [g for _, g in gradients]
    flat = torch.cat([g.reshape(-1) for g in tensors])
    with_nan = [(i, _with_nan(g)) for i, g in gradients]
    so_small = [(i, g * 1e-20) for i, g in gradients]
    return {
        "one read of the bytes": flat.sum,
        FLOOR: lambda: torch._foreach_norm(tensors),
        FULL: lambda: plain.measure(table, gradients, next(sample)),
        "without dead units": lambda: plain.read(table, gradients),
        "norms alone, as when the optimizer steps": lambda: plain.norms(table, gradients),
        "with moments": lambda: moments.measure(table, gradients, next(sample)),
        "a NaN in each gradient": lambda: broken.measure(table, with_nan, next(sample)),
        "gradients times 1e-20": lambda: tiny.measure(table, so_small, next(sample)),
    }


def _with_nan(gradient: torch.Tensor) -> torch.Tensor:
    copy = gradient.clone()
    copy.reshape(-1)[0] = float("nan")
    return copy


def _in_turns(candidates: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each, in turns, after one turn that is not timed."""
    found: dict[str, list[float]] = {label: [] for label in candidates}
    for action in candidates.values():
        action()
    end = time.monotonic() + seconds
    while len(found[FLOOR]) < 5 or time.monotonic() < end:
        for label, action in candidates.items():
            start = time.perf_counter()
            action()
            found[label].append(time.perf_counter() - start)
    return found


def whole(name: str, seconds: float) -> list[record.Cell]:
    """Steps of which each is sampled against plain ones: a row."""
    arms = {arm: Training(WORKLOADS[name]) for arm in ("plain", "control", "every=1")}
    hooks = {arm: OptimizerHooks() for arm in arms}
    with hooks["every=1"].there():
        exporter = start_exporter(arms["every=1"].model, port=None, every=1)
    steps = {arm: _stepping(training) for arm, training in arms.items()}
    around = {arm: installed.there for arm, installed in hooks.items()}
    interleave(steps, steps_per_block=2, rounds=3, around=around)
    own, samples = _counters(exporter)
    once = interleave(steps, steps_per_block=1, rounds=3, around=around)
    steps_per_block = max(1, min(50, int(0.1 / min(once["plain"]))))
    blocks = interleave(steps, steps_per_block=steps_per_block, seconds=4 * seconds, around=around)
    own, samples = (after - before for after, before in zip(_counters(exporter), (own, samples), strict=True))
    with hooks["every=1"].there():
        exporter.close()
    found = compare(blocks)
    plain = median(blocks["plain"])
    cells: list[record.Cell] = [WORKLOADS[name].title, round(1e3 * plain, 2)]
    for arm in ("control", "every=1"):
        ms = [1e3 * plain * ratio for ratio in (found[arm].overhead, found[arm].low, found[arm].high)]
        cells.append(f"{ms[0]:.2f} [{ms[1]:.2f}, {ms[2]:.2f}]")
    return [*cells, round(1e3 * own / samples, 2), int(samples)]


def _stepping(training: Training) -> Callable[[], None]:
    def step() -> None:
        training.backward()
        training.optimizer.step()

    return step


def _counters(exporter: Exporter) -> tuple[float, float]:
    """Seconds that the exporter counted for itself so far, and its samples."""
    values = {family.spec.name: family.values for family in exporter.collect()}
    own, samples = (values[f"torch_grad_exporter_{name}_total"] for name in ("overhead_seconds", "captures"))
    return float(own[0]), float(samples[0])


def _whole_table(rows: list[list[record.Cell]]) -> record.Table:
    notes = [
        "Milliseconds beyond a plain step: overhead of the round-by-round comparison times the median plain step.",
        "Own count: what the exporter says that it took on the training thread, per sample.",
    ]
    columns = ("workload", "plain step ms", "control ms", "sampled step ms", "own count ms", "samples")
    return record.table("A step with a sample (every=1) beside a plain one", columns, rows, notes)
