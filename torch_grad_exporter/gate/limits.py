"""Limits on single metrics: at the end of a run, or over all of it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.gate.rows import GateError, Result, VerdictRow
from torch_grad_exporter.metrics.families import REMOVED, Kind
from torch_grad_exporter.outputs.live.history import VIEWS
from torch_grad_exporter.outputs.live.saved import Metric, Saved, grid, lines

OF_THE_RUN = {
    "torch_train_loss": "loss",
    "torch_grad_global_norm": "norm",
    "torch_grad_global_norm_after_clip": "norm_after_clip",
    "torch_train_learning_rate": "learning_rate",
}
OF_LAYERS = {"torch_grad_norm": "norm", "torch_grad_zero_ratio": "zero_ratio", "torch_grad_dead_ratio": "dead_ratio"}
"""Metrics of which a saved run has the course, and what they are called there."""

SHOWN = 3
"""Rows of a metric that a text names, at most."""

_MATCHER = re.compile(r'\s*(\w+)\s*(=~|=)\s*"((?:[^"\\]|\\.)*)"\s*')


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on a metric. `kind`: "max" or "min" at the end, "peak" for the highest over the run.

    `labels`: regular expressions that the whole of a label's value matches. `text`: as it was given.
    """

    kind: str
    metric: str
    labels: Mapping[str, re.Pattern[str]]
    value: float
    text: str

    def row(self, metrics: Mapping[str, Metric], saved: Saved) -> VerdictRow:
        """Whether a run keeps to it. Raises `GateError` where there is no such metric or label."""
        self._check(metrics)
        found = dict(self._course(saved) if self.kind == "peak" else self._at_end(metrics))
        name = f"--{self.kind} {self.text}"
        if not found:
            return VerdictRow("limits", name, Result.FAILED, "the run has no such series")
        beyond = {series: number for series, number in found.items() if not self._kept(number)}
        if not beyond:
            return VerdictRow("limits", name, Result.OK, _listed(found, self.kind))
        return VerdictRow("limits", name, Result.FAILED, _listed(beyond, self.kind))

    def _kept(self, number: float) -> bool:
        """A value that is not finite keeps to no limit."""
        return math.isfinite(number) and (number >= self.value if self.kind == "min" else number <= self.value)

    def _at_end(self, metrics: Mapping[str, Metric]) -> Iterator[tuple[str, float]]:
        one = metrics.get(self.metric)
        for row, number in () if one is None else one.rows.items():
            if one is not None and self._chosen(dict(zip(one.labels, row, strict=True))):
                yield _series(self.metric, one.labels, row), number

    def _course(self, saved: Saved) -> Iterator[tuple[str, float]]:
        if self.metric in OF_THE_RUN:
            name = OF_THE_RUN[self.metric]
            both = [lines(saved, view) for view in VIEWS]
            peak = _peak([one.values[name] for one in both], [one.nonfinite[name] for one in both])
            if not math.isnan(peak):
                yield self.metric, peak
        else:
            both_grids = [grid(saved, OF_LAYERS[self.metric], view) for view in VIEWS]
            for at, layer in enumerate(both_grids[0].layers):
                rows = [
                    (one.values[at], one.nonfinite[at]) for one in both_grids if at < len(one.layers) and one.layers[at] == layer
                ]
                peak = _peak([values for values, _ in rows], [flags for _, flags in rows])
                if self._chosen({"layer": layer}) and not math.isnan(peak):
                    yield _series(self.metric, ("layer",), (layer,)), peak

    def _chosen(self, labels: Mapping[str, str]) -> bool:
        return labels.get("layer") != REMOVED and all(pattern.fullmatch(labels[name]) for name, pattern in self.labels.items())

    def _check(self, metrics: Mapping[str, Metric]) -> None:
        option, catalogue = f"--{self.kind} {self.text}", REGISTRY.catalogue
        spec = catalogue.get(self.metric)
        if spec is None and self.metric not in metrics:
            raise GateError(f"{option}: there is no metric {self.metric}{_near(self.metric, {*catalogue, *metrics})}")
        if spec is not None and spec.kind is Kind.HISTOGRAM:
            raise GateError(f"{option}: {self.metric} is a histogram, which has no single value")
        course = (*OF_THE_RUN, *OF_LAYERS)
        if self.kind == "peak" and self.metric not in course:
            raise GateError(f"{option}: the course of {self.metric} is not kept; --peak takes {', '.join(course)}")
        there = metrics[self.metric].labels if self.metric in metrics else spec.labels if spec is not None else ()
        known = () if self.kind == "peak" and self.metric in OF_THE_RUN else there
        for name in self.labels:
            if name not in known:
                raise GateError(
                    f"{option}: {self.metric} has {'the labels ' + ', '.join(known) if known else 'no labels'}, not {name}"
                )


def limit(kind: str, text: str) -> Limit:
    """The limit that a text stands for, such as `torch_grad_norm{layer="head"}=10`. Raises `GateError`."""
    wrong = f'--{kind} {text}: write METRIC=VALUE, such as torch_grad_norm{{layer="head"}}=10'
    left, _, right = text.rpartition("=")
    parts = re.fullmatch(r"\s*([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\}\s*)?", left, re.DOTALL)
    try:
        value = float(right)
    except ValueError:
        raise GateError(wrong) from None
    if parts is None or not math.isfinite(value):
        raise GateError(wrong)
    return Limit(kind, parts[1], dict(_labels(parts[2] or "", wrong)), value, text)


def _labels(text: str, wrong: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    at = 0
    while at < len(text):
        found = _MATCHER.match(text, at)
        if found is None or text[found.end() : found.end() + 1] not in ("", ","):
            raise GateError(wrong)
        value = re.sub(r"\\(.)", r"\1", found[3]) if found[2] == "=" else found[3]
        try:
            yield found[1], re.compile(re.escape(value) if found[2] == "=" else value)
        except re.error as error:
            raise GateError(f"{wrong}; {value!r} is not a regular expression: {error}") from None
        at = found.end() + 1


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), 3, 0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "; docs/metrics.md lists them"


def _peak(values: Iterable[np.ndarray], nonfinite: Iterable[np.ndarray]) -> float:
    """The highest; infinity where any was not finite, NaN where there is none."""
    if any(flags.any() for flags in nonfinite):
        return math.inf
    found = np.concatenate(list(values))
    return float(np.nanmax(found)) if np.isfinite(found).any() else math.nan


def _series(metric: str, labels: tuple[str, ...], row: tuple[str, ...]) -> str:
    shown = ", ".join(f'{name}="{value}"' for name, value in zip(labels, row, strict=True) if value)
    return f"{metric}{{{shown}}}" if shown else metric


def _listed(found: Mapping[str, float], kind: str) -> str:
    """The series that are farthest from where they should be, first."""
    ordered = sorted(found.items(), key=lambda one: (math.isfinite(one[1]), one[1] if kind == "min" else -one[1]))
    rest = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(f"{series} is {number:.6g}" for series, number in ordered[:SHOWN]) + rest
