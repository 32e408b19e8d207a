"""The combination of the ranks' reports on rank 0."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest

from torch_grad_exporter.distributed.whole_run import COLUMNS, Combination, Report

NAN = math.nan
FRESH = 30.0


def report(number: int, layers: dict[str, tuple[float, ...]], steps: int = 10, *, started: int = 1) -> bytes:
    """Return a report as published: by layer the sum of squares, samples, NaNs, Infs, units and the dead share."""
    return Report(started, number, steps, tuple(layers), np.array(list(layers.values())).T.reshape(len(COLUMNS), -1)).encoded()


@pytest.mark.parametrize("content", [b"", b"nonsense", report(1, {"a": (1.0,) * 6})[:-3], zlib.compress(b"\0\0\0\2{}")])
def test_a_broken_report_is_left_out(content: bytes) -> None:
    """Whatever stands under a key of ours, nothing is raised and nothing is shown."""
    combination = Combination(1, FRESH)
    combination.hear({0: content})
    assert combination.view.reporting == 0


def test_parts_are_added_up_between_two_reports() -> None:
    """9 and 16 as mean squares of two ranks' parts are a norm of 5, although the ranks were sampled differently often."""
    combination = Combination(2, FRESH)
    combination.hear({0: report(1, {"a": (100, 10, 0, 0, 4, 0.5)}), 1: report(1, {"a": (7, 3, 1, 0, 2, 0.5)})})
    assert (combination.view.reporting, combination.view.rms.tolist()) == (2, [pytest.approx(NAN, nan_ok=True)])  # type: ignore[union-attr]
    combination.hear(
        {
            0: report(2, {"a": (190, 20, 0, 2, 4, 0.5)}, 21),
            1: report(2, {"a": (87, 8, 1, 0, 2, 1.0), "b": (0, 0, 0, 0, 0, NAN)}, 19),
        }
    )
    assert combination.view.rms is not None
    combination.hear(
        {
            0: report(3, {"a": (280, 30, 0, 2, 4, 0.5)}, 30),
            1: report(3, {"a": (167, 13, 1, 5, 2, 1.0), "b": (0, 0, 0, 0, 0, NAN)}, 29),
        }
    )
    view = combination.view
    assert view.rms is not None
    assert view.rms.tolist() == [5.0, pytest.approx(NAN, nan_ok=True)]  # of the other layer nothing was ever there
    assert (view.global_rms, view.fewest_steps, view.most_steps) == (5.0, 29, 30)
    assert view.nans is not None
    assert view.infs is not None
    assert (view.nans.tolist(), view.infs.tolist()) == ([1, 0], [7, 0])
    assert view.dead_ratio is not None
    assert view.dead_ratio[0] == pytest.approx((4 * 0.5 + 2 * 1.0) / 6)
    assert np.isnan(view.dead_ratio[1])


def rms(combination: Combination) -> tuple[list[float], float]:
    """Return the root mean squares by layer, and over all."""
    view = combination.view
    assert view.rms is not None
    assert view.global_rms is not None
    return view.rms.tolist(), view.global_rms


def unknown(value: float) -> bool:
    """Return whether a value is NaN."""
    return math.isnan(value)


def test_reports_without_a_sample_change_nothing() -> None:
    """Reports without a new sample leave the norm as it is."""
    combination = Combination(1, FRESH)
    for number in (1, 2):
        combination.hear({0: report(number, {"a": (4.0, 1.0, 0, 0, 0, NAN)})})
        assert unknown(rms(combination)[1])  # what was before the first report is not known
    for number, squares, captures in ((3, 13.0, 2.0), (4, 13.0, 2.0), (5, 13.0, 2.0)):
        combination.hear({0: report(number, {"a": (squares, captures, 0, 0, 0, NAN)})})
        assert rms(combination) == ([3.0], 3.0)
    combination.hear({0: report(6, {"a": (63.0, 4.0, 0, 0, 0, NAN)})})
    assert rms(combination) == ([5.0], 5.0)


def test_a_dead_rank_makes_the_view_incomplete() -> None:
    """Half a minute after a rank's last report only the number of ranks is shown; with its next report the values are back."""
    now = 0.0
    combination = Combination(2, FRESH, lambda: now)

    def hear(number: int, *ranks: int) -> tuple[int, bool]:
        combination.hear({rank: report(number, {"a": (4.0 * number, 1.0 * number, 0, 0, 0, NAN)}) for rank in ranks})
        return combination.view.reporting, combination.view.rms is not None

    assert hear(1, 0) == (1, False)
    assert hear(2, 0, 1) == (2, True)
    now = FRESH
    assert hear(3, 0) == (2, True)
    now = FRESH + 1
    assert hear(4, 0) == (1, False)
    assert hear(5, 0, 1) == (2, True)


@pytest.mark.parametrize("captures", [1.0, 500.0])
def test_a_restarted_rank_begins_again(captures: float) -> None:
    """The first report of a restarted rank says nothing of a norm, however large its totals are."""
    combination = Combination(1, FRESH)
    combination.hear({0: report(1, {"a": (100.0, 10.0, 0, 0, 0, NAN)})})
    combination.hear({0: report(1, {"a": (1e6, captures, 0, 0, 0, NAN)}, started=2)})
    assert unknown(rms(combination)[1])
    combination.hear({0: report(2, {"a": (1e6 + 9.0, captures + 1.0, 0, 0, 0, NAN)}, started=2)})
    assert rms(combination) == ([3.0], 3.0)
