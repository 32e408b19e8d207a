"""`labels_on="target"`: run, rank and labels leave the series, and Prometheus puts its targets' on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest

from tests.outputs.otlp.support import Training, closing
from tests.support.models import Perceptron, batch, sgd
from tests.support.otlp_receiver import HttpReceiver
from tests.support.real_prometheus import running
from tests.support.tools import REPOSITORY, eventually, get
from torch_grad_exporter import Exporter, start_exporter

OPTIONS = {"run": "r1", "rank": 3, "labels": {"team": "vision"}, "labels_on": "target", "linger": 0}

OWN = {"run": "r1", "rank": "3", "team": "vision"}
"""The labels of every series by default."""


@contextlib.contextmanager
def trained(**options: object) -> Iterator[Exporter]:
    """Start an exporter with `labels_on="target"`, and train one step."""
    model = Perceptron()
    with start_exporter(model, 0, every=1, **OPTIONS | options) as exporter:  # type: ignore[arg-type]
        model(batch()).square().mean().backward()
        sgd(model).step()
        yield exporter


def labelled(text: str) -> dict[str, set[str]]:
    """Return the names of the metrics with a series that has each of `OWN`, by label."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    return {name: {line.partition("{")[0] for line in lines if f'{name}="{value}"' in line} for name, value in OWN.items()}


def test_only_the_info_has_the_labels() -> None:
    """What is served, in either format or by a registry, has run, rank and labels on `torch_train_info` alone."""
    registry = prometheus_client.CollectorRegistry()
    with trained(registry=registry) as exporter:
        texts = [get(exporter.url), get(exporter.url, Accept="application/openmetrics-text")]
        texts.append(prometheus_client.generate_latest(registry).decode())
    assert texts[1].endswith("# EOF\n")
    for text in texts:
        assert labelled(text) == {name: {"torch_train_info"} for name in OWN}


def test_the_text_file_keeps_the_labels(tmp_path: Path) -> None:
    """The last values, which node_exporter's target serves, have the labels on each series."""
    with trained(textfile_dir=tmp_path):
        pass
    (file,) = tmp_path.glob("*.prom")
    series = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert all(line.partition("{")[2].startswith('run="r1",rank="3",team="vision"') for line in series)


def test_a_push_has_the_labels_on_its_resource() -> None:
    """Points have their own labels only, and the resource has run, rank and labels."""
    with HttpReceiver() as receiver, closing(Training(receiver.endpoint, **OPTIONS)) as training:
        training.step()
        assert eventually(lambda: any(key[0] == "torch_grad_norm" for key in receiver.points()))
        resources = [found.resource for item in receiver.received for found in item.request.resource_metrics]
        points = receiver.points()
    for resource in resources:
        attributes = {attribute.key: attribute.value.string_value for attribute in resource.attributes}
        assert OWN.items() <= attributes.items()
        assert attributes["service.instance.id"] == "r1/3"
    assert not any({name for name, _ in key[1]} & OWN.keys() for key in points)


CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}
rule_files: ["{rules}/*.rules.yml"]
scrape_configs:
  - job_name: training
    honor_labels: true
    file_sd_configs: [{{files: ["{folder}/*.json"], refresh_interval: 1s}}]
  - job_name: fixed
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{run: by hand, rank: "3"}}}}]
"""


@pytest.mark.server
def test_prometheus_has_the_labels_of_its_targets(tmp_path: Path) -> None:
    """With targets from `sd_dir` all series and the recording rules have run, rank and labels; with fixed ones, theirs."""
    with trained(sd_dir=tmp_path / "sd", advertise="127.0.0.1") as exporter:
        rules = REPOSITORY / "dashboards" / "prometheus"
        configuration = CONFIGURATION.format(rules=rules, folder=tmp_path / "sd", port=exporter.port)
        with running(tmp_path, configuration) as real:
            assert eventually(lambda: real.value("count(torch_grad_norm) / count by () (group by (layer) (torch_grad_norm))") == 2)
            found, fixed = real.query('{job="training",__name__!~".+:.+"}'), real.query('{job="fixed",__name__="torch_grad_norm"}')
            last = 'target:torch_train_state:last{job="training",state="training",run="r1",rank="3"}'
            assert eventually(lambda: real.value(last) == 1)
    assert len(found) > 100
    assert all(OWN.items() <= labels.items() for labels, _ in found)
    assert not any(name.startswith("exported_") for labels, _ in found for name in labels)
    assert {(labels["run"], labels["rank"], "team" in labels) for labels, _ in fixed} == {("by hand", "3", False)}
