"""`torch-grad-exporter run` of scripts that leave their loop to a package: the same output, and the numbers that they noted."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "scripts"

RUN = ["-m", "torch_grad_exporter", "run", "--port", "off", "--every", "1"]

REPOSITORY = HERE.parent.parent.parent


def output(folder: Path, *command: str | Path, **variables: str) -> tuple[int, str, str]:
    """Status, output and errors of a process, which begins as the tests of this folder do: without a network."""
    (folder / "sitecustomize.py").write_text("import tests.trainers")
    paths = (str(folder), str(REPOSITORY), str(REPOSITORY / "tests" / "cli" / "scripts"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def checked(saved: dict[str, Any], rounds: list[dict[str, float]]) -> None:
    """Asserts that a saved history ends with the norm that the script noted last, and has every round of each layer."""
    assert {*saved["layer"]} == {*rounds[-1]}
    assert {row["captures"] for row in saved["layer"].values()} == {float(len(rounds))}
    assert saved["status"]["state"] == "finished"
    whole = math.sqrt(sum(norm**2 for norm in rounds[-1].values()))
    assert saved["status"]["global_norm"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("name", "found"), [("lightning_fit", "watching Encoder, trained by "), ("lora", "watching PeftModel")])
def test_a_trainer_of_a_package(tmp_path: Path, name: str, found: str) -> None:
    """A Trainer prints the same, and each round of each layer that it trains is seen, the first one too."""
    script, saved = HERE / f"{name}.py", tmp_path / "run.json"
    status, plain, err = output(tmp_path, sys.executable, script)
    assert status == 0, err
    status, out, err = output(tmp_path, sys.executable, *RUN, "--save", saved, script, RECORD=str(tmp_path / "record"))
    assert (status, out) == (0, plain), err
    assert re.search(f"^torch_grad_exporter: {found}", err, re.MULTILINE)
    checked(json.loads(saved.read_text()), json.loads((tmp_path / "record").read_text()))


def test_two_processes_of_accelerate(tmp_path: Path) -> None:
    """`accelerate launch -m torch_grad_exporter run` watches both ranks; the first shows the layers."""
    saved = tmp_path / "run.json"
    launch = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes=2", "--num_machines=1",
              "--mixed_precision=no", "--dynamo_backend=no"]  # fmt: skip
    status, out, err = output(tmp_path, *launch, *RUN, "--save", saved, HERE / "accelerated.py", RECORD=str(tmp_path / "record"))
    assert (status, sorted(out.split("\n"))) == (0, ["", "0 of 2", "1 of 2"]), err
    checked(json.loads(saved.read_text()), json.loads((tmp_path / "record").read_text()))
    assert json.loads((tmp_path / "run-rank1.json").read_text())["status"]["rank"] == 1
