"""The scrape: what a collector that fails, hangs or is slow costs the others and the clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.collectors.exporter import EXPORTER_COLLECTOR_SUCCESS, EXPORTER_SERIES
from torch_grad_exporter.collectors.scrape import RETRY_SECONDS, Scrape
from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.metrics.families import Family, Kind, Spec, scalar

HANGS = 0.3
"""Seconds after which a collector that hangs is given up."""


@dataclass
class Fake:
    """A collector of one gauge that runs a given function before it answers."""

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
    """Raise what a collector raises."""
    raise OSError("the source is gone")


@dataclass
class Scene:
    """A scrape of some collectors with a clock that the test moves."""

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
        """Scrape and return the fakes' values by name."""
        families = self.scrape()
        return {
            family.spec.name: float(family.values[0])
            for family in families
            if family.spec.name in {f.name for f in self.collectors}
        }

    def success(self) -> dict[str, float]:
        """Scrape and return the collectors' success."""
        return self.report(EXPORTER_COLLECTOR_SUCCESS)

    def report(self, spec: Spec) -> dict[str, float]:
        """Scrape and return a family about the collectors, by name."""
        (family,) = (family for family in self.scrape() if family.spec is spec)
        present = [True] * len(family.values) if family.present is None else family.present.tolist()
        return {row[0]: float(v) for row, v, there in zip(family.labels.rows, family.values, present, strict=True) if there}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return what a hanging collector waits for; it opens at the end of the test."""
    made = threading.Event()
    yield made
    made.set()


def test_rules_do_not_run_collectors_they_do_not_read() -> None:
    """Rules skip a collector that they do not read, and its success stays what it was."""
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


def test_a_collector_that_raises_costs_only_itself() -> None:
    """The other collectors are complete, its success is 0, and the failure is counted."""
    scene = Scene([Fake("a"), Fake("bad", fail), Fake("b")])
    assert scene.shown() == {"a": 1, "b": 1}
    assert scene.success() == {"a": 1, "bad": 0, "b": 1}
    assert scene.errors.counts() == {"collector_bad": 2}


def test_a_collector_that_hangs_costs_its_time_once(gate: threading.Event) -> None:
    """Only the first scrape waits for a collector that hangs; it is back once it has answered."""
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


def test_a_collector_that_keeps_failing_is_paused() -> None:
    """After ten failures in a row a collector is tried once a minute until it succeeds."""
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


def test_concurrent_scrapes_run_one_after_the_other() -> None:
    """A collector is never in two scrapes at the same time."""
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


def test_in_a_forked_child_nothing_is_held(gate: threading.Event) -> None:
    """A forked child can scrape, whatever the parent's threads were doing."""
    scene = Scene([Fake("hanging", gate.wait)])
    thread = threading.Thread(target=scene.scrape, daemon=True)
    thread.start()
    assert eventually(lambda: scene.collectors[0].calls == 1)
    scene.scrape.after_fork_in_child()
    scene.collectors[0].before = lambda: None
    assert scene.shown() == {"hanging": 2}
    gate.set()
    thread.join()
