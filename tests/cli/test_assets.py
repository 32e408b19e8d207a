"""The command `assets`: what it writes from a wheel is what the repository has, and servers take it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.support.tools import PATIENCE, REPOSITORY, find
from torch_grad_exporter.cli import assets
from torch_grad_exporter.cli import main as cli

FOLDERS = ("alertmanager", "grafana", "kubernetes", "prometheus", "provisioning")


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


def build(target: str, directory: Path) -> Path:
    """Builds the wheel or the sdist as pip would, into the directory."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = directory.iterdir()
    return built


def run_installed(directory: Path, *arguments: str) -> str:
    """What Python says in the directory, with the package that is unpacked in `installed` there."""
    environment = {**os.environ, "PYTHONPATH": str(directory / "installed")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_wheel_alone_writes_what_the_repository_has(tmp_path: Path) -> None:
    """The command of an unpacked wheel writes each file of the repository as it is, two more for Kubernetes, and three lines."""
    shutil.unpack_archive(build("wheel", tmp_path / "dist"), tmp_path / "installed", "zip")
    where = "import torch_grad_exporter; print(torch_grad_exporter.__file__)"
    found = run_installed(tmp_path, "-c", where)
    assert Path(found.strip()).parent == tmp_path / "installed" / "torch_grad_exporter"
    assert len(run_installed(tmp_path, "-m", "torch_grad_exporter", "assets", "--out", "monitoring").splitlines()) == 3
    written = files_below(tmp_path / "monitoring")
    for made in ("kubernetes/rules.yaml", "kubernetes/dashboards.yaml"):
        assert written.pop(made)
    expected = repository_files()
    assert sorted(written) == sorted(expected)
    assert [path for path in written if written[path] != expected[path]] == []


def test_a_checkout_writes_the_same(tmp_path: Path) -> None:
    """Without a wheel the files come from the repository itself, by the same function."""
    assert cli.main(["assets", "--out", str(tmp_path)]) == 0
    written = files_below(tmp_path)
    assert {path: written[path] for path in repository_files()} == repository_files()
    assert set(written) - set(repository_files()) == {"kubernetes/rules.yaml", "kubernetes/dashboards.yaml"}


def test_the_sdist_has_what_the_wheel_is_made_of(tmp_path: Path) -> None:
    """Each file that is written is in the sdist under its name in the repository."""
    with tarfile.open(build("sdist", tmp_path / "dist")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {path if path == "docs/runbook.md" else f"dashboards/{path}" for path in repository_files() if path != "runbook.md"}
    assert wanted - names == set()
    assert "docs/runbook.md" in names


def test_secrets_of_a_checkout_stay_there(tmp_path: Path) -> None:
    """The folder that alertmanager.yaml reads secrets from is not copied, what lies beside it is."""
    secrets = tmp_path / "dashboards" / "alertmanager" / "secrets"
    (secrets / "training-alerts").mkdir(parents=True)
    (secrets / "training-alerts" / "pager-url").write_text("https://example.org/secret")
    (secrets / "README.md").write_text("here")
    assert dict(assets._walk(tmp_path / "dashboards" / "alertmanager", "alertmanager")) == {
        "alertmanager/secrets/README.md": "here"
    }


def test_files_of_the_user_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that differs stops the command before it writes anything, and is named; with --force it is replaced."""
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


def test_writing_twice_is_no_harm(tmp_path: Path) -> None:
    """Files that are there as they would be written are no reason to stop; what else is in the folder stays."""
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["assets", "--out", str(tmp_path)]) == 0
    before = files_below(tmp_path)
    assert cli.main(["assets", "--out", str(tmp_path)]) == 0
    assert files_below(tmp_path) == before
    assert before["notes.txt"] == b"mine"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a file stands in the place of the folder, the command says so and exits with 2."""
    (tmp_path / "file").write_text("")
    assert cli.main(["assets", "--out", str(tmp_path / "file")]) == 2
    assert f"error: cannot write to {tmp_path / 'file'}" in capsys.readouterr().err


def test_the_job_has_the_name_that_is_wanted(tmp_path: Path) -> None:
    """Both scrape configurations and the PodMonitors say it, and the dashboards begin with it; other jobs keep their names."""
    assert cli.main(["assets", "--out", str(tmp_path), "--prometheus-job", "gpu-farm/train.1"]) == 0
    for path in ("prometheus/prometheus.yml", "provisioning/prometheus/prometheus.yml"):
        jobs = [each["job_name"] for each in yaml.safe_load((tmp_path / path).read_text())["scrape_configs"]]
        assert jobs == ["gpu-farm/train.1", "prometheus"]
    for monitor in yaml.safe_load_all((tmp_path / "kubernetes" / "podmonitor.yaml").read_text()):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["relabelings"][-1] == {"targetLabel": "job", "replacement": "gpu-farm/train.1"}
    for path in sorted((tmp_path / "grafana").glob("*.json")):
        variables = {each["name"]: each for each in json.loads(path.read_text())["templating"]["list"]}
        assert variables["job"]["current"]["value"] in ("gpu-farm/train.1", ["gpu-farm/train.1"])
    config_maps = (tmp_path / "kubernetes" / "dashboards.yaml").read_text()
    for config_map in yaml.safe_load_all(config_maps):
        for name, text in config_map["data"].items():
            assert text == (tmp_path / "grafana" / name).read_text()


def test_another_job_changes_nothing_else(tmp_path: Path) -> None:
    """Put back, the name leaves each YAML file as it was; of a dashboard only the choice of the job differs."""
    usual, named = assets.collect(), assets.collect("zzz")
    assert usual.keys() == named.keys()
    changed = {path for path in usual if usual[path] != named[path]}
    dashboards = {path for path in usual if path.startswith("grafana/")}
    others = {"prometheus/prometheus.yml", "provisioning/prometheus/prometheus.yml", "kubernetes/podmonitor.yaml"}
    assert changed - {"kubernetes/dashboards.yaml"} == dashboards | others
    for path in others:
        assert named[path].replace("zzz", "training") == usual[path]
    for path in dashboards:
        before, after = json.loads(usual[path]), json.loads(named[path])
        for dashboard in (before, after):
            for variable in dashboard["templating"]["list"]:
                variable.pop("current" if variable["name"] == "job" else "", None)
        assert before == after


@pytest.mark.parametrize("name", ["", "a b", "1", "a: b", '"x"', "ä"])
def test_a_name_that_would_break_the_files_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What YAML or JSON would take for something else is no name of a job."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["assets", "--out", str(tmp_path), "--prometheus-job", name])
    assert exit_.value.code == 2
    assert "is not a name of letters, digits" in capsys.readouterr().err


def test_the_folder_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --out nothing is written anywhere."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["assets"])
    assert exit_.value.code == 2
    assert "required: --out" in capsys.readouterr().err


@pytest.mark.server
@pytest.mark.parametrize("job", ["training", "other"])
def test_the_servers_take_what_is_written(job: str, tmp_path: Path) -> None:
    """The servers' own tools find nothing wrong with what is written, where it lies, whatever the job's name is."""
    assert cli.main(["assets", "--out", str(tmp_path), "--prometheus-job", job]) == 0
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


def test_the_address_of_the_runbook(tmp_path: Path) -> None:
    """It stands in each alert, also in Kubernetes' own, and in the overview; without it nothing links to a runbook."""
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
    assert "https://wiki.example.org/training#${__data.fields.alertname}" in written["grafana/training.json"]
    assert '<a id="TrainingStalled"></a>' in written["runbook.md"]


@pytest.mark.parametrize("text", ["", "wiki", "https://a b", "https://a#b", 'https://a"b', "https://{{a}}"])
def test_an_address_that_is_none(tmp_path: Path, text: str) -> None:
    """Nothing is written."""
    with pytest.raises(SystemExit):
        cli.main(["assets", "--out", str(tmp_path / "new"), "--runbook-url", text])
    assert not (tmp_path / "new").exists()
