"""Which copy of a part of a gradient counts, on meshes of eight ranks that one process plays in turn."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.models import Conv1D
from tests.support.torch_versions import DTensor, Partial, Placement, Replicate, Shard, need
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.model.replicas import Ranks, Replicas
from torch_grad_exporter.model.sharding import is_behind, is_copy, is_partial, is_sharded, split_dims
from torch_grad_exporter.model.units import unit_layout

WORLD = 8


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Play one of eight processes; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Before torch 2.9 slices are remembered here, in which another rank would find those of this one.
        remembered = getattr(torch.distributed.device_mesh, "_mesh_resources", None)
        for name in ("child_to_root_mapping", "root_to_flatten_mapping"):
            getattr(remembered, name, {}).clear()


def sliced(names: tuple[str, ...], chosen: tuple[str, ...]) -> DeviceMesh:
    """Return some dimensions of a mesh of two by two by two; a pair in one name is flattened."""
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    if chosen == names:
        return whole
    if "+" in chosen[0]:
        need(2, 5, "DeviceMesh._flatten")
        return whole[tuple(chosen[0].split("+"))]._flatten(chosen[0])  # private: torch has no other way
    return whole[chosen]


def tensor(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Return the part of a rank."""
    return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)


LAYOUTS = [
    (names, chosen)
    for names in (("pp", "dp", "tp"), ("stages", "dp_replicate", "dp_shard"))
    for chosen in (names, names[1:], names[2:], names[1:2], ("+".join(names[1:]),))
]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "chosen"), LAYOUTS, ids=str)
def test_of_all_copies_one_counts(names: tuple[str, ...], chosen: tuple[str, ...]) -> None:
    """For every way to cut and copy, each part counts on one rank, or on one in each stage of a pipeline."""
    dimensions = 1 if "+" in chosen[0] else len(chosen)
    counted: dict[tuple[Placement, ...], Counter[object]] = {}
    for rank in range(WORLD):
        with as_rank(rank):
            mesh = sliced(names, chosen)
            coordinates = mesh.get_coordinate()
            assert coordinates is not None
            stage = rank // 4 if names[0] in ("pp", "stages") else 0
            for placements in itertools.product((Replicate(), Shard(0)), repeat=dimensions):
                part = tuple(c for c, p in zip(coordinates, placements, strict=True) if p.is_shard())
                if names[0] in ("pp", "stages") and names[0] in chosen and placements[0].is_replicate():
                    continue  # nothing is copied over stages
                seen = counted.setdefault(placements, Counter())
                key = (part, stage) if names[0] not in chosen else part
                seen[key] += not is_copy(tensor(mesh, placements))
    assert counted
    for placements, seen in counted.items():
        assert set(seen.values()) == {1}, placements


def test_what_placements_say() -> None:
    """Placements say what is a part, a summand and a cut dimension; a plain tensor is none of these."""
    with as_rank(5):
        mesh = sliced(("a", "b", "c"), ("b", "c"))
        parts, summand = tensor(mesh, (Shard(1), Replicate())), tensor(mesh, (Partial(), Replicate()))
        assert (is_sharded(parts), is_partial(parts), split_dims(parts)) == (True, False, {1})
        assert (is_sharded(summand), is_partial(summand), split_dims(summand)) == (True, True, set())
        assert is_behind([torch.ones(1), parts])
        plain = torch.ones(1)
        assert not any((is_sharded(plain), is_partial(plain), is_copy(plain), split_dims(plain), is_behind([plain])))
    with as_rank(4):
        assert not is_behind([tensor(sliced(("a", "b", "c"), ("b", "c")), (Shard(1), Replicate()))])
    assert not is_copy(None)


@pytest.mark.parametrize("chosen", [{"include": ("adapter",)}, {"exclude": ("base",)}, {}])
def test_what_is_not_tracked_says_where_this_rank_is(chosen: dict[str, tuple[str, ...]]) -> None:
    """Beside frozen parallel layers, a trained layer counts on the first rank only; in another model it counts everywhere."""
    for rank in (0, 3):
        with as_rank(rank):
            mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
            model = torch.nn.ModuleDict({"base": torch.nn.Linear(8, 8), "adapter": torch.nn.Linear(2, 2)})
            # torch remembers what it made of a shape, with the mesh of another test: this one has its own.
            weight = DTensor.from_local(torch.ones(1, 100 + 10 * rank + len(chosen)), mesh, (Shard(0),), run_check=False)
            model["base"].weight = torch.nn.Parameter(weight, requires_grad=False)
            patterns = {name: tuple(map(re.compile, some)) for name, some in chosen.items()}
            models = {"parallel": model, "other": torch.nn.Linear(2, 2)}
            table = LayerIndex(models, LayerFilter(**patterns), replicas=Replicas(Ranks.ALL)).table
            counts = {table.layers[layer]: bool(counted) for layer, counted in zip(table.layer_of, table.counts, strict=True)}
            assert counts["parallel.adapter"] is (rank == 0)
            assert counts.get("other.weight", True)


def wide_conv1d() -> Conv1D:
    """Return a part of GPT-2's kind of layer with four of 32 outputs."""
    layer = Conv1D(4, 4)
    layer.nf = 4 * WORLD
    return layer


@pytest.mark.parametrize(
    ("module", "dim", "there"),
    [
        (torch.nn.Linear(4, 4), 0, True),
        (torch.nn.Linear(4, 4), 1, False),
        (torch.nn.Conv2d(4, 4, 3), 0, True),
        (torch.nn.Conv2d(4, 4, 3), 1, False),
        (torch.nn.ConvTranspose2d(4, 4, 3), 1, True),
        (torch.nn.ConvTranspose2d(4, 4, 3), 0, False),
        (wide_conv1d(), 1, True),
        (Conv1D(4, 4), 0, False),
    ],
)
def test_units_that_are_cut_are_none(module: torch.nn.Module, dim: int, there: bool) -> None:
    """A weight cut between its output units has units here; one cut through them has none."""
    with as_rank(0):
        mesh = init_device_mesh("cpu", (WORLD,))
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        cut = DTensor.from_local(weight.detach(), mesh, (Shard(dim),), run_check=False)
        layout = unit_layout(module, cut)
        assert (layout is not None) == there
        assert layout is None or layout.count == 4
