"""Unit tests of alerts for promtool, from files without what is the same in all of them.

A case has a name, `<alert>: <kind>`, and under it:

- `series`: the values of each series. Those of the exporter have `run="a", rank="0", job="t", instance="h:<rank>"` unless they say
  otherwise; an empty text stands for a label that is not there.
- a severity, with further labels if any, such as `warning{layer="x"}`: when the alert fires with these labels, of run `a` unless
  they say otherwise; `silent`: when it does not; `never`: when it is not even pending. `nothing`: when no alert at all is.
- `interval`: of the samples, else a minute.
- `processes`: each has the series of `healthy`, of all and of its kind, from the minute `late` on, its second `$start`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml

LABEL = re.compile(r'(\w+)="([^"]*)"')
QUESTIONS = {
    "silent": 'ALERTS{{alertname="{alert}", alertstate="firing"}}',
    "never": 'ALERTS{{alertname="{alert}"}}',
    "nothing": "ALERTS",
}


def load(path: Path) -> dict[str, Any]:
    """Return a file of unit tests as promtool takes it: one of cases, or one that is written for promtool itself."""
    text = path.read_text(encoding="utf-8")
    if not path.name.endswith(".cases.yml"):
        return yaml.load(text, yaml.CSafeLoader)  # type: ignore[no-any-return]
    content = yaml.load(text, yaml.CBaseLoader)  # noqa: S506 - it makes texts only: `0x9` is no number here
    healthy = content.pop("healthy", {})
    return {**content, "tests": [_test(name, case, healthy) for name, case in content["tests"].items()]}


def _test(name: str, case: dict[str, Any], healthy: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    series = {_series(written): values for written, values in case.pop("series", {}).items()}
    for process in case.pop("processes", ()):
        series |= _of_process(process, healthy)
    return {
        "name": name,
        "interval": case.pop("interval", "1m"),
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [*_checks(name.partition(": ")[0], case)],
    }


def _of_process(process: Mapping[str, str], healthy: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    where = {name: process.get(name, usual) for name, usual in _usual(process).items()}
    late = int(process.get("late", 0))
    for written, value in {**healthy["all"], **healthy[process.get("kind", "whole")]}.items():
        name, labels = _parsed(Template(written).substitute(where))
        identity = where if name.startswith("torch_") else {key: where[key] for key in ("job", "instance")}
        values = f"{Template(value).substitute(start=60 * late)}x{process['samples']}"
        yield _metric(name, identity | labels), f"_x{late} {values}" if late else values


def _series(written: str) -> str:
    name, labels = _parsed(written)
    usual = _usual(labels) if name.startswith("torch_") else {}
    return _metric(name, {key: text for key, text in (usual | labels).items() if text or key not in usual})


def _usual(labels: Mapping[str, str]) -> dict[str, str]:
    return {"run": "a", "rank": "0", "job": "t", "instance": f"h:{labels.get('rank', 0)}"}


def _parsed(written: str) -> tuple[str, dict[str, str]]:
    name, _, labels = written.removesuffix("}").partition("{")
    return name, dict(LABEL.findall(labels))


def _checks(alert: str, case: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    firing: dict[str, list[dict[str, Any]]] = {}
    for expected, times in case.items():
        if (question := QUESTIONS.get(expected)) is not None:
            yield from ({"expr": question.format(alert=alert), "eval_time": at, "exp_samples": []} for at in times.split())
            continue
        severity, own = _parsed(expected)
        labels = {"alertname": alert, "alertstate": "firing", "run": "a", **own, "severity": severity}
        for at in times.split():
            firing.setdefault(at, []).append({"labels": _metric("ALERTS", labels), "value": 1})
    for at, samples in firing.items():
        yield {"expr": QUESTIONS["silent"].format(alert=alert), "eval_time": at, "exp_samples": samples}


def _metric(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ", ".join(f'{key}="{text}"' for key, text in labels.items()) + "}"
