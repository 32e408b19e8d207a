"""A router that collapses is found long before the loss shows it, and balanced ones are not found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.scrape import OFF
from torch_grad_exporter import start_exporter

EXPERTS = 8

# Samples for which the condition has to hold, as a process counts `for: 15m`.
FOR = 60


class Mixture(nn.Module):
    """One linear expert for each token, and an auxiliary loss like that of Switch Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, EXPERTS, bias=False)
        self.push = 0.0
        self.experts = nn.Parameter(torch.randn(EXPERTS, 16, 4) / 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        probabilities = self.router(x).softmax(-1)
        ids = (probabilities + self.push * torch.eye(EXPERTS)[0]).argmax(-1)
        chosen = probabilities.gather(1, ids[:, None])
        balance = EXPERTS * (F.one_hot(ids, EXPERTS).float().mean(0) * probabilities.mean(0)).sum()
        return torch.einsum("td,tde->te", x, self.experts[ids]) * (1 + chosen - chosen.detach()), ids, balance


def train(path: Path, seed: int, steps: int, *, collapses: bool) -> tuple[torch.Tensor, dict[str, dict[str, Any]]]:
    """Return the losses, and by alert what was wrong. All tokens share most of what there is to learn, eight groups have a rest."""
    torch.manual_seed(seed)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    target = torch.randn(1, 16, 4) / 4 + 0.18 * torch.randn(8, 16, 4)
    losses = []
    with start_exporter(model, None, every=1, collectors=OFF) as exporter:
        for step in range(steps):
            model.push += 0.01 * (collapses and step >= 10)
            x = torch.randn(256, 16)
            out, ids, balance = model(x)
            group = x[:, :3].gt(0).long() @ torch.tensor([1, 2, 4])
            loss = (out - torch.einsum("td,tde->te", x, target[group])).square().mean()
            exporter.router("moe", ids, experts=EXPERTS)
            optimizer.zero_grad()
            (loss + (0.0 if collapses else 0.1) * balance).backward()
            optimizer.step()
            losses.append(loss.detach())
        exporter.save(path / "run.json.gz")
    judged = json.loads(gzip.decompress((path / "run.json.gz").read_bytes()))["judged"]
    return torch.stack(losses), {problem["alert"]: problem for problem in judged["wrong"]}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_collapse_is_found_before_the_loss_moves(seed: int, tmp_path: Path) -> None:
    """A bias pushed in sends all tokens to one expert: found 80 steps or more before the loss is 5 % worse than without."""
    healthy, wrong = train(tmp_path, seed, 500, collapses=False)
    assert wrong.keys().isdisjoint({"ExpertCollapse", "RouterImbalance"})
    losses, wrong = train(tmp_path, seed, 500, collapses=True)
    worse = losses.reshape(-1, 25).mean(1) > 1.05 * healthy.reshape(-1, 25).mean(1)
    assert worse[-4:].all()
    # From here on in all means of 25 steps: before, the two differ by chance.
    moves = 25 * (int((~worse).nonzero().max()) + 1)
    collapse = wrong["ExpertCollapse"]
    assert (collapse["severity"], collapse["layer"]) == ("warning", "moe")
    assert "RouterImbalance" in wrong
    assert collapse["first"] + FOR + 80 <= moves


@pytest.mark.slow
def test_balanced_routers_are_not_found(tmp_path: Path) -> None:
    """Twenty trainings with an auxiliary loss have nothing wrong with their experts."""
    for seed in range(20):
        _, wrong = train(tmp_path, 100 + seed, 150, collapses=False)
        assert wrong.keys().isdisjoint({"ExpertCollapse", "RouterImbalance"}), seed
