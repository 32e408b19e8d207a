"""The loss of a round from those of its batches."""

from __future__ import annotations

import torch

from torch_grad_exporter.integrations.round_losses import RoundLosses


def test_mean() -> None:
    """Over the batches since the last step, of tensors and numbers; other values are left out."""
    losses = RoundLosses()
    assert losses.round_over() is None
    for loss in (torch.tensor(1.0), torch.tensor([2.0], dtype=torch.bfloat16), 6, None, torch.ones(2), True, "text"):
        losses.add(loss)
    assert float(losses.round_over() or 0) == 3
    assert losses.round_over() is None
    losses.add(2.5)
    assert float(losses.round_over() or 0) == 2.5
