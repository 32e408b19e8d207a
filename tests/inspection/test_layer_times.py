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


class Whole(nn.Module):
    """An in-place module, a recurrent layer, an attention, and a hook of the user at a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.ReLU(inplace=True), nn.LSTM(8, 8)
        self.d, self.e = nn.MultiheadAttention(8, 2), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x))
        y.register_hook(lambda g: g * 0.5)
        h, _ = self.c(y)
        return self.e(self.d(h, h, h)[0])


def test_the_training_is_the_same() -> None:
    """Training ends in the same bits with and without times of layers."""
    after = []
    for option in (False, True):
        torch.manual_seed(0)
        model = Whole()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with start_exporter(model, None, every=1, layer_times=option) as exporter:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(5, 3, 4)).square().mean().backward()
                optimizer.step()
            seconds = shown(exporter)
            assert errors(exporter) == {}
        after.append([parameter.detach().clone() for parameter in model.parameters()])
        assert {name.split()[0] for name in seconds} == (set("acde") if option else set())
        assert all(number > 0 for number in seconds.values())
    assert all(map(torch.equal, *after))


def test_transforms_leave_no_hook() -> None:
    """A forward within `torch.func.grad` is not timed and leaves no hook."""
    model = nn.Sequential(nn.Linear(4, 4))
    with start_exporter(model, None, every=1, layer_times=True) as exporter:
        torch.func.grad(lambda x: model(x).sum())(torch.randn(3, 4))
        assert module_hooks(model[0]) == []
        assert shown(exporter) == {}
        assert errors(exporter) == {}
