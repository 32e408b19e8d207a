"""The dashboard "Exporter": what watching costs, and whether it sees."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import acting
from dashboards.generate import panels as draw
from dashboards.generate.board import Row, board
from dashboards.generate.panels import Panel, Query
from dashboards.generate.queries import equal, events, ever, in_order, of_rank, of_run, rate, recorded, with_rank_name
from dashboards.generate.tables import Column, rows

UID = "torch-grad-exporter"
RANK = "{{run}} rank {{rank}}"
ROW = "{{run}} {{rank_name}}"
MODES = {1: ("After the backward", "green"), 2: ("At the step", "orange")}
FAILED = {0: ("Failed", "red")}
ANSWER = {1: ("Up", "green"), 0: ("Down", "red")}


def _overhead() -> Panel:
    text = (
        "Share of the training time over the last 1,000 steps, and the budget. The interval adapts to stay below "
        "the budget; a fixed `every` has none. Without what the first samples took, until that is paid back."
    )
    ratio, lent = of_rank("torch_grad_exporter_overhead_ratio"), of_rank("torch_grad_exporter_startup_overhead_ratio")
    panel = draw.lines(
        "Overhead", text, "percentunit",
        Query(f"clamp_min({ratio} - {lent}, 0) or {ratio}", RANK),
        Query(f"max({of_rank('torch_grad_exporter_overhead_budget_ratio')})", "largest budget"), many=True,
    )  # fmt: skip
    budget = [
        draw.setting("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
        draw.setting("color", {"mode": "fixed", "fixedColor": "text"}),
    ]
    return panel.min(0).axis_soft_max(0.05).override_by_query("B", budget)


def _cost_of_a_sample() -> Panel:
    seconds, samples = (rate(of_rank(f"torch_grad_exporter_{name}_total")) for name in ("overhead_seconds", "captures"))
    text = "Time that the training thread and devices spend on the exporter, per sample. It grows with the number of layers."
    return draw.lines("Cost of a sample", text, "s", Query(f"{seconds} / ({samples} > 0)", RANK), many=True).min(0)


def _intervals() -> Panel:
    text = (
        "Steps from one sample to the next, and from one timed step to the next. A very long interval misses faults "
        "of a single step: raise the budget or leave layers out."
    )
    panel = draw.lines(
        "Sampling interval", text, "count:steps",
        Query(of_rank("torch_grad_exporter_sampling_interval_steps"), f"{RANK} samples"),
        Query(of_rank("torch_grad_exporter_timing_interval_steps"), f"{RANK} times"), many=True,
    )  # fmt: skip
    return draw.logarithmic(panel.min(1))


def _samples() -> Panel:
    panel = draw.lines(
        "Samples", "Samples per second, and samples that were due and not taken or not delivered.", "count:/s",
        Query(rate(of_rank("torch_grad_exporter_captures_total")), f"{RANK} taken"),
        Query(f"sum without (reason) ({rate(of_rank('torch_grad_exporter_captures_skipped_total'))})", f"{RANK} skipped"),
        many=True,
    )  # fmt: skip
    return panel.min(0)


def _age_of_sample() -> Panel:
    counted = recorded("rank:torch_train_steps:total", 'rank=~"$rank"')
    sampled = f"sum by (run, rank) (max by (run, rank, optimizer) ({of_rank('torch_grad_sample_step')}))"
    behind = f"clamp_min({counted} - {sampled}, 0)"
    text = "Optimizer steps since the last sample. If it keeps growing, the exporter no longer sees any gradient."
    nothing = "Not known: this needs the recording rules, and a sample"
    return draw.whole(draw.lines("Steps since the last sample", text, "short", Query(behind, RANK), nothing=nothing, many=True))


def _mode() -> Panel:
    numbers = {"backward": 1, "optimizer": 2}
    each = " or ".join(
        f"({of_rank('torch_grad_exporter_capture_mode', equal('mode', name))} == 1) * {number}" for name, number in numbers.items()
    )
    text = (
        "Where the exporter reads gradients. At the step is the last resort, as under compiled "
        "autograd: norms are those after clipping."
    )
    ordered = in_order(with_rank_name(f"max by (run, rank) ({each})"), "run", "rank")
    query, known = Query(ordered, ROW), ever(of_rank("torch_grad_exporter_capture_mode"))
    return draw.timeline("Capture mode", text, query, MODES, draw.NO_RUN, ever=known)


def _layers() -> Panel:
    panel = draw.lines(
        "Layers", "Layers shown, and layers that the cap on layers (max_layers) shows only as part of a group.", "short",
        Query(f"max by (run) ({of_rank('torch_grad_exporter_layers')})", "{{run}} shown"),
        Query(f"max by (run) ({of_rank('torch_grad_exporter_layers_folded')}) > 0", "{{run}} folded"),
    )  # fmt: skip
    return panel.min(0)


def _series() -> Panel:
    text = "Time series of each target in its previous scrape. OpenMetrics advises care above 10,000."
    query = Query(of_rank("torch_grad_exporter_series"), RANK)
    panel = draw.lines("Series", text, "short", query, nothing=draw.NO_RUN + draw.ONE_SCRAPE)
    return draw.limit(panel.min(0), 10_000)


def _errors() -> Panel:
    query = Query(events(of_rank("torch_grad_exporter_errors_total"), "run, source"), "{{run}} {{source}}")
    text = "Failures inside the exporter in each interval, by source. The log has the traceback, and training goes on regardless."
    return draw.bars(draw.lines("Errors", text, "short", query, nothing="No error, or none is known", many=True))


def _collectors() -> Panel:
    success = f"min by (run, collector) ({of_rank('torch_grad_exporter_collector_success')})"
    text = "Collectors that failed on one of the chosen ranks, and when. A collector that fails costs only its own metrics."
    query = Query(f"{success} == 0", "{{collector}} {{run}}")
    return draw.timeline("Collectors", text, query, FAILED, "No collector fails")


def _durations() -> Panel:
    query = Query(f"max by (run, collector) ({of_rank('torch_grad_exporter_collector_duration_seconds')})", "{{collector}} {{run}}")
    text = "Time of each collector at a scrape, on the slowest chosen rank. It runs in a thread of the server, not in the training."
    return draw.lines("Collectors' time", text, "s", query, many=True).min(0)


def _scrape(name: str) -> str:
    """What Prometheus notes of the scrapes of the chosen ranks: it has no rank unless discovery gives one."""
    info = f"max by (job, instance, run, rank) ({of_rank('torch_train_info')})"
    return f'{info} * on (job, instance) group_left () max by (job, instance) ({name}{{job=~"$job"}})'


def _scrapes() -> Panel:
    text = (
        "How long a scrape takes by Prometheus' measure, and how many samples it brings. Near the scrape timeout, targets go down."
    )
    panel = draw.lines(
        "Scrapes", text, "s",
        Query(_scrape("scrape_duration_seconds"), RANK), Query(_scrape("scrape_samples_scraped"), f"{RANK} samples"), many=True,
    )  # fmt: skip
    right = [draw.setting("custom.axisPlacement", "right"), draw.setting("unit", "count:samples")]
    return panel.min(0).override_by_query("B", right)


def _targets() -> Panel:
    known = f"group by (job, instance, run, rank) (last_over_time({of_run('torch_train_world_size')}[$__range] @ end()))"
    answers = 'max by (job, instance) (up{job=~"$job"})'
    up = f"({known} * on (job, instance) group_left () {answers})"
    query = Query(in_order(with_rank_name(up), "run", "rank"), ROW)
    text = "Whether each target answers; a rank that was restarted may have two. A gap is a time without the target."
    return draw.timeline("Targets", text, query, ANSWER, "No target in this time range; a run that only pushes has none")


def _versions() -> Panel:
    labels = ("run", "rank", "host", "local_rank", "devices", "torch_version", "exporter_version", "python_version")
    titles = ("Run", "Rank", "Host", "Local rank", "Devices", "PyTorch", "Exporter", "Python")
    widths = {"rank": 70, "local_rank": 100, "torch_version": 130, "exporter_version": 110, "python_version": 100}
    columns = [Column(label, title, width=widths.get(label)) for label, title in zip(labels, titles, strict=True)]
    text = "Versions and devices of each rank. Ranks of one run with different versions are a fault of the installation."
    query = Query(f"max by ({', '.join(labels)}) ({of_rank('torch_train_info')})")
    return rows("Versions", text, [query], columns, nothing="No run is being scraped now", order=["Run", "Rank"])


def dashboard() -> Dashboard:
    """The whole dashboard."""
    cost = [_overhead(), _cost_of_a_sample(), _intervals(), _samples(), _age_of_sample(), _mode()]
    health = [_collectors(), _durations(), _errors(), _layers()]
    scraping = [panel.span(8) for panel in (_targets(), _scrapes(), _series())]
    content = [
        Row("Cost and sampling", [panel.span(12) for panel in cost]),
        Row("Collectors and layers", [panel.span(12) for panel in health]),
        Row("Scraping", [*scraping, _versions().span(24).height(7)]),
        Row("Actions and notifications", [panel.span(12) for panel in acting.row()], collapsed=True),
    ]
    return board(UID, "Exporter", "What the exporter costs, and whether it sees the training.", content)
