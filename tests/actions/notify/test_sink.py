"""A sink: order, retries, bounds and the end, with a sender and a clock of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.notified import Clock, notification
from tests.support.tools import FOREVER
from torch_grad_exporter.actions import Notification
from torch_grad_exporter.actions.notify.notification import SendError
from torch_grad_exporter.actions.notify.notifiers import Notifier
from torch_grad_exporter.actions.notify.sink import LONGEST_PAUSE, QUEUE, TRIES, Sink
from torch_grad_exporter.collectors.outcomes import NotifyTotals
from torch_grad_exporter.errors import ErrorLog


class Fake(Notifier):
    """A notifier that sends into a list, or fails with `errors`."""

    kind = "fake"

    def __init__(self, *, together: int = 1) -> None:
        super().__init__("info")
        self.together = together
        self.sent: list[Sequence[Notification]] = []
        self.tries = 0
        self.errors: list[Exception] = []
        self.always: Exception | None = None

    def send(self, notifications: Sequence[Notification], seconds: float) -> None:
        self.tries += 1
        error = self.errors.pop(0) if self.errors else self.always
        if error is not None:
            raise error
        self.sent.append(notifications)

    @property
    def summaries(self) -> list[str]:
        return [sent.summary for batch in self.sent for sent in batch]


class Scene:
    """A sink with a fake notifier, which works when the test says so."""

    def __init__(self, *, together: int = 1) -> None:
        self.notifier, self.clock, self.errors = Fake(together=together), Clock(), ErrorLog(("notify",))
        self.totals = NotifyTotals(["fake"], [])
        self.sink = Sink("fake", self.notifier, self.totals, self.errors, clock=self.clock)

    def offer(self, *summaries: str) -> None:
        self.sink.offer([notification(summary=summary) for summary in summaries])

    def counts(self) -> tuple[int, int, int]:
        counts = self.totals.counts
        return counts["fake", "sent"], counts["fake", "failed"], counts["fake", "dropped"]


def test_retries_have_growing_pauses() -> None:
    """Pauses are 1, 2, 4, 8 and 16 s within a fifth, and nothing overtakes."""
    scene = Scene()
    scene.notifier.errors = [SendError("503", passing=True) for _ in range(TRIES - 1)]
    scene.offer("a", "b")
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0):
        scene.sink.work()
        tries = scene.notifier.tries
        scene.clock.time += 0.79 * pause
        scene.sink.work()
        assert scene.notifier.tries == tries
        scene.clock.time += 0.42 * pause
    assert scene.notifier.summaries == []
    scene.sink.work()
    assert scene.notifier.summaries == ["a", "b"]
    assert (scene.errors.counts()["notify"], scene.counts()) == (TRIES - 1, (2, 0, 0))


def test_what_fails_makes_room_for_the_next() -> None:
    """A dead receiver gets each notification six times, one that refuses and a sender with a fault once, and then the next one."""
    scene = Scene()
    scene.notifier.errors = [SendError("dead", passing=True)] * TRIES + [SendError("404"), RuntimeError("a fault")]
    scene.offer("dead", "refused", "a fault", "sent")
    while scene.counts()[0] < 1:
        scene.clock.time += LONGEST_PAUSE
        scene.sink.work()
    assert (scene.notifier.summaries, scene.notifier.tries, scene.counts()) == (["sent"], TRIES + 3, (1, 3, 0))


@pytest.mark.parametrize(("asked", "waited"), [(7.0, 7.0), (0.0, 1.0), (86400.0, LONGEST_PAUSE)])
def test_retry_after_is_obeyed_within_bounds(asked: float, waited: float) -> None:
    """`Retry-After` is obeyed from one second to a minute."""
    scene = Scene()
    scene.notifier.errors = [SendError("429", passing=True, pause=asked)]
    scene.offer("a")
    scene.sink.work()
    scene.clock.time += waited - 0.01
    scene.sink.work()
    assert scene.notifier.tries == 1
    scene.clock.time += 0.02
    scene.sink.work()
    assert scene.notifier.summaries == ["a"]


def test_the_queue_is_bounded() -> None:
    """Of 10,000 notifications 1,000 wait, and the others are dropped and counted."""
    scene = Scene()
    scene.offer(*map(str, range(10_000)))
    scene.offer("late")
    assert scene.counts() == (0, 0, 9_001)
    scene.sink.work()
    assert scene.notifier.summaries == [*map(str, range(QUEUE))]


def test_batches_keep_the_order() -> None:
    """A batch that is tried again has what it had, and what came meanwhile is sent after it."""
    scene = Scene(together=64)
    scene.notifier.errors = [SendError("dead", passing=True)]
    scene.offer("begins")
    scene.sink.work()
    scene.offer(*["still"] * 100, "ends")
    scene.clock.time += LONGEST_PAUSE
    scene.sink.work()
    assert scene.notifier.summaries == ["begins", *["still"] * 100, "ends"]
    assert [len(batch) for batch in scene.notifier.sent] == [1, 64, 37]
    assert scene.sink.idle


def test_the_end_drops_for_a_dead_receiver() -> None:
    """At the end there is one try, and what waits is dropped and counted once."""
    scene = Scene()
    scene.notifier.always = SendError("dead", passing=True)
    scene.sink.start()
    scene.sink.end(scene.clock() + FOREVER)
    scene.offer("a", "b", "c")
    scene.sink.close()
    assert scene.counts() == (0, 0, 3)
    assert scene.notifier.tries <= 1
