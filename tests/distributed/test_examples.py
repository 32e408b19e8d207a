"""What is shown to be copied: the examples, and the configurations in `docs/distributed.md`. That they work is in `test_job.py`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tools import PATIENCE, REPOSITORY, find

PAGES = [REPOSITORY / "docs" / "distributed.md", REPOSITORY / "examples" / "README.md"]
BLOCKS = [
    found
    for page in PAGES
    for found in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]
MONITOR = "kind: PodMonitor"


def promtool(kind: str, content: object, folder: Path) -> None:
    """Have promtool check it; its complaint fails the test."""
    (file := folder / "file.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    done = subprocess.run([find("promtool"), "check", kind, file], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def in_prometheus_words(relabelings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An operator's relabelings as the configuration that it writes: `sourceLabels` is `source_labels`."""
    return [{re.sub("[A-Z]", lambda c: f"_{c[0].lower()}", key): value for key, value in one.items()} for one in relabelings]


@pytest.mark.server
@pytest.mark.parametrize("number", [number for number, text in enumerate(BLOCKS) if MONITOR not in text])
def test_promtool_takes_every_configuration(number: int, tmp_path: Path) -> None:
    """Promtool accepts every configuration of the pages, as rules, or as a configuration that keeps the exporter's labels."""
    content = yaml.safe_load(BLOCKS[number])
    if (relabelings := content.get("metricRelabelings")) is not None:  # of a PodMonitor
        job = {"job_name": "training", "honor_labels": True, "metric_relabel_configs": in_prometheus_words(relabelings)}
        content = {"scrape_configs": [job]}
    promtool("rules" if "groups" in content else "config", content, tmp_path)
    assert all(job["honor_labels"] is True for job in content.get("scrape_configs", ()))


@pytest.mark.server
def test_the_pod_monitor_keeps_labels(tmp_path: Path) -> None:
    """Each endpoint of the PodMonitor honours labels, and its relabelings are valid for Prometheus."""
    (monitor,) = (yaml.safe_load(text) for text in BLOCKS if MONITOR in text)
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert [one["port"] for one in endpoints] == ["metrics-0", "metrics-1"]
    for one in endpoints:
        assert one["honorLabels"] is True
        relabelings = in_prometheus_words(one["relabelings"])
        assert [rule["target_label"] for rule in relabelings] == ["run"]
        job = {"job_name": "pods", "honor_labels": True, "kubernetes_sd_configs": [{"role": "pod"}], "relabel_configs": relabelings}
        promtool("config", {"scrape_configs": [job]}, tmp_path)
