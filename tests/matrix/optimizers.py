"""Optimizers of all sorts, steps in odd places, and the switches of PyTorch under which a loop may run."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.matrix.harness import AFTER, CUMULATIVE, OF_THE_STEP, UNSEEN, Run, regime
from tests.support.models import Perceptron, batch, sgd
from tests.support.torch_versions import need

# PyTorch's own optimizers

OWN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd_foreach": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": functools.partial(torch.optim.SGD, lr=0.05, fused=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True, maximize=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
"""`capturable` needs a device other than the CPU, and `differentiable` parameters that are no leaves."""


@regime(kind=OWN)
def own_optimizers(run: Run, kind: str) -> None:
    """Each of PyTorch's optimizers, plain, over several tensors at once and fused, whatever it does with the gradients."""
    if kind == "adafactor":
        need(2, 5, "Adafactor")
    model = Perceptron()
    optimizer = OWN[kind](model.parameters())
    with run.watching(model, optimizer):
        run.train(model, optimizer, 4, clip=0.1)


@regime()
def rate_as_a_tensor(run: Run) -> None:
    """A learning rate that is a tensor is shown, and follows the tensor."""
    model = Perceptron()
    rate = torch.tensor(0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with run.watching(model, optimizer):
        for _ in range(3):
            run.train(model, optimizer, 1, clip=0.1)
            run.shows(float(rate), "torch_train_learning_rate", optimizer="Adam", group="0")
            rate.mul_(0.5)


@regime()
def several_groups(run: Run) -> None:
    """Groups with settings of their own, clipped each for itself, are one optimizer, and one more may come later."""
    model = torch.nn.Sequential(Perceptron(), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD([{"params": model[0].first.parameters(), "lr": 0.5}, {"params": model[0].second.weight}], lr=0.25)
    with run.watching(model, optimizer):
        for step in range(9):
            if step == 4:
                optimizer.add_param_group({"params": [model[0].second.bias, *model[1].parameters()], "lr": 0.125})
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean())
            if step % 3:
                torch.nn.utils.clip_grad_norm_(model[0].first.parameters(), 0.05)
            run.step(optimizer)
            # Before the last group came its parameters had no optimizer, and counted with the only one there is: the record
            # has fewer samples of them.
            if step >= 4:
                run.check(without=[*CUMULATIVE, "torch_grad_clipped_steps_total"], optional=AFTER)
            for group, settings in enumerate(optimizer.param_groups):
                run.shows(settings["lr"], "torch_train_learning_rate", optimizer="SGD", group=str(group))


# Optimizers of others


class EightBit(torch.optim.Optimizer):
    """Momentum that is kept in 8 bits, with the gradient as scratch memory."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if state:
                    parameter.grad.add_(state["momentum"].float() * state["scale"], alpha=0.9)
                state["scale"] = parameter.grad.abs().max() / 127 + 1e-12
                state["momentum"] = (parameter.grad / state["scale"]).round().to(torch.int8)
                parameter.sub_(parameter.grad, alpha=group["lr"])


class Signs(torch.optim.Optimizer):
    """The signs of the gradients, put into `.grad` for others to see, and the gradients given up."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad.sign()
                parameter.sub_(parameter.grad, alpha=group["lr"])
                parameter.grad = None


@regime(kind=[EightBit, Signs])
def optimizers_of_others(run: Run, kind: type[torch.optim.Optimizer]) -> None:
    """What a step does to the gradients is the optimizer's own business, and changes neither norm nor factor."""
    model = Perceptron()
    optimizer = kind(model.parameters(), lr=0.05)
    with run.watching(model, optimizer):
        run.train(model, optimizer, 6, clip=0.1)


class Accelerated(torch.optim.Optimizer):
    """What launchers put around an optimizer: steps and clears only where gradients are complete, through any scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.complete = True

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[object, object]:
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, object]:
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.complete:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:
        if not self.complete:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def accelerated(run: Run, wrapped: Accelerated, model: torch.nn.Module, **options: object) -> None:
    """A loop that steps and clears after each backward, and a wrapper that does so after each third."""
    wrapped.optimizer.register_step_pre_hook(lambda *_: run.stepping())
    with run.watching(model, wrapped, **options):
        for position in range(12):
            wrapped.complete = position % 3 == 2
            loss = model(batch()).square().mean() / 3
            if wrapped.scaler is not None:
                loss = wrapped.scaler.scale(loss)
                run.unscale(1 / wrapped.scaler.get_scale())
            run.backward(loss)
            if wrapped.complete:
                if wrapped.scaler is not None:
                    wrapped.scaler.unscale_(wrapped.optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            wrapped.step()
            if wrapped.complete:
                run.check()
            wrapped.zero_grad()


@regime(scaled=[False, True])
def wrapper_that_steps_now_and_then(run: Run, scaled: bool) -> None:
    """A wrapper decides when the optimizer steps: rounds are those of the optimizer within."""
    model = Perceptron()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) if scaled else None
    accelerated(run, Accelerated(sgd(model), scaler), model)
    run.shows(4.0, "torch_train_steps_total", optimizer="SGD")


@regime()
def wrapper_that_was_named(run: Run) -> None:
    """A wrapper that was given a name gives it to the optimizer within, whose steps PyTorch reports."""
    model = Perceptron()
    wrapped = Accelerated(sgd(model))
    accelerated(run, wrapped, model, optimizers={"main": wrapped})
    run.shows(4.0, "torch_train_steps_total", optimizer="main")
    run.shows(None, "torch_train_steps_total", optimizer="SGD")


# Hooks of the user's own around the step


def clipping(run: Run, model: torch.nn.Module) -> Callable[..., None]:
    """A pre-hook of the step that clips."""

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        run.stepping()

    return clip


@regime(registered=["before", "after"])
def clipping_in_a_hook(run: Run, registered: str) -> None:
    """A pre-hook of the optimizer that clips runs after those of all optimizers, wherever it was registered: its factor is seen."""
    model = Perceptron()
    optimizer = sgd(model)
    if registered == "before":
        optimizer.register_step_pre_hook(clipping(run, model))
    with run.watching(model, optimizer):
        if registered == "after":
            optimizer.register_step_pre_hook(clipping(run, model))
        clipped_in_a_hook(run, model, optimizer)


def clipped_in_a_hook(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A loop that leaves clipping to the hook."""
    for _ in range(5):
        optimizer.zero_grad()
        run.backward(model(batch()).square().mean())
        optimizer.step()
        run.check(optional=AFTER)


@regime(steps=[2, 4])
def several_steps_to_a_backward(run: Run, steps: int) -> None:
    """Steps that follow a step use the same gradients again: they count as steps, and as samples no more."""
    model = Perceptron()
    optimizer = sgd(model, lr=0.01)
    with run.watching(model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for _ in range(steps):
                run.step(optimizer)
                run.check()


# Steps in odd places


@regime(cleared=[True, False])
def steps_without_a_backward(run: Run, cleared: bool) -> None:
    """A step before the first backward, and some between rounds, with old gradients and with none, are steps and no samples."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with run.watching(model, optimizer):
        run.step(optimizer)
        run.step(optimizer)
        for _ in range(4):
            run.backward(model(batch()).square().mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            run.step(optimizer)
            run.check()
            if cleared:
                optimizer.zero_grad()
            run.step(optimizer)
            run.check()
            optimizer.zero_grad()
            run.step(optimizer)
            run.check()


@regime()
def steps_by_hand_that_are_not_reported(run: Run) -> None:
    """Without `exporter.step()` such steps are neither counted nor taken for skipped ones, and norms are shown."""
    model = Perceptron()
    with run.watching(model, sgd(model)):
        for _ in range(5):
            run.backward(model(batch()).square().mean())
            run.stepping()
            update(model)
            model.zero_grad()
        run.shows(None, "torch_train_steps_total", optimizer="manual")
        run.shows(0.0, "torch_train_skipped_steps_total")
    run.check(without=[*CUMULATIVE, *UNSEEN, "torch_train_steps_total", "torch_grad_sample_step"])


def update(model: torch.nn.Module) -> None:
    """One step of gradient descent by hand."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.05 * parameter.grad)


# Steps within the backward


class WithinBackward:
    """Keeps the gradients that each parameter's own step used, and shows them to the run when the backward is over."""

    def __init__(self, run: Run, model: torch.nn.Module) -> None:
        self.run = run
        self.model = model
        self.seen: dict[torch.nn.Parameter, torch.Tensor] = {}

    def saw(self, parameter: torch.nn.Parameter) -> None:
        self.seen[parameter] = parameter.grad.detach().clone()

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        self.run.losses.append(loss.detach().clone())
        loss.backward()
        for parameter, gradient in self.seen.items():
            parameter.grad = gradient
        self.run.passed()
        if last:
            self.run.stepping()
        for parameter in self.seen:
            parameter.grad = None
        self.seen.clear()

    def step_each(self, kind: Callable[..., torch.optim.Optimizer]) -> None:
        """PyTorch's recipe: an optimizer for each parameter, which steps and clears in the parameter's hook."""
        optimizers = {p: kind([p]) for p in self.model.parameters()}

        def step(parameter: torch.nn.Parameter) -> None:
            self.saw(parameter)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    def apply(self, kind: type[torch.optim.Optimizer]) -> None:
        """The function of `torch.distributed.optim`, which works without any process group."""
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.saw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: PLC0415 - its import warns
        _apply_optimizer_in_backward(kind, self.model.parameters(), {"lr": 0.01})


def named_as(model: torch.nn.Module, kind: type[torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
    """An optimizer that stands for many in the record."""
    return {"": kind(model.parameters(), lr=0.01)}


RECIPES = {
    "step_each": functools.partial(WithinBackward.step_each, kind=functools.partial(torch.optim.Adam, lr=0.01)),
    "apply": functools.partial(WithinBackward.apply, kind=torch.optim.SGD),
}
KIND = {"step_each": torch.optim.Adam, "apply": torch.optim.SGD}


@regime(recipe=["step_each", "apply"])
def optimizers_within_the_backward(run: Run, recipe: str) -> None:
    """Optimizers that step in the parameters' hooks are one step to a backward under one name, with the right norms."""
    model = Perceptron()
    within = WithinBackward(run, model)
    with run.watching(model, named_as(model, KIND[recipe])):
        RECIPES[recipe](within)
        step_within(within, KIND[recipe])


@regime(recipe=["step_each", "apply"])
def optimizers_within_the_backward_from_before(run: Run, recipe: str) -> None:
    """The same where the hooks were there before the exporter, so that they may run, and clear, before any of its own."""
    model = Perceptron()
    within = WithinBackward(run, model)
    RECIPES[recipe](within)
    with run.watching(model, named_as(model, KIND[recipe])):
        step_within(within, KIND[recipe])


def step_within(within: WithinBackward, kind: type[torch.optim.Optimizer]) -> None:
    """A loop without any step of its own."""
    run, model = within.run, within.model
    for step in range(6):
        within.backward(model(batch()).square().mean())
        run.check(optional=OF_THE_STEP)
        run.shows(step + 1.0, "torch_train_steps_total", optimizer=kind.__name__)
        run.shows(0.0, "torch_train_skipped_steps_total")


@regime()
def optimizers_within_the_backward_and_after(run: Run) -> None:
    """One part steps within the backward, the other is clipped and steps after it: one round, and both have their norms."""
    model = Perceptron()
    within = WithinBackward(run, model.first)
    optimizer = sgd(model.second)
    record = {"Adam": torch.optim.Adam(model.first.parameters()), "SGD": optimizer}
    within.step_each(functools.partial(torch.optim.Adam, lr=0.01))
    with run.watching(model, record):
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            run.losses.append(loss.detach().clone())
            loss.backward()
            for parameter, gradient in within.seen.items():
                parameter.grad = gradient
            run.passed()
            run.stepping("Adam")
            for parameter in model.first.parameters():
                parameter.grad = None
            torch.nn.utils.clip_grad_norm_(model.second.parameters(), 0.1)
            run.step(optimizer, "SGD")
            run.check(optional=OF_THE_STEP)


@regime()
def accumulation_with_steps_in_the_last_backward(run: Run) -> None:
    """Hooks that step only in every second backward: a round of two backwards, of the accumulated gradient."""
    model = Perceptron()
    within = WithinBackward(run, model)
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}
    last = False

    def step(parameter: torch.nn.Parameter) -> None:
        if last:
            within.saw(parameter)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with run.watching(model, named_as(model, torch.optim.SGD)):
        for position in range(10):
            last = position % 2 == 1
            within.backward(model(batch()).square().mean(), last=last)
            if last:
                run.check(optional=OF_THE_STEP)


# Switches of PyTorch


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], on: object, off: object) -> Iterator[None]:
    """A setting of the process."""
    switch(on)
    try:
        yield
    finally:
        switch(off)


@contextlib.contextmanager
def anomaly_detection() -> Iterator[None]:
    """Backwards look for NaN, and say which forward they come from."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.set_detect_anomaly(True):
            yield


SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "deterministic": functools.partial(switched, torch.use_deterministic_algorithms, True, False),
    "anomaly": anomaly_detection,
    "meta_by_default": functools.partial(switched, torch.set_default_device, "meta", None),
    "in_a_device_context": functools.partial(torch.device, "cpu"),
    "single_threaded_backward": functools.partial(torch.autograd.set_multithreading_enabled, False),
    "saved_tensors_hooks": functools.partial(torch.autograd.graph.save_on_cpu),
}


@regime(switch=SWITCHES)
def switches(run: Run, switch: str) -> None:
    """PyTorch's settings of precision, memory and determinism change no number."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with run.watching(model, optimizer), SWITCHES[switch]():
        run.train(model, optimizer, 5, lambda: torch.randn(5, 6, device="cpu"), clip=0.1)
