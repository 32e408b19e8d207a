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

from tests.matrix.harness import Way
from tests.trainers.training import Training, compared
from torch_grad_exporter.actions import AGC, Clipper

CLASSES = 5


def vit() -> torch.nn.Module:
    """A transformer whose blocks are left out at random."""
    sizes = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.1}
    return timm.create_model("test_vit", pretrained=False, num_classes=CLASSES, **sizes)


def convolutions(name: str = "test_resnet") -> torch.nn.Module:
    """One of timm's smallest models."""
    return timm.create_model(name, pretrained=False, num_classes=CLASSES)


def images(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of four, and of what class they are."""
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
    """As timm's own script trains. `options` go to `create_optimizer_v2`."""
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


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_convnext"])
def test_models(name: str) -> None:
    """Convolutions, depthwise ones, and scales of layers."""
    compared(partial(trained, made=partial(convolutions, name), steps=3), between=0)


@pytest.mark.parametrize("clip", [("norm", 0.5), ("value", 0.01), ("agc", 0.01)], ids=lambda clip: clip[0])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping(clip: tuple[str, float], accumulation: int) -> None:
    """By the global norm, by value, and by each unit (AGC): the norms are those before; one coefficient is of the first only."""
    train = partial(trained, made=vit, steps=10 * accumulation, clip=clip, accumulation=accumulation)
    compared(train, by_limit=clip[0] == "norm", between=3)


@pytest.mark.parametrize("clip", [("norm", 0.5), ("agc", 0.01)], ids=lambda clip: clip[0])
def test_clipping_at_defaults(clip: tuple[str, float]) -> None:
    """What is shown is of the step that it is said to be of."""
    assert len(compared(partial(trained, made=vit, steps=80, clip=clip), Way.DEFAULTS, between=3).samples) > 2


def test_averaged_weights_and_mixup() -> None:
    """A copy of the model that is made while it is watched, and averaged into after each step."""
    compared(partial(trained, made=convolutions, averaged=True, mixed=True, clip=("norm", 0.5), steps=3), between=0)


@pytest.mark.parametrize(
    "kind",
    ["lookahead_adamw", "lookahead_sgd", "lamb", "lars", "adamp", "muon", "adafactorbv", "lion", "nadamw"],
)
def test_optimizers(kind: str) -> None:
    """One step each, also where an optimizer stands around another or edits the gradients."""
    compared(partial(trained, made=vit, kind=kind, clip=("norm", 0.5), weight_decay=0.05))


def test_an_optimizer_of_second_order() -> None:
    """Its gradients carry a graph, and its step differentiates them again."""
    compared(partial(trained, made=convolutions, kind="adahessian", steps=3), between=0)


def test_a_learning_rate_for_each_depth() -> None:
    """Many groups, one for each depth of the model with and without decay."""
    compared(partial(trained, made=vit, layer_decay=0.7, weight_decay=0.05, clip=("norm", 0.5)))


def test_frozen_and_checkpointed() -> None:
    """The first block and the embedding of patches are frozen, the others are computed again."""

    def prepare(model: Any) -> None:
        freeze(model, ["blocks.0", "patch_embed"])
        model.set_grad_checkpointing()

    compared(partial(trained, made=vit, prepare=prepare, accumulation=2))


def scaled(
    run: Training, clip: tuple[str, float] | None, *, accumulation: int = 1, overflow: int | None = None, given: bool
) -> None:
    """Trains with a loss that timm's scaler scales. `overflow`: the step at which the loss is too large. `given`: the scaler is."""
    torch.manual_seed(0)
    model = vit()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=0.01)
    scaler = NativeScaler(device="cpu")
    with run.watching(model, **({"grad_scaler": scaler._scaler} if given else {})):
        for step, (image, target) in enumerate(images(8)):
            loss = torch.nn.functional.cross_entropy(model(image), target) * (1e38 if step == overflow else 1.0)
            if run.heard is not None:
                run.heard.unscale = 1 / scaler._scaler.get_scale()
            update = (step + 1) % accumulation == 0
            mode, limit = clip or ("norm", None)
            scaler(loss, optimizer, clip_grad=limit, clip_mode=mode, parameters=model.parameters(), need_update=update)
            if step == overflow and run.heard is not None:
                run.heard.skipped()
            if update:
                optimizer.zero_grad()
            run.told.append((float(loss.detach()), scaler._scaler.get_scale()))


@pytest.mark.parametrize("clip", [None, ("norm", 0.5), ("agc", 0.01)], ids=lambda clip: clip and clip[0])
def test_scaler(clip: tuple[str, float] | None) -> None:
    """The norms are those of the gradients unscaled."""
    compared(partial(scaled, clip=clip, given=True), by_limit=clip is None or clip[0] == "norm")


def test_scaler_with_accumulation() -> None:
    """As without, and for a round of two."""
    compared(partial(scaled, clip=("norm", 0.5), accumulation=2, given=True))


def test_scaler_with_an_overflow() -> None:
    """A step that is skipped, and said to be."""
    compared(partial(scaled, clip=("norm", 0.5), overflow=4, given=True))


def test_scaler_that_is_found() -> None:
    """A scaler that the exporter was not given is known from its first step on."""
    compared(partial(scaled, clip=("norm", 0.5), given=False), gauges=True)


class Sharpness(torch.optim.Optimizer):
    """SAM around one of timm's optimizers: a step up along the gradient, another backward there, and the step from before."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.param_groups = base.param_groups
        self._up: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def climb(self) -> None:
        gradients = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = torch.stack([g.norm() for _, g in gradients]).norm()
        self._up = [(p, g * 0.05 / (size + 1e-12)) for p, g in gradients]
        for parameter, up in self._up:
            parameter.add_(up)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            self.climb()
            self.zero_grad()
            with torch.enable_grad():
                closure()
        for parameter, up in self._up:
            parameter.sub_(up)
        self.base.step()


@pytest.mark.parametrize("closure", [False, True])
def test_two_passes(closure: bool) -> None:
    """Of a step with two passes the last one is shown; the first is no step, and no skipped one."""

    def train(run: Training) -> None:
        torch.manual_seed(0)
        model = vit()
        optimizer = Sharpness(timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.01))
        with run.watching(model):
            for image, target in images(8):

                def again(image: torch.Tensor = image, target: torch.Tensor = target) -> None:
                    torch.nn.functional.cross_entropy(model(image), target).backward()

                again()
                if closure:
                    optimizer.step(again)
                else:
                    optimizer.climb()
                    optimizer.zero_grad()
                    again()
                    optimizer.step()
                optimizer.zero_grad()

    compared(train, between=0)


def test_distillation_from_a_copy() -> None:
    """A frozen copy of the watched model teaches it; only what is trained is shown."""

    def train(run: Training) -> None:
        torch.manual_seed(0)
        model = vit()
        optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=0.01)
        with run.watching(model):
            teacher = copy.deepcopy(model).requires_grad_(False).eval()
            for image, _ in images(6):
                with torch.no_grad():
                    taught = teacher(image).softmax(-1)
                torch.nn.functional.cross_entropy(model(image), taught).backward()
                optimizer.step()
                optimizer.zero_grad()

    compared(train)


@pytest.mark.parametrize("make", [vit, convolutions, partial(convolutions, "test_efficientnet")])
def test_agc_is_timms(make: Callable[[], torch.nn.Module]) -> None:
    """AGC leaves the gradients that timm's adaptive_clip_grad leaves, to 1e-6, on timm's own models."""
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
