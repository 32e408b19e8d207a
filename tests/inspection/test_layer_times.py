"""Times of layers: exact numbers by a clock that only layers move, and the same training."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.inspection.layer_times_scenes import SCENES, Times, shown
from tests.support.scrape import errors
from tests.support.torch_hooks import module_hooks
from torch_grad_exporter import start_exporter
from torch_grad_exporter.inspection.layer_times import LayerTimeTotals
from torch_grad_exporter.store.records import Inspected

ON_A_CLOCK = """
import time
from tests.inspection.support import Clock
time.perf_counter = Clock()
from tests.inspection.layer_times_scenes import main
main()
"""


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Times, Times, str]]:
    """Run all scenes in one process whose clock stands still, and return what they show, what they should, and an error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ON_A_CLOCK], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.process
@pytest.mark.parametrize("name", SCENES)
def test_times_are_exact(name: str, results: dict[str, tuple[Times, Times, str]]) -> None:
    """Each scene of `layer_times_scenes` shows exactly the seconds that its layers took."""
    seconds, expected, error = results[name]
    assert not error, error
    assert seconds == pytest.approx(expected)


def test_transforms_leave_no_hook() -> None:
    """A forward within `torch.func.grad` is not timed and leaves no hook."""
    model = nn.Sequential(nn.Linear(4, 4))
    with start_exporter(model, None, every=1, layer_times=True) as exporter:
        torch.func.grad(lambda x: model(x).sum())(torch.randn(3, 4))
        assert module_hooks(model[0]) == []
        assert shown(exporter) == {}
        assert errors(exporter) == {}


def test_layers_timed_least_recently_are_added_up() -> None:
    """Where there are too many layers, the ones that were timed least recently go on in one remainder."""
    times = LayerTimeTotals(most=2)
    for number, layer in enumerate("abacadd"):
        times.take(Inspected("layer_times", number, (), {(layer, "forward"): 1.0, (layer, "backward"): 2.0}), ())
    rounds = {
        layer: {name: (row.seconds[name], rounds) for name, rounds in row.rounds.items()} for layer, row in times.by_layer.items()
    }
    assert rounds == {
        "(removed)": {"forward": (2.0, 2), "backward": (4.0, 2)},
        "a": {"forward": (3.0, 3), "backward": (6.0, 3)},
        "d": {"forward": (2.0, 2), "backward": (4.0, 2)},
    }
