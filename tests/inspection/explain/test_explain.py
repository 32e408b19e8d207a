"""What `explain` says beyond the verdict, and of what it cannot explain."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.inspection.explain.planted import Two, X, Y, classified
from tests.support.scrape import errors
from torch_grad_exporter import explain, start_exporter
from torch_grad_exporter.inspection.explain import watch


def notes(found: object, begin: str) -> set[str]:
    """The notes of the parameters whose names begin so."""
    return {row.note for row in found.rows if row.parameter.startswith(begin)}


def test_a_dead_relu_is_the_origin_of_zeros() -> None:
    """The parameters below get zeros, which are said to come from the ReLU, in its module."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    nn.init.constant_(model[0].bias, -100.0)
    found = explain(classified(model), model)
    assert notes(found, "0.") == {"gradient is zero: from the backward of Relu on"}
    assert {row.where.module for row in found.rows if row.parameter.startswith("0.")} == {"1"}
    assert found["2.bias"].note == ""
    assert found["2.weight"].note == "gradient is zero: from the backward of Addmm on"  # its inputs are all zero
    assert any("first bad gradient in the backward is zero" in note for note in found.notes)


def test_a_weight_of_zeros_above_is_the_origin_of_zeros() -> None:
    """A last layer that begins at zero gives the layers before it zeros, and itself a gradient."""
    model = Two()
    nn.init.zeros_(model.head.weight)
    found = explain(classified(model), model)
    assert notes(found, "encoder") == {"gradient is zero: from the backward of Addmm on"}
    assert {row.where.module for row in found.rows if row.where} == {"head"}
    assert notes(found, "head") == {""}


def test_a_gradient_that_is_not_finite_has_its_first_node() -> None:
    """The square root of zero in one branch gives NaN to what is below it, and to nothing else."""
    model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False)})
    found = explain(lambda: (model["a"](X) * 0).norm(dim=1).square().sum().sqrt() + model["b"](X).sum(), model)
    assert "not finite: from the backward of Sqrt on" in found["a.weight"].note
    assert found["b.weight"].note == ""
    assert found["a.weight"].where.code.startswith("found = explain")


def test_a_loss_that_is_not_finite_is_told() -> None:
    """A loss of NaN is said to be so."""
    model = nn.Linear(4, 1)
    assert "the loss is nan" in explain(lambda: model(X).sum() * float("nan"), model).notes


def test_two_models_have_their_names() -> None:
    """With a mapping each name begins with that of the model, and a generator that a GAN's step cuts off is told."""
    models = {"g": nn.Linear(4, 4), "d": nn.Sequential(nn.Linear(4, 1))}
    found = explain(lambda: models["d"](models["g"](X).detach()).sum(), models)
    assert [(row.parameter, row.layer, str(row.verdict)) for row in found.rows] == [
        ("g.weight", "g.weight", "detached_at"),
        ("g.bias", "g.bias", "detached_at"),
        ("d.0.weight", "d.0", "ok"),
        ("d.0.bias", "d.0", "ok"),
    ]


def test_networks_that_are_trained_in_turn_within_one_step() -> None:
    """A step with two backwards, in each of which the other network is frozen, leaves both `ok`."""
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    steps = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)

    def step() -> None:
        d.requires_grad_(True)
        d(g(X).detach()).sum().backward()
        steps[1].step()
        d.requires_grad_(False)
        d(g(X)).sum().backward()
        steps[0].step()

    found = explain(step, {"g": g, "d": d}, steps)
    assert {str(row.verdict) for row in found.rows} == {"ok"}
    assert d.weight.requires_grad


def test_what_an_optimizer_writes_is_no_cut() -> None:
    """In a function with two steps a parameter that is not used stays `not_in_graph`, whatever is written into others."""
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    for parameter in model["spare"].parameters():
        parameter.grad = torch.ones_like(parameter)

    def step() -> None:
        for _ in range(2):
            classified(model["used"])().backward()
            optimizer.step()
            with torch.no_grad():
                model["used"].weight.add_(model["spare"].weight * 0.1)

    found = explain(step, model, optimizer)
    assert [str(row.verdict) for row in found.rows] == ["ok", "ok", "not_in_graph", "not_in_graph"]
    assert {row.note for row in found.rows[2:]} == {"not used in the forward"}


def test_tied_weights_are_one_row_with_all_names() -> None:
    """A parameter under two names has one row, which tells the other name."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    found = explain(lambda: model(Y).sum(), model)
    assert [(row.parameter, row.note) for row in found.rows] == [("0.weight", "also 1.weight")]


def test_an_optimizer_of_a_model_that_was_replaced_is_told() -> None:
    """Each parameter is without an optimizer, and the optimizer is said to own strangers."""
    optimizer, model = torch.optim.SGD(nn.Linear(4, 3).parameters(), 0.1), nn.Linear(4, 3)
    found = explain(classified(model), model, optimizer)
    assert {str(row.verdict) for row in found.rows} == {"optimizer_missing"}
    assert "SGD owns 2 parameters that are in no model here; was the model replaced or copied after it?" in found.notes


def test_master_weights_are_the_parameters_own() -> None:
    """An optimizer of copies in another type of all parameters owns them."""
    model = nn.Linear(4, 3).bfloat16()
    optimizer = torch.optim.SGD([p.detach().float().requires_grad_() for p in model.parameters()], 0.1)
    found = explain(lambda: model(X.bfloat16()).float().sum(), model, optimizer)
    assert {str(row.verdict) for row in found.rows} == {"ok"}
    assert found.notes == ()


def test_compiled_modules_run_as_they_are_written() -> None:
    """The place within a compiled module is found, and names are without what the compiler adds."""
    plain = Two(lambda h: h.detach())
    model = torch.compile(plain, backend="eager")
    found = explain(lambda: nn.functional.cross_entropy(model(X), Y), model)
    assert {row.parameter: str(row.verdict) for row in found.rows} == {
        "encoder.weight": "detached_at", "encoder.bias": "detached_at", "head.weight": "ok", "head.bias": "ok",
    }  # fmt: skip
    assert {row.where.module for row in found.rows if row.where} == {"Two"}


def test_a_data_parallel_wrapper_and_the_step_after_it() -> None:
    """Names are without `module.`, no all-reduce is called, and the next real step of the wrapper works."""
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
    finally:
        dist.destroy_process_group()


def done(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The bucket as it is."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_loss_that_a_scaler_has_scaled() -> None:
    """Under a gradient scaler, with a step of its own, everything is `ok`."""
    model = Two()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step() -> None:
        with torch.autocast("cpu"):
            loss = classified(model)()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert {(str(row.verdict), row.note) for row in explain(step, model, optimizer).rows} == {("ok", "")}


def test_thousands_of_cuts_are_bounded() -> None:
    """A loop that detaches 6,000 times keeps 4,096 places and one for the rest, and still tells the line of the last."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "last": nn.Linear(4, 4)})

    def step() -> torch.Tensor:
        for _ in range(6000):
            model["a"].weight.detach()
        last = model["last"](X).detach()
        return (model["b"](X) + last).sum()

    found = explain(step, model)
    assert [str(row.verdict) for row in found.rows] == ["not_in_graph"] * 2 + ["ok"] * 2 + ["detached_at"] * 2
    assert found["last.weight"].where.code == 'last = model["last"](X).detach()'


def test_an_exporter_on_the_model_goes_on() -> None:
    """With an exporter that samples each round nothing of it fails, and the training ends in the same bits as without `explain`."""

    def run(*, asked: bool) -> dict[str, torch.Tensor]:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = classified(model)

        def whole() -> None:
            optimizer.zero_grad()
            step().backward()
            optimizer.step()

        with start_exporter(model, port=None, every=1) as exporter:
            for _ in range(5):
                whole()
                if asked:
                    explain(step, model, optimizer)
                    explain(whole, model)
            failed = {key: value for key, value in errors(exporter).items() if value}
        assert failed == {}
        return model.state_dict()

    one, other = run(asked=False), run(asked=True)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_failures_of_its_own_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where watching fails the function runs on, and what it would have told is unknown, with the failure in a note."""
    monkeypatch.setattr(watch, "leaves", lambda value: 1 / 0)
    model = Two(lambda h: h.detach())
    found = explain(classified(model), model)
    assert {str(row.verdict) for row in found.rows if row.parameter.startswith("encoder")} == {"unknown"}
    assert {str(row.verdict) for row in found.rows if row.parameter.startswith("head")} == {"ok"}
    assert "ZeroDivisionError" in found.notes[-1]


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(3)


def sharded() -> nn.Module:
    """What FSDP2 makes of a module, as far as it shows."""
    model = nn.Linear(2, 2)
    model._is_fsdp_managed_module = True
    return model


WRONG = {
    "no callable": (lambda: (7, Two()), TypeError, "function=7: expected a callable that returns the loss"),
    "returns nothing": (lambda: (lambda: None, Two()), ValueError, "returned nothing and ran no backward"),
    "returns a number": (lambda: (lambda: 1.0, Two()), TypeError, "it returned float and ran no backward"),
    "returns several": (lambda: (lambda: Two()(X), Two()), ValueError, r"the loss has shape \(5, 3\)"),
    "a loss of several": (lambda: (Two()(X), Two()), ValueError, r"the loss has shape \(5, 3\)"),
    "a loss without a graph": (lambda: (torch.zeros(()), Two()), ValueError, "requires no gradient"),
    "a freed graph": (lambda: (loss_of(one := Two()), one), ValueError, "the graph of the loss is freed"),
    "no model": (lambda: (lambda: None, 7), TypeError, "model=int"),
    "no parameters": (lambda: (lambda: None, nn.ReLU()), ValueError, "it has no parameters"),
    "lazy": (lambda: (lambda: None, Lazy()), ValueError, "linear.weight is not initialised"),
    "sharded": (lambda: (lambda: None, sharded()), ValueError, "FSDP has sharded it"),
    "no optimizer": (lambda: (lambda: None, Two(), [7]), TypeError, r"optimizers\['int'\]=int: expected a torch.optim.Optimizer"),
}


def loss_of(model: nn.Module) -> torch.Tensor:
    """A loss whose backward has run."""
    loss = model(X).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_say_what_to_change(name: str) -> None:
    """Each raises an error that names the argument and the fix."""
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        explain(*make())


def test_what_the_backward_raises_passes() -> None:
    """A value that was changed in place raises PyTorch's own error."""
    model = nn.Linear(4, 4)

    def step() -> torch.Tensor:
        h = model(X).exp()
        loss = h.sum()
        h += 1
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        explain(step, model)
