"""The same run on both paths: a real Prometheus scrapes it, and it pushes itself over OTLP to a real VictoriaMetrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.cli.test_demo import demos
from tests.metrics.test_golden import MACHINE
from tests.outputs.otlp.support import exported
from tests.support.real_prometheus import Prometheus, prometheus
from tests.support.real_victoria import Series, Victoria, victoria
from tests.support.tools import eventually
from torch_grad_exporter.collectors.gradients import GRAD_NORM
from torch_grad_exporter.metrics.families import Family, LabelRows

pytestmark = pytest.mark.server

T = TypeVar("T")

Key = tuple[str, float | None, frozenset[tuple[str, str]]]
"""A series: its name, the bound of its bucket, and its other labels."""

Stored = dict[Key, list[tuple[float, float]]]
"""Samples by series, each with Unix time in seconds, oldest first."""

DIGITS = 1e-11
"""What VictoriaMetrics may lose of a value, as it keeps decimals: 15 digits and more of most, 12 of very small ones."""

EACH_READING = {
    *("torch_grad_exporter_collector_duration_seconds", "torch_grad_exporter_series", "torch_host_cpu_ratio"),
    *("torch_gpu_utilization_ratio", "torch_gpu_power_watts", "torch_grad_exporter_threads_cpu_seconds_total"),
}
"""Metrics that each reading measures again, or that describe the reading before."""


@dataclass(frozen=True, slots=True)
class Run:
    """The samples of a run that is over in both stores."""

    scraped: Stored
    pushed: Stored
    resources: list[dict[str, str]]
    """What VictoriaMetrics has made of the resource: labels of its own on each series."""
    errors: str
    """What the run said on standard error."""
    store: Victoria
    """Still running."""


def key(labels: dict[str, str]) -> Key:
    """Return the key of a series."""
    rest = {name: value for name, value in labels.items() if name not in ("__name__", "le")}
    return labels["__name__"], float(labels["le"]) if "le" in labels else None, frozenset(rest.items())


def last(series: list[T], samples: Callable[[T], list[tuple[float, float]]]) -> list[T]:
    """Return the series of the last reading, without those that ended earlier because their labels changed."""
    ended_at = max(samples(item)[-1][0] for item in series)
    return [item for item in series if samples(item)[-1][0] == ended_at]


def in_prometheus(real: Prometheus) -> Stored:
    """Return the series of the last scrape with all their samples, without those that Prometheus adds."""
    data = real.get("/api/v1/query", query='{run="both"}[5m]')
    assert isinstance(data, dict)
    scraped = []
    for series in data["result"]:
        labels = {name: value for name, value in series["metric"].items() if name not in ("job", "instance")}
        if labels["__name__"] != "up" and not labels["__name__"].startswith("scrape_"):
            scraped.append((key(labels), [(at, float(value)) for at, value in series["values"]]))
    return dict(last(scraped, lambda item: item[1]))


def without_resource(series: Series) -> Key:
    """Return the key of a series by the labels without a dot in their name, since none of ours has one."""
    return key({name: value for name, value in series.labels.items() if "." not in name})


def ended(store: Victoria) -> bool:
    """Return whether the last push has arrived, which has the state of the end."""
    return any(item.labels["state"] == "finished" and item.values[-1] == 1 for item in store.stored("torch_train_state"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A demo with a NaN and a dead layer, scraped twice a second and pushed twice a second, that ends by Ctrl-C."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("demo", "prometheus", "victoria")}
    with victoria(folders["victoria"]) as store, pytest.MonkeyPatch.context() as environment, demos(folders["demo"]) as start:
        environment.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", store.endpoint)
        environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        environment.setenv("TORCH_GRAD_EXPORTER_RUN", "both")
        environment.setenv("TORCH_GRAD_EXPORTER_LINGER", "600")  # One more scrape sees the end.
        demo = start("--inject", "nan@5", "--inject", "dead@1")
        port = urlsplit(demo.url).port
        assert port is not None
        with prometheus(folders["prometheus"], port, run="both") as real:
            assert eventually(real.is_scraping)
            assert eventually(lambda: bool(real.query("torch_train_steps_total > 30")))
            assert eventually(lambda: any(item.values[-1] > 30 for item in store.stored("torch_train_steps_total")))
            assert demo.interrupt() == 0, demo.errors
            assert eventually(lambda: ended(store)), demo.errors
            stored = last(store.stored(), lambda item: item.samples)
            yield Run(
                scraped=in_prometheus(real),
                pushed={without_resource(item): item.samples for item in stored},
                resources=[{name: value for name, value in item.labels.items() if "." in name} for item in stored],
                errors=demo.errors,
                store=store,
            )


def test_every_series_is_on_both_paths(run: Run) -> None:
    """Both paths have the same names, labels and bounds of buckets; pushed ones have the resource's labels besides."""
    assert run.pushed.keys() == run.scraped.keys()
    assert len(run.pushed) == len(run.resources)  # So no two differ in nothing but the resource.
    first = run.resources[0]
    assert all(item == first for item in run.resources)
    assert (first["service.name"], first["service.instance.id"]) == ("training", "both/0")
    labels = [dict(rest) for _, _, rest in run.pushed]
    assert {(item["run"], item["rank"]) for item in labels} == {("both", "0")}
    names = {name for name, _, _ in run.pushed}
    assert {"torch_grad_norm", "torch_grad_norm_distribution_bucket", "torch_train_step_duration_seconds_sum"} <= names
    assert len(run.pushed) > 500


def test_every_value_is_the_same_at_the_end(run: Run) -> None:
    """Every series of the training has the same last value on both paths."""
    final = {
        item: samples[-1][1]
        for item, samples in run.scraped.items()
        if not item[0].startswith(MACHINE) and item[0] not in EACH_READING
    }
    wrong = {
        item: (value, run.pushed[item][-1][1])
        for item, value in final.items()
        if run.pushed[item][-1][1] != pytest.approx(value, rel=DIGITS, abs=0, nan_ok=True)
    }
    assert "otlp" not in run.errors, run.errors
    assert wrong == {}
    assert len(final) > 0.9 * len(run.scraped)
    by_name = {name: [value for (other, _, _), value in final.items() if other == name] for name, _, _ in final}
    assert by_name["torch_train_steps_total"][0] > 30
    assert sum(by_name["torch_grad_nonfinite_elements_total"]) == 64 * 16
    assert 1.0 in by_name["torch_grad_dead_ratio"]
    states = {value: dict(rest)["state"] for (name, _, rest), value in final.items() if name == "torch_train_state"}
    assert states[1.0] == "finished"


def test_infinities_and_awkward_labels_are_stored(run: Run) -> None:
    """Infinities and zeros are stored, a NaN leaves no sample, and a label with quotes and line breaks stays as it is."""
    awkward = 'a\\b"c\nd ä😀{},='
    layers = LabelRows((("nan",), ("infinite",), ("negative",), (awkward,)))
    values = (np.ones(4), np.array([np.nan, np.inf, -np.inf, 0.0]))
    exports = [[Family(GRAD_NORM, some, layers)] for some in values]
    failures, _ = exported(run.store.endpoint, exports, labels={"run": "finite", "rank": "0"})
    assert failures == []
    stored = {item.labels["layer"]: item.values for item in run.store.stored('torch_grad_norm{run="finite"}')}
    assert stored == {"nan": [1.0], "infinite": [1.0, np.inf], "negative": [1.0, -np.inf], awkward: [1.0, 0.0]}
