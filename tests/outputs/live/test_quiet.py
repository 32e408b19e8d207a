"""While no page is open, a run is judged by what rules read only, and a page that opens gets everything."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable

from tests.extensions.toy_rule import RULE
from torch_grad_exporter import rules
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.process import PROCESS_RESIDENT_MEMORY, PROCESS_UNIQUE_MEMORY
from torch_grad_exporter.collectors.training import TRAIN_LOSS
from torch_grad_exporter.metrics.families import Family, Spec, scalar
from torch_grad_exporter.outputs.live.history import History, Moment
from torch_grad_exporter.outputs.live.latest import WHOLE_TURNS
from torch_grad_exporter.outputs.live.live import Live, Run
from torch_grad_exporter.outputs.live.recorder import REMEMBER_SECONDS
from torch_grad_exporter.rules.memory import REMEMBERED

NOW = 1_800_000_000.0


class Scraped:
    """A `Live` whose scrapes are counted. `hold`: called in the next one of them for the rules."""

    def __init__(self) -> None:
        self.now, self.whole, self.for_rules = NOW, 0, 0
        self.hold: Callable[[], object] = int
        run = Run("run", 0, 1, "node0", "0.1.0")
        history = History(_nothing, now=lambda: self.now)
        self.live = Live(run, history, self._scrape, for_rules=self._scrape_for_rules, now=lambda: self.now)

    def _scrape(self) -> list[Family]:
        self.whole += 1
        return [scalar(TRAIN_LOSS, float(self.whole)), scalar(PROCESS_RESIDENT_MEMORY, 1e9)]

    def _scrape_for_rules(self) -> list[Family]:
        self.for_rules += 1
        self.hold()
        return [scalar(TRAIN_LOSS, float(self.whole))]

    def judge(self, times: int) -> Scraped:
        """Judge as often as this, at the recorder's pace."""
        for _ in range(times):
            self.now += REMEMBER_SECONDS
            self.live.remember()
        return self


def _nothing() -> Moment:
    raise AssertionError


def test_judging_reads_only_what_rules_need() -> None:
    """Of forty judgements two read everything, so that a failing collector is noticed."""
    made = Scraped().judge(2 * WHOLE_TURNS)
    assert (made.whole, made.for_rules) == (2, 2 * (WHOLE_TURNS - 1))


def test_a_viewer_gets_everything_at_once() -> None:
    """A page gets all metrics right after a judgement, and the next judgement uses what was just shown."""
    made = Scraped().judge(3)
    assert [row["name"] for row in made.live.status()["resources"]] == ["Process memory"]  # type: ignore[attr-defined]
    assert (made.whole, made.for_rules) == (2, 2)
    made.live.remember()
    assert (made.whole, made.for_rules) == (2, 2)
    assert made.judge(1).live.problems() == []
    assert (made.whole, made.for_rules) == (3, 3)


def test_rules_of_users_may_read_anything() -> None:
    """With a rule of the user, each judgement reads everything."""
    with contextlib.closing(rules.watch.RULES.register(RULE)):
        made = Scraped().judge(5)
    assert (made.whole, made.for_rules) == (5, 0)


def test_no_rule_needs_a_collector_left_out() -> None:
    """No metric that a rule names or remembers is of a collector that judgements leave out."""
    left_out = {spec for one in REGISTRY if one.name in REGISTRY.not_judged for section in one.sections for spec in section.specs}
    modules = [importlib.import_module(f"{rules.__name__}.{module.name}") for module in pkgutil.iter_modules(rules.__path__)]
    read = {value for module in modules for value in vars(module).values() if isinstance(value, Spec)} | set(REMEMBERED)
    needed = {need[0] if isinstance(need, tuple) else need for rule in rules.RULES for need in rule.needs}
    assert PROCESS_UNIQUE_MEMORY in left_out
    assert len(read) > 30
    assert not left_out & (read | needed)
