"""A run as a PNG: the heatmap of all layers, and below it the run's lines, over the same steps. Needs matplotlib."""

from __future__ import annotations

import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform
from numpy.typing import NDArray

from torch_grad_exporter.collectors.outcomes import Happened
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.outputs.live import saved
from torch_grad_exporter.outputs.live.saved import Grid, LayerMoments, Lines, Saved, Status

DPI = 150
WIDTH = 11.0
"""Inches, of which a heatmap has about `HEATMAP_WIDTH`."""

HEATMAP_WIDTH = 8.5
ROW, BROAD = 0.17, 0.3
"""Inches of a row with a name: at least, and where there are few."""

LOWEST, HIGHEST, TALLEST = 0.9, 4.2, 16.0
"""Inches of the heatmap; above `HIGHEST` only where layers would have less than a pixel each, and `TALLEST` at most."""

PANEL = 1.25
FRAME = 1.2
"""Inches of a panel, and of all that is written around them."""

MARK = 2.0
"""Points: the thickness of a mark for non-finite values."""

MAGENTA, GREY = "magenta", "0.8"

TOLD = 4
"""Actions that are named below the picture."""

Bounds = tuple[float, float]
Segment = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Quantity:
    """How it is drawn. `bounds`: of the colours, by the finite values; of a logarithmic quantity by their logarithms to base 10.

    `of_norm`: depends on the norm, so on a rank's part where that is all there is.
    """

    title: str
    unit: str
    colours: str
    bounds: Callable[[FloatArray], Bounds]
    of_norm: bool = False


def _of_norms(logs: FloatArray) -> Bounds:
    """From the half decade below nearly all to the one above: a single dead layer does not flatten the others."""
    if not logs.size:
        return -6.0, 0.0
    least, most = (np.sort(logs)[min(len(logs) - 1, int(share * len(logs)))] for share in (0.005, 0.999))
    low = math.floor(2 * least) / 2
    return low, max(low + 1, math.ceil(2 * most) / 2)


def _of_ratios(values: FloatArray) -> Bounds:
    most = values.max(initial=0)
    return 0.0, next((bound for bound in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if bound >= most), 1.0)


_QUANTITIES = {
    "norm": Quantity("L2 norm of each layer's gradient, before clipping", "L2 norm", "viridis", _of_norms, of_norm=True),
    "zero_ratio": Quantity("Elements of each layer's gradient that are exactly 0", "share of elements", "cividis", _of_ratios),
    "dead_ratio": Quantity("Dead units of each layer", "share of units", "cividis", lambda _: (0.0, 1.0)),
    "zscore": Quantity(
        "z-score of the logarithm of each layer's norm", "robust sigmas", "RdBu_r", lambda _: (-6.0, 6.0), of_norm=True
    ),
}

_PANELS = (
    ("Global\nL2 norm", {"norm": "before clipping", "norm_after_clip": "after clipping"}),
    ("Loss", {"loss": "loss"}),
    ("Step time,\nseconds", {"step_seconds": "step time"}),
)


def draw(found: Saved, quantity: str, view: str, out: Path, moments: Sequence[str] = ()) -> None:
    """Writes the picture of a history that has been checked. `moments`: layers that have such. Raises `OSError`."""
    grid, lines, status = saved.grid(found, quantity, view), saved.lines(found, view), saved.status(found)
    grid, lines, ends = _within(grid, lines, view)
    of_layers = [saved.moments(found, name, view) for name in moments]
    panels = [(title, names) for title, names in _PANELS if any(_any(lines, name) for name in names)]
    high = min(max(BROAD * len(grid.layers), LOWEST), HIGHEST)
    high = max(high, min(len(grid.layers) / DPI, TALLEST))
    with mpl.rc_context({"font.size": 9, "axes.titlesize": 10, "xtick.labelsize": 8, "ytick.labelsize": 8}):
        figure = Figure(figsize=(WIDTH, FRAME + high + PANEL * (len(panels) + len(moments))), dpi=DPI, layout="constrained")
        ratios = [high, *(PANEL for _ in [*panels, *moments])]
        axes: list[Axes] = list(
            figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
        )
        _steps(axes[-1], ends)
        notes = list(_heatmap(figure, axes[0], grid, _QUANTITIES[quantity], high)) if grid.values.size else _nothing(axes[0])
        marks = [one for one in saved.actions(found) if ends[0] <= one.step <= ends[1]]
        for below, (title, names) in zip(axes[1:], panels, strict=False):
            _panel(below, lines, title, names)
        for below, layer, spread in zip(axes[1 + len(panels) :], moments, of_layers, strict=True):
            _spread(below, layer, spread)
        for below in axes[1:]:
            _acted(below, marks)
        notes += _told(marks) if len(axes) > 1 else []
        figure.align_ylabels(axes[1:])
        figure.suptitle(_title(status), fontsize=11)
        said = "".join(f"{note}. " for note in (*_about(grid, view), *notes, *_absent(grid, ends)))
        figure.supxlabel(textwrap.fill(said, 190), x=0.01, ha="left", fontsize=7.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph", UserWarning)  # the font may lack a script: boxes
            figure.savefig(out)


# What is drawn, and over which steps


def _within(grid: Grid, lines: Lines, view: str) -> tuple[Grid, Lines, Bounds]:
    """The columns within the steps that are shown: of the recent ones those that both have, unless these are few."""
    ends = [(steps[0], steps[-1]) for steps in (edges(grid.steps), lines.steps) if len(steps)]
    if not ends:
        return grid, lines, (0.0, 1.0)
    starts, high = [start for start, _ in ends], max(end for _, end in ends)
    low, most = min(starts), max(starts)
    if view == "recent" and high - most > (high - low) / 4:
        low = most
    shown, known = grid.steps >= low, lines.steps >= low
    grid = replace(grid, steps=grid.steps[shown], values=grid.values[:, shown], nonfinite=grid.nonfinite[:, shown])
    lines = Lines(
        lines.steps[known],
        {name: column[known] for name, column in lines.values.items()},
        {name: column[known] for name, column in lines.nonfinite.items()},
    )
    return grid, lines, (low, high) if low < high else (low - 0.5, high + 0.5)


def edges(steps: FloatArray) -> FloatArray:
    """Where columns of the heatmap begin and end, shape (n + 1,): halfway between their steps.

    Columns of the same step, as of steps that a gradient scaler left out, share the way to the next one.
    """
    if not len(steps):
        return np.zeros(0)
    found, first, count = np.unique(steps, return_index=True, return_counts=True)
    gaps = np.diff(found)
    gaps = np.append(gaps, gaps[-1] if len(gaps) else 1.0)
    within = np.arange(len(steps)) - np.repeat(first, count)
    at = np.repeat(found, count) + within / np.repeat(count, count) * np.repeat(gaps, count)
    middle = (at[1:] + at[:-1]) / 2
    before = middle[0] - at[0] if len(middle) else 0.5
    after = at[-1] - middle[-1] if len(middle) else 0.5
    return np.concatenate(([max(at[0] - before, min(at[0], 0.0))], middle, [at[-1] + after]))


def _any(lines: Lines, name: str) -> bool:
    return bool(np.isfinite(lines.values[name]).any() or lines.nonfinite[name].any())


# The heatmap


def _nothing(axes: Axes) -> list[str]:
    axes.text(0.5, 0.5, "no sample yet", ha="center", va="center", transform=axes.transAxes)
    axes.yaxis.set_major_locator(NullLocator())
    return []


def _heatmap(figure: Figure, axes: Axes, grid: Grid, quantity: Quantity, high: float) -> Iterable[str]:
    """Draws it, `high` inches high, with its title and notes."""
    x, bounds = np.clip(edges(grid.steps), *axes.get_xlim()), _bounds(grid, quantity)
    image = _cells(axes, x, grid, quantity.colours, bounds)
    _scale(figure, axes, image, grid, unit=quantity.unit, bounds=bounds, high=high)
    axes.set_facecolor(GREY)
    axes.set_title(quantity.title, loc="left")
    yield from _names(axes, grid, quantity, high)
    if grid.nonfinite.any():
        _mark(figure, axes, x, grid, high)
        yield (
            "Magenta: NaN or Inf, as a whole cell, or at the lower edge of one that has finite values too; "
            "the bars at the top and on the right mark all columns and rows that have any"
        )


def _names(axes: Axes, grid: Grid, quantity: Quantity, high: float) -> Iterable[str]:
    """The vertical axis."""
    count, prefix = len(grid.layers), _prefix(grid.layers)
    every = math.ceil(count * ROW / max(high, ROW))
    parts = [quantity.of_norm and name in grid.sharded for name in grid.layers]
    named = [f"{short(name[len(prefix) :])}{'*' * part}" for name, part in zip(grid.layers, parts, strict=True)]
    axes.set_ylim(count, 0)
    axes.set_yticks(np.arange(count)[::every] + 0.5, named[::every], fontsize=7)
    axes.set_ylabel("layer" if count == 1 else f"{count} layers")
    if every > 1 or prefix:
        said = [f"of one layer in {every}"] * (every > 1) + [f"without '{short(prefix)}'"] * bool(prefix)
        yield f"Names: {', '.join(said)}"
    if any(parts):
        yield f"*: norm of this rank's part{' (all layers)' * all(parts)}"


def _bounds(grid: Grid, quantity: Quantity) -> Bounds:
    """The values of the first and of the last colour."""
    values = grid.values[np.isfinite(grid.values)]
    if not grid.log:
        return quantity.bounds(values)
    low, high = quantity.bounds(np.log10(values[values > 0]))
    return 10**low, 10**high


def _cells(axes: Axes, x: FloatArray, grid: Grid, colours: str, bounds: Bounds) -> ScalarMappable:
    """The cells that have a value, and those that have only such as are not finite."""
    rows = np.arange(len(grid.layers) + 1.0)
    norm = LogNorm(*bounds) if grid.log else Normalize(*bounds)
    shown = np.ma.masked_invalid(np.maximum(grid.values, bounds[0]) if grid.log else grid.values)  # so 0 has the lowest colour
    image = axes.pcolormesh(x, rows, shown, norm=norm, cmap=colours, rasterized=True)
    only = np.ma.masked_where(~(grid.nonfinite & np.isnan(grid.values)), np.zeros(grid.values.shape))
    axes.pcolormesh(x, rows, only, cmap=ListedColormap([MAGENTA]), rasterized=True)
    return image


def _scale(figure: Figure, axes: Axes, image: ScalarMappable, grid: Grid, *, unit: str, bounds: Bounds, high: float) -> None:
    """The colours, with arrows where values lie beyond them."""
    (low, top), values = bounds, grid.values[np.isfinite(grid.values)]
    slack = 1e-3 * (low if grid.log else top - low)  # codes are rounded
    below, above = (values < low - slack).any(), (values > top + (slack * top / low if grid.log else slack)).any()
    extend = "both" if below and above else "min" if below else "max" if above else "neither"
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.03, aspect=max(5.0, 6 * high), extend=extend, label=unit)
    if grid.log:
        _log_ticks(bar.ax.yaxis, low, top, high)
    else:
        bar.ax.yaxis.set_major_locator(MaxNLocator(max(2, min(6, int(2 * high))), steps=(1, 2, 3, 5, 10)))


def _mark(figure: Figure, axes: Axes, x: FloatArray, grid: Grid, high: float) -> None:
    """Non-finite values: in cells that have a value as well, and in bars above the columns and to the right of the rows."""
    flagged, rows = grid.nonfinite, np.arange(len(grid.layers) + 1.0)
    pixel, inch = float(x[-1] - x[0]) / (HEATMAP_WIDTH * DPI), len(grid.layers) / high
    scale, half = figure.dpi_scale_trans, MARK / 2 / 72
    above = axes.get_xaxis_transform() + ScaledTranslation(0, half, scale)
    aside = axes.get_yaxis_transform() + ScaledTranslation(half, 0, scale)
    columns = _wide(x, flagged.nonzero()[1], 2 * pixel)
    _bars(axes, [((begin, 1), (end, 1)) for begin, end in columns], above, clip=False)
    right = _wide(rows, flagged.nonzero()[0], 2 * inch / DPI)
    _bars(axes, [((1, begin), (1, end)) for begin, end in right], aside, clip=False)
    if DPI / inch >= 4:
        thick = min(3 * MARK, 72 / inch / 3)
        places = np.argwhere(flagged & np.isfinite(grid.values))
        cells = [((x[k], row + 1), (x[k + 1], row + 1)) for row, k in places if x[k + 1] - x[k] >= 2 * pixel]
        _bars(axes, cells, axes.transData + ScaledTranslation(0, thick / 2 / 72, scale), thick=thick)


def _wide(ends: FloatArray, places: NDArray[np.intp], least: float) -> Iterable[Bounds]:
    """From where to where marks go: as wide as what they mark, but wide enough to be visible."""
    for place in sorted(set(places.tolist())):
        begin, end = float(ends[place]), float(ends[place + 1])
        more = max(0.0, least - (end - begin)) / 2
        yield begin - more, end + more


def _bars(axes: Axes, segments: Sequence[Segment], where: Transform, *, clip: bool = True, thick: float = MARK) -> None:
    marks = LineCollection(segments, colors=MAGENTA, linewidths=thick, transform=where, clip_on=clip, zorder=4, capstyle="butt")
    axes.add_collection(marks, autolim=False)


# The lines


def _panel(axes: Axes, lines: Lines, title: str, names: dict[str, str]) -> None:
    shown = [name for name in names if _any(lines, name)]
    for name, width in zip(shown, (2.2, 1.0), strict=False):  # where there is no clipping, one line covers the other
        values = lines.values[name]
        known = np.pad(np.isfinite(values), 1)
        alone = known[1:-1] & ~known[:-2] & ~known[2:]  # has no line to a neighbour
        label = names[name] if len(names) > 1 else None
        [line] = axes.plot(lines.steps, values, linewidth=width if len(shown) > 1 else 1.0, label=label)
        axes.plot(lines.steps[alone], values[alone], ".", color=line.get_color(), markersize=4 * width)
    flagged = np.any([lines.nonfinite[name] for name in shown], axis=0)
    if flagged.any():
        steps = lines.steps[flagged]
        _bars(axes, [((step, 0.88), (step, 1)) for step in steps], axes.get_xaxis_transform(), thick=1.5)
        axes.plot([], [], color=MAGENTA, linewidth=1.5, label="NaN or Inf")
    if len(names) > 1 or flagged.any():
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=3, fontsize=7.5, frameon=False, borderpad=0, borderaxespad=0.2)
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    _values(axes, np.concatenate([lines.values[name] for name in shown]), log="norm" in names)


def _spread(axes: Axes, layer: str, found: LayerMoments) -> None:
    """Mean and standard deviation over the elements of a layer's gradient: a line, and a band of one deviation around it."""
    known = np.isfinite(found.mean) & np.isfinite(found.stddev)
    steps, mean, stddev = found.steps[known], found.mean[known], found.stddev[known]
    axes.plot(steps, mean, linewidth=1.0, marker="." if len(steps) == 1 else "", label="mean")
    axes.fill_between(steps, mean - stddev, mean + stddev, alpha=0.25, linewidth=0, label="one standard deviation around it")
    if found.nonfinite.any():
        _bars(axes, [((step, 0.88), (step, 1)) for step in found.steps[found.nonfinite]], axes.get_xaxis_transform(), thick=1.5)
        axes.plot([], [], color=MAGENTA, linewidth=1.5, label="NaN or Inf")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=3, fontsize=7.5, frameon=False, borderpad=0, borderaxespad=0.2)
    part = ",\nthis rank's part" if found.sharded else ""
    axes.set_ylabel(f"Elements of\n{short(layer, 24)}{part}")
    axes.grid(alpha=0.3)
    _values(axes, np.concatenate([mean - stddev, mean + stddev]), log=False)


def _acted(axes: Axes, marks: Sequence[Happened]) -> None:
    """A dashed line at each action; one that was not done is magenta."""
    for one in marks:
        colour = "0.25" if one.result == "done" else MAGENTA
        axes.axvline(one.step, color=colour, linestyle=(0, (4, 3)), linewidth=1.0, zorder=1.5, gid="action")


def _told(marks: Sequence[Happened]) -> list[str]:
    """The same in words, the last `TOLD` of them."""
    said = [f"{short(one.name)}: {short(one.action)} {one.result} at step {one.step}" for one in marks[-TOLD:]]
    earlier = [f"{len(marks) - TOLD} earlier ones"] if len(marks) > TOLD else []
    return [f"Dashed: {', '.join([*earlier, *said])}"] if said else []


def _values(axes: Axes, values: FloatArray, *, log: bool) -> None:
    """The vertical axis: logarithmic for norms, if they differ enough to have ticks there."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if not finite.size:
        axes.yaxis.set_major_locator(NullLocator())
    elif log and positive.size and positive.max() >= 5 * positive.min():
        axes.set_yscale("log")
        axes.set_ylim(positive.min() / 1.2, positive.max() * 1.2)
        _log_ticks(axes.yaxis, positive.min(), positive.max(), 0.8)
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))


def _log_ticks(axis: Axis, low: float, high: float, inches: float) -> None:
    """Ticks that have room on an axis so long, and no labels between them."""
    short = math.log10(high / low) <= 1.8
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if short else (1,), numticks=max(2, int(4 * inches))))
    axis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(99, 99)))
    axis.set_minor_locator(NullLocator())


# What is written


def _steps(axes: Axes, ends: Bounds) -> None:
    """The horizontal axis of all panels: steps with all of their digits."""
    axes.set_xlim(*ends)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10), min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:.0f}"))
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("optimizer step")


def _absent(grid: Grid, ends: Bounds) -> Iterable[str]:
    x = edges(grid.steps)
    if len(x) and ((np.isnan(grid.values) & ~grid.nonfinite).any() or ends[0] < x[0] or x[-1] < ends[1]):
        yield "Grey: no value"


def _title(status: Status) -> str:
    rank = f"rank {status.rank}" + (f" of {status.world_size}" if status.world_size > 1 else "")
    state = f": {status.state or 'state unknown'}" + ("" if status.step is None else f" at step {status.step:.0f}")
    return f"Run {short(status.run, 80)}, {rank}{state}"


def _about(grid: Grid, view: str) -> Iterable[str]:
    yield "The whole run" if view == "whole" else "The most recent part of the run"
    if grid.stride > 1:
        yield f"A column is {grid.stride} records and shows the value that is farthest from 0; lines are means"


def _prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a point."""
    same = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 - by characters, up to the last point
    return same[: same.rfind(".") + 1]


def short(name: str, most: int = 40) -> str:
    """A name as it is written: of long ones the beginning and the end, without lines, and no mathematics."""
    name = re.sub(
        r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", name.encode("utf-8", "replace").decode()
    )  # half a character has no picture
    text = name if len(name) <= most else f"{name[: most // 2 - 2]}...{name[1 - most // 2 :]}"
    return text.replace("$", r"\$")
