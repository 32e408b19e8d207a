"""A few values appear in the instruments of a `MeterProvider` of the user's."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref

import pytest
import torch
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    Gauge,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
    Sum,
)
from opentelemetry.sdk.metrics.view import View

from torch_grad_exporter import start_exporter
from torch_grad_exporter.capture.build import Capture
from torch_grad_exporter.exporter import Exporter
from torch_grad_exporter.metrics.families import Kind
from torch_grad_exporter.outputs.otlp.instruments import SPECS
from torch_grad_exporter.outputs.prometheus import series

Values = dict[tuple[str, frozenset[tuple[str, object]]], float]


def collected(reader: InMemoryMetricReader) -> Values:
    """All points of one collection, by name and attributes."""
    data = reader.get_metrics_data()
    return {} if data is None else points(data)


def points(data: MetricsData) -> Values:
    """The same of what was collected."""
    found: Values = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                assert isinstance(metric.data, Gauge | Sum)
                for point in metric.data.data_points:
                    found[metric.name, frozenset((point.attributes or {}).items())] = point.value
    return found


def expected(exporter: Exporter) -> Values:
    """The same from the exporter's own families."""
    names, own = {spec.name for spec in SPECS}, {"run": exporter.run, "rank": str(exporter.rank)}
    found: Values = {}
    for family in exporter.collect():
        if family.spec.name in names:
            for row, (value,) in zip(series.present_rows(family), series.table(family).tolist(), strict=True):
                labels = {name: text for name, text in zip(family.spec.labels, row, strict=True) if text}
                found[family.spec.name, frozenset({**own, **labels}.items())] = value
    return found


def trained(provider: MeterProvider, run: str = "r", steps: int = 6) -> Exporter:
    """An exporter after so many steps of a small model."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exporter = start_exporter(model, port=None, run=run, every=1, meter_provider=provider)
    exporter._kept = model  # type: ignore[attr-defined]
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


def lasting(found: Values) -> set[tuple[str, frozenset[tuple[str, object]]]]:
    """The keys of what is there at every collection; the share of time that processors work needs some time to be one of."""
    return {key for key in found if key[0] != "torch_host_cpu_ratio"}


def test_the_instruments_show_what_the_exporter_shows() -> None:
    """Names, attributes, kinds and values are those of the families; nothing per layer is there."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with trained(provider) as exporter:
        found, families = collected(reader), expected(exporter)
        assert lasting(found) == lasting(families)
        assert {key: value for key, value in found.items() if key[0] not in CHANGING} == {
            key: value for key, value in families.items() if key[0] not in CHANGING
        }
        assert found["torch_train_steps_total", frozenset({("run", "r"), ("rank", "0"), ("optimizer", "SGD")})] == 6
        assert found["torch_train_tokens_total", frozenset({("run", "r"), ("rank", "0")})] == 42
        assert not any("layer" in dict(labels) for _, labels in found)
    provider.shutdown()


OURS = frozenset({("run", "r"), ("rank", "0")})


def state(found: Values, run: str = "r") -> str | None:
    """The state of a run, `None` where nothing is said of it."""
    states = [dict(labels) for (name, labels), value in found.items() if name == "torch_train_state" and value]
    return next((str(labels["state"]) for labels in states if labels["run"] == run), None)


@pytest.mark.parametrize("readers", [1, 2])
def test_the_last_values_are_shown_once(readers: int) -> None:
    """After the end every reader has the values of the end once, all of them, and then nothing."""
    every = [InMemoryMetricReader() for _ in range(readers)]
    provider = MeterProvider(every)
    exporter = trained(provider)
    live = collected(every[0])
    exporter.close()
    for reader in every:
        last = collected(reader)
        assert lasting(last) == lasting(live)
        assert (state(live), state(last), last["torch_train_tokens_total", OURS]) == ("training", "finished", 42)
    assert [collected(reader) for reader in every] == [{}] * readers
    provider.shutdown()


class Kept(MetricExporter):
    """Keeps what it is to export."""

    def __init__(self) -> None:
        super().__init__()
        self.exports: list[MetricsData] = []

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: object) -> MetricExportResult:
        """As of `MetricExporter`."""
        self.exports.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        """As of `MetricExporter`."""
        return True

    def shutdown(self, timeout_millis: float = 0, **_: object) -> None:
        """As of `MetricExporter`."""


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_shorter_than_the_readers_interval(failed: bool) -> None:
    """A reader that collects every minute exports the final values when its provider ends after the run: state, steps and all."""
    kept = Kept()
    provider = MeterProvider([PeriodicExportingMetricReader(kept, 60_000)])
    with contextlib.suppress(ZeroDivisionError), trained(provider):
        assert kept.exports == []
        if failed:
            raise ZeroDivisionError
    provider.shutdown()
    (data,) = kept.exports
    found = points(data)
    assert state(found) == ("failed" if failed else "finished")
    assert found["torch_train_steps_total", OURS | {("optimizer", "SGD")}] == 6


def test_the_last_values_give_way_to_the_same_rank() -> None:
    """An exporter of the same run and rank that comes after has newer values; of another run both are shown."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    trained(provider, "other").close()
    trained(provider, "r").close()
    with trained(provider, "r", steps=2):
        found = collected(reader)
        assert (state(found), state(found, "other")) == ("training", "finished")
        assert found["torch_train_tokens_total", OURS] == 14
    assert (state(collected(reader)), collected(reader)) == ("finished", {})
    provider.shutdown()


def test_a_start_that_fails_leaves_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has never run has not finished."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])

    def fails(*_: object) -> None:
        raise RuntimeError("hooks")

    monkeypatch.setattr(Capture, "watch", fails)
    with pytest.raises(RuntimeError, match="hooks"):
        trained(provider)
    assert collected(reader) == {}
    provider.shutdown()


def test_last_values_that_fail_cost_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter closes all the same, shows nothing, and counts it."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    exporter = trained(provider)

    def fails() -> None:
        raise RuntimeError("collector")

    monkeypatch.setattr(exporter._instruments, "_scrape", fails)
    exporter.close()
    assert (collected(reader), exporter._errors.counts()["request"]) == ({}, 1)
    provider.shutdown()


def test_kinds_and_units() -> None:
    """A counter is a monotonic sum, and units are UCUM's."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with trained(provider):
        data = reader.get_metrics_data()
        assert data is not None
        found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    for spec in SPECS:
        if spec.name in found:
            data_of = found[spec.name].data
            assert isinstance(data_of, Sum if spec.kind is Kind.COUNTER else Gauge)
            assert not isinstance(data_of, Sum) or data_of.is_monotonic
    assert (found["process_resident_memory_bytes"].unit, found["process_cpu_seconds_total"].unit) == ("By", "s")
    provider.shutdown()


def test_exporters_that_follow_one_another_share_the_instruments(caplog: pytest.LogCaptureFixture) -> None:
    """A provider keeps instruments for good: the second exporter makes none, and each value is there once."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    trained(provider, "first").close()
    assert state(collected(reader), "first") == "finished"
    with trained(provider, "second", steps=2), trained(provider, "third", steps=3):
        found = collected(reader)
    steps = {dict(labels)["run"]: value for (name, labels), value in found.items() if name == "torch_train_steps_total"}
    assert steps == {"second": 2, "third": 3}
    assert "already" not in caplog.text
    provider.shutdown()


def test_the_global_provider_stays_as_it_was_and_ours_is_not_kept() -> None:
    """No provider but the given one has instruments, and a provider that is dropped is gone."""
    before = metrics.get_meter_provider()
    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    trained(provider).close()
    assert metrics.get_meter_provider() is before
    gone = weakref.ref(provider)
    provider.shutdown()
    del provider
    gc.collect()
    assert gone() is None


def test_a_collection_survives_a_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails yields no value and is counted; the user's own instruments are collected."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], views=[View(instrument_name="*")])
    provider.get_meter("own").create_counter("own").add(3)
    with trained(provider) as exporter:

        def fails() -> None:
            raise RuntimeError("collector")

        monkeypatch.setattr(exporter._instruments, "_scrape", fails)
        found = collected(reader)
        assert list(found.values()) == [3]
        assert exporter._errors.counts()["request"] == len(SPECS)
    provider.shutdown()


def test_a_forked_child_shows_nothing() -> None:
    """The child has a copy of the provider, which would export the parent's values again."""
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


def test_something_else_is_refused() -> None:
    """The message names the argument and what is expected; nothing was registered."""
    with pytest.raises(TypeError, match=r"meter_provider=3: expected an opentelemetry\.metrics\.MeterProvider"):
        start_exporter(torch.nn.Linear(1, 1), port=None, meter_provider=3)  # type: ignore[arg-type]
