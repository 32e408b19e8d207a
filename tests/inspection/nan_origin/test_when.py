"""When rounds are looked at, what is told of repeated causes, and what is not told."""

from __future__ import annotations

import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.inspection.nan_origin.causes import INF, NAN, Function, around
from tests.inspection.nan_origin.test_planted import Place, found
from tests.matrix.harness import OTHERS
from tests.support.scrape import errors
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.inspection.nan_origin.watch import FORWARDS, ROUNDS, NanOrigin

Step = Callable[[Exporter, nn.Module, torch.optim.Optimizer, int], object]


def loop(model: nn.Module, step: Step, steps: int, **options: object) -> dict[Place, float]:
    """What was found in so many calls of `step`, after each of which the worker has taken in what there is."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with start_exporter(model, None, collectors=OTHERS, **{"every": 1, "nan_origin": True, **options}) as exporter:
        for number in range(steps):
            step(exporter, model, optimizer, number)
            exporter._host.drain()
        assert not errors(exporter)
        return found(exporter)


def ordinary(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step."""
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def observer(exporter: Exporter) -> NanOrigin:
    """The inspection of an exporter."""
    inspection = exporter._training.nan_origin
    assert inspection is not None
    return inspection


def test_a_cause_that_repeats_while_steps_are_skipped_is_found() -> None:
    """The loop skips each loss that is not finite, so no backward comes: the forward alone names the batch."""

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


def test_a_cause_that_repeats_while_gradients_are_skipped_is_found() -> None:
    """From step 3 on the backward of a module overflows; steps on such gradients are skipped."""

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 3:
            model[3].function = lambda x: (x * 0).sqrt()
        model(torch.randn(4, 8)).square().mean().backward()
        if all(bool(torch.isfinite(one.grad).all()) for one in model.parameters() if one.grad is not None):
            optimizer.step()
        optimizer.zero_grad()

    origins = loop(around(Function(lambda x: x * 1)), step, 12)
    assert [(layer, stage) for layer, stage, _ in origins] == [("3", "backward")]


def test_a_parameter_that_was_poisoned_before_anybody_looked_is_told_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    """A step on NaN was taken at step 3: the alarm finds the weights, and says since when their gradients are not finite."""

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


def test_what_follows_from_an_origin_is_not_told_as_another() -> None:
    """One batch poisons all parameters; they are NaN ever after, and the batch stays the only origin."""

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        data = torch.full((4, 8), NAN) if number == 3 else torch.randn(4, 8)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert loop(around(), step, 9, nan_origin="always") == {("batch", "batch", "nan"): 3.0}


def test_an_overflow_that_a_gradient_scaler_skips_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A scale of 2^70 overflows in the backward: the module is told as routine, in a line below the level of warnings."""
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


def test_a_hook_that_replaces_nan_in_gradients_leaves_nothing_to_tell() -> None:
    """The backward of a module gives NaN, and no parameter gets it."""
    model = around(Function(lambda x: (x * 0).sqrt()))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
    assert loop(model, ordinary, 4, nan_origin="always") == {}


def test_gradients_that_are_never_cleared_tell_no_origin_twice() -> None:
    """A NaN stays in `.grad` for ever; the batches after it are right."""

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        data = torch.full((4, 8), NAN) if number == 2 else torch.randn(4, 8)
        model(data).square().mean().backward()

    assert list(loop(around(), step, 6, nan_origin="always")) == [("batch", "batch", "nan")]


def test_a_loss_of_a_part_of_the_model_is_attributed_to_it() -> None:
    """An auxiliary loss that no output leads to has its root at zero."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.body(x)
            self.aside = (self.gate(hidden) * 0).sqrt().mean()
            return self.last(hidden)

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        (model(torch.randn(4, 8)).square().mean() + model.aside).backward()  # type: ignore[operator]

    assert [(layer, stage) for layer, stage, _ in loop(Model(), step, 1, nan_origin="always")] == [("Model", "backward")]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where it compiles below a module
def test_the_inside_of_a_compiled_module_is_not_guessed(caplog: pytest.LogCaptureFixture) -> None:
    """The compiled module is named, and that its inside is not seen."""
    inner = torch.compile(nn.Sequential(nn.Linear(8, 8), Function(lambda x: (x * 0).log())), backend="aot_eager")
    origins = loop(nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 1)), ordinary, 1, nan_origin="always")
    assert [(layer, stage) for layer, stage, _ in origins] == [("1", "forward")]
    assert any("it is compiled, so its inside is not seen" in line.getMessage() for line in caplog.records)


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable says the same as the argument."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_NAN_ORIGIN", "always")
    with start_exporter(around(), None, every=1, collectors=OTHERS) as exporter:
        assert observer(exporter)._always


# What it costs while all is well


def test_without_an_alarm_no_module_is_hooked_and_no_tensor_is_flagged() -> None:
    """In 40 sampled rounds the inner modules have no hooks, and nothing is recorded."""
    model = around()
    seen: list[tuple[int, bool]] = []
    model[1].register_forward_pre_hook(lambda module, _args: seen.append((len(module._forward_pre_hooks), True)))

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        ordinary(exporter, model, optimizer, number)
        assert observer(exporter)._recording is None

    assert loop(model, step, 40) == {}
    assert seen == [(1, True)] * 40


def test_without_an_alarm_a_round_costs_a_few_calls() -> None:
    """The inspection itself runs three functions of a few lines in each round, whatever the size of the model."""
    lines: list[str] = []

    def trace(frame: types.FrameType, event: str, _argument: object) -> object:
        if "torch_grad_exporter/inspection/nan_origin/" in frame.f_code.co_filename:
            lines.append(f"{frame.f_code.co_name} {event}")
            return trace
        return None

    def step(exporter: Exporter, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number < 3:
            return ordinary(exporter, model, optimizer, number)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            ordinary(exporter, model, optimizer, number)
        finally:
            sys.settrace(before)
        return None

    loop(around(*(nn.Linear(8, 8) for _ in range(50))), step, 4)
    assert {line.split()[0] for line in lines} <= {
        "forward_began",
        "backward_ended",
        "step_over",
        "round_over",
        "__init__",
    }
    assert sum(line.endswith(" line") for line in lines) <= 12


def test_an_alarm_arms_a_bounded_number_of_rounds() -> None:
    """After the alarm some rounds are recorded, and then none until the next one."""
    model, recorded = around(), list[int]()
    with start_exporter(model, None, every=1, collectors=OTHERS, nan_origin=True) as exporter:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        inspection = observer(exporter)
        model[0].register_forward_hook(lambda *_: recorded.append(inspection._recording is not None))
        inspection.arm()
        for number in range(20):
            ordinary(exporter, model, optimizer, number)
    assert sum(recorded) == ROUNDS < FORWARDS
    assert recorded[ROUNDS:] == [False] * (20 - ROUNDS)


@pytest.fixture
def armed() -> Iterator[tuple[Exporter, nn.Module]]:
    """An exporter that looks in each round, and its model."""
    model = around()
    with start_exporter(model, None, every=1, collectors=OTHERS, nan_origin="always") as exporter:
        yield exporter, model


def test_a_model_can_be_freed_after_an_armed_round() -> None:
    """Neither a forward without a backward nor a finished round keeps a module or a parameter alive."""
    model = around()
    with start_exporter(model, None, every=1, collectors=OTHERS, nan_origin="always"):
        model(torch.randn(4, 8)).sum().backward()
        output = model(torch.randn(4, 8))
        kept = weakref.ref(model[0].weight)
        del model, output
        gc.collect()
        assert kept() is None


def test_a_graph_that_is_kept_is_not_recorded_again(armed: tuple[Exporter, nn.Module]) -> None:
    """A second backward through the same graph runs as without the exporter."""
    exporter, model = armed
    loss = model(torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    first = model[0].weight.grad.clone()
    loss.backward()
    assert torch.equal(model[0].weight.grad, 2 * first)
    assert not errors(exporter)


def test_infinite_values_that_do_not_reach_the_loss_are_not_told(armed: tuple[Exporter, nn.Module]) -> None:
    """A branch that is thrown away gives Inf and NaN."""
    exporter, model = armed
    model[3].register_forward_hook(lambda _module, _args, output: (output * INF, output)[1])
    model[4].register_forward_hook(lambda _module, _args, output: torch.where(output > -INF, output, output.detach() / 0))
    ordinary(exporter, model, torch.optim.SGD(model.parameters(), 1e-3), 0)
    exporter._host.drain()
    assert found(exporter) == {}
