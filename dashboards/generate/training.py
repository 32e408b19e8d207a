"""The dashboard "Training overview": whether the run is healthy, and if not, where to look."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import logged
from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.board import Row, board
from dashboards.generate.health import NAMED, STATES, banner, state
from dashboards.generate.panels import CLICKED, SCIENTIFIC, Panel, Query, link, steps, url
from dashboards.generate.queries import counted, highest, of_rank, of_run, rate
from dashboards.generate.tables import Column, rows

UID = "torch-grad-training"
TO_LAYERS = link("Which layer", "torch-grad-layers", run=CLICKED)
TO_RANKS = link("Which rank", "torch-grad-ranks", run=CLICKED)
TO_RANKS_OF_ALL = link("Which rank", "torch-grad-ranks")

SEVERITIES = {3: ("critical", "red"), 2: ("warning", "orange"), 1: ("info", "blue")}
STEPS = "count:steps/s"


def _severity() -> str:
    """A number of SEVERITIES for each alert that fires. A dead layer's norm has vanished, too: that is told once."""
    weights = (f"{ask.firing(ask.equal('severity', name))} * {number}" for number, (name, _) in SEVERITIES.items())
    vanished, dead = (ask.firing(ask.equal("alertname", name)) for name in ("GradientVanishing", "LayerDead"))
    return f"({' or '.join(weights)}) unless on (alertname, run, layer) ({vanished} and on (run, layer) {dead})"


def _alerts() -> Panel:
    each = "alertname, run, layer, rank, device"
    severity = f"max by ({each}) ({_severity()})"
    moment = f'ALERTS_FOR_STATE{{run=~"$run"}} and ignoring (alertstate) {ask.firing()}'
    since = f"1000 * min by ({each}) ({moment}) and on ({each}) {severity}"
    to_layer = url("torch-grad-layers", "var-layer=${__data.fields.layer}", run="${__data.fields.run}")
    to_rank = url("torch-grad-ranks", "var-rank=${__data.fields.rank}", run="${__data.fields.run}")
    columns = [
        Column("Value #A", "Severity", "none", width=110, texts=SEVERITIES),
        Column("alertname", "Alert"),
        Column("run", "Run", width=240, link=url(UID, run="${__data.fields.run}")),
        Column("layer", "Layer", width=240, link=to_layer),
        Column("rank", "Rank", link=to_rank, width=70),
        Column("device", "Device", width=80),
        Column("Value #B", "Since", unit="dateTimeFromNow", width=140),
    ]
    text = (
        "The alerts that fire for these runs, the gravest first: of one layer or rank each alert once. A layer or rank leads to "
        "its own view."
    )
    nothing = "No alert is firing, or no alert rules are loaded"
    queries = [Query(ask.or_all(expression, "layer", "rank")) for expression in (severity, since)]
    return rows("Firing alerts", text, queries, columns, nothing, order=["-Severity", "Run", "Alert"])


def _runs() -> Panel:
    def last(name: str) -> str:
        return ask.last_known(of_run(name), "run")

    begin, active = "torch_train_start_timestamp_seconds", "torch_train_last_activity_timestamp_seconds"
    queries = [
        Query(state()),
        Query(last("torch_grad_sample_step")),
        Query(highest(rate(of_run("torch_train_steps_total")), "run")),
        Query(last("torch_train_epoch")),
        Query(last("torch_train_world_size")),
        Query(f"{last(active)} - on (run) min by (run) (last_over_time({of_run(begin)}[{ask.RECENTLY}]))"),
        Query(last("torch_grad_exporter_overhead_ratio")),
    ]
    columns = [
        Column("run", "Run", link=url(UID, run="${__data.fields.run}")),
        Column("Value #A", "State", "none", texts=STATES, width=170, link=url("torch-grad-ranks", run="${__data.fields.run}")),
        Column("Value #B", "Step", "locale", width=110),
        Column("Value #C", "Speed", STEPS, width=120),
        Column("Value #D", "Epoch", "none", width=90),
        Column("Value #E", "Ranks", "none", width=80),
        Column("Value #F", "Ran for", "s", width=110),
        Column("Value #G", "Exporter's cost", "percentunit", width=130,
            link=url("torch-grad-exporter", run="${__data.fields.run}")),
    ]  # fmt: skip
    text = (
        "The step of each run as of its last sample, its speed, and how long it was active. A run that has ended stays for an "
        "hour. The name of a run restricts this dashboard to that run."
    )
    return rows("Runs", text, queries, columns, nothing=draw.NO_RUN, order=["Run"])


def _loss() -> Panel:
    loss = of_rank("torch_train_loss")
    text = (
        "Observed loss, mean of the chosen ranks: each rank has its own batch. A gap is a loss that was NaN or Inf. The axis is "
        "logarithmic; runs whose loss is 0 or less at times have a linear one on the right."
    )
    nothing = "No loss: give it with exporter.observe(loss=...)"
    mean = f"avg by (run) ({loss} > -Inf < +Inf)"
    positive = f"(min by (run) (min_over_time({loss}[$__range] @ end())) > 0)"
    panel = draw.lines(
        "Loss", text, "locale",
        Query(f"{mean} and on (run) {positive}", "{{run}}"), Query(f"{mean} unless on (run) {positive}", "{{run}}"),
        nothing=nothing,
    )  # fmt: skip
    linear = [draw.setting("custom.axisPlacement", "right"), draw.setting("custom.scaleDistribution", {"type": "linear"})]
    # Five digits in this unit alone leave out zeros at the end, and show the ticks of a small loss.
    return draw.logarithmic(panel.decimals(5), 2).override_by_query("B", linear).data_links([TO_LAYERS])


def norm() -> Panel:
    """The norm of the whole gradient."""
    text = (
        "L2 norm over all parameters at the last sampled step, before clipping and as the optimizer saw it. For "
        "sharded gradients without observe(grad_norm=...) it is the root mean square of 5 minutes, from the "
        "recording rules. Largest: the largest norm of a single layer in the samples of the last 60 s, which also shows what was "
        f"between two scrapes. Of more than {NAMED} runs only one line each: the largest, or the norm where no layer's is known."
    )
    recent, norms = of_run("torch_grad_norm_recent_max"), ask.global_norm()
    after = highest(of_run("torch_grad_global_norm_after_clip"), "run, optimizer")
    panel = draw.lines(
        "Gradient norm before and after clipping", text, SCIENTIFIC,
        Query(f"{ask.of_few(norms, NAMED)} or {norms} unless on (run) {ask.ever(recent)}", "{{run}} {{optimizer}} before"),
        Query(ask.of_few(after, NAMED), "{{run}} {{optimizer}} after"),
        Query(highest(recent, "run"), "{{run}} largest layer"),
        nothing="No gradient was sampled in this time range",
    )  # fmt: skip
    between = [draw.setting("custom.lineStyle", {"fill": "dash", "dash": [6, 6]})]
    panel.override_by_query("C", between)
    return draw.logarithmic(panel).data_links([TO_LAYERS])


def _learning_rate() -> Panel:
    query = Query(highest(of_run("torch_train_learning_rate"), "run, optimizer, group"), "{{run}} {{optimizer}} group {{group}}")
    return draw.lines(
        "Learning rate", "Of each parameter group of each optimizer.", SCIENTIFIC, query, nothing="No optimizer step yet"
    )


def _mixed_precision() -> Panel:
    text = (
        "Backward passes without an optimizer step, in each interval; on the right the scale of the gradient "
        "scaler. Skips in a row while the scale keeps falling mean that gradients are not finite at any scale."
    )
    skipped = f"max by (run) ({counted(of_run('torch_train_skipped_steps_total'))})"
    panel = draw.lines(
        "Skipped steps and loss scale", text, "short",
        Query(skipped, "{{run}} skipped"),
        Query(highest(of_run("torch_train_loss_scale"), "run"), "{{run}} scale"),
        nothing=draw.NO_RUN + draw.ONE_SCRAPE,
    )  # fmt: skip
    right = [draw.setting("custom.axisPlacement", "right"), draw.setting("custom.scaleDistribution", {"type": "log", "log": 2}),
        draw.setting("unit", SCIENTIFIC), draw.setting("decimals", 1)]  # fmt: skip
    return draw.whole(panel).override_by_query("B", right).data_links([TO_LAYERS])


def _step_time() -> Panel:
    bucket = of_rank("torch_train_step_duration_seconds_bucket")
    text = (
        "Time from one optimizer step to the next, over all steps of the chosen ranks: median, 99th percentile, "
        f"longest of the last 128. Of more than {NAMED} runs the median alone."
    )
    # A quantile lies somewhere in its bucket, which may reach further than the longest step.
    longest = highest(of_rank("torch_train_slowest_step_seconds"), "run")
    median, most = (ask.at_most(ask.quantile(share, bucket, "run"), longest) for share in (0.5, 0.99))
    panel = draw.lines(
        "Step time", text, "s",
        Query(median, "{{run}} median"),
        Query(ask.of_few(most, NAMED), "{{run}} 99 %"),
        Query(ask.of_few(longest, NAMED), "{{run}} longest"),
        nothing="No two steps in this time range",
    )  # fmt: skip
    return draw.logarithmic(panel).data_links([TO_RANKS])


def _step_heatmap() -> Panel:
    selector = of_rank("torch_train_step_duration_seconds_bucket")
    text = "Number of steps by duration. A second band is work that only some steps do, such as a checkpoint or an evaluation."
    panel = draw.distribution("Distribution of step times", text, "s", selector, nothing="No step in this time range")
    return panel.links([draw.panel_link("Step times of each rank", "torch-grad-ranks")])


def _phases() -> Panel:
    seconds = rate(of_rank("torch_train_phase_seconds_total"))
    text = (
        "Share of the training time in each phase, over the chosen ranks. `data` is the wait for the loader, if "
        "watch_loader wraps it; `outside` is everything else between steps, such as logging, evaluation and "
        "checkpoints. On a GPU all of it is in the GPU's time."
    )
    query = Query(f"sum by (phase) ({seconds}) / on () group_left () (sum({seconds}) > 0)", "{{phase}}")
    nothing = "Phases need forwards of the whole model"
    panel = draw.lines("Where a step's time goes", text, "percentunit", query, nothing=nothing)
    return draw.stacked(panel).min(0).max(1).data_links([TO_RANKS_OF_ALL])


def _throughput() -> Panel:
    text = (
        "Training examples per second over all ranks, and tokens on the right where these are others, as observed or counted from "
        "the input of the model. Under tensor or pipeline parallelism several ranks count the same examples: divide by their "
        "number."
    )
    examples, tokens = (
        f"sum by (run) (max by (run, rank) ({rate(of_run(f'torch_train_{name}_total'))}))" for name in ("samples", "tokens")
    )
    panel = draw.lines(
        "Throughput", text, "count:/s",
        Query(examples, "{{run}} examples"), Query(f"{tokens} unless on (run) {tokens} <= {examples}", "{{run}} tokens"),
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
        Query(ask.by_host(f"({container})"), "{{host}} container"),
        Query(ask.by_host(f"({host})"), "{{host}} host"),
    )  # fmt: skip
    return panel.min(0).max(1).links([draw.panel_link("Devices and hosts", "torch-grad-resources")])


def _slowest_ranks() -> Panel:
    share = ask.recorded("rank:torch_train_own_seconds:excess_ratio", 'rank=~"$rank"')
    text = (
        "Share of each step for which the fastest rank waits for this one. Known under DistributedDataParallel on CPUs, from the "
        "recording rules; elsewhere see the dashboard Ranks."
    )
    panel = draw.ranking(
        "Slowest ranks",
        text,
        "percentunit",
        Query(ask.top(5, share), "{{run}} rank {{rank}}"),
        full=1,
        nothing="One rank, not measured, or no rules",
    )
    found = link("This rank", "torch-grad-ranks", "var-rank=${__field.labels.rank}", run=CLICKED)
    return panel.thresholds(steps(("green", None), ("yellow", 0.1), ("orange", 0.25))).decimals(0).data_links([found])


def dashboard() -> Dashboard:
    """The whole dashboard. The first row is one screen of 1440 x 900, 18 rows of the grid, that says whether a run is healthy."""
    numbers = [panel.span(4).height(4) for panel in banner()]
    pictures = [panel.span(8).height(7) for panel in (_loss(), norm(), _throughput())]
    content = [
        Row("Health", [*numbers, *pictures, _alerts().span(24).height(6)]),
        Row("All runs", [_runs().span(24).height(7)]),
        Row("Speed", [panel.span(8) for panel in (_step_time(), _step_heatmap(), _phases())]),
        Row("Learning rate, memory and ranks", [panel.span(6) for panel in (
            _learning_rate(), _mixed_precision(), _memory(), _slowest_ranks())]),
        Row("Logged values: $value", logged.row(), collapsed=True),
    ]  # fmt: skip
    return board(UID, "Training overview", "Whether the run is healthy, and if not, where to look.", content, value=True)
