"""Rollback in jobs of two ranks: all go back after the same step, shards by themselves."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.actions.rollback.loops import BACK, Loop, Net, flat, went_back
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors, value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Rollback


def _replicated(net: Net) -> nn.Module:
    net.ones = net.ones.clone()  # DDP cannot broadcast one whose elements share their memory
    return DistributedDataParallel(net)


def _sharded(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (*net.children(), net):
        fully_shard(layer, mesh=mesh)
    return net


def _flat(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))


def _rank(rank: int, kind: str) -> tuple[int, int, bool]:
    """Go back, and compare with a job that was restarted; return the last batch, the step gone back to, and if they agree."""
    wrap = {"ddp": _replicated, "fsdp": _sharded, "fsdp1": _flat}[kind]
    loop = Loop(wrap=wrap)
    # Copies are made while rank 0 and then the others learn what to do, about two seconds: more of them are kept.
    with start_exporter(loop.net, None, run=kind, every=1, collectors=OFF) as exporter:
        last = went_back(exporter, loop, Rollback(every=40, keep=12), rank, lambda: time.sleep(0.01))
        step = int(value(exporter, BACK) or 0)
        for number in range(last + 1, last + 6):
            loop.step(number, rank)
        assert "action" not in errors(exporter)
    reference = Loop(wrap=wrap)
    for number in range(1, step + 1):
        reference.step(number, rank)
    reference = reference.resumed(reference.kept())
    for number in range(last + 1, last + 6):
        reference.step(number, rank)
    return last, step, flat(loop.kept()) == flat(reference.kept())


@pytest.mark.process
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp1"])
def test_ranks_go_back_together(kind: str) -> None:
    """Both ranks go back to the same step after the same batch, and have the bits of a job that was restarted from there."""
    (last, step, equal), other = of_ranks(_rank, kind)
    assert (last, step, True) == other
    assert equal
    assert step % 40 == 0 < step < last
