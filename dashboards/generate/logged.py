"""The row about what the script or its framework logs: `exporter.log`."""

from __future__ import annotations

from dashboards.generate import panels as draw
from dashboards.generate.panels import Panel, Query
from dashboards.generate.queries import events, of_rank

SELECTED = 'name=~"$value"'


def _values() -> Panel:
    text = (
        "A panel for each name that exporter.log() or the framework gives: the last value, mean of the chosen ranks. A gap is a "
        "value that was NaN or Inf."
    )
    mean = f"avg by (run) ({of_rank('torch_train_value', SELECTED)} > -Inf < +Inf)"
    nothing = "Needs exporter.log({...}), or a framework that logs"
    panel = draw.lines("$value", text, "short", Query(mean, "{{run}}"), nothing=nothing)
    return draw.repeated(panel, "value", 4)


def _nonfinite() -> Panel:
    text = "Logged values that were NaN or Inf, in each interval, over the chosen ranks."
    query = Query(events(of_rank("torch_train_value_nonfinite_total", SELECTED), "run, name"), "{{name}} {{run}}")
    nothing = "Needs exporter.log({...}), and a NaN or Inf"
    return draw.bars(draw.lines("NaN and Inf in logged values", text, "short", query, nothing=nothing, many=True))


def row() -> list[Panel]:
    """All of them."""
    return [_values().span(24).height(7), _nonfinite().span(24).height(6)]
