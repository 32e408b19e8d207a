"""The clipper in a user's loop: in place of `clip_grad_norm_`, without a wait, saved and loaded, and with wrong arguments."""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.actions.references import Zoo
from tests.actions.test_policies import POLICIES, gradients, gradients_of
from tests.support.models import Perceptron, batch, sgd
from tests.support.torch_hooks import optimizer_hooks
from torch_grad_exporter.actions import AutoClip, Clipper, LayerScale, MaxNorm, MaxValue, Plateau, SkipAbove, ZClip


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters in a type that compares NaN as well."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [p.detach().clone().view(sizes[p.element_size()]) for p in model.parameters()]


# In place of clip_grad_norm_


@pytest.mark.parametrize(
    ("dtype", "foreach"), [(torch.float32, None), (torch.float32, False), (torch.float64, True), (torch.bfloat16, None)], ids=str
)
def test_max_norm_gives_the_bits_of_clip_grad_norm(dtype: torch.dtype, foreach: bool | None) -> None:
    """After 20 steps of training all parameters, and in each step the norm, have the same bits as with clip_grad_norm_."""
    torch.manual_seed(0)
    model = Perceptron().to(dtype)
    twin = copy.deepcopy(model)
    clipper = Clipper(model, MaxNorm(1.0), foreach=foreach)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05, foreach=foreach) for net in (model, twin)]
    clipped = 0
    for _ in range(20):
        inputs = batch().to(dtype)
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (net(inputs).square().mean() * torch.rand((), generator=torch.Generator().manual_seed(7)) * 6).backward()
        norm, expected = clipper(), torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0, foreach=foreach)
        assert norm.dtype == expected.dtype
        assert torch.equal(norm, expected)
        clipped += bool(expected > 1.0)
        for optimizer in optimizers:
            optimizer.step()
    assert 0 < clipped < 20
    assert all(torch.equal(a, b) for a, b in zip(bits(model), bits(twin), strict=True))


def test_other_types_have_the_bits_of_clip_grad_norm() -> None:
    """Gradients of several types in one model have the bits of clip_grad_norm_, and conjugate ones are clipped as well."""
    types = (torch.float32, torch.bfloat16, torch.complex64)
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(3, 4, dtype=types[place % 3])) for place in range(6)]
    for parameter in ours:
        parameter.grad = torch.randn(3, 4, dtype=parameter.dtype)
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = mine.grad.clone()
    assert torch.equal(Clipper(ours, MaxNorm(1.0))(), torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True))
    conjugate = [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2)]
    for parameter in conjugate:  # which PyTorch cannot multiply together
        parameter.grad = torch.tensor([3 + 4j, 0, 0]).conj()
    assert float(Clipper(conjugate, MaxNorm(1.0))()) == pytest.approx(50**0.5)
    for parameter in conjugate:
        torch.testing.assert_close(parameter.grad.resolve_conj(), torch.tensor([3 - 4j, 0, 0]) / 50**0.5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
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


def test_sparse_gradients_are_refused() -> None:
    """A sparse gradient raises with the name of its parameter and the ways out, and nothing is clipped."""
    model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 1))
    model(torch.tensor([1, 2])).sum().backward()
    before = model[1].weight.grad.clone()
    with pytest.raises(ValueError, match=r"gradient of 0\.weight .*sparse_coo.*sparse=False"):
        Clipper(model, MaxNorm(1e-3))()
    assert torch.equal(model[1].weight.grad, before)


def test_the_clipper_follows_a_model_that_changes() -> None:
    """Layers that come, go or are replaced are clipped, those that stay keep their histories, and no gradient enters none."""
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
    model.first.zero_grad()
    clipper()
    assert clipper.layers == ("first", "second", "third")
    memory = clipper.state_dict()["memory"]
    assert memory["count"].tolist() == [4, 5, 2]
    assert torch.equal(memory["history"][:3, 1], counts[:3])
    assert float(model.third.weight.grad.norm()) <= float(clipper.threshold[2]) + 1e-6


def test_tied_parameters_count_once() -> None:
    """A parameter in two places is measured and clipped once."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)
    assert float(Clipper([weight, weight], MaxNorm(2.0))()) == 4.0
    assert float(weight.grad.norm()) == pytest.approx(2.0, rel=1e-6)


# Saving and loading


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AutoClip", "ZClip by layer", "Plateau by layer"])
def test_going_on_after_loading(name: str) -> None:
    """Saved to a file and loaded into another clipper in mid-training, all later gradients and thresholds have the same bits."""
    policy, _ = POLICIES[name]
    torch.manual_seed(0)
    straight, broken = Zoo(), Zoo()
    straight.load_state_dict(broken.state_dict())
    clippers = [Clipper(straight, policy), Clipper(broken, policy)]
    random = torch.Generator().manual_seed(1)
    for step in range(50):
        if step == 31:
            file = io.BytesIO()
            torch.save(clippers[1].state_dict(), file)
            file.seek(0)
            clippers[1] = Clipper(broken, policy)
            clippers[1].load_state_dict(torch.load(file, weights_only=True))
        gradients(straight, step, random)
        for mine, other in zip(straight.parameters(), broken.parameters(), strict=True):
            other.grad = mine.grad.clone()
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


# Plateau


def test_a_plateau_counts_epochs() -> None:
    """Without an epoch each loss is one; ten losses that are not smaller halve the limit, and NaN is not smaller."""
    model = Perceptron()
    gradients(model, 0, torch.Generator().manual_seed(1))
    clipper = Clipper(model, Plateau(max_norm=1.0))
    limits = []
    for loss in [1.0, *[math.nan] * 9, 0.5, *[0.5] * 10, 0.4]:
        clipper.observe(loss)
        clipper()
        limits.append(float(clipper.threshold))
    assert limits == [1.0] * 20 + [0.5, 0.5]


@pytest.mark.parametrize("patience", [1, 4])
def test_a_plateau_acts_an_epoch_before_torchs(patience: int) -> None:
    """The limit follows the learning rate of `ReduceLROnPlateau` with one epoch less of patience, without its threshold."""
    model = Perceptron()
    gradients(model, 0, torch.Generator().manual_seed(1))
    clipper = Clipper(model, Plateau(max_norm=1.0, patience=patience))
    reference = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(reference, factor=0.5, patience=patience - 1, threshold=0.0, eps=0.0)
    for loss in torch.rand(60, generator=torch.Generator().manual_seed(2)).tolist():
        clipper.observe(loss)
        clipper()
        scheduler.step(loss)
        assert float(clipper.threshold) == pytest.approx(reference.param_groups[0]["lr"])


# Skipping steps


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_above_the_limit_changes_nothing(fused: bool, scaled: bool) -> None:
    """After a skipped step weights and state have the bits of before, and later steps those without it."""
    torch.manual_seed(0)
    model, twin = Perceptron(), Perceptron()
    twin.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused) for net in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    clipper = Clipper(model, SkipAbove(10.0), optimizers=[optimizer] if fused else [])
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
    assert optimizer_hooks(optimizer) == []


# Wrong arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaxNorm(0), r"MaxNorm\(max_norm=0\): expected a finite number above 0, such as 1"),
        (lambda: MaxNorm(1.0, scope="row"), r"""MaxNorm\(scope='row'\): expected "model" or "layer" or "unit\""""),
        (lambda: AutoClip(percentile=101), r"AutoClip\(percentile=101\): .*at least 0 and at most 100"),
        (lambda: AutoClip(history_size=0), r"AutoClip\(history_size=0\): expected a whole number of at least 1, such as 1000"),
        (lambda: LayerScale({}), r"LayerScale\(factors=\{\}\): expected a mapping"),
        (lambda: LayerScale({"(": 1.0}), r"LayerScale\(factors=\{'\(': \.\.\.\}\): expected a regular expression"),
        (lambda: Clipper(Perceptron(), LayerScale({"third": 1.0})), r"'third': .*no layer matches; layers: first, second"),
        (lambda: Clipper(Perceptron(), 1.0), r"Clipper\(policy=1.0\): expected a policy, such as MaxNorm\(1.0\)"),
        (lambda: Clipper(torch.nn.ReLU(), MaxNorm(1.0)), "it has no parameters; expected a module, its parameters, or pairs"),
        (lambda: Clipper(Perceptron(), MaxNorm(1.0), optimizers=[sgd(Perceptron())]), "MaxNorm needs none"),
        (lambda: Clipper([("w", torch.nn.Parameter(torch.ones(2))) for _ in "ab"], MaxNorm(1.0)), "two parameters are called 'w'"),
        (
            lambda: Clipper(Perceptron(), SkipAbove(1.0), optimizers=[sgd(Perceptron())]),
            r"expected fused optimizers.*synchronize=True",
        ),
        (lambda: Clipper(Perceptron(), Plateau()).observe("1"), r"observe\(loss='1'\): expected a number or a tensor"),
    ],
)
def test_wrong_arguments_raise(make: Callable[[], object], message: str) -> None:
    """A wrong argument raises at once with its name, its value and what is expected."""
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert re.search(message, str(raised.value)), str(raised.value)


@pytest.mark.parametrize(
    ("device", "dtype", "policy", "foreach", "message"),
    [
        ("meta", torch.float32, MaxNorm(1.0), True, r"Clipper\(foreach=True\): not possible for gradients on meta"),
        ("cpu", torch.complex64, MaxValue(0.5), None, "MaxValue: a gradient is complex"),
        ("meta", torch.float32, SkipAbove(1.0), None, r"gradients are on meta.*synchronize=True"),
    ],
)
def test_impossible_gradients_are_refused(device: str, dtype: Any, policy: Any, foreach: bool | None, message: str) -> None:  # noqa: ANN401
    """A step whose gradients a policy cannot clip raises with the reason."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=message):
        Clipper([parameter], policy, foreach=foreach)()


# What a training may meet


@pytest.mark.parametrize("policy", [ZClip(scope="layer"), AutoClip(scope="layer")], ids=["ZClip", "AutoClip"])
def test_a_layer_that_was_silent_is_trained_again(policy: ZClip | AutoClip) -> None:
    """Gradients of exactly 0 enter no history, since the threshold would stay 0."""
    model = torch.nn.ModuleDict({"expert": torch.nn.Linear(4, 4)})
    clipper = Clipper(model, policy)
    for step in range(120):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.0 if step < 40 or step % 6 == 0 else 1.0)
        clipper()
        if step >= 40 and step % 6:
            assert all(bool((p.grad > 0.5).all()) for p in model.parameters() if p.grad is not None)


def test_a_step_that_never_came_is_forgotten() -> None:
    """A step to be skipped that never came does not skip a later one."""
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
