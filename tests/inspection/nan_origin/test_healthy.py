"""Healthy training with much that is not finite on purpose has no origin."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.inspection.nan_origin.causes import Function
from tests.inspection.nan_origin.test_planted import found
from tests.support.scrape import OFF, errors
from torch_grad_exporter import start_exporter

INF = float("inf")


class Attention(nn.Module):
    """Attention with a mask of -inf, given in one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(8, 24), nn.Linear(8, 8)
        self.soft, self.fill = nn.Softmax(-1), Function(lambda s: s.masked_fill(torch.ones_like(s).triu(1).bool(), -INF))
        self.register_buffer("mask", torch.full((5, 5), -INF).triu(1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """With one head."""
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        if self.way == "fused":
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask))
        if self.way == "module":
            return self.out(self.soft(self.fill(scores)) @ v)
        if self.way == "argument" and mask is not None:
            return self.out(self.soft(scores + mask) @ v)
        if self.way == "empty rows":
            empty = torch.arange(5)[:, None] == 2
            weights = self.soft(scores.masked_fill(empty, -INF).detach())
            return self.out(weights.masked_fill(empty, 0.0) @ v)
        return self.out((scores + self.mask).softmax(-1) @ v)


class Model(nn.Module):
    """A model of random parts."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.checkpointed = chance.random() < 0.3
        self.embed = nn.Embedding(11, 8)
        self.attend = Attention(chance.choice(["fused", "module", "argument", "empty rows", "buffer"]))
        self.between = nn.Sequential(*chance.sample(
            [
                nn.Linear(8, 8), nn.ReLU(inplace=not self.checkpointed), nn.Dropout(0.3), nn.LayerNorm(8), nn.GELU(),
                nn.LSTM(8, 8, batch_first=True),
            ],
            4,
        ))  # fmt: skip
        self.norm, self.last, self.never = nn.BatchNorm1d(40), nn.Linear(40, 4), chance.random() < 0.3

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits, of which one class may be -inf since it is never right."""
        x = self.embed(tokens)
        x = x + self.attend(x, mask)
        for module in self.between:
            given = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) if self.checkpointed else module(x)
            x = given[0] * 1 if isinstance(given, tuple) else given  # what an LSTM gives must not be changed in place
        logits = self.last(self.norm(x.flatten(1)))
        return logits.masked_fill(torch.arange(4) == 3, -INF) if self.never else logits


def healthy(seed: int, rounds: int) -> int:
    """Train a random model and return the number of origins."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(chance)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    amp, micro = chance.random() < 0.3, chance.choice([1, 1, 2])
    amp &= not any(isinstance(module, nn.LSTM) for module in model.modules())  # not every CPU has one in bfloat16
    mask = torch.full((5, 5), -INF).triu(1)
    with start_exporter(model, None, every=1, collectors=OFF, nan_origin="always") as exporter:
        for _ in range(rounds):
            for _ in range(micro):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                    logits = model(torch.randint(0, 11, (6, 5)), mask)
                loss = nn.functional.cross_entropy(logits.float(), torch.randint(0, 3, (6,)))
                loss.backward()
            assert torch.isfinite(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=chance.random() < 0.5)
        assert not errors(exporter)
        return len(found(exporter))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(4), *(pytest.param(range(n, n + 20), marks=pytest.mark.full) for n in (100, 120, 140))])
def test_masks_of_minus_infinity_are_no_origin(seeds: range) -> None:
    """Rounds with finite losses have no origin."""
    for seed in seeds:
        assert healthy(seed, 12) == 0
