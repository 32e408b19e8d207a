"""A long seeded run is the same to the last bit with and without the exporter; `tests/matrix` says it of each kind of loop."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.capture.scenes import COUNTED
from tests.support.scrape import errors
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.slow

STEPS = 300

Result = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    """Convolution, normalisation, dropout and a tied weight: whatever keeps state or draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.3)
        self.mid = torch.nn.Linear(32, 32)
        self.tied = torch.nn.Linear(32, 32)
        self.tied.weight = self.mid.weight
        self.out = torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.conv(x[:, None])).relu()).flatten(1)
        return self.out(self.tied(self.mid(x).relu()))


def run(options: dict[str, Any] | None) -> Result:
    """Return the losses, the final state and the random state of a seeded run whose gradients are clipped."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []
    watched = contextlib.nullcontext() if options is None else start_exporter(model, port=None, **options)
    with watched as exporter:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 8)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach().clone())
            if exporter is not None:
                exporter.observe(loss=loss, tokens=8, epoch=step)
        if exporter is not None:
            assert errors(exporter) == {}
    return losses, [t.clone() for t in model.state_dict().values()], torch.get_rng_state()


@pytest.mark.parametrize(
    "options",
    [{}, {"every": 1, "moments": True, "weights": True, "dead_window": 5}, {"every": 8}, COUNTED],
    ids=["defaults", "everything", "mixed", "counted"],
)
def test_bit_identical(options: dict[str, Any]) -> None:
    """Losses, parameters, buffers and the random numbers of many clipped steps are equal in every bit."""
    (losses, state, random), (watched_losses, watched_state, watched_random) = run(None), run(options)
    assert all(map(torch.equal, losses, watched_losses))
    assert all(map(torch.equal, state, watched_state))
    assert torch.equal(random, watched_random)
