"""Watched tensors: their gradients against copies kept by hooks of the test, and their clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.inspection.support import EachOperation, refuse_reads
from tests.matrix.compiled import EAGER, compilations, dynamo
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value, values
from torch_grad_exporter import Exporter, start_exporter


def watching(model: nn.Module, **options: object) -> Exporter:
    """Start an exporter of every round."""
    return start_exporter(model, None, **{"every": 1, **options})


def of(exporter: Exporter, metric: str, name: str, **labels: str) -> float | None:
    """Return one series of a name."""
    return values(exporter).get((metric, tuple(sorted({"name": name, **labels}.items()))))


def shown(exporter: Exporter, name: str) -> dict[str, float | None]:
    """Return what the scrape has of a name."""
    sizes = {part: of(exporter, f"torch_watch_grad_{part}", name) for part in ("norm", "zero_ratio")}
    nonfinite = "torch_watch_grad_nonfinite_elements_total"
    return sizes | {kind: of(exporter, nonfinite, name, kind=kind) for kind in ("nan", "inf")}


def test_numbers_are_those_of_the_gradient() -> None:
    """Norm and share of zeros are those of float64, and a name that is used twice adds up."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = sgd(model)
    factor = torch.ones(5, 8)
    factor[0, :3] = 0.0
    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            seen: list[torch.Tensor] = []
            loss = model(batch()).square().mean()
            hidden = exporter.watch("hidden", model.first(batch()))
            again = exporter.watch("hidden", hidden * factor)
            exporter.watch("unused", hidden * 2)
            for tensor in (hidden, again):
                tensor.register_hook(lambda g, seen=seen: seen.append(g.double().reshape(-1)))
            (again.square().mean() + loss).backward()
            optimizer.step()
        exporter.close()
        gradients = torch.cat(seen)
        shares = {"zero_ratio": float((gradients == 0).sum()) / gradients.numel(), "nan": 0.0, "inf": 0.0}
        assert shown(exporter, "hidden") == {"norm": pytest.approx(float(gradients.norm()), rel=1e-6), **shares}
        assert shown(exporter, "unused")["norm"] is None
        assert errors(exporter) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "dtype", "scale"), [(1, torch.float32, 1.0), (1000, torch.float64, 1.0), (1, torch.float32, 1024.0)]
)
def test_a_gradient_is_clipped_in_every_backward(every: int, dtype: torch.dtype, scale: float) -> None:
    """Gradients above max_norm, without the loss scale, are scaled to it without reading the device; others keep every bit."""
    torch.manual_seed(0)
    model = Perceptron().to(dtype)
    optimizer = sgd(model, 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    clipped = 0
    with watching(model, every=every, grad_scaler=scaler) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            x = batch().to(dtype)
            hidden = model.first(x).relu()
            size = 100.0 if step % 2 else 1e-3
            (expected,) = torch.autograd.grad(model.second(hidden).square().sum() * size, hidden, retain_graph=True)
            got: list[torch.Tensor] = []
            through = exporter.watch("hidden", hidden, max_norm=1.0)
            through.register_hook(lambda g, got=got: got.append(g / scale))
            loss = scaler.scale(model.second(through).square().sum() * size + model(x).sum() * 0)
            with EachOperation(refuse_reads):
                loss.backward()
            scaler.step(optimizer)
            scaler.update(scale if scaler.is_enabled() else None)
            norm = float(expected.double().norm())
            clipped += norm > 1.0
            if norm > 1.0:
                torch.testing.assert_close(got[0], expected / norm)
            else:
                assert torch.equal(got[0], expected)
        exporter.close()
        assert 0 < clipped < 6
        if every == 1:
            assert of(exporter, "torch_watch_clipped_total", "hidden") == clipped
            assert shown(exporter, "hidden")["norm"] == pytest.approx(norm, rel=1e-5)  # as it was before it was clipped
        assert errors(exporter) == {}


def test_a_gradient_that_is_not_finite() -> None:
    """A gradient whose norm is not finite passes unclipped, and its NaN and infinite elements are counted."""
    model = Perceptron()
    with watching(model) as exporter:
        for _ in range(3):
            x = torch.ones(4, requires_grad=True)
            through = exporter.watch("x", x, max_norm=1.0)
            ((through * torch.tensor([math.nan, math.inf, 1.0, 1e30])).sum() + model(batch()).sum()).backward()
            sgd(model, 0.0).step()
            assert x.grad is not None
            assert torch.equal(x.grad.nan_to_num(7.0, 8.0), torch.tensor([7.0, 8.0, 1.0, 1e30]))
        exporter.close()
        assert [shown(exporter, "x")[kind] for kind in ("nan", "inf")] == [3, 3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant: bool) -> None:
    """In a checkpoint the gradient is measured once and clipped."""
    torch.manual_seed(0)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Perceptron()
        optimizer = sgd(model)
        with watching(model) as exporter:

            def part(x: torch.Tensor, model: Perceptron = model, exporter: Exporter = exporter) -> torch.Tensor:
                return model.second(exporter.watch("hidden", model.first(x).relu(), max_norm=1e-3))

            for _ in range(2):
                optimizer.zero_grad()
                x = batch().requires_grad_()
                loss = model(x).square().mean()
                out = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant) if checkpointed else part(x)
                (out.square().mean() + loss).backward()
                optimizer.step()
            exporter.close()
            results.append((shown(exporter, "hidden"), of(exporter, "torch_watch_clipped_total", "hidden"), model.first.weight))
            assert errors(exporter) == {}
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])


def test_what_needs_no_gradient_is_returned_unchanged() -> None:
    """Tensors without a gradient are returned unchanged, and nothing is clipped after `close()`."""
    with watching(Perceptron()) as exporter:
        plain = torch.ones(3)
        assert exporter.watch("plain", plain, max_norm=1.0) is plain
        assert not [name for name, _ in values(exporter) if "watch_" in name]
        before = exporter.watch("before", x := torch.ones(4, requires_grad=True), max_norm=0.1).sum()
    assert exporter.watch("late", x, max_norm=1.0) is x
    before.backward()
    assert torch.equal(x.grad, torch.ones(4))  # type: ignore[arg-type]


def test_more_than_a_hundred_names_are_folded() -> None:
    """Of 130 names a hundred are shown and thirty folded into one, which is counted."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(2):
            optimizer.zero_grad()
            hidden = model(batch())
            sum(exporter.watch(f"name {i}", hidden * 1.0, max_norm=1e9).square().mean() for i in range(130)).backward()  # type: ignore[union-attr]
            optimizer.step()
        exporter.close()
        assert value(exporter, "torch_watch_names_folded") == 30
        names = {dict(labels)["name"] for name, labels in values(exporter) if name == "torch_watch_grad_norm"}
        assert len(names) == 101
        norm, together = (of(exporter, "torch_watch_grad_norm", name) for name in ("name 7", "(folded)"))
        assert together == pytest.approx(math.sqrt(30) * (norm or 0.0), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((3, torch.ones(1)), TypeError, r"name=3\): expected a name"),
        (("x", 3.0), TypeError, "tensor=float"),
        (("x", torch.ones(1), 0), ValueError, "max_norm=0"),
    ],
)
def test_wrong_arguments_raise(arguments: tuple[Any, ...], kind: type[Exception], said: str) -> None:
    """The error names the argument and its value."""
    with watching(Perceptron()) as exporter, pytest.raises(kind, match=said):
        exporter.watch(*arguments)


def test_clipping_that_fails_leaves_the_gradient() -> None:
    """A sparse gradient passes unclipped; the failure is counted ten times and then no longer."""
    weight = torch.ones(6, 2, requires_grad=True)
    with watching(Perceptron()) as exporter:
        for _ in range(12):
            weight.grad = None
            watched = exporter.watch("w", weight, max_norm=1e-3)
            nn.functional.embedding(torch.tensor([1, 2]), watched, sparse=True).sum().backward()
            assert weight.grad is not None
            assert float(weight.grad.to_dense().sum()) == 4
        assert errors(exporter) == {"watch": 10}


def test_compiled_code_breaks_no_graph() -> None:
    """In a compiled function `watch` adds no graph break and no compilation; outside of it works."""
    with dynamo(), torch._dynamo.config.patch(error_on_recompile=True):
        model = Perceptron()
        optimizer = sgd(model)
        with watching(model, every=2) as exporter:

            @torch.compile(backend=EAGER, fullgraph=True)
            def inner(x: torch.Tensor) -> torch.Tensor:
                return exporter.watch("inner", x * 2, max_norm=1e-6).square().mean()

            for _ in range(6):
                optimizer.zero_grad()
                inner(exporter.watch("outer", model(batch()), max_norm=1e9)).backward()
                optimizer.step()
            counts = compilations()
            assert (counts["graphs"], counts["breaks"], counts["recompilations"]) == (1, 0, 0)
            exporter.close()
            assert shown(exporter, "inner")["norm"] is None
            assert shown(exporter, "outer")["norm"] is not None
            assert errors(exporter) == {}
