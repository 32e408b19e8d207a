"""Rules on what the exporter does itself: actions, notifications, clipping."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.exporter import (
    EXPORTER_ACTIONS,
    EXPORTER_ERRORS,
    EXPORTER_LAST_ACTION,
    EXPORTER_NOTIFICATIONS,
)
from torch_grad_exporter.metrics.families import Spec
from torch_grad_exporter.rules.context import GOING, HOUR, MINUTES_10, THRESHOLDS, RuleContext, times
from torch_grad_exporter.rules.declaration import Alert, Finding, rule

# Values of labels: the action that ends a training, and the source of failures of clipping.
STOP, CLIP = "Stop", "clip"


@rule(
    "GradientClippingFailing",
    GOING,
    Alert(
        "critical",
        """
        max by (run) (
          increase(torch_grad_exporter_errors_total{source="clip"}[10m]) > 0
          or
          torch_grad_exporter_errors_total{source="clip"} >= 10
          or
          torch_grad_exporter_errors_total{source="clip"} > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        keep_firing_for="10m",
        summary="Gradients of run {{ $labels.run }} are not clipped.",
        description="The clipping that start_exporter(clip=) was asked for has failed, and training goes on unclipped.",
    ),
    remembers={EXPORTER_ERRORS: MINUTES_10},
    first_steps=(
        "Read the first failure, with its traceback, in the run's log. Stop the run, correct the policy or replace it by "
        "MaxNorm, and go back to a checkpoint from before the first failure."
    ),
    why=(
        "One step without clipping may be the one that needed it. 10m: then it is over, if clipping works again. 10: after "
        "this many failures in a row it is disabled for good. In the first 600 s of a process its whole count matters, "
        "since `increase` does not show what came before the first scrape."
    ),
    note="Cannot fire without `start_exporter(clip=)`: failures of a Clipper are raised where it is called.",
)
def not_clipped(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if clipping has failed recently, or so often that it is off."""
    recent = dict(context.recent(EXPORTER_ERRORS, MINUTES_10).items()).get((CLIP,), 0.0)
    failures = context.values.one(EXPORTER_ERRORS, CLIP) or 0.0
    if failures >= THRESHOLDS["GradientClippingFailing"]:
        yield Finding("critical", f"Clipping failed {times(failures, 'time')} since the start.", value=failures)
    elif recent > 0:
        yield Finding("critical", f"Clipping failed {times(recent, 'time')} {context.since(MINUTES_10)}.", value=recent)


@rule(
    "TrainingStoppedItself",
    frozenset({*GOING, "finished", "failed"}),
    Alert(
        "warning",
        """
        count by (run) (
          max by (run, rank) (last_over_time(torch_grad_exporter_last_action_timestamp_seconds{action="Stop"}[1h]))
          >= on (run) group_left () max by (run) (last_over_time(torch_train_start_timestamp_seconds[1h]))
          > time() - 3600
        )
        """,
        summary="Run {{ $labels.run }} has stopped itself.",
        description="The action Stop() ended it on {{ $value }} of its ranks within the last hour, as exporter.on was asked to.",
    ),
    first_steps=(
        "Look for the cause: the run's log names the rule or the condition, and the step. Correct it, and go on from a "
        "checkpoint from before it."
    ),
    why=(
        "1h, 3600: it reports a stop for an hour, also where the process has gone after a single scrape. A process of the run "
        "that was started since then ends it."
    ),
    note=(
        "Cannot fire where no scrape, text file or push shows the stop: with `linger=0`, unless a last checkpoint takes longer "
        "than the scrape interval."
    ),
)
def stopped(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if `Stop()` has ended the training."""
    at = context.values.one(EXPORTER_LAST_ACTION, STOP)
    if at is not None and context.now - at < HOUR:
        yield Finding("warning", "The action Stop() ended the training; the log names its cause.")


@rule(
    "ActionFailing",
    GOING,
    Alert(
        "warning",
        """
        max by (run, action) (
          increase(torch_grad_exporter_actions_total{result=~"failed|refused"}[10m]) > 0
          or
          torch_grad_exporter_actions_total{result=~"failed|refused"} > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        keep_firing_for="10m",
        summary="The action {{ $labels.action }} of run {{ $labels.run }} has failed.",
        description="What exporter.on was to do has raised an error, or the ranks of the job did not agree on a step for it.",
    ),
    remembers={EXPORTER_ACTIONS: MINUTES_10},
    first_steps=(
        "Read the first failure in the run's log, and do by hand what the action was for. Training does not depend on it; after "
        "ten failures in a row the action is switched off."
    ),
    why=(
        "One is enough: an action is for what needs an answer. In the first 600 s of a process its whole count matters, since "
        "`increase` does not show what came before the first scrape."
    ),
    note="Cannot fire without `exporter.on(...)`.",
)
def action_failing(context: RuleContext) -> Iterator[Finding]:
    """Yield actions that have failed or were refused."""
    for action, count in _by_first_label(context, EXPORTER_ACTIONS, "failed", "refused"):
        text = f"The action {action} failed or was refused {times(count, 'time')} {context.since(MINUTES_10)}."
        yield Finding("warning", text, value=count)


@rule(
    "NotificationsFailing",
    GOING,
    Alert(
        "warning",
        """
        max by (run, sink) (
          increase(torch_grad_exporter_notifications_total{result=~"failed|dropped"}[10m]) > 0
          or
          torch_grad_exporter_notifications_total{result=~"failed|dropped"} > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        keep_firing_for="10m",
        summary="Notifications of run {{ $labels.run }} do not arrive.",
        description="The notifier {{ $labels.sink }} of alerts= has failed, after all its tries, or has dropped some.",
    ),
    remembers={EXPORTER_NOTIFICATIONS: MINUTES_10},
    first_steps=(
        "Read the first failure in the run's log, which names the notifier and not its address. Check the receiver, the address "
        "and the headers; what was not sent is on the live page and in exporter.problems() while it lasts."
    ),
    why=(
        "One is enough: it was meant to inform a person of a problem. In the first 600 s of a process its whole count matters, "
        "since `increase` does not show what came before the first scrape."
    ),
    note="Cannot fire without `start_exporter(alerts=)`. Notifiers do not report it: it would be about themselves.",
)
def notifications_failing(context: RuleContext) -> Iterator[Finding]:
    """Yield notifiers whose notifications have failed or were dropped."""
    for sink, count in _by_first_label(context, EXPORTER_NOTIFICATIONS, "failed", "dropped"):
        text = f"The notifier {sink} failed to send {times(count, 'notification')} {context.since(MINUTES_10)}."
        yield Finding("warning", text, value=count)


def _by_first_label(context: RuleContext, spec: Spec, *results: str) -> Iterator[tuple[str, float]]:
    """Yield by how much a counter has grown over these results, for each value of its first label that has grown."""
    grown: dict[str, float] = {}
    for (name, result), count in context.recent(spec, MINUTES_10).items():
        if result in results and count > 0:
            grown[name] = grown.get(name, 0.0) + count
    yield from grown.items()
