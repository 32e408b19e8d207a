"""Closures: loops in which the backward runs within the optimizer's step."""

from __future__ import annotations

import contextlib

import torch

from tests.matrix.harness import Naive, Run, regime
from tests.support.models import Perceptron, batch, sgd


@regime(Naive.ACCUMULATE | Naive.STEP)
def closure(run: Run) -> None:
    """`SGD.step(closure)` uses the gradient that its closure computes, and that is the sample."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(5):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                run.backward(loss)
                run.stepping()
                return loss

            optimizer.step(closure)
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP)
def closure_with_two_backwards(run: Run) -> None:
    """A closure that accumulates two backwards is one sample, and the second backward is no skipped step."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with run.watching(model, optimizer):
        for _ in range(5):
            batches = batch(), batch()

            def closure(batches: tuple[torch.Tensor, torch.Tensor] = batches) -> torch.Tensor:
                optimizer.zero_grad()
                for inputs in batches:
                    loss = model(inputs).square().mean()
                    run.backward(loss)
                run.stepping()
                return loss

            optimizer.step(closure)
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP)
def closure_that_keeps_its_graph(run: Run) -> None:
    """A closure that runs the backward of one loss twice shows the doubled gradient."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(5):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                run.backward(loss, retain_graph=True)
                run.backward(loss)
                run.stepping()
                return loss

            optimizer.step(closure)
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP, kind=[torch.optim.SGD, torch.optim.AdamW])
def closure_that_clips(run: Run, kind: type[torch.optim.Optimizer]) -> None:
    """A closure that runs forward, clears, backward and clips, as Lightning's does: norms before and after clipping."""
    model = Perceptron()
    optimizer = kind(model.parameters(), lr=0.01)
    with run.watching(model, optimizer):
        for step in range(12):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs, factor: float = 20.0 if step % 3 else 0.001) -> torch.Tensor:
                loss = model(inputs).square().mean() * factor
                optimizer.zero_grad()
                run.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                run.stepping()
                return loss

            optimizer.step(closure)
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP)
def accumulation_whose_last_is_a_closure(run: Run) -> None:
    """Two micro-batches outside of the step and the third in its closure, as Lightning accumulates, are one sample."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(6):
            for micro_batch in range(3):

                def closure(inputs: torch.Tensor, *, first: bool, last: bool) -> torch.Tensor:
                    loss = model(inputs).square().mean() / 3
                    if first:
                        optimizer.zero_grad()
                    run.backward(loss)
                    if last:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                        run.stepping()
                    return loss

                inputs = batch()
                if micro_batch < 2:
                    closure(inputs, first=micro_batch == 0, last=False)
                else:
                    optimizer.step(lambda inputs=inputs: closure(inputs, first=False, last=True))
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP, search=[None, "strong_wolfe"])
def lbfgs(run: Run, search: str | None) -> None:
    """LBFGS calls its closure many times in a step: that is one step, one sample of the last, and nothing skipped."""
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6, line_search_fn=search)
    with run.watching(model, optimizer):
        for _ in range(3):
            inputs = batch(20)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(inputs) - inputs[:, :3]).square().mean()
                run.backward(loss)
                return loss

            optimizer.step(closure)
            run.stepping()  # the gradients of the last call stay as they are after it
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP)
def lbfgs_that_clears_in_place(run: Run) -> None:
    """A closure that zeroes in place between its calls is told from an accumulation, since all is within one step."""
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with run.watching(model, optimizer):
        for _ in range(4):
            inputs = batch(20)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad(set_to_none=False)
                loss = (model(inputs) - inputs[:, :3]).square().mean()
                run.backward(loss)
                return loss

            optimizer.step(closure)
            run.stepping()
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP)
def closure_and_steps_by_turns(run: Run) -> None:
    """A loop in which every second step has a closure shows the gradient of each step."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(8):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                run.backward(loss)
                run.stepping()
                return loss

            if step % 2:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            run.check()


@regime(Naive.ACCUMULATE | Naive.STEP)
def closures_of_two_optimizers(run: Run) -> None:
    """Two optimizers that step with closures in turn each show the gradient that their own closure computed."""
    models = {"left": Perceptron(), "right": Perceptron()}
    optimizers = {name: sgd(model) for name, model in models.items()}
    with run.watching(models, optimizers, optimizers=optimizers):
        for iteration in range(4):
            for name, model in models.items():
                inputs = batch()

                def closure(inputs: torch.Tensor = inputs, name: str = name, model: torch.nn.Module = model) -> torch.Tensor:
                    optimizers[name].zero_grad()
                    loss = model(inputs).square().mean()
                    others = [f"{other}.{n}" for other in models if other != name for n, _ in model.named_parameters()]
                    run.backward(loss, unused=others)
                    run.stepping(name)
                    return loss

                optimizers[name].step(closure)
                if iteration or name == "right":  # an optimizer has a label from the first sample on that another has, too
                    run.check()


class Failure(Exception):
    """What a closure of the user raises."""


@regime(Naive.ACCUMULATE | Naive.STEP)
def closure_that_raises_before_its_backward(run: Run) -> None:
    """A closure that raises before its backward ends its step, and the loop goes on."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(7):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs, fail: bool = step in (2, 4)) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                if fail:
                    raise Failure
                run.backward(loss)
                run.stepping()
                return loss

            with contextlib.suppress(Failure):
                optimizer.step(closure)
                run.check()


@regime(Naive.ACCUMULATE | Naive.STEP)
def closure_that_raises_after_its_backward(run: Run) -> None:
    """A closure that raises after its backward leaves one that no step followed, though the next is in a step again."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(7):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs, fail: bool = step in (2, 4)) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                run.backward(loss)
                if fail:
                    run.skipped()
                    raise Failure
                run.stepping()
                return loss

            with contextlib.suppress(Failure):
                optimizer.step(closure)
                run.check()
