"""What comes between: ends, other actions, other freezing and scripts that change the model while layers are frozen."""

from __future__ import annotations

import math

import pytest
import torch

from tests.actions.freeze.test_freeze import FROZEN, alone, ask, model, step
from tests.support.scrape import errors, value, values
from torch_grad_exporter.actions import Freeze, Stop


def never(_measurements: object) -> bool:
    """A condition for actions that the test asks for by itself."""
    return False


def trained(net: torch.nn.Module) -> list[str]:
    """The names of the parameters that require a gradient."""
    return [name for name, parameter in net.named_parameters() if parameter.requires_grad]


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    """With a learning rate that changes little."""
    return torch.optim.SGD(net.parameters(), lr=0.01)


def test_an_end_while_it_freezes_leaves_nothing_frozen() -> None:
    """Another thread or a signal's handler ends it between its last look whether it is in use and the freezing."""
    net = model()
    every = trained(net)
    with alone(net) as exporter:
        handle = exporter.on(never, Freeze(layers="^2$"))
        layers = exporter._act._steps.training.layers
        assert layers is not None
        freeze = layers.freeze
        layers.freeze = lambda plan: (handle.remove(), freeze(plan))[1]  # type: ignore[method-assign]
        ask(exporter)
        step(net, sgd(net))
        assert trained(net) == every
    assert trained(net) == every


def test_steps_count_from_its_own_beginning() -> None:
    """After 30 steps with another action a state goes on where it was: 5 steps of 20 are over, 15 are left, not none."""
    net, action = model(), Freeze(layers="^2$", revive=20)
    optimizer = sgd(net)
    action.load_state_dict({"version": 1, "frozen": {"2": 5}, "norms": {}})
    with alone(net) as exporter:
        exporter.on(never, Stop())
        for _ in range(30):
            step(net, optimizer)
        exporter.on(never, action)
        frozen = []
        for _ in range(17):
            step(net, optimizer)
            frozen.append(not net[2].weight.requires_grad)
    assert frozen == [True] * 14 + [False] * 3


def test_what_a_script_thaws_is_given_up_by_whoever_froze_it() -> None:
    """Of two that freeze, any may notice it first; the one whose layer it was does not thaw it when another has frozen it since."""
    net = model()
    optimizer = sgd(net)
    first, second = Freeze(layers="^2$", revive=6), Freeze(layers="^[02]$", revive=None)
    with alone(net) as exporter:
        exporter.on(never, first)
        ask(exporter)
        step(net, optimizer)
        exporter.on(never, second)
        ask(exporter)
        step(net, optimizer)
        assert (set(first.frozen), set(second.frozen)) == ({"2"}, {"0"})
        net[2].requires_grad_(True)
        for _ in range(2):
            step(net, optimizer)
        assert first.frozen == {}
        ask(exporter)
        for _ in range(10):
            step(net, optimizer)
        assert set(second.frozen) == {"0", "2"}
        assert not net[2].weight.requires_grad


def test_a_state_does_not_claim_what_is_frozen_by_another() -> None:
    """Its layer is frozen already: it is neither counted as its own nor thawed by it."""
    net, action = model(), Freeze(layers="^[02]$", revive=3)
    optimizer = sgd(net)
    with alone(net) as exporter:
        exporter.on(never, Freeze(layers="^2$", revive=None))
        ask(exporter)
        step(net, optimizer)
        exporter.on(never, action)
        action.load_state_dict({"version": 1, "frozen": {"0": 1, "2": 1}, "norms": {}})
        assert set(action.frozen) == {"0"}
        for _ in range(5):
            step(net, optimizer)
        assert trained(net) == ["0.weight", "0.bias", "4.weight", "4.bias"]


def test_a_state_outlives_an_on_that_raises() -> None:
    """A state that leaves nothing to train is refused by each `on`, and freezes nothing."""
    net, action = model(), Freeze()
    action.load_state_dict({"version": 1, "frozen": dict.fromkeys("024", 1), "norms": {}})
    with alone(net) as exporter:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no layer of the model would be trained"):
                exporter.on(action)
        assert not any(name == FROZEN for name, _ in values(exporter))
        assert len(trained(net)) == 6


def test_what_the_script_freezes_meanwhile_is_seen() -> None:
    """It was to be the second of three layers; the script freezes the others before the step is over: the next backward works."""
    net = model()
    optimizer = sgd(net)
    with alone(net) as exporter:
        exporter.on(never, Freeze(layers="^2$"))
        step(net, optimizer)
        ask(exporter)
        net[0].requires_grad_(False)
        net[4].requires_grad_(False)
        for number in range(2):
            optimizer.zero_grad(set_to_none=False)  # so what the script has frozen has a gradient still
            net(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            if not number:
                assert errors(exporter)["action"] == 1
        assert trained(net) == ["2.weight", "2.bias"]
        assert errors(exporter)["action"] == 1


def test_nothing_is_left_of_a_layer_whose_module_is_gone() -> None:
    """Neither a series, nor a label, however many of them come, are frozen and go."""
    net = model()
    with alone(net) as exporter:
        layers = exporter._act._steps.training.layers
        assert layers is not None
        for number in range(4):
            name = f"extra{number}"
            net.add_module(name, torch.nn.Linear(2, 2))
            optimizer = sgd(net)
            step(net, optimizer)
            step(net, optimizer)
            handle = exporter.on(never, Freeze(layers=name, revive=2))
            ask(exporter)
            shown = []
            for _ in range(4):
                step(net, optimizer)
                shown.append(value(exporter, FROZEN, layer=name))
            assert shown == [1, 1, 0, 0]
            handle.remove()
            delattr(net, name)
            step(net, optimizer)
            step(net, optimizer)
            assert {dict(labels)["layer"] for family, labels in values(exporter) if family == FROZEN} == {"0", "2", "4"}
        assert set(layers.labels.shown) <= {"extra3"}
        assert set(layers._given_back) <= {"extra3"}


def test_a_condition_that_is_not_a_number_does_not_hold() -> None:
    """A value that is not there yet is NaN, which is true in Python."""
    net = model()
    with alone(net) as exporter:
        exporter.on(lambda m: m.mean("torch_train_loss", samples=10), Freeze(layers="^2$"))  # type: ignore[attr-defined]
        exporter.on(lambda m: math.nan, Stop())
        for _ in range(3):
            exporter._act.evaluate()
            step(net, sgd(net))
        assert len(trained(net)) == 6
        assert not exporter.should_stop
        assert "action" not in errors(exporter)
