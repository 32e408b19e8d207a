"""The host side: what is applied when, and what a failure costs."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time

import numpy as np
import pytest
import torch

from tests.support.tools import FOREVER, eventually
from torch_grad_exporter.aggregation import worker as host
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import (
    BACKLOG,
    HURRIED_FOR,
    HURRIED_SECONDS,
    IDLE_SECONDS,
    LOST_SECONDS,
    POLL_SECONDS,
    WAIT_SECONDS,
    HostSide,
)
from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.layout import NORMS, ORDINARY, Packing
from torch_grad_exporter.transfer.events import (
    ROOM,
    AfterClip,
    Captured,
    Closed,
    Mailbox,
    Observed,
    Outcome,
    Part,
    Stepped,
    Weights,
)
from torch_grad_exporter.transfer.transfer import Arrived

MODEL = torch.nn.Linear(2, 2, bias=False)
PLAN = LayerIndex({"": MODEL}).table
NOW = 1_800_000_000.0
OWNED = np.zeros(1, dtype=np.int64)


class Late:
    """A vector that arrives when the test says so."""

    def __init__(self, *values: float) -> None:
        self._values = np.array(values)
        self.arrived = False

    def ready(self) -> np.ndarray | None:
        return self._values if self.arrived else None


class Broken:
    """A ticket that cannot be read."""

    def ready(self) -> np.ndarray:
        raise RuntimeError("no such buffer")


class Records(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Scene:
    """A host side without a thread, unless it is started, and the mailbox that feeds it."""

    def __init__(self) -> None:
        self.post: Mailbox = Mailbox()
        self.records = Records()
        log = logging.Logger("test")  # noqa: LOG001 - one of its own, not of the process
        log.addHandler(self.records)
        self.errors = ErrorLog(("worker",), log)
        self.time = NOW
        gradients = GradientAggregation()
        gradients.use(PLAN)
        self.host = HostSide(self.post, gradients, TrainingTotals(), self.errors, now=lambda: self.time)

    def capture(self, number: int, norm: float = 1.0, ticket: Late | None = None, *, nans: float = 0.0) -> Late | None:
        """A capture and the end of its round."""
        values = [norm] + [0.0] * (len(Column) - 1)
        values[Column.NANS] = nans
        arrived = ticket or Arrived(np.array(values))
        part = Part(np.zeros(1, dtype=np.int64), np.array([4]), np.array([2]), arrived, Packing(ORDINARY))
        self.post.append(
            Captured(number, PLAN, (part,), np.zeros(0, dtype=np.int64), OWNED, self.time, likely_last=True, usual=frozenset())
        )
        self.post.append(Closed(number, Outcome.STEPPED, OWNED, frozenset({0}), {0: number}))
        return ticket

    def norm(self) -> float:
        return float(self.host.snapshot().gradients.layer_values["norm"][0])

    def samples(self) -> int:
        return self.host.snapshot().gradients.samples


def late(norm: float) -> Late:
    """A measurement of one parameter that is still under way."""
    return Late(norm, *[0.0] * (len(Column) - 1))


def test_each_record_without_room_is_counted() -> None:
    """Three records more than the mailbox takes, and two more later, are five failures of the worker."""
    scene = Scene()
    for more, failures in ((3, 3), (2, 5)):
        for _ in range(ROOM + more):
            scene.post.append(Stepped(1.0, 0.0))
        scene.host.drain()
        assert scene.errors.counts() == {"worker": failures}
    assert scene.host.snapshot().totals.duration_sum == 2 * ROOM


def test_a_snapshot_has_everything_that_was_posted_before_it() -> None:
    """A scrape drains the mailbox first, so it shows the last event without any thread running."""
    scene = Scene()
    scene.capture(1, 3.0)
    scene.post.append(Stepped(0.5, 0.01))
    scene.post.append(Observed("loss", 2.5))
    snapshot = scene.host.snapshot()
    assert (snapshot.gradients.samples, float(snapshot.gradients.layer_values["norm"][0])) == (1, 3)
    assert (snapshot.totals.duration_sum, snapshot.totals.overhead_seconds, snapshot.totals.last) == (0.5, 0.01, {"loss": 2.5})
    assert not scene.post


def test_gradient_events_wait_for_their_vectors_in_their_order() -> None:
    """A capture whose vector is under way holds back those behind it, until it has arrived."""
    scene = Scene()
    first = scene.capture(1, ticket=late(5.0))
    scene.capture(2, 7.0)
    assert (scene.samples(), scene.errors.counts()) == (0, {"worker": 0})
    assert first is not None
    first.arrived = True
    assert (scene.samples(), scene.norm()) == (2, 7)


def test_what_is_counted_every_step_waits_for_no_vector() -> None:
    """Steps and observed numbers are counted while a gradient is still under way."""
    scene = Scene()
    scene.capture(1, ticket=late(5.0))
    for _ in range(3):
        scene.post.append(Stepped(0.25, 0.0))
    scene.post.append(Observed("tokens", 100.0))
    snapshot = scene.host.snapshot()
    assert (snapshot.gradients.samples, snapshot.totals.duration_sum, snapshot.totals.sums) == (0, 0.75, {"tokens": 100})


def test_observed_values_keep_their_order() -> None:
    """A loss that arrives late is not overtaken by the next one."""
    scene = Scene()
    first = Late(1.0)
    scene.post.append(Observed("loss", first))
    scene.post.append(Observed("loss", 2.0))
    assert scene.host.snapshot().totals.last == {}
    first.arrived = True
    assert scene.host.snapshot().totals.last == {"loss": 2}


def test_an_observed_norm_goes_to_the_gradients() -> None:
    """The name `grad_norm` is the global norm, not a training value."""
    scene = Scene()
    scene.post.append(Observed("grad_norm", Arrived(np.array([4.0]))))
    snapshot = scene.host.snapshot()
    assert snapshot.gradients.totals["norm"].tolist() == [4]
    assert snapshot.totals.last == {}


def test_weights_and_scales_are_waited_for_too() -> None:
    """Norms of weights, and a loss scale that travels on its own, hold back what comes after them."""
    scene = Scene()
    weights, scale = Late(1.0, 2.0, 0.5), Late(2.0)
    scene.post.append(Weights(PLAN, np.zeros(1, dtype=np.int64), weights))
    part = Part(np.zeros(1, dtype=np.int64), np.array([4]), np.array([2]), Arrived(np.array([8.0] + [0.0] * 8)), Packing(ORDINARY))
    scene.post.append(
        Captured(1, PLAN, (part,), np.zeros(0, dtype=np.int64), OWNED, NOW, likely_last=True, usual=frozenset(), scale=scale)
    )
    scene.post.append(Closed(1, Outcome.STEPPED, OWNED, frozenset({0}), {0: 1}))
    assert np.isnan(scene.host.snapshot().gradients.layer_values["update_ratio"][0])
    weights.arrived = True
    assert scene.samples() == 0
    assert scene.errors.counts() == {"worker": 0}
    scale.arrived = True
    assert (scene.samples(), scene.norm()) == (1, 4)
    assert float(scene.host.snapshot().gradients.layer_values["update_ratio"][0]) == 0.5


def test_a_vector_that_never_arrives_is_given_up() -> None:
    """After a minute a lost capture is counted as undelivered and the events behind it go on."""
    scene = Scene()
    scene.capture(1, ticket=late(5.0))
    scene.post.append(Observed("loss", Late(1.0)))
    scene.capture(2, 7.0)
    scene.post.append(Observed("loss", 3.0))
    scene.host.drain()
    scene.time = NOW + LOST_SECONDS - 1
    assert scene.samples() == 0
    scene.time = NOW + LOST_SECONDS + 1
    snapshot = scene.host.snapshot()
    assert (snapshot.gradients.undelivered, snapshot.gradients.samples, scene.norm()) == (1, 1, 7)
    assert snapshot.totals.last == {"loss": 3}


def test_a_sample_whose_outcome_is_under_way_is_not_given_up() -> None:
    """On a slow device the outcome waits behind a vector for longer than the patience; it is counted, not "unknown"."""
    scene = Scene()
    values = np.zeros(len(Column))
    values[[Column.NORM, Column.NANS]] = (float("nan"), 1)
    measured = Late(*values)
    measured.arrived = True
    scene.capture(1, ticket=measured)
    closed = scene.post.pop()
    probe = Late(1.0)
    part = Part(np.zeros(1, dtype=np.int64), np.array([4]), np.array([2]), probe, Packing(NORMS))
    scene.post.extend((AfterClip(1, 0, (part,)), closed))
    scene.host.drain()
    scene.time = NOW + 5
    assert scene.samples() == 0
    probe.arrived = True
    totals = scene.host.snapshot().gradients.totals[0]
    assert (totals["nonfinite_stepped"], totals["nonfinite_unknown"]) == (1, 0)


def test_a_pending_sample_is_counted_without_a_scrape() -> None:
    """A drain alone counts what is not finite of a sample that has been pending for more than a second."""
    scene = Scene()
    scene.capture(1, math.nan, nans=1.0)
    scene.post.pop()  # the round is never closed
    scene.host.drain()
    assert scene.samples() == 0
    scene.time = NOW + 1.5
    scene.host.drain()
    scene.time = NOW
    assert scene.samples() == 1


def test_an_event_that_fails_costs_only_itself() -> None:
    """Events that cannot be applied are counted each, logged once, and those behind them are applied."""
    scene = Scene()
    for number in (1, 2, 3):
        scene.post.append(Weights(PLAN, np.zeros(1, dtype=np.int64), Arrived(np.zeros(4))))  # not a multiple of three
        scene.capture(number, float(number))
    assert (scene.samples(), scene.norm()) == (3, 3)
    assert scene.errors.counts() == {"worker": 3}
    assert len(scene.records.messages) == 1


@pytest.mark.parametrize("ticket", [Arrived(np.zeros(0)), Broken()], ids=["empty", "broken"])
def test_an_observed_value_that_fails_costs_only_itself(ticket: Arrived | Broken) -> None:
    """An observed tensor without elements, or one that cannot be read, does not stop the scrapes or what is behind it."""
    scene = Scene()
    scene.post.append(Observed("loss", ticket))
    scene.post.append(Observed("loss", 2.0))
    scene.capture(1, 3.0)
    drain = scene.errors.boundary("worker")
    for _ in range(LIMIT + 1):
        drain(scene.host.drain)
    assert scene.host.snapshot().totals.last == {"loss": 2}
    assert scene.norm() == 3
    assert scene.errors.counts()["worker"] <= 1


def test_a_ticket_that_cannot_be_read_costs_only_its_event() -> None:
    """A capture whose buffer raises when it is looked at does not hold back the others for ever."""
    scene = Scene()
    scene.post.append(Weights(PLAN, np.zeros(1, dtype=np.int64), Broken()))
    scene.capture(1, 3.0)
    drain = scene.errors.boundary("worker")
    for _ in range(2):
        drain(scene.host.drain)
    assert scene.norm() == 3


def test_the_worker_drains_by_itself() -> None:
    """With the thread running, events are applied without a scrape, also after some that failed."""
    scene = Scene()
    scene.host.start()
    try:
        scene.post.append(Weights(PLAN, np.zeros(1, dtype=np.int64), Arrived(np.zeros(4))))
        scene.post.append(Stepped(0.25, 0.0))
        assert eventually(lambda: not scene.post)
        ticket = scene.capture(1, ticket=late(5.0))
        assert eventually(lambda: not scene.post)
        assert ticket is not None
        ticket.arrived = True
        assert eventually(lambda: not scene.host._waiting)
    finally:
        scene.host.close()
    assert (scene.samples(), scene.norm(), scene.errors.counts()) == (1, 5, {"worker": 1})


class Resting:
    """A host side whose thread is only asked how long it would wait, by a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, hurried: bool = False) -> None:
        self.post, self.seconds, self.due, self.drains = Mailbox(), 0.0, 5.0, 0
        gradients = GradientAggregation()
        gradients.use(PLAN)
        self.side = HostSide(
            self.post, gradients, TrainingTotals(), ErrorLog(("worker",)),
            now=lambda: NOW + self.seconds, clock=lambda: self.seconds, periodic=lambda: self.due, hurried=lambda: hurried,
        )  # fmt: skip
        drain = self.side.drain
        monkeypatch.setattr(self.side, "drain", lambda: (drain(), setattr(self, "drains", self.drains + 1)))

    def turns(self, times: int) -> list[float]:
        """The pauses before so many iterations."""
        found = []
        for _ in range(times):
            found.append(self.side._pause())
            self.seconds += found[-1]
            self.side._work()
            self.side._do_periodic()
        return found


def test_while_nothing_comes_the_worker_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up once a second, looks into the mailbox alone, and drains it when there is something."""
    rest = Resting(monkeypatch)
    assert (rest.turns(30), rest.drains) == ([IDLE_SECONDS] * 30, 0)
    for came in range(1, 4):
        rest.post.append(Stepped(0.25, 0.0))
        assert (rest.turns(10), rest.drains) == ([IDLE_SECONDS] * 10, came)
    assert rest.side.snapshot().totals.duration_sum == 0.75


def test_who_reads_each_second_spares_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the history does: what it takes in, the worker need not; once it reads no more, the worker drains within a second."""
    rest = Resting(monkeypatch)
    for _ in range(20):
        rest.post.append(Stepped(0.25, 0.0))
        rest.seconds += 0.4
        rest.side.snapshot()
        rest.post.append(Stepped(0.25, 0.0))
        rest.seconds += 0.6
        rest.side._work()
    assert (rest.drains, len(rest.post)) == (0, 1)
    rest.turns(1)
    assert (rest.drains, len(rest.post)) == (1, 0)


@pytest.mark.parametrize("why", ["backlog", "under way", "somebody waits", "a ring fills"])
def test_the_worker_is_not_spared_what_cannot_wait(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the mailbox was drained a moment ago."""
    rest = Resting(monkeypatch, hurried=why == "somebody waits")
    rest.side.snapshot()
    if why == "under way":
        rest.side._waiting.append((NOW, Closed(1, Outcome.STEPPED, OWNED, frozenset({0}), {0: 1})))
    for _ in range(BACKLOG if why == "backlog" else 1):
        rest.post.append(Stepped(0.25, 0.0))
    if why == "a ring fills":
        rest.post.press()
    rest.side._work()
    assert (rest.drains, len(rest.post)) == (1, 0)
    assert not rest.post.pressing


def test_a_sample_that_is_pending_is_counted_though_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker goes on draining until its time is up: a NaN before a hang shows without a scrape."""
    rest = Resting(monkeypatch)
    values = np.zeros(len(Column))
    values[Column.NANS] = 1
    part = Part(np.zeros(1, dtype=np.int64), np.array([4]), np.array([2]), Arrived(values), Packing(ORDINARY))
    rest.post.append(Captured(1, PLAN, (part,), np.zeros(0, dtype=np.int64), OWNED, NOW, likely_last=True, usual=frozenset()))
    rest.turns(1)
    before = rest.side.changes
    rest.turns(2)
    assert rest.side.changes == (before or 0) + 1
    assert rest.side._gradients.samples == 1


def test_the_worker_hurries_where_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times a second for ten seconds after an event, as the places for vectors are few; 5 ms while one is under way."""
    rest = Resting(monkeypatch, hurried=True)
    rest.turns(3)
    rest.post.append(Stepped(0.25, 0.0))
    rest.turns(1)
    hurried = round(HURRIED_FOR / HURRIED_SECONDS)
    pauses = rest.turns(hurried + 5)
    assert pauses[: hurried - 1] == [HURRIED_SECONDS] * (hurried - 1)
    assert pauses[-4:] == [IDLE_SECONDS] * 4
    rest.side._waiting.append((NOW, Closed(1, Outcome.STEPPED, OWNED, frozenset({0}), {0: 1})))
    assert rest.side._pause() == POLL_SECONDS


def test_what_is_due_earlier_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be done beside says when; where it fails, it is tried again in a second."""
    rest = Resting(monkeypatch)
    rest.due = 0.25
    assert rest.turns(3) == [IDLE_SECONDS, 0.25, 0.25]
    monkeypatch.setattr(rest.side, "_periodic", Broken().ready)
    with pytest.raises(RuntimeError):
        rest.turns(1)
    assert rest.side._pause() == IDLE_SECONDS


def test_many_events_wake_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of very short steps fills no mailbox in a second: a quarter of it, whenever it has come together, is taken at once."""
    monkeypatch.setattr(host, "IDLE_SECONDS", FOREVER)
    scene = Scene()
    scene.host.start()
    try:
        for _ in range(3):
            for _ in range(BACKLOG + 1):
                scene.post.append(Stepped(0.25, 0.0))
            assert eventually(lambda: not scene.post)
    finally:
        scene.host.close()
    assert scene.errors.counts() == {"worker": 0}


def test_what_is_read_late_has_its_own_time() -> None:
    """A sample that is drained some time after its capture is of the capture's time, and a step's duration of the step's."""
    scene, seen = Scene(), list[float]()
    cursor = scene.host.cursor(singles=9)
    scene.host.each_sample(cursor, lambda at, _reading: seen.append(at), 9)
    for number in (1, 2):
        scene.capture(number)
        scene.post.append(Stepped(0.25, 0.0, scene.time + 0.01, None, number))
        scene.time += 0.4
    found = scene.host.read(cursor)
    assert seen == [NOW, NOW + 0.4]
    assert [one.at for one in found.singles if one.name == "step_seconds"] == [NOW + 0.01, NOW + 0.4 + 0.01]


def test_closing_drains_and_ends_the_thread() -> None:
    """What was posted before close() is counted, the thread is gone, and closing again does nothing."""
    scene = Scene()
    before = threading.enumerate()
    scene.host.start()
    (worker,) = [t for t in threading.enumerate() if t.name == "torch-grad-exporter-worker" and t not in before]
    assert worker.daemon
    scene.capture(1, 3.0)
    scene.post.append(Stepped(0.25, 0.0))
    scene.host.close()
    assert not worker.is_alive()
    assert not scene.post
    scene.host.close()
    snapshot = scene.host.snapshot()
    assert (snapshot.gradients.samples, snapshot.totals.duration_sum) == (1, 0.25)


def test_a_handler_that_asks_amid_a_drain_does_not_wait_for_itself() -> None:
    """A signal's handler that wants the values while its own thread is reading them is refused; the reading goes on."""
    scene, refused = Scene(), []

    class Interrupting(Arrived):
        """A vector whose arrival is looked at when the signal comes."""

        def ready(self) -> np.ndarray:
            signal.raise_signal(signal.SIGALRM)
            return super().ready()

    def handler(*_: object) -> None:
        with pytest.raises(TimeoutError, match="handler") as error:
            scene.host.snapshot()
        refused.append(error)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        scene.capture(1, 3.0, Interrupting(np.array([3.0, *[0.0] * (len(Column) - 1)])))
        assert scene.norm() == 3
    finally:
        signal.signal(signal.SIGALRM, before)
    assert refused


def test_a_snapshot_does_not_wait_for_ever() -> None:
    """Where a drain on another thread hangs, a snapshot raises within the time."""
    scene, go = Scene(), threading.Event()

    class Hanging(Late):
        def ready(self) -> np.ndarray | None:
            go.wait(FOREVER)
            return super().ready()

    scene.capture(1, ticket=Hanging())
    thread = threading.Thread(target=scene.host.drain, daemon=True)
    thread.start()
    assert eventually(lambda: not scene.post)
    took: list[float] = []

    def is_bounded() -> bool:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="drain"):
            scene.host.snapshot()
        took.append(time.monotonic() - start)
        return took[-1] < WAIT_SECONDS + 1

    assert eventually(is_bounded)
    assert min(took) >= WAIT_SECONDS
    go.set()
    thread.join()


def test_many_threads_may_take_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes that run at the same time as the worker lose no event and count none twice."""
    for patience in ("WAIT_SECONDS", "CLOSE_SECONDS"):  # within which one of so many may not have its turn on a busy machine
        monkeypatch.setattr(host, patience, 60.0)
    scene = Scene()
    scene.host.start()
    stop = threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            scene.host.snapshot()

    threads = [threading.Thread(target=scrape, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 301):
        scene.capture(number)
        scene.post.append(Stepped(0.5, 0.0))
    stop.set()
    for thread in threads:
        thread.join()
    scene.host.close()
    snapshot = scene.host.snapshot()
    assert (snapshot.gradients.samples, snapshot.totals.duration_sum) == (300, 150)
    assert scene.errors.counts() == {"worker": 0}
