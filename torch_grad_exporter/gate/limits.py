"""Limits on single metrics: at the end of a run, or over all of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.arguments import near, some
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.gate.rows import Result, VerdictRow
from torch_grad_exporter.metrics.families import REMOVED, Kind
from torch_grad_exporter.outputs.live.history import VIEWS
from torch_grad_exporter.outputs.live.saved import Metric, Saved, grid, lines

# Metrics of which a saved run has the course, and their names there.
OF_THE_RUN = {
    "torch_train_loss": "loss",
    "torch_grad_global_norm": "norm",
    "torch_grad_global_norm_after_clip": "norm_after_clip",
    "torch_train_learning_rate": "learning_rate",
}
OF_LAYERS = {"torch_grad_norm": "norm", "torch_grad_zero_ratio": "zero_ratio", "torch_grad_dead_ratio": "dead_ratio"}

SHOWN = 3  # rows of a metric that a text names, at most

_MATCHER = re.compile(r'\s*(\w+)\s*(=~|=)\s*"((?:[^"\\]|\\.)*)"\s*')


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on a metric: "max" or "min" at the end, "peak" for the highest value of the run. `text`: as it was given.

    `labels`: regular expressions that the whole value of a label matches.
    """

    kind: str
    metric: str
    labels: Mapping[str, re.Pattern[str]]
    value: float
    text: str

    def row(self, metrics: Mapping[str, Metric], saved: Saved) -> VerdictRow:
        """Return whether a run keeps the limit. Raises `UserError` if there is no such metric or label."""
        self._check(metrics)
        values = dict(self._course(saved) if self.kind == "peak" else self._at_end(metrics))
        name = f"--{self.kind} {self.text}"
        if not values:
            return VerdictRow("limits", name, Result.FAILED, "the run has no such series")
        beyond = {}
        for series, number in values.items():
            kept = number >= self.value if self.kind == "min" else number <= self.value
            if not (kept and math.isfinite(number)):  # one that is not finite never keeps a limit
                beyond[series] = number
        # The worst first.
        sign = 1 if self.kind == "min" else -1
        shown = sorted((beyond or values).items(), key=lambda pair: (math.isfinite(pair[1]), sign * pair[1]))
        text = some([f"{series} is {number:.6g}" for series, number in shown], SHOWN)
        return VerdictRow("limits", name, Result.FAILED if beyond else Result.OK, text)

    def _at_end(self, metrics: Mapping[str, Metric]) -> Iterator[tuple[str, float]]:
        metric = metrics.get(self.metric, Metric((), {}))
        for row, number in metric.rows.items():
            if self._chosen(dict(zip(metric.labels, row, strict=True))):
                yield _series(self.metric, metric.labels, row), number

    def _course(self, saved: Saved) -> Iterator[tuple[str, float]]:
        if self.metric in OF_THE_RUN:
            name = OF_THE_RUN[self.metric]
            both = [lines(saved, view) for view in VIEWS]
            peak = _peak([part.values[name] for part in both], [part.nonfinite[name] for part in both])
            if not math.isnan(peak):
                yield self.metric, peak
        else:
            both_grids = [grid(saved, OF_LAYERS[self.metric], view) for view in VIEWS]
            for at, layer in enumerate(both_grids[0].layers):
                parts = [part for part in both_grids if part.layers[at : at + 1] == [layer]]
                peak = _peak([part.values[at] for part in parts], [part.nonfinite[at] for part in parts])
                if self._chosen({"layer": layer}) and not math.isnan(peak):
                    yield _series(self.metric, ("layer",), (layer,)), peak

    def _chosen(self, labels: Mapping[str, str]) -> bool:
        return labels.get("layer") != REMOVED and all(pattern.fullmatch(labels[name]) for name, pattern in self.labels.items())

    def _check(self, metrics: Mapping[str, Metric]) -> None:
        option, catalogue = f"--{self.kind} {self.text}", REGISTRY.catalogue
        spec = catalogue.get(self.metric)
        if spec is None and self.metric not in metrics:
            meant = near(self.metric, {*catalogue, *metrics}) or "; docs/metrics.md lists them"
            raise UserError(f"{option}: unknown metric {self.metric}{meant}")
        if spec is not None and spec.kind is Kind.HISTOGRAM:
            raise UserError(f"{option}: {self.metric} is a histogram, which has no single value")
        course = (*OF_THE_RUN, *OF_LAYERS)
        if self.kind == "peak" and self.metric not in course:
            raise UserError(f"{option}: the course of {self.metric} is not kept; --peak takes {', '.join(course)}")
        there = metrics[self.metric].labels if self.metric in metrics else spec.labels if spec is not None else ()
        known = () if self.kind == "peak" and self.metric in OF_THE_RUN else there
        for name in self.labels:
            if name not in known:
                raise UserError(
                    f"{option}: {self.metric} has {'the labels ' + ', '.join(known) if known else 'no labels'}, not {name}"
                )


def limit(kind: str, text: str) -> Limit:
    """Return the limit that a text stands for, such as `torch_grad_norm{layer="head"}=10`. Raises `UserError`."""
    wrong = f'--{kind} {text}: write METRIC=VALUE, such as torch_grad_norm{{layer="head"}}=10'
    left, _, right = text.rpartition("=")
    parts = re.fullmatch(r"\s*([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\}\s*)?", left, re.DOTALL)
    try:
        value = float(right)
    except ValueError:
        raise UserError(wrong) from None
    if parts is None or not math.isfinite(value):
        raise UserError(wrong)
    return Limit(kind, parts[1], dict(_labels(parts[2] or "", wrong)), value, text)


def _labels(text: str, wrong: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    at = 0
    while at < len(text):
        match = _MATCHER.match(text, at)
        if match is None or text[match.end() : match.end() + 1] not in ("", ","):
            raise UserError(wrong)
        value = re.sub(r"\\(.)", r"\1", match[3]) if match[2] == "=" else match[3]
        try:
            yield match[1], re.compile(re.escape(value) if match[2] == "=" else value)
        except re.error as error:
            raise UserError(f"{wrong}; {value!r} is not a regular expression: {error}") from None
        at = match.end() + 1


def _peak(values: Iterable[np.ndarray], nonfinite: Iterable[np.ndarray]) -> float:
    """Return the highest value; infinity if any was not finite, NaN if there is none."""
    if any(flags.any() for flags in nonfinite):
        return math.inf
    numbers = np.concatenate(list(values))
    return float(np.nanmax(numbers)) if np.isfinite(numbers).any() else math.nan


def _series(metric: str, labels: tuple[str, ...], row: tuple[str, ...]) -> str:
    shown = ", ".join(f'{name}="{value}"' for name, value in zip(labels, row, strict=True) if value)
    return f"{metric}{{{shown}}}" if shown else metric
