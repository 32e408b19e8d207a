"""Several ranks skip the same steps, whichever of them has the gradient that is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from tests.actions.test_clipper_ranks import REGIMES, Collectives, prepared
from tests.support.models import Perceptron
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors, value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Clipper, MaxNorm, SkipAbove, SkipNonFinite, TooManySkippedSteps

pytestmark = pytest.mark.process

CASES = [("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True), ("tp", False), ("hybrid", False), ("fsdp and tp", False)]
"""How a model is made parallel, and whether the optimizer is fused."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's part of the weights and of the optimizer's state."""
    kept = [entry for its in optimizer.state_dict()["state"].values() for entry in its.values()]
    return [local(tensor).detach().clone() for tensor in (*model.parameters(), *kept)]


def skips(rank: int, regime: str, fused: bool) -> tuple[list[bool], float | None]:
    """Train with a NaN that one rank has; return which steps changed nothing, and how many were counted."""
    prepared()
    torch.manual_seed(0)
    model = REGIMES[regime][0](Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    options = {"port": None, "every": 1, "collectors": OFF, "ranks": "all"}
    exporter = start_exporter(model, clip=[SkipNonFinite(max_in_row=3), MaxNorm(0.5)], on_failure="raise", **options)
    unchanged = []
    for number in range(5):
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number if "tp" in regime else 10 * number + rank))
        bad = number in (0, 2, 3) and (rank % 2 if regime == "hybrid" else rank) == 1  # the same in both copies
        model(inputs * (math.nan if bad and regime == "ddp" else 1.0)).square().mean().backward()
        if bad and regime != "ddp":  # in a part that no other rank has
            gradient = next(local(p.grad) for p in model.parameters() if p.grad is not None and local(p.grad).numel())
            gradient.view(-1)[0] = math.nan
        before = state(model, optimizer)
        optimizer.step()
        after = state(model, optimizer)
        if not before[len([*model.parameters()]) :]:  # a fused optimizer makes its state, all zeros, in a step that it skips
            after = after[: len(before)] if all(not tensor.any() for tensor in after[len(before) :]) else after
        unchanged.append(len(before) == len(after) and all(map(torch.equal, before, after)))
    exporter.close()
    assert errors(exporter) == {}
    return unchanged, value(exporter, "torch_grad_clip_policy_steps_total", policy="SkipNonFinite(max_in_row=3)")


@pytest.mark.parametrize(
    ("regime", "fused"), [pytest.param(*case, marks=pytest.mark.full) if REGIMES[case[0]][1] == 4 else case for case in CASES]
)
def test_all_ranks_skip_the_same_steps(regime: str, fused: bool) -> None:
    """One rank's NaN leaves weights and the optimizer's state unchanged on all ranks, and all count it."""
    expected = [True, False, True, True, False], 3.0
    assert of_ranks(skips, regime, fused, ranks=REGIMES[regime][1]) == [expected] * REGIMES[regime][1]


def clippers(rank: int) -> None:
    """Try a `Clipper` of a sharded model, and a loss of each rank."""
    prepared()
    model = REGIMES["fsdp"][0](Perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"this job has 2 ranks, each with a loss of its own"):
        Clipper(model, SkipAbove(1.0, on="loss"))
    policies = [SkipNonFinite(max_in_row=1), SkipAbove(3.0, on="loss", reduced=True)]
    clipper = Clipper(model, policies, optimizers=[optimizer])
    for loss, bad in ((1.0, False), (5.0, False), (1.0, True), (1.0, False)):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        if bad and rank == 0:
            next(model.parameters()).grad.to_local().view(-1)[0] = math.inf
        clipper.observe(loss)
        with Collectives() as collectives:
            clipper()
        assert collectives.number == 1
        before = [local(p).clone() for p in model.parameters()]
        optimizer.step()
        skipped = all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True))
        assert skipped is (loss > 3 or bad)
    assert [int(run.clipped_steps) for run in clipper.skipping] == [1, 1]
    for number in range(2):
        model(torch.full((4, 6), math.nan)).square().mean().backward()
        clipper.observe(1.0)
        if number == 0:
            clipper()
            continue
        with pytest.raises(TooManySkippedSteps):
            clipper()


def test_a_clipper_on_two_ranks() -> None:
    """A `Clipper` of an FSDP2 model skips by the flag of a fused optimizer, and raises on all ranks at the same step."""
    of_ranks(clippers)
