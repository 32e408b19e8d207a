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

TIMES = re.compile(r"'train_(runtime|\w+_per_second)': '[\d.]+'|^\[\d{4}-\d\d-\d\d [\d:,]+\] ", re.MULTILINE)
"""What differs from run to run: how long Transformers took, and when DeepSpeed, where it is installed, said something."""


def output(folder: Path, *command: str | Path, **variables: str) -> tuple[int, str, str]:
    """Status, output and errors of a process, which begins as the tests of this folder do: without a network."""
    (folder / "sitecustomize.py").write_text("import tests.trainers")
    paths = (str(folder), str(REPOSITORY), str(REPOSITORY / "tests" / "cli" / "scripts"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def checked(saved: dict[str, Any], rounds: list[dict[str, float]], missed: int = 0) -> None:
    """Asserts that a saved history ends with the norm that the script noted last, and has every round but for those missed."""
    assert {*saved["layer"]} == {*rounds[-1]}
    assert {row["captures"] for row in saved["layer"].values()} == {float(len(rounds) - missed)}
    assert saved["status"]["state"] == "finished"
    whole = math.sqrt(sum(norm**2 for norm in rounds[-1].values()))
    assert saved["status"]["global_norm"] == pytest.approx(whole, rel=1e-5)


# The forward of a LightningModule is never run: as with `start_exporter`, its first round shows that.
@pytest.mark.parametrize(
    ("name", "found", "missed"),
    [("lightning_fit", "watching Encoder, trained by Adam", 1), ("lora", "watching PeftModelForCausalLM, trained by AdamW", 0)],
)
def test_a_trainer_of_a_package(tmp_path: Path, name: str, found: str, missed: int) -> None:
    """A Trainer prints the same, and what is seen of each layer that it trains is as with `start_exporter`."""
    script, saved = HERE / f"{name}.py", tmp_path / "run.json"
    status, plain, err = output(tmp_path, sys.executable, script)
    assert status == 0, err
    status, out, err = output(tmp_path, sys.executable, *RUN, "--save", saved, script, RECORD=str(tmp_path / "record"))
    # Transformers prints how long it took; all other numbers are the same.
    assert (status, TIMES.sub("", out)) == (0, TIMES.sub("", plain)), err
    assert re.search(f"^torch_grad_exporter: {found}", err, re.MULTILINE)
    checked(json.loads(saved.read_text()), json.loads((tmp_path / "record").read_text()), missed)


def test_the_launcher_of_accelerate(tmp_path: Path) -> None:
    """`accelerate launch -m torch_grad_exporter run` starts the script as `accelerate launch` does."""
    saved = tmp_path / "run.json"
    launch = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes=1", "--num_machines=1",
              "--mixed_precision=no", "--dynamo_backend=no"]  # fmt: skip
    status, out, err = output(tmp_path, *launch, *RUN, "--save", saved, HERE / "accelerated.py", RECORD=str(tmp_path / "record"))
    assert (status, out) == (0, "0 of 1\n"), err
    assert "torch_grad_exporter: watching Sequential, trained by AdamW" in err
    checked(json.loads(saved.read_text()), json.loads((tmp_path / "record").read_text()))
