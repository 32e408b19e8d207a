"""The rules that are shipped: what promtool says of them, and that they ask for what there is."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.catalogue import CATALOGUE
from tests.support.tools import PATIENCE, REPOSITORY, find
from torch_grad_exporter.metrics.families import Kind

PROMETHEUS = REPOSITORY / "dashboards" / "prometheus"
RULES = sorted(PROMETHEUS.glob("*.rules.yml"))
ALERTS = sorted(PROMETHEUS.glob("*.alerts.yml"))
TESTS = sorted((REPOSITORY / "tests" / "rules").glob("*.test.yml"))

MADE_BY_PROMETHEUS = {"up"}
"""What a rule may ask for that is neither exported nor recorded."""

OF_PROMETHEUS = {"job", "instance"}
"""Labels that every series has beside `run`, `rank` and those of its metric."""


def promtool(*arguments: object) -> None:
    """Runs promtool; what it complains of fails the test."""
    command = [find("promtool"), *map(str, arguments)]
    # It would spend a third of its time on collecting garbage.
    environment = os.environ | {"GOGC": "off", "GOMEMLIMIT": "700MiB"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def rules(path: Path) -> list[dict[str, str]]:
    """The rules of a file, in their order."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported() -> dict[str, set[str]]:
    """The labels of each metric of the catalogue, by the names that its series have."""
    known = {}
    for spec in CATALOGUE.values():
        labels = {"run", "rank", *spec.labels}
        if spec.kind is Kind.HISTOGRAM:
            known |= {spec.name + end: labels | {"le"} for end in ("_sum", "_count", "_bucket")}
        else:
            known[spec.name] = labels
    return known


def test_all_rules_are_tested() -> None:
    """Each file of rules is loaded by a file of tests, and each of these loads only what there is."""
    loaded = {(path.parent / name).resolve() for path in TESTS for name in yaml.safe_load(path.read_text())["rule_files"]}
    assert RULES
    assert ALERTS
    assert loaded == {*RULES, *ALERTS}


@pytest.mark.parametrize("path", [*RULES, *ALERTS], ids=lambda path: path.name)
def test_promtool_takes_the_rules(path: Path) -> None:
    """The tool of Prometheus finds nothing to complain of, nor does its linter."""
    promtool("check", "rules", "--lint=all", "--lint-fatal", path)


def test_promtool_takes_the_configuration() -> None:
    """So it does with the sample of a configuration, which loads all rules and lets labels of series win over those of targets."""
    path = PROMETHEUS / "prometheus.yml"
    promtool("check", "config", path)
    configuration = yaml.safe_load(path.read_text())
    assert {found for pattern in configuration["rule_files"] for found in PROMETHEUS.glob(pattern)} == {*RULES, *ALERTS}
    (training,) = [scrape for scrape in configuration["scrape_configs"] if scrape["job_name"] == "training"]
    assert training["honor_labels"] is True


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_rules_say_what_is_so(path: Path) -> None:
    """Of series that are made up the rules make what is written down beside them."""
    promtool("test", "rules", path)


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_ask_for_metrics_that_exist(path: Path) -> None:
    """Each metric in an expression is in the catalogue or recorded above it, and each record is called level:metric:operation."""
    known = {*exported(), *MADE_BY_PROMETHEUS}
    for rule in rules(path):
        assert re.fullmatch(r"[a-z_]+:[a-z_]+:[a-z0-9_]+", rule["record"])
        known.add(rule["record"])  # A rule may ask for its own last value.
        asked = metrics(rule["expr"])
        assert asked
        assert asked <= known, rule["record"]


def metrics(expression: str) -> set[str]:
    """The metrics and records that an expression asks for."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"(?<![\w:])(?:[a-z_]+:)?(?:torch_\w+|up\b(?! ?:))(?::\w+)?", bare))
