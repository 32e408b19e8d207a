"""The combination of the ranks' reports on rank 0."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torch_grad_exporter.distributed.whole_run import COLUMNS, Combination, Report


def report(number: int, layers: dict[str, tuple[float, ...]], steps: int) -> bytes:
    """Return a report as published: by layer the sum of squares, samples, NaNs, Infs, units and the dead share."""
    return Report(1, number, steps, tuple(layers), np.array(list(layers.values())).T.reshape(len(COLUMNS), -1)).encoded()


def test_parts_are_added_up_between_two_reports() -> None:
    """9 and 16 as mean squares of two ranks' parts are a norm of 5, although the ranks were sampled differently often."""
    combination = Combination(2, 30.0)
    combination.hear({0: report(1, {"a": (100, 10, 0, 0, 4, 0.5)}, 10), 1: report(1, {"a": (7, 3, 1, 0, 2, 0.5)}, 10)})
    other = (0, 0, 0, 0, 0, math.nan)  # a layer without any sample
    combination.hear({0: report(2, {"a": (190, 20, 0, 2, 4, 0.5)}, 21), 1: report(2, {"a": (87, 8, 1, 5, 2, 1.0), "b": other}, 19)})
    combination.hear(
        {0: report(3, {"a": (280, 30, 0, 2, 4, 0.5)}, 30), 1: report(3, {"a": (167, 13, 1, 5, 2, 1.0), "b": other}, 29)}
    )
    view = combination.view
    assert view.rms is not None
    assert view.rms.tolist() == [5.0, pytest.approx(math.nan, nan_ok=True)]
    assert (view.global_rms, view.fewest_steps, view.most_steps) == (5.0, 29, 30)
    assert view.dead_ratio is not None
    assert view.dead_ratio[0] == pytest.approx((4 * 0.5 + 2 * 1.0) / 6)
