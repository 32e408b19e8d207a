"""The gradient noise scale: against gradients whose noise is known, and on two ranks against the same estimate in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import of_ranks
from tests.support.scrape import OFF, errors, value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.inspection.local_norms import ENOUGH, NoiseScale

RANKS = 2
BATCHES = (12, 16, 20)
"""Samples of each rank in the rounds, in turn."""
OBSERVED = 8
"""What is observed where it is, whatever the loop's batches are."""
STEPS = 45


def gaussian(
    generator: np.random.Generator, mean: NDArray[np.float64], deviations: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """Return the gradient over a batch of this size."""
    return (mean + deviations * generator.standard_normal((size, len(mean)))).mean(axis=0)


@pytest.mark.slow
def test_a_known_noise_is_estimated() -> None:
    """Over gradients of known mean and covariance the estimate comes to tr(Sigma) / |G|^2, within its own spread."""
    generator = np.random.default_rng(7)
    mean = generator.standard_normal(200)
    deviations = 10.0 * generator.uniform(0.5, 1.5, 200)
    exact = np.square(deviations).sum() / np.square(mean).sum()
    estimates = []
    for _ in range(10):
        scale = NoiseScale()
        for _ in range(150):
            parts = [gaussian(generator, mean, deviations, 8) for _ in range(4)]
            own, whole = np.square(parts[0]).sum(), np.square(np.mean(parts, axis=0)).sum()
            scale.add(own, whole, batch=8, whole=32)
        assert scale.value is not None
        estimates.append(scale.value)
    spread = np.std(estimates) / np.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(exact, abs=4 * spread)
    assert np.std(estimates) / exact < 0.3


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([(2.0, 1.5)] * (ENOUGH - 1), "too few"),
        ([(9.0, 1.0)] * 40, "the signal is not positive"),
        ([(1.0, 2.0)] * 40, "the noise is negative"),
        ([(np.nan, 1.0)] * 40, "not finite"),
        ([(np.inf, np.inf)] * 40, "not finite"),
    ],
)
def test_without_an_estimate_there_is_no_scale(samples: list[tuple[float, float]], why: str) -> None:
    """Too few samples, a signal that is not positive and gradients that are not finite give no noise scale."""
    scale = NoiseScale()
    for own, whole in samples:
        scale.add(own, whole, batch=4, whole=8)
    assert scale.value is None, why


class Task:
    """A linear regression with noisy targets, whose gradient of a sample is known."""

    def __init__(self) -> None:
        generator = np.random.default_rng(11)
        self.truth = generator.standard_normal(12)

    def batch(self, step: int, part: int, rank: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Inputs and targets of one backward on one rank."""
        generator = np.random.default_rng([step, part, rank])
        x = generator.standard_normal((BATCHES[step % len(BATCHES)], 12))
        return x, x @ self.truth + 0.5 * generator.standard_normal(len(x))

    def gradient(self, weight: NDArray[np.float64], step: int, part: int, rank: int) -> NDArray[np.float64]:
        """Of the mean squared error."""
        x, y = self.batch(step, part, rank)
        return 2 * x.T @ (x @ weight - y) / len(y)


def estimate(task: Task, weights: list[NDArray[np.float64]], rank: int, parts: int, sizes: list[int] | None = None) -> float:
    """Estimate a rank's noise scale from gradients that numpy computes. `sizes`: batches of the steps; 0 does not count."""
    signals, noises = [], []
    for step, weight in enumerate(weights):
        own, *others = (
            np.mean([task.gradient(weight, step, part, one) for part in range(parts)], axis=0)
            for one in (rank, *(r for r in range(RANKS) if r != rank))
        )
        b = parts * BATCHES[step % len(BATCHES)] if sizes is None else sizes[step]
        if b == 0:
            continue
        small, large = np.square(own).sum(), np.square(np.mean([own, *others], axis=0)).sum()
        signals.append((RANKS * b * large - b * small) / (RANKS * b - b))
        noises.append((small - large) / (1 / b - 1 / (RANKS * b)))
    ages = 0.98 ** np.arange(len(signals))[::-1]
    return float(np.dot(ages, noises) / np.dot(ages, signals))


def train(task: Task, rank: int, parts: int, observed: bool) -> dict[str, object]:
    """Train a linear model under DDP, and return this rank's shown estimates and weights."""
    model = torch.nn.Linear(12, 1, bias=False).double()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    torch.nn.init.zeros_(model.weight)
    weights, shown = [], []
    with start_exporter(wrapped, port=None, every=1, local_norm=True, collectors=OFF) as exporter:
        for step in range(STEPS):
            optimizer.zero_grad()
            weights.append(model.weight.detach().numpy()[0].copy())
            for part in range(parts):
                x, y = (torch.from_numpy(one) for one in task.batch(step, part, rank))
                wrapped.require_backward_grad_sync = part == parts - 1
                ((wrapped(x)[:, 0] - y).square().mean() / parts).backward()
            optimizer.step()
            if observed:
                exporter.observe(samples=OBSERVED)
            shown.append(value(exporter, "torch_grad_noise_scale"))
        return {"shown": shown, "weights": weights, "errors": errors(exporter)}


CASES = {"inferred": (1, False), "accumulated": (3, False), "observed": (1, True)}


def trained(rank: int) -> dict[str, dict[str, object]]:
    """Return what one of the ranks saw in each case."""
    return {name: train(Task(), rank, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, object]]]:
    """Return what both ranks saw."""
    return of_ranks(trained, ranks=RANKS)


@pytest.mark.process
@pytest.mark.parametrize("name", ["inferred", "accumulated"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_two_ranks_show_what_numpy_computes(name: str, rank: int, found: list[dict[str, dict[str, list[object]]]]) -> None:
    """Each rank shows numpy's estimate from the gradients of both, from the twentieth sample on, with batches of changing size."""
    mine = found[rank][name]
    assert not mine["errors"]
    assert mine["shown"][: ENOUGH - 1] == [None] * (ENOUGH - 1)
    for step in range(ENOUGH - 1, STEPS):
        expected = estimate(Task(), mine["weights"][: step + 1], rank, CASES[name][0])
        assert mine["shown"][step] == pytest.approx(expected, rel=1e-6), step


@pytest.mark.process
def test_observed_samples_replace_batch_sizes(found: list[dict[str, dict[str, list[object]]]]) -> None:
    """Where samples are observed, they count from the ninth step on, and each estimate is numpy's."""
    sizes = [BATCHES[0], *[0] * 8, *[OBSERVED] * (STEPS - 9)]
    for rank, mine in enumerate(found):
        shown, weights = mine["observed"]["shown"], mine["observed"]["weights"]
        assert next(i for i, one in enumerate(shown) if one is not None) == ENOUGH + 7
        assert shown[-1] == pytest.approx(estimate(Task(), weights, rank, 1, sizes), rel=1e-6)


PARTS = 4
"""Micro-batches of a step on one rank."""


def halve(weight: torch.nn.Parameter, part: int) -> None:
    """Scale what is there after the second micro-batch."""
    if part == 1 and weight.grad is not None:
        weight.grad.mul_(0.5)


def accumulate(
    *,
    sizes: tuple[int, ...] = (BATCHES[0],) * PARTS,
    divide: bool = True,
    observe: bool = False,
    forwards: int = PARTS,
    keep: float = 0.0,
    edit: Callable[[torch.nn.Parameter, int], None] | None = None,
    local_norm: bool = True,
) -> tuple[list[object], list[NDArray[np.float64]], Task]:
    """Train with several backwards to a step; return the estimates that are shown after each, the weights before it, and the task.

    Args:
        sizes: Examples of the micro-batches.
        divide: Whether each loss is divided by their number.
        observe: Whether the examples of a step are observed.
        forwards: Forwards of a step; with one, all backwards are of the same batch.
        keep: What remains of the gradient of the step before.
        edit: Is called after each micro-batch.
        local_norm: The option.
    """
    task, model = Task(), torch.nn.Linear(12, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    torch.nn.init.zeros_(model.weight)
    weights, shown = [], []
    with start_exporter(model, port=None, every=1, collectors=OFF, local_norm=local_norm) as exporter:
        for step in range(STEPS):
            weights.append(model.weight.detach().numpy()[0].copy())
            loss = torch.zeros(())
            for part, size in enumerate(sizes):
                x, y = (torch.from_numpy(values) for values in task.batch(3 * step, part, 0))  # batches of one size
                if part < forwards:
                    loss = (model(x[:size])[:, 0] - y[:size]).square().mean()
                (loss / (len(sizes) if divide else 1)).backward(retain_graph=forwards < PARTS)
                if edit is not None:
                    edit(model.weight, part)
            optimizer.step()
            if keep and model.weight.grad is not None:
                model.weight.grad.mul_(keep)
            else:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            if observe:
                exporter.observe(samples=PARTS * OBSERVED)
            shown.append(value(exporter, "torch_grad_noise_scale"))
        assert not errors(exporter)
    return shown, weights, task


def of_micro_batches(task: Task, weights: list[NDArray[np.float64]], sizes: list[int]) -> float:
    """Estimate the noise scale from the micro-batches of each step. `sizes`: what one counts as; steps of 0 do not count."""
    signals, noises = [], []
    for step, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        if size:
            parts = [task.gradient(weight, 3 * step, part, 0) for part in range(PARTS)]
            small, large = np.square(parts[0]).sum(), np.square(np.mean(parts, axis=0)).sum()
            signals.append((PARTS * large - small) / (PARTS - 1))
            noises.append((small - large) / (1 / size - 1 / (PARTS * size)))
    ages = 0.98 ** np.arange(len(signals))[::-1]
    return float(np.dot(ages, noises) / np.dot(ages, signals))


@pytest.mark.parametrize(
    ("loop", "sizes"),
    [
        ({}, [BATCHES[0]] * STEPS),
        ({"divide": False}, [BATCHES[0]] * STEPS),
        ({"observe": True}, [BATCHES[0], *[0] * 8, *[OBSERVED] * (STEPS - 9)]),
    ],
    ids=["mean", "sum", "observed"],
)
def test_micro_batches_show_what_numpy_computes(loop: dict[str, bool], sizes: list[int]) -> None:
    """A single rank that accumulates shows numpy's estimate from its first micro-batch and the mean of all, each step."""
    shown, weights, task = accumulate(**loop)
    for step in range(STEPS):
        if np.count_nonzero(sizes[: step + 1]) < ENOUGH:
            assert shown[step] is None, step
        else:
            assert shown[step] == pytest.approx(of_micro_batches(task, weights[: step + 1], sizes[: step + 1]), rel=1e-6), step


@pytest.mark.parametrize(
    "loop",
    [
        {"sizes": (12, 12, 12, 6)},
        {"forwards": 1},
        {"edit": halve},
        {"keep": 0.05},
        {"sizes": (12,)},
        {"local_norm": False},
    ],
    ids=["unequal", "one batch", "edited", "kept", "single", "off"],
)
def test_other_backwards_show_no_noise_scale(loop: dict[str, Any]) -> None:
    """Backwards that are not equal micro-batches of one gradient show none."""
    assert set(accumulate(**loop)[0]) == {None}
