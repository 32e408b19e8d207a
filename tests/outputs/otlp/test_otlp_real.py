"""The same run on both paths: a real Prometheus scrapes it, and it pushes itself over OTLP to a real VictoriaMetrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.cli.test_demo import demos
from tests.metrics.test_golden import MACHINE
from tests.support.catalogue import CATALOGUE
from tests.support.real_prometheus import Prometheus, prometheus
from tests.support.real_victoria import Series, Victoria, victoria
from tests.support.tools import eventually
from torch_grad_exporter.collectors.gradients import GRAD_NORM, GRAD_NORM_DISTRIBUTION
from torch_grad_exporter.collectors.training import TRAIN_STEP_DURATION, TRAIN_STEPS
from torch_grad_exporter.metrics.families import SCALE, Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.otlp.otlp import Encoder, Temporality

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
    *("torch_gpu_utilization_ratio", "torch_gpu_power_watts"),
}
"""What each reading measures anew, or says of the reading before."""


@dataclass(frozen=True, slots=True)
class Run:
    """What both stores have of a run that is over."""

    scraped: Stored
    pushed: Stored
    resources: list[dict[str, str]]
    """What VictoriaMetrics has made of the resource: labels of its own on each series."""
    bounds: set[str]
    """The bounds of VictoriaMetrics' buckets, as it writes them."""
    errors: str
    """What the run said on standard error."""


def key(labels: dict[str, str]) -> Key:
    """The key of a series."""
    rest = {name: value for name, value in labels.items() if name not in ("__name__", "le")}
    return labels["__name__"], float(labels["le"]) if "le" in labels else None, frozenset(rest.items())


def last(series: list[T], samples: Callable[[T], list[tuple[float, float]]]) -> list[T]:
    """The series that the last reading has: one that began with other labels, before the first step, is none of them."""
    ended_at = max(samples(one)[-1][0] for one in series)
    return [one for one in series if samples(one)[-1][0] == ended_at]


def in_prometheus(real: Prometheus) -> Stored:
    """The series of the last scrape with all their samples, without what Prometheus adds."""
    data = real.get("/api/v1/query", query='{run="both"}[5m]')
    assert isinstance(data, dict)
    scraped = [
        (key({name: value for name, value in found["metric"].items() if name not in ("job", "instance")}), numbers(found["values"]))
        for found in data["result"]
        if found["metric"]["__name__"] != "up" and not found["metric"]["__name__"].startswith("scrape_")
    ]
    return dict(last(scraped, lambda one: one[1]))


def numbers(samples: list[tuple[float, str]]) -> list[tuple[float, float]]:
    """Samples with their values as numbers, which come as texts."""
    return [(at, float(value)) for at, value in samples]


def without_resource(series: Series) -> Key:
    """The key of a series by the labels that have no dot in their name, as no label of ours has one."""
    return key({name: value for name, value in series.labels.items() if "." not in name})


def ended(store: Victoria) -> bool:
    """Whether the last push is there, which says how the run has ended."""
    return any(one.labels["state"] == "finished" and one.values[-1] == 1 for one in store.stored("torch_train_state"))


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
            assert eventually(lambda: any(one.values[-1] > 30 for one in store.stored("torch_train_steps_total")))
            assert demo.interrupt() == 0, demo.errors
            assert eventually(lambda: ended(store)), demo.errors
            stored = last(store.stored(), lambda one: one.samples)
            yield Run(
                scraped=in_prometheus(real),
                pushed={without_resource(one): one.samples for one in stored},
                resources=[{name: value for name, value in one.labels.items() if "." in name} for one in stored],
                bounds={one.labels["le"] for one in stored if "le" in one.labels},
                errors=demo.errors,
            )


def test_every_series_is_on_both_paths(run: Run) -> None:
    """What was scraped and what was pushed are the same series: names, labels, run and rank, and bounds of buckets as numbers."""
    assert run.pushed.keys() == run.scraped.keys()
    assert len(run.pushed) == len(run.resources)  # So no two differ in nothing but the resource.
    labels = [dict(rest) for _, _, rest in run.pushed]
    assert {(one["run"], one["rank"]) for one in labels} == {("both", "0")}
    names = {name for name, _, _ in run.pushed}
    assert {"torch_grad_norm", "torch_grad_norm_distribution_bucket", "torch_train_step_duration_seconds_sum"} <= names
    assert len(run.pushed) > 500


def test_every_value_is_the_same_at_the_end(run: Run) -> None:
    """All that belongs to the training has the same last value on both paths, whatever its kind, to the digits that are kept."""
    final = {
        one: samples[-1][1] for one, samples in run.scraped.items() if not one[0].startswith(MACHINE) and one[0] not in EACH_READING
    }
    wrong = {
        one: (value, run.pushed[one][-1][1])
        for one, value in final.items()
        if run.pushed[one][-1][1] != pytest.approx(value, rel=DIGITS, abs=0, nan_ok=True)
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


def test_what_the_machine_goes_on_counting_agrees(run: Run) -> None:
    """Counters of process and host are never behind what the other path saw earlier, and gauges are of one size."""
    machine = [one for one in run.scraped if one[0].startswith(MACHINE) and one[0] not in EACH_READING]
    for one in machine:
        scraped, pushed = run.scraped[one], run.pushed[one]
        assert max(scraped[0][0], pushed[0][0]) < min(scraped[-1][0], pushed[-1][0])
        if CATALOGUE[one[0]].kind is Kind.COUNTER:
            assert scraped[0][1] <= pushed[-1][1]
            assert pushed[0][1] <= scraped[-1][1]
        else:
            assert scraped[-1][1] / 2 <= pushed[-1][1] <= scraped[-1][1] * 2
    assert len(machine) > 8


def test_the_resource_becomes_labels(run: Run) -> None:
    """VictoriaMetrics puts each attribute of the resource on every series, with its dots; run and rank stay what they are."""
    first = run.resources[0]
    assert all(one == first for one in run.resources)
    assert set(first) >= {"service.name", "service.instance.id", "host.name", "process.pid"}
    assert (first["service.name"], first["service.instance.id"]) == ("training", "both/0")


def test_bounds_are_written_as_plain_decimals(run: Run) -> None:
    """A bound that a scrape shows as 1e-08, 1.0 or 1e+06 is a label without exponent and without needless digits over OTLP."""
    assert {"0.00000001", "0.001", "0.25", "1", "10000", "+Inf"} <= run.bounds
    assert not any("e" in bound or bound.endswith(".0") for bound in run.bounds)


# What becomes of single points


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victoria]:
    """A VictoriaMetrics for all tests below, each of which has a run of its own."""
    with victoria(tmp_path_factory.mktemp("victoria")) as running:
        yield running


def bodies(run: str, *families: Family, ago: float = 0.0, temporality: Temporality = Temporality.CUMULATIVE) -> list[bytes]:
    """Families as requests of a run, with values of so many seconds ago."""
    both = dict.fromkeys((Kind.COUNTER, Kind.HISTOGRAM), temporality)
    encoder = Encoder({"run": run, "rank": "0"}, {"service.name": "training", "run": run}, version="1", temporality=both)
    at = time.time_ns() - int(ago * 1e9)
    return encoder.encode(families, start=at - 10**9, since=at - 10**9, at=at)


def push(store: Victoria, run: str, *families: Family, ago: float = 0.0) -> None:
    """Pushes families as they are."""
    for body in bodies(run, *families, ago=ago):
        assert store.push(body) == (200, b"")


def test_what_is_not_finite(store: Victoria) -> None:
    """Infinities are stored, zeros are zeros, and a NaN leaves no sample: the value before it is shown for a while."""
    layers = LabelRows((("nan",), ("infinite",), ("negative",), ("dead",)))
    push(store, "finite", Family(GRAD_NORM, np.ones(4), layers), ago=2)
    push(store, "finite", Family(GRAD_NORM, np.array([np.nan, np.inf, -np.inf, 0.0]), layers), ago=1)
    stored = {one.labels["layer"]: one.values for one in store.stored('torch_grad_norm{run="finite"}')}
    assert stored == {"nan": [1.0], "infinite": [1.0, np.inf], "negative": [1.0, -np.inf], "dead": [1.0, 0.0]}
    assert [value for _, value in store.query('torch_grad_norm{run="finite",layer="nan"}')] == [1.0]


def test_digits_beside_an_explosion(store: Victoria) -> None:
    """VictoriaMetrics keeps the samples of a series at one number of decimals: beside 1e20 a small norm is 0, alone it is not."""
    layers = LabelRows((("exploded",), ("calm",)))
    for ago, values in ((3, (1e20, 0.25)), (2, (1e-3, 0.1 + 0.2)), (1, (5.0, 1e-3))):
        push(store, "digits", Family(GRAD_NORM, np.array(values), layers), ago=ago)
    stored = {one.labels["layer"]: one.values for one in store.stored('torch_grad_norm{run="digits"}')}
    assert stored["exploded"] == [1e20, 0.0, 0.0]
    assert stored["calm"] == pytest.approx([0.25, 0.3, 1e-3], rel=DIGITS)


def test_awkward_labels(store: Victoria) -> None:
    """A label with quotes, line breaks and letters of all the world is stored as it is."""
    awkward = 'a\\b"c\nd ä😀{},='
    push(store, "awkward", Family(GRAD_NORM, np.ones(1), LabelRows(((awkward,),))))
    (found,) = store.stored('torch_grad_norm{run="awkward"}')
    assert found.labels == {
        "__name__": "torch_grad_norm",
        "run": "awkward",
        "rank": "0",
        "layer": awkward,
        "service.name": "training",
    }


def test_differences_are_thrown_away(store: Victoria) -> None:
    """VictoriaMetrics says that all is well and takes no counter and no histogram that has differences; gauges it takes."""
    durations = Family(TRAIN_STEP_DURATION, np.ones((1, len(TRAIN_STEP_DURATION.buckets) + 1)), sums=np.ones(1))
    norm = Family(GRAD_NORM, np.ones(1), LabelRows((("a",),)))
    (body,) = bodies(
        "delta", Family(TRAIN_STEPS, np.ones(1), LabelRows((("all",),))), durations, norm, temporality=Temporality.DELTA
    )
    assert store.push(body) == (200, b"")
    assert [one.labels["__name__"] for one in store.stored('{run="delta"}')] == ["torch_grad_norm"]
    for kind in ("sum", "histogram"):
        reason = f"unsupported_{kind}_aggregation"
        assert store.own(f'vm_protoparser_rows_dropped_total{{type="opentelemetry",reason="{reason}"}}') == 1


def test_names_under_prometheus_naming(tmp_path: Path) -> None:
    """With VictoriaMetrics' own translation switched on, every metric keeps its name, and the resource's labels get underscores."""
    with victoria(tmp_path, "-opentelemetry.usePrometheusNaming") as store:
        push(store, "named", *(example(spec) for spec in CATALOGUE.values()))
        stored = store.stored()
    suffixes = {kind: ("_bucket", "_sum", "_count") if kind is Kind.HISTOGRAM else ("",) for kind in Kind}
    expected = {f"{spec.name}{suffix}" for spec in CATALOGUE.values() for suffix in suffixes[spec.kind]}
    assert {one.labels["__name__"] for one in stored} == expected
    assert {name for one in stored for name in one.labels} == {
        *("__name__", "service_name", "run", "rank", "le"),
        *(name for spec in CATALOGUE.values() for name in spec.labels),
    }


def example(spec: Spec) -> Family:
    """A row of a metric."""
    labels = LabelRows((tuple(f"a {name}" for name in spec.labels),))
    if spec.kind is Kind.HISTOGRAM:
        return Family(spec, np.ones((1, len(spec.buckets) + 1)), labels, sums=np.ones(1))
    return Family(spec, np.ones(1), labels)


# Exponential histograms


def ranges(store: Victoria, name: str) -> dict[tuple[float, float], float]:
    """The buckets that VictoriaMetrics has made of an exponential histogram, by their bounds."""
    stored = {one.labels["vmrange"]: one.values[-1] for one in store.stored(f"{name}_bucket")}
    return {(float(low), float(high)): count for text, count in stored.items() for low, high in (text.split("..."),)}


def test_an_exponential_histogram_of_the_official_library(store: Victoria) -> None:
    """It becomes a series for each bucket that is not empty, with its bounds to four digits, one for zeros, a sum and a count."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="official")
    metric.exponential_histogram.aggregation_temporality = Temporality.CUMULATIVE.value
    point = metric.exponential_histogram.data_points.add(count=12, sum=5.0, scale=1, zero_count=2, time_unix_nano=time.time_ns())
    point.positive.offset = -2  # (1/2, 1/sqrt(2)], then two more
    point.positive.bucket_counts.extend([1, 0, 9])
    assert store.push(request.SerializeToString()) == (200, b"")
    assert ranges(store, "official") == {(0.0, 0.0): 2.0, (0.5, 0.7071): 1.0, (1.0, 1.414): 9.0}
    assert store.query("official_count") == [({"__name__": "official_count"}, 12.0)]
    assert store.query("official_sum") == [({"__name__": "official_sum"}, 5.0)]


def test_our_exponential_histogram(store: Victoria) -> None:
    """Every observation is in a range around it, and the quantiles that VictoriaMetrics finds are off by a bucket at most."""
    norms = np.random.default_rng(8).lognormal(-3.0, 2.0, 2000)
    counts: dict[int, int] = {}
    for norm in norms.tolist():
        index = math.ceil(math.log2(norm) * 2**SCALE) - 1
        counts[index] = counts.get(index, 0) + 1
    buckets = np.zeros((1, len(GRAD_NORM_DISTRIBUTION.buckets) + 1))
    buckets[0, -1] = len(norms) + 5  # Five zeros; of what is sent, only the sum of these counts.
    layers = LabelRows((("a",),))
    push(store, "ours", Family(GRAD_NORM_DISTRIBUTION, buckets, layers, sums=np.array([norms.sum()]), exponential=(counts,)))
    found = ranges(store, "torch_grad_norm_distribution")
    assert found.pop((0.0, 0.0)) == 5
    assert sum(found.values()) == len(norms)
    for (low, high), count in found.items():
        assert high / low == pytest.approx(2 ** (1 / 2**SCALE), rel=1e-3)
        inside = ((norms > low * 1.001) & (norms <= high * 0.999)).sum()
        around = ((norms > low * 0.999) & (norms <= high * 1.001)).sum()
        assert inside <= count <= around
    for quantile in (0.1, 0.5, 0.99):
        ((_, value),) = store.query(f"histogram_quantile({quantile}, torch_grad_norm_distribution_bucket)")
        assert value == pytest.approx(np.quantile(np.append(norms, np.zeros(5)), quantile), rel=0.1)
