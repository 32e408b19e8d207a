"""The row of the dashboard "Gradients by layer" about `layer_times=`: where the time of forward and backward goes."""

from __future__ import annotations

from dashboards.generate import panels as draw
from dashboards.generate.panels import Panel, Query
from dashboards.generate.queries import KEPT, highest, of_run, over_range, rate, top
from dashboards.generate.tables import Column, rows

NOTHING = "Needs start_exporter(layer_times=True)"
SECONDS, STEPS = "torch_layer_seconds_total", "torch_layer_timed_steps_total"


def _lines() -> Panel:
    selector, by = of_run(SECONDS, KEPT), "run, layer, pass"
    of_a_step = highest(f"{rate(selector)} / ({rate(of_run(STEPS, KEPT))} > 0)", by)
    most = f"topk(20, {highest(f'increase({selector}[$__range] @ end())', by)})"
    text = (
        "Seconds of a sampled step that a layer's forward or backward takes, the 20 that take the most, without layers within it. "
        "On a GPU in the GPU's time. Of several ranks the slowest."
    )
    query = Query(f"{of_a_step} and on ({by}) {most}", "{{layer}} {{pass}} {{run}}")
    return draw.lines("Time of the layers in a step", text, "s", query, nothing=NOTHING, many=True).min(0)


def _slowest() -> Panel:
    def of_a_step(name: str) -> str:
        chosen = KEPT, f'pass="{name}"'
        return highest(f"{over_range(of_run(SECONDS, *chosen))} / ({over_range(of_run(STEPS, *chosen))} > 0)", "run, layer")

    together = f"sum by (run, layer) ({highest(over_range(of_run(SECONDS, KEPT)), 'run, layer, pass')})"
    most = top(20, together)
    queries = [Query(most), *(Query(f"{of_a_step(name)} and on (run, layer) {most}") for name in ("forward", "backward"))]
    columns = [
        Column("run", "Run", width=120), Column("layer", "Layer"),
        Column("Value #A", "All", "s", width=110), Column("Value #B", "Forward", "s", width=110),
        Column("Value #C", "Backward", "s", width=110),
    ]  # fmt: skip
    text = (
        "The layers that took the most time in the sampled steps of the time range, and the forward and backward of one step. A "
        "layer that is slow for its size is a place to look at first."
    )
    return rows("Slowest layers", text, queries, columns, nothing=NOTHING, order=["Run", "-All"])


def row() -> list[Panel]:
    """All of them."""
    return [_lines().span(12).height(10), _slowest().span(12).height(10)]
