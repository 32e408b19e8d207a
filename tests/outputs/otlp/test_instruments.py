"""A few values appear in the instruments of a user's `MeterProvider`."""

from __future__ import annotations

import os

import prometheus_client
import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    Gauge,
    InMemoryMetricReader,
    MetricsData,
    Sum,
)
from opentelemetry.sdk.metrics.view import View

from tests.support.scrape import errors
from torch_grad_exporter import start_exporter
from torch_grad_exporter.exporter import Exporter
from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.otlp.instruments import SPECS
from torch_grad_exporter.outputs.prometheus import series

Values = dict[tuple[str, frozenset[tuple[str, object]]], float]


def collected(reader: InMemoryMetricReader) -> Values:
    """Return all points of one collection, by name and attributes."""
    data = reader.get_metrics_data()
    return {} if data is None else points(data)


def points(data: MetricsData) -> Values:
    """Return all points by name and attributes."""
    result: Values = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                assert isinstance(metric.data, Gauge | Sum)
                for point in metric.data.data_points:
                    result[metric.name, frozenset((point.attributes or {}).items())] = point.value
    return result


def expected(exporter: Exporter) -> Values:
    """Return the same from the exporter's own families."""
    names, own = {spec.name for spec in SPECS}, {"run": exporter.run, "rank": str(exporter.rank)}
    result: Values = {}
    for family in exporter.collect():
        if family.spec.name in names:
            for labels, (value,) in zip(series.labels(family, own), series.table(family).tolist(), strict=True):
                result[family.spec.name, frozenset(labels.items())] = value
    return result


MODELS: list[torch.nn.Module] = []
"""Keeps models alive, as a training does."""


def trained(provider: MeterProvider, run: str = "r", steps: int = 6) -> Exporter:
    """Return an exporter after some steps of a small model."""
    model = torch.nn.Linear(3, 2)
    MODELS.append(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exporter = start_exporter(model, port=None, run=run, every=1, meter_provider=provider)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).sum()
        loss.backward()
        exporter.observe(loss=loss, tokens=7)
        optimizer.step()
    return exporter


CHANGING = {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "torch_host_cpu_ratio",
    "torch_host_memory_available_bytes",
}


def lasting(result: Values) -> set[tuple[str, frozenset[tuple[str, object]]]]:
    """Return the keys that are there at every collection; the share of busy processors needs some time to be one of them."""
    return {key for key in result if key[0] != "torch_host_cpu_ratio"}


def test_the_instruments_show_what_the_exporter_shows() -> None:
    """Names, attributes, kinds and values are those of the families, without those per layer; units are UCUM's."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with trained(provider) as exporter:
        result, families = collected(reader), expected(exporter)
        assert lasting(result) == lasting(families)
        assert {key: value for key, value in result.items() if key[0] not in CHANGING} == {
            key: value for key, value in families.items() if key[0] not in CHANGING
        }
        assert result["torch_train_steps_total", frozenset({("run", "r"), ("rank", "0"), ("optimizer", "SGD")})] == 6
        assert result["torch_train_tokens_total", frozenset({("run", "r"), ("rank", "0")})] == 42
        assert not any("layer" in dict(labels) for _, labels in result)
        data = reader.get_metrics_data()
        assert data is not None
        declared = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
        for spec in SPECS:
            if spec.name in declared:
                shown = declared[spec.name].data
                assert shown.is_monotonic if isinstance(shown, Sum) else spec.kind is not Kind.COUNTER
        assert (declared["process_resident_memory_bytes"].unit, declared["process_cpu_seconds_total"].unit) == ("By", "s")
    provider.shutdown()


OURS = frozenset({("run", "r"), ("rank", "0")})


def state(result: Values, run: str = "r") -> str | None:
    """Return the state of a run, None if none is shown."""
    states = [dict(labels) for (name, labels), value in result.items() if name == "torch_train_state" and value]
    return next((str(labels["state"]) for labels in states if labels["run"] == run), None)


def test_the_last_values_are_shown_once() -> None:
    """After the end every reader has all values of the end once, and then nothing."""
    every = [InMemoryMetricReader() for _ in range(2)]
    provider = MeterProvider(every)
    exporter = trained(provider)
    live = collected(every[0])
    exporter.close()
    for reader in every:
        last = collected(reader)
        assert lasting(last) == lasting(live)
        assert (state(live), state(last), last["torch_train_tokens_total", OURS]) == ("training", "finished", 42)
    assert [collected(reader) for reader in every] == [{}, {}]
    provider.shutdown()


def test_a_collection_survives_a_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that fails is counted, yields no value and does not disturb the user's own instruments or the end."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], views=[View(instrument_name="*")])
    provider.get_meter("own").create_counter("own").add(3)
    with trained(provider) as exporter:

        def fails(*_: object) -> None:
            raise RuntimeError("collector")

        monkeypatch.setattr(prometheus_client.ProcessCollector, "collect", fails)
        result = {name: value for (name, _), value in collected(reader).items()}
        assert (result["own"], result["torch_train_tokens_total"]) == (3, 42)
        assert "process_resident_memory_bytes" not in result
        assert sum(errors(exporter).values()) > 0
    assert state(collected(reader)) == "finished"
    provider.shutdown()


@pytest.mark.process
def test_a_forked_child_shows_nothing() -> None:
    """A forked child, which has a copy of the provider, does not export the parent's values again."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])

    def shown_in_child() -> int:
        child = os.fork()
        if not child:
            os._exit(min(len(collected(reader)), 99))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with trained(provider):
        assert collected(reader)
        assert shown_in_child() == 0
        assert collected(reader)
    assert shown_in_child() == 0  # of the last values
    assert collected(reader)
    provider.shutdown()
