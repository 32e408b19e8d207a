"""The dashboards compile against Grafana's own TypeScript types, and planted faults do not."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.tools import PATIENCE, REPOSITORY

Json = dict[str, Any]

HERE = REPOSITORY / "tests" / "dashboards" / "grafana_schema"
INSTALLED = REPOSITORY / ".tools" / "grafana_schema"
FILES = sorted((REPOSITORY / "dashboards" / "grafana").glob("*.json"))


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
    lines = ["import type { Annotations, Dashboard, Panels, Variables } from './dashboard.ts';"]
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


def sound() -> Json:
    """Return a small valid dashboard with a graph, a table, variables and an annotation."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    query = {"refId": "A", "expr": "up", "legendFormat": "{{job}}", "range": True, "editorMode": "code", "datasource": source}
    graph = {
        "id": 1, "type": "timeseries", "title": "Graph", "description": "Up.", "datasource": source, "targets": [query],
        "gridPos": {"x": 0, "y": 0, "w": 8, "h": 8},
        "options": {
            "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "fieldConfig": {
            "defaults": {
                "unit": "short", "color": {"mode": "palette-classic"},
                "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]},
                "mappings": [{"type": "value", "options": {"1": {"text": "up", "color": "green", "index": 0}}}],
                "custom": {"drawStyle": "line", "lineWidth": 1, "stacking": {"mode": "none"}},
            },
            "overrides": [{"matcher": {"id": "byName", "options": "x"}, "properties": [
                {"id": "unit", "value": "s"}, {"id": "custom.lineStyle", "value": {"fill": "dash"}}]}],
        },
        "transformations": [{"id": "organize", "options": {"renameByName": {"a": "b"}}}],
    }  # fmt: skip
    table = copy.deepcopy(graph) | {"id": 2, "type": "table", "title": "Table", "options": {"frameIndex": 0, "showHeader": True}}
    table["fieldConfig"] = {"defaults": {"unit": "short"}, "overrides": []}
    return {
        "uid": "sound", "title": "Sound", "schemaVersion": 41, "editable": False, "graphTooltip": 1, "tags": ["a"],
        "time": {"from": "now-1h", "to": "now"}, "panels": [graph, table],
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 0},
            {"name": "job", "type": "query", "query": "label_values(up, job)", "datasource": source, "refresh": 2, "sort": 1},
        ]},
        "annotations": {"list": [
            {"name": "Up", "datasource": source, "enable": True, "iconColor": "red", "expr": "up", "titleFormat": "{{job}}"},
        ]},
    }  # fmt: skip


Fault = Callable[[Json], object]


def _put(*path: str | int, value: object) -> Fault:
    """Return the fault of this value at this path."""

    def put(board: Json) -> None:
        found: Any = board
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = value

    return put


GRAPH = ("panels", 0)
DEFAULTS = (*GRAPH, "fieldConfig", "defaults")
PROPERTY = (*GRAPH, "fieldConfig", "overrides", 0, "properties", 0)

FAULTS: dict[str, tuple[str, Fault]] = {
    "kind of panel": ("'graph'", _put(*GRAPH, "type", value="graph")),
    "option of another kind of panel": ("'legend'", _put("panels", 1, "options", "legend", value={})),
    "mode of colours": ("'rainbow'", _put(*DEFAULTS, "color", "mode", value="rainbow")),
    "custom of another kind of panel": ("'drawStyle'", _put("panels", 1, "fieldConfig", "defaults", "custom", value={
        "align": "auto", "inspect": False, "cellOptions": {"type": "auto"}, "drawStyle": "line"})),
    "matcher": ("'byLabel'", _put(*GRAPH, "fieldConfig", "overrides", 0, "matcher", "id", value="byLabel")),
    "value of an override": ("'number'", _put(*PROPERTY, "value", value=5)),
    "data source that is null": ("'null'", _put(*GRAPH, "targets", 0, "datasource", value=None)),
    "transformation": ("'organise'", _put(*GRAPH, "transformations", 0, "id", value="organise")),
    "annotation that Grafana 11 does not ask for": ("expr", lambda board: board["annotations"]["list"][0].pop("expr")),
}  # fmt: skip


FREE = {"indexByName", "renameByName", "excludeByName", "includeByName"}
"""Objects whose keys are names of fields."""


def objects(json_: object, name: str = "") -> Iterator[Json]:
    """Yield all objects whose keys are Grafana's."""
    if isinstance(json_, dict):
        if name not in FREE:
            yield json_
        for key, value in json_.items():
            yield from objects(value, key)
    elif isinstance(json_, list):
        for value in json_:
            yield from objects(value)


def with_unknown_keys(board: Json, seed: int) -> list[Piece]:
    """Return the pieces of a dashboard, each with an unknown key in a random object."""
    chosen = random.Random(seed)
    found = list(pieces(copy.deepcopy(board)))
    for _, _, piece in found:
        chosen.choice(list(objects(piece)))["unknown"] = "key"
    return found


SEEDS = range(1)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[Complaint]:
    """Compile all dashboards in one run: the shipped ones, the sound one and those with a fault."""
    installed()
    shipped = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
    boards = {f"shipped-{name}": list(pieces(board)) for name, board in shipped.items()} | {"sound": list(pieces(sound()))}
    boards |= {f"unknown-{name}-{seed}": with_unknown_keys(board, seed) for name, board in shipped.items() for seed in SEEDS}
    for name, (_, fault) in FAULTS.items():
        broken = sound()
        fault(broken)
        boards[_named(name)] = list(pieces(broken))
    return compile_all(tmp_path_factory.mktemp("schema"), boards)


def _named(fault: str) -> str:
    return "fault-" + fault.replace(" ", "-")


@pytest.mark.process
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dashboard_is_what_grafana_reads(path: Path, complaints: list[Complaint]) -> None:
    """Each key and value of a shipped dashboard is one of Grafana's."""
    left = [found for found in complaints if found.board == f"shipped-{path.stem}"]
    assert not left, "\n".join(f"{found.piece}: {found.line}: {found.text}" for found in left)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_unknown_key_is_found_anywhere(path: Path, complaints: list[Complaint]) -> None:
    """An unknown key is reported in any object of a shipped dashboard."""
    board = json.loads(path.read_text(encoding="utf-8"))
    for seed in SEEDS:
        named = {found.piece for found in complaints if found.board == f"unknown-{path.stem}-{seed}"}
        assert {name for name, _, _ in pieces(board)} <= named


def test_sound_dashboard_compiles(complaints: list[Complaint]) -> None:
    """The dashboard that the faults are planted in compiles."""
    assert [found for found in complaints if found.board == "sound"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str, complaints: list[Complaint]) -> None:
    """A key or value that Grafana does not know is reported."""
    said = [found.text.replace('"', "") for found in complaints if found.board == _named(fault)]
    assert any(FAULTS[fault][0] in text for text in said), said


def test_units_are_grafanas_own() -> None:
    """The list of units is that of this Grafana version."""
    installed()
    text = (INSTALLED / "units.mjs").read_text(encoding="utf-8")
    found = re.findall(r'\bid: ("(?:[^"\\]|\\.)+")', text)
    assert len(found) > 200
    own = (HERE / "units.txt").read_text(encoding="utf-8").split()
    assert own == sorted({json.loads(re.sub(r"\\x(..)", r"\\u00\1", unit)) for unit in found})
