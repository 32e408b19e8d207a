"""An export over OTLP by number of points: encoding and sending apart and together, beside OpenTelemetry's own encoder.

What matters to the training is for how long the export's threads run Python: their processor time. The receiver is another
process, which takes what comes and answers that all is well. The points are those of real layers that were trained for a while.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

import torch
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from benchmarks import record
from benchmarks.bars import verdict
from benchmarks.costs.scrape import exporter_with
from benchmarks.costs.timing import times
from benchmarks.interleave import interval
from torch_grad_exporter.metrics.families import Family, Kind, by_spec
from torch_grad_exporter.outputs.otlp.delivery import Delivery
from torch_grad_exporter.outputs.otlp.otlp import Encoder, Temporality
from torch_grad_exporter.outputs.otlp.push import connected
from torch_grad_exporter.outputs.otlp.push_settings import Compression, PushSettings

POINTS = (1_000, 10_000, 50_000)
SERIES_PER_POINT = 1.92
"""A layer's histogram is one point and sixteen series; so many layers make about as many points."""

BAR = (10_000, 50e-3)

CUMULATIVE = {Kind.COUNTER: Temporality.CUMULATIVE, Kind.HISTOGRAM: Temporality.CUMULATIVE}

RECEIVER = """
import http.server

class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """A receiver in a process of its own; its endpoint."""
    with subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - ours
        if process.stdout is None:
            raise RuntimeError("a process with a pipe has one")
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/metrics"
        finally:
            process.kill()


def measure(seconds: float) -> record.Table:
    """All sizes, each for about three times so many seconds."""
    torch.set_num_threads(1)
    logging.getLogger("torch_grad_exporter").setLevel(logging.ERROR)
    rows: list[list[record.Cell]] = []
    with receiver() as endpoint:
        for points in POINTS:
            model, exporter = exporter_with(round(points * SERIES_PER_POINT))
            with exporter:
                rows += _rows(exporter.collect(), endpoint, seconds)
            del model
    columns = ("points", "what", "first ms", "best ms", "median ms", "within the bar")
    notes = [
        "Milliseconds of processor time of the thread that exports. The bar is 50 ms for encoding and sending 10,000 points.",
        "First: where it lays out what later exports use again. Compression is gzip at its fastest level.",
        "OpenTelemetry: its objects made of the same families, encoded by its own encoder and serialised; nothing is sent.",
    ]
    return record.table("An export over OTLP, by number of points", columns, rows, notes)


def _rows(families: list[Family], endpoint: str, seconds: float) -> list[list[record.Cell]]:
    encoder = Encoder({"run": "benchmark", "rank": "0"}, {"service.name": "training"}, version="0", temporality=CUMULATIVE)
    plain = connected(PushSettings(endpoint=endpoint), 30.0)
    compressed = connected(PushSettings(endpoint=endpoint, compression=Compression.GZIP), 30.0)
    requests: list[bytes] = []

    def encode() -> None:
        requests[:] = encoder.encode(families, start=1, since=1, at=2)

    def send(way: Delivery) -> None:
        for request in requests:
            way.send(request)

    def both(way: Delivery) -> None:
        encode()
        send(way)

    found = {
        "encode": times(encode, seconds, clock=time.thread_time),
        "send": times(lambda: send(plain), seconds, clock=time.thread_time),
        "encode and send": times(lambda: both(plain), seconds, clock=time.thread_time),
        "encode, compress and send": times(lambda: both(compressed), seconds, clock=time.thread_time),
        "OpenTelemetry's encoder": times(
            lambda: encode_metrics(official(families)).SerializeToString(), seconds, clock=time.thread_time
        ),
    }
    plain.close()
    compressed.close()
    points = sum(int(family.present.sum()) if family.present is not None else len(family.labels) for family in families)
    rows: list[list[record.Cell]] = []
    for what, values in found.items():
        ms = [round(1e3 * value, 2) for value in (values[0], min(values), median(values[1:]))]
        judged = what == "encode and send" and 0.5 < points / BAR[0] < 2
        rows.append([points, what, *ms, verdict(*interval(values[1:], median, resamples=500), BAR[1]) if judged else ""])
    return rows


def official(families: list[Family]) -> export.MetricsData:
    """The same families as objects of OpenTelemetry's SDK."""
    metrics = [
        export.Metric(spec.name, spec.help, "", _data(spec.kind, [point for one in members for point in _points(one)]))
        for spec, members in by_spec(families).items()
    ]
    scope = export.ScopeMetrics(InstrumentationScope("benchmark", "0"), metrics, "")
    return export.MetricsData([export.ResourceMetrics(Resource({}), [scope], "")])


def _data(
    kind: Kind, points: list[export.NumberDataPoint | export.HistogramDataPoint]
) -> export.Gauge | export.Sum | export.Histogram:
    if kind is Kind.GAUGE:
        return export.Gauge(points)
    if kind is Kind.COUNTER:
        return export.Sum(points, export.AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return export.Histogram(points, export.AggregationTemporality.CUMULATIVE)


def _points(family: Family) -> Iterator[export.NumberDataPoint | export.HistogramDataPoint]:
    chosen = range(len(family.labels)) if family.present is None else family.present.nonzero()[0].tolist()
    for row in chosen:
        labels = {"run": "benchmark", "rank": "0", **dict(zip(family.spec.labels, family.labels.rows[row], strict=True))}
        if family.sums is None:
            yield export.NumberDataPoint(labels, 1, 2, float(family.values[row]))
        else:
            counts = family.values[row].astype(int).tolist()
            yield export.HistogramDataPoint(
                labels, 1, 2, sum(counts), float(family.sums[row]), counts, family.spec.buckets, 0.0, 0.0
            )
