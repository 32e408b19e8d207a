"""Freezing layers of real trainings: what is frozen, when, by whom, and what of it comes back."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.acting import Still
from tests.support.scrape import errors, value, values
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Event, Freeze
from torch_grad_exporter.rules import Problem

FROZEN, CAPTURES = "torch_layer_frozen", "torch_grad_captures_total"
LAYERS = ("0", "2", "4")


class Faint(torch.nn.Module):
    """Passes on its input, with a layer whose gradient is a millionth of what it would be."""

    def __init__(self, scale: float = 1e-6) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input and a little of the layer's output."""
        result: torch.Tensor = inputs + self.scale * self.linear(inputs)
        return result


def model() -> torch.nn.Sequential:
    """A small one, seeded."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )


def faint() -> torch.nn.Sequential:
    """One whose layer `1.linear` gets next to no gradient."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), Faint(), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def step(net: torch.nn.Module, *optimizers: torch.optim.Optimizer, number: int = 0) -> None:
    """A step of all optimizers on a seeded batch."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    net(batch).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def alone(net: torch.nn.Module, every: int = 1) -> Exporter:
    """An exporter without a thread that judges: the test does. It looks at nothing but the training."""
    resources = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container"), False)
    exporter = start_exporter(net, port=None, every=every, collectors=resources)
    exporter._act._make_loop = Still
    return exporter


def ask(exporter: Exporter, *named: str) -> bool:
    """What the thread that judges does when the last action is due: it runs at the end of the next step."""
    return exporter._act._steps.ask(exporter._act._steps.slots[-1], named)


def kept(net: torch.nn.Module) -> list[torch.Tensor]:
    """What the parameters are now."""
    return [parameter.detach().clone() for parameter in net.parameters()]


# Against a training in which the same layer is frozen by hand

FROM, REVIVE, STEPS = 4, 6, 15

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
}


def plain(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Steps as usual."""
    for number in range(STEPS):
        yield functools.partial(step, net, optimizer, number=number)


def zeros(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Gradients that are set to zero, and not to `None`."""

    def one(number: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        net(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()

    for number in range(STEPS):
        yield functools.partial(one, number)


def accumulating(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Three backwards for each step."""

    def one(number: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            net(torch.randn(3, 4, generator=torch.Generator().manual_seed(3 * number + part))).square().mean().backward()
        optimizer.step()

    for number in range(STEPS):
        yield functools.partial(one, number)


def closures(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """The backward within the step."""

    def closure(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        return loss

    for number in range(STEPS):
        yield functools.partial(optimizer.step, functools.partial(closure, number))


def scaled(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """With a gradient scaler, which skips a step of an infinite gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    def one(number: int) -> None:
        optimizer.zero_grad()
        loss = net(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean()
        scaler.scale(loss * (math.inf if number == FROM + 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    for number in range(STEPS):
        yield functools.partial(one, number)


LOOPS = {"plain": plain, "zeros": zeros, "accumulation": accumulating, "closures": closures, "scaler": scaled}
CASES = [("plain", name) for name in OPTIMIZERS] + [(name, "AdamW") for name in LOOPS if name != "plain"]


@pytest.mark.parametrize(("loop", "optimizer"), CASES, ids=[f"{loop}, {optimizer}" for loop, optimizer in CASES])
def test_it_is_what_freezing_by_hand_is(loop: str, optimizer: str) -> None:
    """Frozen at the end of a step and thawed at that of the sixth after it: parameters and states are the same bits."""
    nets = model(), model()
    optimizers = [OPTIMIZERS[optimizer](list(net.parameters())) for net in nets]
    steps = [LOOPS[loop](net, one) for net, one in zip(nets, optimizers, strict=True)]
    frozen, taken = 0, 0
    with start_exporter(nets[0], port=None, every=3) as exporter:
        exporter.on(lambda m: False, Freeze(layers="^2$", revive=REVIVE))
        for number, (ours, by_hand) in enumerate(zip(*steps, strict=True)):
            if number == FROM:
                ask(exporter)
            before, last = kept(nets[0][2]), taken
            ours()
            by_hand()
            taken = exporter._act._steps._counts.get(optimizers[0], 0)
            if number == FROM:
                frozen = taken
            if frozen and taken - last and taken - frozen in (0, REVIVE):
                for parameter in nets[1][2].parameters():
                    parameter.requires_grad_(taken > frozen)
                    parameter.grad = None if taken == frozen else parameter.grad
            if frozen and 0 < taken - frozen <= REVIVE:
                assert all(map(torch.equal, before, kept(nets[0][2])))
            assert all(map(torch.equal, kept(nets[0]), kept(nets[1]))), number
        assert "action" not in errors(exporter)
    assert taken - frozen > REVIVE
    states = [one.state_dict()["state"] for one in optimizers]
    assert json.dumps(states[0], default=torch.Tensor.tolist) == json.dumps(states[1], default=torch.Tensor.tolist)


def test_a_frozen_layer_has_a_metric_and_keeps_its_counters() -> None:
    """1 while it is frozen, else 0; its gauges end, and its counters stay. Without a Freeze there is no such metric."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with start_exporter(net, port=None, every=1) as exporter:
        step(net, optimizer)
        assert not any(name == FROZEN for name, _ in values(exporter))
        exporter.on(lambda m: False, Freeze(layers="^2$", revive=5))
        ask(exporter)
        seen = []
        for _ in range(8):
            step(net, optimizer)
            seen.append([value(exporter, FROZEN, layer=layer) for layer in LAYERS])
            assert all(value(exporter, CAPTURES, layer=layer) >= 1 for layer in LAYERS)
        assert seen == [[0, 1, 0]] * 5 + [[0, 0, 0]] * 3
        assert value(exporter, CAPTURES, layer="2") == 2 + 2
        assert value(exporter, "torch_grad_exporter_actions_total", action="Freeze", result="done") == 1


def test_the_end_gives_back_what_it_froze_and_nothing_else() -> None:
    """What the user has frozen himself, before and meanwhile, stays frozen; so it is after `remove()`."""
    for end in ("close", "remove"):
        net = model()
        net[2].bias.requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with start_exporter(net, port=None) as exporter:
            handle = exporter.on(lambda m: False, Freeze(layers="^2$|^4$"))
            ask(exporter)
            step(net, optimizer)
            net[0].weight.requires_grad_(False)
            step(net, optimizer)
            frozen = [name for name, parameter in net.named_parameters() if not parameter.requires_grad]
            assert frozen == ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
            if end == "remove":
                handle.remove()
                assert net[2].weight.requires_grad
        assert [name for name, parameter in net.named_parameters() if not parameter.requires_grad] == ["0.weight", "2.bias"]


def test_parameters_that_were_replaced_are_forgotten() -> None:
    """A new module in the place of a frozen one is trained, and what the old one had is given back to nobody."""
    net = model()
    old = net[2].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with start_exporter(net, port=None, every=1) as exporter:
        exporter.on(lambda m: False, Freeze(layers="^2$", revive=None))
        ask(exporter)
        step(net, optimizer)
        net[2] = torch.nn.Linear(8, 8)
        net[2].weight.requires_grad_(False)
        for _ in range(3):
            step(net, optimizer)
        assert value(exporter, FROZEN, layer="2") == 0
        assert "action" not in errors(exporter)
    assert [net[2].weight.requires_grad, net[2].bias.requires_grad, old.requires_grad] == [False, True, False]


def test_a_layer_that_the_script_trains_again_is_the_scripts() -> None:
    """It is not kept frozen, is not counted as frozen, and what else was frozen of it is given back."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    action = Freeze(layers="^2$", revive=None)
    with start_exporter(net, port=None, every=1) as exporter:
        exporter.on(lambda m: False, action)
        ask(exporter)
        step(net, optimizer)
        assert action.frozen == {"2": 0}
        net[2].weight.requires_grad_(True)
        step(net, optimizer)
        assert action.frozen == {}
        assert net[2].bias.requires_grad
        assert value(exporter, FROZEN, layer="2") == 0


class Tied(torch.nn.Module):
    """An embedding, a body and a head; the head has the embedding's weight and perhaps a bias of its own."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 4, bias=False)
        self.body = torch.nn.Linear(4, 8)
        self.head = torch.nn.Linear(8, 4, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 4)."""
        result: torch.Tensor = self.head(self.body(torch.tanh(self.embed(self.body(inputs)))))
        return result


def test_a_tied_parameter_is_frozen_with_all_of_its_layers() -> None:
    """With the head alone only its bias is; with the embedding alone nothing is; with both the weight is, till one is thawed."""
    net = Tied(bias=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with start_exporter(net, port=None) as exporter:
        first = exporter.on(lambda m: False, Freeze(layers="head"))
        ask(exporter)
        step(net, optimizer)
        assert [net.embed.weight.requires_grad, net.head.bias.requires_grad] == [True, False]
        exporter.on(lambda m: False, Freeze(layers="embed"))
        ask(exporter)
        step(net, optimizer)
        assert [net.embed.weight.requires_grad, net.head.bias.requires_grad] == [False, False]
        first.remove()
        assert [net.embed.weight.requires_grad, net.head.bias.requires_grad] == [True, True]
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, Freeze(layers="embed"))
        assert not ask(exporter)


def test_a_layer_that_only_shares_goes_with_its_owner() -> None:
    """A head without a bias has no norm of its own: by a rule it is frozen with the embedding, by a name only with its own."""
    net = Tied(bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for action, named, expected in (
        (Freeze(), ("embed",), False),
        (Freeze(layers="embed"), (), True),
        (Freeze(layers="em|he"), (), False),
    ):
        with start_exporter(net, port=None) as exporter:
            exporter.on("LayerDead" if named else lambda m: False, action)
            ask(exporter, *named)
            step(net, optimizer)
            assert net.embed.weight.requires_grad is expected, action
        assert net.embed.weight.requires_grad


# By norms


def small(exporter: Exporter, net: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, each: int = 5) -> None:
    """Trains, and judges every few steps."""
    for number in range(steps):
        step(net, optimizer, number=number)
        if number % each == each - 1:
            exporter._act.evaluate()


@pytest.mark.parametrize("every", [1, 2])
def test_a_layer_below_the_threshold_is_frozen(every: int) -> None:
    """Not before `after` steps, nor before 10 samples; tried again after `revive`, and frozen again after a full window."""
    net = faint()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    action = Freeze(1e-3, after=15, revive=8)
    history: list[bool] = []
    with alone(net, every) as exporter:
        exporter.on(action)
        for number in range(40 + 20 * every):
            step(net, optimizer, number=number)
            history.append(net[1].linear.weight.requires_grad)
            if number % 5 == 4:
                exporter._act.evaluate()
        assert "action" not in errors(exporter)
        assert all(parameter.requires_grad for layer in (net[0], net[3]) for parameter in layer.parameters())
    window = max(15, 10 * every)
    changes = [number for number in range(1, len(history)) if history[number] != history[number - 1]]
    first, thawed, again, *_ = changes
    assert window <= first <= window + 5 + every * 2
    assert thawed == first + 8
    assert window <= again - thawed <= window + 10 + every * 2


def test_a_layer_without_finite_norms_is_never_frozen() -> None:
    """One NaN in the window keeps it trained, and so does having no gradient at all."""
    net = faint()
    net.append(torch.nn.Linear(2, 2))  # used by none of the steps
    used = net[:4]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    action = Freeze(1e-3, after=12)
    with alone(net) as exporter:
        exporter.on(action)
        for number in range(24):
            optimizer.zero_grad()
            used(torch.randn(3, 4)).square().mean().backward()
            if number in (2, 12, 22):
                net[1].linear.weight.grad[0, 0] = math.nan
            optimizer.step()
            if number % 3 == 2:
                exporter._act.evaluate()
        assert action.frozen == {}
        assert "action" not in errors(exporter)


def test_one_layer_always_stays() -> None:
    """Where all norms are small, the layer with the largest is trained on, of each optimizer; nothing is counted as failed."""
    net = model()
    groups = [[*net[0].parameters(), *net[2].parameters()], [*net[4].parameters()]]
    optimizers = [torch.optim.AdamW(group, lr=1e-6) for group in groups]
    action = Freeze(1e6, after=12)
    with alone(net) as exporter:
        exporter.on(action)
        for number in range(30):
            step(net, *optimizers, number=number)
            if number == 9:
                norms = {layer: value(exporter, "torch_grad_norm_squared_accumulated_total", layer=layer) or 0.0 for layer in "02"}
            if number % 5 == 4:
                exporter._act.evaluate()
        assert set(action.frozen) == {min(norms, key=norms.__getitem__)}
        assert "action" not in errors(exporter)


def test_only_layers_of_the_pattern_are_frozen_by_their_norms() -> None:
    """`layers` restricts what the norms are asked of."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)
    action = Freeze(1e6, after=12, layers="^2$")
    with alone(net) as exporter:
        exporter.on(action)
        small(exporter, net, optimizer, steps=25)
        assert set(action.frozen) == {"2"}


# By rules


def test_a_rule_freezes_what_its_problems_name() -> None:
    """LayerDead names one layer and sums up two others: those are frozen, once; what stays is trained."""
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    action, events = Freeze(), list[Event]()
    with alone(net) as exporter:
        exporter.on("LayerDead", action)
        exporter.on("LayerDead", events.append)
        problems = [Problem("LayerDead", "warning", "dead", "1"), Problem("LayerDead", "warning", "dead", None, ("2", "3"))]
        act = exporter._act
        judged = act._sources.judge(False)
        object.__setattr__(judged, "problems", problems)
        act._sources = type(act._sources)(
            judge=lambda _last: judged, fed=False, metrics=act._sources.metrics, step=act._sources.step,
            clock=iter(range(10**6)).__next__,
        )  # fmt: skip
        for _ in range(2000):
            act.evaluate()
            if act._steps.slots[0].ready is not None:
                break
        step(net, optimizer)
        assert set(action.frozen) == {"1", "2", "3"}
        act.evaluate()
        assert act._steps.slots[0].ready is None


def test_what_fails_ten_times_is_switched_off_and_training_goes_on() -> None:
    """A rule that names all layers would leave nothing to train: counted each time, then off."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with alone(net) as exporter:
        exporter.on("LayerDead", Freeze())
        (trigger,) = exporter._act._triggers
        slot = exporter._act._steps.slots[0]
        for _ in range(12):
            trigger.actions.result(exporter._act._steps.ask, slot, LAYERS)
        assert errors(exporter)["action"] == 10
        assert trigger.off
        step(net, optimizer)
        assert all(parameter.requires_grad for parameter in net.parameters())


def test_it_is_refused_where_the_next_backward_would_fail() -> None:
    """The only other layer gets no gradient: nothing is frozen, and it counts as failed."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, Freeze(layers="0"))
        for _ in range(2):
            ask(exporter)
            net[0](torch.randn(3, 4)).sum().backward()
            optimizer.step()
        assert all(parameter.requires_grad for parameter in net.parameters())
        assert errors(exporter)["action"] == 2
        assert value(exporter, "torch_grad_exporter_actions_total", action="Freeze", result="failed") == 2


# States


def test_a_state_goes_on() -> None:
    """Saved as JSON some steps after it froze, the new run's layer is frozen at once and thawed when the first one's would be."""
    net = faint()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    first = Freeze(1e-3, after=12, revive=9)
    with alone(net) as exporter:
        exporter.on(first)
        small(exporter, net, optimizer, steps=21)
        assert set(first.frozen) == {"1.linear"}
        step(net, optimizer)
        state = json.loads(json.dumps(first.state_dict()))
        since = first.frozen["1.linear"]
    assert json.loads(json.dumps(first.state_dict())) == state
    again, second = copy.deepcopy(net), Freeze(1e-3, after=12, revive=9)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-4)
    second.load_state_dict(state)
    with alone(again) as exporter:
        exporter.on(second)
        assert not again[1].linear.weight.requires_grad
        steps = 0
        while not again[1].linear.weight.requires_grad:
            step(again, optimizer)
            steps += 1
        assert steps == 9 - since
        second.load_state_dict(state)
        assert not again[1].linear.bias.requires_grad
        assert second.state_dict() == state


def test_windows_go_on_from_a_state() -> None:
    """Half a window before the save and half after it freeze the layer."""
    net = faint()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    first, second = Freeze(1e-3, after=16), Freeze(1e-3, after=16)
    with alone(net) as exporter:
        exporter.on(first)
        small(exporter, net, optimizer, steps=15)
        assert first.frozen == {}
    second.load_state_dict(first.state_dict())
    with alone(net) as exporter:
        exporter.on(second)
        small(exporter, net, optimizer, steps=16)
        assert set(second.frozen) == {"1.linear"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "expected what Freeze.state_dict"),
        ({"version": 2, "frozen": {}, "norms": {}}, "version=2: expected 1"),
        ({"version": 1, "frozen": [], "norms": {}}, "expected what Freeze.state_dict"),
        ({"version": 1, "frozen": {}, "norms": {"0": [[1, 2]]}}, "."),
    ],
)
def test_a_wrong_state_is_refused(state: dict[str, Any], message: str) -> None:
    """Before anything changes."""
    with pytest.raises(ValueError, match=message):
        Freeze().load_state_dict(state)


def test_a_state_of_another_model_is_refused() -> None:
    """By `on`, which registers nothing."""
    net, action = model(), Freeze()
    action.load_state_dict({"version": 1, "frozen": {"22": 5}, "norms": {}})
    with start_exporter(net, port=None) as exporter:
        with pytest.raises(ValueError, match="state: there is no layer '22' that is trained; did you mean"):
            exporter.on(action)
        assert exporter._act._steps.slots == ()


# Wrong calls

WRONG: list[tuple[Callable[[], Freeze], str]] = [
    (lambda: Freeze(0), "threshold=0: expected a norm, a number above 0"),
    (lambda: Freeze(math.nan), "threshold=nan: expected"),
    (lambda: Freeze("1e-3"), "threshold='1e-3': expected"),
    (lambda: Freeze(True), "threshold=True: expected"),
    (lambda: Freeze(after=0), "after=0: expected a number of optimizer steps"),
    (lambda: Freeze(after=1.5), "after=1.5: expected"),
    (lambda: Freeze(revive=0), "revive=0: expected a number of optimizer steps, a whole number above 0 or None for never"),
    (lambda: Freeze(layers="("), r"layers='\(': expected a regular expression .*missing \)"),
    (lambda: Freeze(layers=3), "layers=3: expected a regular expression"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_arguments_name_themselves(make: Callable[[], Freeze], message: str) -> None:
    """The argument, its value and what is expected."""
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        make()


NEVER: Callable[[Any], bool] = lambda m: False  # noqa: E731 - has a type

REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((NEVER, Freeze(layers=".")), {}, r"layers='\.': freezing 0, 2, 4: no layer of the model would be trained"),
    ((NEVER, Freeze(layers="decoder")), {}, "layers='decoder': it matches no layer that is trained; there are 0, 2, 4"),
    ((Freeze(layers="decoder"),), {}, "layers='decoder': it matches no layer"),
    ((NEVER, Freeze()), {}, "layers=None: a condition names no layer"),
    (("GradientExploding", Freeze()), {}, "layers=None: the rule GradientExploding names no layer"),
    ((NEVER, Freeze(0.5, layers="2")), {}, "threshold= and after= are for exporter.on"),
    ((Freeze(), Freeze(layers="2")), {}, "an action is no cause"),
    ((NEVER,), {}, "action=None: what is to be done on"),
    (("LayerDead",), {}, "action=None: what is to be done on 'LayerDead'"),
    ((Freeze(),), {"for_": 5}, "for_=5: .* knows by itself when it is due; leave for_ out"),
    ((Freeze(),), {"cooldown": 5}, "cooldown=5: .* leave cooldown out"),
    ((NEVER, Freeze), {}, "action=Freeze: expected an action, not its class"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_wrong_calls_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    """Nothing is registered, and no thread runs."""
    net = model()
    with start_exporter(net, port=None) as exporter:
        with pytest.raises((TypeError, ValueError), match=message):
            exporter.on(*arguments, **options)
        assert exporter._act._triggers == ()
        assert exporter._act._loop is None


def test_one_object_is_for_one_call() -> None:
    """It has a memory; after its end it may be used again."""
    net, action = model(), Freeze()
    with start_exporter(net, port=None) as exporter:
        handle = exporter.on(action)
        with pytest.raises(ValueError, match="it is in use; make another one"):
            exporter.on("LayerDead", action)
        handle.remove()
        exporter.on("LayerDead", action)


def test_lbfgs_is_refused() -> None:
    """It moves a parameter without a gradient, which is shown first."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    with start_exporter(net, port=None) as exporter:
        optimizer.step(closure)
        with pytest.raises(RuntimeError, match="LBFGS moves parameters without a gradient"):
            exporter.on(Freeze())
    net[2].weight.requires_grad_(False)
    net[2].weight.grad = None
    before = net[2].weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(before, net[2].weight)


# Beside others


def test_a_compiled_model_is_compiled_once_for_each_state() -> None:
    """One compilation before, one when the layer is frozen, none when it is thawed; the frozen layer does not move."""
    net, compiled = model(), list[int]()

    def backend(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        compiled.append(1)
        return module.forward

    torch._dynamo.reset()
    wrapped = torch.compile(net, backend=backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    counts = []
    with start_exporter(net, port=None) as exporter:
        exporter.on(lambda m: False, Freeze(layers="^2$", revive=4))
        for number in range(10):
            if number == 2:
                ask(exporter)
            before = net[2].weight.detach().clone()
            step(wrapped, optimizer, number=number)
            counts.append(len(compiled))
            assert torch.equal(before, net[2].weight) == (3 <= number <= 6)
        assert "action" not in errors(exporter)
    assert counts == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
