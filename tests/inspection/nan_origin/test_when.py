"""When the origin of a NaN is searched, what is reported of repeated causes, and what is not reported."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.inspection.nan_origin.causes import NAN, Function, around
from tests.inspection.nan_origin.test_planted import Place, found
from tests.inspection.support import EachOperation
from tests.support.scrape import OFF, errors
from tests.support.torch_hooks import module_hooks
from torch_grad_exporter import Exporter, start_exporter

Step = Callable[[Exporter, nn.Module, torch.optim.Optimizer, int], object]


def loop(model: nn.Module, step: Step, steps: int, **options: object) -> dict[Place, float]:
    """Return the origins after this many calls of `step`, each followed by a scrape."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with start_exporter(model, None, collectors=OFF, **{"every": 1, "nan_origin": True, **options}) as exporter:
        for number in range(steps):
            step(exporter, model, optimizer, number)
            exporter.collect()
        assert not errors(exporter)
        return found(exporter)


def ordinary(
    exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor | None = None
) -> None:
    """Take a step."""
    model(torch.randn(4, 8) if data is None else data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_repeated_cause_in_skipped_steps() -> None:
    """If the loop skips each loss that is not finite, the forward alone names the batch."""

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        data = torch.randn(4, 8)
        if number >= 3:
            data[0] = NAN
        loss = model(data).square().mean()
        exporter.observe(loss=loss)
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    assert list(loop(around(), step, 30)) == [("batch", "batch", "nan")]


def test_a_parameter_that_was_nan_before_the_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """An alarm after a step on NaN names the weights and since when their gradients are not finite."""

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 3:
            with torch.no_grad():
                model[0].weight[0, 0] = NAN
        ordinary(exporter, model, optimizer, number)

    origins = loop(nn.Sequential(nn.Linear(8, 1)), step, 8)
    assert list(origins) == [("0", "parameter", "nan")]
    said = [line.getMessage() for line in caplog.records if "nan_origin:" in line.getMessage()]
    assert len(said) == 1
    assert "parameter 0.weight was NaN before the forward; non-finite since" in said[0]
    assert "step 4" in said[0]


def test_consequences_are_not_another_origin() -> None:
    """A batch that makes all parameters NaN stays the only origin."""

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        ordinary(exporter, model, optimizer, number, torch.full((4, 8), NAN) if number == 3 else None)

    assert loop(around(), step, 9, nan_origin="always") == {("batch", "batch", "nan"): 3.0}


def test_an_overflow_that_a_scaler_skips(caplog: pytest.LogCaptureFixture) -> None:
    """An overflow under a gradient scaler is logged as routine, below the level of warnings."""
    caplog.set_level(logging.INFO)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**70)

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    origins = loop(around(Function(lambda x: x * 1e-20 * 1e20)), step, 2, nan_origin="always", grad_scaler=scaler)
    assert [(stage, kind) for _, stage, kind in origins] == [("backward", "inf")]
    said = [line for line in caplog.records if "nan_origin:" in line.getMessage()]
    assert [line.levelno for line in said] == [logging.INFO]
    assert "a gradient scaler skips such a step" in said[0].getMessage()


class Stages(nn.Module):
    """A model that is called once for each of two stages, in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(8, 8).half()

    def forward(self, x: torch.Tensor, stage: int) -> torch.Tensor:
        return self.enc(x) if stage == 1 else x * 1.0


@pytest.mark.parametrize("aux_first", [True, False])
@pytest.mark.parametrize("aux", [torch.sum, lambda hidden: hidden.view(-1).sum()], ids=["sum", "moved"])
def test_a_sum_of_parts_of_the_model_and_the_loss(aux: Callable[[torch.Tensor], torch.Tensor], *, aux_first: bool) -> None:
    """Where a gradient overflows as the sum of finite parts of the loss and of the model, the loss is not blamed."""

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        hidden = model(torch.ones(2, 8).half(), 1)
        before = aux(hidden) if aux_first else None
        output = model(hidden, 2)
        part = aux(hidden) if before is None else before
        (part.float() * 4e4 + output.sum().float() * 4e4).backward()

    assert list(loop(Stages(), step, 1, nan_origin="always")) == [("unknown", "unknown", "inf")]


def test_nan_that_a_hook_replaces_has_no_origin() -> None:
    """A NaN that no parameter gets has no origin."""
    model = around(Function(lambda x: (x * 0).sqrt()))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
    assert loop(model, ordinary, 4, nan_origin="always") == {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where it compiles below a module
def test_the_inside_of_a_compiled_module(caplog: pytest.LogCaptureFixture) -> None:
    """A compiled module is named, and the log says that its inside is not seen."""
    inner = torch.compile(nn.Sequential(nn.Linear(8, 8), Function(lambda x: (x * 0).log())), backend="aot_eager")
    origins = loop(nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 1)), ordinary, 1, nan_origin="always")
    assert [(layer, stage) for layer, stage, _ in origins] == [("1", "forward")]
    assert any("it is compiled, so its inside is not seen" in line.getMessage() for line in caplog.records)


@pytest.mark.slow
def test_without_an_alarm_nothing_is_inspected() -> None:
    """Without an alarm modules have no hooks, and a round runs no more operations than without the option."""
    model = around()
    hooks: list[int] = []
    model[1].register_forward_pre_hook(lambda module, _args: hooks.append(len(module_hooks(module))))
    counts = []
    for option in (False, True):
        operations: list[str] = []
        with EachOperation(operations.append):
            assert loop(model, ordinary, 40, nan_origin=option) == {}
        counts.append(operations)
    assert set(hooks) == {1}
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_an_alarm_arms_a_bounded_number_of_rounds() -> None:
    """After an alarm modules have hooks in some rounds, and then in none until the next alarm."""
    hooks: list[int] = []

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        exporter.observe(loss=NAN if number == 5 else 1.0)
        ordinary(exporter, model, optimizer, number)

    model = around()
    model[0].register_forward_hook(lambda module, *_: hooks.append(len(module_hooks(module))))
    loop(model, step, 60)
    assert set(hooks[:5]) == {1}
    assert max(hooks) > 1
    assert set(hooks[-20:]) == {1}


def test_a_model_can_be_freed_after_a_round() -> None:
    """Neither a forward without a backward nor a finished round keeps a parameter alive."""
    model = around()
    with start_exporter(model, None, every=1, collectors=OFF, nan_origin="always"):
        model(torch.randn(4, 8)).sum().backward()
        output = model(torch.randn(4, 8))
        kept = weakref.ref(model[0].weight)
        del model, output
        gc.collect()
        assert kept() is None


def test_an_alarm_ends_the_counting() -> None:
    """Rounds that were only counted are followed from the alarm on, so that the origin is named within a few steps of it."""
    chance = torch.Generator().manual_seed(5)
    model = around()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with start_exporter(model, None, every=4000, collectors=OFF, nan_origin=True) as exporter:
        for number in range(400):
            exporter.observe(loss=1.0)
            ordinary(exporter, model, optimizer, number, torch.randn(4, 8, generator=chance))
        exporter.observe(loss=NAN)
        exporter.collect()  # which the worker takes in first
        ordinary(exporter, model, optimizer, 400, torch.randn(4, 8))  # the last round that is only counted
        ordinary(exporter, model, optimizer, 401, torch.full((4, 8), NAN))
        exporter.collect()
        assert list(found(exporter)) == [("batch", "batch", "nan")]
