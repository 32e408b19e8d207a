"""`SkipNonFinite`, `SkipAbove` and lists of policies leave a run as if the batches of skipped steps had not been there."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import Perceptron, batch
from tests.support.scrape import OFF, errors, outcomes, value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import (
    AGC,
    AutoClip,
    Clipper,
    MaxNorm,
    MaxValue,
    SkipAbove,
    SkipNonFinite,
    TooManySkippedSteps,
    ZClip,
)

start = functools.partial(start_exporter, port=None, every=1, collectors=OFF)

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "SGD fused": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, fused=True),
    "AdamW by tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False),
    "Adagrad fused": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05, fused=True),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}
BAD = (0, 3, 4, 9)
"""Steps whose gradients are not finite, or too large."""

STEPS = 12


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return weights, and the optimizer's state with its counts of steps."""
    kept = [
        torch.as_tensor(entry) for its in optimizer.state_dict()["state"].values() for entry in its.values() if entry is not None
    ]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *kept)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether all bits are equal."""
    return len(first) == len(second) and all(map(torch.equal, first, second))


def spoil(model: torch.nn.Module, number: int) -> None:
    """Make one element of one gradient NaN or infinite."""
    gradient = [*model.parameters()][number % 4].grad
    assert gradient is not None
    gradient.view(-1)[number % gradient.numel()] = (math.nan, math.inf, -math.inf)[number % 3]


def train(
    make: Make,
    *,
    bad: bool,
    clip: Any = None,  # noqa: ANN401 - a policy or a list
    parts: int = 1,
    closure: bool = False,
    compiled: bool = False,
    after: Callable[[torch.nn.Module], object] = lambda _model: None,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Train, with bad steps or without their batches, and return the state and what was counted."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = make(model)
    exporter = None if clip is None else start(model, clip=clip)
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for number in range(STEPS):
        inputs = [batch() for _ in range(parts)]
        if number in BAD and not bad:
            continue

        def evaluate(number: int = number, inputs: list[torch.Tensor] = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            for part in inputs:
                loss: torch.Tensor = model(part).square().mean()
                loss.backward()
            if number in BAD:
                spoil(model, number)
            return loss

        if closure:
            step(evaluate)
        else:
            evaluate()
            after(model)
            step()
    counted: dict[str, float] = {}
    if exporter is not None:
        exporter.close()
        assert errors(exporter) == {}
        counted["skipped"] = value(exporter, "torch_train_skipped_steps_total") or 0.0
        counted["steps"] = value(exporter, "torch_train_steps_total", optimizer=type(optimizer).__name__) or 0.0
        counted["policy"] = value(exporter, "torch_grad_clip_policy_steps_total", policy="SkipNonFinite()") or 0.0
    return state(model, optimizer), counted


# Not finite


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_leave_no_trace(name: str) -> None:
    """Weights and the optimizer's state after a run with bad steps have the bits of a run without their batches."""
    skipped, counted = train(OPTIMIZERS[name], bad=True, clip=SkipNonFinite())
    clean, _ = train(OPTIMIZERS[name], bad=False)
    assert same(skipped, clean)
    assert (counted["skipped"], counted["steps"], counted["policy"]) == (4, 8, 4)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_steps_that_are_only_counted(name: str) -> None:
    """Where rounds are not sampled, skipped steps are skipped and counted all the same, and no step is lost after them."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = OPTIMIZERS[name](model)
    bad = (100, 101, 150, 299)
    with start(model, clip=SkipNonFinite(), every=1000) as exporter:
        for number in range(300):
            optimizer.zero_grad()
            model(batch() * (math.inf if number in bad else 1.0)).square().mean().backward()
            before = state(model, optimizer) if number in bad else None
            optimizer.step()
            assert before is None or same(before, state(model, optimizer))
        assert errors(exporter) == {}
    assert value(exporter, "torch_train_skipped_steps_total") == len(bad)
    assert value(exporter, "torch_train_steps_total", optimizer="AdamW") == 300 - len(bad)
    assert value(exporter, "torch_train_backward_passes_total") == 300


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what compiles steps
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
@pytest.mark.parametrize("how", [{"parts": 3}, {"closure": True}, {"compiled": True}], ids=str)
def test_each_kind_of_loop(name: str, how: dict[str, Any]) -> None:
    """Accumulation, closures and compiled steps skip as a plain loop does."""
    skipped, counted = train(OPTIMIZERS[name], bad=True, clip=SkipNonFinite(), **how)
    clean, _ = train(OPTIMIZERS[name], bad=False, **how)
    assert same(skipped, clean)
    assert counted["policy"] == 4


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_before_a_policy_that_clips(name: str) -> None:
    """`[SkipNonFinite(), MaxNorm(1.0)]` has the bits of `clip_grad_norm_` in a run without the bad batches."""
    limit = 0.05
    skipped, counted = train(OPTIMIZERS[name], bad=True, clip=[SkipNonFinite(), MaxNorm(limit)])
    clean, _ = train(OPTIMIZERS[name], bad=False, after=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
    assert same(skipped, clean)
    assert counted["policy"] == 4


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_a_sampled_step_has_the_outcome_skipped(name: str) -> None:
    """A sampled step that was skipped does not count as one that took NaN into the weights."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = OPTIMIZERS[name](model)
    with start(model, clip=[SkipNonFinite(), MaxNorm(1.0)]) as exporter:
        for number in range(6):
            optimizer.zero_grad()
            model(batch() * (math.nan if number in (2, 3) else 1.0)).square().mean().backward()
            optimizer.step()
        assert errors(exporter) == {}
        assert outcomes(exporter) == {"skipped": 2}


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_its_own(fused: bool) -> None:
    """Steps that the scaler skips are not counted for the policy, and the run has the bits of one with the scaler alone."""

    def run(**options: Any) -> tuple[list[torch.Tensor], float, float | None]:  # noqa: ANN401 - as `start_exporter`
        torch.manual_seed(0)
        model = Perceptron()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with start(model, **options) as exporter:
            for number in range(8):
                optimizer.zero_grad()
                scaler.scale(model(batch()).square().mean()).backward()
                if number in (2, 3, 4, 6):
                    spoil(model, number)
                scaler.step(optimizer)
                scaler.update()
            assert errors(exporter) == {}
        counted = value(exporter, "torch_grad_clip_policy_steps_total", policy="SkipNonFinite(max_in_row=2)")
        return state(model, optimizer), scaler.get_scale(), counted

    ours, alone = run(clip=SkipNonFinite(max_in_row=2)), run()
    assert same(ours[0], alone[0])
    assert ours[1:] == (alone[1], 0.0)


def test_each_optimizer_by_itself() -> None:
    """Of two optimizers that share a backward, the one whose gradients are finite steps."""
    torch.manual_seed(0)
    model = Perceptron()
    first, second = (torch.optim.AdamW(part.parameters(), lr=0.01) for part in (model.first, model.second))
    with start(model, clip=SkipNonFinite()) as exporter:
        for number in range(4):
            model.zero_grad()
            model(batch()).square().mean().backward()
            if number == 2:
                spoil(model.first, 1)
            before = state(model.first, first), state(model.second, second)
            first.step()
            second.step()
            assert same(before[0], state(model.first, first)) is (number == 2)
            assert not same(before[1], state(model.second, second))
        assert errors(exporter) == {}
    assert value(exporter, "torch_grad_clip_policy_steps_total", policy="SkipNonFinite()") == 1


def test_lbfgs_keeps_its_weights() -> None:
    """A step of LBFGS whose first evaluation is not finite leaves the weights alone, and the next one goes on."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4, line_search_fn="strong_wolfe")
    with start(model, clip=SkipNonFinite()) as exporter:
        for number in range(4):
            inputs = batch()

            def evaluate(number: int = number, inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(inputs).square().mean()
                loss.backward()
                if number == 1:
                    spoil(model, 0)
                return loss

            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step(evaluate)
            assert same(before, [*model.parameters()]) is (number == 1)
        assert errors(exporter) == {}
    assert all(p.isfinite().all() for p in model.parameters())


# In a row


@pytest.mark.parametrize("fused", [False, True])
def test_too_many_in_a_row(fused: bool) -> None:
    """One step more than `max_in_row` raises, whatever `on_failure` says, changes nothing, and a finite step starts again."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    def step(bad: bool) -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        if bad:
            spoil(model, 1)
        optimizer.step()

    with start(model, clip=[SkipNonFinite(max_in_row=2), MaxNorm(1.0)]) as exporter:
        for bad in (False, True, True, False, True, True):
            step(bad)
        before = state(model, optimizer)
        for _ in range(2):
            with pytest.raises(TooManySkippedSteps, match=r"SkipNonFinite\(max_in_row=2\): \d steps in a row had gradients that"):
                step(True)
        assert same(before, state(model, optimizer))
        assert not hasattr(optimizer, "found_inf")
        step(False)
        assert not same(before, state(model, optimizer))
        assert errors(exporter) == {}


def test_a_row_goes_on_after_a_restart() -> None:
    """The number of steps in a row is saved with the state of `clip=`, and other policies may have been added since."""
    torch.manual_seed(0)
    model = Perceptron()
    clipper = Clipper(model, [SkipNonFinite(max_in_row=1), AutoClip()])
    for number in range(3):
        model.zero_grad()
        model(batch()).square().mean().backward()
        if number == 2:
            spoil(model, 1)
        clipper()
    later = Clipper(model, [SkipNonFinite(max_in_row=1), SkipAbove(100.0), AutoClip()])
    later.load_state_dict(clipper.state_dict())
    assert int(later.state_dict()["memory"]["count"]) == 2
    model(batch()).square().mean().backward()
    spoil(model, 1)
    with pytest.raises(TooManySkippedSteps):
        later()
    assert [int(run.clipped_steps) for run in later.skipping] == [2, 0]


# Lists


@pytest.mark.parametrize(
    "policy",
    [ZClip(0.9, 0.5, 3), ZClip(0.9, 0.5, 3, scope="layer"), AutoClip(25, history_size=5), MaxNorm(0.1), AGC(0.02), MaxValue(0.01)],
)
def test_skipped_steps_enter_no_history(policy: Any) -> None:  # noqa: ANN401 - the policies have no public base
    """The policy behind those that skip decides as if skipped steps had not been there."""

    def run(bad: bool, policies: Any) -> tuple[list[torch.Tensor], dict[str, Any], list[int]]:  # noqa: ANN401 - as above
        torch.manual_seed(0)
        model = Perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        clipper = Clipper(model, policies)
        for number in range(STEPS):
            inputs = batch()
            if number in BAD and not bad:
                continue
            optimizer.zero_grad()
            (model(inputs).square().mean() * (1e4 if number in BAD[2:] else 1.0)).backward()
            if number in BAD[:2]:
                spoil(model, number)
            clipper()
            optimizer.step()
        return state(model, optimizer), clipper.state_dict()["memory"], [int(its.clipped_steps) for its in clipper.skipping]

    both, memory, counts = run(True, [SkipNonFinite(), SkipAbove(50.0), policy])
    alone, expected, _ = run(False, policy)
    assert same(both, alone)
    assert memory.keys() == expected.keys()
    assert same([*memory.values()], [*expected.values()])
    assert counts == [2, 2]


def test_each_skipped_step_has_one_reason() -> None:
    """A step that two policies would skip is counted for the first of them."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policies = [SkipNonFinite(), SkipAbove(100.0), SkipAbove(5.0, on="loss")]
    with start(model, clip=policies, dry_run=[SkipNonFinite(), SkipAbove(5.0, on="loss")]) as exporter:
        for number, loss in enumerate((1.0, math.nan, 6.0, 1.0, 7.0)):
            optimizer.zero_grad()
            (model(batch()).square().mean() * (1e4 if number == 4 else 1.0)).backward()
            if number == 1:
                spoil(model, 1)
            exporter.observe(loss=loss)
            before = state(model, optimizer)
            optimizer.step()
            assert same(before, state(model, optimizer)) is (number in (1, 2, 4))
        assert errors(exporter) == {}

    def counted(kind: str, policy: str) -> float | None:
        return value(exporter, f"torch_grad_clip_{kind}_total", policy=policy)

    assert counted("policy_steps", "SkipNonFinite()") == 1
    assert counted("policy_steps", "SkipAbove(100.0)") == 1
    assert counted("policy_steps", "SkipAbove(5.0, on='loss')") == 1
    assert counted("candidates", "SkipNonFinite()") == 1
    assert counted("candidates", "SkipAbove(5.0, on='loss')") == 3
    assert value(exporter, "torch_train_skipped_steps_total") == 3


class Norms(TorchDispatchMode):
    """Counts the norms of all gradients that are measured within."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - PyTorch's
        self.number += "_foreach_norm" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "policies", [SkipNonFinite(), [SkipNonFinite(), MaxNorm(1.0)], [SkipNonFinite(), SkipAbove(9.0), ZClip()]], ids=repr
)
def test_gradients_are_measured_once(policies: Any) -> None:  # noqa: ANN401 - a policy or a list
    """All policies of a list, and candidates that skip, share one measurement of the gradients."""
    model = Perceptron()
    model(batch()).square().mean().backward()
    clipper = Clipper(model, policies, dry_run=[SkipNonFinite(), SkipAbove(1.0)])
    with Norms() as norms:
        clipper()
    assert norms.number == 1


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ([], r"=\[\]\)?: the list is empty; expected policies, such as \[SkipNonFinite\(\), MaxNorm\(1.0\)\]"),
        ([1.0], r"=\[1.0\]\)?: expected policies"),
        (
            [MaxNorm(1.0), ZClip()],
            r"both MaxNorm.* and ZClip.* change gradients; keep one of them, and try the other by dry_run=",
        ),
        ([MaxNorm(1.0), SkipNonFinite()], r"skipped by the gradients before they are clipped; put MaxNorm.* last"),
        ([SkipNonFinite(), SkipNonFinite(3)], r"two policies skip steps for one reason; leave out SkipNonFinite\(max_in_row=3\)"),
        ([SkipAbove(1.0), SkipAbove(2.0)], r"two policies skip steps for one reason"),
        ([SkipAbove(1.0), MaxNorm(1.0)], r"MaxNorm.* would never clip, since all norms above 1 are skipped; set a limit above"),
    ],
)
def test_lists_that_contradict_themselves(clip: Any, message: str) -> None:  # noqa: ANN401 - wrong ones
    """A list that contradicts itself raises at the start, with the argument, its value and the fix."""
    for make in (lambda: start(Perceptron(), clip=clip), lambda: Clipper(Perceptron(), clip)):
        with pytest.raises((TypeError, ValueError)) as raised:
            make()
        assert re.search(message, str(raised.value)), str(raised.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SkipNonFinite(0), r"SkipNonFinite\(max_in_row=0\): expected a whole number of at least 1, such as 10"),
        (lambda: SkipNonFinite(True), r"SkipNonFinite\(max_in_row=True\): expected a whole number"),
        (lambda: SkipAbove(1.0, on="both"), r"""SkipAbove\(on='both'\): expected "norm" or "loss\""""),
        (lambda: SkipAbove(1.0, reduced=True), r"SkipAbove\(reduced=True\): the norm is the same on all ranks; leave it out"),
        (lambda: start(Perceptron(), dry_run=[[ZClip()]]), r"dry_run=\[\[ZClip.*list each by itself"),
    ],
)
def test_wrong_settings(make: Callable[[], object], message: str) -> None:
    """A wrong setting raises with its name, its value and what is expected."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# The loss


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_loss_above_the_limit(name: str, kind: Callable[[float], Any]) -> None:
    """A step whose loss is above the limit, or is not a number, is skipped; the last loss before the step counts."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = OPTIMIZERS[name](model)
    with start(model, clip=SkipAbove(2.0, on="loss"), on_failure="raise") as exporter:
        for loss in (1.0, 3.0, 2.0, math.nan, math.inf, -math.inf, 0.5):
            optimizer.zero_grad()
            exporter.observe(loss=kind(9.0))  # of a part, in a loop that accumulates
            model(batch()).square().mean().backward()
            exporter.observe(loss=kind(loss))
            before = state(model, optimizer)
            optimizer.step()
            assert same(before, state(model, optimizer)) is not (loss <= 2.0)
        assert errors(exporter) == {}
    assert value(exporter, "torch_train_skipped_steps_total") == 3


def test_a_clipper_judges_its_loss() -> None:
    """`clipper.observe(loss)` before the call is the loss of the step, and a call without one raises."""
    model = Perceptron()
    clipper = Clipper(model, [SkipNonFinite(), SkipAbove(2.0, on="loss"), MaxNorm(1.0)])
    for loss in (1.0, 3.0):
        model.zero_grad()
        model(batch()).square().mean().backward()
        clipper.observe(loss)
        clipper()
        assert all(p.grad is None for p in model.parameters()) is (loss > 2)
    model(batch()).square().mean().backward()
    with pytest.raises(RuntimeError, match="no loss was observed for this step; call observe"):
        clipper()


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_that_comes_late(late: bool) -> None:
    """A loop that never observes, or only after the step, gets a failure, and no step is judged by the loss of another."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with start(model, clip=SkipAbove(2.0, on="loss")) as exporter:
        for number in range(12):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            before = state(model, optimizer)
            optimizer.step()
            assert not same(before, state(model, optimizer))
            if late:
                exporter.observe(loss=100.0 if number % 2 else 1.0)
        assert errors(exporter) == {"clip": 10}


def test_one_missing_loss_costs_its_step() -> None:
    """A step without a new loss is not judged by the last one; it fails, and the next one is judged again."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with start(model, clip=SkipAbove(2.0, on="loss")) as exporter:
        for loss in (1.0, 3.0, None, 3.0):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            if loss is not None:
                exporter.observe(loss=loss)
            before = state(model, optimizer)
            optimizer.step()
            assert same(before, state(model, optimizer)) is (loss == 3.0)
        assert errors(exporter) == {"clip": 1}


def test_a_loss_of_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job of several ranks a loss that may differ between them raises at the start."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    policy = SkipAbove(2.0, on="loss")
    for options in ({"clip": [SkipNonFinite(), policy]}, {"dry_run": [policy]}):
        with pytest.raises(ValueError, match=r"SkipAbove\(on='loss'\): this job has 2 ranks.*reduced=True, or use on='norm'"):
            start(Perceptron(), run="test", **options)
    start(Perceptron(), run="test", clip=SkipAbove(2.0, on="loss", reduced=True)).close()
