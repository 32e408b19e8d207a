"""Scripts without an exporter, as people write them: `run` does not change them and shows their gradients.

Each of tests/cli/scripts/ trains and notes its own gradients in float64. Its output by itself and by `torch-grad-exporter run` has
to be the same, bit by bit, and what the exporter shows in the end has to be what the script noted.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.programs import Starter

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).parent / "scripts"

PLAIN = """
import contextlib, io, json, runpy, sys, threading
sys.path.insert(0, sys.argv[1])
shown = {}
for name in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(f"{sys.argv[1]}/{name}.py", run_name="__main__")
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join()
    shown[name] = out.getvalue()
print(json.dumps(shown))
"""
"""Runs all scripts without an exporter and prints what each has printed."""


@dataclass(frozen=True)
class Expected:
    """What is expected of a script: the log line, layers, rounds missed at the beginning, and trainings."""

    line: str
    layers: int
    unseen: int = 0
    exporters: int = 1


EXPECTED = {
    "mlp": Expected("watching Sequential, trained by SGD", 2),
    "gan": Expected("watching Net (Net), Net-2 (Net), trained by Adam", 4),
    "gpt": Expected("watching GPT, trained by AdamW", 14),
    "ppo": Expected("watching actor (Sequential), critic (Sequential), trained by Adam", 4),
    "late": Expected("watching encoder (Linear), head (Linear), trained by Adam, SGD", 4, exporters=2),
    "folds": Expected("watching Sequential, trained by Adam", 2, exporters=3),
    "transfer": Expected("watching Classifier, trained by AdamW", 2),
    "thread": Expected("watching Sequential, trained by SGD", 2),
    "attached": Expected("watching Sequential, trained by Adam", 2, unseen=2),
}

FULL = {"gan", "thread"}


@pytest.fixture(scope="module")
def plain(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each script prints without the exporter."""
    program = tmp_path_factory.mktemp("plain") / "program.py"
    program.write_text(PLAIN)
    ran = starter.start_file(program, str(SCRIPTS), *EXPECTED)
    assert ran.wait() == 0, ran.err.read_text()
    shown: dict[str, str] = json.loads(ran.out.read_text())
    return shown


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in EXPECTED])
def test_scripts_run_unchanged_with_right_numbers(plain: dict[str, str], starter: Starter, tmp_path: Path, name: str) -> None:
    """A script prints the same, each layer has the norms that the script computed, and each training is saved."""
    expected, saved = EXPECTED[name], tmp_path / "run.json"
    variables = {"VALUES": str(tmp_path / "values"), "RECORD": str(tmp_path / "record")}
    options = ["--port", "off", "--every", "1", "--save", str(saved)]
    run = starter.start_file(SCRIPTS / f"{name}.py", run=options, variables=variables)
    assert run.wait() == 0, run.err.read_text()
    assert run.out.read_text() == plain[name]
    said = [line for line in run.err.read_text().splitlines() if line.startswith("torch_grad_exporter: ")]
    assert said[-2].partition("watching ")[2] == expected.line.partition("watching ")[2], run.err.read_text()
    rounds = json.loads((tmp_path / "record").read_text())[expected.unseen :]
    exporters = [json.loads(line) for line in (tmp_path / "values").read_text().splitlines()]
    assert len(exporters) == expected.exporters
    assert not wrong(exporters[-1], rounds, expected)
    earlier = [f"run-{number}.json" for number in range(1, expected.exporters)]
    assert sorted(path.name for path in tmp_path.glob("run*.json")) == [*earlier, "run.json"]
    assert json.loads(saved.read_text())["status"]["state"] == "finished"


def wrong(shown: dict[str, float], rounds: list[dict[str, float]], expected: Expected) -> list[str]:
    """Return the differences from what the script noted, in the last round of each layer and in all rounds together."""
    found = [f"{name}: {value}" for name, value in shown.items() if name.startswith("torch_grad_exporter_errors_total") and value]
    noted = {layer: [one[layer] for one in rounds if layer in one] for layer in {layer: None for one in rounds for layer in one}}
    if len(noted) != expected.layers:
        found.append(f"{len(noted)} layers: {', '.join(noted)}")
    pairs = []
    for layer, norms in noted.items():
        shown_of = int(shown.get(f"torch_grad_captures_total/{layer}", 0))
        if not len(norms) - 1 <= shown_of <= len(norms):  # the last round may not be over: more of it may come
            found.append(f"{layer}: {shown_of} samples of {len(norms)} rounds")
            continue
        pairs.append((f"torch_grad_norm/{layer}", norms[shown_of - 1]))
        pairs.append((f"torch_grad_norm_squared_accumulated_total/{layer}", sum(norm**2 for norm in norms[:shown_of])))
    for name, value in pairs:
        if not math.isclose(shown.get(name, math.nan), value, rel_tol=1e-5):
            found.append(f"{name}: shown {shown.get(name)}, noted {value}")
    layers = {name.partition("/")[2] for name in shown if name.startswith("torch_grad_norm/")}
    return found + [f"shown, but not noted: {layer}" for layer in layers - {*noted}]
