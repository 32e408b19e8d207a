"""`record` against hooks by hand and `torch.autograd.grad`, in each way in which modules are called."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.torch_versions import fully_shard
from torch_grad_exporter import record
from torch_grad_exporter.inspection import record as room
from torch_grad_exporter.torch_compat.tensors import local

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    """Three layers with in-place activations, in two blocks."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), block, nn.Linear(6, 2))


def test_outputs_are_those_of_hooks_by_hand() -> None:
    """Inputs and outputs of every module, as hooks that clone at once see them, though ReLUs write into them after that."""
    model = network()
    inputs, outputs = {}, {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, args, name=name: inputs.__setitem__(name, args[0].detach().clone()))
        module.register_forward_hook(lambda m, args, out, name=name: outputs.__setitem__(name, out.detach().clone()))
    with record(model) as calls:
        model(X)
    assert list(calls) == [name for name, _ in model.named_modules()]
    for name in calls:
        (call,) = calls[name]
        assert torch.equal(call.inputs[0], inputs[name])
        assert torch.equal(call.outputs, outputs[name])
        assert not call.outputs.requires_grad
    assert (calls["0"][0].outputs < 0).any()  # before the ReLU that writes into it
    assert torch.equal(calls["0"][0].outputs.relu(), calls["1"][0].outputs)


def test_gradients_are_those_of_autograd() -> None:
    """Gradients of inputs and outputs are those of `torch.autograd.grad` in the same model without in-place operations."""
    model = network()
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    with record(model, include=r"^\d") as calls:
        model(X).square().sum().backward()
    values = {"x": X.clone()}
    values["0"] = plain[0](values["x"])
    values["1"] = plain[1](values["0"])
    values["2.0"] = plain[2][0](values["1"])
    values["2"] = values["2.1"] = plain[2][1](values["2.0"])
    values["3"] = plain[3](values["2.1"])
    before = {"0": "x", "1": "0", "2": "1", "2.0": "1", "2.1": "2.0", "3": "2.1"}
    for name in ("0", "1", "2.0", "2.1", "2", "3"):
        (call,) = calls[name]
        (expected,) = torch.autograd.grad(values["3"].square().sum(), values[name], retain_graph=True)
        assert torch.equal(call.output_gradients, expected)
        if before[name] == "x":
            assert call.input_gradients == (None,)
        else:
            (expected,) = torch.autograd.grad(values["3"].square().sum(), values[before[name]], retain_graph=True)
            assert torch.equal(call.input_gradients[0], expected)


def test_training_is_the_same_bit_by_bit() -> None:
    """Twenty steps with everything recorded, by an optimizer with momentum and dropout, end in the same bits."""

    def run(*, recorded: bool) -> dict[str, torch.Tensor]:
        model = nn.Sequential(network(), nn.Dropout(0.3), nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(3)
        for _ in range(20):
            optimizer.zero_grad()
            if recorded:
                with record(model) as calls:
                    model(torch.randn(5, 4)).square().sum().backward()
                assert calls["0.0"][0].output_gradients is not None
            else:
                model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    one, other = run(recorded=False), run(recorded=True)
    assert all(torch.equal(one[name], other[name]) for name in one)


class Output(OrderedDict):
    """A dictionary that is a dataclass too, as Transformers has them."""


@dataclass
class Predicted(Output):
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


@dataclass(frozen=True, slots=True)
class Frozen:
    one: torch.Tensor
    name: str


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - what users have


class Odd:
    """An object that is no container."""


class Nested(nn.Module):
    """Gives back what it was told to, made of a linear layer's output."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = Made(make)

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401 - each case has its own
        return self.inner(x, scale=2.0, more={"bias": torch.ones(3, requires_grad=True)})


class Made(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 3), make

    def forward(self, x: torch.Tensor, scale: float, more: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401 - as above
        return self.make(self.linear(x) * scale + more["bias"])


NESTED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda h: (h, None), lambda out: out[0]),
    "list": (lambda h: [1, [h]], lambda out: out[1][0]),
    "dict": (lambda h: {"a": {"b": h}}, lambda out: out["a"]["b"]),
    "namedtuple": (lambda h: Pair(h, "text"), lambda out: out.first),
    "structseq": (lambda h: torch.max(h, 1), lambda out: out.values),
    "model output": (lambda h: Predicted(logits=h, hidden=(h * 2,)), lambda out: out.logits),
    "its item": (lambda h: Predicted(logits=h, hidden=(h * 2,)), lambda out: out["hidden"][0]),
    "frozen dataclass": (lambda h: Frozen(h, "name"), lambda out: out.one),
    "packed": (lambda h: nn.utils.rnn.pack_sequence([h]), lambda out: out.data),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_outputs_keep_their_form(name: str) -> None:
    """Outputs, and their gradients, come in the containers of the module, and the module's own output is not changed."""
    make, pick = NESTED[name]
    model = Nested(make)
    with record(model, include="inner$") as calls:
        output = model(X)
        loss = pick(output).square().sum()
        loss.backward()
    (call,) = calls["inner"]
    assert type(call.outputs) is type(output)
    assert torch.equal(pick(call.outputs), pick(output))
    assert pick(call.outputs) is not pick(output)
    assert torch.allclose(pick(call.output_gradients), 2 * pick(output))
    assert call.keyword_inputs["scale"] == 2.0
    assert torch.equal(call.keyword_inputs["more"]["bias"], torch.ones(3))
    assert call.keyword_input_gradients["scale"] is None
    assert call.keyword_input_gradients["more"]["bias"].shape == (3,)
    assert call.input_gradients == (None,)


def test_other_objects_are_not_kept() -> None:
    """Of an object that is no container only the type stays, so that a cache in an output does not live on."""
    model = Nested(lambda h: (h, Odd()))
    with record(model, include="inner$") as calls:
        model(X)
    assert calls["inner"][0].outputs[1] is Odd


def test_modules_called_twice_and_shared_modules() -> None:
    """Each call has its own entry, in order, with its own gradient; a module under two names has one list under both."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    model["b"] = model["a"]
    with record(model) as calls:
        first = model["a"](X)
        second = model["b"](first)
        second.sum().backward()
    assert calls["a"] is calls["b"]
    assert [torch.equal(call.outputs, out) for call, out in zip(calls["a"], (first, second), strict=True)] == [True, True]
    assert torch.equal(calls["a"][1].output_gradients, torch.ones(5, 4))
    assert torch.allclose(calls["a"][0].output_gradients, torch.ones(5, 4) @ model["a"].weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_second_forward_of_a_checkpoint_is_left_out(reentrant: bool) -> None:
    """A call a module with the output of one without a checkpoint, and its gradient where the first forward has a graph."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    x = X.clone().requires_grad_()
    expected = model[0](x)
    (gradient,) = torch.autograd.grad(model[1](expected).sum(), expected)
    with record(model) as calls:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert [len(calls[name]) for name in calls] == [1, 1, 1]
    assert calls.bytes == 3 * room.CALL + (3 + (1 if reentrant else 3)) * X.nbytes
    assert torch.equal(calls["0"][0].outputs, expected)
    if reentrant:
        assert calls["0"][0].output_gradients is None
    else:
        assert torch.equal(calls["0"][0].output_gradients, gradient)


def test_several_backwards_are_added_up() -> None:
    """Two backwards through the same forward give the sum, as in `.grad`."""
    model = network()
    with record(model, include="3") as calls:
        out = model(X)
        out.sum().backward(retain_graph=True)
        (3 * out).sum().backward()
    assert torch.equal(calls["3"][0].output_gradients, torch.full((5, 2), 4.0))


def test_the_limit_holds_and_what_is_beyond_is_counted() -> None:
    """No more bytes are kept than allowed; the rest is `None` or no call at all, and `left_out` counts it."""
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(10)))
    x = torch.randn(50, 100)
    size = x.numel() * 4
    with record(model, include=r"^\d", limit=4 * size + 10 * room.CALL) as calls:
        model(x).sum().backward()
    kept = {
        id(t)
        for name in calls
        for call in calls[name]
        for t in (call.inputs[0], call.outputs, call.input_gradients[0], call.output_gradients)
        if t is not None
    }
    assert len(kept) == 4
    assert calls.bytes == 4 * size + 10 * room.CALL
    assert calls.left_out == 11 - 4 + 10  # outputs and the first input; gradients
    assert calls["9"][0].outputs is None
    with record(model, limit=room.CALL * 3) as calls:
        for _ in range(100):
            model(torch.ones(1, 100))
    assert sum(len(calls[name]) for name in calls) == 2
    assert calls.bytes <= 3 * room.CALL
    assert calls.left_out >= 1098


def test_tensors_that_modules_hand_on_are_kept_once() -> None:
    """The output of one layer is the input of the next: one copy, until someone writes into it."""
    model = network()
    with record(model) as calls:
        model(X)
    assert calls["2.0"][0].inputs[0] is calls["1"][0].outputs
    assert calls["1"][0].inputs[0] is calls["0"][0].outputs
    assert calls["1"][0].inputs[0] is not calls["1"][0].outputs


def test_all_hooks_go_also_after_an_exception() -> None:
    """No module and no tensor has a hook after the block, whether or not the loop raised in a forward; the model pickles within."""
    model = network()
    x = X.clone().requires_grad_()

    def loop() -> None:
        out.append(model(x))
        copy.deepcopy(model)
        model(torch.ones(1, 3))

    recording, out = record(model), list[torch.Tensor]()
    with pytest.raises(RuntimeError, match="mat1"), recording as calls:
        loop()
    out[0].sum().backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_with_kwargs for m in model.modules())
    assert not x._backward_hooks
    assert calls["3"][0].output_gradients is None
    assert len(calls["0"]) == 1


def test_a_forward_that_raised_does_not_mix_up_the_next() -> None:
    """After a forward that has raised within, calls have their own inputs."""
    model = network()
    with record(model) as calls:
        with pytest.raises(RuntimeError, match="mat1"):
            model[2](torch.ones(1, 3))
        model(X)
    assert torch.equal(calls[""][0].inputs[0], X)
    assert calls["2"][0].inputs[0].shape == (5, 6)
    assert [len(calls[name]) for name in calls] == [1] * 7


def test_a_module_that_catches_what_another_raised() -> None:
    """The call that goes on after an inner module has raised has its own inputs, and the inner one no call."""

    class Brave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.inner(x + 1)
            except RuntimeError:
                return x * 2

    model = nn.Sequential(Brave())
    with record(model) as calls:
        model(X)
    assert torch.equal(calls["0"][0].inputs[0], X)
    assert [len(calls[name]) for name in calls] == [1, 1, 0]


def test_names_are_without_what_wrappers_add(caplog: pytest.LogCaptureFixture) -> None:
    """Names are those of the model before it was compiled; modules that run compiled show nothing, which is logged."""
    model = network()
    compiled = torch.compile(model, backend="eager")
    expected = compiled(X)
    with caplog.at_level(logging.WARNING), record(compiled) as calls:
        out = compiled(X)
    assert torch.equal(out, expected)
    assert list(calls) == ["", "0", "1", "2", "2.0", "2.1", "3"]
    assert len(calls[""]) == 1
    assert [len(calls[name]) for name in calls if name] == [0] * 6
    with caplog.at_level(logging.WARNING), record(compiled):
        compiled(X)
    (line,) = (one.message for one in caplog.records if one.name == "torch_grad_exporter")
    assert "record: 0, 1, 2 and 3 more run compiled, so nothing of them is recorded" in line


def test_a_compiled_model_is_not_compiled_anew() -> None:
    """Recording neither breaks the graph, also where it is compiled within, nor compiles again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = network()
    compiled = torch.compile(model, backend="eager")
    with record(compiled):
        compiled(X)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    before = counters["frames"]["total"], sum(counters["graph_break"].values())
    with record(compiled):
        compiled(X)
    compiled(X)
    assert (counters["frames"]["total"], sum(counters["graph_break"].values())) == before


def test_failures_of_its_own_reach_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where keeping fails the training goes on with the same result, and one line says so."""
    model = network()
    expected = model(X)
    monkeypatch.setattr(room.Calls, "copy_of", lambda self, tensor: 1 / 0)
    with caplog.at_level(logging.WARNING), record(model):
        out = model(X)
        out.sum().backward()
    assert torch.equal(out, expected)
    assert len([line for line in caplog.records if "ZeroDivisionError" in line.message]) == 1


def test_several_models_by_name() -> None:
    """The names of a mapping are the first parts."""
    with record({"g": nn.Linear(4, 4), "d": (d := nn.Sequential(nn.Linear(4, 1)))}, include="^d") as calls:
        d(X)
    assert list(calls) == ["d", "d.0"]
    assert repr(calls).startswith("<2 calls of 2 modules")


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no model": ((7,), {}, TypeError, "model=int"),
    "no match": (
        (network(),),
        {"include": "layer4"},
        ValueError,
        "include='layer4': matches none of the 7 modules, such as '0', '1'",
    ),
    "one of two": ((network(),), {"include": ["2", "layer4"]}, ValueError, "include='layer4'"),
    "no expression": ((network(),), {"include": "("}, ValueError, "expected regular expressions"),
    "no text": ((network(),), {"include": [3]}, TypeError, r"include=\[3\]"),
    "none at all": ((network(),), {"include": []}, TypeError, r"include=\[\]"),
    "no number": ((network(),), {"limit": "1 MiB"}, TypeError, "limit='1 MiB': expected a number of bytes"),
    "no room": ((network(),), {"limit": 0}, ValueError, "limit=0: expected a number of bytes above 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_say_what_to_change(name: str) -> None:
    """They raise before anything is registered, and name the argument, the value and the fix."""
    args, options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        record(*args, **options)


def test_a_name_that_is_not_recorded_has_neighbours() -> None:
    """A wrong name raises with those that are like it."""
    with record(nn.ModuleDict({"layer4": nn.Linear(4, 4)}), include="layer") as calls:
        pass
    with pytest.raises(KeyError, match="'layer5' is not recorded; there is 'layer4'"):
        calls["layer5"]


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_wrapped_models_train_the_same(how: str) -> None:
    """Under DDP and FSDP2 three steps end in the same bits with everything recorded, and names are those of the model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def run(*, recorded: bool) -> list[torch.Tensor]:
            model: nn.Module = network()
            model = nn.parallel.DistributedDataParallel(model) if how == "ddp" else fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                with record(model) if recorded else contextlib.nullcontext() as calls:
                    model(X).square().sum().backward()
                optimizer.step()
            if recorded:
                assert list(calls) == ["", "0", "1", "2", "2.0", "2.1", "3"]
                assert all(calls[name][0].output_gradients.any() for name in calls)
            return [local(p.detach()).clone() for p in model.parameters()]

        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        assert all(map(torch.equal, run(recorded=False), run(recorded=True)))
    finally:
        dist.destroy_process_group()
