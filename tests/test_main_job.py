"""The main job: one line in a training script, scraped by a real Prometheus, right to the last digit that matters."""

from __future__ import annotations

import bisect
import math
from pathlib import Path

import pytest
import torch

from tests.support.real_prometheus import prometheus
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.metrics.buckets import DECADES

pytestmark = pytest.mark.server

STEPS = 40
CLIP = 0.02


def layer_norms(model: torch.nn.Module) -> dict[str, float]:
    """Return the norm of each layer's gradient in float64."""
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        layer = name.rpartition(".")[0]
        squares[layer] = squares.get(layer, 0.0) + parameter.grad.double().square().sum().item()
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def test_prometheus_has_what_the_loop_computed(tmp_path: Path) -> None:
    """Norms, bucket counts, NaN counts, clipping and steps in a real Prometheus equal float64 sums made in the loop."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history: list[dict[str, float]] = []
    clipped = 0
    with start_exporter(model, port=0, every=1, run="main-job") as exporter:
        assert exporter.port is not None
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 12)).square().mean()
            loss.backward()
            history.append(layer_norms(model))
            if step == 20:
                model[0].weight.grad[3, 2] = math.nan  # after the backward: the step is skipped, the capture is clean
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            clipped += bool(norm > CLIP)
            if torch.isfinite(norm):
                optimizer.step()
        with prometheus(tmp_path, exporter.port, run="main-job") as real:
            assert eventually(real.is_scraping)
            last = history[-1]
            for layer, expected in last.items():
                where = f'{{run="main-job",rank="0",layer="{layer}"}}'
                assert real.value(f"torch_grad_norm{where}") == pytest.approx(expected, rel=1e-5)
                observed = [norms[layer] for norms in history]
                found = real.query(f"torch_grad_norm_distribution_bucket{where}")
                by_bound = {float(labels["le"]): float(value) for labels, value in found}
                for bound in DECADES:
                    assert by_bound[bound] == bisect.bisect_right(sorted(observed), bound)
                assert by_bound[math.inf] == STEPS
                assert real.value(f"torch_grad_captures_total{where}") == STEPS
                assert real.value(f"sum(torch_grad_nonfinite_elements_total{where})") == 0
            whole = math.sqrt(sum(value * value for value in last.values()))
            assert real.value("torch_grad_global_norm") == pytest.approx(whole, rel=1e-5)
            assert real.value("torch_grad_global_norm_after_clip") == pytest.approx(min(whole, CLIP), rel=1e-4)
            assert real.value('torch_train_steps_total{optimizer="AdamW"}') == STEPS - 1
            assert real.value("torch_train_skipped_steps_total") == 1
            assert real.value("torch_train_backward_passes_total") == STEPS
            assert real.value("torch_grad_clipped_steps_total") == clipped > 10
            assert real.query('{__name__=~".+", exported_run=~".+"}') == []
            assert real.query('{__name__=~".+", exported_rank=~".+"}') == []
