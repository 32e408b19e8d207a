"""Step durations link to the trace that the user's program was in."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.tools import PATIENCE
from torch_grad_exporter import start_exporter
from torch_grad_exporter.capture import loop
from torch_grad_exporter.exporter import Exporter
from torch_grad_exporter.metrics.families import Exemplar, Family
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer
from torch_grad_exporter.transfer.tracing import active_trace

Scene = tuple[Exporter, torch.nn.Module, torch.optim.Optimizer]
NAME = "torch_train_step_duration_seconds"


@pytest.fixture
def tracer() -> Tracer:
    """A tracer that records all spans."""
    return TracerProvider().get_tracer("test")


@pytest.fixture
def exporter() -> Iterator[Scene]:
    """An exporter that samples every round, its model and an optimizer."""
    model = torch.nn.Linear(3, 2)
    exporter = start_exporter(model, port=None, every=1)
    yield exporter, model, torch.optim.SGD(model.parameters(), 0.1)
    exporter.close()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Takes so many steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()


def durations(exporter: Exporter) -> Family:
    """The family of step durations."""
    return next(family for family in exporter.collect() if family.spec.name == NAME)


def shown(family: Family) -> dict[int, Exemplar]:
    """Its exemplars by bucket."""
    return {} if family.exemplars is None else dict(family.exemplars[0])


def test_a_sampled_step_within_a_span_is_an_exemplar(exporter: Scene, tracer: Tracer) -> None:
    """Of nine steps, each in a span of its own, the slow one's duration links to the slow one's span, and no other does."""
    own, model, optimizer = exporter
    train(model, optimizer, 2)
    assert shown(durations(own)) == {}
    spans, ends = [], [time.perf_counter()]
    for number in range(9):
        with tracer.start_as_current_span("step") as span:
            spans.append(span.get_span_context())
            time.sleep(0.3 if number == 5 else 0)
            train(model, optimizer)
            ends.append(time.perf_counter())
    family = durations(own)
    found = shown(family)
    bounds = (0.0, *family.spec.buckets, float("inf"))
    for bucket, one in found.items():
        assert family.values[0, bucket] > 0
        assert bounds[bucket] < one.value <= bounds[bucket + 1]
        assert abs(time.time() - one.at) < PATIENCE
    numbers = {(context.trace_id, context.span_id): number for number, context in enumerate(spans)}
    linked = {numbers[int.from_bytes(one.trace_id), int.from_bytes(one.span_id)]: one.value for one in found.values()}
    # A step ends within its call: its duration is at most from the end of the one before the last to its own.
    assert all(seconds <= ends[number + 1] - ends[max(0, number - 1)] for number, seconds in linked.items() if number)
    slow = max(linked, key=linked.__getitem__)
    assert slow == 5 or linked[slow] <= ends[slow + 1] - ends[slow - 1] > 0.3
    assert linked[slow] > 0.25


def test_only_sampled_steps_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 steps of which every fourth is sampled, the exporter looks for the trace of ten."""
    asked = []
    monkeypatch.setattr(loop, "active_trace", lambda: asked.append(1))
    model = torch.nn.Linear(3, 2)
    with start_exporter(model, port=None, every=4):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 40)
    assert len(asked) == 10


def test_openmetrics_shows_it_and_the_older_format_does_not(exporter: Scene, tracer: Tracer) -> None:
    """The official parser reads the exemplar back; in text 0.0.4 there is none, where it would be an error."""
    own, model, optimizer = exporter
    with tracer.start_as_current_span("all"):
        train(model, optimizer, 6)
    family = durations(own)
    (bucket, one), *_ = shown(family).items()
    text = Renderer({"run": "r"}).render([family], Format.OPENMETRICS).decode()
    (metric,) = text_string_to_metric_families(text)
    read = {
        sample.labels["le"]: sample.exemplar for sample in metric.samples if sample.name == f"{NAME}_bucket" and sample.exemplar
    }
    assert len(read) == len(shown(family))
    exemplar = list(read.values())[sorted(shown(family)).index(bucket)]
    assert exemplar.labels == {"trace_id": one.trace_id.hex(), "span_id": one.span_id.hex()}
    assert (exemplar.value, float(exemplar.timestamp)) == (one.value, pytest.approx(one.at, abs=1e-3))
    assert len(exemplar.labels["trace_id"]) == 32
    assert b"trace_id" not in Renderer({"run": "r"}).render([family], Format.TEXT)


def test_a_registry_shows_it(tracer: Tracer) -> None:
    """`prometheus_client` renders the same exemplar from the registry of the user."""
    registry, model = CollectorRegistry(), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with start_exporter(model, port=None, every=1, registry=registry) as own, tracer.start_as_current_span("all") as span:
        train(model, optimizer, 4)
        assert shown(durations(own))
        text = generate_latest(registry).decode()
    assert f'trace_id="{span.get_span_context().trace_id:032x}"' in text


def test_what_is_not_recorded_is_no_exemplar(exporter: Scene) -> None:
    """A span that its tracer does not sample leads nowhere, so nothing links to it; nor does no span at all."""
    own, model, optimizer = exporter
    assert active_trace() is None
    with TracerProvider(sampler=ALWAYS_OFF).get_tracer("test").start_as_current_span("step"):
        assert trace.get_current_span().get_span_context().is_valid
        assert active_trace() is None
        train(model, optimizer, 6)
    assert shown(durations(own)) == {}
