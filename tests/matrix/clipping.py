"""Clipping: what happens to gradients between the backward and the step."""

from __future__ import annotations

import math

import pytest
import torch

from tests.matrix.harness import CUMULATIVE, Run, regime
from tests.support.models import Perceptron, batch, sgd
from tests.support.record import gradients_of, norm


@regime()
def not_clipped(run: Run) -> None:
    """Where nothing is clipped the coefficient is 1 and not nearly 1, and no step counts as clipped."""
    model = Perceptron(40, 64, 10)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(10):
            run.train(model, optimizer, 1, lambda: batch(8, 40), clip=1e6)
            run.shows(1.0, "torch_grad_clip_coefficient")


@regime(norm_type=[2.0, 1.0, math.inf])
def clip_grad_norm(run: Run, norm_type: float) -> None:
    """Norms are those before `clip_grad_norm_`, whatever kind it uses; the coefficient is its factor."""
    model = Perceptron()
    for step in run.rounds(model, 8):
        run.backward(model(batch()).square().mean() * (10.0 if step % 3 else 0.001))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)


@regime()
def clip_grad_value(run: Run) -> None:
    """`clip_grad_value_` in every step shows the norm after it and the ratio, also where only some parameters are cut."""
    model = Perceptron()
    for _ in run.rounds(model, 6):
        run.backward(model(batch()).square().sum() * 10)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


@regime(limits=[(math.inf, 0.5), (0.5, 2.0)])
def clip_of_groups(run: Run, limits: tuple[float, float]) -> None:
    """Clipping one of an optimizer's parameter groups, or each to a norm of its own, shows the ratio of the whole norms."""
    model = Perceptron()
    optimizer = torch.optim.SGD([{"params": model.first.parameters()}, {"params": model.second.parameters()}], lr=0.05)
    for _ in run.rounds(model, 6, optimizer):
        run.backward(model(batch()).square().sum())
        for limit, group in zip(limits, optimizer.param_groups, strict=True):
            torch.nn.utils.clip_grad_norm_(group["params"], limit)


@regime(options=[{}, {"exclude": ["second"]}])
def clip_of_more_than_is_watched(run: Run, options: dict[str, list[str]]) -> None:
    """A limit of more than what is watched is unknown: there is neither a coefficient nor a number of clipped steps."""
    model = Perceptron()
    optimizer, part = sgd(model), {"first": model.first}
    watched = torch.nn.ModuleDict(part) if options else part  # as the exporter names the layers
    with run.watching(watched, optimizer, watched=model if options else part, **options):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean() * 10)
            if step:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            run.step(optimizer)
            run.check()
            run.shows(None if step else 0.0, "torch_grad_clipped_steps_total")
            run.shows(None if step else 1.0, "torch_grad_clip_coefficient")


@regime()
def accumulation_with_a_shorter_last_round_that_clips(run: Run) -> None:
    """The first round that is shorter than all before and clips is lost, which shows; the ones after it are right."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step, micro_batches in enumerate((4, 4, 1, 4, 4, 1, 4, 2)):
            for _ in range(micro_batches):
                run.backward(model(batch()).square().mean() / micro_batches)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            run.step(optimizer)
            optimizer.zero_grad()
            run.shows(float(step >= 2), "torch_grad_exporter_captures_skipped_total", reason="edited")
            if step != 2:  # it could not be known that this backward was its round's last before the gradients were clipped
                run.check(without=("torch_grad_clipped_steps_total", *CUMULATIVE) if step > 2 else ())


@regime(set_to_none=[True, False])
def accumulation_that_clips_each_backward(run: Run, set_to_none: bool) -> None:
    """Clipping after each of three backwards, in place, is neither a skipped step nor a sample of its own."""
    model = Perceptron()
    for _ in run.rounds(model, 5, clear="after", set_to_none=set_to_none):
        for _ in range(3):
            run.backward(model(batch()).square().mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def divide(model: torch.nn.Module, divisor: float) -> None:
    """Divides all gradients, as by the number of tokens."""
    for parameter in model.parameters():
        parameter.grad.div_(divisor)


TOKENS = (113, 127, 97, 96, 128, 140, 101, 133)
"""Of the batches of a loop, in turn."""


@regime()
def divided_by_tokens(run: Run) -> None:
    """A division that nothing reports: norms are those before it; whether it was a clipping, and of how many steps, is absent."""
    model = Perceptron()
    for step in run.rounds(model, 17):
        run.backward(model(batch()).square().mean() * TOKENS[step % 8])
        divide(model, TOKENS[step % 8])
        if step:  # of the round before
            run.shows(None, "torch_grad_clip_coefficient")
            run.shows(None, "torch_grad_clipped_steps_total")


def backward_of_tokens(run: Run, model: torch.nn.Module, step: int) -> None:
    """A backward whose gradients will be divided by the step's tokens, which is reported to the exporter in some way."""
    if run.record is not None:
        run.record.told = True
    run.unscale(1 / TOKENS[step % 8])
    run.backward(model(batch()).square().mean() * TOKENS[step % 8])


@regime(limit=[math.inf, 0.05])
def divided_by_tokens_and_the_norm_is_given(run: Run, limit: float) -> None:
    """The norm of the divided gradients, given before the step, is the global norm; norms of layers are those before it.

    With a limit that repeats the step counts as clipped, but its coefficient is absent, since the divisor is unknown.
    """
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(10):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean() * TOKENS[step % 8])
            divide(model, TOKENS[step % 8])
            given = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            run.observe(grad_norm=given)
            run.step(optimizer)
            run.check(without=["torch_grad_global_norm", "torch_grad_clip"])
            run.shows(pytest.approx(float(given), rel=1e-5), "torch_grad_global_norm")
            run.shows(pytest.approx(min(float(given), limit), rel=1e-4), "torch_grad_global_norm_after_clip")
            clipped = limit < math.inf
            run.shows(None if clipped else pytest.approx(1.0), "torch_grad_clip_coefficient")
            run.shows((step + 1.0 if step > 1 else None) if clipped else 0.0, "torch_grad_clipped_steps_total")


@regime(told=["before the backward", "after the backward", "by a tensor"])
def divided_by_tokens_that_are_told(run: Run, told: str) -> None:
    """`observe(grad_divisor=)`: norms are those after the division and before clipping, and what is left is clipping, at once."""
    model = Perceptron()
    for step in run.rounds(model, 10):
        tokens = TOKENS[step % 8]
        if told != "after the backward":
            run.observe(grad_divisor=torch.tensor(tokens) if told == "by a tensor" else tokens)
        backward_of_tokens(run, model, step)
        if told == "after the backward":
            run.observe(grad_divisor=tokens)
        divide(model, tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if step % 3 else 1e6)


@regime(value=[math.nan, math.inf])
def nonfinite_before_clipping(run: Run, value: float) -> None:
    """One NaN or infinite element is counted as one, whatever `clip_grad_norm_` makes of it and of every other gradient."""
    model = Perceptron()
    for step in run.rounds(model, 4):
        if step == 3:
            model.second.bias.register_hook(lambda g: torch.cat((g[:1] * value, g[1:])))
        run.backward(model(batch()).square().mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@regime(case=[(torch.float32, 5), (torch.float32, 0), (torch.bfloat16, 0)])
def clipped_past_versions(run: Run, case: tuple[torch.dtype, int]) -> None:
    """Gradients that are clipped through `.data`, from some round on, leave no trace in versions; norms at steps are right."""
    dtype, since = case
    model = Perceptron().to(dtype)
    for step in run.rounds(model, 20, rel=1e-2, without=["torch_grad_clip"]):
        run.backward(model(batch().to(dtype)).float().square().mean())
        factor = 0.01 / norm(gradients_of(model).values()) if step >= since else 1.0
        for parameter in model.parameters():
            parameter.grad.data.mul_(factor)


@regime()
def gradients_replaced_before_the_step(run: Run) -> None:
    """Gradients that are replaced by other tensors after the backward, half as long: that half is no clipping for sure."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        run.backward(model(batch()).square().mean())
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
