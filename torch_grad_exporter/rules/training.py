"""Rules on the progress of the run and on its speed; `loss.py` has those on the loss, `processes.py` those on its processes."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.gpu import GPU_UTILIZATION
from torch_grad_exporter.collectors.training import (
    TRAIN_LAST_ACTIVITY_TIMESTAMP,
    TRAIN_LAST_STEP_TIMESTAMP,
    TRAIN_PHASE_SECONDS,
    TRAIN_SLOWEST_STEP,
    TRAIN_START_TIMESTAMP,
)
from torch_grad_exporter.rules.balance import MODELS_OUT_OF_BALANCE
from torch_grad_exporter.rules.context import BUSY, MINUTES_5, THRESHOLDS, RuleContext, duration
from torch_grad_exporter.rules.declaration import Alert, Finding, Group, rule, server_rule
from torch_grad_exporter.rules.loss import LOSS_NOT_IMPROVING, loss_spikes, nonfinite_loss
from torch_grad_exporter.rules.processes import (
    TRAINING_PUSH_STOPPED,
    TRAINING_RANK_MISSING,
    TRAINING_RESTARTING,
    TRAINING_TARGET_DOWN,
    failed,
)

SLOW, SLOWEST = 5.0, 1800.0
"""`TrainingStalled`: the pause also exceeds so many times the slowest of the last steps, `SLOWEST` seconds at most.

An evaluation may be silent for `SLOWEST` seconds as well.
"""

PAUSES = 1.5
"""`TrainingStalled`: a pause may be so many times as long as the longest of a day, without a limit."""

STARVED = 0.5
"""`DataLoaderStarvation` as a critical one."""

FED = 0.5
"""`DataLoaderStarvation`: a GPU that is in use for this share of the time does not wait for data."""


@rule(
    "TrainingStalled",
    BUSY,
    Alert(
        "critical",
        """
        time() - max by (run) (torch_train_last_activity_timestamp_seconds) > 300
        unless on (run) (
          time() - max by (run) (torch_train_last_activity_timestamp_seconds)
          <= clamp_max(
            5 * (
              max by (run) (torch_train_slowest_step_seconds)
              or max by (run) (torch_train_last_step_timestamp_seconds - torch_train_start_timestamp_seconds)
            ),
            1800
          )
        )
        unless on (run) (
          time() - max by (run) (torch_train_last_activity_timestamp_seconds)
          <= 1.5 * (
            max by (run) (max_over_time(torch_train_slowest_step_seconds[1d]))
            or max by (run) (torch_train_last_step_timestamp_seconds - torch_train_start_timestamp_seconds)
          )
        )
        unless on (run) (
          time() - max by (run) (torch_train_last_activity_timestamp_seconds) <= 1800
          and on (run) torch_train_state{state="evaluating"} == 1
        )
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        summary="Run {{ $labels.run }} has stalled.",
        description=(
            "No rank has run a forward, a backward or a step for {{ $value | humanizeDuration }}, much longer than "
            "any pause of the last day. The processes are alive and answer scrapes."
        ),
    ),
    needs=(TRAIN_LAST_ACTIVITY_TIMESTAMP,),
    takes_seconds=THRESHOLDS["TrainingStalled"],
    first_steps=(
        "Find the rank with the oldest torch_train_last_activity_timestamp_seconds, and run py-spy dump on its "
        "process to see where it hangs. Then restart from the last checkpoint."
    ),
    why=(
        "5 x the slowest of the last 128 steps: NVIDIA's resiliency extension uses this factor for hangs. 300 s "
        "spare the short pauses of runs with short steps. 1800 s cap that factor: one pause of half an hour must "
        "not hide a hang for hours. 1.5 x the slowest step of a day: a checkpoint that takes minutes is known after "
        "its first time. 1800 s while a rank evaluates: some evaluations do not call the forward of the root "
        "module."
    ),
    note=(
        "Judges the run as a whole: if one rank hangs, the others soon wait for it. The run must have been silent "
        "for longer than each of four limits; limits that are not known do not count. Before the second step, the "
        "time from the start to the first step stands for the slowest step. Before the first step, as in a sanity "
        "check by an evaluation, that limit is not known."
    ),
)
def stalled(context: RuleContext) -> Iterator[Finding]:
    """Nothing has happened for longer than each of four limits, of which unknown ones do not count."""
    age = context.age(TRAIN_LAST_ACTIVITY_TIMESTAMP)
    last, start = context.values.one(TRAIN_LAST_STEP_TIMESTAMP), context.values.one(TRAIN_START_TIMESTAMP)
    first = None if last is None or start is None else last - start  # in place of the slowest step until there were two
    slowest, of_a_day = context.values.one(TRAIN_SLOWEST_STEP), context.slowest_step
    usual = first if slowest is None else slowest
    longest = usual if of_a_day is None else max(of_a_day, slowest or 0.0)
    evaluation = SLOWEST if context.state == "evaluating" else 0.0
    limits = (THRESHOLDS["TrainingStalled"], min(SLOW * (usual or 0.0), SLOWEST), PAUSES * (longest or 0.0), evaluation)
    if age is not None and age > max(limits):
        yield Finding("critical", f"Nothing has happened for {duration(age)}.", value=age)


@rule(
    "TrainingNeverStarted",
    frozenset({"initialising"}),
    Alert(
        "warning",
        """
        time() - max by (run) (
          torch_train_start_timestamp_seconds and on (run, rank, job, instance) torch_train_state{state="initialising"} == 1
        ) > 1200
        unless on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        summary="Run {{ $labels.run }} has not made its first step.",
        description=("The exporter started {{ $value | humanizeDuration }} ago and has counted no optimizer step on any rank."),
    ),
    first_steps=(
        "Read the run's log. If torch_train_backward_passes_total rises, the training runs and the exporter does "
        "not see its steps; if not, run py-spy dump to see where the processes hang."
    ),
    why="20 minutes for loading, compiling and the first step, as in SageMaker Debugger's rules.",
    note="TrainingStalled covers a hang in an evaluation before the first step.",
)
def never_started(context: RuleContext) -> Iterator[Finding]:
    """There was no step yet."""
    age = context.age(TRAIN_START_TIMESTAMP)
    if age is not None and age > THRESHOLDS["TrainingNeverStarted"]:
        yield Finding("warning", f"No step has been taken in the {duration(age)} since the start.", value=age)


@rule(
    "DataLoaderStarvation",
    BUSY,
    Alert(
        "warning",
        """
        max by (run) (
          rank:torch_train_data_seconds:ratio5m > 0.2
          unless on (run, rank) avg_over_time(torch_gpu_utilization_ratio[5m]) >= 0.5
          and on (run, rank) torch_train_state{state=~"training|evaluating"} == 1
        )
        """,
        for_="10m",
        keep_firing_for="5m",
        summary="Run {{ $labels.run }} waits for its data.",
        description=(
            "On the rank that waits longest, {{ $value | humanizePercentage }} of the training time goes into "
            "waiting for the DataLoader."
        ),
    ),
    Alert(
        "critical",
        """
        max by (run) (
          rank:torch_train_data_seconds:ratio5m > 0.5
          unless on (run, rank) avg_over_time(torch_gpu_utilization_ratio[5m]) >= 0.5
          and on (run, rank) torch_train_state{state=~"training|evaluating"} == 1
        )
        """,
        for_="10m",
        keep_firing_for="5m",
        summary="Run {{ $labels.run }} waits for its data most of the time.",
        description=(
            "On the rank that waits longest, {{ $value | humanizePercentage }} of the training time goes into "
            "waiting for the DataLoader."
        ),
    ),
    by_samples=True,
    needs=((TRAIN_PHASE_SECONDS, "data"),),
    first_steps=(
        "If torch_process_children_cpu_seconds_total rises by about one second per second and worker, add workers "
        "or cores; if it hardly rises, the workers wait for storage."
    ),
    why=(
        "At a fifth of the time more workers pay off; at half of it the machine stands idle. A GPU that is busy for "
        "at least half of the time does not wait for data."
    ),
    note=(
        "Cannot fire without `exporter.watch_loader`. On a GPU it is the time that the GPU waits for the loader, not that of the "
        "loop, which runs ahead of it."
    ),
)
def starvation(context: RuleContext) -> Iterator[Finding]:
    """Much of the time is spent waiting for data, and no GPU is in use meanwhile."""
    phases = dict(context.increase(TRAIN_PHASE_SECONDS, MINUTES_5).items())
    total = sum(phases.values())
    share = phases.get(("data",), 0.0) / total if total else 0.0
    in_use = context.mean(GPU_UTILIZATION, MINUTES_5).largest() or 0.0
    if share > THRESHOLDS["DataLoaderStarvation"] and in_use < FED:
        severity = "critical" if share > STARVED else "warning"
        yield Finding(severity, f"{share:.0%} of the time {context.within(MINUTES_5)} was spent waiting for data.", value=share)


THROUGHPUT_REGRESSION = server_rule(
    "ThroughputRegression",
    Alert(
        "warning",
        """
        run:torch_train_throughput:rate15m < 0.8 * run:torch_train_throughput:rate1h
        and on (run) 900 * max by (run) (rate(torch_train_steps_total[1h] offset 15m)) >= 10
        and on (run) time() - max by (run) (torch_train_start_timestamp_seconds) > 4500
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        unless on (run) avg_over_time(torch_train_state{state="evaluating"}[15m]) > 0.3
        """,
        for_="15m",
        summary="Run {{ $labels.run }} has become slower.",
        description="Its throughput of the last 15 minutes is below 80 % of that in the hour before.",
    ),
    first_steps=(
        "Check which phase of the step takes longer, and whether one rank does. Compare clocks, temperatures and "
        "storage with the hour before."
    ),
    why=(
        "A drop of a fifth is more than the noise of data and network. 4500 s: the 15 minutes and the hour before "
        "them lie in one life of the process. 900 s x rate: with fewer than 10 steps in 15 minutes, one step more "
        "or less would fire the alert; so it cannot fire where steps take more than 90 s. 0.3: evaluations of up to "
        "4.5 of the 15 minutes leave the window before `for` is over; longer ones say nothing about the speed of "
        "training."
    ),
    note=(
        "A checkpoint of up to 6 minutes leaves the 15 minutes before `for` is over. Cannot fire where evaluations take "
        "more than 30 % of the time."
    ),
)


STRAGGLER_RANK = server_rule(
    "StragglerRank",
    Alert(
        "warning",
        """
        rank:torch_train_own_seconds:ratio_fastest > 1.33
        and on (run, rank) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="10m",
        keep_firing_for="10m",
        summary="Rank {{ $labels.rank }} of run {{ $labels.run }} slows the others down.",
        description=(
            "Without waiting for others, its steps take {{ $value | humanize }} times as long as those of the fastest rank. "
            "rank:torch_train_own_seconds:excess_ratio is the share of each step that this costs."
        ),
    ),
    first_steps=(
        "Compare its processors, throttling and host time with those of another rank. If the slowness moves with "
        "the host, take the host out; if it stays with the rank, the data is the cause."
    ),
    why=(
        "NVIDIA's straggler score of 0.75, inverted: the rank's time over that of the fastest rank, of more than ten ranks the "
        "slowest of the fastest tenth. It costs up to a quarter of each step."
    ),
    note="Cannot fire on CUDA and under FSDP2, where no rank's own time is known: see ranks.rules.yml.",
)


RANK_DESYNC = server_rule(
    "RankDesync",
    Alert(
        "warning",
        """
        max by (run) (torch_train_last_step_timestamp_seconds)
        - on (run) group_right ()
        max by (run, rank) (torch_train_last_step_timestamp_seconds or torch_train_start_timestamp_seconds)
        > 600
        and on (run, rank) torch_train_state{state=~"initialising|training|evaluating"} == 1
        """,
        for_="2m",
        summary="Rank {{ $labels.rank }} of run {{ $labels.run }} makes no steps while others do.",
        description="Its last step is {{ $value | humanizeDuration }} older than the last step of the run.",
    ),
    first_steps=(
        "Run py-spy dump on its host to see where the process stands. If it hangs, end it, so that the run fails or restarts now."
    ),
    why="Ten minutes without a step while other ranks step, as in prime-rl.",
    note=(
        "Compares the times of the last steps, not counters: counters of two scrapes differ by themselves. Where "
        "all ranks hang because they wait for each other, no rank is behind, and TrainingStalled fires."
    ),
)


RULES = (
    failed,
    nonfinite_loss,
    stalled,
    never_started,
    loss_spikes,
    starvation,
    TRAINING_TARGET_DOWN,
    TRAINING_PUSH_STOPPED,
    TRAINING_RANK_MISSING,
    LOSS_NOT_IMPROVING,
    THROUGHPUT_REGRESSION,
    STRAGGLER_RANK,
    RANK_DESYNC,
    TRAINING_RESTARTING,
    MODELS_OUT_OF_BALANCE,
)

GROUP = Group(
    "training",
    "torch_grad_exporter_training_alerts",
    "Alerts on the progress of a training run.",
    (
        (
            "Needs training.rules.yml and ranks.rules.yml in the same folder. Scrape with `honor_labels: true`. "
            "docs/runbook.md says what each alert means and what to do. Alerts carry `run`, and `rank` if they are "
            "about one rank; never `job` or `instance`, so that a run that two jobs scrape, or whose ranks have "
            "moved, pages once. To have a label of your own on an alert, add it to its `by (run)`."
        ),
        (
            '`and on (run) torch_train_state{state!~"finished|failed"} == 1` restricts an alert to runs that go on: '
            'a rate over 5 minutes outlives the run by 5 minutes. With `state=~"training|evaluating"` an evaluation '
            "neither ends an alert nor restarts its `for`. Where torch_train_state is not stored "
            "(metric_relabel_configs), no alert of this file fires."
        ),
    ),
    RULES,
)
