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

from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.statistics.combine import length

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

    `clipped`: whether the optimizer saw smaller gradients than the backward gave.
    """

    coefficient: float | None
    clipped: bool = False
    disagree: bool = False


def compare(before: FloatArray, after: FloatArray, measured: BoolArray, *, full: bool) -> Clipping:
    """Compares the unscaled norms of an optimizer's parameters, all of shape (parameters,), with those that were `measured` again.

    `full`: that was all of them. Where the norm of the whole is not finite there is nothing to compare.
    """
    whole, seen = length(before), length(after[measured])
    if not measured.any() or not 0 < whole < math.inf:
        return Clipping(None)
    if not math.isfinite(seen):  # then that of the whole is not, either
        return Clipping(seen / whole)
    ratios = _ratios(before, after, measured)
    if not ratios.size:
        return Clipping(None)
    agree = _agree(ratios)
    if full:
        coefficient = seen / whole
    elif agree:
        coefficient = float(np.median(ratios))
    else:
        coefficient = None  # the factor of the whole is unknown
    # Clipping makes no gradient longer, and may make only some of them shorter.
    cut = not agree and bool(ratios.max() <= 1 + UNTOUCHED)
    return Clipping(coefficient, clipped=cut or (coefficient or 1.0) < 1 - UNTOUCHED, disagree=not agree)


def revealed_scale(before: FloatArray, after: FloatArray, measured: BoolArray) -> float | None:
    """The loss scale that one optimizer's norms reveal: 1 if they are untouched, `None` if their factor is none of a scaler's."""
    ratios = _ratios(before, after, measured)
    if not ratios.size or not _agree(ratios):
        return None
    ratio = float(np.median(ratios))
    if abs(ratio - 1) <= UNTOUCHED:
        return 1.0
    return 1 / ratio if is_unscaling(ratio) else None


def is_unscaling(ratio: float) -> bool:
    """Whether a ratio of norms is a power of two that a gradient scaler would leave."""
    if not SMALLEST_UNSCALING <= ratio <= LARGEST_UNSCALING * (1 + 1e-6):
        return False
    exponent = math.log2(ratio)
    return abs(exponent - round(exponent)) < 1e-6


def _ratios(before: FloatArray, after: FloatArray, measured: BoolArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = (after / before)[measured & (before > 0) & np.isfinite(before)]
    return ratios[np.isfinite(ratios)]


def _agree(ratios: FloatArray) -> bool:
    return float(ratios.max() - ratios.min()) <= AGREE * float(ratios.max())
