"""Attention logits that grow are found in a real training some hundred steps before the loss rises."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.scrape import OFF
from torch_grad_exporter import start_exporter

TOKENS, PERIOD, LENGTH, WIDTH, HEADS = 32, 8, 32, 32, 2

# Steps before the exporter is started, those after which the learning rate of queries and keys begins to grow, and all.
BEFORE, LEARNED, STEPS = 350, 450, 900


class Attention(nn.Module):
    """Causal attention, with or without norms of queries and keys."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.qk, self.v, self.out = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (2, 1, 1))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH // HEADS) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (heads(t) for t in self.qk(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(self.norms[0](q), self.norms[1](k), heads(self.v(x)), is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def heads(x: torch.Tensor) -> torch.Tensor:
    """Return the heads as the second dimension."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.attention = Attention(norm=norm)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Two blocks, which suffice to learn to repeat."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(norm=norm), Block(norm=norm))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.tokens(x) + self.places))


def batch(generator: torch.Generator) -> torch.Tensor:
    """Return sequences that repeat a random one, with a wrong token in twenty."""
    x = torch.randint(0, TOKENS, (16, PERIOD), generator=generator).repeat(1, 5)[:, : LENGTH + 1]
    wrong = torch.rand(x.shape, generator=generator) < 0.05
    return torch.where(wrong, torch.randint(0, TOKENS, x.shape, generator=generator), x)


def trained(path: Path, *, seed: int, steps: int, driven: bool, norm: bool = False) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the losses, and what the exporter found wrong with the attention.

    `driven`: the learning rate of queries and keys grows by 1 % a step once the model has learned.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, losses = Decoder(norm=norm), []
    named = dict(model.named_parameters())
    groups = [[p for name, p in named.items() if ("qk" in name) is driving] for driving in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.005, betas=(0.9, 0.95), weight_decay=0.0)

    def train(steps: range) -> None:
        for step in steps:
            warm = min(1.0, (step + 1) / 20)
            optimizer.param_groups[0]["lr"] = 0.005 * warm
            optimizer.param_groups[1]["lr"] = 0.005 * warm * (1.01 ** max(0, step - LEARNED) if driven else 1.0)
            x = batch(generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))

    train(range(BEFORE))
    with start_exporter(model, None, every=1, attention=True, collectors=OFF) as exporter:
        train(range(BEFORE, steps))
        exporter.save(path / "run.json.gz")
    wrong = json.loads(gzip.decompress((path / "run.json.gz").read_bytes()))["judged"]["wrong"]
    return losses, [problem for problem in wrong if problem["alert"] == "AttentionLogitsGrowing"]


def rises(losses: list[float]) -> int:
    """Return the first step at which the mean of 20 losses is 15 % above that of the 100 before the growth."""
    means = torch.tensor(losses[LEARNED:]).unfold(0, 20, 1).mean(-1)
    return int((means > 1.15 * sum(losses[LEARNED - 100 : LEARNED]) / 100).nonzero()[0]) + LEARNED + 20


@pytest.mark.slow
def test_logits_grow_before_the_loss_rises(tmp_path: Path) -> None:
    """Where queries and keys learn too fast, the alert comes at least 50 steps before the loss rises."""
    losses, problems = trained(tmp_path, seed=0, steps=STEPS, driven=True)
    first = BEFORE + min(problem["first"] for problem in problems)
    assert LEARNED < first <= rises(losses) - 50


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
def test_healthy_runs(norm: bool, tmp_path: Path) -> None:
    """A healthy run has no such alert, nor has one with QK-norm whose queries and keys learn too fast."""
    _, problems = trained(tmp_path, seed=1, steps=STEPS if norm else 500, driven=norm, norm=norm)
    assert problems == []
