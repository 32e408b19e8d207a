"""Jobs of several ranks: actions happen after the same step on all of them, and freezing under wrappers of PyTorch."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.actions.freeze.test_freeze import faint, held, model, start
from tests.support.ranks import of_ranks
from tests.support.scrape import errors
from tests.support.tools import eventually
from tests.support.torch_hooks import global_step_hooks
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Freeze, Stop


def _step(wrapped: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    optimizer.zero_grad()
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * number + rank))
    wrapped(batch).square().mean().backward()  # waits for the other rank
    optimizer.step()


def _rank(rank: int) -> tuple[list[tuple[bool, bool]], list[object]]:
    """Train until a layer is frozen and the job is stopped; return what happened after which step, and the parameters."""
    net = faint()
    layer = net[1].linear
    wrapped = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1)
    history: list[tuple[bool, bool]] = []

    def done() -> bool:
        before = layer.weight.detach().clone()
        _step(wrapped, optimizer, len(history), rank)
        assert torch.equal(before, layer.weight) == (bool(history) and history[-1][0])
        history.append((not layer.weight.requires_grad, exporter.should_stop))
        time.sleep(0.01)  # leaves the cores to others
        return all(history[-1])

    with start(wrapped, run="ranks", every=1 + rank) as exporter:
        exporter.on(Freeze(1e-3, after=12, revive=None))
        exporter.on(lambda m: rank == 1, Stop())
        assert eventually(done)
        assert "action" not in errors(exporter)
    return history, [parameter.tolist() for parameter in net.parameters()]


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_act_after_the_same_step(ranks: int) -> None:
    """A stop with its cause on one rank, and a layer with small norms, take effect after the same step on all ranks."""
    first, *others = of_ranks(_rank, ranks=ranks)
    assert others == [first] * (ranks - 1)


def test_without_a_store_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks share no store, `on` refuses an action between steps with the fix, and takes one in the background."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with start_exporter(torch.nn.Linear(2, 1), None, run="no store") as exporter:
        with pytest.raises(RuntimeError, match=r"all 2 ranks .* there is none: .*use torchrun, or call it after init_process"):
            exporter.on("LossSpike", Stop())
        exporter.on("LossSpike", print)
        assert not exporter.should_stop


def _refused(rank: int) -> None:
    """Try `on` under each unsafe wrapper, and show what would happen without the refusal."""
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


def _shards(rank: int) -> None:
    """Freeze a layer of a sharded model by name, and compare with a run whose user does so."""
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


def _wrapped(rank: int) -> None:
    _refused(rank)
    _shards(rank)


@pytest.mark.process
def test_freezing_under_wrappers() -> None:
    """FSDP2 has the bits of the user's own freezing; the older FSDP, and DDP that needs each gradient, are refused."""
    of_ranks(_wrapped)
