"""Pieces of PromQL that the dashboards share; each function returns an expression.

Gauges may be NaN: `max` passes over them by itself, sums and means filter with `x == x`. Gauges are never summed over time.
"""

from __future__ import annotations

from dataclasses import dataclass

CHOSEN_RUN = 'run=~"$run"'
RUN = f'job=~"$job", {CHOSEN_RUN}'
RANK = f'{RUN}, rank=~"$rank"'
LAYER = f'{RUN}, layer=~"$layer"'

# A target that is gone leaves nothing behind; a person who is called looks within the hour, and wants to see how it ended.
RECENTLY = "1h"


NOTHING = -1
"""The value of a row that says that there is none."""

NO_RUNS = -2
"""The value of a row that says that there is no run."""


def equal(label: str, value: str) -> str:
    """A matcher for one value of a label."""
    return f'{label}="{value}"'


KEPT = 'layer!="(removed)"'
"""Leaves out the remainder of removed layers, whose growth is what these layers have counted before."""


def of_run(name: str, *matchers: str) -> str:
    """The metric's series of the chosen runs, all ranks."""
    return f"{name}{{{', '.join((RUN, *matchers))}}}"


def of_rank(name: str, *matchers: str) -> str:
    """The metric's series of the chosen ranks."""
    return f"{name}{{{', '.join((RANK, *matchers))}}}"


def of_layer(name: str, *matchers: str) -> str:
    """The metric's series of the chosen layers; on all ranks, for under DDP only one rank shows a layer."""
    return f"{name}{{{', '.join((LAYER, *matchers))}}}"


def rate(selector: str) -> str:
    """Per second, at each moment."""
    return f"rate({selector}[$__rate_interval])"


def increase(selector: str) -> str:
    """How many more, at each moment."""
    return f"increase({selector}[$__rate_interval])"


def over_range(selector: str) -> str:
    """How much more over the whole time range of the dashboard, for ratios of two such."""
    return f"increase({selector}[$__range])"


def counted(selector: str, window: str = "$__rate_interval") -> str:
    """How many events there were between the first and the last scrape of a window: exact, where `increase` extrapolates.

    Only of a counter that began again within the window it is the increase, rounded.
    """
    span = f"{selector}[{window}]"
    more = f"max_over_time({span}) - min_over_time({span})"
    return f"({more} and increase({span}) unless resets({span}) > 0 or round(increase({span})))"


def counted_over_range(selector: str) -> str:
    """The same over the whole time range of the dashboard."""
    return counted(selector, "$__range")


def events(selector: str, by: str, together: str = "sum") -> str:
    """How many events came at each moment, where there were any."""
    return f"{together} by ({by}) ({counted(selector)}) > 0"


def in_order(expression: str, *labels: str) -> str:
    """The same series in the order of these labels, numbers within a name by their size: `blocks.2` before `blocks.10`.

    The first label keeps its own series together. Prometheus sorts what a graph asks for by all labels, the first name first, and
    Grafana keeps that order. So `as` comes first, in which numbers of up to two figures have three; of the other labels together
    the first two of each size count.
    """
    first, *others = (f'"{label}"' for label in labels)
    ordered = f'label_join({expression}, "as", " ", {", ".join(others)})'
    for figures, zeros in (("[0-9]", "00"), ("[0-9]{2}", "0")):
        for _ in range(2):
            ordered = f'label_replace({ordered}, "as", "${{1}}{zeros}${{2}}${{3}}", "as", "(|.*?[._ ])({figures})([._ ].*|)")'
    return f'label_join({ordered}, "as", " ", {first}, "as")'


def with_rank_name(expression: str) -> str:
    """The same with a label `rank_name`, which the row that says there is none lacks: only its sentence is left of the legend."""
    return f'label_replace({expression}, "rank_name", "rank $1", "rank", "(.+)")'


def in_model_order(expression: str, *, modules: bool = False) -> str:
    """The series by run and layer in the order of the model, run by run; those without a known place come last, by name.

    `modules`: of those some have no parameters, and so no place; they come after the last layer beside them.

    `count_values` makes the place a label, of four figures; see `in_order`. The last place in the time range stands for all of it:
    else a layer would be two rows.
    """
    last = f"last_over_time({of_run('torch_grad_layer_index')}[$__range] @ end())"
    placed = f"({expression}) + on (run, layer) group_left (as) 0 * {_places(last, 'run, layer')}"
    joined = [f'label_join({placed}, "as", " ", "run", "as")', f'label_join({expression}, "as", " ~ ", "run", "layer")']
    if modules:
        parents = _places(_with_parent(last), "run, parent")
        beside = f"{_with_parent(expression)} + on (run, parent) group_left (as) 0 * {parents}"
        joined.insert(1, f'label_join({beside}, "as", " ", "run", "as", "layer")')
    return " or on (run, layer) ".join(joined)


def _with_parent(expression: str) -> str:
    """The same with the name of the module that a layer is in, up to the last point."""
    return f'label_replace({expression}, "parent", "$1", "layer", "(|.*[.])[^.]+")'


def _places(selector: str, by: str) -> str:
    """The largest value for each `by` as a label `as` of four figures."""
    places = f'count_values by ({by}) ("as", {highest(selector, by)})'
    for figures, zeros in ((1, "000"), (2, "00"), (3, "0")):
        places = f'label_replace({places}, "as", "{zeros}$1", "as", "([0-9]{{{figures}}})")'
    return places


OFF_SCALE = 99
"""The value of what a scale of colours has no number for: beyond its end."""


def not_finite() -> str:
    """`OFF_SCALE` for each layer whose norm is NaN or Inf, which a heatmap would leave out."""
    norms = (of_run(name) for name in ("torch_grad_norm", "torch_grad_shard_norm"))
    return f"{OFF_SCALE} * group by (run, layer) ({' or '.join(f'({norm} unless {norm} < +Inf)' for norm in norms)})"


def highest(selector: str, by: str) -> str:
    """The largest for each `by`: of what several ranks show the same of, that."""
    return f"max by ({by}) ({selector})"


def last_known(selector: str, by: str) -> str:
    """The largest now for each `by`, else that of a run that has ended within the hour, and is still to be seen."""
    last = highest(f"last_over_time({selector}[{RECENTLY}])", by)
    return f"({highest(selector, by)} or {last} unless on (run) {of_run('torch_train_world_size')})"


def record(name: str, *matchers: str) -> str:
    """A recording rule's series of the chosen runs; they have no `job`."""
    chosen = ", ".join((CHOSEN_RUN, *matchers))
    return f"{name}{{{chosen}}}"


def recorded(name: str, *matchers: str) -> str:
    """The same of the chosen jobs: those that the runs' own series have."""
    return f"({record(name, *matchers)} and on (run) {of_run('torch_train_world_size')})"


def last_recorded(name: str, *matchers: str) -> str:
    """As `recorded`, or of a run that has ended within the hour the last value."""
    now, runs = record(name, *matchers), of_run("torch_train_world_size")
    last = f"({now} or last_over_time({now}[{RECENTLY}]) unless on (run) {runs})"
    return f"({last} and on (run) last_over_time({runs}[{RECENTLY}]))"


def with_host(selector: str) -> str:
    """The same with the label `host`: an index of a GPU says nothing without it. Job and instance keep the match unique.

    Of a pushed run whose model has moved to another device or host there are two facts for a while: one of them is taken.
    """
    info = f"topk by (job, instance, run, rank) (1, max by (job, instance, run, rank, host) ({of_run('torch_train_info')}))"
    return f"{selector} * on (job, instance, run, rank) group_left (host) {info}"


def by_host(expression: str) -> str:
    """One series for each host, of which each rank of each run on it has a copy."""
    return f"max by (host) ({with_host(expression)})"


def observed(selector: str) -> str:
    """How many observations of a histogram there were in the time range, by bucket: the same at each moment."""
    return f"sum by (le) (increase({selector}[$__range] @ end()))"


def buckets(selector: str) -> str:
    """The increase by bucket, from the lowest bucket with an observation in the time range to the highest: others fill the axis.

    The number of a label `le` is the quantile of a histogram that has this bucket alone.
    """
    seen, finite = observed(selector), observed(f'{selector.removesuffix("}")}, le!="+Inf"}}')
    alone = f'label_replace({seen} > 0, "at", "$1", "le", "(.+)")'
    bounds = f'histogram_quantile(1, {alone} or label_replace({alone}, "le", "+Inf", "", ""))'
    within = f'label_replace({bounds} <= 1.001 * scalar(histogram_quantile(1, {seen})), "le", "$1", "at", "(.+)")'
    return f"sum by (le) ({increase(selector)}) and on (le) ({within} or {seen} > scalar(max({finite})))"


def quantile(share: float, selector: str, by: str) -> str:
    """A quantile of a histogram's observations."""
    return f"histogram_quantile({share}, sum by ({by}, le) ({rate(selector)}))"


def at_most(value: str, limit: str) -> str:
    """A value of each run, or its limit where that is lower. NaN stays away."""
    lower = f"{limit} and on (run) {value} >= on (run) {limit}"
    return f"{value} < on (run) {limit} or {lower} or {value} unless on (run) {limit}"


def share_clipped(counter: str) -> str:
    """The share of all steps that each policy clipped, or would have clipped, by such a counter."""
    steps = f"max by (run) (sum by (run, rank) ({rate(of_run('torch_train_steps_total'))}))"
    return f"clamp_max(max by (run, policy) ({rate(of_run(counter))}) / on (run) group_left () ({steps} > 0), 1)"


def or_all(expression: str, *labels: str) -> str:
    """The same, with "All" for a label that a series does not have: so Grafana calls what does not choose one of its values."""
    for label in labels:
        expression = f'label_replace({expression}, "{label}", "All", "{label}", "")'
    return expression


def or_nothing(expression: str, legend: str, text: str, value: int = NOTHING, unless: str = "") -> str:
    """The same, or where there are runs and no series, one whose first label in the legend is a sentence that says so.

    `unless`: of what there is none in the whole time range, where single moments without it are usual.
    """
    runs = of_run("torch_train_world_size")
    there = f"{value} * group({runs})" + (f" unless on () ({unless})" if unless else "")
    none = f"vector({min(value, NO_RUNS)}) unless on () group({ever(runs)})"
    return f"{expression} or on () {_said(there, legend, text)} or on () {_said(none, legend, 'No run in this time range')}"


def or_nothing_now(expression: str, legend: str, text: str) -> str:
    """As `or_nothing`, of the runs of the last hour: what an instant query answers."""
    runs = f"last_over_time({of_run('torch_train_world_size')}[{RECENTLY}])"
    there, none = f"{NOTHING} * group({runs})", f"vector({NO_RUNS}) unless on () group({runs})"
    return f"{expression} or on () {_said(there, legend, text)} or on () {_said(none, legend, 'No run within the last hour')}"


def _said(expression: str, legend: str, text: str) -> str:
    """The series with a sentence as the first label of the legend."""
    label = legend.partition("{{")[2].partition("}}")[0]
    return f'label_replace({expression}, "{label}", "{text}", "", "")'


def ever(*selectors: str) -> str:
    """The series that there were at any moment of the time range."""
    return " or ".join(f"last_over_time({selector}[$__range] @ end())" for selector in selectors)


def of_few(expression: str, most: int) -> str:
    """The same where this many runs at most are chosen: more would be a tangle."""
    return f"({expression}) and on () count(count by (run) ({ever(of_run('torch_train_world_size'))})) <= {most}"


def firing(*matchers: str, state: str = "firing") -> str:
    """The alerts of the chosen runs that fire; they have no job, but their runs have, within the hour."""
    alerts = f"ALERTS{{{', '.join((equal('alertstate', state), CHOSEN_RUN, *matchers))}}}"
    return f"({alerts} and on (run) last_over_time({of_run('torch_train_world_size')}[{RECENTLY}]))"


def top(count: int, expression: str) -> str:
    """The largest `count` of an instant query."""
    return f"topk({count}, {expression})"


def steadily_top(count: int, expression: str, by: str, *selectors: str) -> str:
    """The same `count` lines over all the time range, not others at each moment: those that were largest in it."""
    largest = " or ".join(highest(f"max_over_time({selector}[$__range] @ end())", by) for selector in selectors)
    return f"({expression}) and on ({by}) topk({count}, {largest})"


def of_parts(name: str, by: str, *matchers: str) -> str:
    """A recording rule's norm by run or layer, only of sharded gradients: of others it is a second one beside that of the rank."""
    return f"({highest(recorded(name, *matchers), by)} and on ({by}) {of_run('torch_grad_shard_norm')})"


def global_norm() -> str:
    """The norm before clipping, by run and optimizer; of sharded gradients whose norm was not observed, the mean of 5 minutes."""
    exact = highest(of_run("torch_grad_global_norm"), "run, optimizer")
    return f"({exact} or on (run) {of_parts('run:torch_grad_norm:rms5m', 'run')})"


def layer_norm() -> str:
    """The norm of each layer; of sharded ones, of which no rank knows it, the mean of 5 minutes from the recording rule."""
    exact = highest(of_run("torch_grad_norm"), "run, layer")
    return f"({exact} or on (run, layer) {of_parts('run_layer:torch_grad_norm:rms5m', 'run, layer')})"


def last_layer_norm() -> str:
    """As `layer_norm`, or the last values within the hour."""
    exact = last_known(of_run("torch_grad_norm"), "run, layer")
    rule, parts = last_recorded("run_layer:torch_grad_norm:rms5m"), last_known(of_run("torch_grad_shard_norm"), "run, layer")
    return f"({exact} or {highest(rule, 'run, layer')} and on (run, layer) {parts})"


@dataclass(frozen=True, slots=True)
class Condition:
    """What is wrong with a layer: `measure compared limit`, each side by run and layer or matched to that."""

    measure: str
    compared: str
    limit: str

    def where(self) -> str:
        """The layers that it holds for."""
        return f"{self.measure} {self.compared} {self.limit}"

    def how_many(self) -> str:
        """For how many layers it holds: 0 for none, absent where nothing is known."""
        return f"count({self.where()}) or 0 * count({self.measure})"


def last_share(of: str) -> str:
    """A share of each layer's output units, weighed over all parts of a sharded layer where the rules are loaded."""
    raw = last_known(of_run(f"torch_grad_{of}"), "run, layer")
    return f"({last_recorded(f'run_layer:torch_grad_{of}:mean')} or {raw})"


def dead_ratio() -> str:
    """The share of dead output units of each layer, over all parts of a sharded one where the rules are loaded."""
    raw = highest(of_run("torch_grad_dead_ratio"), "run, layer")
    return f"({recorded('run_layer:torch_grad_dead_ratio:mean')} or {raw})"


def dead() -> Condition:
    """More than nine in ten output units are dead, as alert LayerDead has it."""
    return Condition(dead_ratio(), ">", "0.9")


def vanished() -> Condition:
    """The largest recent norm is under a ten-millionth of the whole, as alert GradientVanishing has it, and the layer is not dead.

    Of a sharded layer its largest part stands for it. Where a sample is older than a minute, there is no recent one.
    """
    names = ("torch_grad_norm_recent_max", "torch_grad_norm", "torch_grad_shard_norm")
    # The largest of each first: `or` is slow between thousands of series.
    largest = " or ".join(highest(of_run(name), "run, layer") for name in names)
    alive = f"(({largest}) unless on (run, layer) ({dead().where()}))"
    return Condition(alive, "<", f"on (run) group_left () (1e-7 * max by (run) ({global_norm()} < +Inf))")


def without_gradient() -> Condition:
    """Parameters that require a gradient got none."""
    return Condition(highest(of_run("torch_grad_missing_parameters"), "run, layer"), ">", "0")


def nonfinite() -> Condition:
    """NaN or Inf came up in the gradient within 5 minutes. By the rule: raw, these are the most series of all."""
    counted = recorded("run_layer:torch_grad_nonfinite_elements:increase5m")
    return Condition(f"sum by (run, layer) ({counted})", ">", "0")
