"""What the running exporter offers loops and loggers: values as a mapping, adopted handles, and step numbers that go on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.scrape import value
from tests.support.tools import eventually, get
from tests.support.torch_hooks import module_hooks
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Log
from torch_grad_exporter.outputs.live.fetch import loaded
from torch_grad_exporter.outputs.live.saved import lines


def training(steps: int, exporter: Exporter, model: torch.nn.Module) -> dict[str, float]:
    """Train; return the float64 norms by layer of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        exporter.observe(loss=loss)
        squares = {
            name: sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None)
            for name, module in model.named_children()
        }
        optimizer.step()
    return {name: math.sqrt(square) for name, square in squares.items()}


def two_layers() -> torch.nn.Sequential:
    """Layers `0` and `1`."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))


# Values


def test_values_are_flat() -> None:
    """Names of metrics with the values of their labels, and the numbers of a reference."""
    model = two_layers()
    with start_exporter(model, port=None, every=1) as exporter:
        norms = training(3, exporter, model)
        found = exporter.values()
    for name, norm in norms.items():
        assert found[f"torch_grad_norm/{name}"] == pytest.approx(norm, rel=1e-5)
    assert found["torch_grad_global_norm"] == pytest.approx(math.hypot(*norms.values()), rel=1e-5)
    assert found["torch_train_steps_total/SGD"] == 3
    assert found["torch_train_state/training"] == 1
    assert found["torch_grad_nonfinite_elements_total/0/nan"] == 0
    assert found["torch_train_learning_rate/SGD/0"] == pytest.approx(0.01)
    assert all(type(number) is float for number in found.values())
    assert not any("_bucket" in name or "_info" in name or "distribution" in name for name in found)


def test_values_can_be_chosen() -> None:
    """A regular expression is searched in the names; a wrong one is the caller's error."""
    model = two_layers()
    with start_exporter(model, port=None, every=1) as exporter:
        training(2, exporter, model)
        assert set(exporter.values(r"^torch_grad_norm/")) == {"torch_grad_norm/0", "torch_grad_norm/1"}
        (info,) = exporter.values("^torch_train_info/")  # facts in labels: only where they are asked for
        assert f"/{torch.__version__}" in info
        with pytest.raises(re.error):
            exporter.values("(")


# Handles


class Handle:
    def __init__(self, *, fails: bool = False) -> None:
        self.removed, self._fails = 0, fails

    def remove(self) -> None:
        self.removed += 1
        if self._fails:
            raise OSError("gone")


def test_adopted_handles_are_removed() -> None:
    """`close` removes each adopted handle, also behind one that fails; a handle that is adopted later is removed at once."""
    model = two_layers()
    exporter = start_exporter(model, port=None)
    called: list[int] = []
    exporter.adopt(model.register_forward_hook(lambda *_: called.append(1)))
    first, bad = exporter.adopt(Handle()), exporter.adopt(Handle(fails=True))
    assert exporter.adopt(first) is first
    model(torch.ones(1, 4))
    assert called == [1]
    exporter.close()
    model(torch.ones(1, 4))
    assert called == [1]
    assert first.removed >= 1
    assert bad.removed == 1
    assert module_hooks(model) == []
    late = exporter.adopt(Handle())
    assert late.removed == 1


# A training that goes on


@pytest.mark.slow
def test_steps_go_on() -> None:
    """Samples, the live page and events count on from the checkpoint's step; the counter counts steps of this process."""
    model = two_layers()
    with start_exporter(model, port=0, addr="127.0.0.1", every=1, alerts=[Log()]) as exporter:
        assert value(exporter, "torch_train_earlier_steps") is None
        exporter.resume(5000)
        training(3, exporter, model)
        assert value(exporter, "torch_grad_sample_step") == 5003
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 3
        assert value(exporter, "torch_train_earlier_steps") == 5000
        status = f"{exporter.page_url}api/v1/status"
        assert eventually(lambda: json.loads(get(status))["step"] == 5003)  # it shares a scrape for a second


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_only_whole_numbers_resume(step: object, error: type[Exception]) -> None:
    """The error names the argument and the fix."""
    with start_exporter(two_layers(), port=None) as exporter, pytest.raises(error, match=r"resume\(step=.*optimizer steps"):
        exporter.resume(step)  # type: ignore[arg-type]


def test_history_of_a_resumed_training(tmp_path: Path) -> None:
    """Loss, norm and step time of a step share its row in the history, whose numbers go on."""
    model, path = two_layers(), tmp_path / "run.json"
    with start_exporter(model, port=None, every=1) as exporter:
        exporter.resume(1000)
        training(6, exporter, model)
    exporter.save(path)
    found = lines(loaded(str(path)), "recent")
    assert found.steps.tolist() == [1001, 1002, 1003, 1004, 1005, 1006]
    for name in ("loss", "norm", "learning_rate"):
        assert not np.isnan(found.values[name]).any(), name
    assert np.isnan(found.values["step_seconds"]).tolist() == [True] + [False] * 5
