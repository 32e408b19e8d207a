"""UnitLayout: the output units of a parameter, of which some may be dead.

Most weights are (outputs, inputs, ...). Those that are not are known by what their module says of itself, since the modules of
other packages are not imported: by its class' name, by the sizes that it carries, or by a flag.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.sharding import split_dims
from torch_grad_exporter.torch_compat.modules import TRANSPOSED
from torch_grad_exporter.torch_compat.tensors import local

SIZES = (
    ("in_features", "out_features"), ("_in_feats", "_out_feats"), ("in_dim", "out_dim"), ("input_dim", "output_dim"),
    ("input_size", "output_size"), ("nx", "nf"),
)  # fmt: skip
"""Under which names modules carry the numbers of their inputs and outputs; the second is DGL's, the last that of GPT-2's."""

TRANSPOSED_EXPERTS = frozenset(("GptOssExperts", "Llama4TextExperts"))
"""Classes of Transformers, some of them of version 4, whose weights are (experts, inputs, outputs) and that do not say so."""


SHAPES = 1 << 10
"""Shapes, and layouts, of which there is one object for all parameters that have it: thousands may have the same."""


@functools.lru_cache(SHAPES)
def one_of_equal(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape, the same object for equal ones."""
    return shape


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How a weight's gradient splits into output units.

    `shape` is the view of the gradient with the unit dimensions `dims` marked; a linear layer's weight is
    `(rows, -1)` with dims `(0,)`. Where the dims are others, the first two dimensions of `shape` are the first one of the gradient:
    a transposed convolution's is `(groups, inputs, outputs, -1)` with `(0, 2)`.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of output units."""
        return math.prod(self.shape[dim] for dim in self.dims)

    def rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient as (units, elements of a unit); a view wherever the layout allows it."""
        if self.dims == (0,):
            return gradient.reshape(self.shape[0], -1)
        viewed = gradient.reshape(self.shape).movedim(self.dims, tuple(range(len(self.dims))))
        return viewed.reshape(self.count, -1)


def unit_layout(module: torch.nn.Module, parameter: torch.Tensor) -> UnitLayout | None:
    """Return the output units of a parameter, such as rows of a weight, output channels, and outputs of each expert.

    `None` for what has no output units: biases and scales (fewer than two dimensions, or those of experts), embeddings (an
    absent token is not a dead neuron) and empty tensors; and where several ranks have a part of each unit, since a zero
    part does not show whether the unit is zero.
    """
    dims = unit_dims(module, parameter)
    if not dims or not split_dims(parameter) <= set(dims):
        return None
    shape = tuple(local(parameter).shape)
    if 0 in shape:
        return None
    if isinstance(module, TRANSPOSED):
        groups = int(module.groups)  # type: ignore[arg-type]
        return _layout((groups, shape[0] // groups, shape[1], -1), (0, 2))
    if dims == (1,):
        return _layout((1, *shape, -1), (0, 2))
    if dims == (0, 2):
        return _layout((shape[0], 1, *shape[1:], -1), (0, 3))
    return _layout((math.prod([shape[dim] for dim in dims]), -1), (0,))


_layout = functools.lru_cache(SHAPES)(UnitLayout)


def unit_dims(module: torch.nn.Module, parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions along which output units lie, not all in a transposed convolution; none without units."""
    shape = tuple(parameter.shape)
    if len(shape) < 2 or isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return ()
    if isinstance(module, TRANSPOSED):
        return (1,)
    names = {base.__name__ for base in type(module).__mro__}
    said = vars(module)  # and not `getattr`, which may run code of the module's
    experts = True if names & TRANSPOSED_EXPERTS else said.get("is_transposed")
    if isinstance(experts, bool) and len(shape) <= 3:  # as Transformers says it of modules with several experts
        return () if len(shape) == 2 else (0, 2) if experts else (0, 1)
    # GPT-2's kind of linear layer, in Transformers and in copies of it, has its inputs first even where it is square.
    if "Conv1D" in names and len(shape) == 2 and isinstance(nf := said.get("nf"), int) and nf == shape[1]:
        return (1,)
    return _by_sizes([(said[inputs], said.get(outputs)) for inputs, outputs in SIZES if inputs in said], shape)


def _by_sizes(sizes: Iterable[tuple[object, object]], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same by the numbers of inputs and outputs that the module names, where they tell one from the other."""
    for inputs, outputs in sizes:
        if isinstance(inputs, int) and isinstance(outputs, int) and len(shape) <= 3:
            if shape[-2:] == (inputs, outputs) and inputs != outputs:
                return (1,) if len(shape) == 2 else (0, 2)
            if len(shape) == 3 and shape[1:] == (outputs, inputs):
                return (0, 1)
    return (0,)
