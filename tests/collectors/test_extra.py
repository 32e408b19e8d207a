"""`extra_registries`: the user's own metrics of `prometheus_client` beside the exporter's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import prometheus_client
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Metric, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import protobuf
from tests.support.otlp_receiver import HttpReceiver
from tests.support.tools import get
from torch_grad_exporter import start_exporter
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

MODEL = torch.nn.Linear(4, 2)


def registry() -> CollectorRegistry:
    """Return one with a metric of each kind."""
    made = CollectorRegistry()
    Gauge("queue_length", "Waiting requests.", ["queue"], registry=made).labels('a "b"\n').set(3)
    Counter("requests", "Requests.", registry=made).inc(5)
    Summary("reward", "Rewards.", registry=made).observe(2.5)
    Info("build", "Build.", registry=made).info({"version": "1.2"})
    Enum("phase", "Phase.", states=["rollout", "update"], registry=made).state("update")
    latency = Histogram("latency_seconds", "Latency.", ["kind"], buckets=(0.1, 1), registry=made)
    for kind, seconds in (("x", 0.05), ("x", 0.5), ("x", 5.0), ("y", 0.5)):
        latency.labels(kind).observe(seconds)
    return made


def samples(text: str, *without: str) -> Samples:
    """Return the samples of a scrape, without the labels that all have."""
    return {
        (sample.name, frozenset(set(sample.labels.items()) - {("run", "extra"), ("rank", "0")})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created") and not sample.name.startswith(without or ("nothing",))
    }


def test_all_kinds_are_served() -> None:
    """Each series is on `/metrics` with its value, and with our labels."""
    own = registry()
    with start_exporter(MODEL, 0, addr="127.0.0.1", linger=0, run="extra", extra_registries=[own]) as exporter:
        text = get(exporter.url)
    expected = samples(generate_latest(own).decode())
    shown = samples(text)
    assert {series: shown.get(series) for series in expected} == expected
    assert 'requests_total{run="extra",rank="0"} 5' in text
    assert "# HELP requests_total Requests.\n# TYPE requests_total counter\n" in text


def test_none_says_since_when_it_counts() -> None:
    """The exporter does not know since when the user's counters and histograms count, unlike its own."""
    with start_exporter(MODEL, None, extra_registries=[registry()]) as exporter:
        body = Renderer({}, start=1.0).render(exporter.collect(), Format.PROTOBUF)
    known = {
        message.name: getattr(message.metric[0], kind).HasField("created_timestamp")
        for message in protobuf.families(body)
        if (kind := protobuf.KINDS[message.type]) in ("counter", "histogram")
    }
    names = ("requests_total", "latency_seconds", "torch_grad_captures_total", "torch_train_step_duration_seconds")
    assert [known[name] for name in names] == [False, False, True, True]


def test_the_default_registry() -> None:
    """The registry that each process has is shown without what the exporter shows itself, each name once."""
    gauge = Gauge("test_extra_of_the_default_registry", "One.")
    try:
        with start_exporter(MODEL, None, extra_registries=[prometheus_client.REGISTRY]) as exporter:
            names = [family.spec.name for family in exporter.collect()]
    finally:
        prometheus_client.REGISTRY.unregister(gauge)
    assert "test_extra_of_the_default_registry" in names
    assert {name for name in names if name.startswith(("process_", "python_")) and names.count(name) > 1} == set()


@pytest.mark.server
def test_they_are_pushed() -> None:
    """What is pushed over OTLP has them, too."""
    with HttpReceiver() as receiver:
        with start_exporter(MODEL, None, otlp_endpoint=receiver.endpoint, extra_registries=[registry()]):
            pass
        numbers = [receiver.latest(name, **labels) for name, labels in (("queue_length", {"queue": 'a "b"\n'}), ("reward_sum", {}))]
        assert numbers == [3, 2.5]
        assert receiver.latest("requests_total") == 5


class Failing:
    """A collector that fails when it may."""

    def __init__(self) -> None:
        self.fails = False

    def collect(self) -> Iterator[Metric]:
        """Yield a metric, and then fail."""
        yield prometheus_client.metrics_core.GaugeMetricFamily("before_the_failure", "One.", value=1)
        if self.fails:
            raise RuntimeError("the queue is gone")
        yield prometheus_client.metrics_core.GaugeMetricFamily("behind_the_failure", "One.", value=1)


@pytest.mark.parametrize("at_start", [False, True])
def test_a_failing_collector_costs_itself(at_start: bool) -> None:
    """A collector of theirs that fails is counted; other registries and the exporter's own metrics stay."""
    failing, failures = CollectorRegistry(), Failing()
    failures.fails = at_start
    failing.register(failures)
    with start_exporter(MODEL, None, extra_registries=[failing, registry()]) as exporter:
        failures.fails = True
        values = exporter.values()
        failures.fails = False
        assert exporter.values("failure$") == {"before_the_failure": 1, "behind_the_failure": 1}
    assert values["requests_total"] == 5
    assert (values["before_the_failure"], "behind_the_failure" in values) == (1, False)
    assert values["torch_grad_exporter_collector_success/training"] == 1
    assert values["torch_grad_exporter_errors_total/collector_extra"] == 1


def one(name: str) -> CollectorRegistry:
    """Return a registry with this gauge."""
    made = CollectorRegistry()
    Gauge(name, "One.", registry=made)
    return made


def test_a_later_clash_is_left_out() -> None:
    """A metric that takes one of our names while the run goes on is left out and counted."""
    own = one("mine")
    with start_exporter(MODEL, None, extra_registries=[own, one("theirs")]) as exporter:
        for name in ("torch_grad_exporter_series", "theirs"):
            Gauge(name, "One.", registry=own).set(-1)
        exporter.collect()
        values = exporter.values()
    assert (values["mine"], values["torch_grad_exporter_errors_total/collector_extra"] > 0) == (0, True)
    assert values["torch_grad_exporter_series"] > 0


SAME = CollectorRegistry()
WRONG: list[tuple[Iterable[object], type[Exception], str]] = [
    ([one("torch_train_loss")], ValueError, "torch_train_loss.*one of the exporter's; rename yours"),
    ([one("mine"), one("mine")], ValueError, "two registries have a metric mine"),
    ([SAME], ValueError, "registry= and extra_registries="),
    (prometheus_client.REGISTRY, TypeError, "expected a list"),
    (["default"], TypeError, r"extra_registries=\['default'\]: expected a list"),
]


@pytest.mark.parametrize(("registries", "error", "text"), WRONG)
def test_wrong_registries(registries: Iterable[object], error: type[Exception], text: str) -> None:
    """Clashes of names and other objects are refused at the start."""
    with pytest.raises(error, match=text):
        start_exporter(MODEL, None, registry=SAME, extra_registries=registries)
