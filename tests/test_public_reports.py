"""Trainings from public reports that once failed, or showed a wrong number. The reference is a float64 record of the loop."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from tests.support.models import batch, sgd
from tests.support.record import norm
from tests.support.scrape import errors, lost, value
from tests.support.tools import eventually
from torch_grad_exporter import explain, record, start_exporter
from torch_grad_exporter.statistics.eager import EagerStatistics

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # people have such modules still


class PartlyScripted(torch.nn.Module):
    """A model with an ordinary layer, a scripted part and a traced one."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Linear(6, 4)
        self.scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
        self.traced = torch.jit.trace(torch.nn.Linear(4, 2), torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.traced(self.scripted(self.plain(x)))


def wholly_scripted() -> torch.nn.Module:
    """Return a model whose root is scripted, too."""
    return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh()))


SCRIPTED = {
    PartlyScripted: {"plain": ("plain.",), "scripted.0": ("scripted.0.",), "traced": ("traced.",)},
    wholly_scripted: {"0": ("0.",)},
}


@pytest.mark.parametrize("make", SCRIPTED, ids=lambda make: make.__name__)
def test_scripted_modules_are_watched(make: Callable[[], torch.nn.Module]) -> None:
    """Scripted and traced modules have the norms of float64, and every option leaves the training as it was."""
    layers = SCRIPTED[make]

    def train(**options: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = make()
        optimizer = sgd(model)
        exporter = start_exporter(model, port=None, every=1, **options) if options else None
        for _ in range(4):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        if exporter is not None:
            for layer, prefixes in layers.items():
                gradients = [p.grad.double() for name, p in model.named_parameters() if name.startswith(prefixes)]
                assert value(exporter, "torch_grad_norm", layer=layer) == pytest.approx(norm(gradients), rel=1e-5)
                assert value(exporter, "torch_weight_norm", layer=layer) is not None
            assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 4
            assert errors(exporter) == {}
            exporter.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    watched = train(activations=True, layer_times=True, weights=True, nan_origin="always", local_norm=True)
    assert all(map(torch.equal, watched, train()))


@pytest.mark.parametrize("make", SCRIPTED, ids=lambda make: make.__name__)
def test_scripted_modules_are_explained(make: Callable[[], torch.nn.Module]) -> None:
    """`explain` and `record` take models with scripted parts."""
    model = make()
    rows = explain(lambda: model(batch()).square().mean(), model)
    assert [rows[name].verdict for name, _ in model.named_parameters()] == ["ok"] * len([*model.parameters()])
    with record(model) as calls:
        model(batch()).square().mean().backward()
    assert len(calls[""]) == 1


class Masked(torch.nn.Module):
    """Attention with a mask, and two layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 1, batch_first=True)
        self.between = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.attention(x, x, x, key_padding_mask=mask)[0]))


def test_a_masked_row_outside_the_loss() -> None:
    """A fully masked row that the loss leaves out makes gradients NaN: the attention is named, not the layer behind it."""
    torch.manual_seed(0)
    model = Masked()
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=1, nan_origin="always") as exporter:
        for step in range(4):
            mask = torch.zeros(3, 5, dtype=torch.bool)
            mask[0] = step == 2
            optimizer.zero_grad()
            loss = model(torch.randn(3, 5, 4), mask)[1:].square().mean()
            loss.backward()
            assert loss.isfinite() == (step < 3)
            optimizer.step()
        labels = {"layer": "attention", "pass": "forward", "kind": "nan"}
        assert eventually(lambda: value(exporter, "torch_nonfinite_origin_step", **labels) == 2)


def test_since_when_a_parameter_is_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    """The step since when is that of the first sample with NaN, however late it is looked at."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 3))
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=1, nan_origin=True) as exporter:
        for step in range(30):
            optimizer.zero_grad()
            model(batch() * (math.nan if step == 4 else 1.0)).square().mean().backward()
            optimizer.step()
        exporter.collect()  # the worker looks at nothing before
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
        assert eventually(lambda: "non-finite since step 4," in caplog.text)


class ListOfLayers(torch.nn.Module):
    """A model that keeps layers in a plain list, where no module finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.others = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[1](self.others[0](self.first(x)))


def test_layers_in_a_plain_list() -> None:
    """`explain` says that the loss depends on parameters that are in no module."""
    model = ListOfLayers()
    text = str(explain(lambda: model(batch()).square().mean(), model))
    assert "the loss depends on 4 parameters that are in no model here" in text
    whole = {"model": model, "others": torch.nn.ModuleList(model.others)}
    assert "in no model here" not in str(explain(lambda: model(batch()).square().mean(), whole))


class Adapted(torch.nn.Module):
    """A frozen layer with a trained adapter, below a checkpoint whose input requires no gradient."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.adapter = torch.nn.Linear(6, 6, bias=False)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.frozen(x) + self.adapter(x), x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_an_adapter_below_a_checkpoint() -> None:
    """`explain` names the cause: no input of the reentrant checkpoint requires a gradient."""
    model = Adapted(reentrant=True)
    row = explain(lambda: model(batch()).square().mean(), model)["adapter.weight"]
    assert row.verdict == "detached_at"
    assert "no input of the checkpoint requires a gradient" in row.note
    rows = explain(lambda: model(batch().requires_grad_()).square().mean(), model)
    assert rows["adapter.weight"].verdict == "ok"
    model.reentrant = False
    assert explain(lambda: model(batch()).square().mean(), model)["adapter.weight"].verdict == "ok"


@pytest.mark.parametrize("by_hand", [False, True], ids=["backward", "by hand"])
@pytest.mark.parametrize("failing", range(5, 9))
def test_a_reading_that_fails(failing: int, by_hand: bool) -> None:
    """A round of which any reading has failed is absent and counted; what was read of it before is shown for none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizers = {"a": sgd(model[0]), "b": sgd(model[2])}
    norms: dict[tuple[str, float], float] = {}
    readings, read = itertools.count(1), EagerStatistics.read

    def measure(*arguments: object, **named: object) -> object:
        if next(readings) == failing:
            raise MemoryError
        return read(*arguments, **named)

    def backward(loss: torch.Tensor) -> None:
        if not by_hand:
            return loss.backward()
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return None

    with (
        start_exporter(model, port=None, every=1, optimizers=optimizers) as exporter,
        mock.patch.object(EagerStatistics, "read", measure),
    ):
        for step in range(1, 13):
            model.zero_grad()
            backward(model(batch()).square().mean())
            backward(model(batch()).abs().mean())
            for name, layer in (("a", model[0]), ("b", model[2])):
                norms[name, step] = norm(parameter.grad.double() for parameter in layer.parameters())
                optimizers[name].step()
            for name in optimizers:
                if (shown := value(exporter, "torch_grad_global_norm", optimizer=name)) is not None:
                    at = value(exporter, "torch_grad_sample_step", optimizer=name)
                    assert shown == pytest.approx(norms[name, at or 0], rel=1e-5)
        assert errors(exporter) == {"capture": 1}
        assert lost(exporter)["failed"] == 1
        captures = [value(exporter, "torch_grad_captures_total", layer=layer) for layer in ("0", "2")]
        assert captures == ([9, 10] if by_hand else [11, 11])  # by hand the first round is absent, and of the second "a"


class Searched(torch.nn.Module):
    """A model with an architecture parameter that mixes two layers, as in DARTS."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.alpha = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4), torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.alpha.softmax(0)
        return share[0] * self.left(x) + share[1] * self.right(x).tanh()


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_by_hand_beside_a_backward(in_place: bool) -> None:
    """Second-order DARTS: a gradient that the loop writes is not that of the backward before; it has no norm."""
    torch.manual_seed(0)
    model = Searched()
    weights = {name: parameter for name, parameter in model.named_parameters() if name != "alpha"}
    optimizers = {"SGD": torch.optim.SGD(weights.values(), lr=0.05), "Adam": torch.optim.Adam([model.alpha], lr=0.01)}
    with start_exporter(model, port=None, every=1, optimizers=optimizers) as exporter:
        for step in range(12):
            train, validation = batch(), batch()
            inner = torch.autograd.grad(model(train).square().mean(), weights.values(), create_graph=True)
            after = {name: parameter - 0.05 * g for (name, parameter), g in zip(weights.items(), inner, strict=True)}
            outer = torch.func.functional_call(model, after, (validation,)).square().mean()
            (gradient,) = torch.autograd.grad(outer, [model.alpha])
            if in_place and step:
                model.alpha.grad.data.copy_(gradient)
            else:
                model.alpha.grad = gradient
            optimizers["Adam"].step()
            assert value(exporter, "torch_grad_global_norm", optimizer="Adam") is None
            assert value(exporter, "torch_grad_norm", layer="alpha") is None
            optimizers["SGD"].zero_grad()
            model(train).square().mean().backward()
            whole = norm(parameter.grad.double() for parameter in weights.values())
            optimizers["SGD"].step()
        model(batch())  # no other optimizer steps on this backward
        assert value(exporter, "torch_grad_global_norm", optimizer="SGD") == pytest.approx(whole, rel=1e-5)
        assert value(exporter, "torch_train_steps_total", optimizer="Adam") == 12
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 12
        assert value(exporter, "torch_train_skipped_steps_total") == 0


class Packed(torch.Tensor):
    """A weight that keeps its elements in another tensor, and knows few operations, as those of quantised layers do."""

    elements: torch.Tensor

    @staticmethod
    def __new__(cls: type[Packed], elements: torch.Tensor) -> Packed:  # noqa: PYI034 - PyTorch's own makes it
        """Return a tensor of the same shape that has no memory of its own."""
        packed = torch.Tensor._make_wrapper_subclass(cls, elements.shape, dtype=elements.dtype)
        packed.elements = elements
        return packed

    @classmethod
    def __torch_dispatch__(
        cls,
        func: torch._ops.OpOverload,
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation on the elements."""
        name = func.overloadpacket.__name__
        if name not in ("detach", "alias", "view", "t", "addmm", "mm", "add_"):
            raise NotImplementedError(f"{name} of packed elements")
        arguments, named = tree_map_only(Packed, operator.attrgetter("elements"), (args, kwargs or {}))
        result = func(*arguments, **named)
        return args[0] if name == "add_" else result if name in ("addmm", "mm") else cls(result)


class Marked(torch.Tensor):
    """A weight whose class is its own, as those of files of weights have it."""


class Unread(torch.Tensor):
    """A weight whose class refuses whatever a training does not need."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation, or refuse it."""
        if func.__name__ in ("clone", "linalg_vector_norm", "view_as", "numpy"):
            raise NotImplementedError(f"{func.__name__} of this class")
        return super().__torch_function__(func, types, args, kwargs or {})


KINDS = {"packed": Packed, "marked": lambda weight: weight.as_subclass(Marked), "unread": lambda weight: weight.as_subclass(Unread)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_a_class_of_its_own(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A layer whose weight cannot be measured has no norm of its weights, and is named once; all else is as without it."""

    def train(*, watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        model[1].weight = torch.nn.Parameter(KINDS[kind](model[1].weight.detach()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
        exporter = start_exporter(model, port=None, every=1, weights=True) if watched else None
        for _ in range(6):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            squares = {layer: norm(p.grad.double() for p in part.parameters()) for layer, part in model.named_children()}
            optimizer.step()
        if exporter is not None:
            for layer, expected in squares.items():
                assert value(exporter, "torch_grad_norm", layer=layer) == pytest.approx(expected, rel=1e-5)
                if layer != "1":
                    weights = norm(p.detach().double() for p in model[int(layer)].parameters())
                    assert value(exporter, "torch_weight_norm", layer=layer) == pytest.approx(weights, rel=1e-5)
            assert (value(exporter, "torch_weight_norm", layer="1") is None) == (kind != "marked")
            assert errors(exporter) == {}
            exporter.close()
        return [getattr(p, "elements", p).detach().as_subclass(torch.Tensor).clone() for p in model.parameters()]

    assert all(map(torch.equal, train(watched=True), train(watched=False)))
    assert caplog.text.count("layer 1 is left out") == (kind != "marked")


class Routed(torch.nn.Module):
    """A model that sends each batch through one of its experts, before and behind its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.ModuleList(torch.nn.Linear(6, 4) for _ in range(4))
        self.gate = torch.nn.Linear(4, 4)
        self.last = torch.nn.ModuleList(torch.nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.last[expert](self.gate(self.first[expert](x)))


@pytest.mark.parametrize("every", [2, 7])
def test_backwards_through_chosen_experts(every: int) -> None:
    """Backwards count whichever experts they reach, once two samples have shown what is always reached."""
    torch.manual_seed(0)
    model = Routed()
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=every) as exporter:
        for expert in torch.randint(0, 4, (60,)).tolist():
            optimizer.zero_grad()
            model(batch(), expert).square().mean().backward()
            optimizer.step()
        missed = 60 - (value(exporter, "torch_train_backward_passes_total") or 0)
        assert 0 <= missed < every
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 60
        assert value(exporter, "torch_train_skipped_steps_total") == 0


class Experts(torch.nn.Module):
    """Four experts, of which each forward uses one, below two nested re-entrant checkpoints or none."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert, hidden = self.experts[int(torch.randint(4, ()))], self.first(x)
        if not self.reentrant:
            return self.last(expert(hidden).tanh())
        return self.last(checkpoint(lambda h: checkpoint(expert, h.tanh(), use_reentrant=True), hidden, use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_with_two_optimizers(reentrant: bool, every: int) -> None:
    """Experts chosen at random in a module below the root, and nested checkpoints: each norm is that of its optimizer's step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Experts(reentrant=reentrant))
    parts = {"a": [model[0].first, *model[0].experts[:2]], "b": [*model[0].experts[2:], model[0].last]}
    optimizers = {name: torch.optim.SGD(torch.nn.ModuleList(part).parameters(), lr=0.02) for name, part in parts.items()}
    truth: dict[tuple[str, float | None], float] = {}
    shown = dict.fromkeys(parts, 0)
    with start_exporter(model, port=None, every=every, optimizers=optimizers) as exporter:
        for step in range(1, 31):
            model.zero_grad()
            model[0](batch()).square().mean().backward()
            for name, part in parts.items():
                gradients = [p.grad.double() for module in part for p in module.parameters() if p.grad is not None]
                truth[name, step] = norm(gradients)
                optimizers[name].step()
            for name in parts:
                if (whole := value(exporter, "torch_grad_global_norm", optimizer=name)) is not None:
                    at = value(exporter, "torch_grad_sample_step", optimizer=name)
                    assert whole == pytest.approx(truth[name, at], rel=1e-5)
                    shown[name] += at == step
        assert min(shown.values()) >= 28 // every
        assert errors(exporter) == {}
