"""The dashboard "Training overview": is the run well, and if not, where to look."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.board import Row, board
from dashboards.generate.health import banner
from dashboards.generate.panels import Panel, Query, link, steps, url
from dashboards.generate.queries import highest, increase, of_rank, of_run, rate
from dashboards.generate.tables import Column, rows

UID = "torch-grad-training"
TO_LAYERS = link("Which layer", "torch-grad-layers")
TO_RANKS = link("Which rank", "torch-grad-ranks")
TO_RESOURCES = link("Which device", "torch-grad-resources")

SEVERITIES = {"critical": ("critical", "red"), "warning": ("warning", "orange"), "info": ("info", "blue")}


def _alerts() -> Panel:
    firing = 'ALERTS{alertstate="firing", run=~"$run"}'
    since = f'1000 * ALERTS_FOR_STATE{{run=~"$run"}} and ignoring (alertstate) {firing}'
    to_layer = url("torch-grad-layers", "var-layer=${__data.fields.layer}", run="${__data.fields.run}")
    to_rank = url("torch-grad-ranks", "var-rank=${__data.fields.rank}", run="${__data.fields.run}")
    columns = [
        Column("alertname", "Alert", width=240),
        Column("severity", "Severity", width=90, texts=SEVERITIES),
        Column("run", "Run"),
        Column("layer", "Layer", link=to_layer),
        Column("rank", "Rank", link=to_rank, width=70),
        Column("device", "Device", width=80),
        Column("Value", "Since", unit="dateTimeFromNow", width=140),
    ]
    text = "The alerts that fire for these runs. A layer or rank leads to its own view."
    return rows("Firing alerts", text, [Query(since)], columns, nothing="No alert is firing for these runs")


def _runs() -> Panel:
    queries = [
        Query(of_run("torch_grad_sample_step")),
        Query(rate(of_run("torch_train_steps_total"))),
        Query(of_run("torch_train_epoch")),
        Query(of_run("torch_train_world_size")),
        Query(f"time() - {of_run('torch_train_start_timestamp_seconds')}"),
    ]
    columns = [
        Column("run", "Run", link=url(UID, run="${__data.fields.run}")),
        Column("Value #A", "Step", "locale"),
        Column("Value #B", "Steps a second", "cps"),
        Column("Value #C", "Epoch", "none"),
        Column("Value #D", "Ranks", "none"),
        Column("Value #E", "Runs for", "s"),
    ]
    text = "The step of each run as of its last sample, and its speed. The name of a run restricts this dashboard to that run."
    return rows("Runs", text, queries, columns, nothing="No run is being scraped now")


def _loss() -> Panel:
    loss = of_rank("torch_train_loss")
    text = "Observed loss, mean of the chosen ranks: each rank has its own batch. A gap is a loss that was NaN or Inf."
    nothing = "No loss: give it with exporter.observe(loss=...)"
    query = Query(f"avg by (run) ({loss} > -Inf < +Inf)", "{{run}}")
    return draw.lines("Loss", text, "short", query, nothing=nothing).data_links([TO_LAYERS])


def _norm() -> Panel:
    text = (
        "L2 norm over all parameters at the last sampled step, before clipping and as the optimizer saw it. For "
        "sharded gradients without observe(grad_norm=...) it is the root mean square of 5 minutes, from the "
        "recording rules."
    )
    panel = draw.lines(
        "Gradient norm before and after clipping", text, "short",
        Query(ask.global_norm(), "{{run}} {{optimizer}} before"),
        Query(highest(of_run("torch_grad_global_norm_after_clip"), "run, optimizer"), "{{run}} {{optimizer}} after"),
        nothing="No gradient was sampled in this time range",
    )  # fmt: skip
    return draw.logarithmic(panel).data_links([TO_LAYERS])


def _learning_rate() -> Panel:
    query = Query(highest(of_run("torch_train_learning_rate"), "run, optimizer, group"), "{{run}} {{optimizer}} group {{group}}")
    return draw.lines("Learning rate", "Of each parameter group of each optimizer.", "sci", query, nothing="No optimizer step yet")


def _mixed_precision() -> Panel:
    text = (
        "Backward passes without an optimizer step, in each interval; on the right the scale of the gradient "
        "scaler. Skips in a row while the scale keeps falling mean that gradients are not finite at any scale."
    )
    skipped = f"max by (run) ({increase(of_run('torch_train_skipped_steps_total'))})"
    panel = draw.lines(
        "Skipped steps and loss scale", text, "short",
        Query(skipped, "{{run}} skipped"),
        Query(highest(of_run("torch_train_loss_scale"), "run"), "{{run}} scale"),
    )  # fmt: skip
    right = [draw.setting("custom.axisPlacement", "right"), draw.setting("custom.scaleDistribution", {"type": "log", "log": 2})]
    return panel.override_by_query("B", right).min(0).data_links([TO_LAYERS])


def _step_time() -> Panel:
    bucket = of_rank("torch_train_step_duration_seconds_bucket")
    text = (
        "Time from one optimizer step to the next, over all steps of the chosen ranks: median, 99th percentile, "
        "longest of the last 128."
    )
    panel = draw.lines(
        "Step time", text, "s",
        Query(ask.quantile(0.5, bucket, "run"), "{{run}} median"),
        Query(ask.quantile(0.99, bucket, "run"), "{{run}} 99 %"),
        Query(highest(of_rank("torch_train_slowest_step_seconds"), "run"), "{{run}} longest"),
        nothing="No two steps in this time range",
    )  # fmt: skip
    return draw.logarithmic(panel).data_links([TO_RANKS])


def _step_heatmap() -> Panel:
    query = Query(f"sum by (le) ({increase(of_rank('torch_train_step_duration_seconds_bucket'))})", "{{le}}")
    text = "Number of steps by duration. A second band is work that only some steps do, such as a checkpoint or an evaluation."
    panel = draw.distribution("Distribution of step times", text, "s", query, nothing="No step in this time range")
    return panel.links([draw.panel_link("Step times of each rank", "torch-grad-ranks")])


def _phases() -> Panel:
    seconds = rate(of_rank("torch_train_phase_seconds_total"))
    text = (
        "Share of the training time in each phase, over the chosen ranks. `data` is the wait for the loader, if "
        "watch_loader wraps it; `outside` is everything else between steps, such as logging, evaluation and "
        "checkpoints."
    )
    query = Query(f"sum by (phase) ({seconds}) / on () group_left () (sum({seconds}) > 0)", "{{phase}}")
    nothing = "Phases are known on CPUs only, as yet"
    panel = draw.lines("Where a step's time goes", text, "percentunit", query, nothing=nothing)
    return draw.stacked(panel).min(0).max(1).data_links([TO_RANKS])


def _throughput() -> Panel:
    text = (
        "Training examples per second over all ranks, and tokens on the right, as observed or counted from the "
        "input of the model. Under tensor or pipeline parallelism several ranks count the same examples: divide by "
        "their number."
    )
    panel = draw.lines(
        "Throughput", text, "cps",
        Query(f"sum by (run) (max by (run, rank) ({rate(of_run('torch_train_samples_total'))}))", "{{run}} examples"),
        Query(f"sum by (run) (max by (run, rank) ({rate(of_run('torch_train_tokens_total'))}))", "{{run}} tokens"),
        nothing="Not known: give them with exporter.observe(samples=..., tokens=...)",
    )  # fmt: skip
    return panel.override_by_query("B", [draw.setting("custom.axisPlacement", "right")]).min(0).data_links([TO_RANKS])


def _memory() -> Panel:
    device = f"{of_rank('torch_cuda_memory_reserved_bytes')} / {of_rank('torch_cuda_memory_total_bytes')}"
    container = f"{of_rank('torch_container_memory_working_set_bytes')} / {of_rank('torch_container_memory_limit_bytes')}"
    host = f"1 - {of_rank('torch_host_memory_available_bytes')} / {of_rank('torch_host_memory_total_bytes')}"
    text = (
        "Share of the fullest device's memory that PyTorch's allocator holds, and share of the memory of container and host in use."
    )
    panel = draw.lines(
        "Memory at a glance", text, "percentunit",
        Query(f"max by (run) ({device})", "{{run}} device"),
        Query(f"max by (run) ({container})", "{{run}} container"),
        Query(f"max by (run) ({host})", "{{run}} host"),
    )  # fmt: skip
    return panel.min(0).max(1).data_links([TO_RESOURCES])


def _slowest_ranks() -> Panel:
    ratio = ask.recorded("rank:torch_train_own_seconds:ratio_median", 'rank=~"$rank"')
    text = (
        "Ranks with the longest own time in a step, as a multiple of the median rank's: the other ranks wait for "
        "them. Known under DistributedDataParallel on CPUs, from the recording rules; elsewhere see the dashboard "
        "Ranks."
    )
    nothing = "One rank, or own time is not known here: see the dashboard Ranks"
    panel = draw.ranking("Slowest ranks", text, "short", Query(ask.top(5, ratio), "{{run}} rank {{rank}}"), nothing=nothing)
    found = link("This rank", "torch-grad-ranks", "var-rank=${__field.labels.rank}", run="${__field.labels.run}")
    return panel.thresholds(steps(("green", None), ("orange", 1.33))).min(0).decimals(2).data_links([found])


def dashboard() -> Dashboard:
    """The whole dashboard."""
    health = banner()
    for panel in health:
        panel.span(4).height(5)
    learning = [_loss().span(8), _norm().span(8), _learning_rate().span(4), _mixed_precision().span(4)]
    speed = [_step_time().span(8), _step_heatmap().span(8), _phases().span(8)]
    use = [_throughput().span(8), _memory().span(8), _slowest_ranks().span(8)]
    content = [
        Row("Is the run well?", [*health, _alerts().span(14).height(7), _runs().span(10).height(7)]),
        Row("Learning", learning),
        Row("Speed", speed),
        Row("Throughput, memory and ranks", use),
    ]
    return board(UID, "Training overview", "Is the run well, and if not, where to look.", content)
