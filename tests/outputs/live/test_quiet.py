"""What the exporter does while nobody looks: it judges without what no rule reads, and everything is there for who asks."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tests.extensions.toy_rule import RULE
from tests.support.models import Perceptron, batch, sgd
from tests.support.tools import FOREVER
from torch_grad_exporter import Exporter, rules, start_exporter
from torch_grad_exporter.aggregation.cursor import Cursor
from torch_grad_exporter.aggregation.worker import Reading
from torch_grad_exporter.collectors import REGISTRY, process
from torch_grad_exporter.collectors.process import PROCESS_RESIDENT_MEMORY, PROCESS_UNIQUE_MEMORY
from torch_grad_exporter.collectors.registry import source_of
from torch_grad_exporter.collectors.training import TRAIN_LOSS
from torch_grad_exporter.metrics.families import Family, Spec, scalar
from torch_grad_exporter.outputs.live.history import History, Moment, Window
from torch_grad_exporter.outputs.live.latest import WHOLE_TURNS
from torch_grad_exporter.outputs.live.live import Live, Run
from torch_grad_exporter.outputs.live.recorder import REMEMBER_SECONDS, recorder
from torch_grad_exporter.outputs.live.rows import StepRows
from torch_grad_exporter.outputs.live.track import Track
from torch_grad_exporter.rules import Values
from torch_grad_exporter.rules.memory import REMEMBERED

NOW = 1_800_000_000.0


class Scraped:
    """A `Live` by hand, and how often each of its scrapes was taken."""

    def __init__(self) -> None:
        self.now, self.whole, self.for_rules = NOW, 0, 0
        history = History(_nothing, now=lambda: self.now)
        run = Run("run", 0, 1, "node0", "0.1.0")
        self.live = Live(run, history, self._scrape, for_rules=self._scrape_for_rules, now=lambda: self.now)

    def _scrape(self) -> list[Family]:
        self.whole += 1
        return [scalar(TRAIN_LOSS, float(self.whole)), scalar(PROCESS_RESIDENT_MEMORY, 1e9)]

    def _scrape_for_rules(self) -> list[Family]:
        self.for_rules += 1
        return [scalar(TRAIN_LOSS, float(self.whole))]

    def judge(self, times: int) -> Scraped:
        """Judges so often, as the recorder does."""
        for _ in range(times):
            self.now += REMEMBER_SECONDS
            self.live.remember()
        return self


def _nothing() -> Moment:
    raise AssertionError


def test_a_run_is_judged_by_what_rules_read() -> None:
    """Of forty times twice by everything, so that a collector that fails is found."""
    made = Scraped().judge(2 * WHOLE_TURNS)
    assert (made.whole, made.for_rules) == (2, 2 * (WHOLE_TURNS - 1))


def test_who_looks_gets_everything_at_once() -> None:
    """Also right after a judgement, and while the next one is under way; what is shown just now is judged by as well."""
    made = Scraped().judge(3)
    assert [one["name"] for one in made.live.status()["resources"]] == ["Process memory"]  # type: ignore[attr-defined]
    assert (made.whole, made.for_rules) == (2, 2)
    made.live.remember()
    assert (made.whole, made.for_rules) == (2, 2)
    assert made.judge(1).live.problems() == []
    assert (made.whole, made.for_rules) == (3, 3)
    with made.live._latest._scraping:
        made.now += 10
        assert made.live.judged().values.one(PROCESS_RESIDENT_MEMORY) == 1e9
        assert len(made.live.status()["resources"]) == 1  # type: ignore[arg-type]


def test_what_is_long_past_is_not_shown_for_the_present() -> None:
    """While another thread scrapes: an hour after the last look the values are those that were last judged by."""
    made = Scraped().judge(1)
    made.live.status()
    made.judge(10)
    made.whole = 7
    made.judge(1)
    with made.live._latest._scraping:
        assert made.live.status()["loss"] == 7.0


def test_rules_of_others_may_read_anything() -> None:
    """Where there is one, each judgement is by everything."""
    with contextlib.closing(rules.watch.RULES.register(RULE)):
        made = Scraped().judge(5)
    assert (made.whole, made.for_rules) == (5, 0)


def test_no_rule_reads_what_is_left_out() -> None:
    """Whatever metric a module of the rules names, or remembers, comes from a collector that is asked at each judgement."""
    left_out = {spec for one in REGISTRY if one.name in REGISTRY.not_judged for section in one.sections for spec in section.specs}
    modules = [importlib.import_module(f"{rules.__name__}.{found.name}") for found in pkgutil.iter_modules(rules.__path__)]
    read = {value for module in modules for value in vars(module).values() if isinstance(value, Spec)} | set(REMEMBERED)
    needed = {need[0] if isinstance(need, tuple) else need for rule in rules.RULES for need in rule.needs}
    assert PROCESS_UNIQUE_MEMORY in left_out
    assert len(read) > 30
    assert not left_out & (read | needed)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporter]:
    """One that records and judges by hand alone."""
    monkeypatch.setitem(recorder.__kwdefaults__, "interval", FOREVER)
    with start_exporter(Perceptron(), port=None) as found:
        yield found


def test_the_pages_of_the_process_are_walked_for_who_looks(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all judgements of ten minutes for two, and for whoever asks, whose values have all that there is."""
    walks, now = list[object](), [NOW]
    monkeypatch.setattr(process, "unique_memory", lambda _process: walks.append(1) or 1e9)
    monkeypatch.setattr(process.Paced, "__call__", lambda paced, _share=0.0: paced._read())
    monkeypatch.setattr(exporter._view.live._latest, "_now", lambda: now[0])
    for _ in range(2 * WHOLE_TURNS):
        now[0] += REMEMBER_SECONDS
        exporter._view.live.remember()
    assert len(walks) == 2
    found = exporter.values()
    assert len(walks) == 3
    assert {"torch_process_unique_memory_bytes", "process_resident_memory_bytes", "torch_process_children"} <= found.keys()
    assert {f"torch_grad_exporter_collector_success/{name}" for name in exporter.settings.collectors} <= found.keys()
    assert exporter._errors.counts()[source_of("process")] == 0


class Looked:
    """A run with sampled steps that is looked at by hand, once a second of its own clock."""

    def __init__(self, exporter: Exporter, model: Perceptron, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exporter, self.model, self.optimizer, self.now, self.reads = exporter, model, sgd(model), time.time(), 0
        read = exporter._host.read_as
        for history in exporter._view._histories:
            monkeypatch.setattr(history, "_now", lambda: self.now)

        def counted(cursor: Cursor, of: Callable[[Reading], object]) -> object:
            self.reads += 1
            return read(cursor, of)

        monkeypatch.setattr(exporter._host, "read_as", counted)

    def train(self, steps: int) -> None:
        """Goes on for so many steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(batch()).square().mean().backward()
            self.optimizer.step()

    def look(self, seconds: int) -> int:
        """Looks each second; how often everything was read for that."""
        before = self.reads
        for _ in range(seconds):
            self.now += 1
            self.exporter._view._record()
        return self.reads - before

    def steps(self) -> list[list[float]]:
        """Of the run, of a layer and of the outputs of a module, the steps that are recorded."""
        gradients, inside = self.exporter._view._histories
        recent = Window(whole=False)
        parts = gradients.run(recent), gradients.grid("norm", recent)[1], inside.grid("activation_rms", recent)[1]
        return [part.steps.tolist() for part in parts]


@pytest.mark.parametrize("every", [1, 3])
def test_while_nothing_happens_nothing_is_read(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some looks after the last step, then none in a minute; each step and sample is recorded, though it was quiet before."""
    monkeypatch.setitem(recorder.__kwdefaults__, "interval", FOREVER)
    model = Perceptron()
    with start_exporter(model, port=None, every=every, activations=True) as exporter:
        run, done = Looked(exporter, model, monkeypatch), 0
        run.look(3)
        assert run.look(60) == 0
        for steps in (1, 4, 7):
            run.train(steps)
            done += steps
            assert 1 <= run.look(60) <= 3
            of_run, of_layers, inside = run.steps()
            assert of_run[-1] == done
            assert len(of_layers) == len(inside) == exporter._training.capture.samples
        assert of_run == list(range(1, done + 1))
        exporter.observe(loss=1.0)
        assert 1 <= run.look(60) <= 3


def test_steps_that_came_together_are_recorded_together(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps there were since the last record, each of which has a row of its own."""
    run, extended = Looked(exporter, Perceptron(), monkeypatch), list[int]()
    extend = Track.extend

    def counted(track: Track, times: Sequence[float], steps: Sequence[float], *values: np.ndarray) -> None:
        if track is exporter._view.history._scalars:
            extended.append(len(times))
        extend(track, times, steps, *values)

    monkeypatch.setattr(Track, "extend", counted)
    rows = StepRows()
    for step in range(40):
        rows.add_one(step, run.now, "loss", 1.0)
    exporter._view.history._rows = rows
    run.look(2)
    assert extended == [40]


def test_a_table_of_a_scrape_is_made_once() -> None:
    """However many rules read it, and remember it; of a metric that is not there as well."""
    values = Values([scalar(TRAIN_LOSS, 1.0)])
    assert values.table(TRAIN_LOSS) is values.table(TRAIN_LOSS)
    assert values.table(PROCESS_RESIDENT_MEMORY) is values.table(PROCESS_UNIQUE_MEMORY)
    assert values.table(PROCESS_RESIDENT_MEMORY).rows == ()
