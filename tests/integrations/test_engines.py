"""Engines of DeepSpeed by a stand-in with the attributes that are read; the real ones are in tests/trainers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.support.scrape import errors, value, values
from torch_grad_exporter.integrations.engines import followed_engines
from torch_grad_exporter.integrations.session import Session


class Engine(torch.nn.Module):
    """An engine at stage 2: after a backward it has the gradient and the parameters have none, and it skips every second step."""

    def __init__(self, module: torch.nn.Module, *, trains: bool = True) -> None:
        super().__init__()
        self.module = module
        self.basic_optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if trains else None
        self.global_steps = self.skipped_steps = 0
        self.dp_world_size, self.norm = 1, 0.0

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(*inputs)
        return output

    def zero_optimization_stage(self) -> int:
        return 2

    def fp16_enabled(self) -> bool:
        return False

    bfloat16_enabled = fp16_enabled

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.norm = float(sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None) ** 0.5)
        self.zero_grad()

    def step(self) -> str:
        self.global_steps += 1
        self.skipped_steps += self.global_steps % 2 == 0
        return "stepped"

    def was_step_applied(self) -> bool:
        return self.global_steps % 2 == 1

    def get_global_grad_norm(self) -> float:
        return self.norm


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that DeepSpeed was imported."""
    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)


def step(engine: Engine) -> None:
    """Train a batch."""
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    assert engine.step() == "stepped"


@pytest.mark.usefixtures("imported")
def test_a_session_follows_the_engine(tmp_path: Path) -> None:
    """The session shows the engine's norm, steps and skipped steps without layers, and restores the engine at the end."""
    model = torch.nn.Linear(3, 2)
    engine, _computes = Engine(model), Engine(model, trains=False)
    engine.global_steps, engine.skipped_steps = 6, 2
    session = Session("Callback", options={"port": None, "every": 1})
    session.begin(model)
    assert session.exporter is not None
    step(engine)
    assert value(session.exporter, "torch_grad_global_norm") == pytest.approx(engine.norm)
    step(engine)
    assert value(session.exporter, "torch_train_steps_total", optimizer="manual") == 1
    assert value(session.exporter, "torch_train_skipped_steps_total") == 1
    session.exporter.save(tmp_path / "saved.json")
    assert json.loads((tmp_path / "saved.json").read_text())["status"]["step"] == 5
    assert "torch_grad_norm" not in {name for name, _ in values(session.exporter)}
    assert errors(session.exporter) == {}
    session.end()
    assert not {"step", "backward"} & {*engine.__dict__}


def test_engines_of_a_model(request: pytest.FixtureRequest) -> None:
    """An engine belongs to a model that it trains, one without an optimizer to none, and without DeepSpeed there is none."""
    model = torch.nn.Linear(3, 2)
    engine, _computes, _other = Engine(model), Engine(model, trains=False), Engine(torch.nn.Linear(3, 2))
    assert followed_engines(model) == []
    request.getfixturevalue("imported")
    for asked in (model, torch.nn.Sequential(model), engine):
        assert [one is engine for one in followed_engines(asked)] == [True]
    assert followed_engines(torch.nn.Linear(3, 2)) == []
