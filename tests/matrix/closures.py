"""Closures: loops in which the backward runs within the optimizer's step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from tests.matrix.harness import Run, regime
from tests.support.models import Perceptron, batch, sgd


class Failure(Exception):
    """What a closure of the user raises."""


def train(
    run: Run, optimizer: torch.optim.Optimizer, steps: int, compute: Callable[[int], torch.Tensor], model: torch.nn.Module
) -> None:
    """Trains by steps with a closure that clears the gradients and runs `compute(step)`, which does the backwards."""
    with run.watching(model, optimizer):
        for step in range(steps):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = compute(step)
                run.stepping()
                return loss

            with contextlib.suppress(Failure):
                optimizer.step(closure)
                run.check()


@regime()
def closure(run: Run) -> None:
    """`SGD.step(closure)` uses the gradient that its closure computes, and that is the sample."""
    model = Perceptron()

    def compute(_step: int) -> torch.Tensor:
        loss = model(batch()).square().mean()
        run.backward(loss)
        return loss

    train(run, sgd(model), 5, compute, model)


@regime(kind=[torch.optim.SGD, torch.optim.AdamW])
def closure_that_clips(run: Run, kind: type[torch.optim.Optimizer]) -> None:
    """A closure that runs forward, backward and clips, as Lightning's does: norms before and after clipping."""
    model = Perceptron()

    def compute(step: int) -> torch.Tensor:
        loss = model(batch()).square().mean() * (20.0 if step % 3 else 0.001)
        run.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    train(run, kind(model.parameters(), lr=0.01), 9, compute, model)


@regime()
def accumulation_whose_last_is_a_closure(run: Run) -> None:
    """Two micro-batches outside of the step and the third in its closure, as Lightning accumulates, are one sample."""
    model = Perceptron()
    optimizer = sgd(model)

    def closure(*, last: bool) -> torch.Tensor:
        loss = model(batch()).square().mean() / 3
        run.backward(loss)
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            run.stepping()
        return loss

    with run.watching(model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                closure(last=False)
            optimizer.step(lambda: closure(last=True))
            run.check()


def lbfgs_loop(run: Run, optimizer: torch.optim.LBFGS, model: torch.nn.Module, *, set_to_none: bool) -> None:
    """Steps that call a closure many times."""
    with run.watching(model, optimizer):
        for _ in range(3):
            inputs = batch(20)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad(set_to_none=set_to_none)
                loss = (model(inputs) - inputs[:, :3]).square().mean()
                run.backward(loss)
                return loss

            optimizer.step(closure)
            run.stepping()  # the gradients of the last call stay as they are after it
            run.check()


@regime(search=[None, "strong_wolfe"])
def lbfgs(run: Run, search: str | None) -> None:
    """LBFGS calls its closure many times in a step: that is one step, one sample of the last, and nothing skipped."""
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6, line_search_fn=search)
    lbfgs_loop(run, optimizer, model, set_to_none=True)


@regime()
def closure_that_raises_before_its_backward(run: Run) -> None:
    """A closure that raises before its backward ends its step, and the loop goes on."""
    model = Perceptron()

    def compute(step: int) -> torch.Tensor:
        loss = model(batch()).square().mean()
        if step in (2, 4):
            raise Failure
        run.backward(loss)
        return loss

    train(run, sgd(model), 7, compute, model)


@regime()
def closure_that_raises_after_its_backward(run: Run) -> None:
    """A closure that raises after its backward leaves one that no step followed, though the next is in a step again."""
    model = Perceptron()

    def compute(step: int) -> torch.Tensor:
        loss = model(batch()).square().mean()
        run.backward(loss)
        if step in (2, 4):
            run.skipped()
            raise Failure
        return loss

    train(run, sgd(model), 7, compute, model)
