"""The command `assets`: what it writes from a wheel is what the repository has, and servers take it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.tools import PATIENCE, REPOSITORY, find
from torch_grad_exporter.cli import assets
from torch_grad_exporter.cli import main as cli

FOLDERS = ("alertmanager", "grafana", "grafana-v2", "kubernetes", "prometheus", "provisioning")


def repository_files() -> dict[str, bytes]:
    """What the repository has of what is written, by the path under which it is written; found by git, not by our own walk."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *(f"dashboards/{folder}" for folder in FOLDERS)]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    paths = {path.removeprefix("dashboards/"): REPOSITORY / path for path in listed}
    paths |= {"compose.yaml": REPOSITORY / "dashboards" / "compose.yaml", "runbook.md": REPOSITORY / "docs" / "runbook.md"}
    return {name: path.read_bytes() for name, path in paths.items() if path.exists()}


def files_below(directory: Path) -> dict[str, bytes]:
    """All files of a directory by their paths in it."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.process
def test_checkout_writes_the_same_files(tmp_path: Path) -> None:
    """Without a wheel the same function writes the files of the repository, also a second time beside the user's files."""
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        assert cli.main(["assets", "--out", str(tmp_path)]) == 0
        written = files_below(tmp_path)
        assert {path: written[path] for path in repository_files()} == repository_files()
        others = {"kubernetes/rules.yaml", "kubernetes/dashboards.yaml", "notes.txt"}
        assert set(written) - set(repository_files()) == others


@pytest.mark.process
def test_user_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that differs stops the command before it writes anything; `--force` replaces it."""
    (tmp_path / "alertmanager").mkdir()
    changed = tmp_path / "alertmanager" / "alertmanager.yaml"
    changed.write_text("mine")
    assert cli.main(["assets", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert (said.out, list(files_below(tmp_path))) == ("", ["alertmanager/alertmanager.yaml"])
    assert "files that differ: alertmanager/alertmanager.yaml;" in said.err
    assert changed.read_text() == "mine"
    assert cli.main(["assets", "--out", str(tmp_path), "--force"]) == 0
    assert changed.read_bytes() == repository_files()["alertmanager/alertmanager.yaml"]


@pytest.mark.slow
def test_job_name_is_applied(tmp_path: Path) -> None:
    """The job's name is in the scrape configurations, the PodMonitors and the dashboards."""
    assert cli.main(["assets", "--out", str(tmp_path), "--prometheus-job", "gpu-farm/train.1"]) == 0
    for path in ("prometheus/prometheus.yml", "provisioning/prometheus/prometheus.yml"):
        jobs = [each["job_name"] for each in yaml.safe_load((tmp_path / path).read_text())["scrape_configs"]]
        assert jobs == ["gpu-farm/train.1", "prometheus"]
    for monitor in yaml.safe_load_all((tmp_path / "kubernetes" / "podmonitor.yaml").read_text()):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert {"targetLabel": "job", "replacement": "gpu-farm/train.1"} in endpoint["relabelings"]
    for path in sorted((tmp_path / "grafana").glob("*.json")):
        variables = {each["name"]: each for each in json.loads(path.read_text())["templating"]["list"]}
        resource = json.loads((tmp_path / "grafana-v2" / path.name).read_text())
        of_resource = {each["spec"]["name"]: each["spec"] for each in resource["spec"]["variables"]}
        for found in (variables, of_resource):
            assert found["job"]["current"]["value"] in ("gpu-farm/train.1", ["gpu-farm/train.1"])
    config_maps = (tmp_path / "kubernetes" / "dashboards.yaml").read_text()
    for config_map in yaml.safe_load_all(config_maps):
        for name, text in config_map["data"].items():
            assert text == (tmp_path / "grafana" / name).read_text()


def test_invalid_job_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job name that YAML or JSON would misread is refused."""
    for name in ("", "1", "a: b", '"x"'):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["assets", "--out", str(tmp_path), "--prometheus-job", name])
        assert exit_.value.code == 2
        assert "is not a name of letters, digits" in capsys.readouterr().err


@pytest.mark.server
def test_servers_accept_the_written_files(tmp_path: Path) -> None:
    """The servers' own tools accept the written files for another job name."""
    assert cli.main(["assets", "--out", str(tmp_path), "--prometheus-job", "other"]) == 0
    checks = [
        ("promtool", "check", "config", "--lint=all", "--lint-fatal", tmp_path / "prometheus" / "prometheus.yml"),
        ("promtool", "check", "config", "--lint=all", "--lint-fatal", tmp_path / "provisioning" / "prometheus" / "prometheus.yml"),
        ("amtool", "check-config", tmp_path / "alertmanager" / "alertmanager.yaml"),
    ]
    rules = len(list((tmp_path / "prometheus").glob("*.rules.yml"))) + len(list((tmp_path / "prometheus").glob("*.alerts.yml")))
    for tool, *arguments in checks:
        done = subprocess.run([find(tool), *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        if tool == "promtool":
            assert f"{rules} rule files found" in done.stdout


@pytest.mark.slow
def test_runbook_address_is_applied(tmp_path: Path) -> None:
    """The runbook's address is in each alert and the overview; without it nothing links to a runbook."""
    without = assets.collect()
    assert not [path for path, text in without.items() if "runbook_url:" in text or "data.fields.alertname" in text]
    assert cli.main(["assets", "--out", str(tmp_path), "--runbook-url", "https://wiki.example.org/training"]) == 0
    written = {path: content.decode() for path, content in files_below(tmp_path).items()}
    for path in (path for path in written if path.endswith(".alerts.yml")):
        with_it, without_it = (yaml.safe_load(text)["groups"][0]["rules"] for text in (written[path], without[path]))
        for rule, other in zip(with_it, without_it, strict=True):
            assert rule["annotations"].pop("runbook_url") == f"https://wiki.example.org/training#{rule['alert']}"
            assert rule == other
    links = [path for path, text in written.items() if "https://wiki.example.org/training#" in text]
    assert {"prometheus/gradients.alerts.yml", "kubernetes/rules.yaml", "grafana/training.json"} <= set(links)
    assert "runbook_url: https://wiki.example.org/training#TrainingStalled\n" in written["prometheus/training.alerts.yml"]
    for folder in ("grafana", "grafana-v2"):
        assert "https://wiki.example.org/training#${__data.fields.alertname}" in written[f"{folder}/training.json"]
    assert '<a id="TrainingStalled"></a>' in written["runbook.md"]
