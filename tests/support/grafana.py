"""The shipped Grafana dashboards, as `dashboards.generate` reads them: its package is found from the root of the repository."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dashboards.generate.panels import UNDRAWN
from dashboards.generate.queries import NO_RUNS, NOTHING
from dashboards.generate.reading import ALL, EVERYTHING, FOLDER, PanelQuery, dashboards, each_panel, interpolated, panels

__all__ = [
    "ALL",
    "EVERYTHING",
    "FOLDER",
    "PanelQuery",
    "dashboards",
    "each_panel",
    "interpolated",
    "is_sentence",
    "panels",
    "sentence",
]


def is_sentence(labels: Mapping[str, str], values: Iterable[float]) -> bool:
    """Return whether a series is the row by which a query says that there is none."""
    return set(values) <= {NOTHING, NO_RUNS, UNDRAWN} and ("run" not in labels or " " in labels["run"])


def sentence(panel: Mapping[str, Any]) -> str:
    """Return what a panel says when it is empty: by a row of its first query, else by a text in its middle."""
    row = re.search(r'label_replace\(-\d+ \* group\(.*?\), "\w+", "(.+?)", "", ""\)', panel["targets"][0]["expr"])
    return row[1] if row else str(panel["fieldConfig"]["defaults"].get("noValue", ""))
