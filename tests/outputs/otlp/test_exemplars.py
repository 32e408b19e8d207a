"""Step durations link to the trace that the user's program was in."""

from __future__ import annotations

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from torch_grad_exporter import start_exporter
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

NAME = "torch_train_step_duration_seconds"


def test_a_step_within_a_span_is_an_exemplar() -> None:
    """The official parser reads from OpenMetrics, also of `prometheus_client`, an exemplar that links to the span of the step."""
    registry, model, spans = CollectorRegistry(), torch.nn.Linear(3, 2), list[tuple[str, str]]()
    tracer, optimizer = TracerProvider().get_tracer("test"), torch.optim.SGD(model.parameters(), 0.1)
    with start_exporter(model, port=None, every=1, registry=registry) as exporter:
        for _ in range(8):
            with tracer.start_as_current_span("step") as span:
                context = span.get_span_context()
                spans.append((f"{context.trace_id:032x}", f"{context.span_id:016x}"))
                optimizer.zero_grad()
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
        family = next(family for family in exporter.collect() if family.spec.name == NAME)
        theirs = generate_latest(registry).decode()
    assert family.exemplars is not None
    known = sorted((item.trace_id.hex(), item.span_id.hex(), item.value) for item in dict(family.exemplars[0]).values())
    assert known
    assert {(trace, span) for trace, span, _ in known} <= {*spans}
    for text in (Renderer({"run": "r"}).render([family], Format.OPENMETRICS).decode(), theirs):
        (metric,) = (metric for metric in text_string_to_metric_families(text) if metric.name == NAME)
        read = [sample.exemplar for sample in metric.samples if sample.exemplar]
        assert sorted((item.labels["trace_id"], item.labels["span_id"], item.value) for item in read) == known
    assert b"trace_id" not in Renderer({"run": "r"}).render([family], Format.TEXT)


def test_spans_that_are_not_recorded_are_not_linked() -> None:
    """A span that its tracer does not sample leads nowhere, so that nothing links to it."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracer = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")
    with start_exporter(model, port=None, every=1) as exporter, tracer.start_as_current_span("step"):
        for _ in range(6):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        family = next(family for family in exporter.collect() if family.spec.name == NAME)
    assert not family.exemplars or not dict(family.exemplars[0])
