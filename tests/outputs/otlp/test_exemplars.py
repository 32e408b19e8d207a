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
from torch_grad_exporter.exporter import Exporter
from torch_grad_exporter.metrics.families import Exemplar, Family
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

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
    """Take some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()


def durations(exporter: Exporter) -> Family:
    """Return the family of step durations."""
    return next(family for family in exporter.collect() if family.spec.name == NAME)


def shown(family: Family) -> dict[int, Exemplar]:
    """Return its exemplars by bucket."""
    return {} if family.exemplars is None else dict(family.exemplars[0])


def test_a_sampled_step_within_a_span_is_an_exemplar(exporter: Scene, tracer: Tracer) -> None:
    """Of nine steps, each in a span of its own, the duration of the slow one links to its span, and no other does."""
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
    result = shown(family)
    bounds = (0.0, *family.spec.buckets, float("inf"))
    for bucket, item in result.items():
        assert family.values[0, bucket] > 0
        assert bounds[bucket] < item.value <= bounds[bucket + 1]
        assert abs(time.time() - item.at) < PATIENCE
    numbers = {(context.trace_id, context.span_id): number for number, context in enumerate(spans)}
    linked = {numbers[int.from_bytes(item.trace_id), int.from_bytes(item.span_id)]: item.value for item in result.values()}
    # A step ends within its call: its duration is at most from the end of the one before the last to its own.
    assert all(seconds <= ends[number + 1] - ends[max(0, number - 1)] for number, seconds in linked.items() if number)
    slow = max(linked, key=linked.__getitem__)
    assert slow == 5 or linked[slow] <= ends[slow + 1] - ends[slow - 1] > 0.3
    assert linked[slow] > 0.25


def test_openmetrics_and_a_registry_show_exemplars(tracer: Tracer) -> None:
    """The official parser reads the exemplar back, also of `prometheus_client`; in text 0.0.4 it would be an error."""
    registry, model = CollectorRegistry(), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with start_exporter(model, port=None, every=1, registry=registry) as own, tracer.start_as_current_span("all"):
        train(model, optimizer, 6)
        family, theirs = durations(own), generate_latest(registry).decode()
    known = sorted((item.trace_id.hex(), item.span_id.hex(), item.value) for item in shown(family).values())
    assert len(known[0][0]) == 32
    for text in (Renderer({"run": "r"}).render([family], Format.OPENMETRICS).decode(), theirs):
        (metric,) = (metric for metric in text_string_to_metric_families(text) if metric.name == NAME)
        read = [sample.exemplar for sample in metric.samples if sample.exemplar]
        assert sorted((item.labels["trace_id"], item.labels["span_id"], item.value) for item in read) == known
    assert b"trace_id" not in Renderer({"run": "r"}).render([family], Format.TEXT)


def test_spans_that_are_not_recorded_are_not_linked(exporter: Scene) -> None:
    """A span that its tracer does not sample leads nowhere, so that nothing links to it."""
    own, model, optimizer = exporter
    with TracerProvider(sampler=ALWAYS_OFF).get_tracer("test").start_as_current_span("step"):
        assert trace.get_current_span().get_span_context().is_valid
        train(model, optimizer, 6)
    assert shown(durations(own)) == {}
