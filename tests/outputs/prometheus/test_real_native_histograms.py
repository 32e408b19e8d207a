"""A real Prometheus with native histograms and start times scrapes a training, and is asked for its quantiles."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.support.real_prometheus import histogram_options, running
from tests.support.tools import eventually, get
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.server

NORMS = "torch_grad_norm_distribution"
STEPS = 61  # so that no quantile lies between two values
CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: training
    honor_labels: true
    scrape_protocols: [PrometheusProto]
    {histograms}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
FLAGS = "--enable-feature=native-histograms,created-timestamp-zero-ingestion"


def trained(model: torch.nn.Sequential) -> dict[str, list[float]]:
    """Train, with gradients over several decades; return the norms of each layer's gradient in double precision."""
    optimizer, norms = torch.optim.SGD(model.parameters(), 0.0), dict[str, list[float]]()
    generator = torch.Generator().manual_seed(3)
    for number in range(STEPS):
        optimizer.zero_grad()
        factor = 0.0 if number == 9 else 10.0 ** float(torch.randn((), generator=generator))
        (model(torch.randn(4, 3, generator=generator)).square().sum() * factor).backward()
        optimizer.step()
        for name, layer in model.named_children():
            parts = [p.grad.double().square().sum() for p in layer.parameters() if p.grad is not None]
            norms.setdefault(name, []).append(float(torch.stack(parts).sum().sqrt()))
    return norms


def test_prometheus_has_the_quantiles_of_all_values(tmp_path: Path) -> None:
    """Native counts are those of the text, quantiles within a bucket of those of all values, and classic buckets are there too."""
    began = time.time()
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    with start_exporter(model, port=0, addr="127.0.0.1", every=1, linger=0, run="r1") as exporter:
        started = time.time()
        norms = trained(model)
        text = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for metric in text_string_to_metric_families(get(exporter.url))
            for sample in metric.samples
        }
        with running(tmp_path, CONFIGURATION.format(port=exporter.port, histograms=histogram_options()), FLAGS) as real:
            assert eventually(lambda: real.value(f'histogram_count({NORMS}{{layer="1"}})') == STEPS)
            for layer, values in norms.items():
                for quantile in (0.05, 0.5, 0.9, 0.99):
                    exact = np.quantile(values, quantile, method="inverted_cdf")
                    result = real.value(f'histogram_quantile({quantile}, {NORMS}{{layer="{layer}"}})')
                    assert abs(np.log2(result / exact)) <= 1 / 8, (layer, quantile, result, exact)
                assert real.value(f'histogram_sum({NORMS}{{layer="{layer}"}})') == pytest.approx(sum(values))
                assert real.value(f'histogram_quantile(0.01, {NORMS}{{layer="{layer}"}})') == 0.0
            for name in (NORMS, "torch_grad_global_norm_distribution", "torch_train_step_duration_seconds"):
                (count,) = {value for (metric, *_), value in text.items() if metric == f"{name}_count"}
                assert {float(value) for _, value in real.query(f"histogram_count({name})")} == {count}
                own = ("__name__", "instance", "job")
                stored = {
                    (labels["__name__"], *sorted(pair for pair in labels.items() if pair[0] not in own)): float(value)
                    for labels, value in real.query(f'{{__name__=~"{name}_(bucket|sum|count)"}}')
                }
                assert stored == {series: value for series, value in text.items() if series[0] in {each for each, *_ in stored}}
                assert len(stored) > 5
            # The first stored number of a counter is a zero at its start, but for one that is older.
            at, zero = real.recorded("torch_train_steps_total", began - 10)[0]
            assert (began <= at <= started + 0.001, zero) == (True, 0.0)
            assert real.recorded("process_cpu_seconds_total", began - 10)[0][1] > 0
            (up,) = (value for _, value in real.query("up"))
            assert up == "1"
