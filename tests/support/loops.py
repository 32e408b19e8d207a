"""A plain training loop, step by step."""

from __future__ import annotations

import torch

from tests.support.models import Perceptron, batch, sgd


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 1, size: int = 5) -> torch.Tensor:
    """Take plain steps over batches as wide as the model's first layer, and return the last loss."""
    optimizer = optimizer or sgd(model)
    inputs = next(parameter for parameter in model.parameters() if parameter.dim() > 1).shape[1]
    for _ in range(steps):
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch(size, inputs)).square().mean()
        loss.backward()
        optimizer.step()
    return loss


class PlainLoop:
    """One model and its optimizer. `clearing`: how gradients are cleared; `steps`, `backwards`: those that were taken and run."""

    def __init__(self, model: torch.nn.Module | None = None, **clearing: bool) -> None:
        self.model = model or Perceptron()
        self.optimizer = sgd(self.model)
        self.clearing = clearing
        self.steps = 0
        self.backwards = 0

    def add(self, size: int = 5) -> None:
        """Runs one backward on top of what is there."""
        self.run(self.model(batch(size)).square().mean())

    def run(self, loss: torch.Tensor, **options: bool) -> None:
        """Run a backward of this loss."""
        loss.backward(**options)
        self.backwards += 1

    def backward(self, size: int = 5, **clearing: bool) -> None:
        """Clears, and runs one backward."""
        self.optimizer.zero_grad(**self.clearing | clearing)
        self.add(size)

    def step(self, size: int = 5, **clearing: bool) -> None:
        """One step of training."""
        self.accumulated(1, size, **clearing)

    def accumulated(self, backwards: int, size: int = 5, **clearing: bool) -> None:
        """Train one step after this many backwards."""
        self.backward(size, **clearing)
        for _ in range(backwards - 1):
            self.add(size)
        self.optimizer.step()
        self.steps += 1
