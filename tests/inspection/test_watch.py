"""Watch: the gradients of single tensors, against copies that a hook of the test's own is given; and their clipping."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.inspection.test_activations import NoRead
from tests.matrix.compiled import EAGER, compilations, dynamo
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value, values
from torch_grad_exporter import Exporter, start_exporter


def watching(model: nn.Module, **options: object) -> Exporter:
    """An exporter of every round."""
    return start_exporter(model, None, **{"every": 1, **options})


def of(exporter: Exporter, metric: str, name: str, **labels: str) -> float | None:
    """One series of a name."""
    return values(exporter).get((metric, tuple(sorted({"name": name, **labels}.items()))))


def shown(exporter: Exporter, name: str) -> dict[str, float | None]:
    """What the scrape has of a name."""
    found = {part: of(exporter, f"torch_watch_grad_{part}", name) for part in ("norm", "zero_ratio")}
    nonfinite = "torch_watch_grad_nonfinite_elements_total"
    return found | {kind: of(exporter, nonfinite, name, kind=kind) for kind in ("nan", "inf")}


def test_norm_zeros_and_counts_are_those_of_the_gradient() -> None:
    """Against a copy of the gradient in float64: norm to 1e-6, share and counts exactly; a name used twice adds up."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer, seen = sgd(model), []
    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            seen.clear()
            hidden = exporter.watch("hidden", model.first(batch()).relu())
            again = exporter.watch("hidden", hidden * 2)
            for one in (hidden, again):
                one.register_hook(lambda g: seen.append(g.double().clone()))
            model(batch()).square().mean().backward()  # the root's forward, after what was watched
            optimizer.step()
        assert shown(exporter, "hidden")["norm"] is None  # there was no backward of them
        for planted in (0.0, math.nan, math.inf):
            optimizer.zero_grad()
            seen.clear()
            loss = model(batch()).square().mean()
            hidden = exporter.watch("hidden", model.first(batch()))
            hidden.register_hook(lambda g: seen.append(g.double().clone()))
            factor = torch.ones(5, 8)
            factor[0, :3], factor[1, 0] = 0.0, planted
            again = exporter.watch("hidden", hidden * factor)
            again.register_hook(lambda g: seen.append(g.double().clone()))
            (again.nan_to_num(0, 0, 0).square().mean() + loss).backward()
            optimizer.step()
            if planted == 0.0:
                exporter._training.capture._parts.rounds.training_over()
                flat = torch.cat([one.reshape(-1) for one in seen])
                found = shown(exporter, "hidden")
                assert found["norm"] == pytest.approx(float(flat.norm()), rel=1e-6)
                assert found["zero_ratio"] == float((flat == 0).sum()) / flat.numel()
                assert found["nan"] == found["inf"] == 0
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.nan_to_num_(0, 0, 0)
        assert errors(exporter) == {}


def test_elements_that_are_not_finite_are_counted() -> None:
    """Two NaN and one infinite element in each of three sampled gradients."""
    model = Perceptron()
    optimizer = sgd(model, 0.0)
    planted = torch.zeros(5, 8)
    planted[0, :2], planted[1, 0] = math.nan, math.inf

    class Plants(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + planted

    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            x = batch()
            loss = model(x).square().mean()
            (Plants.apply(exporter.watch("x", model.first(x))).square().mean() + loss).backward()
            model.first.weight.grad.nan_to_num_(0, 0, 0)  # type: ignore[union-attr]
            model.first.bias.grad.nan_to_num_(0, 0, 0)  # type: ignore[union-attr]
            optimizer.step()
        exporter._training.capture.close()
        assert shown(exporter, "x")["nan"] == 6
        assert shown(exporter, "x")["inf"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("every", [1, 1000])
def test_a_gradient_is_clipped_in_every_backward(every: int, dtype: torch.dtype) -> None:
    """To max_norm, sampled or not, as by hand; one below it keeps every bit; the counts are those of the loop."""
    torch.manual_seed(0)
    model = Perceptron().to(dtype)
    optimizer = sgd(model, 0.0)
    clipped = 0
    with watching(model, every=every) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            x = batch().to(dtype)
            hidden = model.first(x).relu()
            size = 100.0 if step % 2 else 1e-3
            (expected,) = torch.autograd.grad(model.second(hidden).square().sum() * size, hidden, retain_graph=True)
            limit = 1.0
            got: list[torch.Tensor] = []
            loss = model(x).sum() * 0
            through = exporter.watch("hidden", hidden, max_norm=limit)
            through.register_hook(lambda g, got=got: got.append(g.clone()))
            (model.second(through).square().sum() * size + loss).backward()
            optimizer.step()
            norm = float(expected.double().norm())
            clipped += norm > limit
            if norm > limit:
                torch.testing.assert_close(got[0], expected * (limit / norm))
            else:
                assert torch.equal(got[0], expected)
        exporter._training.capture.close()
        assert 0 < clipped < 6
        if every == 1:
            assert of(exporter, "torch_watch_clipped_total", "hidden") == clipped
            assert shown(exporter, "hidden")["norm"] == pytest.approx(norm, rel=1e-5)  # as it was before it was clipped
        assert errors(exporter) == {}


def test_a_norm_that_is_not_finite_is_left_alone() -> None:
    """The gradient passes as it is, NaN and all."""
    x = torch.ones(3, requires_grad=True)
    with watching(Perceptron()) as exporter:
        (exporter.watch("x", x, max_norm=1.0) * torch.tensor([math.nan, 1.0, 1e30])).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.nan_to_num(7.0), torch.tensor([7.0, 1.0, 1e30]))


def test_a_leaf_keeps_no_hook() -> None:
    """A parameter that is watched and clipped in a hundred steps is clipped in each, and has no hook in the end."""
    parameter = nn.Parameter(torch.full((4,), 3.0))
    model = nn.ParameterList([parameter])
    with watching(model) as exporter:
        for _ in range(100):
            parameter.grad = None
            exporter.watch("w", parameter, max_norm=0.5).square().sum().backward()
            assert float(parameter.grad.norm()) == pytest.approx(0.5)  # type: ignore[union-attr]
        assert not parameter._backward_hooks
        assert errors(exporter) == {}


def test_the_limit_is_that_of_the_unscaled_gradient() -> None:
    """Under a scaler at 1024 the scaled gradient comes to 1024 times max_norm, and what is shown is the unscaled norm."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    got: list[torch.Tensor] = []
    with watching(model, grad_scaler=scaler) as exporter:
        x = batch()
        loss = model(x).sum() * 0
        raw = model.first(x)
        (plain,) = torch.autograd.grad(raw.square().sum(), raw, retain_graph=True)
        hidden = exporter.watch("hidden", raw, max_norm=0.25)
        hidden.register_hook(lambda g: got.append(g.clone()))
        scaler.scale(hidden.square().sum() + loss).backward()
        scaler.step(optimizer)
        scaler.update()
        exporter._training.capture.close()
        assert float(got[0].norm()) == pytest.approx(1024 * 0.25, rel=1e-5)
        assert shown(exporter, "hidden")["norm"] == pytest.approx(float(plain.norm()), rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant: bool) -> None:
    """The gradient is measured once, and clipped, whichever forward has made its graph."""
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
            exporter._training.capture.close()
            results.append((shown(exporter, "hidden"), of(exporter, "torch_watch_clipped_total", "hidden"), model.first.weight))
            assert errors(exporter) == {}
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])


def test_what_needs_no_gradient_is_returned_unchanged() -> None:
    """The same object comes back: without a gradient, without grad mode, and after `close()`; and nothing is shown."""
    model = Perceptron()
    with watching(model) as exporter:
        plain, trained = torch.ones(3), torch.ones(3, requires_grad=True) * 2
        assert exporter.watch("plain", plain, max_norm=1.0) is plain
        with torch.no_grad():
            assert exporter.watch("trained", trained, max_norm=1.0) is trained
        assert not [name for name, _ in values(exporter) if "watch_" in name]
    assert exporter.watch("late", trained, max_norm=1.0) is trained


def test_hooks_that_outlive_the_exporter_clip_nothing() -> None:
    """A graph that was made before `close()` and goes backward after it."""
    x = torch.ones(4, requires_grad=True)
    with watching(Perceptron()) as exporter:
        loss = exporter.watch("x", x, max_norm=0.1).sum()
    loss.backward()
    assert torch.equal(x.grad, torch.ones(4))  # type: ignore[arg-type]


def test_beyond_a_hundred_names_all_others_share_one() -> None:
    """Of 130 names a hundred are shown, thirty together, and their number is told."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(2):
            optimizer.zero_grad()
            hidden = model(batch())
            sum(exporter.watch(f"name {i}", hidden * 1.0, max_norm=1e9).square().mean() for i in range(130)).backward()  # type: ignore[union-attr]
            optimizer.step()
        exporter._training.capture.close()
        assert value(exporter, "torch_watch_names_folded") == 30
        names = {dict(labels)["name"] for name, labels in values(exporter) if name == "torch_watch_grad_norm"}
        assert len(names) == 101
        norm, together = (of(exporter, "torch_watch_grad_norm", name) for name in ("name 7", "(folded)"))
        assert together == pytest.approx(math.sqrt(30) * (norm or 0.0), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((3, torch.ones(1)), TypeError, r"name=3\): expected a name"),
        (("", torch.ones(1)), ValueError, "1 to 200 characters"),
        (("x" * 201, torch.ones(1)), ValueError, "1 to 200 characters"),
        (("x", 3.0), TypeError, "tensor=float"),
        (("x", torch.ones(1), 0), ValueError, "max_norm=0"),
        (("x", torch.ones(1), -1.0), ValueError, "max_norm=-1.0"),
        (("x", torch.ones(1), math.nan), ValueError, "max_norm=nan"),
        (("x", torch.ones(1), math.inf), ValueError, "max_norm=inf"),
        (("x", torch.ones(1), "1"), TypeError, "max_norm='1'"),
        (("x", torch.ones(1), True), TypeError, "max_norm=True"),
    ],
)
def test_wrong_arguments_raise(arguments: tuple[Any, ...], kind: type[Exception], said: str) -> None:
    """They name the argument and its value."""
    with watching(Perceptron()) as exporter, pytest.raises(kind, match=said):
        exporter.watch(*arguments)


def test_nothing_is_read_while_it_clips() -> None:
    """A sampled and clipped backward under a mode that refuses reads."""
    model = Perceptron()
    with watching(model) as exporter:
        for _ in range(2):
            with NoRead():
                loss = exporter.watch("y", model(batch()), max_norm=0.1).square().mean()
                loss.backward()
            sgd(model).step()
        assert errors(exporter) == {}


def test_a_clipping_that_fails_leaves_the_gradient_and_is_counted() -> None:
    """A sparse gradient has no norm here: it passes, and after ten failures it is left alone without a word."""
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
    """Within a compiled function it is traced away: one graph, no break, no second compilation; outside of one it works."""
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
            found = compilations()
            assert (found["graphs"], found["breaks"], found["recompilations"]) == (1, 0, 0)
            exporter._training.capture.close()
            assert shown(exporter, "inner")["norm"] is None
            assert shown(exporter, "outer")["norm"] is not None
            assert errors(exporter) == {}


def test_an_unsampled_call_costs_next_to_nothing() -> None:
    """Without `max_norm` in a round that is not sampled: the tensor itself, no hook, in 20 microseconds on a busy machine."""
    model = Perceptron()
    with watching(model, every=4096) as exporter:
        tensor = model(batch())
        watch = exporter.watch
        least = math.inf
        for _ in range(200):
            start = time.perf_counter()
            found = watch("x", tensor)
            least = min(least, time.perf_counter() - start)
        assert found is tensor
        assert least < 20e-6
