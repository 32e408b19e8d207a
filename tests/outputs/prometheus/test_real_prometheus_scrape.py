"""A real Prometheus scrapes the server, in all formats, and is asked what it has stored."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.real_prometheus import histogram_options, running
from tests.support.tools import eventually
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.prometheus.text import Renderer

pytestmark = pytest.mark.server

AWKWARD = 'a\\b"c\nd ä😀{},='
LAYERS = LabelRows(((AWKWARD,), ("plain",)))
FAMILIES = (
    Family(Spec("norm", Kind.GAUGE, 'A "norm".', ("layer",)), np.array([0.1 + 0.2, np.nan]), LAYERS),
    Family(Spec("busy_seconds_total", Kind.COUNTER, "Busy.", unit="seconds"), np.array([1.5e-7])),
    Family(
        Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (1e-5, 1.0, 1e6)),
        np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 8.0, 0.0, 0.0]]),
        LAYERS,
        sums=np.array([7.5, 4.0]),
        exponential=Exponential.of([{-8: 2, 0: 7}, {-3: 8}]),
    ),
)


def expected() -> dict[tuple[str, str, str], str]:
    """Every sample by name, layer and `le`, written out."""
    return {
        ("norm", AWKWARD, ""): "0.30000000000000004",
        ("norm", "plain", ""): "NaN",
        ("busy_seconds_total", "", ""): "1.5e-07",
        **{("time_seconds_bucket", AWKWARD, le): str(n) for le, n in (("1e-05", 1), ("1.0", 3), ("1e+06", 6), ("+Inf", 10))},
        **{("time_seconds_bucket", "plain", le): str(n) for le, n in (("1e-05", 0), ("1.0", 8), ("1e+06", 8), ("+Inf", 8))},
        ("time_seconds_sum", AWKWARD, ""): "7.5",
        ("time_seconds_sum", "plain", ""): "4",
        ("time_seconds_count", AWKWARD, ""): "10",
        ("time_seconds_count", "plain", ""): "8",
    }


CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: text
    honor_labels: true
    scrape_protocols: [PrometheusText0.0.4]
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: open
    honor_labels: true
    scrape_protocols: [OpenMetricsText1.0.0]
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: protobuf
    honor_labels: true
    scrape_protocols: [PrometheusProto]
    {histograms}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def test_prometheus_stores_what_was_served(tmp_path: Path) -> None:
    """Every sample arrives with its exact value and labels, none is renamed to exported_*, and the metadata is right."""
    errors = ErrorLog(())
    content = SimpleNamespace(scrape=lambda: FAMILIES, ended=False, scraped=lambda by, saw_end: None)
    server = MetricsServer(content, Renderer({"run": "r1", "rank": "0"}), errors, addr="127.0.0.1", ports=(0,))
    with (
        contextlib.closing(server),
        running(tmp_path, CONFIGURATION.format(port=server.port, histograms=histogram_options(native=False))) as real,
    ):
        assert eventually(lambda: real.value("sum(up)") == 3)
        metadata = real.get("/api/v1/metadata")
        for job in ("text", "open", "protobuf"):
            stored = real.query(f'{{job="{job}",__name__=~"norm|busy_.*|time_seconds_.+"}}')
            result = {(labels["__name__"], labels.get("layer", ""), labels.get("le", "")): value for labels, value in stored}
            assert result == expected()
            assert len(result) == len(stored)
            names = {name for labels, _ in stored for name in labels}
            assert names == {"__name__", "instance", "job", "run", "rank", "layer", "le"}
    assert isinstance(metadata, dict)
    assert {entry["type"] for entries in metadata.values() for entry in entries} == {"gauge", "counter", "histogram"}
    assert 'A "norm".' in {entry["help"] for entries in metadata.values() for entry in entries}
    assert {entry["unit"] for entries in metadata.values() for entry in entries} == {"", "seconds"}
    assert errors.counts() == {}
