"""Comparison of a run with a baseline, over the steps that both have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.arguments import some
from torch_grad_exporter.gate.rows import Result, VerdictRow
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.outputs.live.saved import Metric, Saved, grid, lines

# By what share a run may be worse: about twice as much as healthy runs of the demo with other seeds were, see docs/in-ci.md. A loss
# and a step time may be lower by any amount. A norm may differ in both directions: by (1 + share) times at most. Skipped steps are
# a share of all steps, which may be higher by this much.
TOLERANCES: Mapping[str, float] = {
    "final_loss": 0.15,
    "mean_loss": 0.05,
    "global_norm_median": 0.25,
    "global_norm_p95": 0.4,
    "layer_norm_median": 1.0,
    "step_seconds": 1.0,
    "skipped_steps": 0.02,
}

# Records that a comparison takes, of either run; the share of the common steps that count as the end; layers that a text names.
LEAST, LAST, NAMED = 5, 0.1, 5

# What is compared of the values of a run: which of them, their noun, and a percentile, None for the mean.
_COURSES: Mapping[str, tuple[str, str, int | None]] = {
    "final_loss": ("loss", "losses", None),
    "mean_loss": ("loss", "losses", None),
    "global_norm_median": ("norm", "global norms", 50),
    "global_norm_p95": ("norm", "global norms", 95),
    "step_seconds": ("step_seconds", "step times", 50),
}


@dataclass(frozen=True, slots=True)
class _StepValues:
    """Values by step, shape (n,), without those that are not there."""

    steps: FloatArray
    values: FloatArray

    def within(self, first: float, last: float) -> FloatArray:
        return self.values[(self.steps >= first) & (self.steps <= last)]


def compared(
    saved: Saved, other: Saved, metrics: Mapping[str, Metric], of_other: Mapping[str, Metric], tolerances: Mapping[str, float]
) -> list[VerdictRow]:
    """Return the rows. `other`: the baseline; `metrics`, `of_other`: at the end of each. `tolerances`: instead of usual ones."""
    allowed = {**TOLERANCES, **tolerances}
    rows = [_course(saved, other, name, allowed[name]) for name in _COURSES]
    rows.insert(len(rows) - 1, _layers(saved, other, allowed["layer_norm_median"]))
    return [*rows, _skipped(metrics, of_other, allowed["skipped_steps"])]


def _row(name: str, result: Result, text: str) -> VerdictRow:
    return VerdictRow("baseline", name, result, text)


def _course(saved: Saved, other: Saved, name: str, allowed: float) -> VerdictRow:
    """Compare a statistic of values of the run."""
    scalar, noun, percent = _COURSES[name]
    mine, before = _of_run(saved, scalar), _of_run(other, scalar)
    first, last = _common(mine, before) or (0.0, -1.0)
    since = last - LAST * (last - first) if name == "final_loss" else first
    values = mine.within(since, last), before.within(since, last)
    if not all(map(len, values)):
        return _row(name, Result.NOT_JUDGED, f"fewer than {LEAST} {noun} of the steps that both runs have")
    a, b = (float(each.mean() if percent is None else np.percentile(each, percent)) for each in values)
    if scalar == "loss":
        worse = a - b > allowed * abs(b)
    else:
        worse = a > (1 + allowed) * b if scalar == "step_seconds" else _times(a, b) > 1 + allowed
    change = f"{a / b - 1:+.1%}" if b else "from 0"
    text = f"{a:.4g}, was {b:.4g} ({change}); {allowed:.0%} are allowed"
    return _row(name, Result.FAILED if worse else Result.OK, text)


def _layers(saved: Saved, other: Saved, allowed: float) -> VerdictRow:
    """Compare the median norm of each layer that both have."""
    name = "layer_norm_median"
    mine, before = _by_layer(saved), _by_layer(other)
    far, ratios = [], []
    for layer in (name for name in mine if name in before):
        if (common := _common(mine[layer], before[layer])) is not None:
            a, b = (float(np.median(norms.within(*common))) for norms in (mine[layer], before[layer]))
            ratios.append(_times(a, b))
            if ratios[-1] > 1 + allowed:
                far.append(f"{layer} {a:.4g}, was {b:.4g}")
    # How the layers of the two runs differ.
    sides = (("only in this run", mine, before), ("only in the baseline", before, mine))
    own = {where: [name for name in one_run if name not in another] for where, one_run, another in sides}
    sets = "".join(f"; {where}: {', '.join(names[:NAMED])}{' ...' * (len(names) > NAMED)}" for where, names in own.items() if names)
    if not ratios:
        return _row(name, Result.NOT_JUDGED, f"the two runs have too few norms of the same layers and steps{sets}")
    if far:
        return _row(name, Result.FAILED, f"{some(far, NAMED, between='; ')}: more than {1 + allowed:g} times apart{sets}")
    text = f"{len(ratios)} layers, at most {max(ratios):.3g} of {1 + allowed:g} times apart{sets}"
    return _row(name, Result.NOTED if sets else Result.OK, text)


def _skipped(metrics: Mapping[str, Metric], of_other: Mapping[str, Metric], allowed: float) -> VerdictRow:
    shares = []
    for run in (metrics, of_other):
        names = ("torch_train_skipped_steps_total", "torch_train_steps_total")
        counts = [max(run[name].rows.values()) for name in names if name in run and run[name].rows]
        if len(counts) < 2 or sum(counts) == 0:
            return _row("skipped_steps", Result.NOT_JUDGED, "a run has no counts of steps")
        shares.append(counts[0] / sum(counts))
    a, b = shares
    text = f"{a:.1%} of the steps, was {b:.1%}; up to {allowed:.1%} more are allowed"
    return _row("skipped_steps", Result.FAILED if a - b > allowed else Result.OK, text)


# What is read of a run: all records if its recent part has them, else its bins


def _of_run(saved: Saved, name: str) -> _StepValues:
    course = lines(saved, "recent" if saved["run"]["recent"]["first"] == 0 else "whole")
    known = ~np.isnan(course.values[name])
    return _StepValues(course.steps[known], course.values[name][known])


def _by_layer(saved: Saved) -> dict[str, _StepValues]:
    norms = grid(saved, "norm", "recent" if saved["layers"]["norm"]["recent"]["first"] == 0 else "whole")
    known = ~np.isnan(norms.values)
    rows = zip(norms.layers, norms.values, known, strict=True)
    return {layer: _StepValues(norms.steps[there], values[there]) for layer, values, there in rows}


def _common(mine: _StepValues, before: _StepValues) -> tuple[float, float] | None:
    """Return the first and the last step that both have; None if either has too few records there."""
    if not len(mine.steps) or not len(before.steps):
        return None
    first, last = max(float(mine.steps[0]), float(before.steps[0])), min(float(mine.steps[-1]), float(before.steps[-1]))
    return (first, last) if min(len(each.within(first, last)) for each in (mine, before)) >= LEAST else None


def _times(a: float, b: float) -> float:
    """Return by how many times the larger of two norms is larger than the other."""
    low, high = sorted((a, b))
    return 1.0 if low == high else math.inf if low <= 0 else high / low
