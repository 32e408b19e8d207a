"""Four small trainings on made data: what a step costs without any monitor.

Sizes are such that one core does a step in the time that a small real run takes, from a millisecond to about a second. Weights
and data come from a fixed seed; each batch is another one of a few that are made beforehand, so that no data is made while the
clock runs. Learning rates are low: the gradients are about the same size from the first step to the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """How to make one training: a model, its optimizer and its batches."""

    title: str
    optimizer_name: str
    batch_name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[], list[Batch]]


class Training:
    """One training of a workload, with a model, an optimizer and batches of its own."""

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self._batches: Iterator[Batch] = itertools.cycle(workload.batches())

    def backward(self) -> Tensor:
        """Clears the gradients, runs forward and backward on the next batch and returns the loss."""
        inputs, targets = next(self._batches)
        self.optimizer.zero_grad()
        logits: Tensor = self.model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        return loss.detach()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)


def _vectors(size: int, batch: int, classes: int) -> list[Batch]:
    return [(torch.randn(batch, size), torch.randint(classes, (batch,))) for _ in range(8)]


def _images() -> list[Batch]:
    return [(torch.randn(8, 3, 64, 64), torch.randint(10, (8,))) for _ in range(4)]


def _texts(vocabulary: int, batch: int, length: int) -> list[Batch]:
    texts = [torch.randint(vocabulary, (batch, length + 1)) for _ in range(4)]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


def mlp() -> nn.Module:
    """784-256-128-10 with ReLU; 6 parameters of 0.24 M elements."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def small_layers() -> nn.Module:
    """200 linear layers of 64 x 64 in a row; 400 parameters of 0.83 M elements: bound by calls, not by bytes.

    Orthogonal weights keep the gradients' size over the layers; denormal numbers would be slow for another reason.
    """
    layers = [nn.Linear(64, 64) for _ in range(200)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norms, and a shortcut that is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps to feature maps."""
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


def resnet18() -> nn.Module:
    """ResNet-18 for 64 x 64 images; 62 parameters of 11.2 M elements."""
    widths = [64, 64, 128, 256, 512]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [
        ResidualBlock(inputs if first else outputs, outputs, stride if first else 1)
        for inputs, outputs, stride in zip(widths, widths[1:], [1, 2, 2, 2], strict=False)
        for first in (True, False)
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class DecoderBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a layer norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        query, key, value = self.attention(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.norm2(hidden))))


class Decoder(nn.Module):
    """A decoder-only transformer as GPT-2's smallest, with a vocabulary of 8,192; its output layer is the embedding."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 8192, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Tokens of shape (batch, length) to logits of shape (batch, length, vocabulary)."""
        hidden = self.tokens(text) + self.positions.weight[: text.shape[1]]
        logits: Tensor = functional.linear(self.norm(self.blocks(hidden)), self.tokens.weight)
        return logits


WORKLOADS = {
    "mlp": Workload("MLP 784-256-128-10", "AdamW", "64 vectors", mlp, _adamw, lambda: _vectors(784, 64, 10)),
    "resnet18": Workload("ResNet-18", "SGD with momentum", "8 images of 64 x 64", resnet18, _momentum, _images),
    "decoder": Workload("decoder, 12 layers", "AdamW", "1 text of 64 tokens", Decoder, _adamw, lambda: _texts(8192, 1, 64)),
    "small_layers": Workload(
        "200 layers of 64 x 64", "SGD with momentum", "32 vectors", small_layers, _momentum, lambda: _vectors(64, 32, 64)
    ),
}
