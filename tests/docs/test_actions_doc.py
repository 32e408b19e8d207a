"""The examples of docs/actions.md run and do what the page says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.actions.freeze.test_freeze import faint
from tests.support.acting import World
from tests.support.pages import blocks
from tests.support.tools import PATIENCE, REPOSITORY, eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Freeze, Stop
from torch_grad_exporter.rules import Problem

EXAMPLES = blocks(REPOSITORY / "docs" / "actions.md", "python")
TOTAL, AVAILABLE = "torch_host_memory_total_bytes", "torch_host_memory_available_bytes"
CPU, NORM, LOSS, SAMPLE = "torch_host_cpu_ratio", "torch_grad_global_norm", "torch_train_loss", "torch_grad_sample_step"


def never() -> bool:
    """Fail a loop that does not end."""
    pytest.fail("the run does not stop itself")


def example(having: str, changes: Mapping[str, str] = MappingProxyType({}), **names: object) -> dict[str, Any]:
    """Run the block of Python of the page that has a text, with shorter numbers where its own take long."""
    (text,) = (one for one in EXAMPLES if having in one)
    for of_the_page, here in changes.items():
        assert of_the_page in text
        text = text.replace(of_the_page, here)
    exec(text, names)  # noqa: S102 - what a user copies
    return names


@pytest.mark.slow
def test_the_first_example_stops_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of the first example ends once its norms grow."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    inputs = torch.ones(3, 4)
    until = time.monotonic() + PATIENCE
    sizes = (1e6 * 1.5 ** min(n - 200, 60) if n > 200 else 1.0 for n in itertools.count() if time.monotonic() < until or never())
    batches = ((inputs, torch.full((3, 1), size)) for size in sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    names = example(
        "exporter.should_stop", model=model, optimizer=optimizer, batches=batches, loss_function=torch.nn.functional.mse_loss
    )
    assert names["exporter"].should_stop


@pytest.mark.parametrize("low", [None, CPU, AVAILABLE, NORM])
def test_the_autoscaling_monitor(low: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker is added once CPU, memory and norm are high together long enough, and none if one of them is low."""
    world = World()
    example("def crowded", exporter=world)
    high = {CPU: 0.95, TOTAL: 100.0, AVAILABLE: 5.0, NORM: 3.0}
    calm = {CPU: 0.1, AVAILABLE: 80.0, NORM: 0.5}
    for at in range(300):
        now = high | ({low: calm[low]} if low else {})
        world.evaluate(float(at), **now, **{SAMPLE: float(at)})
        if at == 89:
            assert "one more worker" not in capsys.readouterr().out
    world.act.close()
    assert capsys.readouterr().out.count("one more worker") == (0 if low else 1)


@pytest.mark.parametrize("norm", [400.0, 600.0])
def test_high_norms_stop_the_run(norm: float) -> None:
    """A mean of ten samples above 500 stops the run, one below does not."""
    world = World()
    example("norms stay high", exporter=world, Stop=Stop)
    for at in range(12):
        world.evaluate(float(at), **{NORM: norm, SAMPLE: float(at)})
        world.step_over()
    assert world.stopped is (norm > 500)
    world.act.close()


@pytest.mark.parametrize("norm", [2.0, 20.0])
def test_high_norms_halve_the_learning_rate(norm: float) -> None:
    """Ten norms 20 times the usual one halve the learning rate once, twice the usual one do not."""
    world = World()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    world.optimizers = [optimizer]
    example("def high", exporter=world)
    for at in range(530):
        world.evaluate(float(at), **{NORM: norm if at > 510 else 1.0, SAMPLE: float(at)})
        world.step_over()
    assert optimizer.param_groups[0]["lr"] == (0.05 if norm > 5 else 0.1)
    world.act.close()


def test_the_learning_rate_of_a_loss_spike() -> None:
    """The learning rate is halved once within half an hour."""
    world = World()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    world.optimizers = [optimizer]
    example("LossSpike", exporter=world)
    world.problems = [Problem("LossSpike", "warning", "The loss jumped.")]
    for at in (0.0, 1.0, 1799.0):
        world.evaluate(at)
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    world.evaluate(1801.0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    world.act.close()
    assert eventually(lambda: world.count("ScaleLearningRate", "done") == 2)


@pytest.mark.slow
def test_a_layer_is_frozen_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's loop the faint layer of a model is frozen for the steps of the example, here for 30, and no other one."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    short = {"after=100": "after=12", "revive=1000": "revive=30"}
    model = faint()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    seen: list[list[bool]] = []
    until = time.monotonic() + PATIENCE

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while time.monotonic() < until or never():
            seen.append([layer.weight.requires_grad for layer in (model[0], model[1].linear, model[3])])
            if seen[-1][1] and not all(middle for _, middle, _ in seen):
                return
            yield torch.ones(3, 4), torch.ones(3, 2)

    with start_exporter(model) as exporter:
        names = example("freezing = ", short, exporter=exporter)
        for inputs, targets in batches():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert [middle for _, middle, _ in seen].count(False) == 30
    assert all(first and last for first, _, last in seen)
    assert names["freezing"].state_dict()["frozen"] == {}


@pytest.mark.slow
def test_the_stem_is_frozen_at_a_low_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a loss above 0.5 all layers are trained; below it the stem is frozen, and the head is trained on."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    names = example("batches = ")
    model, optimizer = names["model"], names["optimizer"]
    with start_exporter(model) as exporter:
        example('layers="^stem"', exporter=exporter, Freeze=Freeze)

        def frozen(loss: float) -> bool:
            exporter.observe(loss=loss)
            optimizer.zero_grad()
            model(torch.ones(5, 6)).square().mean().backward()
            optimizer.step()
            return not model.stem.weight.requires_grad

        assert not any(frozen(0.9) for _ in range(50))
        assert eventually(lambda: frozen(0.1))
        assert model.head.weight.requires_grad
