"""Trainings from public reports that once failed, or showed a wrong number. The reference is a float64 record of the loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.models import batch, sgd
from tests.support.record import norm
from tests.support.scrape import errors, value
from tests.support.tools import eventually
from torch_grad_exporter import explain, record, start_exporter

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
