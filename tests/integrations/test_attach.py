"""Attaching within a process: when, to what, by which names; and that a failure of it costs the training nothing."""

from __future__ import annotations

import gc
import signal
import sys
import types
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from tests.support.scrape import value
from torch_grad_exporter import Exporter
from torch_grad_exporter.composition import open_exporters
from torch_grad_exporter.integrations import attach, roots
from torch_grad_exporter.integrations.attach import Attachment
from torch_grad_exporter.torch_compat.modules import forward_under_way


class Told:
    """What an attachment says, and the exporters that it has had."""

    def __init__(self, **options: object) -> None:
        self.lines: list[str] = []
        self.exporters: list[Exporter] = []
        self.attachment = Attachment(
            {"port": None, "every": 1, **options},
            tell=lambda _level, message, *arguments: self.lines.append(message % arguments),
            attached=self.exporters.append,
            replaced=lambda exporter: exporter.end(None),
        )
        self.attachment.arm()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """One that is armed, for which only what the test makes is alive; afterwards nothing is left of it."""
    gc.collect()
    others = [weakref.ref(one) for kind in roots.living() for one in kind]  # of fixtures and of failures, which hold their frames

    def living() -> tuple[list[torch.optim.Optimizer], list[torch.nn.Module]]:
        known = {id(one) for reference in others if (one := reference()) is not None}
        optimizers, modules = roots.living()
        return [one for one in optimizers if id(one) not in known], [one for one in modules if id(one) not in known]

    monkeypatch.setattr(attach, "living", living)
    one = Told()
    yield one
    one.attachment.disarm()
    for exporter in open_exporters():
        exporter.close()
    assert not _global_forward_pre_hooks
    assert not _global_optimizer_pre_hooks


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of a training."""
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def test_a_forward_alone_is_no_training(told: Told) -> None:
    """Neither a model, nor its optimizer, nor a forward without gradients attaches; the first forward of a training does."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert not told.exporters
    step(model, optimizer)
    assert told.lines == ["watching Linear, trained by SGD"]
    assert value(told.exporters[0], "torch_train_steps_total", optimizer="SGD") == 1


def test_nothing_of_it_is_left_after_it_has_attached(told: Told) -> None:
    """With the exporter's end no hook is left, and the model can be freed."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    assert not _global_forward_pre_hooks
    assert len(_global_optimizer_pre_hooks) == 1
    told.exporters[0].close()
    assert not _global_optimizer_pre_hooks
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_a_hook_behind_ours_is_no_harm(told: Told) -> None:
    """Where another hook follows before each step, a training without any forward of a module is attached to at none, and runs."""
    seen: list[torch.optim.Optimizer] = []
    parameter = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(parameter.parameters(), lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda one, *_: seen.append(one))
    try:
        for _ in range(2):
            torch.nn.functional.linear(torch.ones(1, 3), parameter.weight).sum().backward()
            optimizer.step()
        assert seen == [optimizer, optimizer]
        assert not told.exporters
    finally:
        handle.remove()
    optimizer.step()
    assert len(told.exporters) == 1


def test_an_optimizer_that_comes_later_is_watched_too(told: Told) -> None:
    """A second model, whose optimizer was made after the attachment, is watched from its second step on, in the same run."""

    def train() -> None:
        first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
        step(first, optimizer)
        later = torch.optim.Adam(second.parameters(), lr=0.1)
        step(second, later)
        step(first, optimizer)
        step(second, later)

    train()
    one, other = told.exporters
    assert told.lines[1] == "from now on watching first (Linear), second (Linear), trained by Adam, SGD"
    assert one.run == other.run
    assert value(other, "torch_train_steps_total", optimizer="Adam") == 1
    assert not _global_forward_pre_hooks


def test_an_earlier_model_in_a_cycle_is_no_model(told: Told) -> None:
    """What an earlier training has left for the garbage collector, as a fold of a trainer's does, is not watched with the next."""
    for _ in range(2):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.trainer = {"model": model, "optimizer": optimizer}
        step(model, optimizer)
        step(model, optimizer)
    assert told.lines == ["watching Linear, trained by SGD", "from now on watching Linear, trained by SGD"]
    del model.trainer


def test_a_parameter_of_no_module_is_looked_at_once(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer of a tensor that belongs to no module costs one look, and the exporter stays."""
    looks: list[int] = []
    living = roots.living
    monkeypatch.setattr(attach, "living", lambda: looks.append(1) or living())
    model, alpha = torch.nn.Linear(3, 2), torch.zeros(1, requires_grad=True)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam([alpha])
    for _ in range(4):
        step(model, optimizer)
        alpha.grad = torch.ones(1)
        other.step()
    assert len(told.exporters) == 1
    assert len(looks) <= 4


def test_looks_for_more_models_are_limited(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand small trainings not each is watched: what the looks may take is a share of the time."""
    monkeypatch.setattr(attach, "CREDIT", 0.0)
    monkeypatch.setattr(attach, "SHARE", 0.0)
    for _ in range(6):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        step(model, optimizer)
    assert len(told.exporters) == 2


def test_a_failure_leaves_the_training_alone(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """Whatever fails while it attaches is said once; the training runs on, and no hook is left."""
    monkeypatch.setattr(attach, "living", lambda: 1 / 0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    step(model, optimizer)
    assert told.lines == ["nothing is watched: ZeroDivisionError: division by zero"]
    assert told.attachment.given_up
    assert not _global_forward_pre_hooks


def test_an_option_that_does_not_fit_leaves_the_training_alone() -> None:
    """A pattern that matches no layer shows only when the model is there: it is said, and nothing is watched."""
    one = Told(include="nothing")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    assert not open_exporters()
    assert one.lines[0].startswith("nothing is watched: ValueError: include='nothing': matches none")
    assert not _global_optimizer_pre_hooks


class Pair:
    """Two networks as attributes."""

    def __init__(self) -> None:
        self.left, self.right = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)


def test_names_of_several_models() -> None:
    """A model is called after a variable of the script's, an attribute of an object in one, or else its class."""

    def named() -> list[str]:
        pair, alone = Pair(), torch.nn.Linear(1, 1)
        others = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        return list(roots.named([pair.right, alone, *others, pair.left], sys._getframe()))

    assert named() == ["alone", "left", "right", "Linear", "Linear-2"]
    alone = torch.nn.Linear(1, 1)
    assert roots.named([alone], sys._getframe()) == {"": alone}


def test_the_scripts_own_variables_stay_as_they_are(told: Told) -> None:
    """What `locals()` has returned to a function, or its frame to somebody else, is neither emptied nor added to."""

    def train(lr: float, hidden: int) -> dict[str, object]:
        hparams = locals()
        actor, critic = torch.nn.Linear(3, hidden), torch.nn.Linear(3, 1)
        step(actor, torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=lr))
        return hparams

    assert train(0.1, 4) == {"lr": 0.1, "hidden": 4}
    assert [line.count("(Linear)") for line in told.lines] == [2], "a look for two names"

    def kept() -> tuple[dict[str, object], list[str]]:
        one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        variables = variables_of(sys._getframe())
        return variables, [*roots.named([one, other], sys._getframe())]

    variables, names = kept()
    assert names == ["one", "other"]
    assert {"one", "other"} <= {*variables}


def variables_of(frame: types.FrameType) -> dict[str, object]:
    """The frame's own dictionary, where it has one."""
    return frame.f_locals


def test_a_look_keeps_nothing_alive() -> None:
    """What a function drops after its models were named is freed."""

    def train() -> bool:
        one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        named = [*roots.named([one, other], sys._getframe())]
        gone = weakref.ref(one)
        del one
        return gone() is None and named == ["one", "other"]

    assert train()


def test_a_forward_of_another_caller_is_looked_at_without_its_variables() -> None:
    """Where other code than PyTorch's calls the hooks, its own variables are left alone."""

    def calls(module: torch.nn.Module) -> dict[str, object]:
        own = locals()
        forward_under_way(sys._getframe(), module, ())
        return own

    module = torch.nn.Linear(1, 1)
    assert calls(module) == {"module": module}


class Odd(torch.nn.Linear):
    """A module whose method of this name is for something else."""

    def parameters(self, group: str) -> list[str]:  # type: ignore[override]
        return [group]


class Lazy:
    """A proxy that fails when it is asked for anything, and for its class."""

    asked = 0

    def __getattribute__(self, name: str) -> object:
        Lazy.asked += 1
        raise RuntimeError(name)


def test_odd_objects_are_left_out(told: Told) -> None:
    """Beside a module with a `parameters` of its own, half an optimizer, a dead reference and a lazy proxy, all is watched."""
    odd, broken = Odd(3, 2), torch.optim.SGD.__new__(torch.optim.SGD)
    broken.param_groups = 3

    def train() -> None:
        lazy, dead = Lazy(), weakref.proxy(Pair())
        pair = Pair()
        odd(torch.ones(2, 3))
        optimizer = torch.optim.SGD([*pair.left.parameters(), *pair.right.parameters()], lr=0.1)
        pair.left(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        del lazy, dead

    train()
    assert told.lines == ["watching left (Linear), right (Linear), trained by SGD"]
    assert not told.attachment.given_up
    assert Lazy.asked == 0
    assert not roots.trained_roots([broken], [odd])
    own = torch.optim.SGD(torch.nn.Module.parameters(odd), lr=0.1)
    assert roots.trained_roots([own], [odd], [odd]) == [odd]


class TimedOut(Exception):
    """Of the script's own alarm."""


def test_an_alarm_of_the_scripts_reaches_it(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the handler of a signal raises during the search is the script's; the next forward searches again."""

    def rings(*_: object) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGUSR1, rings)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(attach, "living", lambda: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(TimedOut):
                step(model, optimizer)
            assert not told.attachment.given_up
            # And while what is left is taken away after another failure.
            patch.setattr(attach, "living", lambda: 1 / 0)
            patch.setattr(told.attachment._waiting, "end", lambda: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(TimedOut):
                step(model, optimizer)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_options_are_asked_for_when_a_training_begins() -> None:
    """Where they are a function, it is called once, at the first forward of a training."""
    asked: list[int] = []

    def options() -> dict[str, object]:
        asked.append(1)
        return {"port": None, "every": 1}

    one = Attachment(options, tell=lambda *_: None, attached=lambda _: None, replaced=lambda _: None)
    one.arm()
    try:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert not asked
        step(model, optimizer)
        assert asked == [1]
        assert one.exporter is not None
        assert one.exporter.watches([model])
        one.exporter.close()
    finally:
        one.disarm()


def test_the_outermost_module_is_the_model() -> None:
    """A wrapper stands for what it wraps; a copy that no optimizer owns, and a module that is not ready, are none."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    wrapped, copied = torch.nn.ModuleDict({"inner": model}), torch.nn.Linear(3, 2)
    unready = torch.nn.Linear.__new__(torch.nn.Linear)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    broken = torch.optim.SGD.__new__(torch.optim.SGD)
    assert roots.trained_roots([optimizer, broken], [copied, model, *model, unready, wrapped]) == [wrapped]
