"""The alerts that are shipped: each is tested, documented, and asks for what there is."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from dashboards.generate.alerts import numbers
from tests.rules.test_rules import ALERTS, OF_PROMETHEUS, RULES, TESTS, exported, metrics, rules
from tests.support.catalogue import CATALOGUE
from tests.support.tools import REPOSITORY
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.capture.phases import PHASES
from torch_grad_exporter.collectors.gpu import QUESTIONS
from torch_grad_exporter.collectors.outcomes import Outcome as Done
from torch_grad_exporter.collectors.outcomes import Result as Sent
from torch_grad_exporter.collectors.training import STATES
from torch_grad_exporter.rules import GROUPS, Alert, Rule
from torch_grad_exporter.stages import SOURCES
from torch_grad_exporter.transfer.events import Outcome
from torch_grad_exporter.transfer.outcomes import Mode

RUNBOOK = (REPOSITORY / "docs" / "runbook.md").read_text(encoding="utf-8")
KINDS = ("fires", "at the limit", "finished", "stale")
PARTS = ("What it means.", "Likely causes.", "What to do.", "To silence it.")

TABLE = """
TrainingNonFiniteGradients TrainingNonFiniteLoss TrainingStalled TrainingNeverStarted TrainingFailed TrainingTargetDown
TrainingRankMissing GradientExploding GradientVanishing LayerDead LayerWithoutGradient LossSpike LossNotImproving
ThroughputRegression DataLoaderStarvation StragglerRank RankDesync CudaMemoryNearLimit CudaAllocRetries CudaOutOfMemory
CudaMemoryFragmented GpuThrottled GpuEccErrors GpuUnderused HostMemoryPressure ExporterOverBudget ExporterBlind
ExporterCollectorFailing ExporterSkippingSamples ExporterFoldedLayers TrainingRestarting TrainingPushStopped
GradientClippingFailing TrainingStoppedItself ActionFailing NotificationsFailing LayerNotUpdating ModelsOutOfBalance
"""
"""The alerts that the design demands, the one that its review has added, the one for runs that are pushed, those of actions, of
weights and of several models."""

EVALUATES = "fires, though it evaluates for one minute in ten"
"""The name of the unit test of each alert that asks whether a run evaluates."""

TOOLS = {
    "activations=True": "activations.md",
    "exporter.watch(": "activations.md#watch",
    "weights=True": "metrics.md#weights",
    "nan_origin=": "nan-origin.md",
    "explain(": "explain.md",
    "record": "record.md",
}
"""The tools of inspection as the texts name them, and the page on each."""

NO_METRICS = {"torch_grad_exporter"}
"""What begins like a metric and is the package."""

VALUES = {
    "state": set(STATES),
    "phase": set(PHASES),
    "outcome": {outcome.value for outcome in Outcome},
    "mode": {mode.value for mode in Mode},
    "reason": {question.label[0] for question in QUESTIONS if question.spec.labels[-1] == "reason"},
    "result": {result.value for kind in (Done, Sent) for result in kind},
    "action": {Stop.__name__},
    "source": set(SOURCES),
    "kind": {"nan", "inf"} | {question.label[0] for question in QUESTIONS if question.spec.labels[-1] == "kind"},
}
"""What the labels of metrics can be."""


def alerts() -> dict[str, list[dict[str, object]]]:
    """The rules of each alert: one for each severity."""
    found: dict[str, list[dict[str, object]]] = defaultdict(list)
    for path in ALERTS:
        for rule in rules(path):
            found[rule["alert"]].append(dict(rule))
    return dict(found)


BY_NAME = alerts()
DECLARED = {rule.name: rule for group in GROUPS for rule in group.rules}


def test_there_are_all_alerts() -> None:
    """The alerts are those that the design demands, and no others."""
    assert sorted(BY_NAME) == sorted(TABLE.split())


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_alert_says_how_grave_it_is_and_what_happened(name: str) -> None:
    """A severity that Alertmanager routes by, a summary, and a description with the first steps; no label with a value in it."""
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


@pytest.mark.parametrize("path", ALERTS, ids=lambda path: path.name)
def test_alerts_ask_for_metrics_that_exist(path: Path) -> None:
    """Each metric in an expression is in the catalogue or recorded."""
    known = {*exported(), *(rule["record"] for recorded in RULES for rule in rules(recorded)), "up"}
    for rule in rules(path):
        asked = metrics(rule["expr"])
        assert asked
        assert asked <= known, rule["alert"]


@pytest.mark.parametrize("path", [*RULES, *ALERTS], ids=lambda path: path.name)
def test_rules_ask_for_labels_and_values_that_exist(path: Path) -> None:
    """Each matcher names a label of its metric, and each value in it is one that the exporter gives to that label."""
    labels = exported()
    for rule in rules(path):
        for metric, matchers in re.findall(r"(torch_\w+)\{([^}]*)\}", rule["expr"]):
            for label, values in re.findall(r'(\w+)\s*[=!]~?"([^"]*)"', matchers):
                assert label in labels.get(metric, {label}), rule
                assert set(values.split("|")) <= VALUES[label], rule


@pytest.mark.parametrize("path", [*RULES, *ALERTS], ids=lambda path: path.name)
def test_rules_group_by_labels_that_exist(path: Path) -> None:
    """Each label that is grouped or matched by is one of the metrics in that expression, or of all series."""
    labels = exported()
    for rule in rules(path):
        of_these = {label for metric in metrics(rule["expr"]) for label in labels.get(metric, ())}
        for names in re.findall(r"\b(?:by|on|group_left|group_right|without) \(([^)]*)\)", rule["expr"]):
            asked = set(names.replace(" ", "").split(",")) - {""}
            assert asked <= of_these | OF_PROMETHEUS | {"run", "rank", "layer"}, rule


def parenthesis(text: str) -> str:
    """What is within the parenthesis with which the text begins."""
    assert text.startswith("(")
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[1:position].strip()
    raise AssertionError(text)


@pytest.mark.parametrize("path", [*RULES, *ALERTS], ids=lambda path: path.name)
def test_divisions_are_guarded(path: Path) -> None:
    """What is divided by is in parentheses and kept above a number within them: a division by 0 is NaN, or infinite."""
    for rule in rules(path):
        for division in re.finditer(r"(?:^|\s)/ (?:on \(\w+\) group_left \(\) )?", rule["expr"]):
            assert re.search(r" > \d+$", parenthesis(rule["expr"][division.end() :])), rule


def unit_tests() -> dict[str, list[dict[str, object]]]:
    """The unit tests whose name begins with that of an alert."""
    found: dict[str, list[dict[str, object]]] = defaultdict(list)
    for path in TESTS:
        for test in yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["tests"]:
            name, colon, _ = test["name"].partition(": ")
            if colon:
                found[name].append(test)
    return dict(found)


UNIT_TESTS = unit_tests()


def test_healthy_runs_have_all_that_alerts_ask_for() -> None:
    """Where a metric is missing from a healthy run of the tests, that an alert is silent there would mean nothing."""
    (path,) = [path for path in TESTS if path.name == "together.test.yml"]
    recorded = {rule["record"] for rules_path in RULES for rule in rules(rules_path)}
    asked = {metric for file in [*RULES, *ALERTS] for rule in rules(file) for metric in metrics(rule["expr"])} - recorded
    shown = {
        series["series"].partition("{")[0]
        for test in yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["tests"]
        for series in test["input_series"]
    }
    assert asked - shown == {"torch_grad_noise_scale", "torch_layer_frozen"}  # Opt-in, and what they show is no fault.


def firing(test: dict[str, object]) -> list[dict[str, str]]:
    """The alerts that a unit test expects, as their labels."""
    found = []
    for check in test["promql_expr_test"]:  # type: ignore[attr-defined]
        assert check["expr"].startswith("ALERTS{")
        found += [dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"])) for sample in check["exp_samples"]]
    return found


def test_unit_tests_are_of_alerts_that_exist() -> None:
    """No unit test is of an alert that has been renamed."""
    assert UNIT_TESTS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_alert_has_four_kinds_of_unit_test(name: str) -> None:
    """One in which it fires, with each of its severities; none at the limit, for a finished run and for series that ended."""
    of_kind = {kind: [test for test in UNIT_TESTS[name] if str(test["name"]).startswith(f"{name}: {kind}")] for kind in KINDS}
    assert all(of_kind.values())
    seen = [labels for test in of_kind["fires"] for labels in firing(test)]
    assert {labels["severity"] for labels in seen} == {rule["labels"]["severity"] for rule in BY_NAME[name]}  # type: ignore[index]
    for kind in KINDS[1:]:
        for test in of_kind[kind]:
            assert not firing(test), test["name"]
            assert f'alertname="{name}"' in str(test), test["name"]


def gated() -> list[str]:
    """The alerts that are kept to runs, ranks or targets which train or evaluate."""
    return sorted(name for name, of in BY_NAME.items() if any("training|evaluating" in str(rule["expr"]) for rule in of))


def test_no_alert_ends_with_an_evaluation() -> None:
    """No alert asks that a run trains right now: a short evaluation would begin each `for` anew."""
    now = re.compile(r'(?<!max_over_time\()torch_train_state\{state="training"')
    assert [name for name, of in BY_NAME.items() if any(now.search(str(rule["expr"])) for rule in of)] == []
    assert len(gated()) == 14


@pytest.mark.parametrize("name", [name for name in gated() if name not in {"TrainingNeverStarted", "TrainingTargetDown"}])
def test_evaluations_now_and_then_do_not_stop_an_alert(name: str) -> None:
    """It fires as often as it evaluates for a minute out of ten, with each of its severities."""
    (test,) = [test for test in UNIT_TESTS[name] if test["name"] == f"{name}: {EVALUATES}"]
    assert {labels["severity"] for labels in firing(test)} == {rule["labels"]["severity"] for rule in BY_NAME[name]}  # type: ignore[index]
    assert 'state="evaluating"' in str(test)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_alert_has_the_labels_that_its_texts_name(name: str) -> None:
    """Every label in the texts is on the alert when it fires; each alert has its run, and none the job or the instance."""
    named = set(re.findall(r"\$labels\.(\w+)", str(BY_NAME[name])))
    seen = [labels for test in UNIT_TESTS[name] for labels in firing(test)]
    for labels in seen:
        assert labels["alertname"] == name
        assert labels.keys() >= named | {"run", "severity"}
        assert not labels.keys() & OF_PROMETHEUS


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_tests_of_ended_runs_are_those_in_which_it_fires(name: str) -> None:
    """What is finished or ends is the same metrics as in the first test in which it fires: an empty test would prove nothing."""

    def asked(kind: str) -> set[str]:
        first = next(test for test in UNIT_TESTS[name] if str(test["name"]).startswith(f"{name}: {kind}"))
        return {series["series"].partition("{")[0] for series in first["input_series"]}  # type: ignore[attr-defined]

    assert asked("finished") == asked("fires") | {"torch_train_state"}
    assert asked("stale") == asked("fires")


def table() -> dict[str, list[str]]:
    """The rows of the table in the runbook: severity, judges, numbers, `for` and `keep_firing_for` by alert."""
    rows = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| (.*) \|$", RUNBOOK, flags=re.MULTILINE)
    assert all(name == anchor for name, anchor, _ in rows)
    return {name: [cell.strip() for cell in rest.split("|")] for name, _, rest in rows}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_numbers_are_told(name: str) -> None:
    """The runbook's table has the thresholds of the expressions, in their order; the declaration says why they are as they are."""
    severities, judges, values, lasting, keeping = table()[name]
    assert values == (", ".join(numbers(DECLARED[name])) or "none")
    assert severities == ", ".join(rule["labels"]["severity"] for rule in BY_NAME[name])  # type: ignore[index]
    assert judges == ("server" if DECLARED[name].judge is None else "server, process")
    assert {lasting} == {str(rule.get("for", "at once")) for rule in BY_NAME[name]}
    assert {keeping} == {str(rule.get("keep_firing_for", "")) for rule in BY_NAME[name]}
    if values != "none":
        assert len(DECLARED[name].why) > 20


def test_numbers_of_an_expression() -> None:
    """Thresholds and windows in their order, each once; no 0, no 1, and nothing of a label or a name."""
    expr = 'rate(a:b5m{c="2x"}[10m]) > 0.25 and d offset 10m > 1e-7 or 0 * e > 1'
    assert numbers(Rule(name="A", alerts=(Alert("info", expr),))) == ["10m", "0.25", "1e-7"]


def test_the_runbook_is_about_these_alerts() -> None:
    """Each alert has one section, which its link leads to, and one row of the table; there are no others."""
    assert sorted(re.findall(r"^## ([A-Z]\w+)$", RUNBOOK, flags=re.MULTILINE)) == sorted(BY_NAME)
    assert sorted(table()) == sorted(BY_NAME)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_runbook_says_what_to_do(name: str) -> None:
    """A section says what the alert means, its three likeliest causes, what to do, and how to silence it by the labels it has."""
    section = re.split(r"^## ", RUNBOOK.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    positions = [section.find(f"**{part}**") for part in PARTS]
    assert positions == sorted(positions)
    assert positions[0] >= 0
    causes = section[positions[1] : positions[2]]
    assert re.findall(r"^(\d)\. ", causes, flags=re.MULTILINE) == ["1", "2", "3"]
    (command,) = re.findall(r"`amtool silence add ([^`]*)`", section)
    matchers = dict(re.findall(r"(?<![\w-])(\w+)=(\S+)", command))
    assert matchers.pop("alertname") == name
    assert {"run"} <= matchers.keys()
    seen = [labels for test in UNIT_TESTS[name] for labels in firing(test)]
    assert all(matchers.keys() <= labels.keys() for labels in seen)


def of_the_model() -> list[str]:
    """The alerts on what the model does: their expressions ask for gradients, weights, outputs of modules or the loss."""
    sections = {"Gradients", "Clipping", "Weights", "Activations", "Watched tensors"}
    shown = {spec.name for section in CATALOGUE.sections if section.title in sections for spec in section.specs}
    shown |= {name for name in CATALOGUE if re.match(r"torch_train_loss(_(spikes|nonfinite).*)?$", name)}

    def concerns(name: str) -> bool:
        return any(shown & set(re.findall(r"torch_\w+", str(rule["expr"]))) for rule in BY_NAME[name])

    return sorted(filter(concerns, BY_NAME))


def test_most_alerts_are_not_on_the_model() -> None:
    """Those on gradients, weights and losses are found by what they ask for, and no others."""
    assert of_the_model() == [
        *("GradientExploding", "GradientVanishing", "LayerDead", "LayerNotUpdating", "LayerWithoutGradient", "LossNotImproving"),
        *("LossSpike", "ModelsOutOfBalance", "TrainingNonFiniteGradients", "TrainingNonFiniteLoss"),
    ]


@pytest.mark.parametrize("name", of_the_model())
def test_the_runbook_says_what_looks_closer(name: str) -> None:
    """A section on what the model does has a part that names a tool of inspection and leads to its page."""
    section = re.split(r"^## ", RUNBOOK.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    part = section.partition("**Look closer.**")[2].partition("**To silence it.**")[0]
    links = re.findall(r"\]\(([\w-]+\.md(?:#[\w-]+)?)\)", part)
    assert any(tool.rstrip("(") in part and page in links for tool, page in TOOLS.items())
    for page, _, anchor in (link.partition("#") for link in links):
        headings = re.findall(r"^#+ (.*)$", (REPOSITORY / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_tools_of_inspection_are_there() -> None:
    """Each tool that the runbook may name is named in it, and has its page."""
    for tool, page in TOOLS.items():
        assert tool.rstrip("(") in RUNBOOK
        assert (REPOSITORY / "docs" / page.partition("#")[0]).is_file()


@pytest.mark.parametrize("page", ["runbook.md", "dashboards.md"])
def test_pages_name_metrics_that_exist(page: str) -> None:
    """Each name in the texts is that of a metric, of a record, or the beginning of some, as in `torch_cuda_*`."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    known = {*exported(), *(rule["record"] for path in RULES for rule in rules(path))}
    known |= {spec.name for spec in CATALOGUE.values()}
    for name in set(re.findall(r"(?<![\w:.])(?:[a-z_]+:)?torch_\w+(?::\w+)?\*?", text)) - NO_METRICS:
        assert name in known or (name.endswith("_*") and any(metric.startswith(name[:-1]) for metric in known)), name
