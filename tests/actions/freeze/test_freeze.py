"""Freezing layers of real trainings: which layers are frozen, when, by whom, and what is given back."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.acting import due
from tests.support.scrape import OFF, errors, value, values
from tests.support.tools import eventually, lasting_threads
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Freeze
from torch_grad_exporter.actions.freeze.norms import NormPart, NormWindow
from torch_grad_exporter.rules import Problem

FROZEN, CAPTURES, ACTIONS = "torch_layer_frozen", "torch_grad_captures_total", "torch_grad_exporter_actions_total"
LAYERS = ("0", "2", "4")

start = functools.partial(start_exporter, port=None, every=1, collectors=OFF)
"""Start an exporter whose judgements are quick, since the next one is later by twenty times their duration."""


class Faint(torch.nn.Module):
    """A module that passes on its input, with a layer whose gradient is a millionth of the usual one."""

    def __init__(self, scale: float = 1e-6) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input and a little of the layer's output."""
        result: torch.Tensor = inputs + self.scale * self.linear(inputs)
        return result


def model() -> torch.nn.Sequential:
    """Return a small seeded model."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )


def faint() -> torch.nn.Sequential:
    """Return a model whose layer `1.linear` gets next to no gradient."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), Faint(), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def step(net: torch.nn.Module, *optimizers: torch.optim.Optimizer, number: int = 0) -> None:
    """Train a step of all optimizers on a seeded batch."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    net(batch).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def never(_measurements: object) -> bool:
    """Never hold: the test freezes by a state."""
    return False


def state(*layers: str, since: int = 0) -> dict[str, Any]:
    """Return the state of a `Freeze` that froze these layers this many steps ago; `on` freezes them at once."""
    return {"version": 1, "frozen": dict.fromkeys(layers, since)}


def held(exporter: Exporter, action: Freeze, *layers: str) -> Any:  # noqa: ANN401 - the handle
    """Register an action that freezes these layers now."""
    action.load_state_dict(state(*layers))
    return exporter.on(never, action)


def until(done: Callable[[], bool], again: Callable[[], object]) -> bool:
    """Train until something has happened."""
    return eventually(lambda: again() is not None or done())


def kept(net: torch.nn.Module) -> list[torch.Tensor]:
    """Return a copy of the parameters."""
    return [parameter.detach().clone() for parameter in net.parameters()]


# Against a training in which the same layer is frozen by the user

REVIVE = 6


class Loop:
    """One of the kinds of training loops. `spoiled`: the number of the step that the scaler skips."""

    def __init__(self, kind: str, net: torch.nn.Module) -> None:
        self.kind, self.net = kind, net
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        if kind != "zeros":
            self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, fused=kind == "fused")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=kind == "scaler")
        self.spoiled: int | None = None
        self.taken = 0
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_arguments: object) -> None:
        self.taken += 1

    def step(self, number: int) -> None:
        """Train the step of this number."""
        if self.kind == "closures":
            self.optimizer.step(lambda: (self.optimizer.zero_grad(), self._backward(number))[1])
            return
        self.optimizer.zero_grad(set_to_none=self.kind != "zeros")
        for part in range(3 if self.kind == "accumulation" else 1):
            self._backward(3 * number + part, math.inf if number == self.spoiled and self.kind == "scaler" else 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _backward(self, seed: int, size: float = 1.0) -> Any:  # noqa: ANN401 - a tensor, which a closure returns as a number
        loss = self.net(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean() * size
        self.scaler.scale(loss).backward()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fused", "zeros", "accumulation", "closures", "scaler"])
def test_freezing_equals_the_users_own(kind: str) -> None:
    """Parameters and optimizer states are the same bits as where the user freezes the layer and thaws it six steps later."""
    nets = model(), model()
    ours, users = (Loop(kind, net) for net in nets)
    with start(nets[0], every=3) as exporter:
        for number in range(13):
            if number == 3:
                held(exporter, Freeze(layers="^2$", revive=REVIVE), "2")
                nets[1][2].requires_grad_(False)
                for parameter in nets[1][2].parameters():
                    parameter.grad = None
                ours.spoiled = users.spoiled = number + 2
            before = kept(nets[0][2])
            ours.step(number)
            users.step(number)
            frozen = 3 < ours.taken <= 3 + REVIVE
            assert all(map(torch.equal, before, kept(nets[0][2]))) or not frozen
            assert all(map(torch.equal, kept(nets[0]), kept(nets[1]))), number
            if ours.taken == 3 + REVIVE:
                nets[1][2].requires_grad_(True)
            assert nets[0][2].weight.requires_grad == nets[1][2].weight.requires_grad
        assert "action" not in errors(exporter)
    states = [loop.optimizer.state_dict()["state"] for loop in (ours, users)]
    assert json.dumps(states[0], default=torch.Tensor.tolist) == json.dumps(states[1], default=torch.Tensor.tolist)


class Run:
    """A small training with an exporter."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.exporter = start(net)

    def step(self) -> None:
        """Train a step."""
        step(self.net, self.optimizer)

    def held(self, action: Freeze, *layers: str) -> Any:  # noqa: ANN401 - the handle
        """Register an action that freezes these layers now, and train a step."""
        handle = held(self.exporter, action, *layers)
        self.step()
        return handle

    @property
    def frozen(self) -> list[str]:
        """The names of the parameters that are not trained."""
        return [name for name, parameter in self.net.named_parameters() if not parameter.requires_grad]


@pytest.fixture(name="run")
def _run() -> Iterator[Run]:
    run = Run(model())
    with run.exporter:
        yield run


def test_a_frozen_layer_keeps_its_counters(run: Run) -> None:
    """The metric is 1 while a layer is frozen, its counters stay, and without a Freeze there is no such metric."""
    run.step()
    assert not any(name == FROZEN for name, _ in values(run.exporter))
    run.exporter.on(lambda m: True, Freeze(layers="^2$", revive=5))
    assert until(lambda: bool(run.frozen), run.step)
    captured = value(run.exporter, CAPTURES, layer="2") or 0.0
    seen = []
    for _ in range(7):
        seen.append([value(run.exporter, FROZEN, layer=layer) for layer in LAYERS])
        run.step()
    assert seen == [[0, 1, 0]] * 5 + [[0, 0, 0]] * 2
    assert [(value(run.exporter, CAPTURES, layer=layer) or 0.0) - captured for layer in LAYERS] == [7, 2, 7]
    assert value(run.exporter, ACTIONS, action="Freeze", result="done") == 1


@pytest.mark.parametrize("end", ["close", "remove"])
def test_the_end_gives_back_what_it_froze(run: Run, end: str) -> None:
    """`close` and `remove()` thaw the layers, and leave frozen what the user froze before and meanwhile."""
    run.net[2].bias.requires_grad_(False)
    handle = run.held(Freeze(layers="^2$|^4$"), "2", "4")
    run.net[0].weight.requires_grad_(False)
    run.step()
    assert run.frozen == ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
    getattr(handle if end == "remove" else run.exporter, end)()
    assert run.frozen == ["0.weight", "2.bias"]


def test_replaced_parameters_are_forgotten(run: Run) -> None:
    """A new module in the place of a frozen one is trained, the old one stays as it is, and a removed one leaves no series."""
    old = run.net[2].weight
    run.held(Freeze(layers="^2$", revive=None), "2")
    run.net[2] = new = torch.nn.Linear(8, 8)
    new.weight.requires_grad_(False)
    for _ in range(3):
        run.step()
    assert value(run.exporter, FROZEN, layer="2") == 0
    del run.net[2:]
    for _ in range(2):
        step(run.net, torch.optim.SGD(run.net.parameters(), lr=0.01))
    assert {dict(labels)["layer"] for name, labels in values(run.exporter) if name == FROZEN} == {"0"}
    assert "action" not in errors(run.exporter)
    run.exporter.close()
    assert [new.weight.requires_grad, new.bias.requires_grad, old.requires_grad] == [False, True, False]


class Tied(torch.nn.Module):
    """An embedding, a body, and a head with the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 4, bias=False)
        self.body = torch.nn.Linear(4, 8)
        self.head = torch.nn.Linear(8, 4)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 4)."""
        result: torch.Tensor = self.head(self.body(torch.tanh(self.embed(self.body(inputs)))))
        return result


def test_tied_parameters_stay_trained() -> None:
    """A weight that two layers have is frozen with neither, and a layer that has nothing else is refused by name."""
    run = Run(Tied())
    with run.exporter:
        run.held(Freeze(layers="head"), "head")
        assert run.frozen == ["head.bias"]
        with pytest.raises(ValueError, match="layers='embed': other layers have all of their parameters"):
            run.exporter.on(never, Freeze(layers="embed"))
        assert run.frozen == ["head.bias"]


# Beside others


def test_a_layer_the_script_thaws_is_given_up(run: Run) -> None:
    """The Freeze that froze a layer does not thaw it after the script did and another Freeze froze it."""
    first, second = Freeze(layers="^2$", revive=6), Freeze(layers="^[02]$", revive=None)
    run.held(first, "2")
    run.held(second, "0", "2")
    assert (set(first.frozen), set(second.frozen)) == ({"2"}, {"0"})
    run.net[2].requires_grad_(True)
    for _ in range(2):
        run.step()
    assert first.frozen == {}
    third = Freeze(layers="^2$", revive=None)
    run.held(third, "2")
    for _ in range(10):
        run.step()
    assert (set(second.frozen), set(third.frozen)) == ({"0"}, {"2"})
    assert not run.net[2].weight.requires_grad


@pytest.mark.parametrize("others", ["frozen", "without a gradient"])
def test_nothing_is_frozen_where_nothing_is_left(run: Run, others: str) -> None:
    """Where the script froze the other layers, or they get no gradient, nothing is frozen, and the action failed."""
    optimizer = torch.optim.SGD(run.net.parameters(), lr=0.01)
    used = run.net if others == "frozen" else run.net[:1]
    used(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    due(run.exporter, Freeze(layers="^0$"))
    if others == "frozen":
        run.net[2:].requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)  # so what the script has frozen has a gradient still
        used(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert all(parameter.requires_grad for parameter in run.net[0].parameters())
    assert value(run.exporter, ACTIONS, action="Freeze", result="failed") == errors(run.exporter)["action"] == 1


# By norms


@pytest.mark.slow
def test_a_layer_below_the_threshold_is_frozen() -> None:
    """A layer is frozen after a full window of ten samples, trained again `revive` steps later, and frozen again."""
    net = faint()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    history: list[bool] = []

    def changes() -> list[int]:
        return [number for number in range(1, len(history)) if history[number] != history[number - 1]]

    def once() -> None:
        step(net, optimizer, number=len(history))
        history.append(net[1].linear.weight.requires_grad)

    with start(net, every=2) as exporter:
        exporter.on(Freeze(1e-3, after=15, revive=8))
        assert until(lambda: len(changes()) == 3, once)
        assert "action" not in errors(exporter)
        assert all(parameter.requires_grad for layer in (net[0], net[3]) for parameter in layer.parameters())
    first, thawed, again = changes()
    assert first >= 20
    assert thawed == first + 8
    assert again - thawed >= 20


@pytest.mark.slow
def test_layers_without_finite_norms_are_never_frozen() -> None:
    """A layer with a NaN in each window and one without any gradient stay trained, where another one is frozen."""
    net = faint()
    net.insert(1, Faint())
    net.append(torch.nn.Linear(2, 2))
    used = net[:5]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    action, numbers = Freeze(1e-3, after=12), itertools.count()
    net[1].linear.weight.register_hook(lambda gradient: gradient * (math.nan if next(numbers) % 10 == 2 else 1.0))

    def once() -> None:
        optimizer.zero_grad()
        used(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            net[1].linear.weight.nan_to_num_()

    with start(net) as exporter:
        exporter.on(action)
        assert until(lambda: bool(action.frozen), once)
        assert set(action.frozen) == {"2.linear"}
        assert "action" not in errors(exporter)


@pytest.mark.slow
def test_one_layer_always_stays() -> None:
    """Where all norms are small, the layer with the largest one of each optimizer stays."""
    net = model()
    groups = [[*net[0].parameters(), *net[2].parameters()], [*net[4].parameters()]]
    optimizers = [torch.optim.AdamW(group, lr=1e-6) for group in groups]
    action, judged = Freeze(1e6, after=12), list[int]()
    with start(net) as exporter:
        for number in range(9):
            step(net, *optimizers, number=number)
        norms = {layer: value(exporter, "torch_grad_norm_squared_accumulated_total", layer=layer) or 0.0 for layer in "02"}
        exporter.on(action)
        exporter.on(lambda m: judged.append(len(action.frozen)) or False, print)
        assert until(lambda: judged[-1:] == [1], lambda: step(net, *optimizers))
        step(net, *optimizers)
        assert set(action.frozen) == {min(norms, key=norms.__getitem__)}
        assert "action" not in errors(exporter)


@pytest.mark.slow
@pytest.mark.parametrize("above", [0.99, 1.01])
def test_the_threshold_is_that_of_the_norm(above: float) -> None:
    """A layer is frozen if the threshold is just above its norm in float64, and stays if it is just below."""
    net = model()
    optimizer, other = torch.optim.SGD(net.parameters(), lr=0.0), Freeze(1e6, after=12, layers="^0$")
    step(net, optimizer)
    norm = float(sum(p.grad.double().square().sum() for p in net[2].parameters())) ** 0.5
    action = Freeze(norm * above, after=12, layers="^2$")
    with start(net) as exporter:
        exporter.on(action)
        exporter.on(other)  # judged later, by the same thread
        assert until(lambda: bool(other.frozen), lambda: step(net, optimizer))
        step(net, optimizer)
        assert set(action.frozen) == ({"2"} if above > 1 else set())


def test_a_window_has_the_last_steps() -> None:
    """The mean of a window is that of its last 32 steps, or of two more, and NaN while one of them was not finite."""
    window, norms = NormWindow(32), list[float]()
    for number in range(200):
        norms.append(math.sin(number) + 2)
        window.add(NormPart(1, norms[-1], 1, number == 100))
        if number < 31 or 100 <= number < 132:
            assert math.isnan(window.mean)
        elif number not in (132, 133):
            assert any(window.mean == pytest.approx(np.mean(norms[-length:]), rel=1e-12) for length in (32, 33, 34))


# By rules


DEAD = (Problem("LayerDead", "warning", "dead", "1"), Problem("LayerDead", "warning", "dead", None, ("2", "3")))
REST = (Problem("LayerDead", "warning", "dead", "0"), Problem("LayerDead", "warning", "dead", "4"))


def test_a_rule_freezes_named_layers() -> None:
    """The layers that a rule names are frozen once, and never all."""
    net, training = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5))), None
    with start(net) as exporter:
        exporter.on("LayerDead", action := Freeze())
        choice = action.choose(training, DEAD)
        action.act(training, action.prepare(training, choice))
        assert set(action.frozen) == {"1", "2", "3"}
        assert action.choose(training, DEAD) is None
        with pytest.raises(RuntimeError, match="no layer of the model would be trained"):
            action.choose(training, REST)


# States


@pytest.mark.slow
def test_a_state_goes_on() -> None:
    """A state as JSON freezes the layer of a new run at once, which is thawed when that of the first run would be."""
    net = faint()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    first = Freeze(1e-3, after=12, revive=30)
    with start(net) as exporter:
        exporter.on(first)
        assert until(lambda: bool(first.frozen), lambda: step(net, optimizer))
        step(net, optimizer)
        saved = json.loads(json.dumps(first.state_dict()))
    assert saved["frozen"] == {"1.linear": 1}
    assert json.loads(json.dumps(first.state_dict())) == saved
    again, second = copy.deepcopy(net), Freeze(1e-3, after=12, revive=30)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-4)
    second.load_state_dict(saved)
    with start(again) as exporter:
        exporter.on(second)
        assert not again[1].linear.weight.requires_grad
        steps = 0
        while not again[1].linear.weight.requires_grad:
            step(again, optimizer)
            steps += 1
        assert steps == 30 - 1
        with pytest.raises(RuntimeError, match=r"it is in use; load a state before exporter\.on"):
            second.load_state_dict(saved)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "expected what Freeze.state_dict"),
        ({"version": 2, "frozen": {}}, "version=2: expected 1"),
        ({"version": 1, "frozen": {"0": "never"}}, "."),
    ],
)
def test_a_wrong_state_is_refused(wrong: dict[str, Any], message: str) -> None:
    """A wrong state is refused before anything changes."""
    with pytest.raises(ValueError, match=message):
        Freeze().load_state_dict(wrong)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (["22"], ValueError, "state: there is no layer '22' that is trained; did you mean"),
        (LAYERS, RuntimeError, "no layer of the model would be trained"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(run: Run, layers: list[str], error: type[Exception], message: str) -> None:
    """`on` refuses a state of another model and one that leaves nothing to train, and freezes nothing."""
    action = Freeze()
    action.load_state_dict(state(*layers, since=5))
    with pytest.raises(error, match=message):
        run.exporter.on(action)
    assert run.frozen == []


# Wrong calls

REFUSED: list[tuple[Callable[[], tuple[Any, ...]], str]] = [
    (lambda: (Freeze(0),), "threshold=0: expected a norm above 0, such as 0.001"),
    (lambda: (Freeze(after=0),), "after=0: expected a number of optimizer steps of at least 1"),
    (lambda: (Freeze(revive=0),), "revive=0: expected None for never, or a number of optimizer steps of at least 1"),
    (lambda: (Freeze(layers="("),), r"layers='\(': expected a regular expression .*missing \)"),
    (lambda: (never, Freeze(layers=".")), r"layers='\.': freezing 0, 2, 4: no layer of the model would be trained"),
    (lambda: (never, Freeze(layers="decoder")), "layers='decoder': it matches no layer that is trained; there are 0, 2, 4"),
    (lambda: (never, Freeze()), "layers=None: a condition names no layer"),
    (lambda: (Freeze(), Freeze(layers="2")), "an action is not a cause"),
    (lambda: (never,), "action=None: what is to be done on"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_wrong_calls_are_refused(run: Run, make: Callable[[], tuple[Any, ...]], message: str) -> None:
    """A wrong call names the argument, its value and what is expected, registers nothing and starts no thread."""
    with pytest.raises((TypeError, ValueError), match=message):
        run.exporter.on(*make())
    assert "torch-grad-exporter-act" not in lasting_threads()


def test_lbfgs_and_a_freeze_in_use_are_refused() -> None:
    """LBFGS moves parameters without a gradient, and a Freeze has a memory for one `on` at a time."""
    net, action = model(), Freeze()
    with start(net) as exporter:
        handle = exporter.on(action)
        with pytest.raises(ValueError, match="it is in use; make another one"):
            exporter.on("LayerDead", action)
        handle.remove()
        exporter.on("LayerDead", action)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    with start(net) as exporter:
        optimizer.step(lambda: (optimizer.zero_grad(), net(torch.ones(3, 4)).square().sum().backward(), 1.0)[2])
        with pytest.raises(RuntimeError, match="LBFGS moves parameters without a gradient"):
            exporter.on(Freeze())


@pytest.mark.slow
def test_a_compiled_model_compiles_once_a_state() -> None:
    """A compiled model compiles again when the layer is frozen and not when it is thawed."""
    net, compiled, counts = model(), list[int](), list[tuple[bool, int]]()

    def backend(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        compiled.append(1)
        return module.forward

    torch.compiler.reset()
    wrapped = torch.compile(net, backend=backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with start(net) as exporter:
        for number in range(8):
            if number == 2:
                held(exporter, Freeze(layers="^2$", revive=3), "2")
            before, trained = net[2].weight.detach().clone(), net[2].weight.requires_grad
            step(wrapped, optimizer, number=number)
            assert torch.equal(before, net[2].weight) != trained
            counts.append((trained, len(compiled)))
        assert "action" not in errors(exporter)
    assert counts == [(True, 1)] * 2 + [(False, 2)] * 3 + [(True, 2)] * 3
