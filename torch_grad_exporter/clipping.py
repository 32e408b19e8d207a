"""What happened to the gradients between the end of backward and the optimizer: clipping and unscaling.

The norms of some parameters, the probes, are measured again where the optimizer sees them. If every probe
changed by the same factor, that factor is the clip coefficient of the whole; if they disagree, as after
clipping by value or per group, only a second measurement of all parameters tells.

Without a known loss scale, a common factor that is an exact power of two and at most 2**-5 is taken for the
unscaling of a gradient scaler, whose scales are powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.families import BoolArray, FloatArray
from torch_grad_exporter.statistics.host import combined_norm

AGREE = 1e-3
"""Largest relative difference of probes that still agree: rounding to bfloat16 moves a norm less."""

UNTOUCHED = 1e-6
"""A coefficient this close to 1 is no clipping: both norms were rounded alike, so an untouched one is 1."""

LARGEST_UNSCALING = 2.0**-5
SMALLEST_UNSCALING = 2.0**-127
"""Scales are float32 numbers."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """Judgement for one optimizer. `coefficient` is `None` if the probes disagree or there were none.

    `scale`: the loss scale that the comparison revealed, else `None`.
    """

    coefficient: float | None
    scale: float | None = None
    disagree: bool = False

    @property
    def clipped(self) -> bool:
        """Whether the optimizer saw smaller gradients than the backward gave."""
        return self.disagree or (self.coefficient is not None and self.coefficient < 1 - UNTOUCHED)


def compare(
    before: FloatArray, after: FloatArray, measured: BoolArray, *, full: bool, scale: float | None, unscaled: bool = False
) -> Clipping:
    """Compares norms per parameter, shape (parameters,), where `measured`.

    `full`: all of the optimizer's parameters were measured again. `scale`: the loss scale that `before` still
    contains if it was found in an earlier sample, else `None`. `unscaled`: the scale is known and no longer in them.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (after / before)[measured & (before > 0) & np.isfinite(before) & np.isfinite(after)]
    ratios = ratios[np.isfinite(ratios)]
    if not ratios.size:
        return Clipping(None)
    agree = float(ratios.max() - ratios.min()) <= AGREE * float(ratios.max())
    if agree and not unscaled and is_unscaling(float(np.median(ratios))):
        return Clipping(1.0, scale=1 / float(np.median(ratios)))
    factor = scale or 1.0
    if full:
        whole = float(combined_norm(before[measured][None, :])[0])
        seen = float(combined_norm(after[measured][None, :])[0])
        return Clipping(seen / whole * factor if whole > 0 else None, scale, disagree=not agree)
    return Clipping(float(np.median(ratios)) * factor, scale) if agree else Clipping(None, scale, disagree=True)


def is_unscaling(ratio: float) -> bool:
    """Whether a ratio of norms is a power of two that a gradient scaler would leave."""
    if not SMALLEST_UNSCALING <= ratio <= LARGEST_UNSCALING * (1 + 1e-6):
        return False
    exponent = math.log2(ratio)
    return abs(exponent - round(exponent)) < 1e-6
