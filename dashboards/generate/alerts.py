"""The alert rules for Prometheus and the runbook's table, from the declarations in `torch_grad_exporter/rules/`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from textwrap import wrap

from torch_grad_exporter.rules import Alert, Rule
from torch_grad_exporter.rules.catalogue import RuleGroup, groups

WIDTH = 130
"""Columns of a line, as in the rest of the repository."""

OLDEST = "For Prometheus from 2.42 on (keep_firing_for). Made by `make dashboards` from torch_grad_exporter/rules/."
"""The first sentence of each file."""

NUMBERS = (
    "The numbers in the expressions, and their reasons. Change a number where its rule is declared, or in a copy of this file. "
    "`none`: the expression only asks whether something exists."
)
"""The text above the list of numbers."""

TABLE = ("<!-- rules: made by `make dashboards` -->\n", "<!-- /rules -->\n")
"""The lines around the table in the runbook."""


def rendered() -> dict[str, str]:
    """The text of each file of alerts, by its name."""
    return {f"{group.name}.alerts.yml": _file(group) for group in groups()}


def numbers(rule: Rule) -> list[str]:
    """The numbers and durations in a rule's expressions in their order, but for 0 and 1, which are no thresholds."""
    bare = re.sub(r'"[^"]*"', "", " ".join(alert.expr for alert in rule.alerts))
    found = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?[smhd]?(?![\w.])", bare)
    return [number for number in dict.fromkeys(found) if number not in {"0", "1"}]


def with_table(runbook: str) -> str:
    """The runbook with the table as it is made now. Raises `ValueError` where its place is missing."""
    begin, end = TABLE
    head, middle, rest = runbook.partition(begin)
    _, found, tail = rest.partition(end)
    if not middle or not found:
        raise ValueError(f"the runbook has no place for the table, between {begin!r} and {end!r}")
    return head + begin + "".join(f"{line}\n" for line in _table()) + end + tail


def _table() -> Iterator[str]:
    yield "| alert | severity | judged by | numbers in the expression | for | keeps |"
    yield "|---|---|---|---|---|---|"
    for rule in (rule for group in groups() for rule in group.rules):
        severities = ", ".join(alert.severity for alert in rule.alerts)
        first = rule.alerts[0]
        values = ", ".join(numbers(rule)) or "none"
        lasting = first.for_ or "at once"
        judges = "server" if rule.judge is None else "server, process"
        name = f"[{rule.name}](#{rule.name})"
        yield f"| {name} | {severities} | {judges} | {values} | {lasting} | {first.keep_firing_for} |"


# A file


def _file(group: RuleGroup) -> str:
    reasons = (
        f"{rule.name}: {', '.join(numbers(rule)) or 'none'}; {rule.why or 'it has no number to explain.'}" for rule in group.rules
    )
    lines = [
        *_comment(f"{group.title} {OLDEST}"),
        *(line for text in (*group.about, NUMBERS) for line in ("#", *_comment(text))),
        "#",
        *(line for text in reasons for line in _comment(text, hanging="  ")),
        "groups:",
        f"  - name: {group.group}",
        "    rules:",
        *_rules(group.rules),
    ]
    return "".join(f"{line}\n" for line in lines)


def _rules(rules: Iterable[Rule]) -> Iterator[str]:
    for number, rule in enumerate(rules):
        if number:
            yield ""
        yield from _comment(rule.note, " " * 6)
        for alert in rule.alerts:
            yield from _alert(rule, alert)


def _alert(rule: Rule, alert: Alert) -> Iterator[str]:
    yield f"      - alert: {rule.name}"
    yield "        expr: >-"
    yield from (f"          {line}" for line in alert.expr.splitlines())
    if alert.for_:
        yield f"        for: {alert.for_}"
    if alert.keep_firing_for:
        yield f"        keep_firing_for: {alert.keep_firing_for}"
    yield f"        labels: {{severity: {alert.severity}}}"
    yield "        annotations:"
    yield from _annotation("summary", alert.summary)
    yield from _annotation("description", f"{alert.description} {rule.first_steps}")


def _annotation(name: str, text: str) -> Iterator[str]:
    line = f"          {name}: {json.dumps(text) if text.startswith('{') else text}"
    if len(line) <= WIDTH:
        yield line
    else:
        yield f"          {name}: >-"
        yield from _wrapped(text, " " * 12, " " * 12)


def _comment(text: str, indent: str = "", hanging: str = "") -> list[str]:
    begin = f"{indent}# "
    return _wrapped(text, begin, begin + hanging)


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False)
