"""The dashboard "Ranks": which rank is slow, stands still or has gradients of its own."""

from __future__ import annotations

from collections.abc import Mapping

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.board import Row, board
from dashboards.generate.health import NAMED, lost
from dashboards.generate.panels import SCIENTIFIC, Panel, Query, steps, url
from dashboards.generate.queries import KEPT, counted_over_range, equal, highest, of_rank, of_run, recorded
from dashboards.generate.tables import Column, rows

UID = "torch-grad-ranks"
CHOSEN = 'rank=~"$rank"'
RANK = "{{run}} rank {{rank}}"
STATES = {
    1: ("Finished", "blue"),
    2: ("Training", "green"),
    3: ("Evaluating", "semi-dark-green"),
    4: ("Initialising", "yellow"),
    5: ("Failed", "red"),
    6: ("Down", "dark-red"),
}
NO_OWN_TIME = "Own time is not known: one rank, CUDA, FSDP2, or no recording rules"
NO_RULES = "Not known yet: this needs the recording rules, and steps in the last 5 minutes"


def _missing() -> Panel:
    size = of_run("torch_train_world_size")
    text = "Ranks that Prometheus scrapes, out of the ranks of all chosen runs."
    panel = draw.number(
        "Ranks", text, "short",
        Query(f"count(count by (run, rank) ({size}))", "seen"),
        Query(f"sum({highest(size, 'run')})", "of"),
        nothing="No run is being scraped now",
    )  # fmt: skip
    return draw.plain(panel)


def _skew() -> Panel:
    query = Query(ask.top(NAMED, recorded("run:torch_train_steps:skew")), "{{run}}")
    text = "Optimizer steps between the first rank and the last. A few are due to scrapes at different moments."
    return draw.plain(draw.number("Steps between first and last rank", text, "short", query, nothing="No rules, or no steps yet"))


def _slowest() -> Panel:
    ratio = recorded("rank:torch_train_own_seconds:ratio_fastest", CHOSEN)
    text = (
        "The rank with the longest own time in a step, as a multiple of that of the fastest rank. From 1.33 on it is a straggler."
    )
    slowest = Query(ask.top(NAMED, f"topk by (run) (1, {ratio})"), RANK)
    panel = draw.number("Slowest rank", text, "count:x", slowest, nothing=draw.NO_OWN_TIME)
    return panel.decimals(2).thresholds(steps(("green", None), ("orange", 1.33)))


def _idlest() -> Panel:
    passed = f"time() - {of_rank('torch_train_last_activity_timestamp_seconds')}"
    text = "The rank with the oldest forward, backward or step. Where all ranks hang, look at the one that stopped first."
    panel = draw.number(
        "Longest without activity", text, "s", Query(ask.top(1, passed), RANK), nothing="No run is being scraped now"
    )
    return draw.plain(panel)


def _states() -> Panel:
    def those_in(states: Mapping[str, int]) -> str:
        return " or ".join(f"({of_rank('torch_train_state', equal('state', name))} == 1) * {states[name]}" for name in states)

    alive = f"max by (run, rank) ({those_in({'training': 2, 'evaluating': 3, 'initialising': 4})})"
    ended = f"max by (run, rank) ({those_in({'finished': 1, 'failed': 5})})"
    text = (
        "State of each rank over time. Down: its target does not answer. A gap is a time without a target. For a rank that was "
        "restarted while the text file of its last process remains, it is the state of the new process."
    )
    gone = f"0 * ({lost(CHOSEN)}) + 6"
    rows_by_rank = ask.in_order(ask.with_rank_name(f"({gone} or {alive} or {ended})"), "run", "rank")
    query = Query(rows_by_rank, "{{run}} {{rank_name}}")
    return draw.timeline("State of each rank", text, query, STATES, draw.NO_RUN)


def _behind() -> str:
    """How many steps a rank is behind the furthest of its run."""
    counted = "rank:torch_train_steps:now"
    furthest = f"max by (run) ({recorded(counted)})"
    return f"{furthest} - on (run) group_right () {recorded(counted, CHOSEN)}"


def _comparison() -> Panel:
    idle = f"time() - {of_rank('torch_train_last_activity_timestamp_seconds')}"
    queries = [
        Query(f"max by (job, instance, run, rank, host) ({of_rank('torch_train_info')})"),
        Query(recorded("rank:torch_train_own_seconds:ratio_fastest", CHOSEN)),
        Query(recorded("rank:torch_train_step_duration_seconds:mean5m", CHOSEN)),
        Query(recorded("rank:torch_train_own_seconds:mean5m", CHOSEN)),
        Query(recorded("rank:torch_train_host_seconds:mean5m", CHOSEN)),
        Query(recorded("rank:torch_train_gradient_wait_seconds:mean5m", CHOSEN)),
        Query(_behind()),
        Query(idle),
        Query(f"sum by (run, rank) ({counted_over_range(of_rank('torch_grad_nonfinite_elements_total', KEPT))})"),
    ]
    to_resources = url("torch-grad-resources", "var-rank=${__data.fields.rank}", run="${__data.fields.run}")
    columns = [
        Column("run", "Run"), Column("rank", "Rank", width=70, link=to_resources), Column("host", "Host", link=to_resources),
        Column("Value #B", "Own time / fastest", "none", full=2, orange=1.33, width=170), Column("Value #C", "Step", "s", width=90),
        Column("Value #D", "Own time", "s", width=90), Column("Value #E", "Data and host", "s", width=110),
        Column("Value #F", "Waits", "s", width=90), Column("Value #G", "Steps behind", width=105, decimals=0),
        Column("Value #H", "Idle for", "s", width=90), Column("Value #I", "NaN and Inf", width=95, decimals=0),
    ]  # fmt: skip
    text = (
        "All ranks side by side. Own time is a step without the wait for other ranks, over that of the fastest rank; where "
        "it is unknown, as on GPUs, compare data and host time. Its bar ends at 2. NaN and Inf are gradient elements in the time "
        "range, of the layers that the rank shows."
    )
    nothing = "No run is being scraped now"
    return rows("Ranks side by side", text, queries, columns, nothing, order=["Run", "-Own time / fastest", "Rank"])


def _own_time() -> Panel:
    ratio = recorded("rank:torch_train_own_seconds:ratio_fastest", CHOSEN)
    text = (
        "Each rank's own time in a step, as a multiple of that of the fastest rank: 1 is normal, the straggler "
        "stands out. Known under DistributedDataParallel on CPUs."
    )
    query = Query(ratio, RANK)
    panel = draw.lines("Own time over that of the fastest rank", text, "none", query, nothing=NO_OWN_TIME, many=True)
    return draw.limit(panel.decimals(2).min(0), 1.33)


def _waits() -> Panel:
    wait = recorded("rank:torch_train_gradient_wait_seconds:mean5m", CHOSEN)
    text = (
        "How long a rank waits for the others' gradients in a step. The slowest rank waits least; the wait that all "
        "ranks share is the network."
    )
    nothing = "Known by the recording rules, under DistributedDataParallel on CPUs"
    return draw.lines("Waiting for other ranks", text, "s", Query(wait, RANK), nothing=nothing, many=True).min(0)


def _host_time() -> Panel:
    host = recorded("rank:torch_train_host_seconds:mean5m", CHOSEN)
    text = (
        "Time for data, optimizer and everything between steps, per step. Known under FSDP2 too, where the rest is mostly waiting."
    )
    return draw.lines("Data and host time of a step", text, "s", Query(host, RANK), nothing=NO_RULES, many=True).min(0)


def _lag() -> Panel:
    text = "Optimizer steps that a rank is behind the first rank. A rising line is a rank that has stopped."
    query = Query(_behind(), RANK)
    return draw.whole(draw.lines("Steps behind", text, "short", query, nothing=NO_RULES, many=True))


def _nonfinite() -> Panel:
    found = ask.events(of_rank("torch_grad_nonfinite_steps_total"), "run, rank")
    text = "Steps in each interval with NaN or Inf in the gradients of a rank. All ranks at once: the loss spread it."
    nothing = "No step with NaN or Inf, or none is known"
    return draw.bars(draw.lines("Steps with NaN or Inf by rank", text, "short", Query(found, RANK), nothing=nothing, many=True))


def _losses() -> Panel:
    loss = highest(of_rank("torch_train_loss"), "run, rank")
    text = "Loss of each rank, on its own batch. A rank that drifts away from the others has other data or other weights."
    query = Query(loss, RANK)
    return draw.lines("Loss by rank", text, "short", query, nothing="No loss: give it with exporter.observe(loss=...)", many=True)


def _whole_norm() -> Panel:
    text = (
        "Root mean square of the norm of the whole gradient over 5 minutes, from all ranks' parts. Also the norm "
        "that each step's clipping gives with observe(grad_norm=...)."
    )
    panel = draw.lines(
        "Norm over all ranks", text, SCIENTIFIC,
        Query(ask.of_parts("run:torch_grad_norm:rms5m", "run"), "{{run}} from all parts"),
        Query(highest(of_run("torch_grad_global_norm"), "run, optimizer"), "{{run}} {{optimizer}} as known to a rank"),
        nothing=NO_RULES,
    )  # fmt: skip
    return draw.logarithmic(panel)


def _layer_norms() -> Panel:
    name = "run_layer:torch_grad_norm:rms5m"
    parts = ask.of_parts(name, "run, layer")
    lines = ask.steadily_top(20, parts, "run, layer", ask.record(name))
    text = "Root mean square of each layer's norm over 5 minutes, from all ranks' parts: the 20 largest."
    query = Query(lines, "{{layer}} {{run}}")
    panel = draw.lines(
        "Norms of sharded layers", text, SCIENTIFIC, query, nothing="No layer is sharded, or no recording rules", many=True
    )
    return draw.logarithmic(panel)


def _own_norms() -> Panel:
    text = (
        "Norm of each rank's own gradient, before the mean over ranks. A rank far above the others has bad data or "
        "a bad device, which the mean hides."
    )
    nothing = "Needs start_exporter(local_norm=True) and DistributedDataParallel"
    query = Query(highest(of_rank("torch_grad_local_norm"), "run, rank, optimizer"), f"{RANK} {{{{optimizer}}}}")
    return draw.logarithmic(draw.lines("Own norm of each rank", text, SCIENTIFIC, query, nothing=nothing, many=True))


def _noise_scale() -> Panel:
    text = (
        "Simple noise scale of the gradient in training examples, the median of the ranks' estimates. A batch far "
        "below it gains from more examples, a batch far above it wastes them."
    )
    nothing = "Needs start_exporter(local_norm=True), DistributedDataParallel or accumulation, 20 samples and the recording rules"
    query = Query(recorded("run:torch_grad_noise_scale:median"), "{{run}} {{optimizer}}")
    return draw.logarithmic(draw.lines("Gradient noise scale", text, "count:examples", query, nothing=nothing).min(1))


def dashboard() -> Dashboard:
    """The whole dashboard."""
    numbers = [panel.span(6).height(4) for panel in (_missing(), _skew(), _slowest(), _idlest())]
    pace = [_own_time(), _waits(), _host_time(), _lag()]
    gradients = [_whole_norm(), _layer_norms(), _nonfinite(), _losses()]
    content = [
        Row("All ranks", [*numbers, _states().span(24).height(8), _comparison().span(24).height(10)]),
        Row("Pace", [panel.span(12) for panel in pace]),
        Row("Gradients over ranks", [panel.span(12) for panel in gradients]),
        Row("A rank's own gradient, optional metrics", [_own_norms().span(12), _noise_scale().span(12)], collapsed=True),
    ]
    return board(UID, "Ranks", "Which rank is slow, stands still or has gradients of its own.", content)
