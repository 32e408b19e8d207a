"""What a panel gets: its own queries asked of a Prometheus, and the answers named as Grafana names them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.generate.reading import EVERYTHING, interpolated
from tests.support.real_prometheus import Prometheus

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: the query's letter, its name in a legend, its labels, and its values by time, oldest first."""

    ref: str
    name: str
    labels: Mapping[str, str]
    times: Sequence[float]
    values: Sequence[float]

    @property
    def last(self) -> float:
        """Its last value that is a number."""
        return next((value for value in reversed(self.values) if not math.isnan(value)), math.nan)


@dataclass(frozen=True, slots=True)
class Range:
    """The time range of a picture, in seconds of Unix time."""

    begin: float
    end: float
    scrape: int = 1
    """Seconds from one scrape to the next."""

    def step(self, points: int) -> float:
        """Seconds from point to point: whole ones, as many as it takes to have no more than so many points."""
        return max(float(self.scrape), math.ceil((self.end - self.begin) / points))

    def rate_interval(self, step: float) -> str:
        """What Grafana takes for `$__rate_interval`."""
        return f"{max(step + self.scrape, 4 * self.scrape):.0f}s"


def now(seconds: float, scrape: int) -> Range:
    """The last seconds."""
    end = math.floor(time.time())
    return Range(end - math.floor(seconds), end, scrape)


def name(legend: str, labels: Mapping[str, str]) -> str:
    """How a legend's format calls a series; where it names no label, by itself or by all labels."""
    if legend in {"", "__auto"}:
        return ", ".join(f"{label}={value}" for label, value in labels.items()) or "Value"
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend).replace("  ", " ").strip()


def values(prometheus: Prometheus, variable: Json, span: Range, chosen: Mapping[str, str]) -> list[str]:
    """The values that a variable offers."""
    query = variable["query"]["query"] if isinstance(variable["query"], dict) else variable["query"]
    series, label = re.fullmatch(r"label_values\((.+),\s*(\w+)\)", query).groups()  # type: ignore[union-attr]
    matched = {"match[]": interpolated(series, EVERYTHING | dict(chosen), ""), "start": str(span.begin), "end": str(span.end)}
    return list(prometheus.get(f"/api/v1/label/{label}/values", **matched))  # type: ignore[call-overload]


def ask(prometheus: Prometheus, panel: Json, span: Range, chosen: Mapping[str, str], points: int) -> list[Series]:
    """The answers to all queries of a panel, one after the other, with the variables as chosen and the others at All."""
    variables = EVERYTHING | dict(chosen)
    step = span.step(min(points, panel.get("maxDataPoints") or points))
    found: list[Series] = []
    for target in panel["targets"]:
        seconds = f"{span.end - span.begin:.0f}s"
        expression = interpolated(target["expr"], variables, span.rate_interval(step), span=seconds, interval=f"{step:.0f}s")
        legend, ref = target.get("legendFormat", ""), target["refId"]
        for labels, values in _answer(prometheus, expression, span, step, instant=bool(target.get("instant"))):
            times = [float(at) for at, _ in values]
            found.append(Series(ref, name(legend, labels), labels, times, [float(value) for _, value in values]))
    return found


def _answer(
    prometheus: Prometheus, expression: str, span: Range, step: float, *, instant: bool
) -> list[tuple[dict[str, str], list[tuple[float, str]]]]:
    if instant:
        data = prometheus.get("/api/v1/query", query=expression, time=str(span.end))
        return [(one["metric"], [tuple(one["value"])]) for one in data["result"]]  # type: ignore[index]
    asked = {"query": expression, "start": str(span.begin), "end": str(span.end), "step": str(step)}
    data = prometheus.get("/api/v1/query_range", **asked)
    return [(one["metric"], one["values"]) for one in data["result"]]  # type: ignore[index]
