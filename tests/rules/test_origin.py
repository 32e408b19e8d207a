"""The place where a NaN began, in the texts of the rules and of Prometheus' alerts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from tests.inspection.nan_origin.causes import NAN, Function, around
from tests.support.scrape import OFF
from tests.support.tools import find
from torch_grad_exporter import start_exporter

ALERTS = Path(__file__).parents[2] / "dashboards/prometheus"
TIME = {"run": "a", "rank": "0", "job": "t", "instance": "h:0"}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """Return a series of a unit test of promtool."""
    return {"series": name + "{" + ", ".join(f'{k}="{v}"' for k, v in (TIME | labels).items()) + "}", "values": values}


def test_a_problem_begins_with_the_place() -> None:
    """A step on NaN from the backward of a module is reported with that module."""
    model = around(Function(lambda x: (x * 0).sqrt()))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with start_exporter(model, None, every=1, collectors=OFF, nan_origin="always") as exporter:
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        problem = exporter.problems()[0]
    assert problem.alert == "TrainingNonFiniteGradients"
    places = [f"3 gave {kind} in the backward, at step 0. Gradients were" for kind in ("Inf", "NaN")]
    assert problem.text.startswith((*places,))


def test_a_nan_loss_is_reported_with_its_place() -> None:
    """A NaN loss of a batch with a NaN is reported with the batch."""
    model = around()
    with start_exporter(model, None, every=1, collectors=OFF, nan_origin="always") as exporter:
        loss = model(torch.full((4, 8), NAN)).square().mean()
        loss.backward()
        exporter.observe(loss=loss)
        texts = {problem.alert: problem.text for problem in exporter.problems()}
    assert texts["TrainingNonFiniteLoss"].startswith("The batch had NaN, at step 0. The loss was NaN or Inf")


@pytest.mark.server
@pytest.mark.parametrize(
    ("alert", "group", "metric"),
    [
        ("TrainingNonFiniteGradients", "gradients", "torch_grad_nonfinite_steps_total"),
        ("TrainingNonFiniteLoss", "training", "torch_train_loss_nonfinite_total"),
    ],
)
def test_an_alerts_description_names_the_place(alert: str, group: str, metric: str, tmp_path: Path) -> None:
    """Prometheus' templates add the layers with most NaN, and layer, pass, kind and step if the run has them, else nothing."""
    rules = yaml.safe_load((ALERTS / f"{group}.alerts.yml").read_text(encoding="utf-8"))
    rule = next(rule for one in rules["groups"] for rule in one["rules"] if rule.get("alert") == alert)
    said = rule["annotations"]["description"]
    start, end = said.index("{{ "), said.rindex("{{ end }}") + len("{{ end }}")
    found = " nan_origin has found encoder.3 (backward, inf) at step 812."
    if group == "gradients":
        found = " Affected layers: encoder.3, head, first." + found
    tests = []
    for expected, more in ((found, True), ("", False)):
        labels = {"layer": "encoder.3", "pass": "backward", "kind": "inf"}
        place = [series("torch_nonfinite_origin_step", "812x20", **labels)] if more else []
        layers = {"first": "0x4 2x15", "idle": "0x20", "encoder.3": "0x4 9x15", "head": "0x4 4x15", "last": "0x4 1x15"}
        for layer, values in layers.items() if more else ():
            place.append(series("torch_grad_nonfinite_elements_total", values, layer=layer, kind="nan"))
        outcome = {"outcome": "stepped"} if group == "gradients" else {}
        others = [series(metric, "0x4 1x15", **outcome), series("torch_train_start_timestamp_seconds", "0x20")]
        others.append(series("torch_train_state", "1x20", state="training"))
        text = said[:start] + expected + said[end:]
        annotations = {"summary": rule["annotations"]["summary"].replace("{{ $labels.run }}", "a"), "description": text}
        alerts = [{"exp_labels": {"run": "a", "severity": "critical"}, "exp_annotations": annotations}]
        tests.append({
            "interval": "1m",
            "input_series": [*others, *place],
            "alert_rule_test": [{"eval_time": "8m", "alertname": alert, "exp_alerts": alerts}],
        })  # fmt: skip
    file = tmp_path / "test.yml"
    files = [str(ALERTS / name) for name in ("ranks.rules.yml", f"{group}.alerts.yml")]
    whole = {"rule_files": files, "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(whole), encoding="utf-8")
    done = subprocess.run([find("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
