"""Clipping over several ranks: norms are those of the whole gradients, by one packed collective, and all ranks decide alike.

Ranks compare what they did with the float64 references, on gradients that they gather for that.
"""

from __future__ import annotations

import datetime as dt
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.actions import references
from tests.support.models import Perceptron
from tests.support.ranks import PATIENCE, run_ranks
from tests.support.scrape import errors, value
from tests.support.torch_versions import DTensor, Partial, Replicate, fully_shard
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import AGC, AutoClip, Clipper, MaxNorm, MaxValue, SkipAbove, ZClip

Build = Callable[[torch.nn.Module], torch.nn.Module]


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Replicas."""
    return DistributedDataParallel(model)


def fsdp(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """FSDP2, by layer. Three rows of the second layer lie on two ranks unevenly."""
    for one in (model.first, model.second, model):
        fully_shard(one, mesh=mesh)
    return model


def tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """The first weight by rows, the second by columns, the second bias whole on each rank."""
    mesh = mesh or init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def hybrid(model: torch.nn.Module) -> torch.nn.Module:
    """Two copies, each split over two ranks."""
    return fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))


def both(model: torch.nn.Module) -> torch.nn.Module:
    """Tensor parallelism within FSDP2, over four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"])


REGIMES: dict[str, tuple[Build, int, int]] = {
    "ddp": (ddp, 2, 0),
    "fsdp": (fsdp, 2, 1),
    "tp": (tensor_parallel, 2, 1),
    "hybrid": (hybrid, 4, 1),
    "fsdp and tp": (both, 4, 2),
}
"""By name: how a model is made parallel, over how many ranks, and how many collectives a call has: one per mesh dimension."""

POLICIES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "MaxNorm": (MaxNorm(0.1), lambda: references.MaxNorm(0.1)),
    "MaxNorm by layer": (MaxNorm(0.05, scope="layer"), lambda: references.MaxNorm(0.05, "layer")),
    "MaxNorm by unit": (MaxNorm(0.02, scope="unit"), lambda: references.MaxNormOfUnits(0.02)),
    "MaxValue": (MaxValue(0.01), lambda: references.MaxValue(0.01)),
    "AutoClip": (AutoClip(25, history_size=5), lambda: references.AutoClip(25, 5)),
    "ZClip by layer": (ZClip(0.9, 0.5, 3, scope="layer"), lambda: references.ZClip(0.9, 0.5, 3, scope="layer")),
    "AGC": (AGC(0.01), lambda: references.AGC(0.01, 1e-3)),
    "AGC by layer": (AGC(0.01, scope="layer"), lambda: references.AGC(0.01, 1e-3, "layer")),
}


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(model: torch.nn.Module, *, of_gradients: bool) -> dict[str, references.Array]:
    """Parameters or gradients as a whole, by name, in float64."""
    named = ((name.removeprefix("module."), p.grad if of_gradients else p) for name, p in model.named_parameters())
    return references.arrays({name: gathered(tensor).clone() for name, tensor in named if tensor is not None})


def collectives() -> int:
    """How many collectives this rank has taken part in, of all groups."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def joined(rank: int, ranks: int, store: str) -> None:
    """Joins a process group. Wrappers are collected in this thread: a thread of gloo that frees one can wait for itself."""
    gc.disable()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # with tensor parallelism, of what is not done here
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", timeout=dt.timedelta(seconds=PATIENCE), rank=rank, world_size=ranks
    )


def follows(rank: int, store: str, regime: str) -> None:
    """One rank: trains by each policy, and compares each step with the reference."""
    build, ranks, expected_collectives = REGIMES[regime]
    joined(rank, ranks, store)
    for name, (policy, make) in POLICIES.items():
        torch.manual_seed(0)
        model, reference = build(Perceptron()), make()
        clipper = Clipper(model, policy)
        same_data = regime in ("tp", "fsdp and tp")
        for step in range(8):
            model.zero_grad()
            source = rank // 2 if same_data and ranks == 4 else 0 if same_data else rank
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + source))
            (model(inputs).square().mean() * (1 + step % 3)).backward()
            before = whole(model, of_gradients=True)
            weights = whole(model, of_gradients=False)
            count = collectives()
            norm = clipper()
            assert collectives() - count == expected_collectives, (name, collectives() - count)
            expected, thresholds = reference.step(before, weights)
            assert float(norm) == pytest.approx(references.whole(before), rel=1e-5), name
            if policy.scope != "unit":
                np.testing.assert_allclose(clipper.threshold.double().numpy().reshape(-1), thresholds, rtol=1e-5, err_msg=name)
            after = whole(model, of_gradients=True)
            assert after.keys() == expected.keys()
            for one, gradient in after.items():
                np.testing.assert_allclose(gradient, expected[one], rtol=1e-5, atol=1e-9, err_msg=f"{name}, {one}")
            assert any(not np.allclose(after[one], before[one], rtol=1e-4) for one in after) or policy.scope != "unit"
        del model, clipper
        gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("regime", REGIMES)
def test_norms_are_those_of_the_whole_gradients(tmp_path: Path, regime: str) -> None:
    """Norm, thresholds and gradients of each policy are the reference's on the gathered gradients, by so many collectives."""
    run_ranks(follows, str(tmp_path / "store"), regime, ranks=REGIMES[regime][1])


def follows_at_steps(rank: int, store: str, regime: str) -> None:
    """One rank: trains by each policy of `clip=`, and compares what each step has used with the reference."""
    build, ranks, expected_collectives = REGIMES[regime]
    joined(rank, ranks, store)
    off = dict.fromkeys(("process", "host", "container", "gpu", "cuda_memory"), False)
    for name, (policy, make) in POLICIES.items():
        torch.manual_seed(0)
        model, reference = build(Perceptron()), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        same_data = regime in ("tp", "fsdp and tp")
        with start_exporter(model, port=None, every=1, collectors=off, clip=policy) as exporter:
            for step in range(8):
                optimizer.zero_grad()
                source = rank // 2 if same_data and ranks == 4 else 0 if same_data else rank
                inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + source))
                (model(inputs).square().mean() * (1 + step % 3)).backward()
                before, weights = whole(model, of_gradients=True), whole(model, of_gradients=False)
                count = collectives()
                optimizer.step()
                assert collectives() - count == expected_collectives, (name, collectives() - count)
                expected, _ = reference.step(before, weights)
                after = whole(model, of_gradients=True)
                assert after.keys() == expected.keys()
                for one, gradient in after.items():
                    np.testing.assert_allclose(gradient, expected[one], rtol=1e-5, atol=1e-9, err_msg=f"{name}, {one}")
                if regime == "ddp" and rank == 0:
                    ratio = references.whole(after) / references.whole(before)
                    assert value(exporter, "torch_grad_global_norm") == pytest.approx(references.whole(before), rel=1e-5)
                    assert value(exporter, "torch_grad_global_norm_after_clip") == pytest.approx(references.whole(after), rel=1e-5)
                    assert value(exporter, "torch_grad_clip_coefficient") == pytest.approx(ratio, rel=1e-5)
            assert errors(exporter) == {}, name
        del model, optimizer, exporter
        gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("regime", [one if one != "hybrid" else pytest.param(one, marks=pytest.mark.full) for one in REGIMES])
def test_each_step_is_clipped_by_the_norm_of_the_whole_gradients(tmp_path: Path, regime: str) -> None:
    """What each optimizer's step uses is what the reference makes of the gathered gradients, by as many collectives as by hand."""
    run_ranks(follows_at_steps, str(tmp_path / "store"), regime, ranks=REGIMES[regime][1])


def is_one_of_a_kind(rank: int, store: str) -> None:
    """One rank: what is refused, summands, a wrapper that comes later, and a state that goes on."""
    joined(rank, 2, store)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"belongs to FullyShardedDataParallel.*use its own clip_grad_norm_"):
        Clipper(FullyShardedDataParallel(Perceptron(), use_orig_params=True, device_id=torch.device("cpu")), MaxNorm(1.0))
    transposed = torch.nn.ConvTranspose2d(4, 6, 3)
    fully_shard(transposed)
    with pytest.raises(ValueError, match=r'scope="unit": ranks have parts of weight that cross its units; use scope="layer"'):
        Clipper(transposed, AGC())
    fused = fsdp(Perceptron())
    with pytest.raises(ValueError, match=r"parameters are split over ranks; use SkipAbove\(synchronize=True\)"):
        Clipper(fused, SkipAbove(1.0), optimizers=[torch.optim.AdamW(fused.parameters(), fused=True)])

    for candidate in (MaxValue(1.0), AGC()):
        with pytest.raises(ValueError, match=r"dry_run=.*split over ranks, of which each would count its own part"):
            Clipper(fused, MaxNorm(1.0), dry_run=[candidate])

    # Of a gradient that is the sum over ranks, each has a summand: the norm is that of the sum.
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.tensor([3.0, 0.0, float(rank)]), mesh, [Partial()])
    assert float(Clipper([parameter], MaxNorm(1.0))()) == pytest.approx(37**0.5)
    torch.testing.assert_close(parameter.grad.full_tensor(), torch.tensor([6.0, 0.0, 1.0]) / 37**0.5)

    # Made before `fully_shard`, which puts other parameters in the place of those that it knew.
    torch.manual_seed(0)
    model = Perceptron()
    clipper = Clipper(model, MaxNorm(0.01))
    fsdp(model)
    model(torch.randn(5, 6)).square().mean().backward()
    before = whole(model, of_gradients=True)
    assert float(clipper()) == pytest.approx(references.whole(before), rel=1e-5)
    assert references.whole(whole(model, of_gradients=True)) == pytest.approx(0.01, rel=1e-3)

    # Without a gradient on any rank, the collective takes place, and no norm enters a history.
    idle = Clipper(fsdp(Perceptron()), AutoClip())
    assert float(idle()) == 0
    assert int(idle.state_dict()["memory"]["count"]) == 0

    # Candidates of one scope share its collective.
    trying = Clipper(model, ZClip(), dry_run=[AutoClip(), MaxNorm(0.001), ZClip(scope="layer"), MaxNorm(1.0, scope="layer")])
    count = collectives()
    trying()
    assert collectives() - count == 3  # of the model, rounded as clip_grad_norm_ does or not, and by layer
    assert [int(one.clipped_steps) for one in trying.candidates] == [1, 1, 0, 0]

    # A skipped step is skipped on both ranks, though their own parts have different norms.
    skipping = Clipper(model, SkipAbove(references.whole(before) * 0.9))
    model.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    model.second.bias.grad.to_local().mul_(1e4 if rank == 0 else 1)
    skipping()
    assert all(parameter.grad is None for parameter in model.parameters())
    dist.destroy_process_group()


def test_special_cases_of_two_ranks(tmp_path: Path) -> None:
    """What cannot be right is refused; summands are added first; `fully_shard` may come later; both ranks skip the same steps."""
    run_ranks(is_one_of_a_kind, str(tmp_path / "store"))
