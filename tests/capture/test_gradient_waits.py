"""Two ranks under DDP: how long each one waits for the other, by a clock that both share."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.matrix.distributed import Checkpointed
from tests.support.models import Perceptron
from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors, value
from torch_grad_exporter import start_exporter

STEPS = 4
SLOW = 0.15
"""Seconds that rank 1 sleeps in each step."""
WARM = 3
"""Steps before what is measured: in the first ones the wrapper gathers the sizes of its buckets in the forward."""

WAITING: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "plain": (Perceptron, 1),
    "no_sync": (Perceptron, 1),
    "each backward reduces": (Perceptron, 1),
    "seldom sampled": (Perceptron, 1000),
    "reentrant checkpoint": (Checkpointed, 1),
    "alone": (Perceptron, 1),
}
"""Models, and of how many rounds one is sampled."""


@dataclass
class Step:
    """The begin, last gradient and end of the reducing backwards of a step, and the wait and its count after it."""

    began: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    wait: float = 0.0
    rounds: float = 0.0

    @property
    def seconds(self) -> float:
        """Return how long the backwards took."""
        return sum(self.ended) - sum(self.began)

    def waits_for(self, other: Step) -> float:
        """Return how long this rank was idle, at least, before the other one began."""
        return sum(max(0.0, theirs - mine) for mine, theirs in zip(self.done, other.began, strict=True))


@dataclass
class Waited:
    """The record of one rank. `shown`: the wait and its count at the end."""

    steps: list[Step]
    phases: dict[str, float]
    elapsed: float
    errors: dict[str, float]
    shown: tuple[float | None, float | None]


def waiting(kind: str, rank: int) -> Waited:
    """Train for some steps."""
    make, every = WAITING[kind]
    model = make()
    wrapped = model if kind == "alone" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0.0

    def note(_: torch.Tensor) -> None:
        nonlocal done
        done = time.monotonic()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    steps = []
    start = time.monotonic()
    with start_exporter(wrapped, port=None, every=every, collectors=OFF) as exporter:
        for _ in range(WARM + STEPS):
            steps.append(step := Step())
            optimizer.zero_grad()
            for part in range(2):
                later = kind == "no_sync" and part == 0
                with wrapped.no_sync() if later else contextlib.nullcontext():
                    loss = wrapped(torch.ones(5, 6)).square().mean()
                    time.sleep(SLOW * rank * (part == 1))
                    if later:
                        loss.backward()
                    elif part == 1 or kind == "each backward reduces":
                        step.began.append(time.monotonic())
                        loss.backward()
                        step.ended.append(time.monotonic())
                        step.done.append(done)
            optimizer.step()
            names = ("torch_train_gradient_wait_seconds_total", "torch_train_gradient_waits_total")
            shown = (value(exporter, names[0]), value(exporter, names[1]))
            step.wait, step.rounds = shown[0] or 0.0, shown[1] or 0.0
        phases = {
            phase: value(exporter, "torch_train_phase_seconds_total", phase=phase) or 0.0 for phase in ("backward", "outside")
        }
        return Waited(steps, phases, time.monotonic() - start, errors(exporter), shown)


def waited(rank: int) -> dict[str, Waited]:
    """Return what all loops recorded on one of the ranks."""
    return {kind: waiting(kind, rank) for kind in WAITING}


@pytest.fixture(scope="module")
def waits() -> list[dict[str, Waited]]:
    """Return how both ranks waited."""
    return of_ranks(waited)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["plain", "no_sync", "each backward reduces"])
def test_the_fast_rank_waits(kind: str, waits: list[dict[str, Waited]]) -> None:
    """The fast rank waits while the slow one sleeps, the slow one waits at most its own backward, and each round counts once."""
    fast, slow = (mine[kind] for mine in waits)
    for rank in (fast, slow):
        assert rank.errors == {}
        for before, step in itertools.pairwise(rank.steps[WARM - 1 :]):
            assert step.rounds - before.rounds == 1
            assert 0 <= step.wait - before.wait <= step.seconds
    pairs = zip(itertools.pairwise(fast.steps[WARM - 1 :]), slow.steps[WARM:], strict=True)
    missed = [step.waits_for(other) - (step.wait - before.wait) for (before, step), other in pairs]
    assert statistics.median(missed) < 0.5 * SLOW  # between the last gradient and the clock of the wait it may be held up
    assert statistics.median(step.waits_for(other) for step, other in zip(fast.steps, slow.steps, strict=True)) > 0.5 * SLOW


@pytest.mark.process
def test_a_wait_that_cannot_be_known(waits: list[dict[str, Waited]]) -> None:
    """With a reentrant checkpoint no round is counted, and without other ranks the metric is absent."""
    for mine in waits:
        assert mine["reentrant checkpoint"].shown == (0.0, 0.0)
        assert mine["alone"].shown == (None, None)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["plain", "seldom sampled"])
def test_the_wait_is_part_of_the_backward(kind: str, waits: list[dict[str, Waited]]) -> None:
    """The fast rank spends the wait in the phase `backward`, and the slow one sleeps outside of the phases."""
    fast, slow = (mine[kind] for mine in waits)
    idle = sum(step.waits_for(other) for step, other in zip(fast.steps, slow.steps, strict=True))
    slept = SLOW * (STEPS + WARM)
    assert idle > 0.5 * slept
    assert fast.phases["backward"] >= idle
    assert fast.phases["outside"] <= fast.elapsed - idle
    assert slow.phases["outside"] >= 0.9 * slept
    assert slow.phases["backward"] <= sum(step.seconds for step in slow.steps)


def seldom(_rank: int) -> list[float | None]:
    """Train for long enough that most rounds are only counted, and return the waits and the samples."""
    wrapped = DistributedDataParallel(Perceptron())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with start_exporter(wrapped, port=None, every=8, collectors=OFF) as exporter:
        for _ in range(200):
            optimizer.zero_grad()
            wrapped(torch.ones(5, 6)).square().mean().backward()
            optimizer.step()
        return [value(exporter, name) for name in ("torch_train_gradient_waits_total", "torch_grad_exporter_captures_total")]


@pytest.mark.process
def test_waits_between_counted_rounds() -> None:
    """A sample behind rounds that were only counted has its wait."""
    for waits, samples in of_ranks(seldom):
        assert samples >= 20
        assert waits >= samples - WARM
