"""The first row of the dashboard "Training overview": numbers that say whether a run is well."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat

from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.panels import CLICKED, Query, link, steps
from dashboards.generate.queries import counted_over_range, of_run

TO_LAYERS = link("Which layer", "torch-grad-layers")
THIS_RUN, ALL_RUNS = link("Ranks of this run", "torch-grad-ranks", run=CLICKED), link("Ranks", "torch-grad-ranks")

# Of more runs than these the names cannot be read in a panel of this size.
NAMED = 4

# By how much a person should care; of ranks in different states the run shows the highest.
STATES = {
    0: ("Stopped by Stop()", "blue"),
    1: ("Finished", "blue"),
    2: ("Evaluating", "green"),
    3: ("Training", "green"),
    4: ("Initialising", "yellow"),
    5: ("Gone, was evaluating", "purple"),
    6: ("Gone, was training", "purple"),
    7: ("Gone, never trained", "purple"),
    8: ("Down", "red"),
    9: ("Failed", "red"),
}
TWO_SCRAPES = "Needs a run, two scrapes"
AT_WORK = 'state=~"initialising|training|evaluating"'


def _recent(selector: str) -> str:
    """Its last value, also where it has gone within the hour."""
    return f"last_over_time({selector}[{ask.RECENTLY}])"


def _in(name: str) -> str:
    """The ranks that are in a state now."""
    return f"({of_run('torch_train_state', ask.equal('state', name))} == 1)"


def lost(*matchers: str) -> str:
    """The ranks that cannot be scraped though they were at work, and that no other target shows at work.

    Of several runs that a target has had, one after the other, the last is meant.
    """
    started = _recent(of_run("torch_train_start_timestamp_seconds"))
    last = f"{started} >= on (job, instance) group_left () max by (job, instance) ({started})"
    at_work = f"{_recent(of_run('torch_train_state', AT_WORK, *matchers))} == 1 and on (job, instance, run, rank) ({last})"
    silent = f'{at_work} and on (job, instance) up{{job=~"$job"}} == 0'
    return f"max by (run, rank) ({silent}) unless on (run, rank) {of_run('torch_train_state')} == 1"


def down() -> str:
    """How many ranks of each run are lost, where the run needs them, as alert TrainingTargetDown has it."""
    alive = f"count by (run) (count by (run, rank) ({of_run('torch_train_state', AT_WORK)} == 1))"
    return f"count by (run) ({lost()}) unless on (run) ({alive} >= max by (run) ({of_run('torch_train_world_size')}))"


def failed() -> str:
    """The ranks that an exception has ended, where nothing of the run was started since, as alert TrainingFailed has it.

    A rank that has a living process is none of them, whatever the text file of an older one says.
    """
    started = _recent(of_run("torch_train_start_timestamp_seconds"))
    active = f"({_recent(of_run('torch_train_last_activity_timestamp_seconds'))} or {started} + 600)"
    ended = f"{_recent(of_run('torch_train_state', ask.equal('state', 'failed')))} == 1"
    ends = f"max by (run, rank) ({active} and on (run, rank, job, instance) {ended})"
    alive = f"{of_run('torch_train_state', AT_WORK)} == 1"
    return f"{ends} >= on (run) group_left () max by (run) ({started}) unless on (run, rank) {alive}"


def state() -> str:
    """A number of STATES for each run: of the ranks that are scraped, else of those last seen within the hour."""
    numbers = {"finished": 1, "evaluating": 2, "training": 3, "initialising": 4}
    now = " or ".join(f"{_in(name)} * {number}" for name, number in numbers.items())
    stop = f"{_recent(of_run('torch_grad_exporter_actions_total', ask.equal('action', 'Stop'), ask.equal('result', 'done')))} > 0"
    ended = f"{_recent(of_run('torch_train_state', ask.equal('state', 'finished')))} == 1"
    stopped = f"0 * ({ended} and on (run, rank, job, instance) {stop})"
    lasts = {"finished": 1, "evaluating": 5, "training": 6, "initialising": 7}
    last = " or ".join(
        f"({_recent(of_run('torch_train_state', ask.equal('state', name)))} == 1) * {number}" for name, number in lasts.items()
    )
    here = f"{stopped} and {_in('finished')} or {now} or 0 * ({down()}) + 8 or 0 * ({failed()}) + 9"
    return f"max by (run) ({here}) or max by (run) ({stopped} or {last})"


def idle() -> str:
    """Seconds in which no rank did anything, where those are too many, as alert TrainingStalled has it; else 0."""
    passed = f"(time() - max by (run) ({of_run('torch_train_last_activity_timestamp_seconds')}))"
    first = f"max by (run) ({of_run('torch_train_last_step_timestamp_seconds')} - {of_run('torch_train_start_timestamp_seconds')})"
    slowest = of_run("torch_train_slowest_step_seconds")
    too_long = (
        f"{passed} > 300"
        f" unless on (run) {passed} <= clamp_max(5 * (max by (run) ({slowest}) or {first}), 1800)"
        f" unless on (run) {passed} <= 1.5 * (max by (run) (max_over_time({slowest}[1d])) or {first})"
        f" unless on (run) ({passed} <= 1800 and on (run) {_in('evaluating')})"
    )
    at_it = of_run("torch_train_state", 'state=~"training|evaluating"')
    return f"({too_long} or on (run) 0 * {passed}) and on (run) {at_it} == 1"


def nonfinite(name: str, *matchers: str) -> str:
    """How many more in the time range, over all runs.

    What a process did before it was first scraped no increase shows: of one that was started within the range, or in the 600 s
    before its end, as in alert TrainingNonFiniteGradients, a count that is not 0 is 1 at least.
    """
    counter = of_run(name, *matchers)
    # A second that is a range ago: PromQL has no other way to write the beginning of the range.
    begin = "last_over_time(vector(time())[1s:1s] offset $__range)"
    started = f"last_over_time({of_run('torch_train_start_timestamp_seconds')}[$__range])"
    young = f"{started} > scalar(clamp_max({begin}, time() - 600))"
    # By instance as well: `or` has to keep it beside the increase of the same rank.
    at_first = f"group by (run, rank, instance) (last_over_time({counter}[$__range]) > 0 and on (run, rank, job, instance) {young})"
    return f"sum(max by (run) (sum by (run, rank) ({counted_over_range(counter)}) or {at_first}))"


def _state() -> stat.Panel:
    text = (
        "State of the run, as far as its last scrape tells. Down: a rank that was running does not answer, no other "
        "target serves it, and the run needs it; an end that no scrape has shown looks like this too, and the log of the "
        "run says more. Failed: an exception ended a rank, and no process was started since. Gone: the target is no longer "
        "known, and this is what it did last; a run that ended well between two scrapes looks like this. Of more than four runs: "
        "how many are in each state; their names are in the table Runs."
    )
    each = f"({state()})"
    panel = draw.number(
        "State", text, "short",
        Query(f"{each} and on () count({each}) <= {NAMED}", "{{run}}"),
        Query(f'count_values("state", {each}) and on () count({each}) > {NAMED}', "{{state}}"),
        nothing="No run in this range", texts=STATES,
    )  # fmt: skip
    panel.data_links([THIS_RUN]).override_by_query("B", [draw.setting("mappings", []), draw.setting("links", [ALL_RUNS.build()])])
    for number, (name, color) in STATES.items():
        fixed = {"mode": "fixed", "fixedColor": color}
        short = name.partition(",")[0].partition(" by ")[0]  # a sixth of the panel is its width
        panel.override_by_name(str(number), [draw.setting("displayName", short), draw.setting("color", fixed)])
    return panel


def _nonfinite() -> stat.Panel:
    text = (
        "Sampled steps that were applied with NaN or Inf in a gradient, those that were skipped, and all losses that were NaN or "
        "Inf, in the time range. A gradient scaler skips a step after an overflow: a few skips at the start are normal. A step "
        "that was applied may have made the weights NaN. Of steps between two samples only the loss tells. Steps before the first "
        "scrape of a process show as 1."
    )
    panel = draw.number(
        "NaN and Inf", text, "short",
        Query(nonfinite("torch_grad_nonfinite_steps_total", 'outcome!="skipped"'), "sampled"),
        Query(nonfinite("torch_grad_nonfinite_steps_total", 'outcome="skipped"'), "skipped"),
        Query(nonfinite("torch_train_loss_nonfinite_total"), "losses"),
        nothing=TWO_SCRAPES,
    )  # fmt: skip
    panel.decimals(0).thresholds(steps(("green", None), ("red", 1))).data_links([TO_LAYERS])
    mild = steps(("green", None), ("yellow", 1)).build()
    return panel.override_by_query("B", [draw.setting("thresholds", mild)])


def _stalled() -> stat.Panel:
    text = (
        "How long no rank of a run that trains or evaluates has done anything. It shows from 5 minutes on, once the "
        "pause exceeds 5 times the slowest recent step (30 minutes at most), 1.5 times the slowest step of a day "
        "and, in an evaluation, 30 minutes. Typical causes are a hang in a collective, in the data loader or in a "
        "checkpoint."
    )
    none = f'label_replace(max({idle()}), "run", "every run", "", "")'
    worst = Query(f"topk({NAMED}, ({idle()}) > 0) or on () {none}", "{{run}}")
    panel = draw.number("Stalled for", text, "s", worst, nothing="No run is training", texts={0: ("No", "green")})
    return panel.thresholds(steps(("green", None), ("red", 1))).data_links([THIS_RUN])


def _spikes() -> stat.Panel:
    def count(name: str) -> str:
        return f"sum(max by (run) ({counted_over_range(of_run(name))}))"

    text = (
        "Sampled steps in the time range with a global gradient norm or a loss beyond 6 robust sigmas of its own "
        "last 128 values. A single spike heals by itself; several in ten minutes are GradientExploding or "
        "LossSpike. Largest: the largest global norm over the median of the same ten minutes, of those with a spike, by the "
        "buckets of the histogram."
    )
    buckets = f"sum by (run, optimizer, le) (increase({of_run('torch_grad_global_norm_distribution_bucket')}[10m]))"
    spiked = f"sum by (run) (increase({of_run('torch_grad_global_norm_spikes_total')}[10m])) > 0"
    ratio = f"histogram_quantile(1, {buckets}) / (histogram_quantile(0.5, {buckets}) > 0) and on (run) {spiked}"
    size = f"max(max_over_time(({ratio})[$__range:1m]))"
    panel = draw.number(
        "Spikes", text, "short",
        Query(count("torch_grad_global_norm_spikes_total"), "norm"),
        Query(count("torch_train_loss_spikes_total"), "loss"),
        Query(size, "largest"),
        nothing=TWO_SCRAPES,
    )  # fmt: skip
    panel.decimals(0).thresholds(steps(("green", None), ("yellow", 1), ("orange", 3))).data_links([TO_LAYERS])
    large = steps(("green", None), ("yellow", 10), ("orange", 100)).build()
    return panel.override_by_query("C", [draw.setting("unit", "count:x"), draw.setting("thresholds", large)])


def _layers() -> stat.Panel:
    text = (
        "Layers that do not learn now: more than nine in ten output units dead, a norm below a ten-millionth of the "
        "global norm, or parameters without a gradient. Dead units are known from 20 samples on."
    )
    panel = draw.number(
        "Bad layers", text, "short",
        Query(ask.dead().how_many(), "dead"),
        Query(ask.vanished().how_many(), "vanished"),
        Query(ask.without_gradient().how_many(), "no grad"),
        nothing="No layer is read",
    )  # fmt: skip
    return panel.thresholds(steps(("green", None), ("orange", 1))).data_links([TO_LAYERS])


def _waiting() -> stat.Panel:
    text = (
        "Share of each step for which the fastest rank waits for the slowest one: what the run would gain if all were as fast. "
        "Known under DistributedDataParallel on CPUs, by the recording rules: not of a single rank, on CUDA or under FSDP2. Alert "
        "StragglerRank asks for 1.33 times the own time of the fastest rank, a quarter of a step that waits for nothing else."
    )
    alone = f"({ask.highest(of_run('torch_train_world_size'), 'run')} == 1) * {ask.NOTHING}"
    slowest = f"topk by (run) (1, {ask.recorded('rank:torch_train_own_seconds:excess_ratio')})"
    panel = draw.number(
        "Straggler",
        text,
        "percentunit",
        Query(f"topk({NAMED}, {slowest})", "{{run}} rank {{rank}}"),
        Query(f"topk({NAMED}, {alone}) unless on () {slowest}", "{{run}}"),
        nothing=draw.NO_OWN_TIME,
        texts={ask.NOTHING: ("One rank", "transparent")},
    )
    return panel.decimals(0).thresholds(steps(("green", None), ("yellow", 0.1), ("orange", 0.25))).data_links([THIS_RUN])


def banner() -> list[stat.Panel]:
    """All of them, the gravest first."""
    return [_state(), _nonfinite(), _stalled(), _spikes(), _layers(), _waiting()]
