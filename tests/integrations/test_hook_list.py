"""Hooks for a loop of one's own: points, priorities, and the exporter as one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.scrape import value
from torch_grad_exporter.integrations.hook_list import GradExporterHook, HookList
from torch_grad_exporter.integrations.session import running_exporter


class Notes:
    """Notes where it is called."""

    def __init__(self, name: str, into: list[tuple[object, ...]]) -> None:
        self._name, self._into = name, into

    def before_train(self, **told: object) -> None:
        self._into.append((self._name, "before_train", told))

    def after_train_iter(self, *given: object, **told: object) -> None:
        self._into.append((self._name, "after_train_iter", *given, told))


def test_order() -> None:
    """Hooks run by priority, then by registration, and all get the same arguments."""
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


class Misspelt:
    def after_train_iteration(self) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda hooks: hooks.call("after_train_step"), ValueError, "no point 'after_train_step'; did you mean after_train_"),
        (lambda hooks: hooks.register(print, point="befor_run"), ValueError, "did you mean before_run"),
        (lambda hooks: hooks.register(print), TypeError, "print.*say where it is called"),
        (lambda hooks: hooks.register(Misspelt()), TypeError, "no method with the name of a point"),
        (lambda hooks: hooks.register(print, 101, point="after_run"), ValueError, "0, which is called first, to 100"),
    ],
)
def test_wrong_hooks_are_refused(wrong: Callable[[HookList], object], error: type[Exception], says: str) -> None:
    """A wrong hook is refused with a name that is near, and nothing is registered."""
    hooks = HookList()
    with pytest.raises(error, match=says):
        wrong(hooks)
    hooks.call("after_run")


# The exporter's own


@pytest.mark.parametrize("option", [{"log": True}, {"log_values": True}, {"evry": 5}])
def test_options_without_an_effect_are_refused(option: dict[str, object]) -> None:
    """The hook takes the options of `start_exporter`; there is no logger for `log` and `log_values`."""
    with pytest.raises(TypeError, match=rf"GradExporterHook\({next(iter(option))}=.*not an option"):
        GradExporterHook(torch.nn.Linear(3, 2), **option)


def trained(hooks: HookList, model: torch.nn.Module, *, epochs: int = 2, stop: Callable[[], bool] = lambda: False) -> None:
    """Train a loop with an evaluation in each epoch."""
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
    """The hook starts an exporter, reports loss, samples, tokens, epoch and evaluation, and ends it."""
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
    evaluated = value(exporter, "torch_train_time_seconds_total", cause="evaluation")
    assert evaluated is not None
    hooks.call("before_save_checkpoint")
    threading.Event().wait(0.2)
    hooks.call("before_val")
    threading.Event().wait(0.3)
    hooks.call("after_val")
    assert (value(exporter, "torch_train_time_seconds_total", cause="checkpoint") or 0) >= 0.2
    assert (value(exporter, "torch_train_time_seconds_total", cause="evaluation") or 0) >= evaluated + 0.3
    hooks.call("after_train")
    hooks.call("after_run")
    assert hook.exporter is None
    assert running_exporter(model) is None
