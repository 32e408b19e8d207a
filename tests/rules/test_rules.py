"""The shipped rules: promtool accepts them, their unit tests pass, and they ask for what exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.catalogue import CATALOGUE
from tests.support.rule_cases import load
from tests.support.tools import FOREVER, REPOSITORY, find
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.collectors.gpu import QUESTIONS
from torch_grad_exporter.collectors.outcomes import ActionOutcome as Done
from torch_grad_exporter.collectors.outcomes import NotifyResult as Sent
from torch_grad_exporter.collectors.training import STATES
from torch_grad_exporter.inspection.time_by_cause import CAUSES
from torch_grad_exporter.metrics.families import Kind

PROMETHEUS = REPOSITORY / "dashboards" / "prometheus"
RULES = sorted(PROMETHEUS.glob("*.rules.yml"))
ALERTS = sorted(PROMETHEUS.glob("*.alerts.yml"))
TESTS = {path: load(path) for kind in ("test", "cases") for path in sorted((REPOSITORY / "tests" / "rules").glob(f"*.{kind}.yml"))}

OF_PROMETHEUS = {"job", "instance"}
"""Labels of every series in Prometheus."""

OF_OTHERS = {"uuid", "namespace", "pod", "node", "container"}
"""Labels by which series of other exporters are joined; joins.rules.yml has unit tests for them."""

VALUES = {
    "state": set(STATES),
    "cause": set(CAUSES),
    "phase": {"data", "outside", "optimizer"},
    "outcome": {"skipped"},
    "reason": {question.label[0] for question in QUESTIONS if question.spec.labels[-1] == "reason"},
    "result": {result.value for kind in (Done, Sent) for result in kind},
    "action": {Stop.__name__},
    "source": {"clip"},
    "uuid": {""},
    "pod": {""},
    "kind": {"nan", "inf"} | {question.label[0] for question in QUESTIONS if question.spec.labels[-1] == "kind"},
}
"""The values of labels that the exporter gives and rules ask for."""


def promtool(*arguments: object) -> None:
    """Run promtool; its complaints fail the test."""
    command = [find("promtool"), *map(str, arguments)]
    # It would spend a third of its time on collecting garbage.
    environment = os.environ | {"GOGC": "off", "GOMEMLIMIT": "700MiB"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=FOREVER, check=False, env=environment)
    assert done.returncode == 0, re.sub(r"Unit Testing:.*\n +SUCCESS\n+", "", done.stdout + done.stderr)


def rules(path: Path) -> list[dict[str, str]]:
    """Return the rules of a file in order."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported() -> dict[str, set[str]]:
    """Return the labels of each exported series by name."""
    known = {}
    for spec in CATALOGUE.values():
        labels = {"run", "rank", *spec.labels}
        if spec.kind is Kind.HISTOGRAM:
            known |= {spec.name + end: labels | {"le"} for end in ("_sum", "_count", "_bucket")}
        else:
            known[spec.name] = labels
    return known


def test_all_rules_are_tested() -> None:
    """Each file of rules is loaded by a file of unit tests, which load only shipped rules."""
    loaded = {(path.parent / name).resolve() for path, tests in TESTS.items() for name in tests["rule_files"]}
    assert RULES
    assert ALERTS
    assert loaded == {*RULES, *ALERTS}


@pytest.mark.server
def test_promtool_takes_the_rules() -> None:
    """Promtool and its linter accept the rules."""
    promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES, *ALERTS)


@pytest.mark.server
def test_promtool_takes_the_configuration() -> None:
    """Promtool accepts the sample configuration, which loads all rules and keeps the labels of series."""
    path = PROMETHEUS / "prometheus.yml"
    promtool("check", "config", path)
    configuration = yaml.safe_load(path.read_text())
    assert {found for pattern in configuration["rule_files"] for found in PROMETHEUS.glob(pattern)} == {*RULES, *ALERTS}
    (training,) = [scrape for scrape in configuration["scrape_configs"] if scrape["job_name"] == "training"]
    assert training["honor_labels"] is True


@pytest.mark.slow
@pytest.mark.server
def test_promtool_unit_tests(tmp_path: Path) -> None:
    """Promtool runs the unit tests of rules and alerts."""
    for path, tests in TESTS.items():
        files = [str((path.parent / name).resolve()) for name in tests["rule_files"]]
        (tmp_path / path.name).write_text(json.dumps({**tests, "rule_files": files}))
    promtool("test", "rules", *tmp_path.iterdir())


def metrics(expression: str) -> set[str]:
    """Return the metrics and records in an expression."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"(?<![\w:])(?:[a-z_]+:)?(?:torch_\w+|up\b(?! ?:))(?::\w+)?", bare))


@pytest.mark.parametrize("path", [*RULES, *ALERTS], ids=lambda path: path.name)
def test_rules_ask_for_what_exists(path: Path) -> None:
    """Metrics, labels and values of labels in an expression are exported or recorded; records are level:metric:operation."""
    labels = exported()
    known = {*labels, "up", *(rule["record"] for file in RULES for rule in rules(file))}
    for rule in rules(path):
        assert re.fullmatch(r"[a-z_]+:[a-z_]+:[a-z0-9_]+", rule.get("record", "a:b:c"))
        asked = metrics(rule["expr"])
        assert asked
        assert asked <= known, rule
        for metric, matchers in re.findall(r"(torch_\w+)\{([^}]*)\}", rule["expr"]):
            for label, values in re.findall(r'(\w+)\s*[=!]~?"([^"]*)"', matchers):
                assert label in labels.get(metric, {label}) | OF_OTHERS, rule
                assert set(values.split("|")) <= VALUES[label], rule
        of_these = {label for metric in asked for label in labels.get(metric, ())}
        for names in re.findall(r"\b(?:by|on|group_left|group_right|without) \(([^)]*)\)", rule["expr"]):
            grouped = set(names.replace(" ", "").split(",")) - {""}
            joined = OF_OTHERS if path.name == "joins.rules.yml" else set()
            assert grouped <= of_these | OF_PROMETHEUS | joined | {"run", "rank", "layer"}, rule
