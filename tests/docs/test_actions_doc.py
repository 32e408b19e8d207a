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
from torch_grad_exporter.rules import Problem

PAGE = REPOSITORY / "docs" / "actions.md"
TOTAL, AVAILABLE = "torch_host_memory_total_bytes", "torch_host_memory_available_bytes"
CPU, NORM, LOSS, SAMPLE = "torch_host_cpu_ratio", "torch_grad_global_norm", "torch_train_loss", "torch_grad_sample_step"


def never() -> bool:
    """Fail a loop that does not end."""
    pytest.fail("the run does not stop itself")


def example(number: int, changes: Mapping[str, str] = MappingProxyType({}), **names: object) -> dict[str, Any]:
    """Run a block of Python of the page, with shorter numbers where its own take long."""
    text = blocks(PAGE, "python")[number]
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
    names = example(0, model=model, optimizer=optimizer, batches=batches, loss_function=torch.nn.functional.mse_loss)
    assert names["exporter"].should_stop


@pytest.mark.parametrize("low", [None, CPU, AVAILABLE, NORM])
def test_the_autoscaling_monitor(low: str | None) -> None:
    """A worker is added once CPU, memory and norm are high together long enough, and none if one of them is low."""
    world, reasons = World(), list[str]()
    names = example(2, exporter=world, add_worker=lambda reason: reasons.append(reason) or len(reasons))
    high = {CPU: 0.95, TOTAL: 100.0, AVAILABLE: 5.0, NORM: 3.0}
    calm = {CPU: 0.1, AVAILABLE: 80.0, NORM: 0.5}
    for at in range(300):
        now = high | ({low: calm[low]} if low else {})
        world.evaluate(float(at), **now, **{SAMPLE: float(at)})
        if at == 89:
            assert reasons == []
    world.act.close()
    assert len(reasons) == (0 if low else 1)
    assert callable(names["crowded"])


def test_the_learning_rate_of_a_loss_spike() -> None:
    """The learning rate is halved once within half an hour."""
    world = World()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    world.optimizers = [optimizer]
    example(3, exporter=world)
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

    given = {"model": model, "optimizer": optimizer, "batches": batches(), "start_exporter": start_exporter}
    names = example(4, short, loss_function=torch.nn.functional.mse_loss, **given)
    assert [middle for _, middle, _ in seen].count(False) == 30
    assert all(first and last for first, _, last in seen)
    assert names["freezing"].state_dict()["frozen"] == {}
