"""The example of reinforcement learning: each fault is found by its rule, and the healthy runs by none."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.tools import REPOSITORY

FULL = pytest.mark.full


def alerts(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> set[str]:
    """Run the example, and return the alerts that its saved run lists as wrong."""
    monkeypatch.setattr(sys, "argv", ["rl.py", "--save", str(path), *options])
    runpy.run_path(str(REPOSITORY / "examples" / "rl.py"), run_name="__main__")
    return {wrong["alert"] for wrong in json.loads(gzip.decompress(path.read_bytes()))["judged"]["wrong"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "alert"),
    [
        ("--fault entropy", "EntropyCollapse"),
        pytest.param("--fault kl", "KlOutOfRange", marks=FULL),
        pytest.param("--fault reward --steps 100", "ZeroAdvantage", marks=FULL),
        pytest.param("--fault hacking", "RewardWithoutEval", marks=FULL),
        ("--method ppo --fault clipping --steps 60", "PolicyClipped"),
        pytest.param("--fault mismatch", "TrainInferenceMismatch", marks=FULL),
    ],
)
def test_each_fault_is_found_by_its_rule(options: str, alert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of a planted fault fires within a run of some seconds."""
    assert alert in alerts(tmp_path / "run.json.gz", monkeypatch, *options.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "seed"), [("grpo", 0), *(pytest.param(method, seed, marks=FULL) for method in ("grpo", "ppo") for seed in (1, 2))]
)
def test_no_rule_fires_in_a_healthy_run(method: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy run has no problem by any rule."""
    assert alerts(tmp_path / "run.json.gz", monkeypatch, "--method", method, "--seed", str(seed)) == set()
