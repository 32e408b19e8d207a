"""`record` against plain hooks and `torch.autograd.grad`, in each way in which modules are called."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.inspection.support import EachOperation
from tests.support.torch_hooks import all_hooks, tensor_hooks
from tests.support.torch_versions import fully_shard
from torch_grad_exporter import record
from torch_grad_exporter.inspection.record import CALL
from torch_grad_exporter.torch_compat.tensors import local

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    """Return three layers with in-place activations, in two blocks."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), block, nn.Linear(6, 2))


def test_outputs_are_those_of_plain_hooks() -> None:
    """Inputs and outputs are those of hooks that clone at once, though ReLUs write into them later."""
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
    """Gradients of inputs and outputs are those of `torch.autograd.grad` in the model without in-place operations."""
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
    loss = values["3"].square().sum()
    expected = {name: torch.autograd.grad(loss, h, retain_graph=True)[0] for name, h in values.items() if name != "x"}
    for name, source in before.items():
        (call,) = calls[name]
        assert torch.equal(call.output_gradients, expected[name])
        assert call.input_gradients == (None,) if source == "x" else torch.equal(call.input_gradients[0], expected[source])


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp2"])
def test_training_is_the_same(wrapper: str) -> None:
    """Steps with everything recorded end in the same bits, and names are those of the model without its wrapper."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def run(*, recorded: bool) -> list[torch.Tensor]:
            model: nn.Module = network()
            names = [name for name, _ in model.named_modules()]
            if wrapper != "plain":
                model = nn.parallel.DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model, mesh=mesh)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(5):
                optimizer.zero_grad()
                with record(model) if recorded else contextlib.nullcontext() as calls:
                    model(X).square().sum().backward()
                optimizer.step()
            if recorded:
                assert list(calls) == names
                assert all(calls[name][0].output_gradients.any() for name in calls)
            return [local(p.detach()).clone() for p in model.parameters()]

        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        assert all(map(torch.equal, run(recorded=False), run(recorded=True)))
    finally:
        dist.destroy_process_group()


@dataclass
class Predicted(OrderedDict):
    """A dictionary that is also a dataclass, as in Transformers."""

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


class Nested(nn.Module):
    """A model that returns what a function makes of a linear layer's output."""

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


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - what users have

NESTED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda h: [1, None, [h]], lambda out: out[2][0]),
    "dict": (lambda h: {"a": {"b": h}}, lambda out: out["a"]["b"]),
    "namedtuple": (lambda h: Pair(h, "text"), lambda out: out.first),
    "model output": (lambda h: Predicted(logits=h, hidden=(h * 2,)), lambda out: out["hidden"][0]),
    "packed": (lambda h: nn.utils.rnn.pack_sequence([h]), lambda out: out.data),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_outputs_keep_their_form(name: str) -> None:
    """Outputs and their gradients come in the containers of the module, whose own output is not changed."""
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


class Own(list[torch.Tensor]):
    """A list of the user's own class."""


def test_a_list_of_an_own_class_becomes_plain() -> None:
    """Of a sequence of the user's own class the items are kept, in a plain one."""
    model = Nested(lambda h: Own([h]))
    with record(model, include="inner$") as calls:
        output = model(X)
    assert type(calls["inner"][0].outputs) is list
    assert torch.equal(calls["inner"][0].outputs[0], output[0])


def test_modules_called_twice_and_shared_modules() -> None:
    """Each call has its own entry and gradient, and a module under two names has one list."""
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


def test_forwards_on_other_threads_are_left_out() -> None:
    """A forward on another thread than that of the block changes nothing of what is recorded."""
    model = network()
    with record(model) as calls:
        thread = threading.Thread(target=model, args=(2 * X,))
        thread.start()
        thread.join()
        out = model(X)
    assert {len(calls[name]) for name in calls} == {1}
    assert torch.equal(calls[""][0].outputs, out)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_once(reentrant: bool) -> None:
    """A checkpointed module has one call, with its gradient unless the checkpoint is reentrant."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    x = X.clone().requires_grad_()
    expected = model[0](x)
    (gradient,) = torch.autograd.grad(model[1](expected).sum(), expected)
    with record(model) as calls:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert [len(calls[name]) for name in calls] == [1, 1, 1]
    assert torch.equal(calls["0"][0].outputs, expected)
    found = calls["0"][0].output_gradients
    assert found is None if reentrant else torch.equal(found, gradient)


def test_the_limit_of_bytes() -> None:
    """No more bytes are kept than allowed, and `left_out` counts the rest."""
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(10)))
    x = torch.randn(50, 100)
    limit = 4 * x.nbytes + 10 * CALL
    with record(model, include=r"^\d", limit=limit) as calls:
        model(x).sum().backward()
    assert calls.bytes == limit
    assert calls.left_out == 11 - 4 + 10  # outputs and the first input; gradients
    assert calls["9"][0].outputs is None
    with record(model, limit=CALL * 3) as calls:
        for _ in range(100):
            model(torch.ones(1, 100))
    assert sum(len(calls[name]) for name in calls) == 2
    assert calls.left_out >= 1098


def test_all_hooks_go_also_after_an_exception() -> None:
    """No module and no tensor has a hook after the block, also after an exception."""
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
    assert all_hooks(model) == tensor_hooks(x) == []
    assert calls["3"][0].output_gradients is None
    assert len(calls["0"]) == 1


def test_a_failure_of_its_own_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """If keeping fails the training has the same result, and one line is logged."""
    model = network()
    plain: set[str] = set()
    with EachOperation(plain.add):
        expected = model(X)

    def fail(name: str) -> None:
        if name not in plain:
            raise MemoryError

    with caplog.at_level(logging.WARNING), record(model) as calls:
        with EachOperation(fail):
            out = model(X)
        out.sum().backward()
    assert torch.equal(out, expected)
    assert not any(isinstance(call.outputs, torch.Tensor) for name in calls for call in calls[name])
    assert len([line for line in caplog.records if "MemoryError" in line.message]) == 1


def test_a_compiled_model(caplog: pytest.LogCaptureFixture) -> None:
    """Recording compiles nothing again; modules that run compiled show nothing, which is logged once."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(network(), backend="eager")
    with caplog.at_level(logging.WARNING):
        with record(compiled):
            expected = compiled(X)
        frames = counters["frames"]["total"]
        with record(compiled) as calls:
            assert torch.equal(compiled(X), expected)
    assert (counters["frames"]["total"], sum(counters["graph_break"].values())) == (frames, 0)
    assert [len(calls[name]) for name in ("", "0", "1", "2", "2.0", "2.1", "3")] == [1, 0, 0, 0, 0, 0, 0]
    (line,) = (line.message for line in caplog.records if line.name == "torch_grad_exporter")
    assert "record: 0, 1, 2 and 3 more run compiled, so nothing of them is recorded" in line


@pytest.mark.parametrize(
    ("model", "options", "kind"),
    [(7, {}, TypeError), (network(), {"include": "layer4"}, ValueError), (network(), {"limit": "1 MiB"}, TypeError)],
)
def test_wrong_arguments_raise(model: Any, options: dict[str, Any], kind: type[Exception]) -> None:  # noqa: ANN401 - some are wrong
    """The error names the argument and its value."""
    with pytest.raises(kind, match=next(iter(options), "model") + "="):
        record(model, **options)
