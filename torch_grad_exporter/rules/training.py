"""Rules on the progress of the run."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.gpu import GPU_UTILIZATION
from torch_grad_exporter.collectors.training import (
    TRAIN_LAST_ACTIVITY_TIMESTAMP,
    TRAIN_LAST_STEP_TIMESTAMP,
    TRAIN_LOSS_NONFINITE,
    TRAIN_LOSS_SPIKES,
    TRAIN_PHASE_SECONDS,
    TRAIN_SLOWEST_STEP,
    TRAIN_START_TIMESTAMP,
)
from torch_grad_exporter.rules.balance import MODELS_OUT_OF_BALANCE
from torch_grad_exporter.rules.context import BUSY, GOING, THRESHOLDS, Finding, RuleContext, duration, times
from torch_grad_exporter.rules.declaration import Alert, Group, rule, server_rule
from torch_grad_exporter.rules.memory import MINUTES_5, MINUTES_10
from torch_grad_exporter.rules.origin import ANNOTATION, origin

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
        "Cannot fire where the state `failed` never reaches Prometheus: that takes `linger=`, `textfile_dir=` or a "
        "push. Without them TrainingTargetDown fires."
    ),
)
def failed(_context: RuleContext) -> Iterator[Finding]:
    """The run has failed; as long as the process reports it, it was not started again."""
    yield Finding("critical", "An exception ended the training.")


@rule(
    "TrainingNonFiniteLoss",
    GOING,
    Alert(
        "critical",
        """
        max by (run) (
          increase(torch_train_loss_nonfinite_total[5m]) > 0
          or
          torch_train_loss_nonfinite_total > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        keep_firing_for="30m",
        summary="The loss of run {{ $labels.run }} is NaN or infinite.",
        description=(
            "A loss observed in the last minutes is NaN or infinite. Unless the loop skips such steps, the weights "
            "are lost, and all further steps are wasted." + ANNOTATION
        ),
    ),
    first_steps=(
        "Check whether it continues. One such loss with finite gradients is a bad batch or a skipped step; "
        'otherwise stop the run and go back to a checkpoint; nan_origin="always" names the module where it begins.'
    ),
    why=(
        "One is enough: the weights are next. In the first 600 s of a process its whole count matters, since "
        "`increase` does not show what came before the first scrape."
    ),
    note=("Cannot fire where no loss is observed: that takes `exporter.observe(loss=...)`, or a model that returns its loss."),
)
def nonfinite_loss(context: RuleContext) -> Iterator[Finding]:
    """A loss was not finite."""
    losses = context.lately(TRAIN_LOSS_NONFINITE, MINUTES_5).largest() or 0.0
    if losses > 0:
        text = f"{origin(context)}The loss was NaN or Inf {times(losses, 'time')} {context.since(MINUTES_5)}."
        yield Finding("critical", text, value=losses)


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
    "LossSpike",
    GOING,
    Alert(
        "warning",
        """
        max by (run) (increase(torch_train_loss_spikes_total[10m])) >= 3
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary="The loss of run {{ $labels.run }} spikes.",
        description="At least three losses in 10 minutes were more than 6 sigma above the median of the last 128.",
    ),
    first_steps=(
        "Watch whether the loss returns to its level. If it does not, go back to a checkpoint from before the first spike "
        "and skip the data in between, or lower the learning rate. `record` shows in what a batch differs from an ordinary one."
    ),
    why=("One spike beyond 6 sigma is a bad batch; three in 10 minutes are a trend. OLMo-core uses 6 sigma over 128 steps."),
    note="Cannot fire where no loss is observed, nor before 20 losses.",
)
def loss_spikes(context: RuleContext) -> Iterator[Finding]:
    """The loss jumped again and again."""
    spikes = context.growth(TRAIN_LOSS_SPIKES, MINUTES_10)
    if spikes >= THRESHOLDS["LossSpike"]:
        yield Finding("warning", f"The loss jumped {times(spikes, 'time')} {context.within(MINUTES_10)}.", value=spikes)


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
    first_steps=(
        "If torch_process_children_cpu_seconds_total rises by about one second per second and worker, add workers "
        "or cores; if it hardly rises, the workers wait for storage."
    ),
    why=(
        "At a fifth of the time more workers pay off; at half of it the machine stands idle. A GPU that is busy for "
        "at least half of the time does not wait for data."
    ),
    note=("Cannot fire without `exporter.watch_loader`, nor on GPUs, where phases are not known: there see GpuUnderused."),
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


TRAINING_TARGET_DOWN = server_rule(
    "TrainingTargetDown",
    Alert(
        "critical",
        """
        count by (run) (
          max by (run, rank) (
            target:torch_train_state:last{state=~"initialising|training|evaluating"}
            and on (job, instance) up == 0
            and on (job, instance) max_over_time(up[1h]) == 1
            unless on (run, rank, job, instance) last_over_time(torch_train_state{state=~"finished|failed"}[1h]) == 1
          )
          unless on (run, rank) torch_train_state == 1
        )
        unless on (run) (
          count by (run) (count by (run, rank) (torch_train_state{state!~"finished|failed"} == 1))
          >= max by (run) (torch_train_world_size)
        )
        """,
        for_="2m",
        summary="Processes of run {{ $labels.run }} do not answer.",
        description=(
            "Prometheus can no longer scrape {{ $value }} ranks that were running: they were killed, or their host "
            "or the network is down."
        ),
    ),
    first_steps=(
        "Check which targets have up == 0 and whether their processes run. If not, check the scheduler and dmesg "
        'for "Out of memory"; if they run, open /metrics from the Prometheus host.'
    ),
    why=(
        "1h: the alert reports a death for an hour, since a fixed target of a finished run stays down permanently. "
        "For 2m: one scrape may fail."
    ),
    note=(
        "Does not fire for ranks that an elastic restart has left out: the run has all ranks that it needs. Does "
        "not fire for a target that was down from the start: nothing is known of it. With fixed targets a clean end "
        "looks like a death for an hour after the target was last up, unless `linger=` shows the end. The last "
        "scrape may lie between two evaluations of the rules."
    ),
)


TRAINING_PUSH_STOPPED = server_rule(
    "TrainingPushStopped",
    Alert(
        "critical",
        """
        count by (run) (
          max by (run, rank) (
            (
              last_over_time(torch_train_last_activity_timestamp_seconds[1h])
              > last_over_time(torch_train_start_timestamp_seconds[1h])
              or last_over_time(torch_train_start_timestamp_seconds[1h]) + 600
            )
            and on (run, rank, job, instance) last_over_time(torch_train_state{state!~"finished|failed"}[1h]) == 1
            and on (run, rank, job, instance) (
              last_over_time(torch_train_start_timestamp_seconds[1h])
              >= on (run, rank) group_left () max by (run, rank) (last_over_time(torch_train_start_timestamp_seconds[1h]))
            )
            unless on (job, instance) last_over_time(up[1h])
            unless on (run, rank) last_over_time(torch_train_state[3m])
          )
          >= on (run) group_left () max by (run) (last_over_time(torch_train_start_timestamp_seconds[1h]))
        )
        """,
        for_="2m",
        summary="Processes of run {{ $labels.run }} no longer push.",
        description=(
            "{{ $value }} ranks that were running have pushed nothing for 5 minutes: they were killed, or their "
            "host or the receiver is down."
        ),
    ),
    first_steps=(
        "Check whether the processes run; torch_train_info names their hosts. If they run, their log says why a "
        "push failed. If it fires for several runs at once, check the receiver first."
    ),
    why=(
        "3m: three exports at the usual 60 s are missing, and with for 2m two more. That is 5 minutes, before "
        "TrainingStalled fires for the ranks that wait for this one. For 2m also because after an outage of the "
        "store no run has pushed for minutes. 600 s and 1h as in TrainingFailed."
    ),
    note=(
        "A process without `up` is one that pushes: a scraped series ends with its `up` or before it. A pushed "
        "series has no mark for its end, so it has to be silent for a while. Only the newest process of each rank "
        "counts, and only if no process of the run was started since it was last active: a restarted process pushes "
        "as another instance, or under the same name with the activity of the one before."
    ),
)


TRAINING_RANK_MISSING = server_rule(
    "TrainingRankMissing",
    Alert(
        "warning",
        """
        count by (run) (count by (run, rank) (torch_train_state)) < max by (run) (torch_train_world_size)
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        for_="10m",
        summary="Prometheus does not see all ranks of run {{ $labels.run }}.",
        description=(
            "Prometheus sees {{ $value }} ranks, fewer than the run reports (torch_train_world_size). What happens "
            "on the others goes unnoticed."
        ),
    ),
    first_steps=(
        "List the ranks that are there with count by (rank) (torch_train_state), and look at the targets and the "
        "logs of the others."
    ),
    why="For 10m: ranks start and end one after another.",
)


LOSS_NOT_IMPROVING = server_rule(
    "LossNotImproving",
    Alert(
        "info",
        """
        avg_over_time(run:torch_train_loss:mean[6h]) >= avg_over_time(run:torch_train_loss:mean[6h] offset 6h)
        and count_over_time(run:torch_train_loss:mean[6h] offset 6h) >= 0.9 * count_over_time(run:torch_train_loss:mean[6h])
        and count_over_time(run:torch_train_loss:mean[6h]) >= 0.9 * count_over_time(run:torch_train_loss:mean[6h] offset 6h)
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="30m",
        summary="The loss of run {{ $labels.run }} no longer falls.",
        description=("Its mean over the last 6 hours, {{ $value | humanize }}, is not below the mean of the 6 hours before."),
    ),
    first_steps=(
        "Look at the loss on validation data and at the learning rate, and decide whether the run is worth its machines. "
        "weights=True shows whether the weights still move."
    ),
    why=(
        "Two windows of 6 h, each with at least nine tenths of the values of the other: half an hour without "
        "Prometheus does not silence the alert, a run that is too young does."
    ),
    note="Cannot fire where no loss is observed, nor in the first 12 hours.",
)


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


TRAINING_RESTARTING = server_rule(
    "TrainingRestarting",
    Alert(
        "warning",
        """
        max by (run) (changes(max by (run, rank) (max_over_time(torch_train_start_timestamp_seconds[10m]))[1h:1m])) >= 3
        and on (run) last_over_time(torch_train_state{state!="finished"}[10m]) == 1
        """,
        summary="Run {{ $labels.run }} restarts again and again.",
        description=(
            "On one of its ranks, a new process replaced the one before {{ $value }} times within the last hour. "
            "Each time the work since the last checkpoint is lost."
        ),
    ),
    first_steps=(
        "Check whether its processes end at the same step. If so, the cause is the program or its data: read the "
        "log of the first rank to end. Otherwise look for a host that is the same each time."
    ),
    why=(
        "A preemption or a lost node means one or two restarts; three within an hour are a loop. 10 minutes bridge "
        "the gap between two processes, Kubernetes' longest back-off of 5 minutes included, and end the alert when "
        "processes no longer start. 1m: rules are evaluated each minute."
    ),
    note=(
        "Detects a loop of crashes, each of which is repaired within minutes, so that no other alert fires. Takes "
        "the newest process of each rank in 10 minutes: a process may come back on another host, two jobs may "
        "scrape it, and the text file of an earlier process must not count while no process runs. Cannot fire where "
        "processes run for less than the time between two scrapes."
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
