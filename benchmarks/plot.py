"""The plot of the overheads: a row per monitor, a mark per workload, on a logarithmic axis.

Drawn on white, so that it can be read on a dark page too, and without a date or a random name in it: the same results give
the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.monitors import MONITORS
from benchmarks.workloads import WORKLOADS

LEAST = 0.1
"""Percent at the left edge. Less, or less than nothing, is drawn there: a logarithm has no place for it."""

BUDGET = 1.0
MARKS = ("o", "s", "^", "D")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8c3d7a")  # told apart by who cannot tell red from green
INK = "#24292f"

Cells = Mapping[str, Mapping[str, Any]]


def draw(cells: Cells, path: Path) -> None:
    """Writes the plot as SVG. Needs matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - optional

    mpl.use("svg")
    settings = {
        "svg.hashsalt": "overhead", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = _figure(cells)
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
    # Line ends that the formatter of no editor would change.
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def rows(cells: Cells) -> list[tuple[str, str, str]]:
    """Title, monitor and arm of each row from top to bottom, the control first."""
    measured = {name for row in cells.values() for name, cell in row.items() if "monitored" in cell}
    found = [(MONITORS[name].title.replace("`", ""), name, "monitored") for name in MONITORS if name in measured]
    return [("no monitor (control)", "exporter", "control"), *found]


def _figure(cells: Cells) -> Any:  # noqa: ANN401 - matplotlib is optional
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    shown = rows(cells)
    figure = Figure(figsize=(9, 1.3 + 0.36 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, mark, colour) in enumerate(zip(cells, MARKS, COLOURS, strict=False)):
        offset = 0.18 * (place - (len(cells) - 1) / 2)
        axes.plot([], [], mark, color=colour, label=WORKLOADS[name].title, markersize=5)
        for row, (_, monitor, arm) in enumerate(shown):
            comparison = cells[name].get(monitor, {}).get(arm)
            if comparison is not None:
                _mark(axes, row + offset, comparison, mark, colour)
    axes.axvline(BUDGET, color="#6e7781", linewidth=1, linestyle="--", zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(left=0.8 * LEAST)
    axes.set_yticks(range(len(shown)), [title for title, _, _ in shown])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.grid(axis="x", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("overhead per step, with 95 % interval; open: cannot be told from 0")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _mark(axes: Any, height: float, comparison: Mapping[str, float], mark: str, colour: str) -> None:  # noqa: ANN401 - as above
    low, middle, high = (max(100 * comparison[key], LEAST) for key in ("low", "overhead", "high"))
    axes.plot([low, high], [height, height], color=colour, linewidth=1.2)
    axes.plot([middle], [height], mark, color=colour, markersize=5, markerfacecolor=colour if comparison["low"] > 0 else "white")
