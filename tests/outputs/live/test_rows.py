"""Rows of steps: what comes on several ways goes into the row of its step, and none is taken before the others can have come."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torch_grad_exporter.outputs.live.rows import SCALARS, Row, StepRows, scalars

LOSS, NORM = SCALARS.index("loss"), SCALARS.index("norm")


def shown(rows: list[Row]) -> list[tuple[int, float, float, float]]:
    """Of each row step, time, loss and norm."""
    return [(row.step, row.at, float(row.values[LOSS]), float(row.values[NORM])) for row in rows]


def test_values_of_a_step_make_one_row_in_whatever_order_they_come() -> None:
    """A norm that comes a look later than the losses of this step and the next ones is in its row."""
    rows = StepRows()
    for step in (1, 2, 3):
        rows.add(step, 10.0 + step, scalars(loss=step))
    assert rows.take(every=False) == []
    rows.add(1, 14.0, scalars(norm=5.0))
    rows.add(4, 14.5, scalars(loss=4.0, norm=6.0))
    nothing = pytest.approx(math.nan, nan_ok=True)
    assert shown(rows.take(every=False)) == [(1, 11.0, 1.0, 5.0), (2, 12.0, 2.0, nothing), (3, 13.0, 3.0, nothing)]
    assert shown(rows.take(every=False)) == [(4, 14.5, 4.0, 6.0)]
    assert rows.take(every=True) == []


def test_of_several_values_of_a_step_the_mean_is_kept_and_of_norms_the_largest() -> None:
    """What is not finite is in none of them, and marked."""
    rows = StepRows()
    for loss, norm in ((1.0, 9.0), (math.inf, 3.0), (2.0, 4.0), (6.0, math.nan)):
        rows.add(7, 1.0, scalars(loss=loss, norm=norm))
    (row,) = rows.take(every=True)
    assert shown([row]) == [(7, 1.0, 3.0, 9.0)]
    assert np.flatnonzero(row.nonfinite).tolist() == [LOSS]


def test_neither_steps_nor_times_fall() -> None:
    """What comes for a step whose row was taken is in the row of the last one; a clock that is set back moves all times."""
    rows = StepRows()
    rows.add(5, 100.0, scalars(loss=1.0))
    rows.take(every=True)
    rows.shift(-50.0)
    rows.add(3, 20.0, scalars(loss=2.0))
    rows.add(6, 51.0, scalars(loss=3.0))
    nothing = pytest.approx(math.nan, nan_ok=True)
    assert shown(rows.take(every=True)) == [(5, 50.0, 2.0, nothing), (6, 51.0, 3.0, nothing)]


def test_a_row_of_nothing_is_none() -> None:
    """No value and no mark make no row, a mark alone does."""
    rows = StepRows()
    rows.add(1, 1.0, scalars())
    assert not rows
    rows.add(1, 1.0, scalars(), np.arange(len(SCALARS)) == NORM)
    assert [row.nonfinite[NORM] for row in rows.take(every=True)] == [True]
