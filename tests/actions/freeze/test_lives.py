"""Freezing beside other actions, other freezing, and scripts that change the model."""

from __future__ import annotations

import pytest
import torch

from tests.actions.freeze.test_freeze import FROZEN, held, model, never, start, state, step
from tests.support.acting import due
from tests.support.scrape import errors, value, values
from torch_grad_exporter.actions import Freeze, Stop


def trained(net: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that require a gradient."""
    return [name for name, parameter in net.named_parameters() if parameter.requires_grad]


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that changes little."""
    return torch.optim.SGD(net.parameters(), lr=0.01)


def test_steps_count_from_its_own_beginning() -> None:
    """After 30 steps with another action a loaded state goes on where it was."""
    net, action = model(), Freeze(layers="^2$", revive=20)
    optimizer = sgd(net)
    action.load_state_dict(state("2", since=5))
    with start(net) as exporter:
        exporter.on(never, Stop())
        for _ in range(30):
            step(net, optimizer)
        exporter.on(never, action)
        frozen = []
        for _ in range(17):
            step(net, optimizer)
            frozen.append(not net[2].weight.requires_grad)
    assert frozen == [True] * 14 + [False] * 3


def test_a_layer_the_script_thaws_is_given_up() -> None:
    """The Freeze that froze a layer does not thaw it after the script did and another Freeze froze it."""
    net = model()
    optimizer = sgd(net)
    first, second = Freeze(layers="^2$", revive=6), Freeze(layers="^[02]$", revive=None)
    with start(net) as exporter:
        held(exporter, first, "2")
        step(net, optimizer)
        held(exporter, second, "0", "2")
        step(net, optimizer)
        assert (set(first.frozen), set(second.frozen)) == ({"2"}, {"0"})
        net[2].requires_grad_(True)
        for _ in range(2):
            step(net, optimizer)
        assert first.frozen == {}
        second.load_state_dict(state("0", "2"))
        for _ in range(10):
            step(net, optimizer)
        assert set(second.frozen) == {"0", "2"}
        assert not net[2].weight.requires_grad


def test_a_state_does_not_claim_frozen_layers() -> None:
    """A layer that another Freeze froze is neither counted nor thawed by a loaded state."""
    net, action = model(), Freeze(layers="^[02]$", revive=3)
    optimizer = sgd(net)
    with start(net) as exporter:
        held(exporter, Freeze(layers="^2$", revive=None), "2")
        step(net, optimizer)
        exporter.on(never, action)
        action.load_state_dict(state("0", "2", since=1))
        assert set(action.frozen) == {"0"}
        for _ in range(5):
            step(net, optimizer)
        assert trained(net) == ["0.weight", "0.bias", "4.weight", "4.bias"]


def test_a_state_outlives_an_on_that_raises() -> None:
    """A state that leaves nothing to train is refused by each `on`, and freezes nothing."""
    net, action = model(), Freeze()
    action.load_state_dict(state(*"024", since=1))
    with start(net) as exporter:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no layer of the model would be trained"):
                exporter.on(action)
        assert not any(name == FROZEN for name, _ in values(exporter))
        assert len(trained(net)) == 6


def test_layers_the_script_froze_are_seen() -> None:
    """Where the script froze the other layers before the step is over, nothing is frozen, and it counts as failed."""
    net = model()
    optimizer = sgd(net)
    with start(net) as exporter:
        step(net, optimizer)
        due(exporter, Freeze(layers="^2$"))
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


def test_removed_modules_leave_no_series() -> None:
    """A module that was frozen and removed leaves no series."""
    net = model()
    with start(net) as exporter:
        for number in range(4):
            name = f"extra{number}"
            net.add_module(name, torch.nn.Linear(2, 2))
            optimizer = sgd(net)
            step(net, optimizer)
            step(net, optimizer)
            handle = held(exporter, Freeze(layers=name, revive=2), name)
            shown = []
            for _ in range(3):
                shown.append(value(exporter, FROZEN, layer=name))
                step(net, optimizer)
            assert shown == [1, 1, 0]
            handle.remove()
            delattr(net, name)
            step(net, optimizer)
            step(net, optimizer)
            assert {dict(labels)["layer"] for family, labels in values(exporter) if family == FROZEN} == {"0", "2", "4"}
