"""Bounds of histograms, as Python floats: numpy's float32 would print as `le="9.999999747378752e-05"`."""

from __future__ import annotations

DECADES: tuple[float, ...] = tuple(float(f"1e{k}") for k in range(-8, 5))
HALF_DECADES: tuple[float, ...] = tuple(bound for k in range(-8, 5) for bound in (float(f"1e{k}"), float(f"3.16e{k}")))[:-1]
STEP_SECONDS: tuple[float, ...] = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
WEIGHT_MAGNITUDES: tuple[float, ...] = tuple(bound for k in range(-5, 2) for bound in (float(f"1e{k}"), float(f"3.16e{k}")))[:-1]
"""Half-decades from 1e-5 to 10: weights of any use lie between, and half a decade shows them move."""
