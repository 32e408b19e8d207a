"""What samples add up to, with events made by hand and times of our choice."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from torch_grad_exporter.aggregation.gradients import GradientAggregation, GradientSnapshot
from torch_grad_exporter.aggregation.tables import UNOWNED
from torch_grad_exporter.collectors.gradients import GradientCollector
from torch_grad_exporter.metrics.buckets import DECADES, HALF_DECADES
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.layout import NORMS, ORDINARY, Packing
from torch_grad_exporter.transfer.events import (
    AfterClip,
    Captured,
    Closed,
    Divided,
    Local,
    LocalPart,
    Outcome,
    Part,
    Weights,
    Withdrawn,
)
from torch_grad_exporter.transfer.transfer import Arrived

NOW = 1_800_000_000.0
NAN, INF = math.nan, math.inf
Rows = Mapping[int, Sequence[float]]


def model() -> nn.ModuleDict:
    """Layer `a` with two parameters, at positions 0 and 1, layer `b` with one, at position 2."""
    return nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2, bias=False)})


MODEL = model()
PLAN = LayerIndex({"": MODEL}).table
OWN = np.zeros(3, dtype=np.int64)


def row(norm: float, **columns: float) -> list[float]:
    """One parameter's measurement; what is not named is 0, extremes are the norm."""
    values = dict.fromkeys(Column.__members__, 0.0) | {"NORM": norm, "MIN": -norm, "MAX": norm}
    return list((values | {name.upper(): value for name, value in columns.items()}).values())


def parts(table: ParameterTable, rows: Rows) -> tuple[Part, ...]:
    """The rows as they arrive from a device."""
    if not rows:
        return ()
    positions = np.array(list(rows), dtype=np.int64)
    rows_ = np.array(list(rows.values()), dtype=np.float64)
    packing = Packing(NORMS if rows_.shape[1] == 1 else ORDINARY)
    return (Part(positions, table.elements[positions], table.units[positions], Arrived(rows_.reshape(-1)), packing),)


def ticket(value: float | None) -> Arrived | None:
    """One number that has arrived."""
    return None if value is None else Arrived(np.array([value]))


def captured(
    number: int,
    rows: Rows,
    *,
    table: ParameterTable = PLAN,
    at: float = NOW,
    owners: Sequence[int] = OWN,
    missing: Sequence[int] = (),
    likely_last: bool = True,
    usual: Iterable[int] = (),
    scale_known: bool = True,
    scale: float | None = None,
) -> Captured:
    """A capture in round `number`."""
    return Captured(
        number,
        table,
        parts(table, rows),
        np.array(missing, dtype=np.int64),
        np.array(owners, dtype=np.int64),
        at,
        likely_last=likely_last,
        usual=frozenset(usual),
        scale_known=scale_known,
        scale=ticket(scale),
    )


def closed(
    number: int,
    outcome: Outcome = Outcome.STEPPED,
    *,
    owners: Sequence[int] = OWN,
    stepped: Iterable[int] = (0,),
) -> Closed:
    """The end of round `number`, in which the optimizers made their step of that number."""
    return Closed(number, outcome, np.array(owners, dtype=np.int64), frozenset(stepped), dict.fromkeys(stepped, number))


def after(
    number: int,
    norms: Mapping[int, float],
    *,
    optimizer: int = 0,
    loss_scale: float | None = None,
    own_scale: float | None = None,
) -> AfterClip:
    """Norms as the optimizer saw them in round `number`."""
    rows = {position: [norm] for position, norm in norms.items()}
    return AfterClip(number, optimizer, parts(PLAN, rows), loss_scale=ticket(loss_scale), own_scale=ticket(own_scale))


def aggregation(table: ParameterTable = PLAN) -> GradientAggregation:
    """An empty aggregation that shows the layers of the table."""
    new = GradientAggregation()
    new.use(table)
    return new


def train(
    to: GradientAggregation, samples: Iterable[Rows], *, first: int = 1, at: Sequence[float] | None = None
) -> GradientSnapshot:
    """Captures and closes a round for each of the samples."""
    time = NOW
    for number, rows in enumerate(samples, first):
        time = NOW if at is None else at[number - first]
        to.apply(captured(number, rows, at=time))
        to.apply(closed(number))
    return to.snapshot(time)


def shown(snapshot: GradientSnapshot, layer: str, name: str) -> float:
    """One value of one layer."""
    return float(snapshot.layer_values[name][snapshot.table.layers.index(layer)])


def one(snapshot: GradientSnapshot, name: str, optimizer: int = 0) -> float:
    """One value over the parameters of one optimizer."""
    return float(snapshot.totals[name][snapshot.optimizers.index(optimizer)])


# Rounds


def test_a_sample_is_shown_when_its_round_is_closed() -> None:
    """A capture is pending, and shown nowhere, until it is known what became of its step."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0), 1: row(4.0), 2: row(2.0)}))
    before = it.snapshot(NOW)
    assert (shown(before, "a", "captures"), before.samples, len(before.totals)) == (0, 0, 0)
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "norm") for layer in "ab"] == pytest.approx([5.0, 2.0])
    assert [shown(snapshot, layer, "captures") for layer in "ab"] == [1, 1]
    assert one(snapshot, "norm") == pytest.approx(math.sqrt(29))
    assert (snapshot.samples, one(snapshot, "sample_step")) == (1, 1)


def test_a_later_capture_of_a_round_replaces_the_earlier() -> None:
    """Of the captures of an accumulation only the last one is counted."""
    it = aggregation()
    for norm in (100.0, NAN, 3.0):
        it.apply(captured(1, {0: row(norm, nans=math.isnan(norm)), 2: row(norm)}))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, "a", name) for name in ("norm", "captures", "nans", "bucket_sum")] == [3, 1, 0, 3]
    assert one(snapshot, "nonfinite_stepped") == 0
    assert snapshot.samples == 1


def test_a_round_that_was_never_closed_is_counted_as_unknown() -> None:
    """When the next round's capture comes first, the pending one is counted, with an unknown outcome."""
    it = aggregation()
    it.apply(captured(1, {0: row(NAN, nans=2), 2: row(1.0)}))
    it.apply(captured(2, {0: row(1.0), 2: row(1.0)}))
    it.apply(closed(2))
    snapshot = it.snapshot(NOW)
    assert [one(snapshot, f"nonfinite_{o.value}") for o in (Outcome.UNKNOWN, Outcome.STEPPED, Outcome.SKIPPED)] == [1, 0, 0]
    assert [shown(snapshot, "a", name) for name in ("captures", "nans")] == [2, 2]


def test_a_pending_sample_is_counted_after_a_second() -> None:
    """A NaN that a hang follows is shown as soon as it has been pending for more than a second, not before."""
    it = aggregation()
    it.apply(captured(1, {0: row(NAN, nans=5)}))
    assert shown(it.snapshot(NOW + 0.9), "a", "nans") == 0
    snapshot = it.snapshot(NOW + 1.1)
    assert shown(snapshot, "a", "nans") == 5
    assert math.isnan(shown(snapshot, "a", "norm"))
    assert one(snapshot, "nonfinite_unknown") == 1


def test_amid_an_accumulation_a_pending_sample_has_more_patience() -> None:
    """Where more backwards of the round may follow, a pending sample is counted after ten seconds only."""
    it = aggregation()
    it.apply(captured(1, {0: row(NAN, nans=5)}, likely_last=False))
    assert shown(it.snapshot(NOW + 9.9), "a", "nans") == 0
    assert shown(it.snapshot(NOW + 10.1), "a", "nans") == 5


def test_a_sample_is_counted_once() -> None:
    """A sample that was counted while pending is not counted again when time passes or its round is closed."""
    it = aggregation()
    it.apply(captured(1, {0: row(2.0, nans=5, zeros=6)}))
    for seconds in (1.1, 2.0, 30.0):
        it.expire(NOW + seconds)
    it.apply(closed(1, Outcome.SKIPPED))
    snapshot = it.snapshot(NOW + 31)
    assert [shown(snapshot, "a", n) for n in ("captures", "nans", "bucket_sum", "squared_total")] == [1, 5, 2, 4]
    assert (one(snapshot, "nonfinite_unknown"), one(snapshot, "nonfinite_skipped")) == (1, 0)
    assert (snapshot.samples, one(snapshot, "bucket_sum"), one(snapshot, "sample_step")) == (1, 2, 1)


def test_norms_of_a_round_are_those_at_its_end_however_long_it_takes() -> None:
    """Of a round that goes on nothing is shown that is finite; a capture that replaces another leaves nothing of that one."""
    it = aggregation()
    it.apply(captured(1, {0: row(2.0), 2: row(1.0)}))
    it.expire(NOW + 1000)
    assert [shown(it.snapshot(NOW + 1000), "a", n) for n in ("read", "captures", "bucket_sum")] == [False, 0, 0]
    it.apply(captured(1, {0: row(7.0), 2: row(1.0)}, at=NOW + 2))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW + 2)
    assert [shown(snapshot, "a", n) for n in ("norm", "captures", "bucket_sum", "squared_total")] == [7, 1, 7, 49]
    assert one(snapshot, "norm") == pytest.approx(math.sqrt(50))


def test_what_is_not_finite_is_counted_before_the_round_is_over_and_norms_at_its_end() -> None:
    """A NaN in the first micro-batch shows after a second; the finite layer's norm is that of all micro-batches."""
    it = aggregation()
    it.apply(captured(1, {0: row(NAN, nans=3), 2: row(1.0)}))
    it.expire(NOW + 1.5)
    snapshot = it.snapshot(NOW + 1.5)
    assert [shown(snapshot, "a", n) for n in ("nans", "captures")] == [3, 1]
    assert [shown(snapshot, "b", n) for n in ("sized", "bucket_sum", "captures")] == [False, 0, 1]
    assert one(snapshot, "nonfinite_unknown") == 1
    it.apply(captured(1, {0: row(NAN, nans=4), 2: row(5.0)}, at=NOW + 2))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW + 2)
    assert [shown(snapshot, "b", n) for n in ("norm", "bucket_sum", "captures", "squared_total")] == [5, 5, 1, 25]
    assert (one(snapshot, "nonfinite_unknown"), one(snapshot, "nonfinite_stepped")) == (1, 0)


def test_a_sample_that_was_stepped_on_is_shown_though_others_may_step() -> None:
    """After a second without the other optimizer's step: the values of the one that stepped, with the number of its step."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0), 2: row(4.0)}, owners=(0, 0, 1)))
    end = closed(1, owners=(0, 0, 1), stepped={0})
    it.apply(dataclasses.replace(end, final=False))
    it.expire(NOW + 0.5)
    assert it.snapshot(NOW + 0.5).samples == 0
    snapshot = it.snapshot(NOW + 1.5)
    assert (snapshot.samples, snapshot.optimizers, one(snapshot, "norm"), one(snapshot, "sample_step")) == (1, (0,), 3, 1)
    assert [shown(snapshot, layer, "captures") for layer in "ab"] == [1, 0]
    it.apply(closed(1, owners=(0, 0, 1), stepped={0, 1}))
    snapshot = it.snapshot(NOW + 2)
    assert (snapshot.samples, snapshot.optimizers, [float(total["norm"]) for total in snapshot.totals]) == (1, (0, 1), [3, 4])
    assert [float(total["sample_step"]) for total in snapshot.totals] == [1, 1]
    assert [shown(snapshot, layer, "bucket_sum") for layer in "ab"] == [3, 4]


def test_a_sample_that_is_withdrawn_is_never_shown() -> None:
    """Neither when time passes nor at the end of its round."""
    it = aggregation()
    it.apply(captured(1, {0: row(NAN, nans=1)}))
    it.apply(Withdrawn(1))
    it.expire(NOW + 20)
    it.apply(closed(1))
    snapshot = it.snapshot(NOW + 20)
    assert (snapshot.samples, shown(snapshot, "a", "captures")) == (0, 0)


def test_events_of_another_round_are_ignored() -> None:
    """What says something of a round that was not sampled neither closes nor changes the pending sample."""
    it = aggregation()
    it.apply(captured(2, {0: row(4.0)}))
    it.apply(after(1, {0: 1.0}))
    it.apply(closed(1))
    assert it.snapshot(NOW).samples == 0
    it.apply(closed(2))
    it.apply(closed(2))
    snapshot = it.snapshot(NOW)
    assert (snapshot.samples, shown(snapshot, "a", "captures")) == (1, 1)
    assert not one(snapshot, "clip_known")


def test_a_snapshot_is_a_copy() -> None:
    """What happens after a snapshot does not show in it."""
    it = aggregation()
    before = train(it, [{0: row(2.0)}])
    train(it, [{0: row(9.0)}], first=2)
    assert [shown(before, "a", n) for n in ("norm", "captures")] == [2, 1]
    assert one(before, "norm") == 2


def test_there_is_no_snapshot_without_a_plan() -> None:
    """An aggregation that was never told what to show says so."""
    with pytest.raises(RuntimeError, match="table"):
        GradientAggregation().snapshot(NOW)


# Owners


def test_only_what_the_stepping_optimizers_own_is_published() -> None:
    """In a round of one of two optimizers, the other one's layers are neither shown nor counted."""
    it = aggregation()
    owners = (0, 0, 1)
    rows = {0: row(3.0), 1: row(4.0), 2: row(2.0, nans=1)}
    it.apply(captured(1, rows, owners=owners))
    it.apply(closed(1, owners=owners, stepped=(0,)))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "captures") for layer in "ab"] == [1, 0]
    assert math.isnan(shown(snapshot, "b", "norm"))
    assert (snapshot.optimizers, one(snapshot, "norm"), one(snapshot, "nonfinite_stepped")) == ((0,), 5, 0)
    it.apply(captured(2, rows, owners=owners))
    it.apply(closed(2, owners=owners, stepped=(0, 1)))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "captures") for layer in "ab"] == [2, 1]
    assert [one(snapshot, "norm", o) for o in (0, 1)] == [5, 2]
    assert [one(snapshot, "nonfinite_stepped", o) for o in (0, 1)] == [0, 1]


def test_a_layer_of_two_optimizers() -> None:
    """Where two optimizers own parts of one layer, a round of one shows the norm of its part."""
    it = aggregation()
    owners = (0, 1, 1)
    it.apply(captured(1, {0: row(3.0), 1: row(4.0), 2: row(2.0)}, owners=owners))
    it.apply(closed(1, owners=owners, stepped=(1,)))
    snapshot = it.snapshot(NOW)
    assert (shown(snapshot, "a", "norm"), one(snapshot, "norm", 1)) == (4, pytest.approx(math.sqrt(20)))


def test_a_parameter_without_an_optimizer_is_in_no_optimizers_totals() -> None:
    """What no optimizer owns is not published with the step of one."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0), 2: row(4.0)}, owners=(0, 0, UNOWNED)))
    it.apply(closed(1, owners=(0, 0, UNOWNED)))
    snapshot = it.snapshot(NOW)
    assert ([shown(snapshot, layer, "captures") for layer in "ab"], one(snapshot, "norm")) == ([1, 0], 3)


def test_a_hang_is_counted_for_the_optimizers_that_usually_step() -> None:
    """A sample whose step never came is counted for those that usually step after it, else for all owners."""
    for usual, expected in (((1,), (1,)), ((), (0, 1))):
        it = aggregation()
        it.apply(captured(1, {0: row(INF, infs=1), 2: row(4.0)}, owners=(0, 0, 1), usual=usual))
        it.expire(NOW + 2)
        assert it.snapshot(NOW + 2).optimizers == expected


def test_the_first_optimizer_takes_over_what_came_before_it() -> None:
    """Samples counted before any optimizer was known stand in the first one's totals."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0)}, owners=(UNOWNED,) * 3))
    it.apply(closed(1, Outcome.SKIPPED, owners=(UNOWNED,) * 3, stepped={UNOWNED}))
    assert it.snapshot(NOW + 2).optimizers == (UNOWNED,)
    snapshot = train(it, [{0: row(4.0)}], first=2)
    assert snapshot.optimizers == (0,)
    assert one(snapshot, "bucket_sum") == 7


@pytest.mark.parametrize("late", [False, True])
def test_an_optimizer_that_a_scaler_left_out(late: bool) -> None:
    """Of two optimizers that always step together one does not, and its gradients are not finite: that is its skipped step."""
    it = aggregation()
    owners = (0, 0, 1)
    for number, bad in enumerate((False, False, True, True, False), 1):
        it.apply(captured(number, {0: row(3.0), 2: row(INF, infs=1) if bad else row(4.0)}, owners=owners))
        it.apply(after(number, {0: 3.0}))
        if late:
            it.expire(NOW + 2)
        it.apply(closed(number, owners=owners, stepped=(0,) if bad else (0, 1)))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "captures") for layer in "ab"] == [5, 5]
    assert (shown(snapshot, "b", "infs"), shown(snapshot, "b", "bucket_sum")) == (2, 12)
    assert [one(snapshot, f"nonfinite_{o.value}", 1) for o in Outcome] == [0, 2, 0]
    assert [one(snapshot, f"nonfinite_{o.value}", 0) for o in Outcome] == [0, 0, 0]


def test_a_generators_round_is_no_skipped_step_of_the_discriminator() -> None:
    """What a generator's backward leaves in the discriminator, be it a NaN, is not shown as its sample."""
    it = aggregation()
    owners = (0, 0, 1)
    for number in range(1, 9, 2):
        it.apply(captured(number, {2: row(2.0)}, owners=owners))
        it.apply(closed(number, owners=owners, stepped=(1,)))
        it.apply(captured(number + 1, {0: row(3.0), 2: row(NAN, nans=1)}, owners=owners))
        it.apply(closed(number + 1, owners=owners, stepped=(0,)))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "captures") for layer in "ab"] == [4, 4]
    assert (shown(snapshot, "b", "nans"), one(snapshot, "nonfinite_skipped", 1)) == (0, 0)


def test_an_optimizer_that_steps_now_and_then_is_not_left_out() -> None:
    """Who did not step on finite gradients before has not been left out when they are not finite."""
    it = aggregation()
    owners = (0, 0, 1)
    for number, both in enumerate((True, False, True, False), 1):
        rows = {0: row(3.0), 2: row(NAN, nans=1) if number == 4 else row(4.0)}
        it.apply(captured(number, rows, owners=owners))
        it.apply(closed(number, owners=owners, stepped=(0, 1) if both else (0,)))
    assert shown(it.snapshot(NOW), "b", "captures") == 2


def test_known_optimizers_have_labels_and_totals_from_the_start() -> None:
    """Where a second optimizer is known each has its label, and counters at 0 before its first sample; one alone has none."""
    it = aggregation()
    names = ["g"]
    collector = GradientCollector(lambda: it.snapshot(NOW), names, dead_window=20)

    def clipped() -> dict[str, float]:
        family = next(f for f in collector.collect() if f.spec.name == "torch_grad_clipped_steps_total")
        return {label: float(v) for (label,), v in zip(family.labels.rows, family.values, strict=True)}

    def with_a_norm() -> list[str]:
        family = next(f for f in collector.collect() if f.spec.name == "torch_grad_global_norm")
        assert family.present is not None
        return [label for (label,), there in zip(family.labels.rows, family.present, strict=True) if there]

    assert (clipped(), with_a_norm()) == ({"": 0}, [])
    names.append("d")
    assert (clipped(), with_a_norm()) == ({"g": 0, "d": 0}, [])
    for number in range(1, 4):
        it.apply(captured(number, {2: row(2.0 * number)}, owners=(0, 0, 1)))
        it.apply(after(number, {2: 1.0}, optimizer=1))
        it.apply(closed(number, owners=(0, 0, 1), stepped=(1,)))
    assert (clipped(), with_a_norm()) == ({"g": 0, "d": 1}, ["d"])


# Histograms and sums


def test_histograms_and_sums_are_exact() -> None:
    """Over 500 samples of every size, also exactly on the bounds, buckets and sums are those of a loop."""
    generator = np.random.default_rng(0)
    norms = [*np.exp(generator.uniform(-22, 12, 450)).tolist(), 0.0, *DECADES, *HALF_DECADES, 1e5]
    snapshot = train(aggregation(), [{2: row(norm)} for norm in norms])
    for bounds, table, place in ((DECADES, snapshot.layer_values, 1), (HALF_DECADES, snapshot.totals, 0)):
        buckets = [0] * (len(bounds) + 1)
        for norm in norms:
            buckets[bisect.bisect_left(bounds, norm)] += 1
        assert table["buckets"][place].tolist() == buckets
        assert table["bucket_sum"][place] == pytest.approx(math.fsum(norms), rel=1e-12)
    assert shown(snapshot, "b", "squared_total") == pytest.approx(math.fsum(n * n for n in norms), rel=1e-12)
    assert shown(snapshot, "b", "captures") == snapshot.samples == len(norms)
    assert shown(snapshot, "a", "captures") == 0


def test_nothing_that_is_not_finite_enters_a_histogram_or_a_sum() -> None:
    """NaN and Inf are counted by element and by step, and leave buckets, sums and baselines as they were."""
    rows = [{0: row(2.0)}, {0: row(NAN, nans=3, min=NAN, max=NAN)}, {0: row(INF, infs=2, max=INF)}, {0: row(2.0)}]
    snapshot = train(aggregation(), rows)
    assert [shown(snapshot, "a", n) for n in ("captures", "nans", "infs", "bucket_sum", "squared_total")] == [4, 3, 2, 4, 8]
    assert snapshot.layer_values["buckets"][0].sum() == snapshot.totals["buckets"][0].sum() == 2
    assert one(snapshot, "bucket_sum") == 4
    assert one(snapshot, "nonfinite_stepped") == 2
    assert snapshot.recent_max[0] == 2


def test_a_gauge_shows_the_nan() -> None:
    """The last values of a layer whose gradient has a NaN are NaN, and right again with the next sample."""
    it = aggregation()
    bad = train(it, [{0: row(NAN, nans=3, min=NAN, max=NAN), 1: row(1.0)}])
    assert all(math.isnan(shown(bad, "a", name)) for name in ("norm", "max_magnitude"))
    assert math.isnan(one(bad, "norm"))
    assert shown(train(it, [{0: row(3.0), 1: row(4.0)}], first=2), "a", "norm") == 5


@pytest.mark.parametrize("outcome", list(Outcome))
def test_steps_that_are_not_finite_are_counted_by_outcome(outcome: Outcome) -> None:
    """A NaN or an Inf anywhere makes the step count once, under what became of it."""
    it = aggregation()
    for number, columns in enumerate(({"nans": 1}, {"infs": 7, "nans": 2}, {}), 1):
        it.apply(captured(number, {0: row(1.0), 2: row(1.0, **columns)}))
        it.apply(closed(number, outcome))
    snapshot = it.snapshot(NOW)
    assert {o: one(snapshot, f"nonfinite_{o.value}") for o in Outcome} == {o: 2 * (o is outcome) for o in Outcome}


def test_an_infinite_norm_beside_a_huge_one_raises_no_warning() -> None:
    """A layer with an infinite and a huge parameter has an infinite norm, silently."""
    snapshot = train(aggregation(), [{0: row(INF, infs=1), 1: row(1e200), 2: row(1e200)}])
    assert shown(snapshot, "a", "norm") == one(snapshot, "norm") == INF


@pytest.mark.parametrize("norms", [(1e200, 1e200), (1e-200, 1e-200), (3e-30, 4e30), (0.0, 0.0)])
def test_norms_are_combined_without_overflow(norms: tuple[float, float]) -> None:
    """A layer's norm is the root of the sum of squares of its parameters' norms, whatever their size."""
    snapshot = train(aggregation(), [{0: row(norms[0]), 1: row(norms[1])}])
    assert shown(snapshot, "a", "norm") == pytest.approx(math.hypot(*norms), rel=1e-12)
    assert one(snapshot, "norm") == pytest.approx(math.hypot(*norms), rel=1e-12)


# Per layer


def test_ratios_are_taken_over_the_layers_elements_and_units() -> None:
    """Zero elements over all elements, zero and dead units over all units of those parameters that have units."""
    snapshot = train(
        aggregation(), [{0: row(1.0, zeros=6, zero_units=2, dead_units=1), 1: row(1.0, zeros=1), 2: row(1.0, zeros=8)}]
    )
    assert [shown(snapshot, "a", n) for n in ("zero_ratio", "zero_units_ratio", "dead_ratio")] == [7 / 16, 2 / 4, 1 / 4]
    assert [shown(snapshot, "b", n) for n in ("zero_ratio", "zero_units_ratio", "dead_ratio")] == [1, 0, 0]
    bias_only = train(aggregation(), [{1: row(1.0)}])
    assert all(math.isnan(shown(bias_only, "a", n)) for n in ("zero_units_ratio", "dead_ratio"))


def test_the_largest_magnitude_is_of_either_sign() -> None:
    """The largest magnitude of a layer is found among the smallest and largest elements of its parameters."""
    snapshot = train(aggregation(), [{0: row(9.0, min=-7, max=2), 1: row(9.0, min=1, max=3), 2: row(9.0, min=-2, max=8)}])
    assert [shown(snapshot, layer, "max_magnitude") for layer in "ab"] == [7, 8]


def test_missing_parameters_are_counted_per_layer() -> None:
    """Parameters without a gradient are shown for their layer, also where the whole layer has none."""
    it = aggregation()
    it.apply(captured(1, {0: row(1.0)}, missing=(1, 2)))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "missing") for layer in "ab"] == [1, 1]
    assert [shown(snapshot, layer, "captures") for layer in "ab"] == [1, 0]
    snapshot = train(it, [{0: row(1.0), 1: row(1.0), 2: row(1.0)}], first=2)
    assert [shown(snapshot, layer, "missing") for layer in "ab"] == [0, 0]


def test_moments_are_those_of_all_elements_of_the_layer() -> None:
    """Mean, population standard deviation, minimum and maximum over both parameters of a layer."""
    generator = torch.Generator().manual_seed(0)
    gradients = [3 + torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (4,))]
    rows = {
        position: row(float(g.norm()), min=float(g.min()), max=float(g.max()), sum=float(g.sum()))
        for position, g in enumerate(gradients)
    }
    snapshot = train(aggregation(), [rows])
    values = np.concatenate([g.reshape(-1).numpy() for g in gradients])
    found = [shown(snapshot, "a", name) for name in ("mean", "stddev", "minimum", "maximum")]
    assert found == pytest.approx([values.mean(), values.std(), values.min(), values.max()], rel=1e-12)


def test_moments_of_equal_elements() -> None:
    """Where rounding would make the variance negative, the standard deviation is 0."""
    snapshot = train(aggregation(), [{2: row(0.1 * math.sqrt(8), min=0.1, max=0.1, sum=0.1 * 8 * (1 + 1e-15))}])
    assert shown(snapshot, "b", "stddev") == pytest.approx(0, abs=1e-8)


def test_the_recent_maximum_is_over_the_last_minute() -> None:
    """At any moment the recent maximum is the largest finite norm of the samples of the last 60 seconds."""
    generator = np.random.default_rng(1)
    times = NOW + np.cumsum(generator.choice([0, 0, 1, 2, 7, 45, 70], 400))
    norms = np.exp(generator.normal(0.0, 2.0, 400))
    norms[::29] = INF
    it = aggregation()
    for number, (time, norm) in enumerate(zip(times, norms, strict=True), 1):
        it.apply(captured(number, {0: row(norm)}, at=time))
        it.apply(closed(number))
        for moment in (time, time + 13, time + 59, time + 60):
            within = [n for n, t in zip(norms[:number], times[:number], strict=True) if t > moment - 60 and np.isfinite(n)]
            assert it.snapshot(moment).recent_max[0] == pytest.approx(max(within, default=NAN), nan_ok=True)


def test_a_spike_is_counted_for_the_layer_and_for_the_whole() -> None:
    """One layer's norm at 1,000 times its usual one counts as its spike and the whole's, and as no other's."""
    generator = np.random.default_rng(2)
    usual = np.exp(generator.normal(0.0, 0.2, (60, 2)))
    usual[45, 0] *= 1000
    snapshot = train(aggregation(), [{0: row(a), 2: row(b)} for a, b in usual])
    assert [shown(snapshot, layer, "spikes") for layer in "ab"] == [1, 0]
    assert one(snapshot, "spikes") == 1
    assert 0 < abs(shown(snapshot, "a", "zscore")) < 6
    assert math.isnan(shown(train(aggregation(), [{0: row(1.0)}] * 20), "a", "zscore"))


def test_layers_keep_their_totals_when_they_come_and_go() -> None:
    """A layer that is frozen and unfrozen again goes on counting where it stopped, and others are not disturbed."""
    module = model()
    index = LayerIndex({"": module})
    it = aggregation(index.table)
    it.apply(captured(1, {0: row(3.0), 2: row(2.0)}, table=index.table))
    it.apply(closed(1))
    module["a"].requires_grad_(False)
    module["c"] = nn.Linear(2, 2, bias=False)
    without = index.refresh()
    it.apply(captured(2, {0: row(5.0), 1: row(7.0)}, table=without, owners=(0, 0)))
    it.apply(closed(2, owners=(0, 0)))
    snapshot = it.snapshot(NOW)
    assert snapshot.table.layers == ("b", "c")
    assert [[shown(snapshot, layer, n) for n in ("norm", "captures", "bucket_sum")] for layer in "bc"] == [[5, 2, 7], [7, 1, 7]]
    module["a"].requires_grad_(True)
    it.use(index.refresh())
    snapshot = it.snapshot(NOW)
    assert snapshot.table.layers == ("a", "b", "c")
    assert [shown(snapshot, layer, "captures") for layer in "abc"] == [1, 2, 1]
    assert shown(snapshot, "a", "bucket_sum") == 3


def test_weights_are_added_up_by_layer() -> None:
    """A layer's weight norm and update ratio come from the squares of its parameters' norms."""
    it = aggregation()
    vector = np.array([3.0, 6.0, 0.3, 4.0, 8.0, 0.4, 0.0, 2.0, 2.0])
    it.apply(Weights(PLAN, np.array([0, 1, 2]), Arrived(vector)))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "weight_norm") for layer in "ab"] == pytest.approx([10, 2])
    assert shown(snapshot, "a", "update_ratio") == pytest.approx(0.1)
    assert math.isnan(shown(snapshot, "b", "update_ratio"))


# The loss scale


def test_the_loss_scale_is_divided_out() -> None:
    """With the scaler's scale, norms, extremes and moments are those of the unscaled gradient; counts stay."""
    it = aggregation()
    it.apply(captured(1, {2: row(4096.0, min=-1024, max=2048, sum=8192, zeros=3)}, scale=1024.0))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, "b", n) for n in ("norm", "minimum", "maximum", "mean", "max_magnitude")] == [4, -1, 2, 1, 2]
    assert (shown(snapshot, "b", "zero_ratio"), shown(snapshot, "b", "bucket_sum"), one(snapshot, "norm")) == (3 / 8, 4, 4)


def scaled_by_hand(it: GradientAggregation, *, first: int = 1, count: int = 6, scale: float = 65536.0) -> None:
    """Rounds whose loss was scaled by hand, and whose gradients are 1 and 2 without it."""
    for number in range(first, first + count):
        it.apply(captured(number, {0: row(scale), 2: row(2 * scale)}))
        it.apply(after(number, {0: 1.0, 2: 2.0}))
        it.apply(closed(number))


def test_a_power_of_two_between_backward_and_step_is_the_loss_scale() -> None:
    """Without the scaler, a common factor of 2**-16 is its unscaling once it repeats; before, sizes are absent."""
    it = aggregation()
    scaled_by_hand(it, count=5)
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "sized") for layer in "ab"] == [False, False]
    assert [one(snapshot, n) for n in ("clip_known", "after_known", "clipped", "bucket_sum")] == [0, 0, 0, 0]
    scaled_by_hand(it, first=6, count=1)
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "norm") for layer in "ab"] == [1, 2]
    assert (one(snapshot, "coefficient"), one(snapshot, "clipped")) == (1, 0)


def test_one_division_by_a_power_of_two_is_no_loss_scale() -> None:
    """One step of 128 tokens among untouched ones changes no norm, its own included."""
    it = aggregation()
    for number in range(1, 12):
        divisor = 128 if number == 5 else 1
        it.apply(captured(number, {0: row(3.0)}))
        it.apply(after(number, {0: 3.0 / divisor}))
        it.apply(closed(number))
        snapshot = it.snapshot(NOW)
        assert (shown(snapshot, "a", "norm"), one(snapshot, "after_clip")) == (3, 3 / divisor)
        assert [one(snapshot, n) for n in ("clip_known", "clipped")] == [divisor == 1, 0]


def test_a_scale_that_was_revealed_once_is_not_believed_later() -> None:
    """Where unscaling and clipping come together the scale, which may have grown, is unknown: sizes are absent."""
    it = aggregation()
    scaled_by_hand(it)
    it.apply(captured(7, {0: row(131072.0, zeros=6), 2: row(262144.0)}))
    it.apply(after(7, {0: 0.3, 2: 0.6}))
    it.apply(closed(7))
    snapshot = it.snapshot(NOW)
    assert ([shown(snapshot, layer, "sized") for layer in "ab"], one(snapshot, "sized")) == ([False, False], 0)
    assert [shown(snapshot, "a", n) for n in ("captures", "zero_ratio", "squared_total", "bucket_sum")] == [7, 6 / 12, 1, 1]
    assert math.isnan(snapshot.recent_max[0])
    assert one(snapshot, "clip_known") == 0
    it.apply(captured(8, {0: row(262144.0)}))
    it.apply(closed(8, Outcome.SKIPPED))
    assert not shown(it.snapshot(NOW), "a", "sized")
    it.apply(captured(9, {0: row(131072.0)}, at=NOW + 70))
    it.apply(after(9, {0: 2.0}))
    it.apply(closed(9))
    snapshot = it.snapshot(NOW + 70)
    assert (shown(snapshot, "a", "sized"), shown(snapshot, "a", "norm"), snapshot.recent_max[0]) == (True, 2, 2)


def test_a_scale_by_hand_that_one_optimizer_reveals_holds_for_its_sample() -> None:
    """Of two optimizers one is clipped together with the unscaling; the other's norms tell the scale of both."""
    it = aggregation()
    owners = (0, 0, 1)
    for number in range(1, 8):
        it.apply(captured(number, {0: row(1024.0), 2: row(2048.0 * number)}, owners=owners))
        it.apply(after(number, {0: 1.0}))
        it.apply(after(number, {2: 0.6}, optimizer=1))
        it.apply(closed(number, owners=owners, stepped=(0, 1)))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "norm") for layer in "ab"] == [1, 14]
    assert [one(snapshot, "coefficient", o) for o in (0, 1)] == pytest.approx([1, 0.6 / 14])


def test_untouched_gradients_have_no_scale_by_hand() -> None:
    """After a scale was revealed, a sample that reaches the optimizer as it is was not scaled."""
    it = aggregation()
    scaled_by_hand(it)
    it.apply(captured(7, {0: row(3.0)}))
    it.apply(after(7, {0: 3.0}))
    it.apply(closed(7))
    snapshot = it.snapshot(NOW)
    assert (shown(snapshot, "a", "sized"), shown(snapshot, "a", "norm"), one(snapshot, "coefficient")) == (True, 3, 1)


def test_before_the_first_step_a_skipped_sample_has_no_sizes() -> None:
    """Overflows before the scaler can be known are counted, and what the scale would be in is absent."""
    it = aggregation()
    rows = {0: row(INF, infs=2, max=INF), 2: row(1459.0, zeros=4)}
    it.apply(captured(1, rows, scale_known=False))
    it.apply(closed(1, Outcome.SKIPPED))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, layer, "sized") for layer in "ab"] == [False, False]
    assert [shown(snapshot, "b", n) for n in ("captures", "zero_ratio", "bucket_sum", "squared_total")] == [1, 0.5, 0, 0]
    assert (shown(snapshot, "a", "infs"), one(snapshot, "nonfinite_skipped"), one(snapshot, "seen")) == (2, 1, 1)
    assert (one(snapshot, "sized"), one(snapshot, "bucket_sum")) == (0, 0)
    it.apply(captured(2, {2: row(2048.0)}, scale_known=False))
    it.apply(after(2, {2: 2.0}, loss_scale=1024.0))
    it.apply(closed(2))
    snapshot = it.snapshot(NOW)
    assert (shown(snapshot, "b", "sized"), shown(snapshot, "b", "norm"), one(snapshot, "norm")) == (True, 2, 2)


def test_gradients_that_are_finite_and_thrown_away_have_no_scaler() -> None:
    """A scaler skips no step whose gradients are finite: a loop whose steps are not seen has its sizes."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0)}, scale_known=False))
    it.apply(closed(1, Outcome.SKIPPED))
    assert shown(it.snapshot(NOW), "a", "sized")


def test_sizes_that_are_known_late_are_counted_then() -> None:
    """A sample that was pending before the first step, for too long, has its sizes when its round is closed, each once."""
    it = aggregation()
    it.apply(captured(1, {0: row(2048.0), 2: row(NAN, nans=1)}, scale_known=False))
    it.expire(NOW + 2)
    snapshot = it.snapshot(NOW + 2)
    assert [shown(snapshot, "a", n) for n in ("sized", "captures", "bucket_sum")] == [False, 1, 0]
    it.apply(after(1, {0: 2.0}, loss_scale=1024.0))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW + 2)
    assert [shown(snapshot, "a", n) for n in ("sized", "norm", "captures", "bucket_sum")] == [True, 2, 1, 2]


@pytest.mark.parametrize("scale", [0.0, INF, NAN, -1.0])
def test_a_scale_that_is_none_leaves_no_sizes(scale: float) -> None:
    """Of gradients that were multiplied by what is no scale only counts are shown."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0, zeros=6)}, scale=scale))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert (shown(snapshot, "a", "sized"), shown(snapshot, "a", "zero_ratio"), one(snapshot, "sized")) == (False, 0.5, 0)


def test_a_scale_that_the_optimizer_divides_by_itself() -> None:
    """A fused optimizer's own scale is taken out of the norm before and of the norm after."""
    it = aggregation()
    it.apply(captured(1, {0: row(3 * 1024.0), 2: row(4 * 1024.0)}))
    it.apply(after(1, {0: 1.5 * 1024, 2: 4.0 * 1024}, loss_scale=1024.0, own_scale=1024.0))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    whole = math.hypot(1.5, 4)
    assert [one(snapshot, n) for n in ("norm", "coefficient", "after_clip")] == pytest.approx([5, whole / 5, whole])


def test_with_a_known_loss_scale_no_factor_is_taken_for_another() -> None:
    """Where the scaler's scale was given, gradients that a loop divides by 64 were made smaller, not unscaled twice."""
    it = aggregation()
    for number in range(1, 9):
        it.apply(captured(number, {0: row(1024.0)}, scale=1024.0))
        it.apply(after(number, {0: 1 / 64}))
        it.apply(closed(number))
        snapshot = it.snapshot(NOW)
        assert [one(snapshot, n) for n in ("norm", "after_clip", "clip_known", "clipped")] == [1, 1 / 64, 0, 0]


# Clipping


def test_clipping_to_a_limit_is_seen_when_it_repeats() -> None:
    """Norm after, coefficient and counter of clipped steps; before the third sample that came out alike it may be a division."""
    it = aggregation()
    for number in range(1, 6):
        it.apply(captured(number, {0: row(3.0 * number), 1: row(4.0 * number), 2: row(12.0 * number)}))
        it.apply(after(number, {0: 0.3, 1: 0.4, 2: 1.2}))
        it.apply(closed(number))
        snapshot = it.snapshot(NOW)
        assert [one(snapshot, n) for n in ("norm", "after_clip")] == pytest.approx([13 * number, 1.3])
        assert [one(snapshot, n) for n in ("clip_known", "clipped")] == [number > 2, max(0, number - 2)]
        assert number <= 2 or one(snapshot, "coefficient") == pytest.approx(0.1 / number)
    it.apply(captured(6, {0: row(3.0)}))
    it.apply(after(6, {0: 3.0}))
    it.apply(closed(6))
    snapshot = it.snapshot(NOW)
    assert [one(snapshot, n) for n in ("coefficient", "clipped")] == [1, 3]


def test_clipping_is_counted_once_when_the_outcome_is_known() -> None:
    """A sample that is counted while pending, and once more when others may still step, counts as clipped once."""
    it = aggregation()
    owners = (0, 0, 1)
    it.apply(captured(1, {0: row(3.0), 1: row(1.0), 2: row(NAN, nans=1)}, owners=owners))
    it.apply(after(1, {0: 0.3, 1: 1.0}))
    it.expire(NOW + 2)
    assert one(it.snapshot(NOW + 2), "clipped") == 0
    it.apply(dataclasses.replace(closed(1, owners=owners), final=False))
    it.expire(NOW + 3)
    it.apply(after(1, {2: NAN}, optimizer=1))
    it.apply(dataclasses.replace(closed(1, owners=owners, stepped=(0, 1)), final=False))
    it.expire(NOW + 4)
    assert one(it.snapshot(NOW + 4), "clipped") == 1
    it.apply(closed(1, owners=owners, stepped=(0, 1)))
    assert one(it.snapshot(NOW + 4), "clipped") == 1


def test_a_sample_that_is_settled_twice_does_not_repeat_itself() -> None:
    """Of two optimizers one steps, and after a while the other: the first one's norm after has come once, not twice."""
    it = aggregation()
    owners = (0, 0, 1)
    for number in (1, 2):
        it.apply(captured(number, {0: row(3.0 * number), 2: row(4.0)}, owners=owners, at=NOW + 10 * number))
        it.apply(after(number, {0: 0.3}))
        for stepped in ((0,), (0, 1)):
            it.apply(dataclasses.replace(closed(number, owners=owners, stepped=stepped), final=False))
            it.expire(NOW + 10 * number + 2)
        it.apply(closed(number, owners=owners, stepped=(0, 1)))
        snapshot = it.snapshot(NOW + 10 * number + 2)
        assert [one(snapshot, n) for n in ("clip_known", "clipped", "after_clip")] == [0, 0, 0.3]


def test_without_a_second_measurement_clipping_is_unknown() -> None:
    """A round in which nothing was measured again has no coefficient, and does not show the one before."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0), 2: row(3.0)}))
    it.apply(after(1, {0: 0.3, 2: 3.0}))
    it.apply(closed(1))
    snapshot = train(it, [{0: row(3.0)}], first=2)
    assert not one(snapshot, "clip_known")
    assert not one(snapshot, "after_known")
    assert one(snapshot, "clipped") == 1


def test_gradients_that_were_cut_differently_have_a_coefficient() -> None:
    """After clipping by value the coefficient is that of the whole norms, at once."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0), 2: row(4.0)}))
    it.apply(after(1, {0: 3.0, 2: 0.8}))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert one(snapshot, "coefficient") == pytest.approx(math.hypot(3, 0.8) / 5)
    assert one(snapshot, "after_clip") == pytest.approx(math.hypot(3, 0.8))
    assert (one(snapshot, "clip_known"), one(snapshot, "clipped")) == (1, 1)


def test_two_optimizers_are_clipped_apart() -> None:
    """Each optimizer's coefficient comes from its own parameters."""
    it = aggregation()
    owners = (0, 0, 1)
    it.apply(captured(1, {0: row(3.0), 1: row(4.0), 2: row(4.0)}, owners=owners))
    it.apply(after(1, {0: 3.0, 1: 0.0}))
    it.apply(after(1, {2: 4.0}, optimizer=1))
    it.apply(closed(1, owners=owners, stepped=(0, 1)))
    snapshot = it.snapshot(NOW)
    assert [one(snapshot, "coefficient", o) for o in (0, 1)] == pytest.approx([0.6, 1.0])
    assert [one(snapshot, "clipped", o) for o in (0, 1)] == [1, 0]


def test_clipping_an_infinite_norm_raises_no_warning() -> None:
    """After clip_grad_norm_ of an infinite norm all finite gradients are 0; that is counted, silently, and is no clipping."""
    it = aggregation()
    it.apply(captured(1, {0: row(INF, infs=1), 2: row(4.0)}))
    it.apply(after(1, {0: NAN, 2: 0.0}))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert (shown(snapshot, "a", "infs"), one(snapshot, "nonfinite_stepped"), one(snapshot, "norm")) == (1, 1, INF)
    assert (one(snapshot, "clipped"), one(snapshot, "clip_known")) == (0, 0)


# Divisions


def divided(number: int, divisor: float) -> Divided:
    """The loop tells by what it divides the gradients of a round."""
    return Divided(number, divisor)


@pytest.mark.parametrize("early", [True, False])
def test_a_divisor_that_the_loop_tells_is_divided_out(early: bool) -> None:
    """Told before the capture or after it, norms and extremes are those after the division; what is left is clipping, at once."""
    it = aggregation()
    for number, tokens in enumerate((100.0, 128.0, 333.0), 1):
        events = [divided(number, tokens), captured(number, {0: row(6 * tokens, min=-tokens, max=2 * tokens, sum=tokens)})]
        for event in events if early else reversed(events):
            it.apply(event)
        it.apply(after(number, {0: 3.0}))
        it.apply(closed(number))
        snapshot = it.snapshot(NOW)
        assert [shown(snapshot, "a", n) for n in ("norm", "minimum", "maximum", "mean")] == pytest.approx([6, -1, 2, 1 / 12])
        assert [one(snapshot, n) for n in ("norm", "coefficient", "after_clip", "clipped")] == pytest.approx([6, 0.5, 3, number])


def test_this_ranks_own_norm_is_divided_as_well() -> None:
    """The norm of a rank's own gradient, before it was reduced, is after the same division as the reduced one."""
    it = aggregation()
    it.apply(captured(1, {0: row(300.0)}))
    own = LocalPart(np.array([0]), Arrived(np.array([500.0])))
    it.apply(Local(1, np.array([True, False, False]), (own,), samples=8, ranks=2))
    it.apply(divided(1, 100.0))
    it.apply(closed(1))
    snapshot = it.snapshot(NOW)
    assert (one(snapshot, "norm"), snapshot.local[0].norm) == (3, 5)


def test_the_last_divisor_told_of_a_round_counts() -> None:
    """A loop that counts its tokens from micro-batch to micro-batch tells the sum so far."""
    it = aggregation()
    it.apply(divided(1, 10.0))
    it.apply(captured(1, {0: row(50.0)}))
    it.apply(divided(1, 20.0))
    it.apply(captured(1, {0: row(80.0)}))
    it.apply(divided(1, 40.0))
    it.apply(closed(1))
    assert one(it.snapshot(NOW), "norm") == 2


@pytest.mark.parametrize("divisor", [0.0, -2.0, NAN, INF])
def test_a_divisor_that_is_none_divides_nothing(divisor: float) -> None:
    """As one that came from a device, and so was not seen before."""
    it = aggregation()
    it.apply(captured(1, {0: row(6.0)}))
    it.apply(Divided(1, Arrived(np.array([divisor]))))
    it.apply(closed(1))
    assert one(it.snapshot(NOW), "norm") == 6


def test_a_sample_whose_divisor_was_told_of_another_round_has_no_sizes() -> None:
    """Of a skipped step the loop tells the next divisor before the next backward, when the round is not known to be over.

    Neither the one sample nor the other is shown with a divisor that may not be its own; those after them are right.
    """
    it = aggregation()
    it.apply(divided(1, 10.0))
    it.apply(captured(1, {0: row(50.0), 1: row(NAN, nans=1)}))
    it.apply(divided(1, 20.0))
    it.apply(closed(1, Outcome.SKIPPED))
    assert [shown(it.snapshot(NOW), "a", n) for n in ("sized", "nans", "captures")] == [0, 1, 1]
    it.apply(captured(2, {0: row(80.0)}))
    it.apply(closed(2))
    snapshot = it.snapshot(NOW)
    assert [shown(snapshot, "a", n) for n in ("sized", "captures", "bucket_sum")] == [0, 2, 0]
    it.apply(divided(3, 5.0))
    it.apply(captured(3, {0: row(10.0)}))
    it.apply(closed(3))
    assert [shown(it.snapshot(NOW), "a", n) for n in ("norm", "bucket_sum")] == [2, 2]


def test_a_loop_that_tells_no_divisor_any_more() -> None:
    """After eight samples without one there is none, and sizes are there again."""
    it = aggregation()
    it.apply(divided(1, 10.0))
    found = [bool(shown(train(it, [{0: row(3.0)}], first=number), "a", "sized")) for number in range(1, 12)]
    assert found == [True] + [False] * 7 + [True] * 3


def test_what_was_read_at_the_step_is_divided_already() -> None:
    """Where no backward is seen gradients are read when the loop has divided them."""
    it = aggregation()
    it.apply(divided(1, 10.0))
    it.apply(dataclasses.replace(captured(1, {0: row(3.0)}), at_step=True))
    it.apply(divided(1, 10.0))
    it.apply(closed(1))
    assert one(it.snapshot(NOW), "norm") == 3


def test_a_norm_that_is_given_before_the_step_shows_the_divisor() -> None:
    """`observe(grad_norm=)` between backward and step: layers are those after the division, as the norm is."""
    it = aggregation()
    for number in range(1, 4):
        it.apply(captured(number, {0: row(300.0 * number), 2: row(400.0 * number)}))
        it.observe_norm(5.0)
        it.apply(after(number, {0: 3.0, 2: 4.0}))
        it.apply(closed(number))
        snapshot = it.snapshot(NOW)
        assert [shown(snapshot, layer, "norm") for layer in "ab"] == pytest.approx([3, 4])
        assert [one(snapshot, n) for n in ("coefficient", "after_clip", "clipped")] == pytest.approx([1, 5, 0])


def test_a_norm_that_is_given_among_two_optimizers_divides_nothing() -> None:
    """Whose norm it is cannot be known, though one of them may step alone."""
    it = aggregation()
    owners = (0, 0, 1)
    it.apply(captured(1, {0: row(300.0), 2: row(400.0)}, owners=owners))
    it.observe_norm(5.0)
    it.apply(after(1, {0: 5.0}))
    it.apply(closed(1, owners=owners))
    snapshot = it.snapshot(NOW)
    assert (shown(snapshot, "a", "norm"), one(snapshot, "clip_known")) == (300, 0)


def test_a_norm_that_is_given_after_the_step_is_none_of_the_next() -> None:
    """It belongs to what was stepped on."""
    it = aggregation()
    it.apply(captured(1, {0: row(3.0)}))
    it.apply(after(1, {0: 3.0}))
    it.apply(closed(1))
    it.observe_norm(1.0)
    it.apply(captured(2, {0: row(300.0)}))
    it.apply(after(2, {0: 1.0}))
    it.apply(closed(2))
    assert shown(it.snapshot(NOW), "a", "norm") == 300


# A norm that the user gave


def test_an_observed_norm_takes_over() -> None:
    """From the first observed norm on, the global norm and its histogram come from there only, and start anew."""
    it = aggregation()
    train(it, [{0: row(1.0)}])
    for norm in (20.0, NAN, 30.0):
        it.observe_norm(norm)
    snapshot = train(it, [{0: row(5.0)}], first=2)
    assert (one(snapshot, "norm"), one(snapshot, "bucket_sum"), snapshot.totals["buckets"][0].sum()) == (30, 50, 2)
    assert (shown(snapshot, "a", "norm"), shown(snapshot, "a", "bucket_sum"), one(snapshot, "sample_step")) == (5, 6, 2)


def test_an_observed_norm_has_a_baseline_of_its_own() -> None:
    """Observed norms are not judged against captured ones, which may be scaled otherwise."""
    it = aggregation()
    train(it, [{0: row(1.0)}] * 40)
    it.observe_norm(100.0)
    assert one(it.snapshot(NOW), "spikes") == 0


def test_an_observed_norm_before_any_sample() -> None:
    """A norm may be observed before there is an optimizer; it stands in the first one's row."""
    it = aggregation()
    it.observe_norm(2.0)
    snapshot = train(it, [{0: row(5.0)}])
    assert (snapshot.optimizers, one(snapshot, "norm"), one(snapshot, "bucket_sum")) == ((0,), 2, 2)


def test_an_observed_norm_among_two_optimizers_is_of_neither() -> None:
    """With two optimizers it is not known whose norm it is, and the captured ones stay."""
    it = aggregation()
    it.apply(captured(1, {0: row(1.0), 2: row(2.0)}, owners=(0, 0, 1)))
    it.apply(closed(1, owners=(0, 0, 1), stepped=(0, 1)))
    it.observe_norm(50.0)
    assert [one(it.snapshot(NOW), "norm", o) for o in (0, 1)] == [1, 2]


def test_a_norm_that_was_observed_before_the_second_optimizer_came_is_of_neither() -> None:
    """As soon as a second optimizer is there the captured norms are shown, all of them, from the first on."""
    it = aggregation()
    owners = (0, 0, 1)
    for number, (stepped, norm) in enumerate([((0,), 9.0), ((1,), 8.0), ((0,), 7.0), ((1,), 6.0)], 1):
        it.observe_norm(norm)
        it.apply(captured(number, {0: row(float(number)), 2: row(10.0 * number)}, owners=owners))
        it.apply(closed(number, owners=owners, stepped=stepped))
        if number == 1:
            assert (one(it.snapshot(NOW), "norm"), it.snapshot(NOW).norm_observed) == (9, True)
    snapshot = it.snapshot(NOW)
    assert [one(snapshot, "norm", o) for o in (0, 1)] == [3, 40]
    assert [one(snapshot, "bucket_sum", o) for o in (0, 1)] == [4, 60]
    assert not snapshot.norm_observed


def test_an_observed_spike_is_counted() -> None:
    """An observed norm of 100 times the usual one is a spike of the whole."""
    it = aggregation()
    for norm in [1.0, 1.1] * 15 + [100.0, 1.0]:
        it.observe_norm(norm)
    assert one(it.snapshot(NOW), "spikes", UNOWNED) == 1


def test_weights_around_a_step_that_began_before_its_sample_change_no_table() -> None:
    """A closure thaws a layer: the norms of weights from before it are entered by name, and the sample's layers stay."""
    module = model()
    module["a"].requires_grad_(False)
    index = LayerIndex({"": module})
    early = index.table
    module["a"].requires_grad_(True)
    now = index.refresh()
    it = aggregation(early)
    it.apply(captured(1, {position: row(2.0) for position in range(len(now.tracked))}, table=now, owners=[0] * len(now.tracked)))
    it.apply(closed(1, owners=[0] * len(now.tracked)))
    it.apply(Weights(early, np.array([0]), Arrived(np.array([3.0, 4.0, 1.5]))))
    snapshot = it.snapshot(NOW)
    assert snapshot.table is now
    assert (shown(snapshot, "b", "weight_norm"), shown(snapshot, "b", "update_ratio")) == (4, 0.5)
    assert (shown(snapshot, "a", "read"), math.isnan(shown(snapshot, "a", "weight_norm"))) == (True, True)
