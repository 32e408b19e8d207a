"""Jobs of two ranks that freeze: the same layers after the same step on both, and where it would harm it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.actions.freeze.test_freeze import alone, ask, faint, model, step
from tests.support.ranks import run_ranks
from tests.support.scrape import errors, value
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Freeze
from torch_grad_exporter.actions.act import act, agreement

REVIVE = 12


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


def _hurry() -> None:
    """Judges, and asks the store, ten times as often as usual, so that a step is as much nearer on which ranks agree."""
    act.EVALUATION_SECONDS = act.EXCHANGE_SECONDS = 0.1
    act.SHARE = 1.0
    agreement.MARGIN_SECONDS = 0.5


def _trains(rank: int, folder: str) -> None:
    """Freezes by norms, which rank 1 samples every second step and rank 0 each; notes what is frozen after each step."""
    _group(rank, folder)
    _hurry()
    net = faint()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1)
    frozen: list[bool] = []
    action = Freeze(1e-3, after=12, revive=REVIVE)
    with start_exporter(wrapped, None, run="two ranks", every=1 + rank) as exporter:
        exporter.on(action)

        def over() -> bool:
            before = net[1].linear.weight.detach().clone()
            _step(wrapped, optimizer, len(frozen), rank)
            assert torch.equal(before, net[1].linear.weight) == (bool(frozen) and frozen[-1])
            frozen.append(not net[1].linear.weight.requires_grad)
            # All ranks have to leave after the same step.
            return len(frozen) > REVIVE and frozen[-REVIVE - 2 :].count(True) == REVIVE and not frozen[-1]

        assert eventually(over)
        assert value(exporter, "torch_layer_frozen", layer="1.linear") == (0 if rank == 0 else None)
        assert "action" not in errors(exporter)
    parameters = [parameter.tolist() for parameter in net.parameters()]
    (Path(folder) / f"{rank}.json").write_text(json.dumps([frozen, parameters]))
    _leave()


def test_both_ranks_freeze_the_same_at_the_same_step(tmp_path: Path) -> None:
    """Though they sample at different steps; the layer is thawed 12 steps later on both, and parameters stay equal."""
    run_ranks(_trains, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0].count(True) == REVIVE


def _refused(rank: int, folder: str) -> None:
    """Under each wrapper that cannot do it, `on` raises; and what would happen without that is seen once."""
    _group(rank, folder)
    cases: list[tuple[Any, str]] = [
        (DistributedDataParallel, "make it with find_unused_parameters=True"),
        (lambda net: DistributedDataParallel(net, static_graph=True), "static_graph=True"),
        (lambda net: DistributedDataParallel(net, find_unused_parameters=True, static_graph=True), "without static_graph"),
        (lambda net: FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu")), "use fully_shard"),
    ]
    for number, (wrap, message) in enumerate(cases):
        net = model()
        wrapped = wrap(net)
        for watched in (wrapped, net)[: 2 if number == 0 else 1]:
            with start_exporter(watched, None, run=f"refused {number}") as exporter:
                for arguments in ((Freeze(),), (lambda m: False, Freeze(layers="2"))):
                    with pytest.raises(RuntimeError, match=message):
                        exporter.on(*arguments)
                assert exporter._act._steps.slots == ()
    net = model()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net[2].requires_grad_(False)
    _step(wrapped, optimizer, 0, rank)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        _step(wrapped, optimizer, 1, rank)
    _leave()


def test_it_is_refused_where_gradients_would_not_be_reduced(tmp_path: Path) -> None:
    """DistributedDataParallel without unused parameters, also with a static graph, and the older FSDP."""
    run_ranks(_refused, str(tmp_path))


def _shards(rank: int, folder: str) -> None:
    """Freezes a layer of a sharded model by name, once rank 1 says so, and compares with a run that does so by hand."""
    _group(rank, folder)
    _hurry()
    mesh = init_device_mesh("cpu", (2,))
    nets = [model(), model()]
    for net in nets:
        for layer in (net[0], net[2], net[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1) for net in nets]
    taken = 0
    with start_exporter(nets[0], None, run="shards", every=2) as exporter:
        with pytest.raises(RuntimeError, match="all layers are sharded, and no rank alone knows their norms"):
            exporter.on(Freeze())
        exporter.on(lambda m: rank == 1, Freeze(layers="^2$", revive=10))

        def frozen() -> bool:
            nonlocal taken
            _step(nets[0], optimizers[0], taken, rank)
            taken += 1
            return not nets[0][2].weight.requires_grad

        assert eventually(frozen)
        at = taken
        for number in range(at + 15):
            _step(nets[1], optimizers[1], number, rank)
            if number + 1 in (at, at + 10):
                nets[1][2].requires_grad_(number + 1 != at)
                for parameter in nets[1][2].parameters():
                    parameter.grad = None
        for number in range(at, at + 15):
            _step(nets[0], optimizers[0], number, rank)
        assert nets[0][2].weight.requires_grad
        assert "action" not in errors(exporter)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(at))
    ours, by_hand = ([parameter.full_tensor() for parameter in net.parameters()] for net in nets)
    assert all(map(torch.equal, ours, by_hand))
    _leave()


@pytest.mark.full
def test_a_layer_of_a_sharded_model_is_frozen(tmp_path: Path) -> None:
    """Under FSDP2 both ranks freeze it after the same step, and thaw it; parameters are those of freezing by hand, bit by bit."""
    run_ranks(_shards, str(tmp_path))
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()


def trained(net: torch.nn.Module) -> list[str]:
    """The names of the parameters that require a gradient."""
    return [name for name, parameter in net.named_parameters() if parameter.requires_grad]


class Asking(torch.nn.Linear):
    """Calls a function in its forward, when FSDP2 has gathered its parameters."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As of a linear layer."""
        self.then()
        return super().forward(inputs)


def _gathered(rank: int, folder: str) -> None:
    """What is asked for, and what ends, while a layer's parameters are not in their places."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=1)
    net = model()
    net[2] = Asking(8, 8)
    for layer in (net[0], net[2], net[4], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with alone(net) as exporter:
        handle = exporter.on(lambda m: False, Freeze(layers="^2$"))
        step(net, optimizer)
        asked = []
        net[2].then = lambda: asked.append(ask(exporter))
        step(net, optimizer)
        del net[2].then
        assert asked == [True]
        assert trained(net) == ["0.weight", "0.bias", "4.weight", "4.bias"]
        assert value(exporter, "torch_layer_frozen", layer="2") == 1
        net[2].then = handle.remove
        net(torch.randn(3, 4)).sum().backward()
        assert len(trained(net)) == 6
        assert "action" not in errors(exporter)
    dist.destroy_process_group()
    Path(folder, "done").touch()


def test_a_layer_that_is_gathered_at_the_moment_is_known(tmp_path: Path) -> None:
    """Under FSDP2 its parameters are elsewhere within forward and backward, at another moment on each rank."""
    run_ranks(_gathered, str(tmp_path), ranks=1)
    assert (tmp_path / "done").exists()
