"""The shipped alerts: each has its unit tests and its section of the runbook."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from dashboards.generate.alerts import numbers
from tests.rules.test_rules import ALERTS, OF_PROMETHEUS, RULES, TESTS, exported, metrics, rules
from tests.support.catalogue import CATALOGUE
from tests.support.tools import REPOSITORY
from torch_grad_exporter.rules.catalogue import groups

RUNBOOK = (REPOSITORY / "docs" / "runbook.md").read_text(encoding="utf-8")
KINDS = ("fires", "at the limit", "finished", "stale")
PARTS = ("What it means.", "Likely causes.", "What to do.", "To silence it.")

EVALUATES = "fires, though it evaluates for one minute in ten"
"""The name of the unit test of each alert that asks whether a run evaluates."""

NO_METRICS = {"torch_grad_exporter"}
"""What begins like a metric and is the package."""


def alerts() -> dict[str, list[dict[str, object]]]:
    """Return the rules of each alert, one for each severity."""
    found: dict[str, list[dict[str, object]]] = defaultdict(list)
    for path in ALERTS:
        for rule in rules(path):
            found[rule["alert"]].append(dict(rule))
    return dict(found)


BY_NAME = alerts()
DECLARED = {rule.name: rule for group in groups() for rule in group.rules}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_alert_has_a_severity_and_texts(name: str) -> None:
    """Each alert has a severity, a summary and a description that ends with the first steps."""
    for rule in BY_NAME[name]:
        labels, annotations = rule["labels"], rule["annotations"]
        assert isinstance(labels, dict)
        assert isinstance(annotations, dict)
        assert labels.keys() == {"severity"}
        assert labels["severity"] in {"critical", "warning", "info"}
        assert annotations.keys() == {"summary", "description"}
        steps = DECLARED[name].first_steps
        assert len(steps) > 40
        assert annotations["description"].endswith(f" {steps}")
        for text in annotations.values():
            assert "\n" not in text
        assert "{{ $labels.run }}" in annotations["summary"]


def unit_tests() -> dict[str, list[dict[str, object]]]:
    """Return the unit tests of each alert."""
    found: dict[str, list[dict[str, object]]] = defaultdict(list)
    for tests in TESTS.values():
        for test in tests["tests"]:
            name, colon, _ = test["name"].partition(": ")
            if colon:
                found[name].append(test)
    return dict(found)


UNIT_TESTS = unit_tests()


def test_healthy_runs_have_all_metrics() -> None:
    """The healthy runs of the unit tests have each metric of the alerts, else their silence would prove nothing."""
    (healthy,) = [tests for path, tests in TESTS.items() if path.name == "together.cases.yml"]
    recorded = {rule["record"] for rules_path in RULES for rule in rules(rules_path)}
    asked = {metric for file in [*RULES, *ALERTS] for rule in rules(file) for metric in metrics(rule["expr"])} - recorded
    shown = {series["series"].partition("{")[0] for test in healthy["tests"] for series in test["input_series"]}
    assert asked - shown == {"torch_grad_noise_scale", "torch_layer_frozen"}  # Opt-in, and what they show is no fault.


def firing(test: dict[str, object]) -> list[dict[str, str]]:
    """Return the labels of the alerts that a unit test expects."""
    found = []
    for check in test["promql_expr_test"]:  # type: ignore[attr-defined]
        assert check["expr"].startswith("ALERTS{")
        found += [dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"])) for sample in check["exp_samples"]]
    return found


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_alert_has_four_kinds_of_unit_test(name: str) -> None:
    """Each alert fires in a test with each severity, and is silent at the limit, in a finished run and after its series end."""
    assert UNIT_TESTS.keys() == BY_NAME.keys()
    of_kind = {kind: [test for test in UNIT_TESTS[name] if str(test["name"]).startswith(f"{name}: {kind}")] for kind in KINDS}
    assert all(of_kind.values())
    seen = [labels for test in of_kind["fires"] for labels in firing(test)]
    assert {labels["severity"] for labels in seen} == {rule["labels"]["severity"] for rule in BY_NAME[name]}  # type: ignore[index]
    for kind in KINDS[1:]:
        for test in of_kind[kind]:
            assert not firing(test), test["name"]
            assert f'alertname="{name}"' in str(test), test["name"]


def gated() -> list[str]:
    """Return the alerts limited to runs that train or evaluate."""
    return sorted(name for name, of in BY_NAME.items() if any("training|evaluating" in str(rule["expr"]) for rule in of))


@pytest.mark.parametrize("name", [name for name in gated() if name not in {"TrainingNeverStarted", "TrainingTargetDown"}])
def test_short_evaluations_do_not_stop_an_alert(name: str) -> None:
    """An alert fires although the run evaluates one minute in ten."""
    (test,) = [test for test in UNIT_TESTS[name] if test["name"] == f"{name}: {EVALUATES}"]
    assert {labels["severity"] for labels in firing(test)} == {rule["labels"]["severity"] for rule in BY_NAME[name]}  # type: ignore[index]
    assert 'state="evaluating"' in str(test)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_alert_has_the_labels_of_its_texts(name: str) -> None:
    """A firing alert has its run and each label of its texts, and neither job nor instance."""
    named = set(re.findall(r"\$labels\.(\w+)", str(BY_NAME[name])))
    seen = [labels for test in UNIT_TESTS[name] for labels in firing(test)]
    for labels in seen:
        assert labels["alertname"] == name
        assert labels.keys() >= named | {"run", "severity"}
        assert not labels.keys() & OF_PROMETHEUS


def table() -> dict[str, list[str]]:
    """Return the rows of the runbook's table: severity, judges, numbers, `for` and `keep_firing_for`."""
    rows = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| (.*) \|$", RUNBOOK, flags=re.MULTILINE)
    assert all(name == anchor for name, anchor, _ in rows)
    return {name: [cell.strip() for cell in rest.split("|")] for name, _, rest in rows}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_runbook_has_the_numbers(name: str) -> None:
    """The runbook's table has the numbers of the expressions, and the declaration their reasons."""
    severities, judges, values, lasting, keeping = table()[name]
    assert values == (", ".join(numbers(DECLARED[name])) or "none")
    assert severities == ", ".join(rule["labels"]["severity"] for rule in BY_NAME[name])  # type: ignore[index]
    assert judges == ("server" if DECLARED[name].judge is None else "server, process")
    assert {lasting} == {str(rule.get("for", "at once")) for rule in BY_NAME[name]}
    assert {keeping} == {str(rule.get("keep_firing_for", "")) for rule in BY_NAME[name]}
    if values != "none":
        assert len(DECLARED[name].why) > 20


def test_the_runbook_is_about_these_alerts() -> None:
    """The runbook has one section and one row for each alert and no others."""
    assert sorted(re.findall(r"^## ([A-Z]\w+)$", RUNBOOK, flags=re.MULTILINE)) == sorted(BY_NAME)
    assert sorted(table()) == sorted(BY_NAME)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_runbook_says_what_to_do(name: str) -> None:
    """A section has the meaning, causes, what to do, and how to silence the alert by its labels."""
    section = re.split(r"^## ", RUNBOOK.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    positions = [section.find(f"**{part}**") for part in PARTS]
    assert positions == sorted(positions)
    assert positions[0] >= 0
    (command,) = re.findall(r"`amtool silence add ([^`]*)`", section)
    matchers = dict(re.findall(r"(?<![\w-])(\w+)=(\S+)", command))
    assert matchers.pop("alertname") == name
    assert {"run"} <= matchers.keys()
    seen = [labels for test in UNIT_TESTS[name] for labels in firing(test)]
    assert all(matchers.keys() <= labels.keys() for labels in seen)


@pytest.mark.parametrize("page", ["runbook.md", "dashboards.md"])
def test_pages_name_metrics_that_exist(page: str) -> None:
    """Each metric in the texts exists."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    known = {*exported(), *(rule["record"] for path in RULES for rule in rules(path))}
    known |= {spec.name for spec in CATALOGUE.values()}
    for name in set(re.findall(r"(?<![\w:.])(?:[a-z_]+:)?torch_\w+(?::\w+)?\*?", text)) - NO_METRICS:
        assert name in known or (name.endswith("_*") and any(metric.startswith(name[:-1]) for metric in known)), name
