"""Four ranks: what each of them shows, and that all together show what one process would.

Four processes train a model in each layout of ranks and write down their scrapes; the tests add up what they exported, by
the rules that are shipped, and compare it with the gradients that one process computes in float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, Key, errors, key, values
from tests.support.torch_versions import VERSION, fully_shard, need
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.process

WORLD = 4
STEPS = 3
LAYERS = ("norm", "first", "second")


class Normed(torch.nn.Module):
    """Between two layers of a perceptron, one that is never cut by tensor parallelism."""

    def __init__(self, inputs: int = 6, hidden: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(inputs)
        self.first = torch.nn.Linear(inputs, hidden)
        self.second = torch.nn.Linear(hidden, outputs)
        with torch.no_grad():
            self.first.bias[0] = -1e4  # a unit whose output is 0 whatever comes
            self.second.weight[:, -1] = 0.0  # and one whose gradient is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.norm(x)).relu())


def made(**sizes: int) -> Normed:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Normed(**sizes)


def data(step: int, part: int) -> torch.Tensor:
    """Return the batch of a step for one of the data-parallel parts."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + part))


def mesh(*sizes: int, names: tuple[str, ...]) -> Any:  # noqa: ANN401 - a DeviceMesh
    """Return the ranks in a grid."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


# Layouts: each gives the model and which part of the data this rank trains on.


def ddp(rank: int) -> tuple[torch.nn.Module, int]:
    """Four copies."""
    return DistributedDataParallel(made()), rank


def fsdp_uneven(rank: int) -> tuple[torch.nn.Module, int]:
    """Five rows over four ranks are 2, 2, 1 and 0, three are 1, 1, 1 and 0."""
    model = made(hidden=5)
    for layer in (model.first, model.second, model):
        fully_shard(layer)
    return model, rank


def hsdp(rank: int) -> tuple[torch.nn.Module, int]:
    """Sharded over two ranks, and that replicated over two."""
    model = made()
    fully_shard(model, mesh=mesh(2, 2, names=("replicate", "shard")))
    return model, rank


def tensor_parallel(rank: int) -> tuple[torch.nn.Module, int]:
    """Columns and rows over all four; the normalisation is whole on each."""
    model = made(outputs=4)
    table = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh(WORLD, names=("tp",)), table)
    return model, 0


def tensor_and_data(rank: int) -> tuple[torch.nn.Module, int]:
    """FSDP over one dimension of a mesh, tensor parallelism over the other, of which the normalisation knows nothing."""
    model, both = made(outputs=4), mesh(2, 2, names=("dp", "tp"))
    parallelize_module(model, both["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=both["dp"])
    return model, rank // 2


def flattened(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    """The older FSDP around each layer, and around the model."""
    policy = ModuleWrapPolicy({torch.nn.Linear, torch.nn.LayerNorm})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def fsdp1_flat(rank: int) -> tuple[torch.nn.Module, int]:
    """Flat parameters of 12, 56 and 27 elements over four ranks: the last one has no element of its own in the last place."""
    return flattened(made()), rank


def fsdp1_original(rank: int) -> tuple[torch.nn.Module, int]:
    """The original parameters as pieces of flat ones; a rank may have nothing of a layer's weight or bias."""
    return flattened(made(hidden=5), use_orig_params=True), rank


def hsdp1(rank: int) -> tuple[torch.nn.Module, int]:
    """Sharded over two ranks, and that replicated over two."""
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh(2, 2, names=("replicate", "shard"))}
    return flattened(made(), use_orig_params=True, **hybrid), rank


def fsdp1_whole(rank: int) -> tuple[torch.nn.Module, int]:
    """Four copies, reduced by FSDP."""
    return flattened(made(), use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD), rank


LAYOUTS: dict[str, Callable[[int], tuple[torch.nn.Module, int]]] = {
    one.__name__: one
    for one in (
        ddp, fsdp_uneven, hsdp, tensor_parallel, tensor_and_data, fsdp1_flat, fsdp1_original, hsdp1, fsdp1_whole,
    )
}  # fmt: skip
FLAT = ("fsdp1_flat", "fsdp1_original", "hsdp1")
"""The layouts in which a rank has a piece of all elements one behind the other, which shows no units."""
COPIES = ("ddp", "fsdp1_whole")
FSDP = ("fsdp_uneven", "hsdp", "tensor_and_data", *FLAT, "fsdp1_whole")
HERE = [name for name in LAYOUTS if VERSION >= (2, 7) or name not in FSDP]
"""The layouts that this version of PyTorch has on a CPU."""
SIZES: dict[str, dict[str, int]] = {
    "fsdp_uneven": {"hidden": 5}, "fsdp1_original": {"hidden": 5},
    "tensor_parallel": {"outputs": 4}, "tensor_and_data": {"outputs": 4},
}  # fmt: skip
PARTS = {"tensor_parallel": 1, "tensor_and_data": 2}
"""How many parts of the data there are, else one for each rank."""


def train(model: torch.nn.Module, part: int, scrape: Callable[[], None]) -> None:
    """Train some steps; the loss of the second is infinite, and it is skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(data(step, part)).square().mean()
        (loss * (math.inf if step == 1 else 1.0)).backward()
        if step != 1:
            optimizer.step()
        scrape()


def scraped(rank: int) -> dict[str, list[dict[Key, float]]]:
    """Return the scrapes of one of the ranks, by layout."""
    found: dict[str, list[dict[Key, float]]] = {}
    for name in HERE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, part = LAYOUTS[name](rank)
        with start_exporter(model, None, run="ranks", every=1, weights=True, collectors=OFF) as exporter:
            scrapes: list[dict[Key, float]] = [values(exporter)]
            train(model, part, lambda exporter=exporter, scrapes=scrapes: scrapes.append(values(exporter)))
            assert errors(exporter) == {}
        found[name] = scrapes
    return found


Found = list[dict[str, list[dict[Key, float]]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return by rank and layout the scrapes before the first step and after each."""
    return of_ranks(scraped, ranks=WORLD)


@pytest.fixture(autouse=True)
def _layout(request: pytest.FixtureRequest) -> None:
    if "layout" in request.fixturenames and request.getfixturevalue("layout") not in HERE:
        need(2, 7, "FSDP on a CPU")


def reference(layout: str, step: int) -> dict[str, list[torch.Tensor]]:
    """Return the gradients by layer, averaged over the parts of the data, of one process in float64."""
    model, parts = made(**SIZES.get(layout, {})).double(), PARTS.get(layout, WORLD)
    for part in range(parts):
        (model(data(step, part).double()).square().mean() / parts).backward()
    return {layer: [p.grad for p in model.get_submodule(layer).parameters() if p.grad is not None] for layer in LAYERS}


def summed(found: Found, layout: str, moment: int, name: str, **labels: str) -> float:
    """Return `sum without (rank)` of one series."""
    return sum(ranks[layout][moment].get(key(name, **labels), 0.0) for ranks in found)


def showing(found: Found, layout: str, name: str, **labels: str) -> list[int]:
    """Return the ranks that show a series after the last step."""
    return [rank for rank, ranks in enumerate(found) if key(name, **labels) in ranks[layout][-1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_squares_of_all_ranks_add_up_to_one_process(found: Found, layout: str) -> None:
    """However a layer is cut or copied, the sum over ranks is the square of the norm of the whole, and so are the totals."""
    references = [reference(layout, step) for step in (0, 2)]
    for layer in LAYERS:
        squares = [sum(float(gradient.square().sum()) for gradient in one[layer]) for one in references]
        for step, expected in zip((0, 2), squares, strict=True):
            assert expected > 0
            assert summed(found, layout, step + 1, "torch_grad_norm_squared", layer=layer) == pytest.approx(expected, rel=2e-5)
        total = summed(found, layout, -1, "torch_grad_norm_squared_accumulated_total", layer=layer)
        assert total == pytest.approx(sum(squares), rel=2e-5)
        captures = max(ranks[layout][-1].get(key("torch_grad_captures_total", layer=layer), 0.0) for ranks in found)
        assert captures == STEPS  # the one that was not finite is a sample, too
        kinds = ("nan", "inf")
        bad = sum(summed(found, layout, -1, "torch_grad_nonfinite_elements_total", layer=layer, kind=kind) for kind in kinds)
        assert 0 < bad <= sum(gradient.numel() for gradient in references[0][layer])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distributions_of_weights_add_up(found: Found, layout: str) -> None:
    """However a layer is cut or copied, over all ranks each element is in its bucket once for each of the two steps."""
    model, name = made(**SIZES.get(layout, {})), "torch_weight_distribution"
    for layer in LAYERS:
        parameters = model.get_submodule(layer).parameters()
        magnitudes = np.abs(np.concatenate([p.detach().double().numpy().reshape(-1) for p in parameters]))
        for bound in (1e-5, 0.1, 0.316, 1.0, 10.0):
            expected = 2 * np.count_nonzero(magnitudes <= bound)
            assert summed(found, layout, -1, f"{name}_bucket", layer=layer, le=repr(bound)) == expected
        assert summed(found, layout, -1, f"{name}_count", layer=layer) == 2 * magnitudes.size
        assert summed(found, layout, -1, f"{name}_sum", layer=layer) == pytest.approx(2 * magnitudes.sum(), rel=1e-6)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("tensor_parallel", "tensor_and_data", *FLAT)])
def test_silent_units_add_up(found: Found, layout: str) -> None:
    """The shares of silent units, weighted with the units, are those of the whole gradient."""
    units = [ranks[layout][1].get(key("torch_grad_units", layer="first"), 0.0) for ranks in found]
    shares = [ranks[layout][1].get(key("torch_grad_zero_units_ratio", layer="first"), 0.0) for ranks in found]
    weight = reference(layout, 0)["first"][0]
    silent = int((weight == 0).all(1).sum())
    assert silent > 0
    assert sum(u * s for u, s in zip(units, shares, strict=True)) / sum(units) == pytest.approx(silent / len(weight))


def test_units_split_across_ranks_are_not_reported(found: Found) -> None:
    """A weight that is cut through its units has no share of silent units; one that is cut between them has."""
    for layout in {"tensor_parallel", "tensor_and_data"}.intersection(HERE):
        assert showing(found, layout, "torch_grad_zero_units_ratio", layer="second") == []
        assert showing(found, layout, "torch_grad_zero_units_ratio", layer="first") == [0, 1, 2, 3]


def test_a_norm_stands_only_where_it_is_whole(found: Found) -> None:
    """A layer that is cut has the norm of the part on each rank; a copied one has its norm on the first rank alone."""
    for layout in HERE:
        for layer in LAYERS:
            whole = layout in COPIES or (layout, layer) == ("tensor_parallel", "norm")
            norm = showing(found, layout, "torch_grad_norm", layer=layer)
            part = showing(found, layout, "torch_grad_shard_norm", layer=layer)
            if whole:
                assert (norm, part) == ([0], [])
            else:
                # Of a few elements the last rank may have none.
                assert (norm, set(part) | {3}) == ([], {0, 1, 2, 3}), (layout, layer)


def test_of_copies_only_the_first_shows_layers(found: Found) -> None:
    """Under DDP the other ranks show steps and the global norm, and never a layer, from the start on."""
    for rank, ranks in enumerate(found):
        for scrape in ranks["ddp"]:
            assert bool({name for name, labels in scrape if dict(labels).get("layer")}) == (rank == 0)
        last = ranks["ddp"][-1]
        assert last[key("torch_train_steps_total", optimizer="SGD")] == STEPS - 1
        assert last[key("torch_grad_global_norm")] == pytest.approx(found[0]["ddp"][-1][key("torch_grad_global_norm")], rel=1e-6)
