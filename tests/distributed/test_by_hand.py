"""Gradients that the loop makes equal over ranks by its own hand: what is shown is what was made equal, or nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import Perceptron
from tests.support.ranks import of_ranks
from tests.support.record import norm
from tests.support.scrape import OFF, errors, lost, mode, value
from torch_grad_exporter import start_exporter

RANKS, STEPS = 2, 5


def made() -> Perceptron:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Perceptron()


def data(step: int, part: int) -> torch.Tensor:
    """Return a rank's batch of a step."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + part))


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the gradients that are there."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def in_place(model: torch.nn.Module) -> None:
    """Reduce each gradient in place."""
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient.div_(RANKS)


def flat(model: torch.nn.Module) -> None:
    """Reduce one buffer, whose pieces take the gradients' places."""
    buffer = torch.cat([gradient.flatten() for gradient in gradients(model)])
    dist.all_reduce(buffer)
    pieces = (buffer / RANKS).split([p.numel() for p in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def clipped(model: torch.nn.Module) -> None:
    """Reduce, and then clip to a norm that is always exceeded."""
    in_place(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def nothing(_model: torch.nn.Module) -> None:
    """Use the gradients as they are."""


class Synchronizing(torch.optim.SGD):
    """Reduces within its step, before it steps, as Horovod's does."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ANN401 - what the original returns
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        return super().step(closure)


def within(parameter: torch.Tensor) -> None:
    """Reduce in a hook of the backward."""
    dist.all_reduce(parameter.grad)
    parameter.grad /= RANKS


LOOPS: dict[str, Callable[[torch.nn.Module], None]] = {
    "flat": flat, "clipped": clipped, "in the step": nothing, "in the backward": nothing, "wrapped": nothing,
    "two optimizers": in_place,
}  # fmt: skip
AT_THE_STEP = {"flat", "clipped", "in the step", "two optimizers"}
"""Where gradients are written after the backward, so that they are read at the step."""


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Return what the exporter logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_grad_exporter")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def optimizers_of(loop: str, model: Perceptron) -> list[torch.optim.Optimizer]:
    """Return what steps in a loop."""
    if loop == "two optimizers":
        return [torch.optim.SGD(model.first.parameters(), lr=0.05), torch.optim.SGD(model.second.parameters(), lr=0.05)]
    return [(Synchronizing if loop == "in the step" else torch.optim.SGD)(model.parameters(), lr=0.05)]


def train(loop: str, rank: int) -> dict[str, Any]:
    """Return what was shown after each step, and the norms that the optimizer saw."""
    model = made()
    if loop == "in the backward":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(within)
    wrapped = DistributedDataParallel(model) if loop == "wrapped" else model
    optimizers, scaler = optimizers_of(loop, model), torch.amp.GradScaler("cpu", enabled=loop == "clipped")
    found: dict[str, Any] = {"seen": [], "layers": []}
    with told() as said, start_exporter(wrapped, port=None, every=1, ranks="first", collectors=OFF) as exporter:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in range(2 if loop == "two optimizers" else 1):
                scaler.scale(wrapped(data(2 * step + part, rank)).square().mean()).backward()
            if scaler.is_enabled():
                scaler.unscale_(optimizers[0])
            LOOPS[loop](model)
            for optimizer in optimizers:
                scaler.step(optimizer)
                scaler.update()
            found["layers"].append([value(exporter, "torch_grad_norm", layer=layer) for layer in ("first", "second")])
            found["seen"].append([float(norm([p.grad.double() for p in layer.parameters()])) for layer in model.children()])
        found["skipped"] = sum(lost(exporter).values())
        found["mode"] = mode(exporter)
        found["errors"] = errors(exporter)
    found["said"] = said
    return found


def trained(rank: int) -> dict[str, dict[str, Any]]:
    """Return the findings of one of the ranks by loop."""
    return {loop: train(loop, rank) for loop in LOOPS}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, Any]]]:
    """Return the findings by rank and loop."""
    return of_ranks(trained, ranks=RANKS)


@pytest.mark.process
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_shown_is_equal_on_all_ranks(found: list[dict[str, dict[str, Any]]], loop: str) -> None:
    """The first rank shows the norm that the optimizers of both ranks see; the log says where gradients are read at the step."""
    first, second = (ranks[loop] for ranks in found)
    assert first["seen"] == second["seen"]
    for shown, seen in zip(first["layers"], first["seen"], strict=True):
        assert shown == pytest.approx(seen, rel=1e-5)
    assert second["layers"] == [[None, None]] * STEPS
    assert (first["skipped"], first["errors"], second["errors"]) == (0, {}, {})
    for mine in (first, second):
        assert mine["mode"] == ("optimizer" if loop in AT_THE_STEP else "backward")
        assert any("written after the backward" in line for line in mine["said"]) == (loop in AT_THE_STEP)
