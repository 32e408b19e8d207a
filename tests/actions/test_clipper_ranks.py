"""Clipping over several ranks compared with float64 references on the gathered gradients."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.actions import references, test_clip_at_steps
from tests.support.models import Perceptron
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors, value
from tests.support.torch_versions import DTensor, Partial, Replicate, distribute_tensor, fully_shard
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import AGC, AutoClip, Clipper, MaxNorm, MaxValue, SkipAbove, ZClip

pytestmark = pytest.mark.process

Build = Callable[[torch.nn.Module], torch.nn.Module]


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Return replicas."""
    return DistributedDataParallel(model)


def fsdp(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """Return an FSDP2 model by layer, whose second layer lies on two ranks unevenly."""
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    return model


def tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """Split the first weight by rows and the second by columns."""
    mesh = mesh or init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def hybrid(model: torch.nn.Module) -> torch.nn.Module:
    """Return two copies, each split over two ranks."""
    return fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))


def both(model: torch.nn.Module) -> torch.nn.Module:
    """Return tensor parallelism within FSDP2, over four ranks."""
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
    **{name: test_clip_at_steps.POLICIES[name] for name in ("MaxValue", "AutoClip", "ZClip by layer", "AGC")},
    "AGC by layer": (AGC(0.01, scope="layer"), lambda: references.AGC(0.01, 1e-3, "layer")),
}
AT_STEPS = "ZClip by layer"
"""The one that `clip=` is tried with."""


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(model: torch.nn.Module, *, of_gradients: bool) -> dict[str, references.Array]:
    """Return parameters or gradients as a whole, by name, in float64."""
    named = ((name.removeprefix("module."), p.grad if of_gradients else p) for name, p in model.named_parameters())
    return references.arrays({name: gathered(tensor).clone() for name, tensor in named if tensor is not None})


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - PyTorch's
        self.number += function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function)
        return function(*args, **(kwargs or {}))


class Experts(torch.nn.Module):
    """Three linear layers in one weight, of which two ranks have two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 5, 2
        self.weight = torch.nn.Parameter(torch.randn(3, 2, 5))


def prepared() -> None:
    """Collect wrappers in this thread, since a thread of gloo that frees one can wait for itself."""
    gc.disable()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # with tensor parallelism, of what is not done here


def follows(rank: int, regime: str) -> None:
    """Train on a rank by each policy, with a `Clipper` and with `clip=`, and compare each step with the reference."""
    prepared()
    for name, (policy, make) in POLICIES.items():
        if policy.scope == "unit" and "tp" in regime.split():
            continue  # refused
        for at_steps in (False, True) if name == AT_STEPS else (False,):
            _follow(rank, regime, name, policy, make(), at_steps=at_steps)
        if policy.scope == "unit" and regime == "fsdp":  # with one row, of which the second rank has nothing
            _follow(rank, regime, name, policy, make(), at_steps=False, outputs=1)
        gc.collect()


def _follow(
    rank: int,
    regime: str,
    name: str,
    policy: Any,  # noqa: ANN401 - no common base
    reference: Any,  # noqa: ANN401
    *,
    at_steps: bool,
    outputs: int = 3,
) -> None:
    build, ranks, expected_collectives = REGIMES[regime]
    torch.manual_seed(0)
    model = build(Perceptron(outputs=outputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter = start_exporter(model, port=None, every=1, collectors=OFF, clip=policy) if at_steps else None
    clipper = None if at_steps else Clipper(model, policy)
    same_data = regime in ("tp", "fsdp and tp")
    for step in range(4):
        model.zero_grad()
        source = rank // 2 if same_data and ranks == 4 else 0 if same_data else rank
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + source))
        (model(inputs).square().mean() * (1 + step)).backward()
        before, weights = whole(model, of_gradients=True), whole(model, of_gradients=False)
        expected, thresholds = reference.step(before, weights)
        with Collectives() as collectives:
            norm = optimizer.step() if clipper is None else clipper()
        assert collectives.number == expected_collectives, name
        after = whole(model, of_gradients=True)
        assert after.keys() == expected.keys()
        for parameter, gradient in after.items():
            np.testing.assert_allclose(gradient, expected[parameter], rtol=1e-5, atol=1e-9, err_msg=f"{name}, {parameter}")
        assert any(not np.allclose(after[key], before[key], rtol=1e-4) for key in after) or policy.scope != "unit"
        if clipper is not None:
            assert float(norm) == pytest.approx(references.whole(before), rel=1e-5), name
            if policy.scope != "unit":
                np.testing.assert_allclose(clipper.threshold.double().numpy().reshape(-1), thresholds, rtol=1e-5, err_msg=name)
        elif regime == "ddp" and rank == 0:
            assert value(exporter, "torch_grad_global_norm_after_clip") == pytest.approx(references.whole(after), rel=1e-5)
    if exporter is not None:
        assert errors(exporter) == {}, name
        exporter.close()


@pytest.mark.parametrize(
    "regime", [pytest.param(name, marks=pytest.mark.full) if ranks == 4 else name for name, (_, ranks, _) in REGIMES.items()]
)
def test_norms_are_those_of_the_whole_gradients(regime: str) -> None:
    """Gradients of each policy are the reference's on the gathered gradients, with one collective per mesh dimension."""
    of_ranks(follows, regime, ranks=REGIMES[regime][1])


def special_cases(rank: int) -> None:
    """Try what is refused, summands, a later wrapper, and a state that goes on."""
    prepared()
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"belongs to FullyShardedDataParallel.*use its own clip_grad_norm_"):
        Clipper(FullyShardedDataParallel(Perceptron(), use_orig_params=True, device_id=torch.device("cpu")), MaxNorm(1.0))
    transposed = torch.nn.ConvTranspose2d(1, 6, 3)  # of whose weight the second rank has nothing
    fully_shard(transposed)
    for model, name in ((transposed, "weight"), (tensor_parallel(Perceptron(), mesh), "second.weight")):
        with pytest.raises(ValueError, match=f'scope="unit": ranks have parts of the units of {name}; use scope="layer"'):
            Clipper(model, AGC())
    split = fsdp(Perceptron())
    for candidate in (MaxValue(1.0), AGC()):
        with pytest.raises(ValueError, match=r"dry_run=.*split over ranks, of which each would count its own part"):
            Clipper(split, MaxNorm(1.0), dry_run=[candidate])

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
    with Collectives() as collectives:
        trying()
    assert collectives.number == 3  # of the model, rounded as clip_grad_norm_ does or not, and by layer
    assert [int(candidate.clipped_steps) for candidate in trying.candidates] == [1, 1, 0, 0]

    # A skipped step is skipped on both ranks, though their own parts have different norms.
    skipping = Clipper(model, SkipAbove(references.whole(before) * 0.9))
    model.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    model.second.bias.grad.to_local().mul_(1e4 if rank == 0 else 1)
    skipping()
    assert all(parameter.grad is None for parameter in model.parameters())


def units_of_each_kind(_rank: int) -> None:
    """Clip the units of convolutions, embeddings and experts under FSDP2 by two policies."""
    prepared()
    torch.manual_seed(0)
    zoo = references.Zoo()
    del zoo.transposed, zoo.gpt  # whose units lie on both ranks
    zoo.experts = Experts()
    fully_shard(zoo)
    for policy, reference in ((AGC(0.1), references.AGC(0.1, 1e-3)), (MaxNorm(0.1, scope="unit"), references.MaxNormOfUnits(0.1))):
        for parameter in zoo.parameters():
            parameter.grad = distribute_tensor(torch.randn(parameter.shape), parameter.device_mesh, parameter.placements)
        before = whole(zoo, of_gradients=True)
        expected, _ = reference.step(before, whole(zoo, of_gradients=False))
        assert float(Clipper(zoo, policy)()) == pytest.approx(references.whole(before), rel=1e-5)
        for name, gradient in whole(zoo, of_gradients=True).items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, err_msg=f"{policy}, {name}")
            assert not np.allclose(gradient, before[name], rtol=1e-4), name


def test_units_of_each_kind_under_fsdp() -> None:
    """Units that lie on one rank, and biases that lie on two, are clipped as the reference clips the whole gradients."""
    of_ranks(units_of_each_kind)


def test_special_cases_of_two_ranks() -> None:
    """Impossible cases are refused, summands are added, `fully_shard` may come later, and ranks skip the same steps."""
    of_ranks(special_cases)
