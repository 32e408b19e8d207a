"""Hooks for a loop of one's own: points, priorities, and the exporter as one of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.scrape import value
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.hook_list import POINTS, PRIORITIES, GradExporterHook, HookList
from torch_grad_exporter.integrations.session import running_exporter


class Notes:
    """Writes down where it is called."""

    def __init__(self, name: str, into: list[tuple[object, ...]]) -> None:
        self._name, self._into = name, into

    def before_train(self, **told: object) -> None:
        self._into.append((self._name, "before_train", told))

    def after_train_iter(self, *given: object, **told: object) -> None:
        self._into.append((self._name, "after_train_iter", *given, told))


def test_points_and_priorities() -> None:
    """There are MMEngine's 22 points and nine priorities."""
    assert len(POINTS) == len(set(POINTS)) == 22
    assert PRIORITIES == {
        "HIGHEST": 0, "VERY_HIGH": 10, "HIGH": 30, "ABOVE_NORMAL": 40, "NORMAL": 50, "BELOW_NORMAL": 60, "LOW": 70,
        "VERY_LOW": 90, "LOWEST": 100,
    }  # fmt: skip


def test_order() -> None:
    """By priority, then by registration; each point has its own hooks, and all get the same arguments."""
    heard: list[tuple[object, ...]] = []
    hooks = HookList(Notes("first", heard))
    hooks.register(Notes("low", heard), "LOW")
    hooks.register(Notes("second", heard))
    hooks.register(lambda *given, **told: heard.append(("function", "after_train_iter", *given, told)), 0, point="after_train_iter")
    hooks.call("after_train_iter", 3, loss=2.0)
    assert heard == [(who, "after_train_iter", 3, {"loss": 2.0}) for who in ("function", "first", "second", "low")]
    heard.clear()
    hooks.call("before_train")
    assert [who for who, *_ in heard] == ["first", "second", "low"]
    hooks.call("after_run")  # which none of them has


def test_a_function_with_the_name_of_a_point() -> None:
    """It needs no point."""
    heard: list[int] = []

    def after_val(number: int) -> None:
        heard.append(number)

    HookList(after_val).call("after_val", 7)
    assert heard == [7]


def test_removing() -> None:
    """A handle takes its own registration back, once; also when the exporter that has adopted it ends."""
    heard: list[tuple[object, ...]] = []
    hooks, notes = HookList(), Notes("twice", heard)
    one, _ = hooks.register(notes), hooks.register(notes)
    one.remove()
    one.remove()
    hooks.call("before_train")
    assert len(heard) == 1
    with start_exporter(torch.nn.Linear(1, 1), port=None) as exporter:
        handle = exporter.adopt(hooks.register(notes, 20))
        assert handle.priority == 20
        assert [*handle.calls] == ["before_train", "after_train_iter"]
    hooks.call("before_train")
    assert len(heard) == 2


def test_changes_during_a_call() -> None:
    """Count from the next call on."""
    heard: list[str] = []
    hooks = HookList()

    def first() -> None:
        heard.append("first")
        handle.remove()
        hooks.register(lambda: heard.append("added"), point="after_train")

    handle = hooks.register(first, point="after_train")
    hooks.register(lambda: heard.append("second"), point="after_train")
    hooks.call("after_train")
    assert heard == ["first", "second"]
    hooks.call("after_train")
    assert heard[2:] == ["second", "added"]


def test_what_a_hook_raises_reaches_the_loop() -> None:
    """It is the user's own."""

    def broken() -> None:
        raise KeyError("own")

    hooks = HookList()
    hooks.register(broken, point="before_run")
    with pytest.raises(KeyError, match="own"):
        hooks.call("before_run")


class Misspelt:
    def after_train_iteration(self) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda hooks: hooks.call("after_train_step"), ValueError, "no point 'after_train_step'; did you mean after_train_"),
        (lambda hooks: hooks.call("xyz"), ValueError, "there are before_run, "),
        (lambda hooks: hooks.register(print, point="befor_run"), ValueError, "did you mean before_run"),
        (lambda hooks: hooks.register(print), TypeError, "print.*say where it is called"),
        (lambda hooks: hooks.register(3), TypeError, "int.*no method with the name of a point"),
        (lambda hooks: hooks.register(3, point="after_run"), TypeError, "expected a function"),
        (lambda hooks: hooks.register(Misspelt()), TypeError, "after_train_iteration is near after_train_iter"),
        (lambda hooks: hooks.register(print, "NORMALL", point="after_run"), ValueError, "did you mean NORMAL"),
        (lambda hooks: hooks.register(print, 101, point="after_run"), ValueError, "0, which is called first, to 100"),
        (lambda hooks: hooks.register(print, True, point="after_run"), TypeError, "expected one of HIGHEST"),
    ],
)
def test_errors(wrong: Callable[[HookList], object], error: type[Exception], says: str) -> None:
    """Name what is wrong and what is near, and register nothing."""
    hooks = HookList()
    with pytest.raises(error, match=says):
        wrong(hooks)
    hooks.call("after_run")


# The exporter's own


def trained(hooks: HookList, model: torch.nn.Module, *, epochs: int = 2, stop: Callable[[], bool] = lambda: False) -> None:
    """A loop with an evaluation in each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        hooks.call("before_train_epoch", epoch=epoch)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            optimizer.step()
            hooks.call("after_train_iter", loss=loss, samples=2, tokens=7, batch=number)
            if stop():
                return
        hooks.call("before_val")
        hooks.call("after_val")


def test_the_exporter_as_a_hook() -> None:
    """It starts, is told loss, samples, tokens and epoch, shows when there is an evaluation, and ends with the training."""
    model = torch.nn.Linear(3, 2)
    hook = GradExporterHook(model, port=None, every=1)
    hooks = HookList(hook)
    shown: list[float | None] = []

    def look() -> None:
        assert hook.exporter is not None
        shown.append(value(hook.exporter, "torch_train_state", state="evaluating"))

    hooks.register(look, "LOWEST", point="before_val")
    hooks.register(look, "LOWEST", point="after_val")
    hooks.call("before_train", step=10)
    trained(hooks, model)
    exporter = hook.exporter
    assert exporter is not None
    assert value(exporter, "torch_train_epoch") == 1
    assert value(exporter, "torch_train_samples_total") == 12
    assert value(exporter, "torch_train_tokens_total") == 42
    assert value(exporter, "torch_grad_sample_step") == 16
    assert value(exporter, "torch_train_loss") is not None
    assert shown == [1, 0] * 2
    hooks.call("after_train")
    hooks.call("after_run")
    assert hook.exporter is None
    assert running_exporter(model) is None


def test_the_users_exporter_and_a_hook_that_begins_late() -> None:
    """A loop without `before_train`; and one whose exporter goes on after it."""
    model = torch.nn.Linear(3, 2)
    with start_exporter(model, port=None, every=1) as exporter:
        hook = GradExporterHook(model, exporter)
        for _ in range(2):
            trained(HookList(hook), model)
            hook.after_train()
            assert hook.exporter is exporter
        assert value(exporter, "torch_train_tokens_total") == 84


def test_added_twice(caplog: pytest.LogCaptureFixture) -> None:
    """Tells once, and says it once."""
    model = torch.nn.Linear(3, 2)
    one, other = GradExporterHook(model, port=None), GradExporterHook(model, port=None)
    hooks = HookList(one, other)
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        trained(hooks, model)
    assert one.exporter is not None
    assert value(one.exporter, "torch_train_tokens_total") == 42
    assert caplog.text.count("remove one of them") == 1
    hooks.call("after_run")


def test_stops() -> None:
    """`Stop()` is there for the loop to see."""
    model = torch.nn.Linear(3, 2)
    hook = GradExporterHook(model, port=None)
    hooks = HookList(hook)
    hooks.call("before_train")
    assert hook.exporter is not None
    hook.exporter.on(lambda m: True, Stop())

    def stopped() -> bool:
        trained(hooks, model, epochs=1, stop=lambda: hook.should_stop)
        return hook.should_stop

    assert eventually(stopped)
    hooks.call("after_run")
    assert not hook.should_stop


def test_a_training_that_failed(tmp_path: Path) -> None:
    """The exception that the loop tells is what has ended the run."""
    hook = GradExporterHook(torch.nn.Linear(3, 2), port=None)
    hook.before_train()
    exporter = hook.exporter
    assert exporter is not None
    hook.after_train(error=ValueError("broken"))
    exporter.save(tmp_path / "saved.json")
    status = json.loads((tmp_path / "saved.json").read_text())["status"]
    assert (status["state"], status["ended_by"]) == ("failed", "ValueError")


def test_a_training_that_broke_off(tmp_path: Path) -> None:
    """The next training of a hook ends the exporter of one that was never ended, as one that has failed."""
    hook = GradExporterHook(torch.nn.Linear(3, 2), port=None)
    hook.before_train()
    first = hook.exporter
    hook.before_train()
    assert first is not None
    assert hook.exporter is not first
    assert hook.exporter is not None
    assert hook.exporter.run == first.run
    hook.after_train()
    first.save(tmp_path / "saved.json")
    status = json.loads((tmp_path / "saved.json").read_text())["status"]
    assert (status["state"], status["ended_by"]) == ("failed", "TrainingBrokeOff")
