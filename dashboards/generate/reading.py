"""Reads the dashboards that were made: their queries, and what Grafana makes of the variables in one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "grafana"
ALL = ".+"
"""What the variables stand for where All is chosen."""
EVERYTHING = dict.fromkeys(("job", "run", "rank", "layer", "value"), ALL)
"""All variables where All is chosen."""


class PanelQuery(NamedTuple):
    """A query and where it stands."""

    dashboard: str
    panel: str
    ref: str
    expr: str


def dashboards() -> dict[str, dict[str, object]]:
    """Each shipped dashboard by the name of its file."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def each_panel(dashboard: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """All panels in the order in which they stand, also those of collapsed rows; no rows."""
    for panel in _dicts(dashboard["panels"]):
        if panel["type"] == "row":
            yield from _dicts(panel.get("panels") or [])
        else:
            yield panel


def panels(dashboard: Mapping[str, object]) -> Iterator[PanelQuery]:
    """All queries of all panels, in the same order."""
    for panel in each_panel(dashboard):
        for target in _dicts(panel.get("targets") or []):
            yield PanelQuery(str(dashboard["title"]), str(panel["title"]), str(target["refId"]), str(target["expr"]))


def interpolated(
    expr: str, variables: Mapping[str, str | Iterable[str]], rate_interval: str, *, span: str = "1h", interval: str = "15s"
) -> str:
    """The expression that Grafana sends. A text, such as ALL, stands as it is; several values are escaped, then joined by |."""
    values = {name: value if isinstance(value, str) else _any_of(value) for name, value in variables.items()}
    values |= {"__rate_interval": rate_interval, "__range": span, "__interval": interval}
    return re.sub(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", lambda found: values[found[1] or found[2]], expr)


def _any_of(chosen: Iterable[str]) -> str:
    # In a quoted string of PromQL a backslash is written twice, so that a dot of a layer's name becomes `\\.`.
    escaped = [re.sub(r"[$^*{}\[\]+?.()|']", r"\\\\\g<0>", value.replace("\\", "\\" * 4)) for value in chosen]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def _dicts(found: object) -> list[dict[str, object]]:
    if not isinstance(found, list):
        raise TypeError(f"no list in the dashboard: {found!r}")
    return found
