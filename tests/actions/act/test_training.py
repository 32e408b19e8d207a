"""Actions on real trainings: a run that stops itself, learning rates with their schedulers, and a run that nothing changes."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.actions.freeze.test_freeze import Run, model, start, step
from tests.support.acting import World, due
from tests.support.scrape import errors, value
from tests.support.tools import PATIENCE, eventually, lasting_threads
from tests.support.torch_hooks import global_step_hooks
from torch_grad_exporter import Exporter
from torch_grad_exporter.actions import Event, ScaleLearningRate, Stop
from torch_grad_exporter.actions.act.learning_rates import scale, schedulers_of

NORM = "torch_grad_global_norm"


@pytest.fixture(name="run")
def _run() -> Iterator[Run]:
    run = Run(model())
    with run.exporter:
        yield run


def threads() -> set[str]:
    """Return the names of the threads that act."""
    return {name for name in lasting_threads() if name.removeprefix("torch-grad-exporter-") in ("act", "action")}


@pytest.mark.slow
def test_an_exploding_gradient_stops_the_run() -> None:
    """A gradient that grows to a million times its usual norm raises GradientExploding, and `should_stop` turns true."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)

    def step(size: float) -> None:
        optimizer.zero_grad()
        (net(torch.ones(3, 4)).square().mean() * size).backward()
        optimizer.step()

    with start(net, every=1) as exporter:
        exporter.on("GradientExploding", Stop())
        for _ in range(200):
            step(1.0)
        assert not exporter.should_stop
        explosions = iter(range(10**9))
        assert eventually(lambda: step(1e6 * 1.5 ** min(next(explosions), 100)) or exporter.should_stop)
        assert value(exporter, "torch_grad_exporter_actions_total", action="Stop", result="done") == 1
        assert "action" not in errors(exporter)


@pytest.mark.parametrize("reported", [False, True], ids=["torch's optimizer", "a reported step"])
def test_should_stop_changes_at_the_end_of_a_step(run: Run, reported: bool) -> None:
    """`should_stop` stays false until the step after the event is over, and stays true after the end."""
    run.step()
    due(run.exporter, Stop())
    run.net(torch.ones(3, 4)).sum().backward()
    assert not run.exporter.should_stop
    (run.exporter if reported else run.optimizer).step()
    assert run.exporter.should_stop
    run.exporter.close()
    assert run.exporter.should_stop


@pytest.mark.slow
def test_actions_run_in_the_background(run: Run) -> None:
    """A callable gets its event in a thread of its own, while the training goes on."""
    events: list[tuple[str, Event]] = []
    run.exporter.on(lambda m: m.last(NORM) > 0, lambda event: events.append((threading.current_thread().name, event)))
    assert eventually(lambda: run.step() or bool(events))
    (thread, event) = events[0]
    assert thread == "torch-grad-exporter-action"
    assert event.step >= 1
    assert event.values[f"last({NORM})"] > 0


def test_no_thread_and_no_hook_without_actions() -> None:
    """Before the first `on` and after the end there is no thread, and the hook on steps exists only while an action needs it."""
    net = model()
    before = global_step_hooks()
    with start(net) as exporter:
        hooks = global_step_hooks()
        assert threads() == set()
        handle = exporter.on(lambda m: False, Stop())
        assert threads() == {"torch-grad-exporter-act"}
        assert len(global_step_hooks()) == len(hooks) + 1
        handle.remove()
        assert global_step_hooks() == hooks
        exporter.on(lambda m: False, Stop())
    assert threads() == set()
    assert global_step_hooks() == before


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_is_not_stopped(run: Run) -> None:
    """A due action runs in the parent after its next step; the child's steps run nothing, and it takes no new action."""
    run.step()
    due(run.exporter, Stop())
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            run.optimizer.step()
            try:
                run.exporter.on("LossSpike", Stop())
            except RuntimeError:
                status = 2 if run.exporter.should_stop else 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not run.exporter.should_stop
    run.step()
    assert run.exporter.should_stop


@pytest.mark.slow
def test_hanging_user_code_does_not_delay_the_end() -> None:
    """The `with` block ends while a condition and an action hang."""
    net = model()
    hang, going = threading.Event(), [threading.Event(), threading.Event()]

    def hanging(number: int) -> bool:
        going[number].set()
        return hang.wait(PATIENCE)

    with start(net) as exporter:
        exporter.on(lambda m: True, lambda event: hanging(0))
        assert going[0].wait(PATIENCE)
        exporter.on(lambda m: hanging(1), Stop())
        assert going[1].wait(PATIENCE)
    hang.set()
    assert eventually(lambda: threads() == set())


def test_a_closed_exporter_frees_user_functions() -> None:
    """A closed exporter that is kept holds neither conditions nor actions, and `should_stop` can still be read."""

    class Function:
        def __call__(self, m: object) -> bool:
            return False

    condition, action = Function(), Function()
    references = [weakref.ref(condition), weakref.ref(action)]
    net = model()
    with start(net) as exporter:
        exporter.on(condition, action)
        exporter.on(condition, Stop())
    del condition, action
    assert eventually(lambda: bool(gc.collect()) or [reference() for reference in references] == [None, None])
    assert not exporter.should_stop
    with pytest.raises(RuntimeError, match="closed"):
        exporter.on("LossSpike", Stop())


@pytest.mark.slow
def test_conditions_may_take_a_twentieth_of_the_time() -> None:
    """A condition that takes 0.1 s is evaluated again after 2 s, not after the usual one."""
    begun: list[float] = []

    def slow(m: object) -> bool:
        begun.append(time.monotonic())
        time.sleep(0.1)
        return False

    with start(model()) as exporter:
        exporter.on(slow, Stop())
        assert eventually(lambda: len(begun) >= 2)
    assert begun[1] - begun[0] >= 2.0


def parameters(ask: Callable[[Exporter], object]) -> list[torch.Tensor]:
    """Return the parameters after a seeded run of 40 steps."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 40)
    with start(net, every=2) as exporter:
        ask(exporter)
        for _ in range(40):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        assert "action" not in errors(exporter)
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.slow
def test_a_condition_that_never_holds_changes_nothing() -> None:
    """With built-in actions whose conditions never hold, parameters after 40 steps are the same bits as without."""

    def ask(exporter: Exporter) -> None:
        for action in (Stop(), ScaleLearningRate(0.5), lambda event: None):
            exporter.on(lambda m: m.mean(NORM, samples=2) > 1e9, action)

    assert all(map(torch.equal, parameters(lambda exporter: None), parameters(ask)))


# Learning rates

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.01),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7, eta_min=0.01),
    "averaged weights": lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=10),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
    "in a row": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)], [5]
    ),
    "together": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.5, 0.1], total_steps=20, final_div_factor=10),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, [0.1, 0.02], [0.5, 0.1], step_size_up=4),
}


CASES = [(name, False) for name in SCHEDULERS] + [(name, True) for name in ("none", "cosine", "in a row", "one cycle")]


def rates(scheduler: str, *, half_from: int | None, tensor: bool) -> list[list[float]]:
    """Return the learning rates of two groups before each of 20 steps, halved at the end of a step."""
    net, world = model(), World()
    lr: Any = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=lr)
    made = SCHEDULERS[scheduler](optimizer)
    world.optimizers = [optimizer]
    world.on(lambda m: True, ScaleLearningRate(0.5))
    history = []
    for number in range(20):
        history.append([float(group["lr"]) for group in optimizer.param_groups])
        if number == half_from:
            world.evaluate(0.0)
        step(net, optimizer)
        if isinstance(made, lr_scheduler.ReduceLROnPlateau):
            made.step(1.0)
        elif made is not None:
            made.step()
    world.act.close()
    assert world.errors.counts()["action"] == 0
    return history


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "tensor"), CASES, ids=[f"{name}{', a tensor' * tensor}" for name, tensor in CASES])
def test_learning_rates_are_halved(scheduler: str, tensor: bool) -> None:
    """After the action each learning rate of each later step is half of that of the same run without it."""
    usual, halved = rates(scheduler, half_from=None, tensor=tensor), rates(scheduler, half_from=7, tensor=tensor)
    assert halved[:8] == usual[:8]
    for found, expected in zip(halved[8:], usual[8:], strict=True):
        assert found == pytest.approx([one / 2 for one in expected], rel=1e-9)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_learning_rates_stay_above_the_least(tensor: bool) -> None:
    """Rates are halved down to 0.02, lower ones stay, and a tensor stays the same tensor."""
    before: list[Any] = [0.1, 0.03, 0.02, 0.01, 0.0]
    rates = [torch.tensor(one, dtype=torch.float64) for one in before] if tensor else before
    rates = [*rates, rates[0]]  # groups may share a tensor
    net = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in rates)
    optimizer = torch.optim.SGD([{"params": one.parameters(), "lr": lr} for one, lr in zip(net, rates, strict=True)])
    world = World()
    world.optimizers = [optimizer]
    world.on(lambda m: True, ScaleLearningRate(0.5, min_lr=0.02))
    world.evaluate(0.0)
    optimizer.step()
    world.act.close()
    now = [group["lr"] for group in optimizer.param_groups]
    assert [float(one) for one in now] == pytest.approx([0.05, 0.02, 0.02, 0.01, 0.0, 0.05], rel=1e-12)
    assert not tensor or all(one is lr for one, lr in zip(now, rates, strict=True))


def test_all_optimizers_of_the_model_are_scaled() -> None:
    """Both optimizers of the model are scaled at the end of its step, and the optimizer of another model is not."""
    net, other = model(), torch.nn.Linear(2, 2)
    first, second = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.AdamW(net[2].parameters(), lr=0.2)
    foreign = torch.optim.SGD(other.parameters(), lr=0.4)
    with start(net) as exporter:
        for _ in range(2):
            step(net, first)
            second.step()
        due(exporter, ScaleLearningRate(2))
        step(torch.nn.Sequential(torch.nn.Linear(4, 2), other), foreign)
        assert first.param_groups[0]["lr"] == 0.1  # a step of another model's optimizer does not count
        step(net, first)
    assert [optimizer.param_groups[0]["lr"] for optimizer in (first, second, foreign)] == [0.2, 0.4, 0.4]


def test_tensors_on_a_device_are_never_read() -> None:
    """A learning rate on `meta`, where reading raises, is scaled with the base of its scheduler."""
    net = torch.nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    (group,) = optimizer.param_groups
    group["lr"] = kept = torch.tensor(0.1, device="meta")
    group["initial_lr"], made.base_lrs = kept, [kept]
    scale([optimizer], schedulers_of([optimizer]), 0.5, 0.01)
    assert group["lr"] is kept
    (base,) = made.base_lrs
    assert base is not kept
    assert base.device.type == group["initial_lr"].device.type == "meta"


def test_steps_within_the_backward_end_with_it() -> None:
    """Where hooks call optimizers in the backward, the action runs when the backward is over."""
    net = model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in net.parameters()}
    within = []

    def now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        within.append(exporter.should_stop)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(now)
    with start(net) as exporter:
        due(exporter, Stop())
        net(torch.ones(3, 4)).sum().backward()
        assert exporter.should_stop
        assert within == [False] * 6
        assert "action" not in errors(exporter)


def test_a_step_ends_with_the_outermost_optimizer() -> None:
    """The action runs after the outer step, where `step` calls `super().step()` or another optimizer."""
    net = model()
    within: list[bool] = []

    class Calling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ANN401 - as torch has it
            super().step(closure)
            within.append(exporter.should_stop)

    class Wrapping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ANN401 - as torch has it
            inner.step(closure)
            within.append(exporter.should_stop)

    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for optimizer in (Calling(net.parameters(), lr=0.1), Wrapping([torch.zeros(1, requires_grad=True)], lr=0.1)):
        with start(net) as exporter:
            due(exporter, Stop())
            step(net, optimizer)
            assert exporter.should_stop
    assert within == [False, False]
