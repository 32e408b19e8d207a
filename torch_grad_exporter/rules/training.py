"""Rules on the progress of the run and on its speed."""

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
from torch_grad_exporter.rules.context import BUSY, MINUTES_5, THRESHOLDS, RuleContext, duration
from torch_grad_exporter.rules.declaration import Alert, Finding, rule

# TrainingStalled: a pause may last `SLOW` times the slowest of the last steps, up to `SLOWEST` seconds, as may an evaluation; and
# `PAUSES` times the slowest step of a day, without a limit.
SLOW, SLOWEST, PAUSES = 5.0, 1800.0, 1.5

# DataLoaderStarvation: the share of the time that is critical, and the use of a GPU that does not wait for data.
STARVED, FED = 0.5, 0.5


@rule(
    "TrainingFailed",
    frozenset({"failed"}),
    Alert(
        "critical",
        """
        count by (run) (
          max by (run, rank) (
            (
              last_over_time(torch_train_last_activity_timestamp_seconds[1h])
              or last_over_time(torch_train_start_timestamp_seconds[1h]) + 600
            )
            and on (run, rank, job, instance) last_over_time(torch_train_state{state="failed"}[1h]) == 1
          )
          >= on (run) group_left () max by (run) (last_over_time(torch_train_start_timestamp_seconds[1h]))
        )
        """,
        for_="2m",
        summary="Run {{ $labels.run }} has failed.",
        description=(
            "An exception ended {{ $value }} of its ranks within the last hour, and no process of the run has been started since."
        ),
    ),
    first_steps=(
        "Read the log of the rank that failed first: the one with the oldest torch_train_last_activity_timestamp_seconds. "
        "Check that metrics were sound until the end, then start again from the last checkpoint."
    ),
    why=(
        "1h: the alert reports a failure for an hour, also where the process has gone after a single scrape. 600 s: "
        "a process that failed before its first activity counts as active until 600 s after its start, while other "
        "ranks may still be starting. For 2m: a run that restarts by then needs no person."
    ),
    note=(
        "Requires that no process of the run has started since the failure, so an elastic restart does not fire it. "
        "Cannot fire where no scrape, text file or push shows the state `failed`: with `linger=0`, and on one of several "
        "ranks, which waits for no scrape. Then TrainingTargetDown fires."
    ),
)
def failed(_context: RuleContext) -> Iterator[Finding]:
    """Yield a finding: as long as the process reports the failure, it was not started again."""
    yield Finding("critical", "An exception ended the training.")


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
    """Yield a finding if nothing has happened for longer than each of four limits; unknown limits do not count."""
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
    """Yield a finding if there was no step for too long after the start."""
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
    remembers=dict.fromkeys((TRAIN_PHASE_SECONDS, GPU_UTILIZATION), MINUTES_5),
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
    """Yield a finding if much of the time is spent waiting for data, and no GPU is in use meanwhile."""
    phases = dict(context.increase(TRAIN_PHASE_SECONDS, MINUTES_5).items())
    total = sum(phases.values())
    share = phases.get(("data",), 0.0) / total if total else 0.0
    in_use = context.mean(GPU_UTILIZATION, MINUTES_5).largest() or 0.0
    if share > THRESHOLDS["DataLoaderStarvation"] and in_use < FED:
        severity = "critical" if share > STARVED else "warning"
        yield Finding(severity, f"{share:.0%} of the time {context.within(MINUTES_5)} was spent waiting for data.", value=share)
