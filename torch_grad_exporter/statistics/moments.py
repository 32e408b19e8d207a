"""The sum of a gradient's elements, from which, with the norm, come its mean and standard deviation.

All is computed in float64 then: a standard deviation is what little is left when the mean is taken from the norm.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import ColumnSpec, Elements, Statistic


def _reference(elements: Elements) -> tuple[float, ...]:
    infinite = [value for value in elements.flat if not math.isfinite(value)]
    try:
        return (sum(infinite) if infinite else math.fsum(elements.flat),)
    except OverflowError:
        return (math.copysign(math.inf, max(elements.flat, key=abs)),)


def _host(block: FloatArray) -> FloatArray:
    found: FloatArray = np.add.reduce(block, axis=1, dtype=np.float64, keepdims=True)
    return found


def _device(chunk: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return chunk.sum(dim=1, keepdim=True, dtype=wide)


STATISTIC = Statistic(
    "moments", (ColumnSpec("sum", Combine.SUM, power=1),), _reference, _host, _device, float64=True, opt_in="moments"
)
