"""What is told of a problem, once when it begins and once when it ends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

SEVERITIES = ("info", "warning", "critical")
"""The least first."""

Json = float | str | None

_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """That a problem begins (`status` "firing") or has ended ("resolved").

    `timestamp`: Unix time of that; `started`: of its beginning. `summary`: a sentence. `value`: the number that is wrong, `None`
    if it is not a single one. `layer`: the layer that it is about, or the first of them. `step`: optimizer steps until now.
    `first_steps`: what to do first. `by_layer`: whether there is such a problem for each layer. `template`: the summary of
    Prometheus' own alert, in its notation.
    """

    timestamp: float
    started: float
    status: str
    alert: str
    severity: str
    summary: str
    layer: str | None
    value: float | None
    step: int
    run: str
    rank: int
    first_steps: str
    by_layer: bool = False
    template: str = ""

    @property
    def firing(self) -> bool:
        """Whether the problem begins."""
        return self.status == "firing"

    def payload(self) -> dict[str, Json]:
        """What a webhook is sent."""
        return {
            "timestamp": rfc3339(self.timestamp),
            "status": self.status,
            "alert": self.alert,
            "severity": self.severity,
            "summary": self.summary,
            "layer": self.layer,
            "value": number(self.value),
            "step": self.step,
            "run": self.run,
            "rank": self.rank,
            "first_steps": self.first_steps,
        }

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which Alertmanager routes it; the same at its end as at its beginning."""
        found = {"alertname": self.alert, "severity": self.severity, "run": self.run, "rank": str(self.rank)}
        return found | ({"layer": self.layer} if self.by_layer and self.layer is not None else {})

    @property
    def headline(self) -> str:
        """The summary that Prometheus' own alert has, where its labels are known here; else the sentence of this process."""
        return filled(self.template, self.labels) or self.summary


FIELDS = (
    "timestamp", "status", "alert", "severity", "summary", "layer", "value", "step", "run", "rank", "first_steps",
)  # fmt: skip
"""Of a payload, and what a template may name."""


def rfc3339(timestamp: float) -> str:
    """A Unix time as text, in UTC."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def number(value: float | None) -> Json:
    """A number in JSON, which has none that are not finite."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def filled(template: str, labels: Mapping[str, str]) -> str:
    """A summary in Prometheus' notation with its labels filled in; empty where it needs more than these."""
    text = _LABEL.sub(lambda found: labels.get(found[1], found[0]), template)
    return "" if "{{" in text else text
