"""Loops: how forwards, backwards and steps follow each other."""

from __future__ import annotations

import contextlib
import copy

import torch

from tests.matrix.harness import CUMULATIVE, UNSEEN, Run, regime
from tests.support.models import Perceptron, batch, sgd

# Backwards and steps


@regime(set_to_none=[True, False])
def plain(run: Run, set_to_none: bool) -> None:
    """One forward, one backward, one step."""
    model = Perceptron()
    for _ in run.rounds(model, 25, set_to_none=set_to_none):
        run.backward(model(batch()).square().mean())


@regime(set_to_none=[True, False])
def zero_grad_after_the_step(run: Run, set_to_none: bool) -> None:
    """Gradients that are cleared right after the step have been read by then."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in run.rounds(model, 5, optimizer, clear="after", set_to_none=set_to_none):
        run.backward(model(batch()).square().mean())


@regime()
def never_cleared(run: Run) -> None:
    """Without any `zero_grad` each gradient is the sum of all before, and each step is a round of its own."""
    model = Perceptron()
    optimizer = sgd(model, lr=0.01)
    for _ in run.rounds(model, 5, optimizer, clear=False):
        run.backward(model(batch()).square().mean())


@regime(set_to_none=[True, False])
def accumulation(run: Run, set_to_none: bool) -> None:
    """Three backwards to a step are one sample, of the accumulated gradient."""
    model = Perceptron()
    optimizer = sgd(model)
    for _ in run.rounds(model, 5, optimizer, clear="after", set_to_none=set_to_none):
        for _ in range(3):
            run.backward(model(batch()).square().mean())


@regime(set_to_none=[True, False])
def accumulation_with_a_shorter_last_round(run: Run, set_to_none: bool) -> None:
    """Epochs of 4, 4 and 1 micro-batches to a step give a sample for each step, the short ones too."""
    model = Perceptron()
    counts = (4, 4, 1, 4, 4, 1, 4, 2)
    for step in run.rounds(model, len(counts), clear="after", set_to_none=set_to_none):
        for _ in range(counts[step]):
            run.backward(model(batch()).square().mean() / counts[step])


class TwoHeads(torch.nn.Module):
    """Two parts that share nothing, so that their losses have graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(6, 3)
        self.right = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


RIGHT = ("right.weight", "right.bias")


@regime()
def two_graphs_of_one_forward(run: Run) -> None:
    """One forward with two separate graphs, each with a backward of its own; now and then the second has none."""
    model = TwoHeads()
    for step in run.rounds(model, 8, set_to_none=False):
        left, right = model(batch())
        run.backward(left.square().mean(), unused=RIGHT)
        if step % 4 != 3:
            run.backward(right.square().mean())


@regime()
def a_backward_for_each_graph_at_once(run: Run) -> None:
    """`torch.autograd.backward` of several losses is one backward."""
    model = TwoHeads()
    for _ in run.rounds(model, 5):
        left, right = model(batch())
        torch.autograd.backward([left.square().mean(), right.square().mean()])
        run.passed()


@regime()
def untouched_modules(run: Run) -> None:
    """Of a part that a backward does not reach the zeros that `zero_grad(set_to_none=False)` left are no gradient."""
    model = TwoHeads()
    for step in run.rounds(model, 8, set_to_none=False):
        left, right = model(batch())
        if step % 2:
            run.backward(left.square().mean(), unused=RIGHT)
        else:
            run.backward(left.square().mean() + right.square().mean())


# Between steps


@regime(evaluation=[torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def evaluation_between_epochs(run: Run, evaluation: type) -> None:
    """Evaluation between epochs, and after the last step of one, changes nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(3):
            model.train()
            for _ in range(3):
                optimizer.zero_grad()
                run.backward(model(batch()).square().mean())
                run.step(optimizer)
            model.eval()
            with evaluation():
                for _ in range(2):
                    run.losses.append(model(batch(7)).square().mean().detach())
            run.check()


@regime()
def a_copy_is_trained_beside_it(run: Run) -> None:
    """A copy that was made in the run and has an optimizer of its own is ignored."""
    model = Perceptron()
    for step in run.rounds(model, 6):
        if step == 2:
            twin = copy.deepcopy(model)
            of_twin = sgd(twin)
        run.backward(model(batch()).square().mean())
        if step >= 2:
            of_twin.zero_grad()
            twin(batch()).square().mean().backward()
            of_twin.step()
    run.state += [p.detach().clone() for p in twin.parameters()]


# Steps


class CallsSuper(torch.optim.SGD):
    """An optimizer whose `step` calls the one it inherits: PyTorch's hooks run twice."""

    def step(self, closure: object = None) -> object:
        return super().step(closure)


@regime()
def step_that_calls_super(run: Run) -> None:
    """A step within which the inherited step runs is one step."""
    model = Perceptron()
    optimizer = CallsSuper(model.parameters(), lr=0.05)
    for _ in run.rounds(model, 5, optimizer):
        run.backward(model(batch()).square().mean())


class Wrapper(torch.optim.Optimizer):
    """An optimizer that owns the parameters of another one, which it calls."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: object = None) -> object:
        return self.inner.step(closure)


@regime()
def optimizer_around_another(run: Run) -> None:
    """A round in which a wrapper and the optimizer in it step is one sample and one step; the inner one is its tool."""
    model = Perceptron()
    inner = sgd(model)
    optimizer = Wrapper(inner)
    with run.watching(model, inner):
        for step in range(1, 6):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean())
            run.step(optimizer)
            run.check()
            run.shows(step, "torch_train_steps_total", optimizer="Wrapper")


@regime(around=[True, False])
def patched_step(run: Run, around: bool) -> None:
    """A `step` that replaces the optimizer's own: around that, or instead and with `exporter.step()`."""
    model = Perceptron()
    optimizer = sgd(model)
    own = optimizer.step if around else torch.optim.SGD.step.__wrapped__.__get__(optimizer)
    optimizer.step = lambda closure=None: own(closure)
    with run.watching(model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean())
            run.step(optimizer)
            run.stepped()
            run.check()


class HandMade:
    """An optimizer that is no `torch.optim.Optimizer`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            parameter.sub_(0.05 * parameter.grad)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@regime(numbered=[False, True])
def duck_typed_optimizer(run: Run, numbered: bool) -> None:
    """With `exporter.step()`, with and without a number, a hand-made optimizer is seen like any other."""
    model = Perceptron()
    optimizer = HandMade(model)
    with run.watching(model, sgd(model)):
        for step in range(5):
            run.backward(model(batch()).square().mean() * 10)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            run.stepping()
            optimizer.step()
            run.stepped(*[100 + step] * numbered)
            optimizer.zero_grad()
            run.check()


def written_by_hand(run: Run, model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Gradients by `torch.autograd.grad`, put in place by hand."""
    run.losses.append(loss.detach())
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient * 3
    run.passed()


@regime()
def by_hand(run: Run) -> None:
    """Where neither the output nor a parameter sees a backward, gradients are read at the step: rung `optimizer`."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # by then two rungs have seen steps without a backward, twice each, and so `optimizer` is reached
    for _ in run.rounds(model, 8, optimizer, clear=False, since=5, without=[*UNSEEN, *CUMULATIVE]):
        written_by_hand(run, model, model(batch()).square().mean())
    run.shows(None, "torch_grad_clipped_steps_total")
    run.shows(1, "torch_grad_exporter_capture_mode", mode="optimizer")


# Two passes to a step


class SharpnessAware(torch.optim.Optimizer):
    """Sharpness-aware minimisation: climbs along the gradient, and steps with the one that is found there."""

    def __init__(self, base: torch.optim.Optimizer, rho: float = 0.05) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.rho = rho
        self._climbed: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    @torch.no_grad()
    def climb(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        length = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters]))
        self._climbed = [(p, p.grad * self.rho / (length + 1e-12)) for p in parameters]
        for parameter, way in self._climbed:
            parameter.add_(way)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        if closure is not None:
            self.climb()
            with torch.enable_grad():
                closure()
        for parameter, way in self._climbed:
            parameter.sub_(way)
        self.base.step()
        self.zero_grad()


@regime()
def two_passes(run: Run) -> None:
    """A loop that climbs, clears and runs a second backward before each step shows the gradient of the second."""
    model = Perceptron()
    base = sgd(model)
    optimizer = SharpnessAware(base)
    with run.watching(model, base):
        for _ in range(10):
            inputs = batch()
            run.backward(model(inputs).square().mean())
            optimizer.climb()
            run.backward(model(inputs).square().mean())
            run.step(optimizer)
            run.check(without=["torch_train_steps_total"])


@regime()
def two_passes_with_a_closure(run: Run) -> None:
    """A step that climbs and then calls its closure shows the gradient that the closure found."""
    model = Perceptron()
    base = sgd(model)
    optimizer = SharpnessAware(base)
    with run.watching(model, base):
        for _ in range(6):
            inputs = batch()
            run.backward(model(inputs).square().mean())

            def closure(inputs: torch.Tensor = inputs) -> None:
                run.backward(model(inputs).square().mean())
                run.stepping()

            optimizer.step(closure)
            run.check(without=["torch_train_steps_total"])
