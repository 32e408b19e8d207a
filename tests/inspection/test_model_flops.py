"""Operations of steps, and their share of what the device can do."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import OFF, key, value, values
from torch_grad_exporter import start_exporter
from torch_grad_exporter.resources.peak_flops import peak_of

FLOPS, MFU = "torch_train_model_flops_total", "torch_train_mfu_ratio"


def train(model: torch.nn.Module, steps: int) -> None:
    """Take plain steps."""
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


def test_operations_of_all_steps() -> None:
    """They are those of a step times the steps; the ratio is that over the mean step and the peak."""
    model = Perceptron()
    with start_exporter(model, None, collectors=OFF, flops_per_step=6e5, peak_flops=1e12) as exporter:
        train(model, 80)
        shown = values(exporter)
    assert shown[key(FLOPS)] == 80 * 6e5
    mean = shown[key("torch_train_step_duration_seconds_sum")] / shown[key("torch_train_step_duration_seconds_count")]
    assert shown[key(MFU)] == pytest.approx(6e5 / mean / 1e12, rel=1e-6)


def test_without_a_peak() -> None:
    """On a CPU the peak is not known and the ratio absent; without the option there is neither."""
    model = Perceptron()
    with start_exporter(model, None, collectors=OFF, flops_per_step=6e5) as exporter:
        train(model, 3)
        assert (value(exporter, FLOPS), value(exporter, MFU)) == (1.8e6, None)
    with start_exporter(model, None, collectors=OFF) as exporter:
        train(model, 3)
        assert (value(exporter, FLOPS), value(exporter, MFU)) == (None, None)


def test_a_peak_needs_operations() -> None:
    """A peak alone is refused, with what to set."""
    with pytest.raises(ValueError, match=r"^peak_flops=1e\+12: .* set flops_per_step=$"):
        start_exporter(Perceptron(), None, peak_flops=1e12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("AMD Instinct MI300X", 1307e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("GRID T4-2Q", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    """A GPU's peak is found by its name in PyTorch."""
    assert peak_of(name) == peak
