"""The clipper in a user's loop: in place of `clip_grad_norm_`, without a wait, saved and loaded, and with wrong arguments."""

from __future__ import annotations

import copy
import io
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.actions.references import Zoo, arrays, whole
from tests.actions.test_policies import POLICIES, gradients, gradients_of
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import AGC, AutoClip, Clipper, LayerScale, MaxNorm, MaxValue, Plateau, SkipAbove, ZClip

ALL = {**{name: policy for name, (policy, _) in POLICIES.items()}, "SkipAbove": SkipAbove(5.0)}


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters, in a type that compares NaN as well."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [p.detach().clone().view(sizes[p.element_size()]) for p in model.parameters()]


# In place of clip_grad_norm_


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_max_norm_gives_the_bits_of_clip_grad_norm(dtype: torch.dtype, foreach: bool | None) -> None:
    """After 100 steps of training all parameters, and in each step the norm, have the same bits as with clip_grad_norm_."""
    torch.manual_seed(0)
    model = Perceptron().to(dtype)
    twin = copy.deepcopy(model)
    clipper = Clipper(model, MaxNorm(1.0), foreach=foreach)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05, foreach=foreach) for one in (model, twin)]
    clipped = 0
    for _ in range(100):
        inputs = batch().to(dtype)
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (one(inputs).square().mean() * torch.rand((), generator=torch.Generator().manual_seed(7)) * 6).backward()
        norm, expected = clipper(), torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0, foreach=foreach)
        assert norm.dtype == expected.dtype
        assert torch.equal(norm, expected)
        clipped += bool(expected > 1.0)
        for optimizer in optimizers:
            optimizer.step()
    assert 0 < clipped < 100
    assert all(torch.equal(a, b) for a, b in zip(bits(model), bits(twin), strict=True))


@pytest.mark.parametrize("kind", ["float32 and bfloat16", "complex"])
def test_other_gradients_have_the_bits_of_clip_grad_norm(kind: str) -> None:
    """So have gradients of two types in one model, and complex ones."""
    types = (torch.float32, torch.bfloat16) if kind.startswith("float") else (torch.complex64, torch.complex64)
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(3, 4, dtype=types[place % 2])) for place in range(6)]
    for parameter in ours:
        parameter.grad = torch.randn(3, 4, dtype=parameter.dtype)
    theirs = copy.deepcopy(ours)
    for one, other in zip(ours, theirs, strict=True):
        other.grad = one.grad.clone()
    assert torch.equal(Clipper(ours, MaxNorm(1.0))(), torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))


def test_max_value_gives_the_bits_of_clip_grad_value() -> None:
    """MaxValue leaves the same bits as clip_grad_value_."""
    torch.manual_seed(0)
    model = Zoo()
    gradients(model, 3, torch.Generator().manual_seed(1))
    twin = copy.deepcopy(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = one.grad.clone()
    Clipper(model, MaxValue(0.2))()
    torch.nn.utils.clip_grad_value_(twin.parameters(), 0.2)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(model).values(), gradients_of(twin).values(), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_the_clipper_calls_no_more_than_a_few_operations(name: str) -> None:
    """The number of operations of a model policy does not grow with the steps; nothing reads an element on the host."""
    torch.manual_seed(0)
    model, random = Zoo(), torch.Generator().manual_seed(1)
    clipper = Clipper(model, ALL[name])
    counts = []
    for step in range(40):
        gradients(model, step, random)
        with Operations() as seen:
            clipper()
        counts.append(len(seen.names))
        reads = {one for one in seen.names if one in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")}
        assert reads <= ({"_local_scalar_dense", "is_nonzero"} if name == "SkipAbove" else set())
    assert len(set(counts)) == 1


class Operations(TorchDispatchMode):
    """Notes what PyTorch is asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - PyTorch's
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_looks_at_data(name: str) -> None:
    """On `device="meta"`, where reading a value raises, each policy measures, decides and clips for 30 steps."""
    with torch.device("meta"):
        model = Zoo()
        clipper = Clipper(model, POLICIES[name][0])
        for step in range(30):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            clipper.observe(torch.zeros(()), epoch=step)
            assert clipper().is_meta
            assert clipper.threshold is not None
            assert clipper.threshold.is_meta


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_waits_for_a_gpu(name: str) -> None:
    """After the first call, which makes indices, no call synchronises with the device."""
    model = Zoo().cuda()
    clipper = Clipper(model, POLICIES[name][0])
    for step in range(30):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            clipper.observe(torch.zeros((), device="cuda"), epoch=step)
            clipper.observe(0.5, epoch=step)
            clipper()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# What is there to be clipped


def test_without_gradients_nothing_happens() -> None:
    """Before a backward the norm is 0, and the history stays empty."""
    model = Perceptron()
    clipper = Clipper(model, AutoClip())
    assert float(clipper()) == 0
    assert int(clipper.state_dict()["memory"]["count"]) == 0


def test_a_layer_without_a_gradient_has_no_norm_in_its_history() -> None:
    """Where one layer took no part in a step, its history has one norm less, and the others are clipped."""
    model = Perceptron()
    clipper = Clipper(model, AutoClip(scope="layer"))
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if step == 2:
            model.first.zero_grad()
        clipper()
    assert clipper.layers == ("first", "second")
    assert clipper.state_dict()["memory"]["count"].tolist() == [3, 4]


def test_sparse_gradients_are_refused() -> None:
    """A sparse gradient raises with the name of its parameter and the ways out, and nothing is clipped."""
    model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 1))
    model(torch.tensor([1, 2])).sum().backward()
    before = model[1].weight.grad.clone()
    with pytest.raises(ValueError, match=r"gradient of 0\.weight .*sparse_coo.*sparse=False"):
        Clipper(model, MaxNorm(1e-3))()
    assert torch.equal(model[1].weight.grad, before)


def test_the_clipper_follows_a_model_that_changes() -> None:
    """Layers that come, go or are replaced after the start are clipped, and those that stay keep their histories."""
    torch.manual_seed(0)
    model = Perceptron()
    clipper = Clipper(model, AutoClip(scope="layer", history_size=8))
    for step in range(3):
        gradients(model, step, torch.Generator().manual_seed(step))
        clipper()
    counts = clipper.state_dict()["memory"]["history"][:, 1].clone()
    model.third = torch.nn.Linear(3, 3)
    model.first = torch.nn.Linear(6, 8)
    del model.second.bias
    model.second.register_parameter("bias", torch.nn.Parameter(torch.zeros(3)))
    gradients(model, 1, torch.Generator().manual_seed(9))
    clipper()
    assert clipper.layers == ("first", "second", "third")
    memory = clipper.state_dict()["memory"]
    assert memory["count"].tolist() == [4, 4, 1]
    assert torch.equal(memory["history"][:3, 1], counts[:3])
    assert float(model.third.weight.grad.norm()) <= float(clipper.threshold[2]) + 1e-6


def test_lazy_modules_are_clipped_once_they_have_shapes() -> None:
    """A model with lazy modules may be given before its first forward."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")  # of older versions
        model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.ReLU(), torch.nn.LazyLinear(2))
    clipper = Clipper(model, AGC(0.01))
    model(batch()).square().mean().backward()
    clipper()
    for parameter in (model[0].weight, model[2].weight):
        assert bool((parameter.grad.norm(dim=1) <= 0.01 * parameter.norm(dim=1) + 1e-7).all())


def test_tied_parameters_count_once() -> None:
    """A parameter that is in two places is measured and clipped once, also in a list."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)
    assert float(Clipper([weight, weight], MaxNorm(2.0))()) == 4.0
    assert float(weight.grad.norm()) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("give", [list, iter, lambda named: dict(named).values()], ids=["pairs", "iterator", "parameters"])
def test_parameters_may_be_given_instead_of_a_model(give: Callable[[Any], Any]) -> None:
    """Pairs, an iterator or bare parameters have the same norm as the model."""
    torch.manual_seed(0)
    model = Zoo()
    gradients(model, 1, torch.Generator().manual_seed(1))
    expected = whole(arrays(gradients_of(model)))
    assert float(Clipper(give(model.named_parameters()), MaxNorm(1.0))()) == pytest.approx(expected, rel=1e-6)


def test_the_exporter_sees_norms_before_and_after() -> None:
    """An exporter of the same model shows the norm before clipping, that after it, and the coefficient."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer, clipper = sgd(model), Clipper(model, ZClip(warmup_steps=2, max_norm=0.05))
    with start_exporter(model, port=None, every=1) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            norm = float(clipper())
            optimizer.step()
        assert norm > 0.05
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(norm, rel=1e-6)
        assert value(exporter, "torch_grad_global_norm_after_clip") == pytest.approx(0.05, rel=1e-4)
        assert value(exporter, "torch_grad_clip_coefficient") == pytest.approx(0.05 / norm, rel=1e-4)


def test_a_gradient_scaler_is_undone_first() -> None:
    """After `scaler.unscale_` the norm is that of the true gradients, as for clip_grad_norm_, and an overflow changes nothing."""
    torch.manual_seed(0)
    model, twin = Perceptron(), Perceptron()
    twin.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, clipper = sgd(model), Clipper(model, AutoClip())
    for step in range(6):
        inputs = batch()
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean() * (math.inf if step == 2 else 1)).backward()
        scaler.unscale_(optimizer)
        norm = clipper()
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            assert math.isfinite(norm)
    assert int(clipper.state_dict()["memory"]["count"]) == 5


# Saving and loading


@pytest.mark.parametrize("name", ALL)
def test_going_on_after_loading_is_as_without_the_break(name: str) -> None:
    """Saved to a file and loaded into another clipper in mid-training, all later gradients and thresholds have the same bits."""
    policy = ALL[name]
    torch.manual_seed(0)
    straight, broken = Zoo(), Zoo()
    straight.load_state_dict(broken.state_dict())
    clippers = [Clipper(straight, policy), Clipper(broken, policy)]
    random = torch.Generator().manual_seed(1)
    for step in range(60):
        if step == 31:
            file = io.BytesIO()
            torch.save(clippers[1].state_dict(), file)
            file.seek(0)
            clippers[1] = Clipper(broken, policy)
            clippers[1].load_state_dict(torch.load(file, weights_only=True))
        gradients(straight, step, random)
        for one, other in zip(straight.parameters(), broken.parameters(), strict=True):
            other.grad = one.grad.clone()
        norms = [clipper() for clipper in clippers]
        for clipper in clippers:
            clipper.observe(2.0, epoch=step // 2)
        assert torch.equal(*norms)
        assert torch.equal(clippers[0].threshold, clippers[1].threshold)
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(straight).values(), gradients_of(broken).values(), strict=True))


def test_a_saved_state_is_a_copy() -> None:
    """Steps after `state_dict()` do not change what it returned, and steps after loading do not change what was loaded."""
    model = Perceptron()
    clipper = Clipper(model, AutoClip(history_size=4))
    gradients(model, 0, torch.Generator().manual_seed(1))
    clipper()
    saved = clipper.state_dict()
    kept = copy.deepcopy(saved)
    for _ in range(2):
        clipper()
        assert torch.equal(saved["memory"]["history"], kept["memory"]["history"])
        assert torch.equal(saved["memory"]["count"], kept["memory"]["count"])
        clipper.load_state_dict(saved)


@pytest.mark.parametrize(
    ("policy", "model", "message"),
    [
        (ZClip(), Perceptron(), "the state is one of 'AutoClip', this clipper has ZClip"),
        (AutoClip(history_size=9, scope="layer"), Perceptron(), r"'history' has the shape \(8, 2\), expected \(9, 2\)"),
        (AutoClip(history_size=8, scope="layer"), Zoo(), "other layers than this clipper"),
    ],
)
def test_a_state_of_another_kind_is_refused(policy: AutoClip | ZClip, model: torch.nn.Module, message: str) -> None:
    """A state of another policy, other settings or another model raises and says how they differ."""
    state = Clipper(Perceptron(), AutoClip(history_size=8, scope="layer")).state_dict()
    with pytest.raises(ValueError, match=message):
        Clipper(model, policy).load_state_dict(state)


# Candidates


@pytest.mark.parametrize("name", POLICIES)
def test_a_candidate_decides_as_it_would_and_changes_nothing(name: str) -> None:
    """Beside another policy a candidate has the thresholds and coefficients that it has alone, and counts the steps it changes."""
    torch.manual_seed(0)
    model, alone = Zoo(), Zoo()
    alone.load_state_dict(model.state_dict())
    with_candidate = Clipper(model, MaxNorm(1.0), dry_run=[POLICIES[name][0], AutoClip()])
    plain, single = Clipper(alone, MaxNorm(1.0)), Clipper(alone, POLICIES[name][0])
    random, clipped = torch.Generator().manual_seed(1), 0
    for step in range(60):
        gradients(model, step, random)
        kept = [parameter.grad.clone() for parameter in model.parameters()]
        for clipper in (with_candidate, single):
            clipper.observe(2.0)
        norm = with_candidate()
        for place, clipper in enumerate((single, plain)):
            for parameter, gradient in zip(alone.parameters(), kept, strict=True):
                parameter.grad = gradient.clone()
            assert torch.equal(clipper(), norm) or POLICIES[name][0].scope != "model"
            if place == 0:
                clipped += any(not torch.equal(p.grad, gradient) for p, gradient in zip(alone.parameters(), kept, strict=True))
        candidate = with_candidate.candidates[0]
        assert torch.equal(candidate.threshold, single.threshold)
        if candidate.coefficients is not None:
            assert torch.equal(candidate.coefficients, single.coefficients)
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), alone.parameters(), strict=True))
        assert int(candidate.clipped_steps) == clipped
    assert clipped > 0
    assert candidate.policy is POLICIES[name][0]


def test_candidates_are_saved_and_look_at_nothing() -> None:
    """Candidates go on after loading, and on the meta device they read no value; a step to be left out is counted, not left out."""
    policies = [ZClip(), AGC(), MaxValue(0.1), SkipAbove(0.5), LayerScale({"": 0.5})]
    with torch.device("meta"):
        model = Zoo()
        clipper = Clipper(model, MaxNorm(1.0), dry_run=policies)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        clipper()
    model = Zoo()
    gradients(model, 0, torch.Generator().manual_seed(1))
    clipper = Clipper(model, MaxNorm(1.0), dry_run=policies)
    clipper()
    assert [int(one.clipped_steps) for one in clipper.candidates] == [0, 1, 1, 1, 1]
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = Clipper(model, MaxNorm(1.0), dry_run=policies)
    again.load_state_dict(clipper.state_dict())
    again()
    clipper()
    for one, other in zip(again.candidates, clipper.candidates, strict=True):
        assert torch.equal(one.threshold, other.threshold)
        assert int(one.clipped_steps) == int(other.clipped_steps)
    with pytest.raises(ValueError, match="the state has 5 candidates, this clipper 0"):
        Clipper(model, MaxNorm(1.0)).load_state_dict(clipper.state_dict())


# Plateau


def test_a_plateau_counts_epochs() -> None:
    """Without an epoch each loss is one; ten that are not smaller halve the limit, and NaN is not smaller."""
    model = Perceptron()
    gradients(model, 0, torch.Generator().manual_seed(1))
    clipper = Clipper(model, Plateau(max_norm=1.0))
    limits = []
    for loss in [1.0, *[math.nan] * 9, 0.5, *[0.5] * 10, 0.4]:
        clipper.observe(loss)
        clipper()
        limits.append(float(clipper.threshold))
    assert limits == [1.0] * 20 + [0.5, 0.5]


# Skipping steps


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("told", [False, True], ids=["removed", "told"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_above_the_limit_changes_nothing(name: str, told: bool, scaled: bool) -> None:
    """Weights and the optimizer's state after a left out step have the bits of before, and later steps those without it."""
    if told and not name.startswith("fused"):
        pytest.skip("only fused optimizers can be told")
    torch.manual_seed(0)
    model, twin = Perceptron(), Perceptron()
    twin.load_state_dict(model.state_dict())
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    clipper = Clipper(model, SkipAbove(10.0), optimizers=[optimizer] if told else [])
    for step in range(8):
        inputs = batch()
        size = 1e4 if step in (2, 5, 6) else 1.0
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean() * size).backward()
        scaler.unscale_(optimizer)
        norm = clipper()
        scaler.step(optimizer)
        scaler.update()
        assert (float(norm) > 10) == (size > 1)
        if size == 1:
            other.zero_grad()
            twin(inputs).square().mean().backward()
            other.step()
        assert not hasattr(optimizer, "found_inf")
        assert all(torch.equal(a, b) for a, b in zip(bits(model), bits(twin), strict=True)), step
    clipper.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_wait_has_to_be_allowed() -> None:
    """On a device other than the CPU a step is not left out by reading the norm unless `synchronize=True` allows it."""
    with torch.device("meta"):
        model = Perceptron()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        with pytest.raises(ValueError, match=r"gradients are on meta.*synchronize=True"):
            Clipper(model, SkipAbove(1.0))()


# Wrong arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaxNorm(0), r"MaxNorm\(max_norm=0\): expected a finite number above 0, such as 1"),
        (lambda: MaxNorm("1"), r"MaxNorm\(max_norm='1'\)"),
        (lambda: MaxNorm(math.inf), r"MaxNorm\(max_norm=inf\)"),
        (lambda: MaxNorm(1.0, scope="row"), r"""MaxNorm\(scope='row'\): expected "model" or "layer" or "unit\""""),
        (lambda: MaxValue(-1), r"MaxValue\(value=-1\)"),
        (lambda: AutoClip(percentile=101), r"AutoClip\(percentile=101\): .*at least 0 and at most 100"),
        (lambda: AutoClip(history_size=0), r"AutoClip\(history_size=0\): expected a whole number of at least 1, such as 1000"),
        (lambda: AutoClip(history_size=2.5), r"AutoClip\(history_size=2.5\)"),
        (lambda: AutoClip(scope="unit"), r"AutoClip\(scope='unit'\): expected \"model\" or \"layer\""),
        (lambda: ZClip(alpha=1), r"ZClip\(alpha=1\): expected a number below 1"),
        (lambda: ZClip(alpha=math.nan), r"ZClip\(alpha=nan\)"),
        (lambda: ZClip(z_thresh=0), r"ZClip\(z_thresh=0\)"),
        (lambda: ZClip(warmup_steps=1), r"ZClip\(warmup_steps=1\): expected a whole number of at least 2"),
        (lambda: ZClip(warmup_steps=True), r"ZClip\(warmup_steps=True\)"),
        (lambda: ZClip(max_norm=0), r"ZClip\(max_norm=0\)"),
        (lambda: AGC(clip_factor=0), r"AGC\(clip_factor=0\)"),
        (lambda: AGC(eps=0), r"AGC\(eps=0\)"),
        (lambda: AGC(scope="model"), r"AGC\(scope='model'\)"),
        (lambda: Plateau(factor=2), r"Plateau\(factor=2\): .*at most 1"),
        (lambda: Plateau(patience=0), r"Plateau\(patience=0\)"),
        (lambda: Plateau(min_norm=2), r"Plateau\(min_norm=2\)"),
        (lambda: LayerScale({}), r"LayerScale\(factors=\{\}\): expected a mapping"),
        (lambda: LayerScale({"(": 1.0}), r"LayerScale\(factors=\{'\(': \.\.\.\}\): expected a regular expression"),
        (lambda: LayerScale({"a": -1}), r"LayerScale\(factors=\{'a': -1\}\): expected a finite factor of at least 0"),
        (lambda: Clipper(Perceptron(), LayerScale({"third": 1.0})), r"'third': .*no layer matches; layers: first, second"),
        (lambda: SkipAbove(0), r"SkipAbove\(limit=0\)"),
        (lambda: SkipAbove(1, synchronize=1), r"SkipAbove\(synchronize=1\): expected True or False"),
        (lambda: Clipper(Perceptron(), 1.0), r"Clipper\(policy=1.0\): expected a policy, such as MaxNorm\(1.0\)"),
        (lambda: Clipper(Perceptron(), MaxNorm), r"Clipper\(policy=<class .*MaxNorm'>\): expected a policy"),
        (lambda: Clipper(torch.nn.ReLU(), MaxNorm(1.0)), "it has no parameters; expected a module, its parameters, or pairs"),
        (lambda: Clipper([], MaxNorm(1.0)), "it has no parameters"),
        (lambda: Clipper(["a"], MaxNorm(1.0)), r"Clipper\(model_or_parameters='a'\): expected a module"),
        (lambda: Clipper(sgd(Perceptron()), MaxNorm(1.0)), "expected a module, its parameters, or pairs"),
        (lambda: Clipper(Perceptron(), MaxNorm(1.0), foreach=1), r"Clipper\(foreach=1\): expected True, False or None"),
        (lambda: Clipper(Perceptron(), MaxNorm(1.0), optimizers=[sgd(Perceptron())]), "MaxNorm needs none"),
        (lambda: Clipper(Perceptron(), SkipAbove(1.0), optimizers=sgd(Perceptron())), r"optimizers=SGD.*expected a list"),
        (lambda: Clipper([("w", torch.nn.Parameter(torch.ones(2))) for _ in "ab"], MaxNorm(1.0)), "two parameters are called 'w'"),
        (
            lambda: Clipper(Perceptron(), SkipAbove(1.0), optimizers=[sgd(Perceptron())]),
            r"expected fused optimizers.*synchronize=True",
        ),
        (
            lambda: Clipper(Perceptron(), MaxNorm(1.0), dry_run=ZClip()),
            r"Clipper\(dry_run=ZClip\(.*\): expected a list of policies",
        ),
        (lambda: Clipper(Perceptron(), MaxNorm(1.0), dry_run=[1.0]), r"Clipper\(dry_run=\[1.0\]\): expected policies"),
        (lambda: Clipper(Perceptron(), Plateau()).observe("1"), r"observe\(loss='1'\): expected a number or a tensor"),
        (lambda: Clipper(Perceptron(), Plateau()).observe(torch.zeros(2)), r"got a tensor of shape \(2,\)"),
        (lambda: Clipper(Perceptron(), Plateau()).observe(1.0, epoch="1"), r"observe\(epoch='1'\): expected a finite number"),
    ],
)
def test_wrong_arguments_raise(make: Callable[[], object], message: str) -> None:
    """Each wrong argument raises at once and names the argument, its value and what is expected."""
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert re.search(message, str(raised.value)), str(raised.value)


def test_foreach_that_is_not_possible_raises() -> None:
    """`foreach=True` on a device without it raises, as clip_grad_norm_ does."""
    with torch.device("meta"):
        model = Perceptron()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        with pytest.raises(ValueError, match=r"Clipper\(foreach=True\): not possible for gradients on meta"):
            Clipper(model, MaxNorm(1.0), foreach=True)()


def test_complex_gradients_have_no_largest_value() -> None:
    """MaxValue refuses complex gradients, as their elements have no order."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="MaxValue: a gradient is complex"):
        Clipper([parameter], MaxValue(0.5))()


# What a training may meet


@pytest.mark.parametrize("policy", [ZClip(scope="layer"), AutoClip(scope="layer")], ids=str)
def test_a_layer_that_was_silent_is_trained_again(policy: ZClip | AutoClip) -> None:
    """Gradients of exactly 0, as of an expert without tokens, enter no history: they would make the threshold 0 for good."""
    model = torch.nn.ModuleDict({"expert": torch.nn.Linear(4, 4)})
    clipper = Clipper(model, policy)
    for step in range(120):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.0 if step < 40 or step % 6 == 0 else 1.0)
        clipper()
        if step >= 40 and step % 6:
            assert all(bool((p.grad > 0.5).all()) for p in model.parameters() if p.grad is not None)


def test_a_norm_that_is_not_finite_beside_a_threshold_of_zero() -> None:
    """Changes nothing: 0 over it is no number."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    clipper = Clipper([parameter], AutoClip(percentile=0, history_size=4))
    state = clipper.state_dict()
    state["memory"] = {
        "history": torch.zeros_like(state["memory"]["history"]),
        "count": torch.full_like(state["memory"]["count"], 4),
    }
    clipper.load_state_dict(state)
    parameter.grad = torch.tensor([1.0, math.inf, 2.0])
    clipper()
    assert parameter.grad.tolist() == [1.0, math.inf, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_percentiles_do_not_depend_on_the_default_type(dtype: torch.dtype) -> None:
    """A script may set another one."""
    norms = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.5
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        clipper = Clipper([parameter], AutoClip(percentile=99))
        for norm in norms:
            parameter.grad = norm[None].clone()
            clipper()
    finally:
        torch.set_default_dtype(before)
    assert clipper.threshold is not None
    torch.testing.assert_close(clipper.threshold.reshape(()), torch.quantile(norms, 0.99), rtol=1e-6, atol=0)


@pytest.mark.parametrize("policy", [MaxNorm(1.0, scope="layer"), LayerScale({"first": 0.5})], ids=str)
def test_another_default_device_changes_nothing(policy: MaxNorm | LayerScale) -> None:
    """Of the tensors that a clipper makes."""
    model = Perceptron()
    with torch.device("meta"):
        clipper = Clipper(model, policy)
    model(batch()).square().mean().backward()
    assert clipper().item() > 0


def test_losses_may_be_observed_in_inference_mode() -> None:
    """As in a validation, and outside of it as well."""
    clipper = Clipper(Perceptron(), Plateau(max_norm=1.0, patience=2))
    for epoch in range(4):
        with torch.inference_mode():
            clipper.observe(torch.tensor(1.0) + epoch, epoch=epoch)
        clipper.observe(1.0 + epoch, epoch=epoch)
    assert clipper.state_dict()["memory"]["max_norm"].item() == 0.5


def test_a_scaled_layer_may_go() -> None:
    """Its expression has found a layer once; the others keep their factors."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    clipper = Clipper(model, LayerScale({"^0": 2.0, "^1": 3.0}))
    model[0] = torch.nn.Identity()
    for _ in range(2):
        model[1].weight.grad = torch.ones(3, 3)
        clipper()
        assert torch.equal(model[1].weight.grad, torch.full((3, 3), 3.0))


def test_a_state_that_is_refused_changes_nothing() -> None:
    """Neither the policy's memory nor a candidate's; and a model without data takes none."""
    clipper, saved = (Clipper(Perceptron(), ZClip(), dry_run=[AutoClip(history_size=5)]) for _ in range(2))
    state = saved.state_dict()
    state["memory"]["count"] += 7
    state["candidates"][0]["memory"]["history"] = torch.zeros(9)
    with pytest.raises(ValueError, match="history"):
        clipper.load_state_dict(state)
    assert clipper.state_dict()["memory"]["count"].item() == 0
    with torch.device("meta"):
        empty = Clipper(Perceptron(), ZClip())
    with pytest.raises(ValueError, match="no data yet"):
        empty.load_state_dict(Clipper(Perceptron(), ZClip()).state_dict())


def test_a_step_that_never_came_is_forgotten() -> None:
    """What was told of it does not leave out a later one."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    clipper = Clipper([parameter], SkipAbove(1.0), optimizers=[optimizer])
    parameter.grad = torch.full((3,), 10.0)
    clipper()
    parameter.grad = None
    clipper()
    parameter.grad = torch.full((3,), 0.1)
    optimizer.step()
    assert bool((parameter < 1).all())


def test_a_gradient_that_is_marked_as_conjugate() -> None:
    """PyTorch cannot multiply several of these at once; they are clipped one by one."""
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.tensor([3 + 4j, 0, 0]).conj()
        assert parameter.grad.is_conj()
    assert float(Clipper(parameters, MaxNorm(1.0))()) == pytest.approx(50**0.5)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad.resolve_conj(), torch.tensor([3 - 4j, 0, 0]) / 50**0.5)
