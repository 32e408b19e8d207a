"""What a statistic is: its columns, its definition, and how it is measured.

Other packages add statistics of their own:

    with register(Statistic("signs", (ColumnSpec("positive", Combine.SUM),), reference, host, device)):
        exporter = start_exporter(model)

An exporter measures what is declared when it starts, in each of its samples. The values of each
layer are in `GradientSnapshot.declared["signs.positive"]`, where a collector finds them. The programs in
Triton measure the package's own: beside others, torch's operations measure all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import Combine

_Values = TypeVar("_Values", torch.Tensor, FloatArray)


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One number of each gradient.

    Attributes:
        name: Its name within the statistic.
        combine: How the value of the whole comes from the values of its parts.
        power: The power of the loss scale that the value contains: a gradient times c has the
            value times c ** power.
        whole_only: Whether it has no meaning for a layer of which this rank has only a part.
    """

    name: str
    combine: Combine
    power: int = 0
    whole_only: bool = False


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of one gradient as floats: all, and those of each output unit, if it has any."""

    flat: Sequence[float]
    units: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Statistic:
    """A statistic of gradients.

    Attributes:
        name: Unique among all statistics.
        columns: The numbers that it consists of.
        reference: The definition in plain loops: a value for each column.
        host: Measures on the CPU: from a block of several gradients of equal size, shape
            (gradients, elements), to shape (gradients, columns), float64. The block is read-only,
            contiguous, float32 or float64, not empty, and not to be kept. Blocks of one gradient
            are combined as the columns say. An exception costs the sample.
        device: The same with torch on other devices, from a chunk of any real floating type and
            the widest type that the device computes in. It must not branch on the data.
        float64: Whether blocks on the CPU have to be float64.
        opt_in: The option that enables it, if it is not always measured.
    """

    name: str
    columns: tuple[ColumnSpec, ...]
    reference: Callable[[Elements], tuple[float, ...]]
    host: Callable[[FloatArray], FloatArray]
    device: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    float64: bool = False
    opt_in: str = ""

    @property
    def homogeneous(self) -> bool:
        """Whether all of it is proportional to a power of the gradient."""
        return all(column.power for column in self.columns)

    def on_host(self, block: FloatArray) -> FloatArray:
        """Return the columns of a block; raises `ValueError` for a wrong shape."""
        block = block.view()
        block.flags.writeable = False  # it may be the gradient itself
        return self._checked(self.host(block))

    def on_device(self, chunk: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
        """Return the columns of a chunk, shape (tensors, elements), in the type to accumulate in."""
        return self._checked(self.device(chunk, accumulate)).to(accumulate)

    def _checked(self, values: _Values) -> _Values:
        if values.ndim != 2 or values.shape[1] != len(self.columns):
            wanted = f"(gradients, {len(self.columns)})"
            raise ValueError(f"statistic {self.name!r}: expected shape {wanted}, got {tuple(values.shape)}")
        return values


# The sum of the elements gives, with the norm, their mean and standard deviation.
MOMENTS = Statistic(
    "moments",
    (ColumnSpec("sum", Combine.SUM, power=1),),
    lambda elements: (sum(elements.flat),),
    host=lambda block: np.add.reduce(block, axis=1, dtype=np.float64, keepdims=True),
    device=lambda chunk, wide: chunk.sum(dim=1, keepdim=True, dtype=wide),
    # A standard deviation is the small rest of the norm when the mean is taken out.
    float64=True,
    opt_in="moments",
)

_declared: dict[str, Statistic] = {MOMENTS.name: MOMENTS}


def register(statistic: Statistic) -> contextlib.ExitStack:
    """Have exporters that start from now on measure a statistic.

    Returns:
        A handle; the registration ends when it is closed, or left as a context.

    Raises:
        ValueError: Its name is taken, or something of it is missing.
    """
    columns = [column.name for column in statistic.columns]
    problem = ""
    if not columns or len(set(columns)) < len(columns):
        problem = f"expected columns of different names, got {columns}"
    elif not all(map(callable, (statistic.host, statistic.device))):
        problem = "give it a measure for the host and one for devices"
    elif statistic.name in _declared:
        problem = "there is one of this name; choose another one, or close its registration"
    if problem:
        raise ValueError(f"statistic {statistic.name!r}: {problem}")
    _declared[statistic.name] = statistic
    registration = contextlib.ExitStack()
    registration.callback(_declared.pop, statistic.name)
    return registration


def chosen(options: Mapping[str, bool]) -> list[Statistic]:
    """Return the statistics that are always measured, and those whose option is on."""
    return [each for each in _declared.values() if not each.opt_in or options.get(each.opt_in, False)]
