"""The scrape: what a collector that fails, hangs or is slow costs the others, and the clients that wait for the scrape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.collectors.exporter import EXPORTER_COLLECTOR_DURATION, EXPORTER_COLLECTOR_SUCCESS, EXPORTER_SERIES
from torch_grad_exporter.collectors.scrape import RETRY_SECONDS, Scrape
from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.metrics.families import Family, Kind, Spec, scalar
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

HANGS = 0.3
"""Seconds after which a collector that hangs is given up."""


@dataclass
class Fake:
    """A collector of one gauge that does what it is told to before it answers."""

    name: str
    before: Callable[[], object] = lambda: None
    calls: int = 0
    threads: set[threading.Thread] = field(default_factory=set)

    def collect(self) -> Iterator[Family]:
        self.calls += 1
        self.threads.add(threading.current_thread())
        self.before()
        yield scalar(Spec(self.name, Kind.GAUGE, "A fake."), self.calls)


def fail() -> None:
    """What a collector raises."""
    raise OSError("the source is gone")


@dataclass
class Scene:
    """A scrape of some collectors, with a clock that stands still unless it is moved."""

    collectors: list[Fake]
    now: float = 0.0
    prepared: int = 0
    patience: float = PATIENCE

    def __post_init__(self) -> None:
        self.errors = ErrorLog(())
        collectors = {fake.name: fake for fake in self.collectors}
        self.scrape = Scrape(collectors, self.errors, self.prepare, lambda: self.now, self.patience)

    def prepare(self) -> None:
        self.prepared += 1

    def shown(self) -> dict[str, float]:
        """One scrape: the fakes' values by name."""
        families = self.scrape()
        return {
            family.spec.name: float(family.values[0])
            for family in families
            if family.spec.name in {f.name for f in self.collectors}
        }

    def success(self) -> dict[str, float]:
        """The collectors' success in a scrape of its own."""
        return self.report(EXPORTER_COLLECTOR_SUCCESS)

    def report(self, spec: Spec) -> dict[str, float]:
        """A family about the collectors, by name, in a scrape of its own."""
        (family,) = (family for family in self.scrape() if family.spec is spec)
        present = [True] * len(family.values) if family.present is None else family.present.tolist()
        return {row[0]: float(v) for row, v, there in zip(family.labels.rows, family.values, present, strict=True) if there}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hanging collector waits for; opened at the end of the test."""
    made = threading.Event()
    yield made
    made.set()


def test_all_collectors_are_shown_in_their_order() -> None:
    """One preparation and one call of each collector make a scrape; the number of series is known from then on."""
    scene = Scene([Fake("a"), Fake("exporter")])
    first, second = ({family.spec: family for family in scene.scrape()} for _ in range(2))
    assert [spec.name for spec in first][:2] == ["a", "exporter"]
    assert first[EXPORTER_SERIES].series == 0
    assert second[EXPORTER_SERIES].values.tolist() == [2 + 2 * 2]
    assert EXPORTER_SERIES not in {family.spec for family in Scene([Fake("a")]).scrape()}  # where that collector is off
    assert scene.prepared == 2


def test_rules_are_judged_without_what_they_do_not_read() -> None:
    """Such a collector is not asked, and how it did is what it was; the number of series is that of a scrape of everything."""
    scene = Scene([Fake("exporter"), Fake("dear", fail)])
    scrape = Scrape({fake.name: fake for fake in scene.collectors}, scene.errors, scene.prepare, not_judged={"dear"})

    def success() -> list[tuple[str, float]]:
        (family,) = (family for family in scrape.for_rules() if family.spec is EXPORTER_COLLECTOR_SUCCESS)
        return [(row[0], float(value)) for row, value in zip(family.labels.rows, family.values, strict=True)]

    assert success() == [("exporter", 1.0)]
    scrape()
    for _ in range(5):
        assert sorted(success()) == [("dear", 0.0), ("exporter", 1.0)]
    assert [fake.calls for fake in scene.collectors] == [7, 1]
    (series,) = (family for family in scrape() if family.spec is EXPORTER_SERIES)
    assert series.values.tolist() == [1 + 2 + 2]


def test_one_that_raises_costs_only_itself() -> None:
    """The others are complete, its success is 0, the failure is counted."""
    scene = Scene([Fake("a"), Fake("bad", fail), Fake("b")])
    assert scene.shown() == {"a": 1, "b": 1}
    assert scene.success() == {"a": 1, "bad": 0, "b": 1}
    assert scene.errors.counts() == {"collector_bad": 2}


def test_one_that_hangs_costs_its_time_once(gate: threading.Event) -> None:
    """The scrape goes on without it after its time, the next ones do not wait at all, and when it has answered it is back."""
    hanging = Fake("hanging", gate.wait)
    scene = Scene([Fake("a"), hanging, Fake("b")], patience=HANGS)
    assert scene.shown() == {"a": 1, "b": 1}
    for number in range(2, 6):
        assert scene.shown() == {"a": number, "b": number}
    assert (hanging.calls, scene.errors.counts()) == (1, {"collector_hanging": 1})
    assert scene.success() == {"a": 1, "hanging": 0, "b": 1}
    gate.set()
    assert eventually(lambda: "hanging" in scene.shown())
    assert scene.success() == {"a": 1, "hanging": 1, "b": 1}
    assert eventually(lambda: not any(thread.is_alive() for thread in hanging.threads))


def test_all_of_them_hanging(gate: threading.Event) -> None:
    """Each costs its time and a thread once; those that hang are not asked again, so there is never one thread more."""
    scene = Scene([Fake(name, gate.wait) for name in "abc"], patience=HANGS)
    for _ in range(5):
        assert scene.shown() == {}
    assert [fake.calls for fake in scene.collectors] == [1, 1, 1]
    gate.set()
    assert eventually(lambda: scene.shown().keys() == {"a", "b", "c"})


def test_what_comes_too_late_is_not_shown(gate: threading.Event) -> None:
    """The values of a collector that answers after its time are old by then: the next scrape asks anew."""
    slow = Fake("slow", gate.wait)
    scene = Scene([slow], patience=HANGS)
    assert scene.shown() == {}
    gate.set()
    assert eventually(lambda: not any(thread.is_alive() for thread in slow.threads))
    assert scene.shown() == {"slow": 2}


def test_one_that_keeps_failing_is_tried_once_a_minute() -> None:
    """After ten failures in a row it is left alone for a minute at a time; as soon as it succeeds it is back for good."""
    fake = Fake("bad", fail)
    scene = Scene([fake, Fake("a")])
    for _ in range(3 * LIMIT):
        scene.shown()
    assert fake.calls == LIMIT
    scene.now += RETRY_SECONDS
    for _ in range(5):
        scene.shown()
    assert fake.calls == LIMIT + 1
    fake.before = lambda: None
    assert "bad" not in scene.shown()
    scene.now += RETRY_SECONDS
    assert scene.shown()["bad"] == LIMIT + 2
    assert scene.shown()["bad"] == LIMIT + 3


def test_duration_is_that_of_the_collector_and_absent_without_a_run(gate: threading.Event) -> None:
    """A collector that took three seconds of the clock says so; of one that hangs no duration is made up."""
    slow = Fake("slow", lambda: setattr(scene, "now", scene.now + 3.0))
    scene = Scene([slow, Fake("hanging", gate.wait)], patience=HANGS)
    assert scene.report(EXPORTER_COLLECTOR_DURATION) == {"slow": 3.0}


def test_a_broken_preparation_leaves_the_collectors_what_they_have() -> None:
    """The snapshot fails, the scrape does not."""
    errors = ErrorLog(())
    assert Scrape({"a": Fake("a")}, errors, fail)()[0].spec.name == "a"
    assert errors.counts() == {"worker": 1}


def test_scrapes_at_once_come_one_after_the_other() -> None:
    """A collector is never in two scrapes at the same time, so it needs no lock of its own against them."""
    inside, most = [0], [0]
    lock = threading.Lock()

    def count() -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.01)
        with lock:
            inside[0] -= 1

    scene = Scene([Fake("a", count)])
    threads = [threading.Thread(target=scene.scrape) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], scene.collectors[0].calls) == (1, 5)


def test_where_no_thread_is_to_be_had_the_caller_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit of threads, or one that is ending, still gets its scrape."""

    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    scene = Scene([Fake("a")])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert scene.shown() == {"a": 1}
    assert scene.collectors[0].threads == {threading.current_thread()}


def test_in_a_forked_child_nothing_is_held(gate: threading.Event) -> None:
    """Whatever the parent's threads were at, the child can scrape."""
    scene = Scene([Fake("hanging", gate.wait)])
    thread = threading.Thread(target=scene.scrape, daemon=True)
    thread.start()
    assert eventually(lambda: scene.collectors[0].calls == 1)
    scene.scrape.after_fork_in_child()
    scene.collectors[0].before = lambda: None
    assert scene.shown() == {"hanging": 2}
    gate.set()
    thread.join()


def test_in_a_forked_child_no_collector_is_waited_for_that_only_the_parent_has(gate: threading.Event) -> None:
    """One that hangs in the parent's thread, which the child has not, is run there."""
    scene = Scene([Fake("hanging", gate.wait)], patience=HANGS)
    assert scene.shown() == {}
    scene.scrape.after_fork_in_child()
    scene.collectors[0].before = lambda: None
    assert scene.shown() == {"hanging": 2}
    gate.set()


def test_without_any_collector_there_is_an_empty_scrape() -> None:
    """Who switches off everything gets nothing, which is no failure."""
    scene = Scene([])
    assert [family.series for family in scene.scrape()] == [0, 0]
    assert Renderer({}).render(scene.scrape(), Format.TEXT) == b""
