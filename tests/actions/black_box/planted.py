"""Trainings in which one batch goes wrong, if the random numbers of its forward are those of that time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.support.scrape import OFF, errors
from torch_grad_exporter import Exporter, start_exporter

NOT_FINITE = torch.nan


class Rare(nn.Module):
    """Divides by the length of what dropout leaves: 0 / 0 for a row that is dropped as a whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5)
        return x / x.square().sum(-1, keepdim=True).sqrt()


def model() -> nn.Sequential:
    """Return a model whose module 1 is `Rare`."""
    return nn.Sequential(nn.Identity(), Rare(), nn.Linear(64, 4), nn.Linear(4, 4))


def batch(*, thin: bool = False) -> torch.Tensor:
    """Return a batch; each row of a thin one is dropped as a whole half of the time."""
    return torch.rand(1, 64) * torch.tensor([1.0] + [0.0 if thin else 1.0] * 63)


def train(folder: Path | None, steps: int, wrong_from: int, *, micro: int = 1, **options: object) -> list[torch.Tensor]:
    """Train, with thin batches from a step on until one has made a NaN; return that batch and all others, it last."""
    torch.manual_seed(0)
    trained, given = model(), list[torch.Tensor]()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    named = {} if folder is None else {"black_box": folder}
    failed = False
    with start_exporter(trained, None, collectors=OFF, run="planted", **named, **options) as exporter:
        for step in range(steps):
            optimizer.zero_grad()
            for number in range(micro):
                data = batch(thin=step >= wrong_from and number == 0 and not failed)
                loss = trained(data).square().mean()
                loss.backward()
                if not failed:
                    given.append(data.clone())
                    failed = not bool(loss.isfinite())
            optimizer.step()
        judged(exporter)
        assert not errors(exporter)
    assert failed
    return given


def judged(exporter: Exporter) -> None:
    """Let the rules judge."""
    exporter.problems()
