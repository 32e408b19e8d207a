"""What the history is given: all samples since the moment before, each once, and nothing that one rank cannot know."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.aggregation.test_gradients import NAN, NOW, PLAN, after, aggregation, captured, closed, row
from torch_grad_exporter.aggregation.cursor import Cursor, Losses
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import Reading, Snapshot
from torch_grad_exporter.collectors.clipping import GRAD_GLOBAL_NORM_AFTER_CLIP
from torch_grad_exporter.collectors.gradients import (
    GRAD_GLOBAL_NORM,
    GRAD_NORM,
    GRAD_SHARD_NORM,
    GradientCollector,
)
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.live.history import QUANTITIES, Moment
from torch_grad_exporter.outputs.live.recorder import Moments
from torch_grad_exporter.outputs.live.rows import SCALARS
from torch_grad_exporter.transfer.events import Observed, Outcome


class Run:
    """An aggregation and totals by hand, which the history's cursor reads now and then."""

    def __init__(self, it: GradientAggregation | None = None) -> None:
        self.gradients = it or aggregation()
        self.totals = TrainingTotals()
        self.moments, self.cursor = Moments(dead_from=1), Cursor()
        self.gradients.follow(self.cursor)
        self.totals.follow(self.cursor)
        self.numbers = itertools.count(1)

    def sample(
        self, *norms: float, outcome: Outcome = Outcome.STEPPED, clipped: float | None = None, loss: float | None = None
    ) -> None:
        """One sample of layer `a`, and of `b` if there are two norms; norms after clipping are so many times smaller."""
        number, places = next(self.numbers), (0, 2)[: len(norms)]
        self.gradients.apply(
            captured(number, {place: row(norm, nans=math.isnan(norm)) for place, norm in zip(places, norms, strict=True)})
        )
        if clipped is not None:
            norms_after = {place: norm / clipped for place, norm in zip(places, norms, strict=True)}
            self.gradients.apply(after(number, norms_after))
        self.gradients.apply(closed(number, outcome))
        if loss is not None:
            self.totals.observed(Observed("loss", loss, {}), loss)

    def look(self) -> Moment:
        return self.moments.of(self.read(self.cursor), 0)

    def read(self, cursor: Cursor) -> Reading:
        snapshot = Snapshot(self.gradients.snapshot(NOW), self.totals.snapshot())
        losses, cursor.losses = cursor.losses, Losses()
        return Reading(snapshot, self.gradients.read(cursor, snapshot.gradients), losses)


def of(moment: Moment, quantity: str) -> list[float]:
    """By layer; those that were not finite as infinity."""
    place = QUANTITIES.index(quantity)
    assert moment.nonfinite is not None
    return np.where(moment.nonfinite[:, place] & np.isnan(moment.values[:, place]), np.inf, moment.values[:, place]).tolist()


def scalar(moment: Moment, name: str) -> tuple[float, bool]:
    """A value of the run, and whether it was not finite."""
    assert moment.scalars_nonfinite is not None
    return float(moment.scalars[SCALARS.index(name)]), bool(moment.scalars_nonfinite[SCALARS.index(name)])


def test_a_moment_has_the_largest_of_all_samples_since_the_one_before() -> None:
    """Of 120 samples and looks at random moments among them: layers' and global norms by hand, the spikes' z-scores, each once."""
    generator, it = np.random.default_rng(3), Run()
    norms = np.exp(generator.normal(0.0, 0.1, (120, 2)))
    norms[50::20] *= 1000
    since = 0
    for number, (a, b) in enumerate(norms, 1):
        it.sample(a, b)
        if generator.random() < 0.2:
            window, moment = norms[since:number], it.look()
            since = number
            assert of(moment, "norm") == pytest.approx(window.max(axis=0))
            assert scalar(moment, "norm") == (pytest.approx(np.hypot(*window.T).max()), False)
            if window.max() > 100:
                assert min(of(moment, "zscore")) > 30
            elif number > 60:
                assert max(map(abs, of(moment, "zscore"))) < 10
    assert since > 100


def test_gradients_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no sample comes nothing of the layers is copied or gone through again, whoever asks; the moment is as if it were."""
    it, gone_through, copies = Run(), list[int](), list[int]()
    of_sample, copied = it.moments.of_sample, it.gradients._copied
    monkeypatch.setattr(it.moments, "of_sample", lambda *found: gone_through.append(1) or of_sample(*found))
    monkeypatch.setattr(it.gradients, "_copied", lambda: copies.append(1) or copied())
    for number in (1, 2):
        it.sample(3.0, math.nan)
        moments = [it.look() for _ in range(5)]
        it.gradients.snapshot(NOW)
        assert (len(gone_through), len(copies)) == (number, number)
        names = [("samples", moment.samples, "layers", moment.layers, moment.sample_step) for moment in moments]
        assert names == [names[0]] * 5
        assert (of(moments[0], "norm"), scalar(moments[0], "norm")[1]) == ([3.0, math.inf], True)
        for quiet in moments[1:]:
            assert np.isnan([of(quiet, quantity) for quantity in QUANTITIES]).all()
            assert scalar(quiet, "norm") == (pytest.approx(NAN, nan_ok=True), False)


def test_the_last_minute_goes_on_though_no_sample_comes() -> None:
    """Snapshots share what has not changed, but for the largest norms of a minute, which end with it; a reading has none."""
    it = Run()
    it.sample(3.0, 4.0)
    first, later = it.gradients.snapshot(NOW), it.gradients.snapshot(NOW + 3600)
    assert first.layer_values is later.layer_values
    assert first.recent_max.tolist() == [3.0, 4.0]
    assert np.isnan(later.recent_max).all()
    assert np.isnan(it.gradients.snapshot(NOW, of_minute=False).recent_max).all()


def test_what_is_of_samples_is_there_once() -> None:
    """After a sample the next moment has neither its norms nor its ratios, and a layer that was not in the sample none of them."""
    it = Run()
    it.sample(3.0, 4.0, clipped=2.0)
    first, second = it.look(), it.look()
    assert (scalar(first, "norm")[0], scalar(first, "norm_after_clip")[0], of(first, "zero_ratio")) == (5.0, 2.5, [0.0, 0.0])
    for name in ("norm", "norm_after_clip"):
        assert scalar(second, name) == (pytest.approx(NAN, nan_ok=True), False)
    for quantity in QUANTITIES:
        assert np.isnan(of(second, quantity)).all()
    it.sample(3.0)
    third = it.look()
    assert of(third, "norm") == [3.0, pytest.approx(NAN, nan_ok=True)]
    assert np.isnan(of(third, "zero_ratio")).tolist() == [False, True]
    assert scalar(third, "norm") == (3.0, False)


@pytest.mark.parametrize("outcome", [Outcome.STEPPED, Outcome.SKIPPED])
def test_what_is_not_finite_between_two_moments_marks_the_second(outcome: Outcome) -> None:
    """One sample and loss of NaN among good ones: the values are of the good ones, with a mark; the moment after has no mark."""
    it = Run()
    it.sample(1.0, 1.0, loss=0.5)
    it.look()
    for norm in (2.0, NAN, 1.0):
        it.sample(norm, 1.0, outcome=outcome if math.isnan(norm) else Outcome.STEPPED, loss=norm)
    marked, clean = it.look(), it.look()
    assert (scalar(marked, "loss"), scalar(marked, "norm")) == ((1.5, True), (pytest.approx(math.sqrt(5)), True))
    assert marked.nonfinite is not None
    assert (of(marked, "norm"), marked.nonfinite[:, 0].tolist()) == ([2.0, 1.0], [True, False])
    assert clean.nonfinite is not None
    assert not clean.nonfinite.any()
    assert (scalar(clean, "loss"), scalar(clean, "norm")[1]) == ((pytest.approx(NAN, nan_ok=True), False), False)


def test_a_loss_that_stays_nan_is_marked_when_it_is_told() -> None:
    """The last loss is NaN: one moment says so, and the next ones have no value instead of saying it again."""
    it = Run()
    it.sample(1.0, loss=NAN)
    assert [scalar(it.look(), "loss") for _ in range(2)] == [(pytest.approx(NAN, nan_ok=True), flag) for flag in (True, False)]


def test_the_loss_is_the_mean_since_the_last_moment() -> None:
    """Of all steps between, so that one of many shows; losses that add up to more than a float holds have a mean, too."""
    it = Run()
    for losses, mean in (([0.5, 0.25, 3.0], 1.25), ([1.5e308, 1.7e308], 3.4028234663852886e38), ([2.0], 2.0)):
        for loss in losses:
            it.sample(1.0, loss=loss)
        assert scalar(it.look(), "loss") == (pytest.approx(mean), False)


def test_the_step_is_that_of_the_last_sample() -> None:
    """Not the step at which the moment is read."""
    it = Run()
    it.sample(1.0)
    assert it.look().sample_step == 1
    assert Run().look().sample_step is None


def present(families: Iterator[Family], *names: str) -> dict[str, set[str]]:
    """The first label of the rows that metrics have."""
    found = {family.spec.name: {family.labels.rows[at][0] for at in family.row_numbers} for family in families}
    return {name: found[name] for name in names}


@pytest.mark.parametrize("sharded", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("observed", [False, True])
def test_of_a_sharded_gradient_there_is_no_norm_that_metrics_do_not_have(sharded: tuple[bool, bool], *, observed: bool) -> None:
    """The run's norms are there where `/metrics` has them, and layers whose metric is that of a shard are named so."""
    it = Run(aggregation(replace(PLAN, sharded=np.array(sharded))))
    number = next(it.numbers)
    it.gradients.apply(captured(number, {0: row(3.0), 2: row(4.0)}, table=it.gradients.snapshot(NOW).table))
    it.gradients.apply(after(number, {0: 1.5, 2: 2.0}))
    it.gradients.apply(closed(number))
    if observed:
        it.gradients.observe_norm(7.0)
    moment = it.look()
    collector = GradientCollector(lambda: it.gradients.snapshot(NOW), ["sgd"], dead_window=20)
    specs = (GRAD_GLOBAL_NORM, GRAD_GLOBAL_NORM_AFTER_CLIP, GRAD_NORM, GRAD_SHARD_NORM)
    whole, clipped, norms, shards = present(collector.collect(), *(spec.name for spec in specs)).values()
    assert (bool(whole), bool(clipped)) == (observed or not any(sharded),) * 2
    assert [math.isfinite(scalar(moment, name)[0]) for name in ("norm", "norm_after_clip")] == [bool(whole), bool(clipped)]
    assert (set(moment.sharded), set(moment.layers) - moment.sharded) == (shards, norms)
    assert not whole or scalar(moment, "norm")[0] == (7.0 if observed else 5.0)
    assert of(moment, "norm") == [3.0, 4.0]


def test_of_a_sharded_gradient_the_whole_is_not_marked() -> None:
    """A NaN in this rank's part marks the layer; the run has no norm that could be marked."""
    it = Run(aggregation(replace(PLAN, sharded=np.array([True, True]))))
    number = next(it.numbers)
    it.gradients.apply(captured(number, {0: row(NAN, nans=1)}, table=it.gradients.snapshot(NOW).table))
    it.gradients.apply(closed(number))
    moment = it.look()
    assert (scalar(moment, "norm")[1], of(moment, "norm")[0]) == (False, math.inf)


def test_what_others_read_takes_nothing_from_the_history() -> None:
    """Scrapes, and reads of another consumer, between two reads of the history leave the largest norm and the losses to it."""
    it, other = Run(), Cursor()
    it.gradients.follow(other)
    it.totals.follow(other)
    it.sample(9.0, loss=1.0)
    it.sample(1.0, loss=2.0)
    found = []
    for _ in range(3):
        it.gradients.snapshot(NOW)
        found.append(it.read(other))
    assert [one.gradients.peaks[0, 0] for one in found] == [9.0, pytest.approx(NAN, nan_ok=True), pytest.approx(NAN, nan_ok=True)]
    assert [(one.gradients.samples, one.losses.count, one.losses.mean) for one in found] == [(2, 2, 1.5), (0, 0, 0.0), (0, 0, 0.0)]
    moment = it.look()
    assert (of(moment, "norm")[0], scalar(moment, "loss")) == (9.0, (1.5, False))


def test_a_consumer_that_begins_takes_nothing_from_the_others() -> None:
    """What came before it began is still new to the history, and nothing of that is new to it."""
    it, other = Run(), Cursor()
    it.sample(9.0, loss=1.0)
    it.gradients.follow(other)
    it.totals.follow(other)
    it.sample(1.0, loss=2.0)
    found = it.read(other)
    assert (found.gradients.samples, found.gradients.peaks[0, 0], found.losses.mean) == (1, 1.0, 2.0)
    found = it.read(it.cursor)
    assert (found.gradients.samples, found.gradients.peaks[0, 0], found.losses.mean) == (2, 9.0, 1.5)
    assert found.gradients.peaks_of_totals[0, 0] == 9.0


def test_norms_that_32_bits_cannot_hold_stay_numbers() -> None:
    """A finite norm of 1e39 is the largest number there is, and not infinity."""
    it = Run()
    it.sample(1e39)
    assert of(it.look(), "norm")[0] == pytest.approx(3.4e38, rel=0.01)
