"""A scrape by number of series: collecting, rendering and compressing alone, and a whole `GET` over HTTP.

The series are those of real layers that were trained for a while, so that none is absent. Beside it: what `prometheus_client`
takes for the same families once they are its own objects.
"""

from __future__ import annotations

import gzip
import logging
import time
import urllib.request
from collections.abc import Iterable
from statistics import median

import prometheus_client
import torch
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from benchmarks import record
from benchmarks.bars import verdict
from benchmarks.costs import profiled
from benchmarks.costs.timing import times
from benchmarks.interleave import interval
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

SIZES = (1_000, 10_000, 50_000)
BARS = {10_000: 10e-3, 50_000: 50e-3}
SAMPLES = 21
"""From 20 samples on every metric of a layer is there."""

ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
SHARED_SECONDS = 1.05
"""Scrapes within a second share one answer, so a new one is asked for later."""

GETS = 10


class Layers(torch.nn.Module):
    """This many layers of two by two, side by side: real names and real gradients, and cheap steps."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum of all layers' outputs."""
        found: torch.Tensor = sum(block(inputs) for block in self.blocks)
        return found


class Ready(Collector):
    """A collector of `prometheus_client` that has its metrics already."""

    def __init__(self, metrics: Iterable[prometheus_client.Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[prometheus_client.Metric]:
        """The metrics that it was made with."""
        return self._metrics


def exporter_with(series: int, registry: prometheus_client.CollectorRegistry | None = None) -> tuple[Layers, Exporter]:
    """An exporter of as many layers as make about this many series, after some sampled steps of all of them."""
    model = Layers(max(1, round((series - 100) / series_per_layer())))
    return model, trained(model, registry)


def series_per_layer() -> float:
    """How many series a layer has: the difference between a model of two and one of four layers."""
    counts = []
    for layers in (2, 4):
        with trained(Layers(layers)) as exporter:
            counts.append(sum(family.series for family in exporter.collect()))
    return (counts[1] - counts[0]) / 2


def trained(model: torch.nn.Module, registry: prometheus_client.CollectorRegistry | None = None) -> Exporter:
    """An exporter of a model, after `SAMPLES` sampled steps."""
    exporter = start_exporter(model, port=0, addr="127.0.0.1", every=1, max_layers=100_000, registry=registry)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(SAMPLES):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    return exporter


def measure(seconds: float) -> list[record.Table]:
    """All sizes, each for about three times these seconds and the time between `GETS` scrapes; and a profile."""
    torch.set_num_threads(1)
    logging.getLogger("torch_grad_exporter").setLevel(logging.ERROR)
    rows: list[list[record.Cell]] = []
    profile: record.Table | None = None
    for size in SIZES:
        registry = prometheus_client.CollectorRegistry()
        model, exporter = exporter_with(size, registry)
        with exporter:
            rows += _rows(size, exporter, registry, seconds)
            if size == 10_000:
                profile = _profile(exporter)
        del model
    columns = ("series", "what", "first ms", "best ms", "median ms", "within the bar")
    notes = [
        "First: where it prepares what later scrapes use again. The bar is for rendering, by its median: 10 ms and 50 ms.",
        "GET: a client in the same process, gzip and OpenMetrics, at least a second after the one before; training stands still.",
        "generate_latest: over the same families as `prometheus_client` objects, made beforehand; uncompressed as `render`.",
    ]
    return [record.table("A scrape, by number of series", columns, rows, notes), *([profile] if profile else [])]


def _rows(size: int, exporter: Exporter, registry: prometheus_client.CollectorRegistry, seconds: float) -> list[list[record.Cell]]:
    renderer = Renderer({"run": exporter.run, "rank": str(exporter.rank)})
    families: list[Family] = []
    body = b""

    def collect() -> None:
        families[:] = exporter.collect()

    def render() -> None:
        nonlocal body
        body = renderer.render(families, Format.OPENMETRICS)

    def everything() -> None:
        collect()
        render()
        gzip.compress(body, compresslevel=1, mtime=0)

    found = {"collect": times(collect, seconds), "render": times(render, seconds)}
    found["render in protobuf"] = times(lambda: renderer.render(families, Format.PROTOBUF), seconds)
    found["gzip"] = times(lambda: gzip.compress(body, compresslevel=1, mtime=0), seconds)
    found["collect, render and gzip"] = times(everything, seconds)
    found["GET over HTTP"] = [_get(exporter) for _ in range(GETS)]
    ready = prometheus_client.CollectorRegistry()
    ready.register(Ready(registry.collect()))
    found["prometheus_client.generate_latest"] = times(lambda: generate_latest(ready), seconds)
    lines = sum(1 for line in body.splitlines() if not line.startswith(b"#"))
    bar = BARS.get(size)
    rows: list[list[record.Cell]] = []
    for what, values in found.items():
        ms = [round(1e3 * value, 2) for value in (values[0], min(values), median(values[1:]))]
        answer = "" if what != "render" or bar is None else verdict(*interval(values[1:], median, resamples=500), bar)
        rows.append([lines, what, *ms, answer])
    return rows


def _get(exporter: Exporter) -> float:
    """Seconds of one scrape as Prometheus makes it, after a pause."""
    if exporter.url is None:
        raise RuntimeError("the exporter does not serve: no port is free")
    time.sleep(SHARED_SECONDS)
    request = urllib.request.Request(exporter.url, headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})  # noqa: S310 - our own
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - as above
        answer.read()
    return time.perf_counter() - start


def _profile(exporter: Exporter) -> record.Table:
    renderer = Renderer({"run": exporter.run, "rank": str(exporter.rank)})

    def scrape() -> None:
        gzip.compress(renderer.render(list(exporter.collect()), Format.OPENMETRICS), compresslevel=1, mtime=0)

    scrape()
    return profiled.table("Where a scrape of 10,000 series spends its time", scrape, 10)
