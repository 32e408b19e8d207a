"""The dashboards compile against Grafana's own TypeScript types."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.tools import PATIENCE, REPOSITORY

Json = dict[str, Any]

HERE = REPOSITORY / "tests" / "dashboards" / "grafana_schema"
INSTALLED = REPOSITORY / ".tools" / "grafana_schema"
FILES = sorted((REPOSITORY / "dashboards" / "grafana").glob("*.json"))
RESOURCES = sorted((REPOSITORY / "dashboards" / "grafana-v2").glob("*.json"))


def installed() -> None:
    """Fail if the packages are missing; skip where there is no npm to install them."""
    current = INSTALLED / "installed"
    if current.exists() and current.read_bytes() == (HERE / "package-lock.json").read_bytes():
        return
    missing = "Grafana's types are missing or not those of package-lock.json: run `make tools`"
    if os.environ.get("CI") == "true" or shutil.which("npm"):
        pytest.fail(missing)
    pytest.skip(f"{missing}, which needs npm")


Piece = tuple[str, str, Json]
"""A part of a dashboard that is compiled separately: its name, type and JSON."""


def pieces(board: Json) -> Iterator[Piece]:
    """Yield the pieces of a dashboard."""
    panels = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", []))]
    lists = {key: board[key] | {"list": []} for key in ("templating", "annotations")}
    yield "dashboard", "Dashboard", board | lists | {"panels": []}
    for panel in panels:
        alone = panel | {"panels": []} if panel["type"] == "row" else panel
        yield f"panel {panel.get('title')}", f"Panels[{json.dumps(panel['type'])}]", alone
    for variable in board["templating"]["list"]:
        yield f"variable {variable['name']}", f"Variables[{json.dumps(variable['type'])}]", variable
    for note in board["annotations"]["list"]:
        kind = "builtIn" if note.get("builtIn") else "prometheus"
        yield f"annotation {note['name']}", f"Annotations['{kind}']", note


def as_typescript(parts: Sequence[Piece]) -> str:
    """Return a program that assigns each piece to its type as a literal, in which the compiler rejects unknown keys."""
    lines = ["import type { Annotations, Dashboard, Panels, Resource, Variables } from './dashboard.ts';"]
    for number, (name, kind, piece) in enumerate(parts):
        lines += [f"// {json.dumps(name)}", f"export const piece{number}: {kind} = {json.dumps(piece, indent=1)};"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Complaint:
    """An error of the compiler: its dashboard, piece, line of the JSON and text."""

    board: str
    piece: str
    line: str
    text: str


def compile_all(directory: Path, boards: dict[str, list[Piece]]) -> list[Complaint]:
    """Return the errors of the compiler in all dashboards."""
    shutil.copy(HERE / "tsconfig.json", directory)
    shutil.copy(HERE / "dashboard.ts", directory)
    (directory / "node_modules").symlink_to((INSTALLED / "node_modules").resolve())
    for name, parts in boards.items():
        (directory / f"{name}.ts").write_text(as_typescript(parts), encoding="utf-8")
    compiler = INSTALLED / "node_modules" / "typescript" / "bin" / "tsc"
    command = ["node", compiler, "--project", directory, "--pretty", "false"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=PATIENCE, check=False)
    found = re.findall(r"^(\S+)\.ts\((\d+),\d+\): error TS\d+: (.*(?:\n .*)*)", done.stdout, flags=re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    assert {name for name, _, _ in found} <= set(boards), done.stdout
    return [_complaint(name, as_typescript(boards[name]).splitlines()[: int(line)], text) for name, line, text in found]


def _complaint(name: str, lines: list[str], text: str) -> Complaint:
    piece = next(json.loads(line.removeprefix("// ")) for line in reversed(lines) if line.startswith("// "))
    return Complaint(name, piece, lines[-1].strip(), text)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[Complaint]:
    """Compile all shipped dashboards in one run, and one with an unknown key."""
    installed()
    shipped = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
    boards = {name: list(pieces(board)) for name, board in shipped.items()}
    for path in RESOURCES:
        boards[f"{path.stem}-v2"] = [("resource", "Resource", json.loads(path.read_text(encoding="utf-8")))]
    unknown: list[Piece] = [("link", "Dashboard", {"unknown": "key"}), ("resource", "Resource", _with_unknown_key(RESOURCES[0]))]
    return compile_all(tmp_path_factory.mktemp("schema"), {**boards, "unknown": unknown})


def _with_unknown_key(path: Path) -> Json:
    resource: Json = json.loads(path.read_text(encoding="utf-8"))
    next(iter(resource["spec"]["elements"].values()))["spec"]["data"]["spec"]["unknown"] = "key"
    return resource


@pytest.mark.process
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dashboard_is_what_grafana_reads(path: Path, complaints: list[Complaint]) -> None:
    """Each key and value of a shipped dashboard is one of Grafana's."""
    left = [found for found in complaints if found.board == path.stem]
    assert any("unknown" in found.text for found in complaints if found.board == "unknown")
    assert not left, "\n".join(f"{found.piece}: {found.line}: {found.text}" for found in left)


@pytest.mark.process
@pytest.mark.parametrize("path", RESOURCES, ids=lambda path: path.stem)
def test_resource_is_what_grafana_reads(path: Path, complaints: list[Complaint]) -> None:
    """Each key and value of a shipped resource of the second schema is one of Grafana's, apart from options of panels."""
    left = [found for found in complaints if found.board == f"{path.stem}-v2"]
    unknown = [found.piece for found in complaints if found.board == "unknown" and "unknown" in found.text]
    assert unknown == ["link", "resource"]
    assert not left, "\n".join(f"{found.line}: {found.text}" for found in left)


def test_units_are_grafanas_own() -> None:
    """The list of units is that of this Grafana version."""
    installed()
    text = (INSTALLED / "units.mjs").read_text(encoding="utf-8")
    found = re.findall(r'\bid: ("(?:[^"\\]|\\.)+")', text)
    assert len(found) > 200
    own = (HERE / "units.txt").read_text(encoding="utf-8").split()
    assert own == sorted({json.loads(re.sub(r"\\x(..)", r"\\u00\1", unit)) for unit in found})
