"""Durations of steps that are only counted: each snapshot has all up to then, and none twice, whatever falls in between."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.test_gradients import PLAN
from tests.support.properties import no_timeout_in_a_soak
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.totals import TotalsSnapshot, TrainingTotals
from torch_grad_exporter.aggregation.worker import HostSide
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.transfer.events import Counted, Counting, Event, Mailbox

pytestmark = no_timeout_in_a_soak

ONE = 0

Action = Callable[[], object]


IDLE: tuple[Action, Action] = (lambda: None, lambda: None)


class Post(Mailbox):
    """A mailbox that lets something happen right before and after each record, and may lose those of counted rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Action = lambda: None
        self.loses = False

    def append(self, event: Event) -> None:
        """Takes a record."""
        self.between()
        if not (self.loses and isinstance(event, Counted)):
            super().append(event)
        self.between()


def host_side(post: Mailbox, errors: ErrorLog, counting: Callable[[], Counting | None]) -> HostSide:
    """One without a thread."""
    gradients = GradientAggregation()
    gradients.use(PLAN)
    return HostSide(post, gradients, TrainingTotals(), errors, now=lambda: 0.0, counting=counting)


class Training:
    """Steps of 1, 2, 4, ... quarters of a second, of which some are only counted, and a host side without a thread."""

    def __init__(self) -> None:
        self.post, self.time = Post(), 0.0
        self.clock = StepClock(self.post, clock=lambda: self.time, now=lambda: self.time)
        self.errors = ErrorLog(("worker",))
        self.host = host_side(self.post, self.errors, self._counting)
        self.looking = False
        self.meanwhile: tuple[Action, Action] = IDLE
        self.moments: list[float] = []
        self.durations: list[float] = []
        self.over = 0
        self.counts = [0]

    def _counting(self) -> Counting | None:
        first, then = self.meanwhile
        first()
        found = self.clock.counting()
        then()
        return found

    def _wait(self) -> None:
        seconds = 0.25 * 2 ** (len(self.durations) % 5)
        self.time += seconds
        self.durations.append(seconds)

    def step(self, *, first: bool = False) -> None:
        """A step that is followed."""
        if not first:
            self._wait()
        self.clock.step_done(ONE)
        self.clock.step_ended(first_of_round=True)
        self.over = len(self.durations)

    def begin(self) -> None:
        """From here on steps are only counted."""
        self.moments = []
        self.clock.leave_counting_to(ONE, self.moments, [], examples=0.0)

    def counted(self) -> None:
        """A step that is only counted."""
        self._wait()
        self.moments.append(self.time)
        self.over = len(self.durations)

    def commit(self) -> None:
        """The counting ends."""
        self.clock.commit(0.0)

    def actions(self, stretches: int, steps: int) -> Iterator[Action]:
        """One after the other."""
        for _ in range(stretches):
            yield self.step
            yield self.begin
            yield from [self.counted] * steps
            yield self.commit

    def snapshot(self) -> TotalsSnapshot:
        """The totals, with what they promise asserted."""
        before, self.looking = self.over, True
        totals = self.host.snapshot().totals
        self.looking = False
        count = int(totals.duration_buckets.sum())
        assert max(before, self.counts[-1]) <= count <= len(self.durations)
        assert totals.duration_sum == sum(self.durations[:count])
        self.counts.append(count)
        return totals


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=20), st.booleans())
def test_every_interleaving(plan: list[tuple[int, int, int]], within: bool) -> None:
    """Snapshots come between any actions of the training, which goes on by so many before and behind their first look at it.

    `within`: there is also a snapshot before and behind each record that the training posts.
    """
    training = Training()
    training.step(first=True)
    if within:
        training.post.between = lambda: training.looking or training.snapshot()
    actions = training.actions(stretches=4, steps=3)

    def go_on(steps: int) -> None:
        for action in itertools.islice(actions, steps):
            action()

    for before, first, then in plan:
        go_on(before)
        training.meanwhile = functools.partial(go_on, first), functools.partial(go_on, then)
        training.snapshot()
        training.meanwhile = IDLE
    for action in actions:
        action()
    training.host.drain()
    training.snapshot()
    assert training.counts[-1] == len(training.durations) == 16
    assert training.errors.counts() == {"worker": 0}


@pytest.mark.parametrize("again", [True, False])
def test_a_record_that_is_lost_takes_back_nothing(again: bool) -> None:
    """Durations that were shown stay where the mailbox had no room for their record, whatever comes after it."""
    training = Training()
    training.step(first=True)
    training.begin()
    training.counted()
    training.counted()
    training.snapshot()
    training.post.loses = True
    training.commit()
    training.post.loses = False
    shown = training.snapshot()
    assert shown.duration_sum == 0.75
    if again:
        training.begin()
        training.counted()
        training.snapshot()
        training.commit()
    training.step()
    assert training.snapshot().duration_sum == 0.75 + (1.0 + 2.0 if again else 1.0)


def test_the_slowest_step_is_shown_at_once() -> None:
    """Of steps that are only counted, too, and of the last 128."""
    training = Training()
    training.step(first=True)
    training.begin()
    for _ in range(5):
        training.counted()
    assert training.snapshot().slowest == 4.0
    training.commit()
    assert training.snapshot().slowest == 4.0


def test_scrapes_beside_a_training() -> None:
    """Thousands of snapshots beside a thread that counts and commits: each has the steps counted before it, and none twice."""
    post = Mailbox()
    clock = StepClock(post)
    host = host_side(post, ErrorLog(("worker",)), clock.counting)
    enough, over = threading.Event(), threading.Event()

    def train() -> None:
        clock.step_ended(first_of_round=True)
        stretches = 0
        while not enough.is_set() or stretches < 500:
            moments: list[float] = []
            clock.leave_counting_to(ONE, moments, [], examples=0.0)
            moments.extend(clock.clock() for _ in range(stretches % 7))
            clock.commit(0.0)
            clock.step_done(ONE)
            clock.step_ended(first_of_round=True)
            stretches += 1
            while len(post) > 1000 and not enough.is_set():  # the scrapes are behind: nothing may be lost for want of room
                threading.Event().wait(0)
        over.set()

    clock.step_done(ONE)
    thread = threading.Thread(target=train)
    thread.start()
    last, sums, taken = 0, 0.0, 0
    while taken < 3000 or not over.is_set():
        steps = clock.counts().steps[ONE]
        totals = host.snapshot().totals
        count = int(totals.duration_buckets.sum())
        # A followed step is counted a moment before its record is posted.
        assert count >= max(steps - 2, last)
        assert totals.duration_sum >= sums
        last, sums, taken = count, totals.duration_sum, taken + 1
        if taken == 3000:
            enough.set()
    thread.join()
    assert int(host.snapshot().totals.duration_buckets.sum()) == clock.counts().steps[ONE] - 1
    assert post.left_out == 0
    assert np.isfinite(sums)
