"""timm: its models, its ways to clip, its scaler, its optimizers and its averages of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import timm
import timm.optim
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3, NativeScaler, adaptive_clip_grad, dispatch_clip_grad, freeze

from tests.trainers.training import Training, compared
from torch_grad_exporter.actions import AGC, Clipper

CLASSES = 5

COUNTED = ("torch_grad_max_magnitude", "torch_grad_zero_ratio", "torch_grad_min", "torch_grad_max")
"""Of a model of this size every fourth sample counts zeros and extremes."""


def vit() -> torch.nn.Module:
    """Return a transformer with stochastic depth."""
    sizes = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.1}
    return timm.create_model("test_vit", pretrained=False, num_classes=CLASSES, **sizes)


def convolutions(name: str = "test_resnet") -> torch.nn.Module:
    """Return one of timm's smallest models."""
    return timm.create_model(name, pretrained=False, num_classes=CLASSES)


def images(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of four with their classes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)


def trained(
    run: Training,
    made: Callable[[], torch.nn.Module],
    *,
    steps: int = 4,
    kind: str = "adamw",
    clip: tuple[str, float] | None = None,
    prepare: Callable[[Any], None] = lambda model: None,
    averaged: bool = False,
    mixed: bool = False,
    accumulation: int = 1,
    **options: Any,
) -> None:
    """Train like timm's own script; `options` go to `create_optimizer_v2`."""
    torch.manual_seed(0)
    model = made()
    prepare(model)
    optimizer = timm.optim.create_optimizer_v2(model, opt=kind, lr=0.01, **options)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES) if mixed else None
    loss_of = SoftTargetCrossEntropy() if mixed else torch.nn.CrossEntropyLoss()
    with run.watching(model):
        average = ModelEmaV3(model, decay=0.9, use_warmup=True) if averaged else None
        for step, batch in enumerate(images(steps)):
            image, target = batch if mixup is None else mixup(*batch)
            loss = loss_of(model(image), target) / accumulation
            loss.backward(create_graph=getattr(optimizer, "is_second_order", False))
            run.told.append(float(loss.detach()))
            if (step + 1) % accumulation:
                continue
            if clip is not None:
                dispatch_clip_grad(model.parameters(), clip[1], mode=clip[0])
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update(model, step=step)
        if average is not None:
            run.told += [float(tensor.double().sum()) for tensor in average.module.state_dict().values()]


def test_depthwise_convolutions() -> None:
    """Numbers are right for plain and depthwise convolutions."""
    compared(partial(trained, made=partial(convolutions, "test_efficientnet"), steps=3), between=0)


@pytest.mark.parametrize(
    ("clip", "accumulation"), [(("norm", 0.5), 2), (("value", 0.01), 1), (("agc", 0.01), 2)], ids=["norm", "value", "agc"]
)
def test_clipping(clip: tuple[str, float], accumulation: int) -> None:
    """Norms are those before clipping by norm, by value and by unit (AGC)."""
    train = partial(trained, made=vit, steps=10 * accumulation, clip=clip, accumulation=accumulation)
    compared(train, by_limit=clip[0] == "norm", between=3)


def test_averaged_weights_and_mixup() -> None:
    """Numbers are right with a copy of the model that is averaged after each step."""
    compared(
        partial(trained, made=convolutions, averaged=True, mixed=True, clip=("norm", 0.5), steps=3), between=0, without=COUNTED
    )


@pytest.mark.parametrize("kind", ["lookahead_adamw", "adafactorbv"])
def test_optimizers(kind: str) -> None:
    """Numbers are right for optimizers that wrap another one or edit the gradients."""
    compared(partial(trained, made=vit, kind=kind, clip=("norm", 0.5), weight_decay=0.05))


def test_a_second_order_optimizer() -> None:
    """Numbers are right if the step differentiates the gradients again."""
    compared(partial(trained, made=convolutions, kind="adahessian", steps=3), between=0, without=COUNTED)


def test_frozen_and_checkpointed() -> None:
    """Numbers are right with frozen blocks and gradient checkpointing."""

    def prepare(model: Any) -> None:
        freeze(model, ["blocks.0", "patch_embed"])
        model.set_grad_checkpointing()

    compared(partial(trained, made=vit, prepare=prepare, accumulation=2))


def scaled(run: Training, clip: tuple[str, float], *, overflow: int | None = None, given: bool) -> None:
    """Train with timm's scaler; `overflow`: the step whose loss is too large."""
    torch.manual_seed(0)
    model = vit()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=0.01)
    scaler = NativeScaler(device="cpu")
    inner = scaler._scaler  # private: timm shows its scaler nowhere else
    with run.watching(model, **({"grad_scaler": inner} if given else {})):
        for step, (image, target) in enumerate(images(8)):
            loss = torch.nn.functional.cross_entropy(model(image), target) * (1e38 if step == overflow else 1.0)
            if run.heard is not None:
                run.heard.unscale = 1 / inner.get_scale()
            scaler(loss, optimizer, clip_grad=clip[1], clip_mode=clip[0], parameters=model.parameters())
            if step == overflow and run.heard is not None:
                run.heard.skipped()
            optimizer.zero_grad()
            run.told.append((float(loss.detach()), inner.get_scale()))


def test_scaler_with_an_overflow() -> None:
    """A step that overflows is counted as skipped."""
    compared(partial(scaled, clip=("norm", 0.5), overflow=4, given=True))


def test_a_scaler_is_found() -> None:
    """A scaler that was not given is known from its first step on."""
    compared(partial(scaled, clip=("norm", 0.5), given=False), gauges=True)


@pytest.mark.parametrize("make", [vit, partial(convolutions, "test_efficientnet")])
def test_agc_is_timms(make: Callable[[], torch.nn.Module]) -> None:
    """AGC leaves the same gradients as timm's adaptive_clip_grad, to 1e-6."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    clipper = Clipper(model, AGC(clip_factor=0.01, eps=1e-3))
    changed = 0
    for inputs, targets in images(4):
        for one in (model, twin):
            one.zero_grad()
        (torch.nn.functional.cross_entropy(model(inputs), targets) * 30).backward()
        before = [p.grad.clone() for p in model.parameters()]
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = one.grad.clone()
        clipper()
        adaptive_clip_grad(twin.parameters(), clip_factor=0.01, eps=1e-3)
        for old, one, other in zip(before, model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-12)
            changed += not torch.equal(old, one.grad)
    assert changed > 4 * len(before) // 2
