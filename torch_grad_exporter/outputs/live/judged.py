"""What a saved run says for a verdict on it: what was wrong, by which rules it was judged, and its metrics at the end.

Its shape is in `docs/live.md`. Readers that do not know these parts leave them out, so the version of the format is as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.live.encoding import Json, number
from torch_grad_exporter.rules.context import SAMPLE_SECONDS
from torch_grad_exporter.rules.declaration import Need, Rule
from torch_grad_exporter.rules.episodes import seconds
from torch_grad_exporter.rules.record import EVERY, Record, Wrong
from torch_grad_exporter.rules.values import Values
from torch_grad_exporter.rules.watch import OVER

Rows = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class JudgedRule:
    """A rule by which a run was judged.

    `judged`: whether a process can. `there`: whether there was something to judge, namely one of the metrics `needs`. `seconds`:
    what the run must have had until the rule can fire, by the clock; `samples`: the same by samples, `None` where they do not
    count; `least`: how many samples in either case.
    """

    name: str
    judged: bool
    there: bool
    needs: tuple[str, ...]
    seconds: float
    samples: int | None
    least: int


@dataclass(frozen=True, slots=True)
class RunJudgement:
    """What a run came to. `samples`, `seconds`: for how many and how long it was judged."""

    samples: int
    seconds: float
    rules: tuple[JudgedRule, ...]
    wrong: tuple[Wrong, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge or a counter at the end of a run: a number for each row of label values."""

    labels: tuple[str, ...]
    rows: Rows


def judged(record: Record) -> Json:
    """What was wrong, as it is saved."""
    rules = [
        {**asdict(one), "needs": list(one.needs)}
        for one in (_of_rule(rule, there=rule.name in record.there) for rule in record.rules)
    ]
    wrong = [{**asdict(one), "others": list(one.others), "value": number(one.value)} for one in record.wrong]
    return {"samples": record.samples, "seconds": record.seconds, "rules": rules, "wrong": wrong}


def metrics(values: Values) -> Json:
    """All gauges and counters, as they are saved."""
    found: Json = {}
    for spec in values.specs:
        rows = [] if spec.kind is Kind.HISTOGRAM else list(values.rows(spec))
        if rows:
            names, numbers = zip(*rows, strict=True)
            found[spec.name] = {"labels": list(spec.labels), "rows": list(map(list, names)), "values": list(map(number, numbers))}
    return found


def _of_rule(rule: Rule, *, there: bool) -> JudgedRule:
    waits = min((seconds(alert.for_) for alert in rule.alerts), default=0.0) * (not rule.states & OVER)  # its end is the last
    needs = tuple(map(_named, rule.needs))
    # The first judgement by samples is at `EVERY` of them.
    samples = round(waits / SAMPLE_SECONDS) + rule.takes_samples + EVERY if rule.by_samples else None
    judged = rule.judge is not None
    return JudgedRule(rule.name, judged, there, needs, waits + rule.takes_seconds, samples, rule.takes_samples)


def _named(need: Need) -> str:
    return f'{need[0].name}{{{need[0].labels[0]}="{need[1]}"}}' if isinstance(need, tuple) else need.name


# What is read back


def judged_of(saved: Mapping[str, Any]) -> RunJudgement | None:
    """What was saved; `None` of an earlier version. Raises `KeyError`, `TypeError` or `ValueError` where it is damaged."""
    found = saved.get("judged")
    if found is None:
        return None
    rules = tuple(
        JudgedRule(
            _text(one["name"]), bool(one["judged"]), bool(one["there"]), _texts(one["needs"]), float(one["seconds"]),
            None if one["samples"] is None else int(one["samples"]), int(one["least"]),
        )
        for one in found["rules"]
    )  # fmt: skip
    wrong = tuple(
        Wrong(
            _text(one["alert"]), _text(one["severity"]), None if one["layer"] is None else _text(one["layer"]),
            _texts(one["others"]), _text(one["text"]), None if one["value"] is None else float(one["value"]),
            int(one["first"]), int(one["last"]), bool(one["by_samples"]),
        )
        for one in found["wrong"]
    )  # fmt: skip
    return RunJudgement(int(found["samples"]), float(found["seconds"]), rules, wrong)


def metrics_of(saved: Mapping[str, Any]) -> dict[str, Metric]:
    """The gauges and counters at the end by name; none of an earlier version. Raises as `judged_of`."""
    found = {}
    for name, one in (saved.get("metrics") or {}).items():
        labels, rows = _texts(one["labels"]), [_texts(row) for row in one["rows"]]
        if any(len(row) != len(labels) for row in rows):
            raise ValueError(f"the rows of {name} have not the labels {', '.join(labels)}")
        found[name] = Metric(labels, dict(zip(rows, map(float, one["values"]), strict=True)))
    return found


def _texts(found: Sequence[object]) -> tuple[str, ...]:
    if not isinstance(found, list):
        raise TypeError(f"{found!r:.40} is no list")
    return tuple(map(_text, found))


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r:.40} is no text")
    return found
