"""A collector and a rule from outside of the package, each one file, are shown and judged like the package's own."""

from __future__ import annotations

import contextlib
import json
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.extensions import toy_collector, toy_rule
from tests.support.scrape import value
from tests.support.tools import get
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Collector
from torch_grad_exporter.rules import RULES

DOC = Path(__file__).resolve().parent.parent / "scripts" / "metrics_doc.py"

NOW = 1_800_000_000.0

Samples = dict[tuple[str, str | None], float]


@pytest.fixture
def toys() -> Iterator[None]:
    """Register both."""
    with contextlib.closing(REGISTRY.register(toy_collector.COLLECTOR)), contextlib.closing(RULES.register(toy_rule.RULE)):
        yield


def trained(**options: object) -> Exporter:
    """Return an exporter that serves, after three steps of a model with two layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = start_exporter(model, 0, addr="127.0.0.1", every=1, run="r1", **options)  # type: ignore[arg-type]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    return exporter


def scraped(exporter: Exporter, label: str) -> Samples:
    """Return all samples of `/metrics` by name and one label, read by prometheus_client."""
    families = text_string_to_metric_families(get(exporter.url))
    return {(sample.name, sample.labels.get(label)): sample.value for family in families for sample in family.samples}


@pytest.mark.usefixtures("toys")
def test_a_collector_of_ones_own_is_in_the_scrape() -> None:
    """The metrics of a registered collector, its success and its duration are served like those of any other."""
    with trained() as exporter:
        found = scraped(exporter, "collector")
        assert found["toy_layers", None] == 2
        assert found["torch_grad_exporter_collector_success", "toy"] == 1
        assert found["torch_grad_exporter_collector_duration_seconds", "toy"] >= 0
        assert scraped(exporter, "colour")["toy_questions_total", "red"] == 1
        assert value(exporter, "torch_grad_exporter_errors_total", source="collector_toy") == 0
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 3


@pytest.mark.usefixtures("toys")
def test_options_know_a_collector_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered collector can be disabled by argument and by variable, and its label names are reserved."""
    with trained(collectors={"toy": False}) as exporter:
        assert value(exporter, "toy_layers") is None
    with pytest.raises(ValueError, match="'colour' is a label of the exporter's own"):
        trained(labels={"colour": "blue"})
    with pytest.raises(ValueError, match=r"there are gradients, .*, toy, exporter"):
        trained(collectors={"toi": False})
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_COLLECTORS", "toy=off")
    with trained() as exporter:
        assert value(exporter, "toy_layers") is None


@pytest.mark.usefixtures("toys")
def test_a_metric_of_ones_own_is_documented() -> None:
    """The page of metrics has a section of the registered metrics."""
    page = runpy.run_path(str(DOC))["page"]()
    assert "## A toy\n" in page
    assert "| `toy_questions_total` | counter | `colour` | all | How often the toy was asked, by colour. |\n" in page


@pytest.mark.usefixtures("toys")
def test_a_rule_of_ones_own_is_judged() -> None:
    """The findings of a registered rule are among the problems of the live page."""
    with trained() as exporter:
        for _ in range(toy_rule.OFTEN):
            exporter.collect()
        problems = json.loads(get(f"{exporter.page_url}api/v1/status"))["problems"]
    (found,) = (problem for problem in problems if problem["alert"] == "ToyAskedOften")
    assert found["severity"] == "warning"
    assert found["text"].endswith("times about 2 layers.")


def test_a_collector_is_closed_once() -> None:
    """Closing the exporter closes a collector that can be closed, once."""

    class Holding(toy_collector.ToyCollector):
        """Holds a library, say."""

        closed = 0

        def close(self) -> None:
            """Gives it back."""
            self.closed += 1

    made: list[Holding] = []

    def make(context: CollectorContext) -> Collector:
        made.append(Holding(context))
        return made[-1]

    with contextlib.closing(REGISTRY.register(replace(toy_collector.COLLECTOR, make=make))):
        exporter = trained()
        assert [one.closed for one in made] == [0]
        exporter.close()
        exporter.close()
    assert [one.closed for one in made] == [1]


def test_what_was_registered_goes_again() -> None:
    """After `close` of a registration a new exporter has neither collector nor rule, and their names are free."""
    for registration in (REGISTRY.register(toy_collector.COLLECTOR), RULES.register(toy_rule.RULE)):
        registration.close()
        registration.close()
    with trained() as exporter:
        assert value(exporter, "toy_layers") is None
        assert value(exporter, "torch_grad_exporter_errors_total", source="collector_toy") is None
    with pytest.raises(ValueError, match="collectors="):
        trained(collectors={"toy": True})
    assert "ToyAskedOften" not in [rule.name for rule in RULES]


@pytest.mark.usefixtures("toys")
def test_nothing_is_registered_twice() -> None:
    """A second collector or rule of a name, or a metric that exists, is refused and changes nothing."""
    before = REGISTRY.names
    for declaration in (toy_collector.COLLECTOR, replace(toy_collector.COLLECTOR, name="other")):
        with pytest.raises(ValueError, match=r"toy"):
            REGISTRY.register(declaration)
    with pytest.raises(ValueError, match="ToyAskedOften"):
        RULES.register(toy_rule.RULE)
    assert REGISTRY.names == before
