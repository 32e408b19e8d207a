"""Opacus: differentially private training, also with batches that are split by its memory manager."""

from __future__ import annotations

import contextlib

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from tests.trainers.training import Training, compared

STEPS = 12


def private(run: Training, *, virtual: bool) -> None:
    """Train with per-sample clipping and noise. `virtual`: each batch comes in four parts, and only the last one steps."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    data = torch.utils.data.TensorDataset(torch.randn(16 * STEPS, 6), torch.randint(0, 2, (16 * STEPS,)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    with run.watching(model), manager if virtual else contextlib.nullcontext(loader) as batches:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("virtual", [False, True])
def test_differential_privacy(virtual: bool) -> None:
    """Each step is sampled once; its norms are those of its last backward, under the names that layers have without Opacus."""
    run = compared(lambda run: private(run, virtual=virtual), gauges=True)
    assert run.heard is not None
    assert set(run.heard.steps["SGD"][-1].layers) == {"0", "2"}
    assert run.samples == set(range(2, STEPS + 1))
