"""Scripts that know nothing of the exporter, as unlike each other as people's are: under `run` they do the same, and are watched.

Each of tests/cli/scripts/ trains and notes its own gradients in float64. It runs once as `python script.py` would, and once by
`torch-grad-exporter run`. Output and exit status have to be the same, bit by bit; what the exporter shows in the end has to be what
the script noted.
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

OPTIONS = ["--port", "off", "--every", "1"]


@dataclass(frozen=True)
class Expected:
    """What is expected of a script. `layers`: of how many; `unseen`: rounds at the beginning, which are said to be missed.

    `line`: what is said of what was found. `rel`: how near the numbers have to be.
    """

    line: str
    layers: int
    unseen: int = 0
    rel: float = 1e-5
    absent: bool = False
    exporters: int = 1


BY_HAND = (
    "watching RNN, trained by no optimizer that is known: norms are shown where one of PyTorch steps, or exporter.step() is called"
)

EXPECTED = {
    "mlp": Expected("watching Sequential, trained by SGD", 2),
    "gan": Expected("watching netG (Net), netD (Net), trained by Adam", 4),
    "gpt": Expected("watching GPT, trained by AdamW", 14),
    "lbfgs": Expected("watching Sequential, trained by LBFGS", 2),
    "by_hand": Expected(BY_HAND, 2, absent=True),
    "ppo": Expected("watching actor (Sequential), critic (Sequential), trained by Adam", 4),
    "compiled": Expected("watching OptimizedModule, trained by AdamW", 2),
    "compiled_step": Expected("watching Sequential, trained by SGD", 2, unseen=1),
    "workers": Expected("watching Net, trained by RMSprop", 2),
    "averaged": Expected("watching Sequential, trained by SGD", 3),
    "truncated": Expected("watching Language, trained by Adagrad", 3),
    "late": Expected("watching encoder (Linear), head (Linear), trained by Adam, SGD", 4, exporters=2),
    "folds": Expected("watching Sequential, trained by Adam", 2, exporters=3),
    "functional": Expected("watching Line, trained by SGD", 2, unseen=1),
    "transfer": Expected("watching Classifier, trained by AdamW", 2),
    "scaled": Expected("watching Linear, trained by SGD", 2),
    "temperature": Expected("watching Sequential, trained by Adam", 2),
    "sparse": Expected("watching Sequential, trained by Adam, SparseAdam", 2),
    "thread": Expected("watching Sequential, trained by SGD", 2),
    "attached": Expected("watching Sequential, trained by Adam", 2, unseen=2),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_scripts_run_unchanged_with_right_numbers(starter: Starter, tmp_path: Path, name: str) -> None:
    """A script prints and exits the same, and every layer shows what the script recorded itself."""
    expected, script = EXPECTED[name], SCRIPTS / f"{name}.py"
    plain = starter.start_file(script)
    assert plain.wait() == 0, plain.err.read_text()
    variables = {"VALUES": str(tmp_path / "values"), "RECORD": str(tmp_path / "record")}
    run = starter.start_file(script, run=OPTIONS, variables=variables)
    assert run.wait() == 0, run.err.read_text()
    assert run.out.read_text() == plain.out.read_text()
    said = [line for line in run.err.read_text().splitlines() if line.startswith("torch_grad_exporter: ")]
    assert said[-1].partition("watching ")[2] == expected.line.partition("watching ")[2], run.err.read_text()
    rounds = json.loads((tmp_path / "record").read_text())[expected.unseen :]
    exporters = [json.loads(line) for line in (tmp_path / "values").read_text().splitlines()]
    assert len(exporters) == expected.exporters
    assert not wrong(exporters[-1], rounds, expected)


def wrong(shown: dict[str, float], rounds: list[dict[str, float]], expected: Expected) -> list[str]:
    """What is shown otherwise than the script noted it, of the last round of each layer and of all rounds together."""
    found = [f"{name}: {value}" for name, value in shown.items() if name.startswith("torch_grad_exporter_errors_total") and value]
    noted = {layer: [one[layer] for one in rounds if layer in one] for layer in {layer: None for one in rounds for layer in one}}
    if len(noted) != expected.layers:
        found.append(f"{len(noted)} layers: {', '.join(noted)}")
    if expected.absent:
        noted = {}
    pairs = []
    for layer, norms in noted.items():
        shown_of = int(shown.get(f"torch_grad_captures_total/{layer}", 0))
        if not len(norms) - 1 <= shown_of <= len(norms):  # the last round may not be over: more of it may come
            found.append(f"{layer}: {shown_of} samples of {len(norms)} rounds")
            continue
        pairs.append((f"torch_grad_norm/{layer}", norms[shown_of - 1]))
        pairs.append((f"torch_grad_norm_squared_accumulated_total/{layer}", sum(norm**2 for norm in norms[:shown_of])))
    for name, value in pairs:
        if not math.isclose(shown.get(name, math.nan), value, rel_tol=expected.rel):
            found.append(f"{name}: shown {shown.get(name)}, noted {value}")
    layers = {name.partition("/")[2] for name in shown if name.startswith("torch_grad_norm/")}
    return found + [f"shown, but not noted: {layer}" for layer in layers - {*noted}]
