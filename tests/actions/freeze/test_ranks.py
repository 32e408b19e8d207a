"""Jobs that freeze under wrappers of PyTorch, and wrappers under which it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.actions.freeze.test_freeze import held, model, start
from tests.support.ranks import run_ranks
from tests.support.scrape import errors
from tests.support.torch_hooks import global_step_hooks
from torch_grad_exporter.actions import Freeze


def _group(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _step(wrapped: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    optimizer.zero_grad()
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * number + rank))
    wrapped(batch).square().mean().backward()  # waits for the other rank
    optimizer.step()


def _refused(rank: int, folder: str) -> None:
    """Try `on` under each unsafe wrapper, and show what would happen without the refusal."""
    _group(rank, folder)
    cases: list[tuple[Any, str]] = [
        (DistributedDataParallel, "make it with find_unused_parameters=True"),
        (lambda net: DistributedDataParallel(net, find_unused_parameters=True, static_graph=True), "without static_graph"),
        (lambda net: FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu")), "use fully_shard"),
    ]
    for number, (wrap, message) in enumerate(cases):
        net = model()
        wrapped = wrap(net)
        with start(net if number == 0 else wrapped, run=f"refused {number}") as exporter:
            hooks = global_step_hooks()
            for arguments in ((Freeze(),), (lambda m: False, Freeze(layers="2"))):
                with pytest.raises(RuntimeError, match=message):
                    exporter.on(*arguments)
            assert global_step_hooks() == hooks
    net = model()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net[2].requires_grad_(False)
    _step(wrapped, optimizer, 0, rank)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        _step(wrapped, optimizer, 1, rank)
    _leave()


@pytest.mark.process
def test_unsafe_wrappers_are_refused(tmp_path: Path) -> None:
    """DistributedDataParallel without unused parameters or with a static graph, and the older FSDP, are refused."""
    run_ranks(_refused, str(tmp_path))


def _shards(rank: int, folder: str) -> None:
    """Freeze a layer of a sharded model by name, and compare with a run whose user does so."""
    _group(rank, folder)
    mesh = init_device_mesh("cpu", (2,))
    nets = [model(), model()]
    for net in nets:
        for layer in (net[0], net[2], net[4], net):
            fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1) for net in nets]
    with start(nets[0], run="shards", every=2) as exporter:
        with pytest.raises(RuntimeError, match="all layers are sharded, and no rank alone knows their norms"):
            exporter.on(Freeze())
        for number in range(12):
            if number == 3:
                held(exporter, Freeze(layers="^2$", revive=5), "2")
            if number in (3, 8):
                nets[1][2].requires_grad_(number == 8)
                for parameter in nets[1][2].parameters():
                    parameter.grad = None
            assert nets[0][2].weight.requires_grad == nets[1][2].weight.requires_grad
            for net, optimizer in zip(nets, optimizers, strict=True):
                _step(net, optimizer, number, rank)
        assert "action" not in errors(exporter)
    ours, users = ([parameter.full_tensor() for parameter in net.parameters()] for net in nets)
    assert all(map(torch.equal, ours, users))
    _leave()


@pytest.mark.process
def test_a_layer_of_a_sharded_model_is_frozen(tmp_path: Path) -> None:
    """Under FSDP2 a layer is frozen and thawed with the bits of the user's own freezing."""
    run_ranks(_shards, str(tmp_path))
