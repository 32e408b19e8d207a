"""An export over OTLP by number of points.

What matters to the training is for how long the export's threads run Python: their processor time. The receiver is another
process, which takes what comes and answers that all is well. The points are those of real layers that were trained for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from unittest import mock

import torch

from benchmarks import record
from benchmarks.bars import verdict
from benchmarks.costs.scrape import exporter_with
from benchmarks.costs.timing import times
from benchmarks.interleave import interval
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.otlp.delivery import Delivery
from torch_grad_exporter.outputs.otlp.delta import Deltas
from torch_grad_exporter.outputs.otlp.points import Points, Portion
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings

POINTS = (1_000, 10_000, 50_000)
SERIES_PER_POINT = 1.92
"""A layer's histogram is one point and sixteen series; this many layers make about as many points."""

BAR = (10_000, 150e-3)

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
    """All sizes, each for about three times these seconds."""
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
        "Milliseconds of processor time of the thread that exports, once a minute. The bar is 150 ms for 10,000 points.",
        "First: where it prepares the labels that later exports use again.",
    ]
    return record.table("An export over OTLP, by number of points", columns, rows, notes)


def _rows(families: list[Family], endpoint: str, seconds: float) -> list[list[record.Cell]]:
    made = Points({"run": "benchmark", "rank": "0"}, {}, Deltas((), began=1), ErrorLog(("otlp",)), start=1)
    plain = Delivery(PushSettings(endpoint=endpoint), 30.0)
    with mock.patch.dict(os.environ, {"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}):
        compressed = Delivery(PushSettings(endpoint=endpoint), 30.0)

    def make() -> list[Portion]:
        return list(made.portions(families, 2))

    def export(way: Delivery) -> None:
        for portion in make():
            way.send(portion.data)

    found = {
        "make OpenTelemetry's metrics": times(make, seconds, clock=time.thread_time),
        "make, encode and send": times(lambda: export(plain), seconds, clock=time.thread_time),
        "make, encode, compress and send": times(lambda: export(compressed), seconds, clock=time.thread_time),
    }
    plain.close()
    compressed.close()
    points = sum(len(family.row_numbers) for family in families)
    rows: list[list[record.Cell]] = []
    for what, values in found.items():
        ms = [round(1e3 * value, 2) for value in (values[0], min(values), median(values[1:]))]
        judged = what == "make, encode and send" and 0.5 < points / BAR[0] < 2
        rows.append([points, what, *ms, verdict(*interval(values[1:], median, resamples=500), BAR[1]) if judged else ""])
    return rows
