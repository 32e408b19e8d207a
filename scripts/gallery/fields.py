"""What a panel says of its fields: defaults and overrides merged, mappings to words and colours, thresholds, palettes."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.gallery.asking import Json, Series
from scripts.gallery.units import written

COLORS = {
    "green": "#3f9b54", "yellow": "#dfae1b", "orange": "#ec8020", "red": "#d6394a", "blue": "#3a76d8", "purple": "#8e5bc4",
    "text": "#2c3038", "transparent": "#ffffff00",
}  # fmt: skip
SHADES = {"super-light": 0.55, "light": 0.3, "semi-dark": -0.15, "dark": -0.3}
PALETTE = (
    "#3f9b54", "#3a76d8", "#ec8020", "#8e5bc4", "#d6394a", "#1a9e9e", "#c9a016", "#8c564b",
    "#d667ad", "#6b7785", "#91c46c", "#7fb2ee", "#f4b183", "#c3a6e4", "#ef9aa5", "#7fd0d0",
)  # fmt: skip


def color(name: str) -> str:
    """The colour of a name such as `semi-dark-orange`, or a colour that is given as one."""
    shade, _, base = name.rpartition("-")
    if name.startswith("#") or base not in COLORS:
        return name
    if not shade:
        return COLORS[base]
    return _shifted(COLORS[base], SHADES[shade])


def _shifted(given: str, share: float) -> str:
    parts = (int(given[at : at + 2], 16) for at in (1, 3, 5))
    end = 255 if share > 0 else 0
    return "#" + "".join(f"{round(part + (end - part) * abs(share)):02x}" for part in parts)


def defaults(panel: Json) -> dict[str, Any]:
    """What holds for all fields, with dotted names for what is nested in `custom`."""
    options = dict(panel["fieldConfig"]["defaults"])
    return options | {f"custom.{key}": value for key, value in options.pop("custom", {}).items()}


def config(panel: Json, ref: str, name: str) -> dict[str, Any]:
    """What holds for a field: the defaults, and the overrides for its query, its name or a pattern, the later ones on top."""
    options = defaults(panel)
    for override in panel["fieldConfig"].get("overrides", []):
        matcher, wanted = override["matcher"]["id"], override["matcher"]["options"]
        matches = {
            "byFrameRefID": ref == wanted,
            "byName": name == wanted,
            "byRegexp": matcher == "byRegexp" and re.search(wanted.strip("/"), name) is not None,
        }
        if matches[matcher]:
            options |= {each["id"]: each["value"] for each in override["properties"]}
    return options


@dataclass(frozen=True, slots=True)
class Shown:
    """A value as a panel shows it."""

    text: str
    color: str | None
    """`None` where neither a mapping nor a threshold gives one."""


def shown(value: float | str, options: Mapping[str, Any]) -> Shown:
    """By the mappings where one is for this value, else the number with its unit and the colour of its threshold."""
    mapped = _mapped(value, options.get("mappings") or ())
    if mapped is not None:
        return Shown(mapped.get("text", str(value)), color(mapped["color"]) if "color" in mapped else None)
    if isinstance(value, str):
        return Shown(value, None)
    return Shown(written(value, options.get("unit", "short"), options.get("decimals")), threshold(value, options))


def _mapped(value: float | str, mappings: Any) -> dict[str, str] | None:  # noqa: ANN401 - as it stands in the JSON
    key = value if isinstance(value, str) else f"{value:g}"
    for mapping in mappings:
        if mapping["type"] == "value" and key in mapping["options"]:
            return dict(mapping["options"][key])
        if mapping["type"] == "special" and isinstance(value, float) and math.isnan(value):
            return dict(mapping["options"]["result"])
    return None


def threshold(value: float, options: Mapping[str, Any]) -> str | None:
    """The colour of the highest step at or below the value."""
    steps = (options.get("thresholds") or {}).get("steps", [])
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return color(reached[-1]) if reached else None


def line_color(place: int, series: Series, options: Mapping[str, Any]) -> str:
    """The colour of a line: fixed, of its name, or the next of the palette."""
    chosen = options.get("color") or {}
    if chosen.get("mode") == "fixed":
        return color(chosen.get("fixedColor", "text"))
    if chosen.get("mode") == "palette-classic-by-name":
        return PALETTE[zlib.crc32(series.name.encode()) % len(PALETTE)]
    return PALETTE[place % len(PALETTE)]


def hidden_up_to(panel: Json) -> float:
    """Cells of a heatmap up to this value are not drawn: Grafana merges its own limit into what the panel says."""
    return float(({"le": 1e-9} | (panel["options"].get("filterValues") or {}))["le"])


def nothing(panel: Json) -> str:
    """What the panel says where it has nothing to show."""
    return str(panel["fieldConfig"]["defaults"].get("noValue", "No data"))
