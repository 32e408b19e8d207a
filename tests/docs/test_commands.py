"""Commands, targets and extras of the pages exist, and figures are those that were measured."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.pages import blocks
from tests.support.real_alertmanager import Alertmanager
from tests.support.real_prometheus import Prometheus
from tests.support.servers import serving
from tests.support.tools import REPOSITORY, find
from torch_grad_exporter import Exporter
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.cli import run
from torch_grad_exporter.rules.catalogue import groups

PAGES = [
    REPOSITORY / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/getting-started.md",
        "docs/live.md",
        "examples/README.md",
        "docs/in-ci.md",
    )
]


def lines(program: str) -> list[list[str]]:
    """Return the arguments of each call of a program that a page shows."""
    texts = (line for page in PAGES for text in blocks(page, "sh", "") for line in text.splitlines())
    return [words[1:] for line in texts if (words := shlex.split(line, comments=True)) and words[0] == program]


def test_every_command_is_accepted() -> None:
    """The program's parser accepts each `torch-grad-exporter ...` of a page, and all commands occur."""
    assert {cli.parse(arguments).command for arguments in lines("torch-grad-exporter")} == {
        "demo", "assets", "plot", "check",
    }  # fmt: skip


@pytest.mark.server
def test_the_servers_start_without_docker(tmp_path: Path) -> None:
    """Prometheus and Alertmanager start on the files of `assets` by the page's commands, and Prometheus loads all rules."""
    assert cli.main(["assets", "--out", str(tmp_path / "monitoring")]) == 0
    (text,) = (one for one in blocks(REPOSITORY / "docs" / "getting-started.md", "sh") if one.startswith("prometheus "))
    commands = {
        words[0]: words[1:] for words in map(shlex.split, text.replace("monitoring/", f"{tmp_path}/monitoring/").splitlines())
    }
    watched = find("prometheus-alertmanager")
    at = "--web.listen-address=127.0.0.1:"
    with (
        # The program that `make tools` fetches finds its own templates from this folder only.
        serving("alertmanager", lambda port: [watched, *commands["alertmanager"], f"{at}{port}"],
                lambda port: Alertmanager(port).is_ready(), tmp_path, cwd=watched.parents[2]),
        serving("prometheus", lambda port: [find("prometheus"), *commands["prometheus"], f"{at}{port}"],
                lambda port: Prometheus(port).is_ready(), tmp_path) as port,
    ):  # fmt: skip
        loaded = Prometheus(port).get("/api/v1/rules")
    assert isinstance(loaded, dict)
    assert {rule["name"] for group in loaded["groups"] for rule in group["rules"] if rule["type"] == "alerting"} == {
        rule.name for group in groups() for rule in group.rules
    }


@pytest.mark.parametrize("place", [0, 1], ids=["GitHub", "GitLab"])
def test_the_ci_jobs_are_accepted(place: int) -> None:
    """Both CI jobs train, check the saved run, and keep the XML of `check`, also where it fails."""
    job = yaml.safe_load(blocks(REPOSITORY / "docs" / "in-ci.md", "yaml")[place])
    if place == 0:
        steps = job["jobs"]["health"]["steps"]
        commands, kept = [step["run"] for step in steps if "run" in step], steps[-1]["with"]["path"].split()
        assert steps[-1]["if"] == "always()"
    else:
        commands, artifacts = job["training-health"]["script"], job["training-health"]["artifacts"]
        kept = [*artifacts["paths"], artifacts["reports"]["junit"]]
        assert artifacts["when"] == "always"
    _, train, checked = (shlex.split(command) for command in commands)
    assert train[:2] == ["torch-grad-exporter", "run"]
    options = cli.parse(checked[1:])
    assert run.parse(train[2:]).save == Path(*options.sources).absolute()
    assert {*options.sources, str(options.junit)} == set(kept)


def test_every_target_is_in_the_makefile() -> None:
    """Each `make TARGET` of a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word for arguments in lines("make") for word in arguments if "=" not in word}
    assert {"test", "help"} <= named <= targets


def test_every_extra_is_declared() -> None:
    """Each `pip install '.[extra]'` of a page names an extra of the package, and each extra for users is named."""
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r"pip install '\.\[(\w+)\]'", "".join(page.read_text(encoding="utf-8") for page in PAGES))
    assert set(named) == set(declared) - {
        "dev",
        "compat",
        "trainers",
        "bench",
        "mutants",
    }  # which are for work on the package itself


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.name)
def test_python_and_yaml_are_sound(page: Path) -> None:
    """Each block of Python compiles and each block of YAML loads."""
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "yaml"):
        assert all(job["honor_labels"] for job in yaml.safe_load(text).get("scrape_configs", ()))


def test_the_one_line_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's first example starts an exporter."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_ADDR", "127.0.0.1")
    names: dict[str, object] = {"model": torch.nn.Linear(2, 2)}
    exec(blocks(REPOSITORY / "README.md", "python")[0], names)  # noqa: S102 - what a user copies
    exporter = names["exporter"]
    assert isinstance(exporter, Exporter)
    with exporter:
        assert exporter.url is not None
