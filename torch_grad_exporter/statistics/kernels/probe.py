"""Gradients that take each way through the programs, to try them on before any gradient of the training."""

from __future__ import annotations

import math

import numpy as np
import torch

from torch_grad_exporter.model.units import UnitLayout
from torch_grad_exporter.statistics.batches import Batch, Group
from torch_grad_exporter.statistics.device import to_device
from torch_grad_exporter.statistics.kernels.tables import BLOCK, KINDS

_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], ...] = (
    # Shape, the view of its units, their dimensions.
    ((1,), (), None),
    ((BLOCK - 1,), (), None),
    ((2 * BLOCK + 5,), (), None),
    ((6, BLOCK + 3), (6, -1), (0,)),
    ((600, 16), (600, -1), (0,)),
    ((500, 9), (500, -1), (0,)),
    ((40, 130), (1, 40, 130, -1), (0, 2)),
    ((8, 5, 3, 3), (1, 8, 5, 3, 3, -1), (0, 2)),
)


def probe(device: torch.device) -> tuple[Group, tuple[Batch, ...]]:
    """Return a group without parameters: of each type, shapes of several kinds of units, and values that are hard to read."""
    made = [
        (tensor, None if dims is None else UnitLayout(view, dims))
        for number, kind in enumerate(KINDS)
        for place, (shape, view, dims) in enumerate(_SHAPES)
        for tensor in _of(shape, kind, 100 * number + place, device)
    ]
    parts = tuple(Batch((place,), (tensor,), layout) for place, (tensor, layout) in enumerate(made))
    sizes = np.array([(one.elements, 0 if one.layout is None else one.rows) for one in parts], dtype=np.int64)
    positions = np.arange(len(parts), dtype=np.int64)
    return Group(device, (), positions, sizes[:, 0], sizes[:, 1], np.zeros_like(positions), readable=False), parts


def _of(shape: tuple[int, ...], kind: torch.dtype, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Two gradients of this shape: one whose address no wide load is allowed at, and one with NaNs and Infs."""
    count = math.prod(shape)
    values = np.random.default_rng(seed).standard_normal(count + 1)
    values *= 10.0 ** np.linspace(-8, 3, count + 1)
    values[:: max(2, count // 7)] = 0
    values[count // 3 : count // 2] = 0  # whole units, where there are any
    values[-1] = torch.finfo(kind).smallest_normal / 4
    odd = to_device(torch.from_numpy(values).to(kind), device)[1:].view(shape)
    hard = np.array((math.nan, -math.inf, torch.finfo(kind).max))
    values[: min(3, count)] = hard[: min(3, count)]
    return odd, to_device(torch.from_numpy(values).to(kind), device)[:-1].view(shape)
