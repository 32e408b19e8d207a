"""What `explain` reports besides the verdict, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.inspection.explain.planted import Two, X, Y, classified
from tests.support.torch_versions import fully_shard
from torch_grad_exporter import explain


def notes(found: object, begin: str) -> set[str]:
    """Return the notes of the parameters whose names begin like this."""
    return {row.note for row in found.rows if row.parameter.startswith(begin)}


def test_a_dead_relu_is_the_origin_of_zeros() -> None:
    """Zero gradients below a dead ReLU are said to come from the ReLU, in its module."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    nn.init.constant_(model[0].bias, -100.0)
    found = explain(classified(model), model)
    assert notes(found, "0.") == {"gradient is zero: from the backward of Relu on"}
    assert {row.where.module for row in found.rows if row.parameter.startswith("0.")} == {"1"}
    assert found["2.bias"].note == ""
    assert found["2.weight"].note == "gradient is zero: from the backward of Addmm on"  # its inputs are all zero
    assert any("first bad gradient in the backward is zero" in note for note in found.notes)


def test_a_gradient_that_is_not_finite() -> None:
    """The first node whose gradient is not finite is named for the parameters below it."""
    model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False)})
    found = explain(lambda: (model["a"](X) * 0).norm(dim=1).square().sum().sqrt() + model["b"](X).sum(), model)
    assert "not finite: from the backward of Sqrt on" in found["a.weight"].note
    assert found["b.weight"].note == ""
    assert found["a.weight"].where.code.startswith("found = explain")


def test_two_models_have_their_names() -> None:
    """With a mapping each name begins with that of its model, and a generator that is cut off is found."""
    models = {"g": nn.Linear(4, 4), "d": nn.Sequential(nn.Linear(4, 1))}
    found = explain(lambda: models["d"](models["g"](X).detach()).sum(), models)
    assert [(row.parameter, row.layer, str(row.verdict)) for row in found.rows] == [
        ("g.weight", "g.weight", "detached_at"),
        ("g.bias", "g.bias", "detached_at"),
        ("d.0.weight", "d.0", "ok"),
        ("d.0.bias", "d.0", "ok"),
    ]


def test_tied_weights_are_one_row_with_all_names() -> None:
    """A parameter under two names has one row with both names."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    found = explain(lambda: model(Y).sum(), model)
    assert [(row.parameter, row.note) for row in found.rows] == [("0.weight", "also 1.weight")]


def test_an_optimizer_of_a_replaced_model() -> None:
    """An optimizer of another model is noted, and each parameter is without an optimizer."""
    optimizer, model = torch.optim.SGD(nn.Linear(4, 3).parameters(), 0.1), nn.Linear(4, 3)
    found = explain(classified(model), model, optimizer)
    assert {str(row.verdict) for row in found.rows} == {"optimizer_missing"}
    assert "SGD owns 2 parameters that are in no model here; was the model replaced or copied after it?" in found.notes


def test_wrappers_for_ranks() -> None:
    """Under DDP names are those of the model and nothing is reduced; a model sharded by FSDP is refused."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = Two()
        model = nn.parallel.DistributedDataParallel(plain)
        calls: list[int] = []
        model.register_comm_hook(None, lambda _state, bucket: calls.append(1) or done(bucket))
        found = explain(classified(model), model)
        assert [(row.parameter, str(row.verdict)) for row in found.rows] == [(n, "ok") for n, _ in plain.named_parameters()]
        assert not calls
        classified(model)().backward()
        assert calls == [1]
        with pytest.raises(ValueError, match="FSDP has sharded it"):
            explain(lambda: None, fully_shard(Two()))
    finally:
        dist.destroy_process_group()


def done(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket as it is."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Hostile(list[torch.Tensor]):
    """A list that only PyTorch can read."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise ZeroDivisionError

    def __getitem__(self, index: object) -> torch.Tensor:
        raise ZeroDivisionError


def test_a_failure_of_its_own_harms_nothing() -> None:
    """If watching fails the function runs on, the verdict is unknown, and a note has the failure."""
    model = Two(lambda h: torch.cat(Hostile([h.detach()])))
    found = explain(classified(model), model)
    assert {str(row.verdict) for row in found.rows if row.parameter.startswith("encoder")} == {"unknown"}
    assert {str(row.verdict) for row in found.rows if row.parameter.startswith("head")} == {"ok"}
    assert "ZeroDivisionError" in found.notes[-1]


WRONG = {
    "no callable": (lambda: (7, Two()), TypeError, "function=7: expected a callable that returns the loss"),
    "returns nothing": (lambda: (lambda: None, Two()), ValueError, "returned nothing and ran no backward"),
    "returns several": (lambda: (lambda: Two()(X), Two()), ValueError, r"the loss has shape \(5, 3\)"),
    "no model": (lambda: (lambda: None, 7), TypeError, "model=int"),
    "lazy": (lambda: (lambda: None, nn.Sequential(nn.LazyLinear(3))), ValueError, "0.weight is not initialised"),
    "no optimizer": (lambda: (lambda: None, Two(), [7]), TypeError, r"optimizers\['int'\]=int: expected a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_say_what_to_change(name: str) -> None:
    """The error names the argument and the fix."""
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        explain(*make())
