"""Acting on real trainings: a run that stops itself, learning rates and their schedulers, and a run that nothing changes."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.swa_utils import SWALR

from tests.support.scrape import errors, value
from tests.support.tools import FOREVER, PATIENCE, eventually, lasting_threads
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Event, Log, ScaleLearningRate, Stop
from torch_grad_exporter.actions.act import act
from torch_grad_exporter.actions.act.between_steps import BetweenSteps, Training
from torch_grad_exporter.actions.act.schedulers import scale, schedulers_of
from torch_grad_exporter.actions.act.steps import HOOK_SECONDS

NORM = "torch_grad_global_norm"


def model() -> torch.nn.Sequential:
    """A small one, seeded."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, size: float = 1.0) -> None:
    """A step on a loss of this size."""
    optimizer.zero_grad()
    (net(torch.ones(3, 4)).square().mean() * size).backward()
    optimizer.step()


def until(condition: Callable[[], bool], again: Callable[[], object]) -> bool:
    """Trains until something has happened."""

    def once() -> bool:
        again()
        return condition()

    return eventually(once)


def threads() -> set[str]:
    """The threads that act."""
    return {name for name in lasting_threads() if name.removeprefix("torch-grad-exporter-") in ("act", "action")}


def test_an_exploding_gradient_stops_the_run() -> None:
    """A layer's gradient that grows to a million times its usual norm is GradientExploding, and `should_stop` turns true."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    with start_exporter(net, port=None, every=1) as exporter:
        exporter.on("GradientExploding", Stop())
        for _ in range(200):
            step(net, optimizer)
        assert not exporter.should_stop
        explosions = iter(range(10**9))
        assert until(lambda: exporter.should_stop, lambda: step(net, optimizer, 1e6 * 1.5 ** min(next(explosions), 100)))
        assert value(exporter, "torch_grad_exporter_actions_total", action="Stop", result="done") == 1
        assert "action" not in errors(exporter)


def test_it_turns_true_only_at_the_end_of_a_step() -> None:
    """The condition holds, as an action after it shows, and `should_stop` is false until the next step is over."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    armed, seen = threading.Event(), threading.Event()
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: armed.is_set(), Stop())
        exporter.on(lambda m: armed.is_set(), lambda event: seen.set())
        step(net, optimizer)
        armed.set()
        assert seen.wait(PATIENCE)
        assert not exporter.should_stop
        step(net, optimizer)
        assert exporter.should_stop
    assert exporter.should_stop


def test_actions_run_in_the_background() -> None:
    """A callable gets its event in a thread of its own, while the training goes on."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    events: list[tuple[str, Event]] = []
    with start_exporter(net, port=None, every=1) as exporter:
        exporter.on(lambda m: m.last(NORM) > 0, lambda event: events.append((threading.current_thread().name, event)))
        assert until(lambda: bool(events), lambda: step(net, optimizer))
        (thread, event) = events[0]
        assert thread == "torch-grad-exporter-action"
        assert event.step >= 1
        assert event.values[f"last({NORM})"] == pytest.approx(value(exporter, NORM))


def test_there_is_no_thread_and_no_hook_without_it() -> None:
    """Neither before the first `on` nor after the end; the hook on steps is there only while an action needs it."""
    net = model()
    before = set(_global_optimizer_post_hooks)
    with start_exporter(net, port=None) as exporter:
        hooks = set(_global_optimizer_post_hooks)
        assert threads() == set()
        handle = exporter.on(lambda m: False, Stop())
        assert threads() == {"torch-grad-exporter-act"}
        assert len(_global_optimizer_post_hooks) == len(hooks) + 1
        handle.remove()
        assert set(_global_optimizer_post_hooks) == hooks
        exporter.on(lambda m: False, Stop())
    assert threads() == set()
    assert set(_global_optimizer_post_hooks) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_is_not_stopped() -> None:
    """What is due happens in the parent, after its next step; the child's steps run nothing, and it takes no new action."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, Stop())
        step(net, optimizer)
        exporter._act._steps.ask(exporter._act._steps.slots[0])
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                optimizer.step()
                try:
                    exporter.on("LossSpike", Stop())
                except RuntimeError:
                    status = 2 if exporter.should_stop else 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not exporter.should_stop
        step(net, optimizer)
        assert exporter.should_stop


def test_a_closed_exporter_takes_none() -> None:
    """`on` raises."""
    net = model()
    with start_exporter(net, port=None) as exporter:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        exporter.on("LossSpike", Stop())


def test_a_hanging_condition_and_a_hanging_action_do_not_hold_up_the_end() -> None:
    """The end of the `with` comes while both hang."""
    net = model()
    hang, going = threading.Event(), [threading.Event(), threading.Event()]

    def hanging(number: int) -> bool:
        going[number].set()
        return hang.wait(PATIENCE)

    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: True, lambda event: hanging(0))
        assert going[0].wait(PATIENCE)
        exporter.on(lambda m: hanging(1), Stop())
        assert going[1].wait(PATIENCE)
    hang.set()
    assert eventually(lambda: threads() == set())


def test_the_exporter_is_freed_after_its_end() -> None:
    """Nothing keeps it, neither the hook nor the handle's removal."""
    net = model()
    exporter = start_exporter(net, port=None)
    exporter.on(lambda m: False, Stop())
    exporter.close()
    reference = weakref.ref(exporter)
    del exporter

    def freed() -> bool:
        gc.collect()
        return reference() is None

    assert eventually(freed)


def test_a_closed_exporter_keeps_no_function_of_the_user() -> None:
    """They hold his models, and he may keep the exporter: `should_stop` can still be asked."""

    class Function:
        def __call__(self, m: object) -> bool:
            return False

    condition, action = Function(), Function()
    references = [weakref.ref(condition), weakref.ref(action)]
    net = model()
    with start_exporter(net, port=None) as exporter:
        exporter.on(condition, action)
        exporter.on(condition, Stop())
    del condition, action
    assert eventually(lambda: bool(gc.collect()) or [one() for one in references] == [None, None])
    assert not exporter.should_stop


def test_notify_and_actions_judge_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both on, Notify's thread judges for the actions as well: theirs never scrapes."""
    monkeypatch.setattr(act, "FED_SECONDS", FOREVER)  # as on a machine on which a scrape takes no time
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with start_exporter(net, port=None, every=1, alerts=[Log()]) as exporter:
        latest = exporter._view.live._latest
        scraping: list[str] = []
        real = latest._scrape

        def scrape() -> Any:  # noqa: ANN401 - as the real one
            scraping.append(threading.current_thread().name)
            return real()

        latest._scrape = scrape
        asked: list[float] = []
        exporter.on(lambda m: asked.append(m.last(NORM)) or False, print)
        assert until(lambda: len(asked) >= 3, lambda: step(net, optimizer))
        assert "torch-grad-exporter-act" not in scraping
        assert scraping.count("torch-grad-exporter-notify") >= 2


def parameters(options: Callable[[Exporter], object] | None) -> list[torch.Tensor]:
    """What a seeded run of 100 steps ends with."""
    torch.manual_seed(1)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100)
    with start_exporter(net, port=None, every=2) as exporter:
        if options is not None:
            options(exporter)
        for _ in range(100):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        assert "action" not in errors(exporter)
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_a_condition_that_never_holds_changes_nothing() -> None:
    """Parameters after 100 steps are the same bits as without, with each built-in action."""

    def ask(exporter: Exporter) -> None:
        for action in (Stop(), ScaleLearningRate(0.5), lambda event: None):
            exporter.on(lambda m: m.mean(NORM, samples=2) > 1e9, action)

    assert all(map(torch.equal, parameters(None), parameters(ask)))


# Learning rates

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7),
    "cosine down to a least rate": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.01),
    "restarts from a least rate": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7, eta_min=0.01),
    "multiplied": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.95),
    "averaged weights": lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=10),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 40),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
    "in a row": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)],
        [5],
    ),
    "together": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def rates(scheduler: str, *, half_from: int | None, tensor: bool = False) -> list[list[float]]:
    """The learning rates of two groups before each of 20 steps, halved after a step."""
    net = model()
    lr: Any = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=lr)
    made = SCHEDULERS[scheduler](optimizer)
    found = []
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, ScaleLearningRate(0.5))
        (slot,) = exporter._act._steps.slots
        for number in range(20):
            found.append([float(group["lr"]) for group in optimizer.param_groups])
            if number == half_from:
                exporter._act._steps.ask(slot)  # as the thread that judges does
            step(net, optimizer)
            if isinstance(made, lr_scheduler.ReduceLROnPlateau):
                made.step(1.0)
            elif made is not None:
                made.step()
        assert "action" not in errors(exporter)
    return found


@pytest.mark.parametrize("tensor", [False, True], ids=["numbers", "a tensor"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learning_rates_are_halved_whatever_the_scheduler(scheduler: str, tensor: bool) -> None:
    """After the action each learning rate of each later step is half of what it is in the same run without it."""
    usual, halved = rates(scheduler, half_from=None, tensor=tensor), rates(scheduler, half_from=7, tensor=tensor)
    assert halved[:8] == usual[:8]
    for found, expected in zip(halved[8:], usual[8:], strict=True):
        assert found == pytest.approx([one / 2 for one in expected], rel=1e-9)


CYCLES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.5, 0.1], total_steps=20, final_div_factor=10),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, [0.1, 0.02], [0.5, 0.1], step_size_up=4),
}


@pytest.mark.parametrize("scheduler", CYCLES)
def test_learning_rates_that_go_in_cycles_are_halved(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, to the end of the cycle."""
    monkeypatch.setitem(SCHEDULERS, scheduler, CYCLES[scheduler])
    usual, halved = rates(scheduler, half_from=None), rates(scheduler, half_from=3)
    for found, expected in zip(halved[4:], usual[4:], strict=True):
        assert found == pytest.approx([one / 2 for one in expected], rel=1e-9)


def test_a_tensor_that_groups_share_is_scaled_once() -> None:
    """Three groups get the optimizer's one tensor: it is halved, not divided by eight."""
    net = model()
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in [*net.parameters()][:3]], lr=lr)
    assert len({id(group["lr"]) for group in optimizer.param_groups}) == 1
    scale([optimizer], schedulers_of([optimizer]), 0.5, 0.0)
    assert float(lr) == pytest.approx(0.05, rel=1e-12)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.05), (0.03, 0.02), (0.02, 0.02), (0.01, 0.01), (0.0, 0.0)])
def test_learning_rates_get_no_lower_than_the_least(before: float, after: float, tensor: bool) -> None:
    """Halved down to 0.02; what is below stays. A tensor stays the same tensor."""
    net = model()
    lr: Any = torch.tensor(before, dtype=torch.float64) if tensor else before
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, ScaleLearningRate(0.5, min_lr=0.02))
        exporter._act._steps.ask(exporter._act._steps.slots[0])
        step(net, optimizer)
        now = optimizer.param_groups[0]["lr"]
    assert float(now) == pytest.approx(after, rel=1e-12)
    assert (now is lr) or not tensor


def test_all_optimizers_of_the_models_are_scaled_and_no_other() -> None:
    """Two optimizers of one model, and one of something else."""
    net, other = model(), torch.nn.Linear(2, 2)
    first, second = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.AdamW(net[2].parameters(), lr=0.2)
    foreign = torch.optim.SGD(other.parameters(), lr=0.4)
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, ScaleLearningRate(2))
        for _ in range(2):
            step(net, first)
            second.step()
        exporter._act._steps.ask(exporter._act._steps.slots[0])
        step(torch.nn.Sequential(torch.nn.Linear(4, 2), other), foreign)
        assert first.param_groups[0]["lr"] == 0.1  # the step of another optimizer is none of these models
        step(net, first)
    assert [one.param_groups[0]["lr"] for one in (first, second, foreign)] == [0.2, 0.4, 0.4]


def test_tensors_on_a_device_are_never_read() -> None:
    """On `meta`, where reading raises: a learning rate and the base of its scheduler."""
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


def test_an_optimizer_that_steps_within_the_backward_stops_too() -> None:
    """One optimizer for each parameter, called by hooks in the backward: the action runs when the backward is over."""
    net = model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in net.parameters()}
    within = []

    def now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        within.append(exporter.should_stop)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(now)
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, Stop())
        exporter._act._steps.ask(exporter._act._steps.slots[0])
        net(torch.ones(3, 4)).sum().backward()
        assert exporter.should_stop
        assert within == [False] * 4
        assert "action" not in errors(exporter)


def test_a_step_is_over_when_the_outermost_is() -> None:
    """A subclass whose step calls `super().step()`, and an optimizer that is no part of it but calls one that is."""
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
        with start_exporter(net, port=None) as exporter:
            exporter.on(lambda m: False, Stop())
            exporter._act._steps.ask(exporter._act._steps.slots[0])
            step(net, optimizer)
            assert exporter.should_stop
    assert within == [False, False]


class Slow(BetweenSteps):
    """Takes 50 ms of the training's time."""

    def prepared(self, training: Training, _choice: str) -> Callable[[], None]:
        return lambda: time.sleep(0.05)


def test_what_it_takes_of_the_trainings_time_is_counted() -> None:
    """In the exporter's overhead, for an action, and for a step without one."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, Slow())
        step(net, optimizer)
        exporter._act._steps.ask(exporter._act._steps.slots[0])
        for _ in range(2):  # what is spent after a step is told with the next
            step(net, optimizer)
        assert eventually(lambda: value(exporter, "torch_grad_exporter_overhead_seconds_total") >= 0.05)
        clock = exporter._training.clock
        before = clock.own_seconds
        exporter._act._steps._hook(optimizer, (), {})
        assert clock.own_seconds >= before + HOOK_SECONDS


def test_a_reported_step_counts_where_no_hook_sees_it() -> None:
    """A loop without an optimizer of torch, that calls `exporter.step()`."""
    net = model()
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, Stop())
        exporter._act._steps.ask(exporter._act._steps.slots[0])
        net(torch.ones(3, 4)).sum().backward()
        exporter.step()
        assert exporter.should_stop


def test_nothing_is_measured_while_it_is_nan() -> None:
    """A window that is not full is NaN, and a comparison with it never holds."""
    net = model()
    means: list[float] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with start_exporter(net, port=None, every=1) as exporter:
        exporter.on(lambda m: means.append(m.mean(NORM, samples=10**5)) or False, print)
        assert until(lambda: len(means) >= 2, lambda: step(net, optimizer))
    assert all(map(math.isnan, means))
