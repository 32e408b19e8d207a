"""Several consumers of what is new, each at its own pace: all see everything once, and none takes anything from another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.test_gradients import NAN, NOW, PLAN, captured, closed, row
from tests.support.properties import no_timeout_in_a_soak
from torch_grad_exporter.aggregation.cursor import Peaks
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import HostSide, Reading
from torch_grad_exporter.collectors.gradients import GradientCollector
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.live.history import History, Moment, Window
from torch_grad_exporter.outputs.live.recorder import Moments
from torch_grad_exporter.outputs.live.rows import SCALARS
from torch_grad_exporter.outputs.otlp.delta import Deltas
from torch_grad_exporter.transfer.events import Mailbox, Observed

pytestmark = no_timeout_in_a_soak

ACTIONS = st.lists(st.one_of(st.integers(0, 2), st.floats(1e-300, 1e300)), max_size=60)
"""What happens: a sample of this norm and loss, or a read of the consumer of this number."""


class Scene:
    """A host side without a thread, and samples by hand."""

    def __init__(self) -> None:
        self.post, self.errors = Mailbox(), ErrorLog(("worker",))
        gradients = GradientAggregation()
        gradients.use(PLAN)
        self.host = HostSide(self.post, gradients, TrainingTotals(), self.errors, now=lambda: NOW)
        self.samples = 0

    def sample(self, norm: float) -> None:
        """A sample of layer `b` alone, and the loss of its step."""
        self.samples += 1
        self.post.append(captured(self.samples, {2: row(norm)}))
        self.post.append(closed(self.samples))
        self.post.append(Observed("loss", norm))


def seen(reading: Reading) -> tuple[int, int, float, float, float]:
    """What is new: samples, losses and their mean, the largest norm of layer `b` and over all layers."""
    gradients, losses = reading.gradients, reading.losses
    mean = losses.mean if losses.count else NAN
    over_all = float(np.fmax.reduce(gradients.peaks_of_totals[0], initial=NAN))
    return gradients.samples, losses.count, mean, float(gradients.peaks[0, 1]), over_all


def expected(norms: Iterable[float]) -> tuple[object, ...]:
    """The same of norms."""
    found = np.array(list(norms))
    largest = found.max() if len(found) else NAN
    mean = float(np.mean(found / 1e300)) * 1e300 if len(found) else NAN
    return len(found), len(found), *(pytest.approx(one, nan_ok=True) for one in (mean, largest, largest))


@given(ACTIONS)
def test_three_consumers_see_everything_once(actions: list[int | float]) -> None:
    """In whatever order samples come and three consumers read, each read has exactly what came since that consumer's last one."""
    scene = Scene()
    cursors, unread = [scene.host.cursor() for _ in range(3)], [[], [], []]
    for action in [*actions, 0, 1, 2]:
        if isinstance(action, int):
            assert seen(scene.host.read(cursors[action])) == expected(unread[action])
            unread[action] = []
        else:
            scene.sample(action)
            unread = [[*norms, action] for norms in unread]
    assert scene.errors.counts() == {"worker": 0}


def test_history_push_and_page_side_by_side() -> None:
    """A history at every third sample, a push of differences at every seventh, a page at every one: each is right."""
    scene, generator = Scene(), np.random.default_rng(5)
    norms = np.exp(generator.normal(0, 2, 210))
    moments, of_history, of_page = Moments(dead_from=1), scene.host.cursor(), scene.host.cursor()
    last: list[Moment] = []

    def moment() -> Moment:
        last.append(moments.of(scene.host.read(of_history), scene.samples))
        return last[-1]

    clock = iter(range(10_000))
    history = History(moment, now=lambda: float(next(clock)))
    collector = GradientCollector(lambda: scene.host.snapshot().gradients, ["sgd"], dead_window=20)
    deltas, pushed, paged = Deltas((Kind.COUNTER, Kind.HISTOGRAM), began=0), [], []
    for number, norm in enumerate(norms.tolist(), 1):
        scene.sample(norm)
        paged.append(scene.host.read(of_page).gradients.samples)
        if number % 3 == 0:
            history.record_if_due()
        if number % 7 == 0:
            found = {family.spec.name: family for family in deltas.of(collector.collect(), at=number)}
            for family in found.values():
                deltas.arrived(family, slice(0, len(family.row_numbers)))
            pushed.append(float(found["torch_grad_captures_total"].values[1]))
    assert history.grid("norm", Window(whole=False))[1].values[:, 1] == pytest.approx(norms.reshape(-1, 3).max(axis=1), rel=1e-6)
    losses = [float(one.scalars[SCALARS.index("loss")]) for one in last]
    assert losses == pytest.approx(norms.reshape(-1, 3).mean(axis=1), rel=1e-6)
    assert pushed == [7.0] * 30
    assert paged == [1] * 210


def test_a_consumer_that_stays_away_keeps_others_and_memory_as_they_are() -> None:
    """Beside one that reads each of 500 samples, one that reads at the end gets the largest of all, and holds little."""
    scene = Scene()
    often, seldom = scene.host.cursor(), scene.host.cursor()
    norms = np.exp(np.random.default_rng(6).normal(0, 2, 500))
    for norm in norms.tolist():
        scene.sample(norm)
        assert seen(scene.host.read(often)) == expected([norm])
    assert [cursor.layers._values.shape for cursor in (often, seldom)] == [(2, 2)] * 2
    assert seen(scene.host.read(seldom)) == expected(norms)


def test_a_cursor_begins_where_it_is_made() -> None:
    """What came before is not new to it, but to those that were there."""
    scene = Scene()
    early = scene.host.cursor()
    scene.sample(9.0)
    late = scene.host.cursor()
    scene.sample(2.0)
    assert [seen(scene.host.read(one)) for one in (late, early)] == [expected([2.0]), expected([9.0, 2.0])]


def test_a_dropped_cursor_is_forgotten() -> None:
    """Nothing is kept for a consumer that is gone, and the others go on."""
    scene = Scene()
    kept, dropped = scene.host.cursor(), weakref.ref(scene.host.cursor())
    gc.collect()
    assert dropped() is None
    scene.sample(3.0)
    assert seen(scene.host.read(kept)) == expected([3.0])


def test_a_read_that_comes_too_late_takes_nothing() -> None:
    """Where a drain is under way a read raises, and what was new is new to the next one."""
    scene = Scene()
    cursor = scene.host.cursor()
    scene.sample(3.0)
    with scene.host._held(), pytest.raises(TimeoutError):
        scene.host.read(cursor)
    assert seen(scene.host.read(cursor)) == expected([3.0])


def test_rows_that_move_keep_their_peaks_and_new_ones_are_empty() -> None:
    """Rows change places, one goes and one is new; a read empties all, and what is not finite is no peak."""
    peaks = Peaks(3)
    peaks.enter([0, 1], np.array([1.0, -5.0]), np.array([2.0, NAN]))
    peaks.enter([1, 2], np.array([4.0, 3.0]), np.array([-1.0, np.inf]))
    peaks = peaks.moved(np.array([2, -1, 1]))
    assert np.array_equal(peaks.take(), [[3, NAN, -5], [NAN, NAN, -1]], equal_nan=True)
    peaks.enter([1], np.array([7.0]), np.array([NAN]))
    assert np.array_equal(peaks.take(), [[NAN, 7, NAN], [NAN] * 3], equal_nan=True)
