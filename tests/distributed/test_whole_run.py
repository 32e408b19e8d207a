"""The combination of the ranks' reports, with a store that is a dictionary and a clock that is set."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.aggregation.test_gradients import NOW, captured, closed, row
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import Snapshot
from torch_grad_exporter.distributed.store import JobStore
from torch_grad_exporter.distributed.whole_run import COLUMNS, Combination, Report, WholeRun, report_of
from torch_grad_exporter.metrics.families import REMOVED
from torch_grad_exporter.model.layers import LayerIndex

NAN = math.nan
FRESH = 30.0


def report(number: int, layers: dict[str, tuple[float, ...]], steps: int = 10, *, started: int = 1) -> bytes:
    """As published: by layer the sum of squares, samples, NaNs, Infs, units and the dead share."""
    return Report(started, number, steps, tuple(layers), np.array(list(layers.values())).T.reshape(len(COLUMNS), -1)).encoded()


def test_a_report_comes_back_as_it_was() -> None:
    """Names of any script, values that are not known, and no layer at all."""
    for layers in ({}, {"größe.0": (1.0, 2.0, 3.0, 4.0, 5.0, NAN), 'a "b"\n': (1e300, 0.0, 0.0, 0.0, 0.0, 0.5)}):
        found = Report.decoded(report(7, layers, steps=3))
        assert (found.started, found.number, found.steps, found.layers) == (1, 7, 3, tuple(layers))
        assert np.array_equal(found.values.T, np.array(list(layers.values())).reshape(-1, len(COLUMNS)), equal_nan=True)


@pytest.mark.parametrize("content", [b"", b"nonsense", report(1, {"a": (1.0,) * 6})[:-3], zlib.compress(b"\0\0\0\2{}")])
def test_what_is_no_report_is_left_out(content: bytes) -> None:
    """Whatever stands under a key of ours, nothing is raised and nothing is made up."""
    combination = Combination(1, FRESH)
    combination.hear({0: content})
    assert combination.view.reporting == 0


def test_a_report_tells_what_removed_layers_counted() -> None:
    """Elements that were not finite in a layer that is frozen or removed stay in the report, without samples of its own."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    index, gradients = LayerIndex({"": model}), GradientAggregation()
    gradients.use(index.table)
    every = {0: row(1.0, nans=1), 1: row(NAN, nans=2), 2: row(3.0, infs=4)}
    gradients.apply(captured(1, every, table=index.table))
    gradients.apply(closed(1))
    model["a"].requires_grad_(False)
    del model["b"]
    gradients.use(index.refresh())
    found = report_of(Snapshot(gradients.snapshot(NOW), TrainingTotals().snapshot()), 1, 1, 1)
    columns = dict(zip(COLUMNS, found.values.tolist(), strict=True))
    assert found.layers == ("c", "a", REMOVED)
    assert {name: columns[name] for name in ("captures", "nans", "infs", "squared_total")} == {
        "captures": [1, 0, 0], "nans": [0, 1, 2], "infs": [4, 0, 0], "squared_total": [9, 0, 0],
    }  # fmt: skip


def test_a_layer_that_begins_anew_makes_no_negative_squares() -> None:
    """A layer that was removed and added again between two reports has no mean over the samples between them."""
    combination = Combination(1, FRESH)
    for number, (squares, captures) in enumerate([(100, 10), (190, 20), (9, 1), (36, 4)], 1):
        combination.hear({0: report(number, {"a": (squares, captures, 0, 0, 4, 0.5)})})
        assert combination.view.rms is not None
        rms = float(combination.view.rms[0])
        assert math.isnan(rms) if number in (1, 3) else rms == 3.0


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


def test_a_report_that_is_heard_twice_is_one() -> None:
    """Rank 0 looks more often than a rank reports: the value of the last two different reports stays."""
    combination = Combination(1, FRESH)
    for number, total in ((1, 0.0), (2, 40.0), (2, 40.0), (2, 40.0)):
        combination.hear({0: report(number, {"a": (total, 10.0 * number, 0, 0, 0, NAN)})})
    assert combination.view.rms is not None
    assert combination.view.rms.tolist() == [2.0]


def rms(combination: Combination) -> tuple[list[float], float]:
    """By layer, and over all."""
    view = combination.view
    assert view.rms is not None
    assert view.global_rms is not None
    return view.rms.tolist(), view.global_rms


def unknown(value: float) -> bool:
    """Whether it is NaN."""
    return math.isnan(value)


def test_slow_steps() -> None:
    """Reports between which there was no sample leave the norm as it is: it is that of the last samples."""
    combination = Combination(1, FRESH)
    for number in (1, 2):
        combination.hear({0: report(number, {"a": (4.0, 1.0, 0, 0, 0, NAN)})})
        assert unknown(rms(combination)[1])  # what was before the first report is not known
    for number, squares, captures in ((3, 13.0, 2.0), (4, 13.0, 2.0), (5, 13.0, 2.0)):
        combination.hear({0: report(number, {"a": (squares, captures, 0, 0, 0, NAN)})})
        assert rms(combination) == ([3.0], 3.0)
    combination.hear({0: report(6, {"a": (63.0, 4.0, 0, 0, 0, NAN)})})
    assert rms(combination) == ([5.0], 5.0)


def test_layers_that_are_not_always_used() -> None:
    """One that never had a gradient has no norm and disturbs none; one of half of the samples has half the weight in the whole."""
    combination = Combination(1, FRESH)
    never = (0.0, 0.0, 0, 0, 0, NAN)
    combination.hear({0: report(1, {"a": (0, 10, 0, 0, 0, NAN), "b": (0, 10, 0, 0, 0, NAN), "c": never})})
    combination.hear({0: report(2, {"a": (70, 20, 0, 0, 0, NAN), "b": (90, 15, 0, 0, 0, NAN), "c": never})})
    layers, whole = rms(combination)
    assert layers[:2] == [math.sqrt(7.0), math.sqrt(18.0)]
    assert unknown(layers[2])
    assert whole == 4.0


def test_ranks_with_copies_say_only_that_they_are_there() -> None:
    """Their reports have no layers; that their steps began later holds up nothing."""
    combination = Combination(2, FRESH)
    combination.hear({0: report(1, {"a": (0, 10, 0, 0, 0, NAN)})})
    combination.hear({0: report(2, {"a": (40, 20, 0, 0, 0, NAN)}), 1: report(1, {}, 19)})
    assert rms(combination) == ([2.0], 2.0)
    assert (combination.view.reporting, combination.view.most_steps) == (2, 19)


def test_a_rank_that_is_dead_makes_it_incomplete() -> None:
    """Half a minute after its last report there are no values but the number of ranks; with it they are back."""
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


@pytest.mark.parametrize("captures", [1.0, 10.0, 500.0])
def test_a_rank_that_was_started_anew_begins_again(captures: float) -> None:
    """Its totals are those of the new process, however many they are: the first report says nothing of a norm."""
    combination = Combination(1, FRESH)
    combination.hear({0: report(1, {"a": (100.0, 10.0, 0, 0, 0, NAN)})})
    combination.hear({0: report(1, {"a": (1e6, captures, 0, 0, 0, NAN)}, started=2)})
    assert unknown(rms(combination)[1])
    combination.hear({0: report(2, {"a": (1e6 + 9.0, captures + 1.0, 0, 0, 0, NAN)}, started=2)})
    assert rms(combination) == ([3.0], 3.0)


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 5.0), (256, 5.0), (1024, 20.0)])
def test_many_ranks_report_less_often(ranks: int, seconds: float) -> None:
    """So that rank 0 has the same to add up in a second, however many there are; who is silent for six reports is gone."""

    def never(*_: object) -> Any:  # noqa: ANN401 - it is not called
        raise AssertionError

    found = WholeRun(JobStore(never), 0, ranks, snapshot=never, steps=never, on_error=never)
    assert (found._interval, found._combination._fresh_seconds) == (seconds, 6 * seconds)
