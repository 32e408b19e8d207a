"""Small models, and what feeds and trains them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn


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


class Conv1D(nn.Module):
    """A linear layer as GPT-2's: its weight is (inputs, outputs). `output_dims`: for the record, by parameter."""

    output_dims: ClassVar[dict[str, tuple[int, ...]]] = {"weight": (1,)}

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / 3)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class GraphLayer(nn.Module):
    """A layer that names its sizes, with the weight (inputs, outputs), as in libraries of graph networks."""

    output_dims: ClassVar[dict[str, tuple[int, ...]]] = {"weight": (1,)}

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Experts(nn.Module):
    """Two experts in one weight each, as in Transformers, whose mean is the output; biases belong to outputs and have none."""

    def __init__(self, size: int, inner: int, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        up, down = torch.randn(2, size, inner) / 3, torch.randn(2, inner, size) / 3
        self.gate_up_proj = nn.Parameter(up if is_transposed else up.mT.contiguous())
        self.down_proj = nn.Parameter(down if is_transposed else down.mT.contiguous())
        self.down_proj_bias = nn.Parameter(torch.zeros(2, size))

    @property
    def output_dims(self) -> dict[str, tuple[int, ...]]:
        """For the record: the dimensions of the outputs, by parameter."""
        dims = (0, 2) if self.is_transposed else (0, 1)
        return {"gate_up_proj": dims, "down_proj": dims, "down_proj_bias": ()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.gate_up_proj, self.down_proj)
        up, down = weights if self.is_transposed else (weight.mT for weight in weights)
        return (torch.matmul(torch.matmul(x, up).relu(), down) + self.down_proj_bias[:, None]).mean(dim=0)


def inputs_first() -> nn.Module:
    """Layers that store their weights with the inputs first, square ones among them, of which some outputs are never used."""
    layers = nn.Sequential(
        Conv1D(8, 6), nn.ReLU(), Conv1D(8, 8), nn.Tanh(), GraphLayer(8, 5), nn.Tanh(),
        Experts(5, 7, is_transposed=True), nn.Tanh(), Experts(5, 7, is_transposed=False), Conv1D(3, 5),
    )  # fmt: skip
    with torch.no_grad():
        layers[0].bias[2:5] = -1e3  # behind the ReLU nothing of these outputs is left
        layers[2].weight[:, 1] = 0.0
        layers[4].weight[1] = 0.0
        layers[6].gate_up_proj[1, :, 2:] = 0.0
        layers[9].weight[4] = 0.0
    return layers
