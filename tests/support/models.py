"""Small models, and what feeds and trains them."""

from __future__ import annotations

import torch


class Perceptron(torch.nn.Module):
    """Two linear layers with a ReLU, whose gradients have zeros and zero rows."""

    def __init__(self, inputs: int = 6, hidden: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(inputs, hidden)
        self.second = torch.nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def batch(size: int = 5, inputs: int = 6) -> torch.Tensor:
    """Random inputs; seed first."""
    return torch.randn(size, inputs)


def sgd(model: torch.nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """The plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=lr)
