"""UnitLayout: the output units of a parameter, of which some may be dead."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.sharding import split_dims
from torch_grad_exporter.torch_compat import TRANSPOSED, local


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How a weight's gradient splits into output units.

    `shape` is the view of the gradient with the unit dimensions `dims` marked; a linear layer's weight is
    `(rows, -1)` with dims `(0,)`, a transposed convolution's `(groups, inputs, outputs, -1)` with `(0, 2)`.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of output units."""
        return math.prod(self.shape[dim] for dim in self.dims)

    def rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as (units, elements of a unit); a view wherever the layout allows it."""
        viewed = gradient.reshape(self.shape)
        if self.dims != (0,):
            viewed = viewed.movedim(self.dims, tuple(range(len(self.dims))))
        return viewed.reshape(self.count, -1)


def unit_layout(module: torch.nn.Module, parameter: torch.Tensor) -> UnitLayout | None:
    """The output units of a parameter: rows of a weight, output channels of a convolution.

    `None` for what has no output units: biases and scales (fewer than two dimensions), embeddings (an
    absent token is not a dead neuron) and empty tensors; and where several ranks have a part of each unit, since a zero
    part does not show whether the unit is zero.
    """
    if not split_dims(parameter) <= {1 if isinstance(module, TRANSPOSED) else 0}:
        return None
    parameter = local(parameter)
    if parameter.dim() < 2 or parameter.numel() == 0:
        return None
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return None
    if isinstance(module, TRANSPOSED):
        inputs, outputs = parameter.shape[:2]
        groups = int(module.groups)  # type: ignore[arg-type]
        return UnitLayout((groups, inputs // groups, outputs, -1), (0, 2))
    return UnitLayout((parameter.shape[0], -1), (0,))
