"""Numbers as a panel writes them, by the ids of Grafana's units."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

Steps = Sequence[tuple[float, str]]

SHORT: Steps = ((1.0, ""), (1e3, " K"), (1e6, " Mil"), (1e9, " Bil"), (1e12, " Tri"))
METRIC: Steps = ((1e-3, " m"), (1.0, " "), (1e3, " k"), (1e6, " M"), (1e9, " G"))
BINARY: Steps = ((1.0, " B"), (2.0**10, " KiB"), (2.0**20, " MiB"), (2.0**30, " GiB"), (2.0**40, " TiB"))
DECIMAL: Steps = ((1.0, " B/s"), (1e3, " kB/s"), (1e6, " MB/s"), (1e9, " GB/s"))
SECONDS: Steps = ((1e-9, " ns"), (1e-6, " µs"), (1e-3, " ms"), (1.0, " s"), (60.0, " min"), (3600.0, " h"), (86400.0, " day"))
SUFFIXES = {"watt": "W", "hertz": "Hz", "joule": "J"}
SCALES = {"s": SECONDS, "bytes": BINARY, "Bps": DECIMAL}


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """A number with its unit; `decimals` where the panel says how many, else as many as it takes for three figures."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if unit in PLAIN:
        return PLAIN[unit](value, decimals)
    if unit.startswith(("prefix:", "suffix:")):
        kind, _, text = unit.partition(":")
        number = _figures(value, decimals)
        return text + number if kind == "prefix" else number + text
    if unit.startswith("count:"):
        return f"{_scaled(value, SHORT, decimals)} {unit.removeprefix('count:')}"
    if unit in SUFFIXES:
        return _scaled(value, METRIC, decimals) + SUFFIXES[unit]
    return _scaled(value, SCALES.get(unit, SHORT), decimals)


def _scientific(value: float, decimals: int | None) -> str:
    mantissa, _, exponent = f"{value:.{2 if decimals is None else decimals}e}".partition("e")
    return f"{mantissa}e{int(exponent):+d}"


def ago(seconds: float) -> str:
    """How long ago, in words."""
    if seconds < 45:
        return "a few seconds ago"
    minutes = round(seconds / 60)
    return "a minute ago" if minutes < 2 else f"{minutes} minutes ago" if minutes < 45 else f"{round(seconds / 3600)} hours ago"


def _scaled(value: float, steps: Steps, decimals: int | None) -> str:
    if value == 0:
        return "0" + dict(steps)[1.0]
    size, name = next((step for step in reversed(steps) if abs(value) >= step[0]), steps[0])
    return f"{_figures(value / size, decimals)}{name}"


def _figures(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 7)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


PLAIN: Mapping[str, Callable[[float, int | None], str]] = {
    "sci": _scientific,
    "percentunit": lambda value, decimals: f"{_figures(100 * value, decimals)}%",
    "locale": lambda value, decimals: f"{value:,.{decimals or 0}f}",
    "dateTimeFromNow": lambda value, _: ago(time.time() - value / 1000),
    "celsius": lambda value, decimals: f"{_figures(value, decimals)} °C",
    "none": _figures,
}
"""Units that are written in a way of their own, and not scaled."""
