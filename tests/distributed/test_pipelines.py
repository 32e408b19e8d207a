"""Pipeline schedules that change gradients between backwards: those are read at the step, and the log says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import pipelining

from tests.support.ranks import of_ranks
from tests.support.record import norm
from tests.support.scrape import OFF, errors, lost, value
from tests.support.torch_versions import fully_shard, need
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.process

RANKS, STEPS, MICRO_BATCHES = 2, 6, 4


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of the last stage."""
    return (output - target).square().mean()


def zero_bubble(rank: int) -> tuple[dict[str, torch.nn.Module], Any]:
    """Two stages on each rank."""
    stages = {f"stage{number}": torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for number in (rank, rank + RANKS)}
    pieces = [
        pipelining.PipelineStage(one, number, 2 * RANKS, torch.device("cpu"))
        for number, one in zip((rank, rank + RANKS), stages.values(), strict=True)
    ]
    return stages, pipelining.ScheduleInterleavedZeroBubble(pieces, MICRO_BATCHES, loss_fn=mean_square)


def sharded(rank: int) -> tuple[dict[str, torch.nn.Module], Any]:
    """A stage that FSDP2 manages, over a group of one rank."""
    stage = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    fully_shard(stage, mesh=mesh["dp"])
    piece = pipelining.PipelineStage(stage, rank, RANKS, torch.device("cpu"))
    return {"stage": stage}, pipelining.Schedule1F1B(piece, MICRO_BATCHES, loss_fn=mean_square)


KINDS = {
    "zero bubble": zero_bubble,
    "sharded": sharded,
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).double()


def train(rank: int, kind: str) -> dict[str, Any]:
    """What is shown after each step, and the squares of the gradients of each model that the step used."""
    torch.manual_seed(rank)
    models, schedule = KINDS[kind](rank)
    optimizer = torch.optim.SGD([p for one in models.values() for p in one.parameters()], lr=0.01)
    found: dict[str, Any] = {"shown": [], "true": []}
    with start_exporter(models, port=None, every=1, ranks="all", collectors=OFF) as exporter:
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, target = (torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + i)) for i in range(2))
            schedule.step(*[inputs] if rank == 0 else [], **{} if rank == 0 else {"target": target})
            optimizer.step()
            layers = [f"{name}.0" for name in models]
            found["shown"].append([value(exporter, "torch_grad_norm_squared", layer=layer) for layer in layers])
            found["true"].append([float(norm([local(p.grad) for p in one.parameters()])) ** 2 for one in models.values()])
        found["mode"] = value(exporter, "torch_grad_exporter_capture_mode", mode="optimizer")
        found["skipped"] = sum(lost(exporter).values())
        found["errors"] = errors(exporter)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_optimizer_uses_is_shown(kind: str) -> None:
    """On each rank, from the first round on, with nothing lost."""
    need(2, 7, "FSDP2 on a CPU, and before that schedules that divide,")
    for one in of_ranks(train, kind, ranks=RANKS):
        assert one["mode"] == 1
        for shown, true in zip(one["shown"], one["true"], strict=True):
            assert shown == pytest.approx(true, rel=2e-5)
        assert (one["skipped"], one["errors"]) == (0, {})
