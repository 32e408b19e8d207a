"""Sharded and replicated gradients over two gloo ranks: each number is what its name says, or absent."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scrape import errors, mode, value
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_grad_exporter import Exporter, start_exporter

STEPS = 6


def rank_main(rank: int, folder: str, check: Callable[[int], None]) -> None:
    """One rank of two."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        check(rank)
    finally:
        dist.destroy_process_group()


def perceptron() -> torch.nn.Sequential:
    """The same model on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def train(wrapped: torch.nn.Module, rank: int) -> tuple[Exporter, torch.optim.Optimizer]:
    """Some steps on data that differ from rank to rank; the gradients of the last one are still there."""
    exporter = start_exporter(wrapped, port=None, every=1)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return exporter, optimizer


def squared(parameters: list[torch.nn.Parameter]) -> float:
    """The squared norm of what this rank has of the gradients, in float64."""
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]
    return sum(g.double().square().sum().item() for g in gradients)


def replicated(rank: int) -> None:
    """DDP: the reduced gradient, equal on both ranks."""
    model = perceptron()
    exporter, _ = train(DistributedDataParallel(model), rank)
    with exporter:
        for layer in ("0", "2"):
            expected = math.sqrt(squared(list(model[int(layer)].parameters())))
            assert value(exporter, "torch_grad_norm", layer=layer) == pytest.approx(expected, rel=1e-5)
            assert value(exporter, "torch_grad_shard_norm", layer=layer) is None
        everywhere = [None, None]
        dist.all_gather_object(everywhere, value(exporter, "torch_grad_global_norm"))
        assert everywhere[0] == everywhere[1] is not None
        assert (mode(exporter), errors(exporter)) == ("output", {})


def sharded(rank: int) -> None:
    """FSDP2: this rank's part, under its own name."""
    model = perceptron()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    exporter, _ = train(model, rank)
    with exporter:
        for layer in ("0", "2"):
            part = squared(list(model[int(layer)].parameters()))
            assert value(exporter, "torch_grad_shard_norm", layer=layer) == pytest.approx(math.sqrt(part), rel=1e-5)
            assert value(exporter, "torch_grad_norm_squared", layer=layer) == pytest.approx(part, rel=1e-5)
            assert value(exporter, "torch_grad_norm", layer=layer) is None
        assert value(exporter, "torch_grad_global_norm") is None
        assert value(exporter, "torch_grad_captures_total", layer="0") == STEPS
        exporter.observe(grad_norm=3.5)
        assert value(exporter, "torch_grad_global_norm") == 3.5
        assert errors(exporter) == {}


@pytest.mark.parametrize("check", [replicated, sharded], ids=lambda check: check.__name__)
def test_two_ranks(tmp_path: Path, check: Callable[[int], None]) -> None:
    """DDP shows the reduced norm on each rank; FSDP2 shows each rank's part and never calls it the whole."""
    mp.spawn(rank_main, args=(str(tmp_path), check), nprocs=2)
