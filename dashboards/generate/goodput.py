"""The dashboard "Goodput": how much of the time of a run went into steps that count, and where the rest went."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import panels as draw
from dashboards.generate.board import Row, board
from dashboards.generate.health import NAMED
from dashboards.generate.panels import CLICKED, Panel, Query, link, steps
from dashboards.generate.queries import equal, highest, of_rank, of_run, over_range, rate, top

UID = "torch-grad-goodput"
TIME, EARLIER = "torch_train_time_seconds_total", "torch_train_earlier_time_seconds"
OVERVIEW = link("Training overview", "torch-grad-training", run=CLICKED)
STEP, RECOMPUTED = equal("cause", "step"), equal("cause", "recomputed")
NO_STATE = "Needs start_exporter(state_dir=...)"
NO_STEP = "No step in this time range after the first"
NO_FLOPS = "Needs start_exporter(flops_per_step=...)"


def _share(cause: str) -> str:
    """The share of a cause in the time range."""
    return f"sum by (run) ({over_range(of_run(TIME, cause))}) / sum by (run) ({over_range(of_run(TIME))})"


def _goodput() -> Panel:
    text = "Share of the time of all ranks' processes, within the time range of the dashboard, that went into steps."
    query = Query(top(NAMED, _share(STEP)), "{{run}}")
    panel = draw.number("Goodput", text, "percentunit", query, nothing=draw.NO_RUN + draw.ONE_SCRAPE).decimals(0)
    return panel.thresholds(steps(("red", None), ("orange", 0.5), ("green", 0.8)))


def _whole() -> Panel:
    text = (
        "Share of the time since the start of the run that went into steps, mean of the ranks. With state_dir= over all of its "
        "processes and the time between them, else of the present ones."
    )
    query = Query(top(NAMED, f"avg by (run) ({of_run('torch_train_goodput_ratio')})"), "{{run}}")
    panel = draw.number("Goodput since the start", text, "percentunit", query, nothing=NO_STEP).decimals(0)
    return panel.thresholds(steps(("red", None), ("orange", 0.5), ("green", 0.8)))


def _recomputed() -> Panel:
    text = "Share of the time within the time range that went into steps which an earlier process had done already."
    query = Query(top(NAMED, _share(RECOMPUTED)), "{{run}}")
    panel = draw.number("Recomputed", text, "percentunit", query, nothing=NO_STATE).decimals(0)
    return panel.thresholds(steps(("green", None), ("orange", 0.1)))


def _restarts() -> Panel:
    query = Query(top(NAMED, highest(of_run("torch_train_restarts"), "run")), "{{run}}")
    text = "Earlier processes of the run, by the state in state_dir=."
    return draw.plain(draw.number("Restarts", text, "short", query, nothing=NO_STATE))


def _by_cause() -> Panel:
    text = "Where the time of the chosen ranks went, all runs together: the causes add up to the wall clock of their processes."
    selector = of_rank(TIME)
    share = f"sum by (cause) ({rate(selector)}) / on () group_left () sum({rate(selector)})"
    panel = draw.lines("Time by cause", text, "percentunit", Query(share, "{{cause}}"), many=True)
    return draw.stacked(panel).min(0).max(1)


def _over_time() -> Panel:
    text = "Share of each run's time in steps, in each interval. GoodputLow fires below the dashed line, over an hour."
    query = Query(f"sum by (run) ({rate(of_run(TIME, STEP))}) / sum by (run) ({rate(of_run(TIME))})", "{{run}}")
    panel = draw.lines("Goodput over time", text, "percentunit", query).min(0).max(1)
    return draw.limit(panel, 0.5).data_links([OVERVIEW])


def _earlier() -> Panel:
    text = "Time of the run's earlier processes by cause, over all ranks; down is the time between them."
    query = Query(f"sum by (run, cause) ({of_rank(EARLIER)}) > 0", "{{cause}} {{run}}")
    return draw.lines("Earlier processes", text, "s", query, nothing=NO_STATE, many=True).min(0)


def _mfu() -> Panel:
    text = "What a step's operations are of those that the device could do in its time, mean of the chosen ranks."
    query = Query(f"avg by (run) ({of_rank('torch_train_mfu_ratio')})", "{{run}}")
    panel = draw.lines("MFU", text, "percentunit", query, nothing=f"{NO_FLOPS}, and a known peak")
    return panel.min(0).axis_soft_max(0.1).data_links([OVERVIEW])


def _flops() -> Panel:
    text = "Floating-point operations of all ranks per second, by the number that was given for a step."
    query = Query(f"sum by (run) ({rate(of_run('torch_train_model_flops_total'))})", "{{run}}")
    return draw.lines("Model FLOPs", text, "flops", query, nothing=NO_FLOPS).min(0).data_links([OVERVIEW])


def dashboard() -> Dashboard:
    """The whole dashboard. The first row is one screen of 1440 x 900, 18 rows of the grid."""
    numbers = [panel.span(6).height(4) for panel in (_goodput(), _whole(), _recomputed(), _restarts())]
    content = [
        Row("Where the time went", [*numbers, _by_cause().span(12).height(13), _over_time().span(12).height(13)]),
        Row("Restarts and operations", [panel.span(8) for panel in (_earlier(), _mfu(), _flops())]),
    ]
    text = "How much of the time of a run went into steps that count, and where the rest went."
    return board(UID, "Goodput", text, content)
