"""What a DTensor shows about this rank's part of a tensor, without communication.

Everything here reads attributes only: placements, and the coordinates of this rank on the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_grad_exporter.torch_compat.replicas import root_mesh
from torch_grad_exporter.torch_compat.tensors import is_plain

PIPELINE = ("pp", "pipe", "stage")
"""How names of mesh dimensions begin along which ranks have different layers, and not copies of the same ones."""


def is_partial(tensor: torch.Tensor) -> bool:
    """Return whether this rank has only a summand of the tensor, such as of a gradient under sequence parallelism."""
    return not is_plain(tensor) and any("Partial" in type(placement).__name__ for placement in _placements(tensor))


def is_sharded(tensor: torch.Tensor | None) -> bool:
    """Return whether this rank has only a part of a tensor: a DTensor that is sharded on some dimension of its mesh."""
    return not is_plain(tensor) and any(type(placement).__name__ != "Replicate" for placement in _dividing(tensor))


def split_dims(tensor: torch.Tensor) -> frozenset[int]:
    """Return the tensor's dimensions along which its parts lie on different ranks."""
    if is_plain(tensor):
        return frozenset()
    dims = (getattr(placement, "dim", None) for placement in _dividing(tensor))
    return frozenset(dim for dim in dims if dim is not None)


def is_copy(tensor: torch.Tensor | None) -> bool:
    """Return whether another rank has the same part of a DTensor, and counts it in sums over ranks: of all copies one counts.

    That is the one with coordinate 0 along each dimension of the mesh on which the tensor is replicated. A mesh may be
    a slice of a larger one, as under FSDP with tensor parallelism: then ranks along the other dimensions have copies,
    too, but for those of a pipeline.
    """
    mesh: Any = None if is_plain(tensor) else getattr(tensor, "device_mesh", None)
    coordinates = None if mesh is None else mesh.get_coordinate()
    if coordinates is None:
        return False
    replicated = (type(placement).__name__ == "Replicate" for placement in _placements(tensor))
    return any(c != 0 for c, r in zip(coordinates, replicated, strict=True) if r) or _is_behind_slice(mesh)


def is_behind(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether this rank is not the first of the mesh over which the parameters of a model are parallel.

    Then parameters of the model that are not DTensors are copies, too: parallel tensors have the same inputs on all ranks.
    """
    parallel = (tensor for tensor in tensors if not is_plain(tensor))
    meshes = {id(mesh): mesh for tensor in parallel if (mesh := getattr(tensor, "device_mesh", None)) is not None}
    return any(any(mesh.get_coordinate() or ()) for mesh in meshes.values())


def _is_behind_slice(mesh: Any) -> bool:  # noqa: ANN401 - a DeviceMesh, which is not in every build
    """Return whether this rank is not the first along some dimension of the mesh from which this one is a slice."""
    root = root_mesh(mesh)
    coordinates = None if root is None or root is mesh else root.get_coordinate()
    if root is None or coordinates is None:
        return False
    within = set(mesh.mesh.flatten().tolist())
    names = root.mesh_dim_names or ("",) * len(coordinates)
    for dim, name in enumerate(names):
        line = root.mesh[tuple(slice(None) if d == dim else c for d, c in enumerate(coordinates))].tolist()
        outside = len(within.intersection(line)) == 1 < len(line)
        if outside and coordinates[dim] != 0 and not name.startswith(PIPELINE):
            return True
    return False


def _dividing(tensor: torch.Tensor | None) -> list[object]:
    """Return the placements on those dimensions of the mesh along which there is more than one rank."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    return [placement for dim, placement in enumerate(_placements(tensor)) if mesh.size(dim) > 1]


def _placements(tensor: torch.Tensor | None) -> Sequence[object]:
    return getattr(tensor, "placements", ())
