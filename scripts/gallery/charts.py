"""Panels over time with lines: axes, areas, bars, thresholds and legends."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullFormatter, NullLocator

from scripts.gallery.asking import Json, Range, Series
from scripts.gallery.canvas import FAINT, LINE, Box, Canvas, fitted, width
from scripts.gallery.fields import color, config, defaults, line_color
from scripts.gallery.units import written

ROW = 17
"""Pixels of a line of a legend."""


def lines(canvas: Canvas, at: Box, panel: Json, answers: Sequence[Series], span: Range) -> None:
    """The lines of a panel with their axes and legend."""
    drawn = [(series, config(panel, series.ref, series.name)) for series in answers]
    colors = [line_color(place, *line) for place, line in enumerate(drawn)]
    right = [line for line in drawn if line[1].get("custom.axisPlacement") == "right"]
    legend = panel["options"]["legend"]
    if legend["placement"] == "right":
        aside = min(legend.get("width", 320), at.w * 0.45)
        _table(canvas, Box(at.x + at.w - aside, at.y, aside, at.h), drawn, colors)
        at = at.inset(right=aside + 8)
    else:
        listed = [place for place, (_, own) in enumerate(drawn) if not own.get("custom.hideFrom", {}).get("legend")]
        at = at.inset(bottom=_list(canvas, at, [answers[place] for place in listed], [colors[place] for place in listed]))
    plot = at.inset(left=_room(line for line in drawn if line not in right), top=6, right=_room(right) if right else 8, bottom=20)
    main = canvas.axes(plot)
    other = canvas.axes(plot) if right else main
    _time(main, span, plot.w)
    stacked = defaults(panel).get("custom.stacking", {}).get("mode") == "normal"
    if stacked:
        _areas(main, drawn, colors)
    for (series, own), ink in zip(drawn, colors, strict=True):
        below = next((other for other in answers if other.name == own.get("custom.fillBelowTo")), None)
        if below is not None:
            main.fill_between(*_common(series, below), color=ink, alpha=own["custom.fillOpacity"] / 100, linewidth=0)
        elif not stacked and own.get("custom.lineWidth", 1):
            _line(other if own.get("custom.axisPlacement") == "right" else main, series, own, ink)
    _limits(main, defaults(panel))
    _values(main, defaults(panel), [line for line in drawn if line not in right])
    if right:
        other.yaxis.tick_right()
        other.set_xlim(span.begin, span.end)
        other.xaxis.set_visible(False)
        _values(other, right[0][1], right, grid=False)


def _room(drawn: Iterable[tuple[Series, dict[str, Any]]]) -> float:
    """How wide the numbers beside an axis may become."""
    texts = [
        written(value * share, own.get("unit", "short"), own.get("decimals"))
        for series, own in drawn
        for value in (min(series.values), max(series.values))
        for share in (0.77, 1.0)
    ]
    return 12 + max((width(text, 7) for text in texts), default=40.0)


def _time(axes: Axes, span: Range, wide: float) -> None:
    count = max(2, int(wide // 90))
    step = next((s for s in (5, 10, 15, 20, 30, 60, 120, 300, 600) if (span.end - span.begin) / s <= count), 1200)
    first = math.ceil(span.begin / step) * step
    axes.set_xlim(span.begin, span.end)
    axes.xaxis.set_major_locator(FixedLocator(list(np.arange(first, span.end + 1, step))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: time.strftime("%H:%M:%S", time.gmtime(at))))
    axes.grid(axis="x", color=LINE, linewidth=0.6)


def _values(axes: Axes, own: dict[str, Any], drawn: Sequence[tuple[Series, dict[str, Any]]], *, grid: bool = True) -> None:
    scale, unit, decimals = own.get("custom.scaleDistribution", {}), own.get("unit", "short"), own.get("decimals")
    positive = [value for series, _ in drawn for value in series.values if value > 0 and math.isfinite(value)]
    if scale.get("type") == "log" and positive:
        _decades(axes, scale.get("log", 10), min(positive), max(positive), own.get("min"))
    else:
        low, high = axes.get_ylim()
        soft = own.get("custom.axisSoftMax", 0.0)
        high = max(high, soft) if positive else soft or 100.0
        low, high = own.get("min", low), own.get("max", high)
        axes.set_ylim(low, high if high > low else low + 1)
        binary = 2.0 ** math.floor(math.log2(max(high - low, 1) / 3))
        axes.yaxis.set_major_locator(MultipleLocator(binary) if unit == "bytes" else MaxNLocator(5, integer=decimals == 0))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit, decimals)))
    if grid:
        axes.grid(axis="y", color=LINE, linewidth=0.6)
        axes.set_axisbelow(True)


def _decades(axes: Axes, base: float, smallest: float, largest: float, least: float | None) -> None:
    low, high = math.floor(math.log(smallest, base)), math.ceil(math.log(largest, base))
    axes.set_yscale("log", base=base)
    axes.set_ylim(least or float(base) ** low, float(base) ** max(high, low + 1))
    axes.yaxis.set_major_locator(LogLocator(base=base, numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def with_gaps(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Times and values with a NaN where at least one point is missing, so that no line is drawn across."""
    times, values = np.array(series.times), np.array(series.values)
    steps = np.diff(times)
    if not len(steps):
        return times, values
    gaps = np.flatnonzero(steps > 1.5 * steps.min()) + 1
    return np.insert(times, gaps, times[gaps] - steps.min()), np.insert(values, gaps, math.nan)


def _line(axes: Axes, series: Series, own: dict[str, Any], ink: str) -> None:
    times, values = with_gaps(series)
    if own.get("custom.drawStyle") == "bars":
        wide = float(np.diff(series.times).min()) if len(series.times) > 1 else 1.0
        axes.bar(series.times, series.values, width=wide, color=ink, alpha=own.get("custom.fillOpacity", 80) / 100)
        return
    dash = own.get("custom.lineStyle", {}).get("fill") == "dash"
    known = np.pad(np.isfinite(values), 1)
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    axes.plot(times, values, color=ink, linewidth=1.1, linestyle=(0, (5, 4)) if dash else "-", zorder=3)
    axes.plot(times[alone], values[alone], ".", color=ink, markersize=3)


def _common(above: Series, below: Series) -> tuple[list[float], list[float], list[float]]:
    """The times that both have, and the values of each then."""
    pairs = [dict(zip(series.times, series.values, strict=True)) for series in (above, below)]
    times = [at for at in above.times if at in pairs[1]]
    return times, [pairs[0][at] for at in times], [pairs[1][at] for at in times]


def _areas(axes: Axes, drawn: Sequence[tuple[Series, dict[str, Any]]], colors: Sequence[str]) -> None:
    times = sorted({at for series, _ in drawn for at in series.times})
    rows = [dict(zip(series.times, series.values, strict=True)) for series, _ in drawn]
    values = np.nan_to_num([[row.get(at, 0.0) for at in times] for row in rows])
    axes.stackplot(times, values, colors=colors, alpha=0.6)


def _limits(axes: Axes, own: dict[str, Any]) -> None:
    if own.get("custom.thresholdsStyle", {}).get("mode") == "dashed":
        for step in own["thresholds"]["steps"]:
            if step["value"] is not None:
                axes.axhline(step["value"], color=color(step["color"]), linewidth=1, linestyle=(0, (6, 4)))


def _list(canvas: Canvas, at: Box, answers: Sequence[Series], colors: Sequence[str]) -> float:
    """A legend below: as many names as three lines hold. Returns its height."""
    rows: list[list[tuple[float, str, str]]] = [[]]
    x = 0.0
    for series, ink in zip(answers, colors, strict=True):
        name = fitted(series.name, at.w - 30, 7)
        wide = width(name, 7) + 30
        if x + wide > at.w and rows[-1]:
            rows.append([])
            x = 0.0
        rows[-1].append((x, name, ink))
        x += wide
    shown = rows[:3]
    left = sum(map(len, rows[3:]))
    top = at.y + at.h - ROW * len(shown)
    for number, row in enumerate(shown):
        for place, (start, name, ink) in enumerate(row):
            more = left and number == len(shown) - 1 and place == len(row) - 1
            y = top + ROW * number + ROW / 2
            if more:
                canvas.text(at.x + start, y, f"and {left + 1} more", size=7, ink=FAINT)
            else:
                canvas.box(Box(at.x + start, y - 1.5, 12, 3), ink)
                canvas.text(at.x + start + 17, y, name, size=7)
    return ROW * len(shown) + 4


def _table(canvas: Canvas, at: Box, drawn: Sequence[tuple[Series, dict[str, Any]]], colors: Sequence[str]) -> None:
    """A legend at the side: names with their last values, the largest first."""
    canvas.text(at.x + 4, at.y + 8, "Name", size=7, ink=FAINT)
    canvas.text(at.x + at.w - 6, at.y + 8, "Last", size=7, ink=FAINT, ha="right")
    order = sorted(range(len(drawn)), key=lambda place: -np.nan_to_num(drawn[place][0].last, nan=-math.inf))
    room = int((at.h - 18) // ROW)
    for row, place in enumerate(order[: room if len(order) <= room else room - 1]):
        series, own = drawn[place]
        y = at.y + 24 + ROW * row
        canvas.box(Box(at.x + 4, y - 1.5, 12, 3), colors[place])
        canvas.text(at.x + 21, y, fitted(series.name, at.w - 21 - 90, 7), size=7)
        text = written(series.last, own.get("unit", "short"), own.get("decimals"))
        canvas.text(at.x + at.w - 6, y, fitted(text, 82, 7), size=7, ha="right")
    if len(order) > room:
        canvas.text(at.x + 21, at.y + 24 + ROW * (room - 1), f"and {len(order) - room + 1} more", size=7, ink=FAINT)
