"""amtool accepts the shipped Alertmanager configuration, and a real Alertmanager routes by it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.real_alertmanager import SHIPPED, Alertmanager, Webhook, alertmanager, shortened, webhook
from tests.support.tools import PATIENCE, eventually, find

TEXT = SHIPPED.read_text(encoding="utf-8")


def amtool(*arguments: object) -> str:
    """Run amtool; a complaint fails the test."""
    done = subprocess.run([find("amtool"), *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_examples() -> str:
    """Return the configuration with its commented examples enabled."""
    return re.sub(r"^    # (?=(  )*(- )?\w+:)", "    ", TEXT, flags=re.MULTILINE)


@pytest.mark.server
def test_amtool_accepts_the_configuration() -> None:
    """The amtool check passes and sees each route, receiver and template."""
    said = amtool("check-config", SHIPPED)
    for found in ("12 inhibit rules", "3 receivers", "1 templates"):
        assert f" - {found}\n" in said


@pytest.mark.server
def test_amtool_accepts_the_examples(tmp_path: Path) -> None:
    """The receivers that are commented out pass amtool too."""
    (tmp_path / "all.yaml").write_text(with_examples().replace("templates/*", f"{SHIPPED.parent}/templates/*"))
    amtool("check-config", tmp_path / "all.yaml")
    receivers = yaml.safe_load(with_examples())["receivers"]
    kinds = sorted(kind for receiver in receivers for kind in receiver if kind != "name")
    assert kinds == ["email_configs", "pagerduty_configs", "slack_configs", "webhook_configs", "webhook_configs"]


def test_secrets_are_in_files() -> None:
    """Every secret of the configuration and of its examples is read from a file."""
    keys = set(re.findall(r"(\w*(?:url|key|password|token|secret)\w*):", with_examples()))
    assert keys - {"title_link"} == {"url_file", "routing_key_file", "api_url_file", "auth_password_file"}


@pytest.mark.server
@pytest.mark.parametrize(
    ("severity", "receiver"), [("critical", "pager"), ("warning", "team"), ("info", "nobody"), ("unheard-of", "team")]
)
def test_each_severity_has_its_receiver(severity: str, receiver: str) -> None:
    """Each severity has one receiver, and an unknown severity still reaches someone."""
    labels = (f"severity={severity}", "alertname=GradientExploding", "run=a", "rank=0")
    assert amtool("config", "routes", "test", f"--config.file={SHIPPED}", *labels).split() == [receiver]


def test_rules_and_routes_speak_of_the_same_alerts() -> None:
    """Every alert of an inhibition exists, and every severity has a route."""
    configuration = yaml.safe_load(TEXT)
    files = sorted((SHIPPED.parents[1] / "prometheus").glob("*.alerts.yml"))
    rules = [rule for path in files for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    named = set(re.findall(r'alertname(?:=|!=|=~|!~)"([^"]+)"', str(configuration["inhibit_rules"])))
    names = {name for alternatives in named for name in alternatives.split("|")}
    assert names
    assert names - {rule["alert"] for rule in rules} == set()
    routed = {matcher for route in configuration["route"]["routes"] for matcher in route["matchers"]}
    assert {f'severity="{rule["labels"]["severity"]}"' for rule in rules} == routed


@pytest.mark.server
def test_notification_text(tmp_path: Path) -> None:
    """The templates give a title with alert, run and count, then eight lines and what to do."""
    alerts = [
        {
            "status": "firing",
            "labels": {"alertname": "LayerDead", "run": "a", "layer": str(layer)},
            "annotations": {
                "summary": f"Layer {layer}.",
                "description": f"D{layer}",
                "runbook_url": "https://example.org/#layerdead",
            },
        }
        for layer in range(9)
    ]
    template = '--template.text={{ template "training.title" . }}|{{ template "training.text" . }}'
    texts = []
    for count in (1, 9):
        data = {"status": "firing", "alerts": alerts[:count], "groupLabels": {"alertname": "LayerDead", "run": "a"}}
        (tmp_path / "data.json").write_text(json.dumps(data))
        glob = f"--template.glob={SHIPPED.parent}/templates/*.tmpl"
        texts.append(amtool("template", "render", glob, template, f"--template.data={tmp_path / 'data.json'}").strip())
    action = "What to do: https://example.org/#layerdead"
    assert texts[0] == f"[FIRING] LayerDead in run a|Layer 0.\nD0\n{action}"
    lines = [f"Layer {layer}." for layer in range(8)]
    head, *rest = texts[1].split("|", 1)[1].splitlines()
    assert texts[1].startswith("[FIRING] LayerDead in run a (9 alerts)|")
    assert [head, *rest] == [*lines, "and others: 9 alerts in all", "D0", action]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Alertmanager, Webhook]]:
    """One Alertmanager for the tests below, each of which has runs of its own."""
    directory = tmp_path_factory.mktemp("alertmanager")
    with webhook() as receiver, alertmanager(directory, shortened(directory, receiver)) as running:
        yield running, receiver


Served = tuple[Alertmanager, Webhook]


def alert(name: str, severity: str, run: str | None, **labels: str) -> dict[str, str]:
    """The labels of an alert; without a run it has no such label."""
    return {"alertname": name, "severity": severity, **({} if run is None else {"run": run}), **labels}


def told(receiver: Webhook, *runs: str) -> list[tuple[str, str, str]]:
    """Return receiver, alert and run of each notification of these runs."""
    return sorted(each for each in receiver.firing() if each[2] in runs)


@pytest.mark.server
def test_ranks_of_a_run_are_one_page(served: Served) -> None:
    """Two runs of eight ranks with one alert make two notifications."""
    running, receiver = served
    ranks = [alert("TrainingStalled", "critical", run, rank=str(rank)) for run in ("eight-1", "eight-2") for rank in range(8)]
    running.post(*ranks)
    assert eventually(lambda: len(told(receiver, "eight-1", "eight-2")) >= 2)
    running.post(*ranks)
    running.post(alert("LossSpike", "warning", "eight-later"))
    assert eventually(lambda: told(receiver, "eight-later") != [])
    assert told(receiver, "eight-1", "eight-2") == [("pager", "TrainingStalled", f"eight-{n}") for n in (1, 2)]
    pages = [each for each in receiver.received if each.run in ("eight-1", "eight-2")]
    assert [sorted(found["labels"]["rank"] for found in page.alerts) for page in pages] == [list("01234567")] * 2


SILENCED = {
    "TrainingFailed": [
        *("TrainingTargetDown", "TrainingPushStopped", "TrainingStalled"),
        *("CudaOutOfMemory", "GradientExploding", "TrainingRankMissing"),
    ],
    "TrainingTargetDown": [
        *("TrainingPushStopped", "TrainingStalled", "TrainingRankMissing"),
        *("StragglerRank", "ExporterBlind", "GpuUnderused"),
    ],
    "TrainingPushStopped": ["TrainingStalled", "TrainingRankMissing", "RankDesync", "ExporterBlind", "GpuUnderused"],
    "TrainingNonFiniteGradients": ["GradientExploding", "LossSpike", "TrainingNonFiniteLoss"],
    "TrainingNonFiniteLoss": ["GradientExploding", "LossSpike"],
    "LayerDead": ["GradientVanishing"],
    "LayerWithoutGradient": ["LayerNotUpdating"],
    "GradientVanishing": ["LayerNotUpdating"],
    "CudaOutOfMemory": ["TrainingStalled", "CudaAllocRetries", "CudaMemoryNearLimit"],
    "CudaMemoryNearLimit": ["CudaAllocRetries"],
    "TrainingStalled": ["GpuUnderused", "DataLoaderStarvation", "ThroughputRegression"],
}
"""What is silenced by each alert."""

LOUD = {
    "TrainingFailed": ["TrainingRestarting"],
    "TrainingTargetDown": [
        *("TrainingNonFiniteGradients", "CudaOutOfMemory", "GpuEccErrors", "HostMemoryPressure"),
        *("GradientClippingFailing", "TrainingStoppedItself"),
    ],
    "TrainingPushStopped": ["TrainingNonFiniteGradients", "TrainingRestarting", "GpuEccErrors", "HostMemoryPressure"],
    "TrainingNonFiniteGradients": ["GradientVanishing", "TrainingStalled"],
    "TrainingNonFiniteLoss": ["LossNotImproving"],
    "LayerDead": ["GradientExploding"],
    "LayerWithoutGradient": ["LayerDead"],
    "GradientVanishing": ["LayerWithoutGradient"],
    "CudaOutOfMemory": ["GradientExploding", "CudaMemoryFragmented"],
    "CudaMemoryNearLimit": ["CudaMemoryFragmented"],
    "TrainingStalled": ["RankDesync", "GradientExploding", "HostMemoryPressure"],
}
"""What is not, though it is of the same run."""


@pytest.mark.server
@pytest.mark.parametrize("source", SILENCED)
def test_inhibited_alerts_are_not_sent(served: Served, source: str) -> None:
    """Alerts that follow from another alert of the same run are not sent; those of other runs are."""
    running, receiver = served
    run = f"{source}-run"
    others = {name: f"{source}-other-{name}" for name in SILENCED[source]}
    running.post(*(alert(name, "warning", run, rank="3") for name in [source, *SILENCED[source], *LOUD[source]]))
    running.post(*(alert(name, "warning", other, rank="3") for name, other in others.items()))
    expected = [("team", name, run) for name in [source, *LOUD[source]]]
    expected += [("team", name, other) for name, other in others.items()]
    assert eventually(lambda: len(told(receiver, run, *others.values())) >= len(expected))
    flushed(running, receiver, f"{source}-later")
    assert told(receiver, run, *others.values()) == sorted(expected)
    silenced = {each["labels"]["alertname"] for each in running.alerts() if each["status"]["inhibitedBy"] and of(each, run)}
    assert silenced == set(SILENCED[source])


def of(found: Mapping[str, Any], run: str) -> bool:
    """Return whether an alert of Alertmanager belongs to the run."""
    return bool(found["labels"].get("run") == run)


def flushed(running: Alertmanager, receiver: Webhook, run: str) -> None:
    """Wait for the notification of a new alert: all earlier ones were sent before it or never will be."""
    running.post(alert("ExporterSkippingSamples", "warning", run))
    assert eventually(lambda: told(receiver, run) != [])


@pytest.mark.server
def test_critical_silences_warning_of_its_name(served: Served) -> None:
    """A critical alert inhibits the warning of the same name and run only."""
    running, receiver = served
    running.post(
        alert("DataLoaderStarvation", "critical", "w1", rank="0"),
        alert("DataLoaderStarvation", "warning", "w1", rank="0"),
        alert("DataLoaderStarvation", "warning", "w1", rank="1"),
        alert("DataLoaderStarvation", "warning", "w2", rank="0"),
        alert("LossSpike", "warning", "w1", rank="0"),
    )
    expected = [("pager", "DataLoaderStarvation", "w1"), ("team", "DataLoaderStarvation", "w2"), ("team", "LossSpike", "w1")]
    assert eventually(lambda: len(told(receiver, "w1", "w2")) >= len(expected))
    flushed(running, receiver, "w3")
    assert told(receiver, "w1", "w2") == expected


@pytest.mark.server
def test_a_possible_end_silences_no_page(served: Served) -> None:
    """TargetDown as a warning, of ranks that may just have ended, inhibits warnings that follow from it and nothing critical."""
    running, receiver = served
    running.post(
        alert("TrainingTargetDown", "warning", "f1"),
        alert("TrainingStalled", "critical", "f1"),
        alert("TrainingRankMissing", "warning", "f1", rank="0"),
    )
    expected = [("pager", "TrainingStalled", "f1"), ("team", "TrainingTargetDown", "f1")]
    assert eventually(lambda: len(told(receiver, "f1")) >= len(expected))
    flushed(running, receiver, "f2")
    assert told(receiver, "f1") == expected


@pytest.mark.server
def test_alert_without_run_inhibits_nothing(tmp_path: Path) -> None:
    """A TargetDown without a run inhibits nothing."""
    names = [*SILENCED, *SILENCED["TrainingTargetDown"], "GpuUnderused"]
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(webhook())
        running = stack.enter_context(alertmanager(tmp_path, shortened(tmp_path, receiver)))
        running.post(*(alert(name, "critical", None) for name in names))
        running.post(alert("SomethingElse", "warning", None), alert("TrainingStalled", "warning", None))
        expected = {*names, "SomethingElse"}
        assert eventually(lambda: {name for _, name, _ in receiver.firing()} == expected)
        assert eventually(lambda: ("team", "TrainingStalled", "") in receiver.firing())
        assert [each for each in running.alerts() if each["status"]["inhibitedBy"]] == []


@pytest.mark.server
def test_slack_gets_the_template(tmp_path: Path) -> None:
    """A real Alertmanager posts title, run and summary to the Slack address from the file."""
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(webhook())
        text = shortened(tmp_path, receiver, with_examples())
        text = re.sub(r"^    email_configs:\n(?:      .*\n)+", "", text, flags=re.MULTILINE)
        (tmp_path / "secrets" / "slack-url").write_text(f"{receiver.url}/slack")
        running = stack.enter_context(alertmanager(tmp_path, text))
        running.post(alert("LayerDead", "warning", "a", layer="fc1"))
        assert eventually(lambda: any(each.receiver == "slack" for each in receiver.received))
    (message,) = (each.body for each in receiver.received if each.receiver == "slack")
    (attachment,) = message["attachments"]
    assert message["channel"] == "#training"
    assert attachment["title"] == "[FIRING] LayerDead in run a"
    assert "It is so." in attachment["text"]
