"""What is ready to be published: addresses, the readme on PyPI, the conda recipe, and what installing brings."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from email import message_from_bytes
from email.message import Message

import pytest
import yaml

from tests.support.tools import REPOSITORY
from torch_grad_exporter.version import __version__

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]

ADDRESS: str = PROJECT["urls"]["Source"]
"""The repository's, which all files have to agree on."""

WITHIN = re.compile(r"https://(?:github|raw\.githubusercontent)\.com/torch-grad-exporter/[\w-]+/(?:blob/)?([\w.]+)/([^)\s#\"'`|]+)")
"""An address of a file of the repository: its branch or tag, and its path."""

CONDA_NAMES = {"torch": "pytorch", "prometheus-client": "prometheus_client"}
"""What conda-forge calls differently."""

BRANCH = "main"


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """Return what PyPI reads of the package."""
    where = tmp_path_factory.mktemp("metadata")
    script = f"from hatchling.build import prepare_metadata_for_build_wheel as prepare; print(prepare({str(where)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True)
    (written,) = where.rglob("METADATA")
    return message_from_bytes(written.read_bytes())


def test_the_readme_on_pypi_has_whole_addresses(metadata: Message) -> None:
    """Each link and picture of the description is a whole address; a file of the repository exists, at this version."""
    text = metadata.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10
    assert not [target for target in targets if not target.startswith(("https://", "http://localhost"))]
    files = [WITHIN.match(target) for target in targets if target.startswith(ADDRESS) or "raw." in target]
    assert all(found and found[1] == f"v{__version__}" and (REPOSITORY / found[2]).is_file() for found in files)
    assert any("raw.githubusercontent.com" in target and target.endswith(".png") for target in targets)


def test_what_pypi_shows(metadata: Message) -> None:
    """PyPI gets the addresses, the licence with its files, and each version of Python that is supported."""
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    assert urls == PROJECT["urls"]
    assert urls.keys() >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert all((REPOSITORY / name).is_file() for name in metadata.get_all("License-File", []))
    versions = re.findall(r"Python :: 3\.(\d+)", "\n".join(metadata.get_all("Classifier", [])))
    assert metadata["Requires-Python"] == f">=3.{versions[0]}"


def test_addresses_of_the_repository_agree() -> None:
    """Each file that names the repository names the same one, and files that exist."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    texts = {
        path: (REPOSITORY / path).read_text(encoding="utf-8")
        for path in listed
        if path.endswith((".md", ".yml", ".yaml", ".toml")) and (REPOSITORY / path).is_file()
    }
    named = {path: set(re.findall(r"https://github\.com/torch-grad-exporter/[\w-]+", text)) for path, text in texts.items()}
    assert {address for addresses in named.values() for address in addresses} == {ADDRESS}
    for path, text in texts.items():
        for branch, file in WITHIN.findall(text):
            if branch == BRANCH:
                assert (REPOSITORY / file).is_file(), f"{path}: {file}"


def test_the_recipe_is_that_of_the_package() -> None:
    """The conda recipe has the version, the requirements, the programs and the licence files of pyproject.toml."""
    recipe = yaml.safe_load((REPOSITORY / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == __version__
    wanted = [re.sub(r"^[\w-]+", lambda name: CONDA_NAMES.get(name[0], name[0]), each) for each in PROJECT["dependencies"]]
    assert [each.replace(" ", "") for each in recipe["requirements"]["run"] if not each.startswith("python ")] == wanted
    built = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert {each.replace(" ", "") for each in recipe["requirements"]["host"]} >= set(built)
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["license_file"] == PROJECT["license-files"]
    assert recipe["about"]["homepage"] == ADDRESS
