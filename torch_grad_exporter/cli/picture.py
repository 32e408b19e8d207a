"""A run as a PNG: the heatmap of all layers, and below it the run's lines, over the same steps. Needs matplotlib."""

from __future__ import annotations

import io
import os
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, LogLocator, MaxNLocator, NullLocator

from torch_grad_exporter.collectors.outcomes import ActionMark
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.outputs.live import saved
from torch_grad_exporter.outputs.live.saved import BoolArray, Grid, Lines, Saved

# Inches: the width, a panel, all that is written around panels, a row of the heatmap with a name, and the heatmap's limits.
# Above `HIGHEST` it is only as high as to have a pixel for each layer.
DPI = 150
WIDTH, PANEL, FRAME = 11.0, 1.25, 1.2
ROW, BROAD_ROW = 0.17, 0.3
LOWEST, HIGHEST, TALLEST = 0.9, 4.2, 16.0

MAGENTA, GREY = "magenta", "0.8"
NAMED_ACTIONS = 4  # below the picture


@dataclass(frozen=True, slots=True)
class HeatmapStyle:
    """The look of a quantity. `limits`: of the colours, None for those of the values. `of_norm`: may be of a rank's part."""

    title: str
    unit: str
    colours: str
    limits: tuple[float, float] | None = None
    of_norm: bool = False


_STYLES = {
    "norm": HeatmapStyle("L2 norm of each layer's gradient, before clipping", "L2 norm", "viridis", of_norm=True),
    "zero_ratio": HeatmapStyle("Elements of each layer's gradient that are exactly 0", "share of elements", "cividis"),
    "dead_ratio": HeatmapStyle("Dead units of each layer", "share of units", "cividis", (0.0, 1.0)),
    "zscore": HeatmapStyle("z-score of the logarithm of each layer's norm", "robust sigmas", "RdBu_r", (-6.0, 6.0), of_norm=True),
}

_PANELS = (
    ("Global\nL2 norm", {"norm": "before clipping", "norm_after_clip": "after clipping"}),
    ("Loss", {"loss": "loss"}),
    ("Step time,\nseconds", {"step_seconds": "step time"}),
)


def drawn(run: Saved, quantity: str, view: str, moments: Sequence[str] = (), values: Sequence[str] = ()) -> bytes:
    """Return the picture of a history that has been checked, with a heatmap of a quantity, in a view ("whole" or "recent"), as PNG.

    `moments`: layers that get a panel with the mean and the standard deviation of their gradient. `values`: logged values with one.
    """
    grid, lines, logged = saved.grid(run, quantity, view), saved.lines(run, view), saved.logged(run, view)
    known = {name for name in lines.values if np.isfinite(lines.values[name]).any() or lines.nonfinite[name].any()}
    panels = [(title, labels) for title, labels in _PANELS if known & labels.keys()]
    high = max(min(max(BROAD_ROW * len(grid.layers), LOWEST), HIGHEST), min(len(grid.layers) / DPI, TALLEST))
    heights = [high] + [PANEL] * (len(panels) + len(moments) + len(values))
    with mpl.rc_context({"font.size": 9, "axes.titlesize": 10, "xtick.labelsize": 8, "ytick.labelsize": 8}):
        figure = Figure(figsize=(WIDTH, FRAME + sum(heights)), dpi=DPI, layout="constrained")
        rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
        heatmap, *below = rows[:, 0]
        first, last = _step_axis(rows[-1, 0], grid, lines.steps, logged.steps if values else np.zeros(0))
        notes = ["The whole run" if view == "whole" else "The most recent part of the run"]
        if grid.stride > 1:
            notes.append(f"A column is {grid.stride} records and shows the value that is farthest from 0; lines are means")
        notes += _heatmap(figure, heatmap, grid, _STYLES[quantity], high)
        for axes, (title, labels) in zip(below, panels, strict=False):
            _panel(axes, lines, title, {name: label for name, label in labels.items() if name in known}, several=len(labels) > 1)
        for axes, layer in zip(below[len(panels) :], moments, strict=False):
            _spread(axes, layer, *saved.moments(run, layer, view))
        for axes, name in zip(below[len(panels) + len(moments) :], values, strict=True):
            _logged(axes, logged, name)
        actions = [action for action in saved.actions(run) if first <= action.step <= last]
        notes += _actions(below, actions)
        figure.align_ylabels(below)
        status = saved.status(run)
        rank = f"rank {status.rank}" + (f" of {status.world_size}" if status.world_size > 1 else "")
        state = f"{status.state or 'state unknown'}" + ("" if status.step is None else f" at step {status.step:.0f}")
        figure.suptitle(f"Run {short(status.run, 80)}, {rank}: {state}", fontsize=11)
        figure.supxlabel(textwrap.fill("".join(f"{note}. " for note in notes), 190), x=0.01, ha="left", fontsize=7.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph", UserWarning)  # the font may lack a script: boxes
            content = io.BytesIO()
            figure.savefig(content, format="png")
        return content.getvalue()


def _step_axis(axes: Axes, grid: Grid, *more: FloatArray) -> tuple[float, float]:
    """Set the horizontal axis of all panels, and return its limits."""
    steps = np.concatenate([_edges(grid.steps), *more])
    first, last = (steps.min(), steps.max()) if len(steps) else (0.0, 1.0)
    if first == last:
        first, last = first - 0.5, last + 0.5
    axes.set_xlim(first, last)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10), min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:.0f}"))
    axes.set_xlabel("optimizer step")
    return first, last


def _edges(steps: FloatArray) -> FloatArray:
    """Return where columns of the heatmap begin and end, shape (n + 1,): halfway between their steps.

    Of columns of the same step, which a gradient scaler skipped, the first ones have no width.
    """
    if not len(steps):
        return np.zeros(0)
    halves = np.diff(steps) / 2 if len(steps) > 1 else np.array([0.5])
    outside = halves[halves > 0] if (halves > 0).any() else np.array([0.5])
    return np.concatenate([[steps[0] - outside[0]], steps[:-1] + halves[: len(steps) - 1], [steps[-1] + outside[-1]]])


def _heatmap(figure: Figure, axes: Axes, grid: Grid, style: HeatmapStyle, high: float) -> list[str]:
    """Draw the heatmap, `high` inches high, and return notes on it."""
    axes.set_title(style.title, loc="left")
    axes.set_facecolor(GREY)
    if not grid.values.size:
        axes.text(0.5, 0.5, "no sample yet", ha="center", va="center", transform=axes.transAxes)
        axes.yaxis.set_major_locator(NullLocator())
        return []
    x, rows = _edges(grid.steps), np.arange(len(grid.layers) + 1.0)
    norm = _colour_scale(grid, style)
    values = np.maximum(grid.values, norm.vmin) if grid.log and norm.vmin else grid.values  # 0 has the lowest colour
    image = axes.pcolormesh(x, rows, np.ma.masked_invalid(values), norm=norm, cmap=style.colours, rasterized=True)
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.03, aspect=max(5.0, 6 * high), label=style.unit)
    if not grid.log:
        bar.ax.yaxis.set_major_locator(MaxNLocator(max(2, min(6, int(2 * high)))))
    notes = _names(axes, grid, style, high)
    if grid.nonfinite.any():
        cells = np.ma.masked_where(~(grid.nonfinite & np.isnan(grid.values)), np.zeros(grid.values.shape))
        axes.pcolormesh(x, rows, cells, cmap=ListedColormap([MAGENTA]), rasterized=True)
        layers, columns = np.nonzero(grid.nonfinite & np.isfinite(grid.values))
        axes.plot((x[columns] + x[columns + 1]) / 2, layers + 0.85, "s", color=MAGENTA, markersize=3.5, linestyle="")
        notes.append("Magenta: NaN or Inf, as a whole cell, or as a dot in one that has finite values too")
    if (np.isnan(grid.values) & ~grid.nonfinite).any():
        notes.append("Grey: no value")
    return notes


def _colour_scale(grid: Grid, style: HeatmapStyle) -> Normalize:
    values = grid.values[np.isfinite(grid.values) & ((grid.values > 0) | (not grid.log))]
    if grid.log:
        # From the half decade below nearly all to the one above: a single dead layer does not flatten the others.
        halves = 2 * np.log10(np.quantile(values, (0.005, 0.999), method="nearest")) if values.size else np.array([-12.0, 0.0])
        low = np.floor(halves[0]) / 2
        return LogNorm(10**low, 10 ** max(low + 1, np.ceil(halves[1]) / 2))
    return Normalize(*(style.limits or (0.0, values.max(initial=0.01))))


def _names(axes: Axes, grid: Grid, style: HeatmapStyle, high: float) -> list[str]:
    """Write layers at the vertical axis, as many as there is room for, and return notes on them."""
    count = len(grid.layers)
    prefix = os.path.commonprefix(grid.layers) if count > 1 else ""  # noqa: RUF071 - by characters, up to the last point
    prefix = prefix[: prefix.rfind(".") + 1]
    every = int(np.ceil(count * ROW / max(high, ROW)))
    parts = [style.of_norm and name in grid.sharded for name in grid.layers]
    names = [f"{short(name[len(prefix) :])}{'*' * part}" for name, part in zip(grid.layers, parts, strict=True)]
    axes.set_ylim(count, 0)
    axes.set_yticks(np.arange(count)[::every] + 0.5, names[::every], fontsize=7)
    axes.set_ylabel("layer" if count == 1 else f"{count} layers")
    left_out = [f"of one layer in {every}"] * (every > 1) + [f"without '{short(prefix)}'"] * bool(prefix)
    notes = [f"Names: {', '.join(left_out)}"] if left_out else []
    return notes + [f"*: norm of this rank's part{' (all layers)' * all(parts)}"] * any(parts)


def _panel(axes: Axes, lines: Lines, title: str, labels: dict[str, str], *, several: bool) -> None:
    """Draw lines of the run. `several`: whether there may be more than one, so that a legend is needed."""
    for name, width in zip(labels, (2.2, 1.0), strict=False):  # where there is no clipping, one line covers the other
        values = lines.values[name]
        known = np.pad(np.isfinite(values), 1)
        alone = known[1:-1] & ~known[:-2] & ~known[2:]  # has no line to a neighbour
        [line] = axes.plot(
            lines.steps, values, linewidth=width if len(labels) > 1 else 1.0, label=labels[name] if several else None
        )
        axes.plot(lines.steps[alone], values[alone], ".", color=line.get_color(), markersize=4 * width)
    values = np.concatenate([lines.values[name] for name in labels])
    _finish(axes, title, lines.steps[np.any([lines.nonfinite[name] for name in labels], axis=0)], values, log="norm" in labels)


def _logged(axes: Axes, lines: Lines, name: str) -> None:
    """Draw a logged value, whose records are those of all names: it need not have one in each, or in this part of the run."""
    values = lines.values.get(name, np.zeros(0))
    nonfinite = lines.nonfinite.get(name, np.zeros(0, dtype=bool))
    there = np.isfinite(values) | nonfinite
    own = Lines(lines.steps[: len(values)][there], {name: values[there]}, {name: nonfinite[there]})
    _panel(axes, own, short(name, 24), {name: name}, several=False)


def _spread(axes: Axes, layer: str, moments: Lines, sharded: bool) -> None:
    """Draw mean and standard deviation over the elements of a layer's gradient: a line, and a band of one deviation around it."""
    known: BoolArray = np.isfinite(moments.values["mean"]) & np.isfinite(moments.values["stddev"])
    steps, mean, stddev = moments.steps[known], moments.values["mean"][known], moments.values["stddev"][known]
    axes.plot(steps, mean, linewidth=1.0, marker="." if len(steps) == 1 else "", label="mean")
    axes.fill_between(steps, mean - stddev, mean + stddev, alpha=0.25, linewidth=0, label="one standard deviation around it")
    title = f"Elements of\n{short(layer, 24)}" + (",\nthis rank's part" if sharded else "")
    nonfinite = moments.steps[moments.nonfinite["mean"] | moments.nonfinite["stddev"]]
    _finish(axes, title, nonfinite, np.concatenate([mean - stddev, mean + stddev]), log=False)


def _finish(axes: Axes, title: str, nonfinite: FloatArray, values: FloatArray, *, log: bool) -> None:
    """Mark steps whose values are not finite, and set legend and vertical axis of a panel with these values."""
    if len(nonfinite):
        top = np.full(len(nonfinite), 0.93)
        axes.plot(nonfinite, top, "|", color=MAGENTA, transform=axes.get_xaxis_transform(), label="NaN or Inf")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=3, fontsize=7.5, frameon=False, borderpad=0, borderaxespad=0.2)
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    positive = values[np.isfinite(values) & (values > 0)]
    if log and positive.size and positive.max() >= 5 * positive.min():
        axes.set_yscale("log")
        axes.set_ylim(positive.min() / 1.2, positive.max() * 1.2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if positive.max() < 60 * positive.min() else (1,), numticks=3))
        axes.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(99, 99)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)) if np.isfinite(values).any() else NullLocator())


def _actions(panels: Sequence[Axes], actions: Sequence[ActionMark]) -> list[str]:
    """Draw a dashed line at each action, magenta if it was not done, and return a note that names the last ones."""
    if not panels or not actions:
        return []
    for axes in panels:
        for action in actions:
            colour = "0.25" if action.result == "done" else MAGENTA
            axes.axvline(action.step, color=colour, linestyle=(0, (4, 3)), linewidth=1.0, zorder=1.5, gid="action")
    earlier = [f"{len(actions) - NAMED_ACTIONS} earlier ones"] * (len(actions) > NAMED_ACTIONS)
    named = [
        f"{short(action.name)}: {short(action.action)} {action.result} at step {action.step}" for action in actions[-NAMED_ACTIONS:]
    ]
    return [f"Dashed: {', '.join([*earlier, *named])}"]


def short(name: str, most: int = 40) -> str:
    """Return a name as it is written: the beginning and the end of a long one, on one line, and not as mathematics."""
    name = name.encode("utf-8", "replace").decode()  # a lone surrogate has no picture
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", name)
    text = name if len(name) <= most else f"{name[: most // 2 - 2]}...{name[1 - most // 2 :]}"
    return text.replace("$", r"\$")
