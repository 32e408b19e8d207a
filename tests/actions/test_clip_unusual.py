"""`start_exporter(clip=)` where something is unusual: optimizers around others, candidates that fail, steps that raise."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.actions import references
from tests.actions.test_clip_at_steps import Loop, Training, plain, scaled_and_fused, start
from tests.support.models import Perceptron, batch
from tests.support.scrape import errors, value
from torch_grad_exporter.actions import AGC, AutoClip, LayerScale, MaxNorm, MaxValue, Plateau, SkipAbove, SkipNonFinite, ZClip

# Optimizers around others


class Around(torch.optim.Optimizer):
    """An optimizer whose step calls those of others, as Lookahead does. `own`: parameters that it trains itself."""

    def __init__(self, *inner: torch.optim.Optimizer, own: list[torch.nn.Parameter] | None = None) -> None:
        parameters = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
        super().__init__([*parameters, *(own or [])], {})
        self.inner, self.own = inner, own or []

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as its base
        for optimizer in self.inner:
            optimizer.step(closure)
        with torch.no_grad():
            for parameter in self.own:
                assert parameter.grad is not None
                parameter.sub_(0.05 * parameter.grad)


def around(kind: str, model: Perceptron) -> Around:
    """Return an optimizer around one, around two, or around one for a part of what it trains."""
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    first, second = [*model.first.parameters()], [*model.second.parameters()]
    if kind == "all":
        return Around(sgd(model.parameters()))
    if kind == "twice":
        return Around(Around(sgd(model.parameters())))
    return Around(sgd(first), sgd(second)) if kind == "both" else Around(sgd(first), own=second)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "with_closure"), [("all", True), ("twice", False), ("both", False), ("part", False)])
def test_optimizers_around_others(kind: str, with_closure: bool) -> None:
    """The parameters of the outer optimizer are clipped together, once a step, with one memory under one name."""
    torch.manual_seed(0)
    loop = Loop()
    optimizer = around(kind, loop.model)
    twice = LayerScale({"first": 0.5, "second": 0.25})
    with start(loop.model, clip=AutoClip(25, history_size=5), dry_run=[twice]) as exporter:
        for step in range(12):
            steps: list[int] = []

            def evaluate(step: int = step, steps: list[int] = steps) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loop.backward(step)
                if not steps:
                    loop.look()
                steps.append(1)
                return loss

            if with_closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
            loop.stepped()
        state = exporter.state_dict()["clip"]
        assert [*state] == ["Around"]
        assert int(state["Around"]["memory"]["count"]) == 12
        assert int(state["Around"]["candidates"][0]["clipped_steps"]) == 12
        assert errors(exporter) == {}
    loop.agrees(references.AutoClip(25, 5))


def test_a_new_optimizer_keeps_the_memory() -> None:
    """A new optimizer each epoch goes on with the memory under the same name, though the old ones are alive."""
    torch.manual_seed(0)
    loop, kept = Loop(), []
    with start(loop.model, clip=AutoClip(25, history_size=5)) as exporter:
        for epoch in range(4):
            optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.05)
            kept.append(optimizer)
            for step in range(4):
                optimizer.zero_grad()
                loop.backward(4 * epoch + step)
                loop.look()
                optimizer.step()
                loop.stepped()
        assert [*exporter.state_dict()["clip"]] == ["SGD"]
        assert errors(exporter) == {}
    loop.agrees(references.AutoClip(25, 5))


# Policies that are only tried


class FailingCandidate(ZClip):
    """A policy that fails after it spoiled its input."""

    def decide(self, measured: Any, memory: Any, /) -> Any:  # noqa: ANN401 - as its base
        measured.norms.zero_()
        raise RuntimeError("on purpose")


@pytest.mark.slow
def test_a_candidate_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Clipping and other candidates go on, and failures of a candidate are counted separately without a critical alert."""
    torch.manual_seed(0)
    loop = Loop()
    with start(loop.model, clip=MaxNorm(0.1), dry_run=[FailingCandidate(), MaxNorm(0.1)], on_failure="raise") as exporter:
        plain(loop)
        assert errors(exporter) == {"clip_dry_run": 10}
        assert "GradientClippingFailing" not in {problem.alert for problem in exporter.problems()}
        exporter.close()
        norms = [references.whole(before) for before in loop.before]
        for name in ("candidates", "policy_steps"):
            assert value(exporter, f"torch_grad_clip_{name}_total", policy="MaxNorm(0.1)") == sum(norm > 0.1 for norm in norms)
    assert "is no longer tried) failed 10 times in a row" in caplog.text
    loop.agrees(references.MaxNorm(0.1))


# Fused optimizers that skip a step


@pytest.mark.parametrize("ended_by", ["the next step", "the end"])
def test_a_fused_step_that_raises(ended_by: str) -> None:
    """A skip holds for the step that raised, the next step is taken, and no flag is left."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def backward(factor: float) -> None:
        optimizer.zero_grad()
        (model(batch()).square().mean() * factor).backward()

    with start(model, clip=SkipAbove(1.0)) as exporter:
        backward(0.1)
        optimizer.step()
        backward(1000)
        step, inside = optimizer.state[model.first.weight].pop("step"), optimizer.state[model.first.weight]
        with pytest.raises(KeyError):
            optimizer.step()  # it does not get as far as its kernel
        inside["step"] = step
        assert float(optimizer.found_inf) == 1  # type: ignore[attr-defined]
        if ended_by == "the end":
            exporter.close()
            assert not hasattr(optimizer, "found_inf")
        for _ in range(2):
            backward(0.1)
            before = copy.deepcopy(model.state_dict())
            optimizer.step()
            assert not any(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
            assert not hasattr(optimizer, "found_inf")
        assert errors(exporter) == {}


class Twice(torch.optim.AdamW):
    """An optimizer that evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as its base
        closure()
        return super().step(closure)


def test_the_last_evaluation_decides_the_skip() -> None:
    """Of two evaluations in a step of a fused optimizer the last one decides whether it is skipped."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = Twice(model.parameters(), lr=0.01, fused=True)
    with start(model, clip=SkipAbove(1.0)) as exporter:
        for factors in ((1000, 0.1), (0.1, 1000)):
            rest = list(factors)

            def evaluate(rest: list[float] = rest) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch()).square().mean() * rest.pop(0)
                loss.backward()
                return loss

            before = copy.deepcopy(model.state_dict())
            optimizer.step(evaluate)
            same = [torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True)]
            assert all(same) is (factors[1] > 1)
            assert not hasattr(optimizer, "found_inf")
        assert errors(exporter) == {}


# Observed losses


def test_observed_tensors() -> None:
    """A tensor that is not a loss leaves clipping alone, and one that is overwritten counts as observed."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    running = torch.zeros(())
    with start(model, clip=Plateau(1.0, patience=1)) as exporter:
        for epoch, loss in enumerate((3.0, 2.0, 1.0, 0.5)):
            model.zero_grad()
            (model(batch()).square().mean() * 1e4).backward()
            running.fill_(loss)
            exporter.observe(loss=running, epoch=epoch)
            exporter.observe(loss=torch.ones(2), epoch=epoch)
            running.fill_(100.0)
            optimizer.step()
            used = references.whole(references.arrays({n: p.grad for n, p in model.named_parameters()}))
            assert used == pytest.approx(1.0)
        assert errors(exporter) == {"observe": 4}


# What it may not do


class NoRead(TorchDispatchMode):
    """Refuses operations that wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - as its base
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique_consecutive"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "loop"),
    [
        (Plateau(0.1), plain),
        (MaxNorm(0.02, scope="unit"), plain),
        (LayerScale({"first": 0.25}), scaled_and_fused),
        (AGC(0.02), scaled_and_fused),
        (SkipAbove(0.1), scaled_and_fused),
        ([SkipNonFinite(max_in_row=3), SkipAbove(9.0, on="loss"), ZClip()], scaled_and_fused),
    ],
    ids=lambda case: getattr(case, "__name__", type(case).__name__),
)
def test_no_step_reads_a_value(policy: Any, loop: Training) -> None:  # noqa: ANN401 - the policies have no public base
    """Between the first hook before the step and its end nothing waits for a device."""
    torch.manual_seed(0)
    modes: list[NoRead] = []

    def begins(*_: object) -> None:
        exporter.observe(loss=1.0, epoch=1)
        modes.append(NoRead())
        modes[-1].__enter__()

    def ends(*_: object) -> None:
        modes.pop().__exit__(None, None, None)
        ran.append(1)

    ran: list[int] = []
    handle = register_optimizer_step_pre_hook(begins)
    after = register_optimizer_step_post_hook(ends)  # before ours, which read a loss scale that is on the CPU
    seen, tried = Loop(), [MaxNorm(0.2), AutoClip(), ZClip(scope="layer"), AGC(), MaxValue(0.01)]
    exporter = start(seen.model, clip=policy, dry_run=tried, on_failure="raise")
    try:
        loop(seen)
        assert errors(exporter) == {}
        assert len(ran) > 8
    finally:
        while modes:
            modes.pop().__exit__(None, None, None)
        exporter.close()
        handle.remove()
        after.remove()
