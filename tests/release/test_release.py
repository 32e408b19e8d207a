"""What users install: the wheel that `make build` makes of the sdist, in a clean environment, and the image's Dockerfile."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.cli.test_assets import files_below, repository_files
from tests.support.tools import REPOSITORY
from torch_grad_exporter.version import __version__

SECONDS = 600
"""Timeout of downloads and installations."""

TORCH = next(found[1] for found in re.finditer(r'"(torch==[^"]+)"', (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")))
"""The torch of the development environment."""


def said(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return the output of a program, run outside of the repository and without its Python path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCH_GRAD", "PYTEST"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the command of `make build` and return its folder."""
    where = tmp_path_factory.mktemp("dist")
    said(sys.executable, "-m", "build", "--outdir", where, cwd=REPOSITORY)
    return where


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of a clean environment with the wheel and pytest."""
    where = tmp_path_factory.mktemp("clean")
    said(sys.executable, "-m", "venv", where / "venv", cwd=where)
    (wheel,) = built.glob("*.whl")
    programs = where / "venv" / "bin"
    said(programs / "python", "-m", "pip", "install", "--quiet", TORCH, str(wheel), "pytest", cwd=where)
    return programs


pytestmark = pytest.mark.full


def test_make_builds_both(built: Path) -> None:
    """The Makefile's command builds an sdist and a wheel of this version, without caches or tools."""
    recipe = re.search(r"^build:.*\n\t(.*)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "$(BIN)/python -m build --outdir $(DIST)"
    assert sorted(path.name for path in built.iterdir()) == [
        f"torch_grad_exporter-{__version__}-py3-none-any.whl", f"torch_grad_exporter-{__version__}.tar.gz",
    ]  # fmt: skip
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as source:
        shipped, sources = archive.namelist(), [name.partition("/")[2] for name in source.getnames()]
    for names in (shipped, sources):
        assert not [name for name in names if fnmatch.fnmatch(name, "*__pycache__*") or ".tools" in name or ".venv" in name]
    assert "torch_grad_exporter/py.typed" in shipped
    assert not [name for name in shipped if name.startswith("tests/")]
    assert {"Makefile", "CONTRIBUTING.md", "tests/release/test_release.py", "scripts/metrics_doc.py"} <= set(sources)
    assert {"docs/runbook.md", *(f"dashboards/{path}" for path in repository_files() if path != "runbook.md")} <= set(sources)


def test_installs_soundly(installed: Path, tmp_path: Path) -> None:
    """Pip finds no conflict, the command prints this version, and each entry point loads without torch."""
    said(installed / "python", "-m", "pip", "check", cwd=tmp_path)
    assert said(installed / "torch-grad-exporter", "--version", cwd=tmp_path).strip() == f"torch-grad-exporter {__version__}"
    script = """
import importlib.metadata, json, sys
mine = importlib.metadata.distribution("torch-grad-exporter").entry_points
loaded = [point.name for point in mine if point.group == "pytest11" and point.load()]
assert "torch" not in sys.modules and "site-packages" in sys.modules["torch_grad_exporter"].__file__
print(json.dumps(sorted([point.group, point.name] for point in mine)))
"""
    assert json.loads(said(installed / "python", "-c", script, cwd=tmp_path)) == [
        ["console_scripts", "torch-grad-exporter"],
        ["opentelemetry_instrumentor", "torch_grad_exporter"],
        ["pytest11", "torch_grad_exporter"],
    ]


def test_trains_and_serves(installed: Path, tmp_path: Path) -> None:
    """Metrics, the live page with its files, the runbook, plots and all assets, without secrets, are in the wheel."""
    script = """
import torch, urllib.request
from torch_grad_exporter import start_exporter
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def get(path):
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}{path}") as answer:
        return answer.read().decode()
with start_exporter(model, port=0, addr="127.0.0.1", every=1) as exporter:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert any(line.startswith("torch_train_steps_total{") and line.endswith(" 3.0") for line in get("/metrics").splitlines())
    page = get("/")
    parts = [part.split('"')[0] for word in ('src="', 'href="') for part in page.split(word)[1:]]
    parts = [part for part in parts if not part.startswith(("#", "data:"))]
    assert len(parts) > 2, parts
    for part in parts:
        assert get("/" + part), part
    assert "GradientExploding" in get("/runbook")
    exporter.save("run.json.gz")
print("trained")
"""
    assert said(installed / "python", "-c", script, cwd=tmp_path).strip() == "trained"
    (secrets,) = installed.parent.rglob("alertmanager/secrets")
    (secrets / "training-alerts").mkdir()
    (secrets / "training-alerts" / "pager-url").write_text("https://example.org/secret")
    said(installed / "torch-grad-exporter", "assets", "--out", "monitoring", cwd=tmp_path)
    written = files_below(tmp_path / "monitoring")
    assert written.keys() - repository_files().keys() == {"kubernetes/rules.yaml", "kubernetes/dashboards.yaml"}
    assert repository_files().items() <= written.items()
    said(installed / "torch-grad-exporter", "plot", "run.json.gz", "--out", "run.html", cwd=tmp_path)
    assert "<html" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_script_is_saved_and_checked(installed: Path, tmp_path: Path) -> None:
    """`run` and `check` of the wheel save and judge a script that does not import the exporter."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _ in range(60):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(8, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "print('done')\n",
        encoding="utf-8",
    )
    options = ("--port", "off", "--every", "1", "--save", "run.json.gz")
    assert said(installed / "torch-grad-exporter", "run", *options, "train.py", cwd=tmp_path).strip() == "done"
    assert said(installed / "torch-grad-exporter", "check", "run.json.gz", cwd=tmp_path)


def test_the_fixture_is_there(installed: Path, tmp_path: Path) -> None:
    """A test of another project has `grad_health` without an import."""
    (tmp_path / "test_mine.py").write_text("def test_mine(grad_health):\n    assert callable(grad_health)\n", encoding="utf-8")
    assert "1 passed" in said(installed / "python", "-m", "pytest", "-q", "test_mine.py", cwd=tmp_path)


# The image


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments."""
    text = re.sub(r"\\\n", " ", (REPOSITORY / "Dockerfile").read_text(encoding="utf-8"))
    return [
        (words[0], words[2]) for line in text.splitlines() if line and not line.startswith("#") for words in [line.partition(" ")]
    ]


def test_the_image_has_what_it_copies() -> None:
    """Each copied source exists, and .dockerignore allows exactly these."""
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [words for name, words in instructions() if name == "COPY" and not words.startswith("--from")]
    sources = {source for words in copied for source in words.split()[:-1]}
    assert all((REPOSITORY / source).exists() for source in sources)
    assert {f"!{source}" for source in sources} == {line for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"


def test_the_images_sources_make_the_wheel(tmp_path: Path) -> None:
    """A wheel built from the copied sources has the files of the one of the repository."""
    for words in (words for name, words in instructions() if name == "COPY" and not words.startswith("--from")):
        *sources, target = words.split()
        for source in sources:
            where = tmp_path / "source" / (source if target == "./" else target)
            where.parent.mkdir(parents=True, exist_ok=True)
            said("cp", "-r", REPOSITORY / source, where, cwd=tmp_path)
    names = []
    for number, source in enumerate((tmp_path / "source", REPOSITORY)):
        out = tmp_path / str(number)
        said(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out, cwd=source)
        (wheel,) = out.iterdir()
        with zipfile.ZipFile(wheel) as archive:
            names.append({name for name in archive.namelist() if "__pycache__" not in name})
    assert names[0] == names[1]


def test_the_image_does_not_run_as_root() -> None:
    """The image does not run as root and starts the demo."""
    found = dict(instructions())
    assert found["USER"] == "exporter"
    assert json.loads(found["ENTRYPOINT"]) == ["torch-grad-exporter"]
    assert json.loads(found["CMD"])[0] == "demo"
