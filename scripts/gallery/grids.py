"""Panels over time with rows: heatmaps of series and of histograms, and state timelines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, PowerNorm
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from scripts.gallery.asking import Json, Range, Series
from scripts.gallery.canvas import FAINT, Box, Canvas, fitted
from scripts.gallery.charts import ROW, _time
from scripts.gallery.fields import config, hidden_up_to, shown
from scripts.gallery.units import written

TURNED = ("RdYlBu", "RdBu", "RdYlGn", "Spectral")
"""Schemes that Grafana turns by itself, so that red is high."""


def scheme(panel: Json) -> Colormap:
    """The colours of a heatmap from low to high, on a light ground."""
    options = panel["options"]["color"]
    turned = (options["scheme"] in TURNED) != bool(options.get("reverse"))
    name = "turbo" if options["scheme"] == "Turbo" else options["scheme"]
    return colormaps[f"{name}_r" if turned else name]


def by_buckets(answers: Sequence[Series]) -> list[Series]:
    """Counts of each bucket of a histogram, lowest first: what the cumulative counts by `le` add, one to the next."""
    ordered = sorted(answers, key=lambda series: float(series.labels["le"]))
    made, below = [], dict.fromkeys([at for series in ordered for at in series.times], 0.0)
    for series in ordered:
        values = [max(0.0, value - below[at]) for at, value in zip(series.times, series.values, strict=True)]
        below |= dict(zip(series.times, series.values, strict=True))
        made.append(Series(series.ref, series.labels["le"], series.labels, series.times, values))
    return made


def heatmap(canvas: Canvas, at: Box, panel: Json, answers: Sequence[Series], span: Range) -> None:
    """Each series a row, or each bucket of a histogram, the first at the bottom unless the axis is turned; below, the colours."""
    options, unit = panel["options"], panel["options"]["yAxis"]["unit"]
    # Of no observation there is a row with a sentence.
    buckets = panel["targets"][0]["format"] == "heatmap" and all(_is_number(series.labels["le"]) for series in answers)
    rows = by_buckets(answers) if buckets else list(answers)
    times = sorted({moment for series in rows for moment in series.times})
    places = {moment: place for place, moment in enumerate(times)}
    cells = np.full((len(rows), len(times)), math.nan)
    for row, series in enumerate(rows):
        for moment, value in zip(series.times, series.values, strict=True):
            cells[row, places[moment]] = value
    cells[~(cells > hidden_up_to(panel))] = math.nan
    low = options["color"].get("min", 0.0 if buckets else np.nanmin(cells, initial=0.0))
    high = options["color"].get("max", np.nanmax(cells, initial=low + 1e-9))
    exponential = options["color"]["scale"] == "exponential"
    norm = PowerNorm(options["color"]["exponent"], low, high, clip=True) if exponential else Normalize(low, high, clip=True)
    left = options["yAxis"].get("axisWidth", 62)
    plot = at.inset(left=left, top=4, right=10, bottom=52)
    axes = canvas.axes(plot)
    axes.pcolormesh(
        [*times, times[-1] + span.step(120)], np.arange(len(rows) + 1), cells, cmap=scheme(panel), norm=norm, rasterized=True
    )
    _time(axes, span, plot.w)
    axes.grid(visible=False)
    names = [written(float(series.name), unit) if buckets else fitted(series.name, left - 8, 7) for series in rows]
    _rows(axes, names, plot.h, turned=bool(options["yAxis"].get("reverse")))
    _meaning(canvas, at, scheme(panel), norm, options["cellValues"])


def _is_number(text: str) -> bool:
    return text[-1].isdigit() or text == "+Inf"


def _rows(axes: Axes, names: Sequence[str], high: float, *, turned: bool) -> None:
    """Names the rows. `turned`: the first is on top."""
    every = max(1, math.ceil(len(names) * 15 / high))
    axes.set_ylim(*((len(names), 0) if turned else (0, len(names))))
    axes.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in range(0, len(names), every)]))
    axes.yaxis.set_major_formatter(FixedFormatter(list(names[::every])))


def _meaning(canvas: Canvas, at: Box, colors: Colormap, norm: Normalize, cells: Json) -> None:
    bar = canvas.axes(Box(at.x + at.w - 250, at.y + at.h - 26, 230, 8))
    colorbar = canvas.figure.colorbar(ScalarMappable(norm, colors), cax=bar, orientation="horizontal")
    colorbar.outline.set_visible(False)
    colorbar.ax.tick_params(length=0, labelsize=7, labelcolor=FAINT)
    colorbar.ax.xaxis.set_major_locator(FixedLocator(list(np.linspace(float(norm.vmin or 0), float(norm.vmax or 1), 5))))
    colorbar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, cells["unit"], cells.get("decimals"))))


def timeline(canvas: Canvas, at: Box, panel: Json, answers: Sequence[Series], span: Range) -> None:
    """Each series a row of states, the first on top, a page of them; below, which colour is which state."""
    page = panel["options"].get("perPage") or len(answers)
    rows = answers[:page]
    left = 190.0
    more = len(answers) > page
    plot = at.inset(left=left, top=4, right=10, bottom=ROW + 26)
    axes = canvas.axes(plot)
    step = span.step(panel.get("maxDataPoints") or 120)
    used: dict[str, str] = {}
    for row, series in enumerate(rows):
        for begin, length, value in merged(series, step):
            state = shown(value, config(panel, series.ref, series.name))
            used[state.text] = state.color or FAINT
            axes.broken_barh([(begin, length)], (row + 0.08, 0.84), facecolor=state.color or FAINT, alpha=0.85)
    _time(axes, span, plot.w)
    axes.set_axisbelow(True)
    axes.set_ylim(len(rows), 0)
    axes.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in range(len(rows))]))
    size = 7 if plot.h / max(1, len(rows)) >= 11 else 5
    axes.yaxis.set_major_formatter(FixedFormatter([fitted(series.name, left - 8, size) for series in rows]))
    axes.tick_params(axis="y", labelsize=size)
    words = [to["text"] for m in config(panel, "", "").get("mappings", []) if m["type"] == "value" for to in m["options"].values()]
    x = at.x + left
    for word in (word for word in words if word in used):
        canvas.box(Box(x, at.y + at.h - 12, 12, 6), used[word])
        canvas.text(x + 17, at.y + at.h - 9, word, size=7)
        x += 40 + 6.2 * len(word)
    if more:
        canvas.text(at.x + at.w - 10, at.y + at.h - 9, f"1 - {page} of {len(answers)}", size=7, ink=FAINT, ha="right")


def merged(series: Series, step: float) -> list[tuple[float, float, float]]:
    """Begin, length and value of each time in which a series has the same value without a gap."""
    made: list[tuple[float, float, float]] = []
    for moment, value in zip(series.times, series.values, strict=True):
        if made and made[-1][2] == value and moment <= made[-1][0] + made[-1][1] + 0.5 * step:
            made[-1] = (made[-1][0], moment + step - made[-1][0], value)
        else:
            made.append((moment, step, value))
    return made
