"""A skipped step leaves optimizers, their flags and gradients as an ordinary step leaves them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models import Perceptron, batch
from tests.support.scrape import OFF, errors, value
from tests.support.torch_hooks import global_step_hooks
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Clipper, SkipAbove, SkipNonFinite

start = functools.partial(start_exporter, port=None, every=1, collectors=OFF)

Skips = Callable[[], object]


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of the parameters."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether all bits are equal."""
    return len(first) == len(second) and all(map(torch.equal, first, second))


def spoil(parameter: torch.Tensor, element: float = math.nan) -> None:
    """Overwrite an element of a gradient."""
    assert parameter.grad is not None
    parameter.grad.view(-1)[0] = element


# The flag


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("beside", "bad", "element"),
    [(False, "first", math.nan), (False, "second", math.nan), (True, "first", math.nan), (True, "first", 1e12)],
)
def test_several_skip_for_one_optimizer(beside: bool, bad: str, element: float, scaled: bool) -> None:
    """With a Clipper for each part of a model, or `clip=` beside one, a bad step is skipped if one asks, and no other step."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    if beside:
        clippers = [Clipper(model, SkipAbove(1e9), optimizers=[optimizer])]
        exporter = start(model, clip=SkipNonFinite())
    else:
        clippers = [Clipper(part, SkipNonFinite(), optimizers=[optimizer]) for part in (model.first, model.second)]
        exporter = None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    for number in range(14):  # more than the failures after which clip= is switched off
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean()).backward()
        scaler.unscale_(optimizer)
        if number == 12:
            spoil(getattr(model, bad).weight, element)
        for clipper in clippers:
            clipper()
        before = weights(model)
        scaler.step(optimizer)
        scaler.update()
        assert same(before, weights(model)) is (number == 12)
        assert not hasattr(optimizer, "found_inf")
    if exporter is not None:
        exporter.close()
        assert errors(exporter) == {}


def test_a_flag_of_a_step_that_raised() -> None:
    """If a step raises between two that may skip it, the next one is judged by its own gradients."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    clippers = [Clipper(part, SkipNonFinite(), optimizers=[optimizer]) for part in (model.first, model.second)]

    def fails(_optimizer: object, _arguments: object, _named: object) -> None:
        raise ArithmeticError

    for number in range(4):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        if number == 1:
            spoil(model.second.weight)
        for clipper in clippers:
            clipper()
        before = weights(model)
        if number == 1:
            handle = optimizer.register_step_pre_hook(fails)
            with pytest.raises(ArithmeticError):
                optimizer.step()
            handle.remove()
        else:
            optimizer.step()
        assert same(before, weights(model)) is (number == 1)
    assert not hasattr(optimizer, "found_inf")


class NamedFused(torch.optim.SGD):
    """Says that it is fused, and reads no flag."""

    def __init__(self, parameters: Any) -> None:  # noqa: ANN401 - as PyTorch's
        super().__init__(parameters, lr=0.05)
        self.defaults["fused"] = True
        for group in self.param_groups:
            group["fused"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ANN401 - as PyTorch's
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


def test_an_optimizer_that_only_says_fused() -> None:
    """One of another package that is called fused and has no flag skips by its gradients, and a Clipper refuses it."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = NamedFused(model.parameters())
    with start(model, clip=SkipNonFinite()) as exporter:
        for number in range(3):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            if number == 1:
                spoil(model.first.weight)
            before = weights(model)
            optimizer.step()
            assert same(before, weights(model)) is (number == 1)
        assert errors(exporter) == {}
    with pytest.raises(ValueError, match="expected fused optimizers"):
        Clipper(model, SkipNonFinite(), optimizers=[optimizer])


@pytest.fixture
def uninitialized() -> Any:  # noqa: ANN401 - a fixture that yields
    """Fill memory that PyTorch allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialized")
def test_momenta_of_a_group_added_later() -> None:
    """A group of a fused SGD whose first step is skipped has the bits of a run without that step."""

    def run(bad: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Perceptron()
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.05, momentum=0.9, fused=True)
        clipper = Clipper(model, SkipNonFinite(), optimizers=[optimizer])
        for number in range(5):
            if number == 2:
                optimizer.add_param_group({"params": [*model.second.parameters()]})
            inputs = batch()
            if number == 2 and not bad:
                continue
            model.zero_grad()
            model(inputs).square().mean().backward()
            if number == 2:
                spoil(model.second.weight)
            clipper()
            optimizer.step()
        return weights(model)

    assert same(run(True), run(False))


# The gradients


@pytest.fixture(params=["clip", "Clipper"])
def skips(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401 - a fixture that yields
    """Yield what makes a model skip steps, and is called before each of them."""
    exporters = []

    def make(model: torch.nn.Module) -> Skips:
        if request.param == "Clipper":
            return Clipper(model, SkipNonFinite())
        exporters.append(start(model, clip=SkipNonFinite()))
        return lambda: None

    yield make
    for exporter in exporters:
        exporter.close()
        assert errors(exporter) == {}


@pytest.mark.parametrize("closure", [False, True])
def test_gradients_in_a_buffer_stay_there(skips: Callable[[torch.nn.Module], Skips], closure: bool) -> None:
    """Gradients that are views of one buffer are the same after a skipped step, so later ones are written there."""
    torch.manual_seed(0)
    model = Perceptron()
    parameters = [*model.parameters()]
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    views = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    optimizer, before_step = torch.optim.AdamW(parameters, lr=0.01), skips(model)
    for number in range(5):

        def evaluate(number: int = number) -> None:
            flat.zero_()
            model(batch()).square().mean().backward()
            if number in (1, 2):
                spoil(model.first.weight)
            before_step()

        before = weights(model)
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        assert same(before, weights(model)) is (number in (1, 2))
        assert all(parameter.grad is view for parameter, view in zip(parameters, views, strict=True))


def test_gradients_removed_within_the_step(skips: Callable[[torch.nn.Module], Skips]) -> None:
    """A loop whose gradients are set to None by a hook of the optimizer takes the steps after a skipped one."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda its, _arguments, _named: its.zero_grad())
    before_step = skips(model)
    for number in range(4):
        model(batch()).square().mean().backward()
        if number == 1:
            spoil(model.first.weight)
        before_step()
        before = weights(model)
        optimizer.step()
        assert same(before, weights(model)) is (number == 1)


def test_a_clipper_leaves_no_hook() -> None:
    """What puts gradients back is set at the first skipped step, and removed by `close()` and with the clipper."""
    hooks = global_step_hooks()
    model = Perceptron()

    def skip(clipper: Clipper) -> None:
        model.zero_grad()
        model(batch()).square().mean().backward()
        spoil(model.first.weight)
        clipper()

    clipper = Clipper(model, SkipNonFinite())
    assert global_step_hooks() == hooks
    for _ in range(2):
        skip(clipper)
        skip(clipper)
        assert len(global_step_hooks()) == len(hooks) + 1
        clipper.close()
        assert global_step_hooks() == hooks
    skip(clipper)
    del clipper
    assert global_step_hooks() == hooks


def test_parameters_that_are_not_watched() -> None:
    """A step that `clip=` skips is not taken for the other parameters of the optimizer either, such as a criterion's."""
    torch.manual_seed(0)
    model, weight = Perceptron(), torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), weight], lr=0.01)
    with start(model, clip=SkipNonFinite()) as exporter:
        for number in range(4):
            optimizer.zero_grad()
            (model(batch()).square().mean() * weight * (math.nan if number == 1 else 1.0)).backward()
            before = [*weights(model), weight.detach().clone()]
            optimizer.step()
            assert same(before, [*weights(model), weight.detach()]) is (number == 1)
        assert errors(exporter) == {}


# What counts


def test_losses_of_steps_that_a_scaler_skips() -> None:
    """A step that the scaler skips is not one that `SkipAbove` skips by the loss."""
    torch.manual_seed(0)
    model, policy = Perceptron(), SkipAbove(9.0, on="loss")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with start(model, clip=policy) as exporter:
        for number in range(5):
            optimizer.zero_grad()
            loss = model(batch()).square().mean() * (math.nan if number in (1, 2) else 1.0)
            scaler.scale(loss).backward()
            exporter.observe(loss=10.0 if number == 4 else loss)
            before = weights(model)
            scaler.step(optimizer)
            scaler.update()
            assert same(before, weights(model)) is (number in (1, 2, 4))
        assert errors(exporter) == {}
    assert value(exporter, "torch_grad_clip_policy_steps_total", policy="SkipAbove(9.0, on='loss')") == 1
