"""How the live page's JSON and saved runs write numbers and parts of the history; `docs/live.md` has the shape."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import numpy as np

from torch_grad_exporter.outputs.live.history import MOMENTS, Window
from torch_grad_exporter.outputs.live.track import Part

FORMAT = "torch_grad_exporter history"
VERSION = 1

# Quantities that are shown by their logarithm.
LOG = frozenset({"norm", "activation_rms"})

# The codes of a value that is not finite, and of 0 on a logarithmic scale. The code 0 is that of no value.
NONFINITE, ZERO = 65535, 1

# The lowest and the highest of no number: by logarithm less than 32 bits can hold, since all may be zeros.
NOTHING = {False: (0.0, 1.0), True: (-46.0, -45.0)}

Json = dict[str, object]


def number(value: float | None) -> float | str | None:
    """A number in JSON, which has none that are not finite."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def frame(part: Part, window: Window) -> Json:
    """Which records a part of the history has."""
    return {
        "view": "whole" if window.whole else "recent",
        "first": part.first,
        "stride": part.stride,
        "times": part.times.tolist(),
        "steps": part.steps.tolist(),
    }


def columns(part: Part, names: Sequence[str]) -> Json:
    """The values by name, and where they were not finite."""
    places = {name: np.flatnonzero(part.nonfinite[:, column]).tolist() for column, name in enumerate(names)}
    values = {name: _numbers(part.values[:, column]) for column, name in enumerate(names)}
    return {**values, "nonfinite": {name: found for name, found in places.items() if found}}


def _numbers(column: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[float | str | None]:
    """A column of the history: NaN means there that there is no value."""
    return [None if math.isnan(value) else number(float(f"{value:.6g}")) for value in column.tolist()]


def cells(part: Part, quantity: str) -> Json:
    """The values of a grid: codes of 16 bits, or 32 bits of a number where those of one layer are far below those of another."""
    if quantity in MOMENTS:
        return {"scale": "raw", "low": 0.0, "high": 0.0, "codes": base64.b64encode(part.values.astype("<f4").tobytes()).decode()}
    codes, low, high = _encoded(part.values, log=quantity in LOG)
    scale = "log" if quantity in LOG else "linear"
    return {"scale": scale, "low": low, "high": high, "codes": base64.b64encode(codes.astype("<u2").tobytes()).decode()}


def _encoded(values: np.ndarray[tuple[int, int], np.dtype[np.float32]], *, log: bool) -> tuple[np.ndarray, float, float]:
    """Values as codes, and the values, or their logarithms to base 10, of the lowest and the highest code of a number."""
    numbers = values.astype(np.float64)
    if log:
        with np.errstate(divide="ignore"):
            numbers = np.where(np.isinf(numbers), np.inf, np.log10(numbers))  # -inf is a norm of 0
    finite = np.isfinite(numbers)
    low, high = (float(numbers[finite].min()), float(numbers[finite].max())) if finite.any() else NOTHING[log]
    span = high - low if high > low else max(1.0, abs(low))
    if log:  # the first code is that of 0
        step = span / (NONFINITE - 3)
        low, span = low - step, span + step
    with np.errstate(invalid="ignore"):
        codes = np.where(finite, 1 + np.rint((numbers - low) / span * (NONFINITE - 2)), 0)
    codes[np.isneginf(numbers)] = ZERO if log else NONFINITE
    codes[np.isposinf(numbers)] = NONFINITE
    return codes.astype(np.uint16), low, low + span
