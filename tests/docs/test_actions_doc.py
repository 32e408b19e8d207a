"""The examples of docs/actions.md run and do what the page says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.support.acting import World
from tests.support.pages import blocks
from tests.support.tools import REPOSITORY

EXAMPLES = blocks(REPOSITORY / "docs" / "actions.md", "python")
TOTAL, AVAILABLE = "torch_host_memory_total_bytes", "torch_host_memory_available_bytes"
CPU, NORM, LOSS, SAMPLE = "torch_host_cpu_ratio", "torch_grad_global_norm", "torch_train_loss", "torch_grad_sample_step"


def example(having: str, changes: Mapping[str, str] = MappingProxyType({}), **names: object) -> dict[str, Any]:
    """Run the block of Python of the page that has a text, with shorter numbers where its own take long."""
    (text,) = (one for one in EXAMPLES if having in one)
    for of_the_page, here in changes.items():
        assert of_the_page in text
        text = text.replace(of_the_page, here)
    exec(text, names)  # noqa: S102 - what a user copies
    return names


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
