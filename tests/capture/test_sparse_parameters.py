"""Sparse weights: each step is a sample, with the norm of a dense float64 copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.capture.scenes import NORM, STEPS, watching
from tests.support.record import gradients_of, norm
from tests.support.scrape import lost, value

ROUNDS = 40

CAPTURES = "torch_grad_exporter_captures_total"


class Pruned(nn.Module):
    """A layer whose weight is a sparse tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        dense = torch.randn(6, 6) * (torch.rand(6, 6) > 0.6)
        self.weight = nn.Parameter(dense.to_sparse().coalesce())
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sparse.mm(self.weight, inputs.T).T)


def own_norm(module: nn.Module) -> float:
    """Return the float64 norm of a module's own gradients."""
    return norm(gradients_of(module).values())


@pytest.mark.slow
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_sparse_weight(set_to_none: bool) -> None:
    """A weight that is sparse is measured at each step, and no sample is lost."""
    model = Pruned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watching(model) as exporter:
        for step in range(1, ROUNDS + 1):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.randn(5, 6)).square().mean().backward()
            expected = own_norm(model)
            optimizer.step()
            if step > 2:
                assert value(exporter, NORM) == pytest.approx(expected, rel=1e-5)
        assert value(exporter, STEPS, optimizer="SGD") == ROUNDS
        assert lost(exporter) == {}
        assert value(exporter, CAPTURES) == ROUNDS
