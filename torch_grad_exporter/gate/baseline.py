"""Comparison of a run with a baseline, over the steps that both have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

# Records that a comparison takes, of either run.
LEAST = 5

# The share of the common steps that count as the end.
LAST = 0.1

# Layers that a text names, at most.
NAMED = 5


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
    rows = [*_losses(saved, other, allowed), *_norms(saved, other, allowed), _layers(saved, other, allowed["layer_norm_median"])]
    rows.append(_step_seconds(saved, other, allowed["step_seconds"]))
    rows.append(_skipped(metrics, of_other, allowed["skipped_steps"]))
    return rows


def _losses(saved: Saved, other: Saved, allowed: Mapping[str, float]) -> Iterator[VerdictRow]:
    mine, before = _scalar(saved, "loss"), _scalar(other, "loss")
    first, last = _common(mine, before)
    for name, since in (("final_loss", last - LAST * (last - first)), ("mean_loss", first)):
        values, known = mine.within(since, last), before.within(since, last)
        if not len(values) or not len(known) or _few(mine, before, first, last):
            yield _not_compared(name, "losses")
        else:
            a, b = float(values.mean()), float(known.mean())
            yield _row(name, a, b, allowed[name], worse=a - b > allowed[name] * abs(b))


def _norms(saved: Saved, other: Saved, allowed: Mapping[str, float]) -> Iterator[VerdictRow]:
    mine, before = _scalar(saved, "norm"), _scalar(other, "norm")
    first, last = _common(mine, before)
    for name, percent in (("global_norm_median", 50), ("global_norm_p95", 95)):
        if _few(mine, before, first, last):
            yield _not_compared(name, "global norms")
        else:
            a, b = (float(np.percentile(norms.within(first, last), percent)) for norms in (mine, before))
            yield _row(name, a, b, allowed[name], worse=_far(a, b, allowed[name]))


def _layers(saved: Saved, other: Saved, allowed: float) -> VerdictRow:
    """Compare the median norm of each layer that both have."""
    name = "layer_norm_median"
    mine, before = _by_layer(saved), _by_layer(other)
    far, ratios = [], []
    for layer in (name for name in mine if name in before):
        first, last = _common(mine[layer], before[layer])
        if not _few(mine[layer], before[layer], first, last):
            a, b = (float(np.median(norms.within(first, last))) for norms in (mine[layer], before[layer]))
            ratios.append(_times(a, b))
            if _far(a, b, allowed):
                far.append(f"{layer} {a:.4g}, was {b:.4g}")
    sets = _sets(mine, before)
    if not ratios:
        return VerdictRow(
            "baseline", name, Result.NOT_JUDGED, f"the two runs have too few norms of the same layers and steps{sets}"
        )
    if far:
        text = f"{some(far, NAMED, between='; ')}: more than {1 + allowed:g} times apart{sets}"
        return VerdictRow("baseline", name, Result.FAILED, text)
    text = f"{len(ratios)} layers, at most {max(ratios):.3g} of {1 + allowed:g} times apart{sets}"
    return VerdictRow("baseline", name, Result.NOTED if sets else Result.OK, text)


def _step_seconds(saved: Saved, other: Saved, allowed: float) -> VerdictRow:
    mine, before = _scalar(saved, "step_seconds"), _scalar(other, "step_seconds")
    first, last = _common(mine, before)
    if _few(mine, before, first, last):
        return _not_compared("step_seconds", "step times")
    a, b = (float(np.median(times.within(first, last))) for times in (mine, before))
    return _row("step_seconds", a, b, allowed, worse=a > (1 + allowed) * b)


def _skipped(metrics: Mapping[str, Metric], of_other: Mapping[str, Metric], allowed: float) -> VerdictRow:
    shares = []
    for run in (metrics, of_other):
        skipped, steps = (_largest(run.get(name)) for name in ("torch_train_skipped_steps_total", "torch_train_steps_total"))
        if skipped is None or steps is None or skipped + steps == 0:
            return _not_compared("skipped_steps", "counts of steps")
        shares.append(skipped / (skipped + steps))
    a, b = shares
    text = f"{a:.1%} of the steps, was {b:.1%}; up to {allowed:.1%} more are allowed"
    return VerdictRow("baseline", "skipped_steps", Result.FAILED if a - b > allowed else Result.OK, text)


# What is read of a run


def _scalar(saved: Saved, name: str) -> _StepValues:
    """Return all records of the run if its recent part has them, else its bins."""
    view = "recent" if saved["run"]["recent"]["first"] == 0 else "whole"
    course = lines(saved, view)
    known = ~np.isnan(course.values[name])
    return _StepValues(course.steps[known], course.values[name][known])


def _by_layer(saved: Saved) -> dict[str, _StepValues]:
    view = "recent" if saved["layers"]["norm"]["recent"]["first"] == 0 else "whole"
    norms, courses = grid(saved, "norm", view), {}
    for layer, values in zip(norms.layers, norms.values, strict=True):
        known = ~np.isnan(values)
        courses[layer] = _StepValues(norms.steps[known], values[known])
    return courses


def _common(mine: _StepValues, before: _StepValues) -> tuple[float, float]:
    """Return the first and the last step that both have; (0, 0) if either has none."""
    if not len(mine.steps) or not len(before.steps):
        return 0.0, 0.0
    return max(float(mine.steps[0]), float(before.steps[0])), min(float(mine.steps[-1]), float(before.steps[-1]))


def _few(mine: _StepValues, before: _StepValues, first: float, last: float) -> bool:
    return min(len(mine.within(first, last)), len(before.within(first, last))) < LEAST


def _largest(metric: Metric | None) -> float | None:
    return None if metric is None or not metric.rows else max(metric.rows.values())


# What is said


def _times(a: float, b: float) -> float:
    """Return by how many times the larger of two norms is larger than the other."""
    low, high = sorted((a, b))
    return 1.0 if low == high else math.inf if low <= 0 else high / low


def _far(a: float, b: float, allowed: float) -> bool:
    return _times(a, b) > 1 + allowed


def _row(name: str, a: float, b: float, allowed: float, *, worse: bool) -> VerdictRow:
    change = f"{a / b - 1:+.1%}" if b else "from 0"
    text = f"{a:.4g}, was {b:.4g} ({change}); {allowed:.0%} are allowed"
    return VerdictRow("baseline", name, Result.FAILED if worse else Result.OK, text)


def _not_compared(name: str, noun: str) -> VerdictRow:
    return VerdictRow("baseline", name, Result.NOT_JUDGED, f"fewer than {LEAST} {noun} of the steps that both runs have")


def _sets(mine: Mapping[str, object], before: Mapping[str, object]) -> str:
    """Return how the layers of the two runs differ, empty if they do not."""
    new, gone = [name for name in mine if name not in before], [name for name in before if name not in mine]
    parts = [f"{where}: {', '.join(names[:NAMED])}{' ...' if len(names) > NAMED else ''}" for where, names in
             (("only in this run", new), ("only in the baseline", gone)) if names]  # fmt: skip
    return f"; {'; '.join(parts)}" if parts else ""
