"""Failures below activations, times of layers and watched tensors: training ends in the same bits, and they are counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.inspection.support import EachOperation
from tests.support.scrape import errors
from torch_grad_exporter import start_exporter

OTHERS = dict.fromkeys(("host", "process", "container"), False)
OPTIONS = {"every": 1, "activations": True, "layer_times": True, "collectors": OTHERS}


class PlantedError(Exception):
    """What is raised below the exporter."""


def fail(*_arguments: object, **_options: object) -> None:
    """Raise the planted error."""
    raise PlantedError


def trained(*, inspected: bool, act: Callable[[str], object] | None = None) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return the parameters after three steps of two micro-batches, and the counted failures; `act` gets each operation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start_exporter(model, None, **(OPTIONS if inspected else {})) as exporter:
        with EachOperation(act) if act is not None else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(2):
                    y = model(torch.randn(3, 4))
                    if inspected:
                        y = exporter.watch("again", exporter.watch("y", y), max_norm=1e9)
                    y.square().mean().backward()
                optimizer.step()
        exporter.close()
        failures = errors(exporter)
    return [parameter.detach().clone() for parameter in model.parameters()], failures


@pytest.mark.slow
def test_an_operation_that_fails() -> None:
    """Whichever operation of the exporter fails, training ends in the same bits and something is counted."""
    own: set[str] = set()
    plain: set[str] = set()
    trained(inspected=False, act=plain.add)
    expected, _ = trained(inspected=False)
    parameters, failures = trained(inspected=True, act=own.add)
    assert failures == {}
    assert all(map(torch.equal, parameters, expected))
    assert len(own - plain) > 5
    for failing in own - plain:
        parameters, failures = trained(inspected=True, act=lambda name, failing=failing: name == failing and fail())
        assert all(map(torch.equal, parameters, expected)), failing
        assert failures, failing


@pytest.mark.slow
@pytest.mark.parametrize(
    "seam",
    [(nn.Module, "register_forward_hook"), (nn.Module, "register_forward_pre_hook"), (torch.Tensor, "register_hook")],
    ids=lambda seam: seam[1],
)
def test_a_hook_that_is_refused(seam: tuple[object, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If PyTorch refuses a hook after the start, training ends in the same bits."""
    expected, _ = trained(inspected=False)
    planted: list[str] = []

    def plant(name: str) -> None:
        if not planted:
            planted.append(name)
            monkeypatch.setattr(*seam, fail)

    parameters, _ = trained(inspected=True, act=plant)
    assert all(map(torch.equal, parameters, expected))
