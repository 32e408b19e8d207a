"""The verdict on a run that `exporter.save(path)` has written, or that a running exporter has sent, and the terms of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_grad_exporter.collectors.training import TRAIN_LOSS
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.gate.baseline import TOLERANCES, compared
from torch_grad_exporter.gate.limits import Limit
from torch_grad_exporter.gate.rows import Result, RunVerdict, VerdictRow
from torch_grad_exporter.outputs.live.saved import JudgedRule, RunJudgement, Saved, judged_of, metrics_of, status
from torch_grad_exporter.rules import RULES, Wrong
from torch_grad_exporter.rules.catalogue import promql_only
from torch_grad_exporter.rules.context import duration, times
from torch_grad_exporter.rules.declaration import SEVERITIES

# Severities that fail by default: they need a person, now or soon.
FAIL_ON = ("critical", "warning")


# Layers that a text names, at most.
NAMED = 8

SERVER = "only Prometheus judges it"


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a verdict. `fail_on`: severities and alerts. `tolerances`: by comparison, instead of the usual ones."""

    fail_on: Collection[str] = FAIL_ON
    limits: Sequence[Limit] = ()
    baseline: Saved | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)


def check_names(fail_on: Collection[str], more: Collection[str] = ()) -> None:
    """Raise `UserError` if a name is neither a severity nor an alert that a process judges, or the run was judged by (`more`).

    "none" alone stands for no alert at all. An empty list, like an empty variable of CI, is an error.
    """
    if not fail_on:
        raise UserError('fail-on: name alerts or severities, or "none" for a verdict by limits and baseline alone')
    if [*fail_on] == ["none"]:
        return
    known = {rule.name for rule in RULES}.union(more)
    for name in fail_on:
        if name not in known and name not in SEVERITIES:
            there = ", ".join((*SEVERITIES, *sorted(known)))
            if name in promql_only():
                limit = "limit a metric, as in --max torch_cuda_ooms_total=0"
                raise UserError(f"fail-on {name!r}: only Prometheus judges this alert; {limit}, or name one of {there}")
            raise UserError(f"fail-on {name!r}: unknown alert or severity; there are {there}")


def check_tolerance(name: str, share: float) -> None:
    """Raise `UserError` if nothing of this name is compared, or the share is not one."""
    if name not in TOLERANCES:
        raise UserError(f"tolerance {name!r}: nothing of this name is compared; there are {', '.join(TOLERANCES)}")
    if not 0 <= share < float("inf"):
        raise UserError(f"tolerance {name}: the share is a number of at least 0, such as {TOLERANCES[name]:g}")


def verdict(saved: Saved, terms: Terms) -> RunVerdict:
    """Return the verdict. Raises `UserError` if the terms name something unknown, or if the run was not judged."""
    try:
        return _verdict(saved, terms)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"the run, or the baseline, is damaged: {type(error).__name__}: {error!s:.200}") from None


def _verdict(saved: Saved, terms: Terms) -> RunVerdict:
    judged, metrics = judged_of(saved), metrics_of(saved)
    if judged is None:
        raise UserError("an earlier version has saved the run, without what was wrong in it; save it again")
    check_names(terms.fail_on, {rule.name for rule in judged.rules if rule.judged})
    if terms.tolerances and terms.baseline is None:
        raise UserError(f"tolerance {next(iter(terms.tolerances))!r}: there is no baseline to compare with")
    run = status(saved)
    steps = "steps unknown" if run.step is None else times(run.step)
    extent = f"{steps}, {times(judged.samples, 'sample')}, {duration(judged.seconds)}, {run.state or 'state unknown'}"
    about = f"run {run.run}, rank {run.rank} of {run.world_size}: {extent}"
    if judged.samples == 0:
        return RunVerdict(about, (), "the run has no samples: no gradient was read, so nothing is known of the training")
    problems: dict[str, list[Wrong]] = {}
    for problem in judged.wrong:
        problems.setdefault(problem.alert, []).append(problem)
    rows = []
    for rule in judged.rules:
        if own := problems.get(rule.name):
            failed = any(problem.severity in terms.fail_on or problem.alert in terms.fail_on for problem in own)
            rows.append(VerdictRow("rules", rule.name, Result.FAILED if failed else Result.NOTED, " ".join(_described(own))))
        else:
            why = _not_judged(rule, judged)
            rows.append(VerdictRow("rules", rule.name, Result.OK if why is None else Result.NOT_JUDGED, why or ""))
    known = {rule.name for rule in judged.rules}
    rows += [
        VerdictRow("rules", rule.name, Result.NOT_JUDGED, "the run was saved without it")
        for rule in RULES
        if rule.name not in known
    ]
    rows += [VerdictRow("rules", name, Result.NOT_JUDGED, SERVER) for name in sorted(promql_only() - known)]
    rows += [limit.row(metrics, saved) for limit in terms.limits]
    if terms.baseline is not None:
        if not terms.baseline["status"]["samples"]:
            raise UserError("the baseline has no samples, so nothing can be compared with it")
        rows += compared(saved, terms.baseline, metrics, metrics_of(terms.baseline), terms.tolerances)
    for at, row in enumerate(rows):  # one that was asked for by name has failed if it could not be judged
        if row.result is Result.NOT_JUDGED and row.name in (*terms.fail_on, *terms.tolerances):
            text = f"asked for by name, and could not be judged: {row.text}"
            rows[at] = replace(row, result=Result.FAILED, text=text)
    nothing = all(row.result is Result.NOT_JUDGED for row in rows)
    has_loss = all(rule.there for rule in judged.rules if TRAIN_LOSS.name in rule.needs)
    return RunVerdict(
        about, tuple(rows), "no rule could be judged, and there is neither a limit nor a baseline" if nothing else None,
        "" if has_loss else "the loss was not judged: the training has to call exporter.observe(loss=loss)",
    )  # fmt: skip


def _described(problems: Sequence[Wrong]) -> Iterator[str]:
    """Yield a text for each severity, the worst first; of layers with the same problem it has the first few."""
    for severity in SEVERITIES:
        alike = [problem for problem in problems if problem.severity == severity]
        if not alike:
            continue
        first, last = min(problem.first for problem in alike), max(problem.last for problem in alike)
        rest = f" And {times(len(alike) - NAMED, 'more layer')}." if len(alike) > NAMED else ""
        yield f"{severity}, steps {first:,} to {last:,}: {' '.join(problem.text for problem in alike[:NAMED])}{rest}"


def _not_judged(rule: JudgedRule, judged: RunJudgement) -> str | None:
    """Return why the rule could not have fired in this run; None if it could."""
    if not rule.judged:
        return SERVER
    if judged.samples < rule.least:
        return f"takes {times(rule.least, 'sample')}"
    if judged.seconds < rule.seconds and (rule.samples is None or judged.samples < rule.samples):
        return f"takes {duration(rule.seconds)}" + ("" if rule.samples is None else f" or {times(rule.samples, 'sample')}")
    return None if rule.there else f"the run has no {' or '.join(rule.needs)}"
