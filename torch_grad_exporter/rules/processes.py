"""Rules on the processes of a run: whether they are there, and whether they have ended or begin again and again."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.rules.context import RuleContext
from torch_grad_exporter.rules.declaration import Alert, Finding, rule, server_rule


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
