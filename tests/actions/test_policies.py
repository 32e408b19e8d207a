"""Each policy against its published formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.actions import references
from tests.actions.references import Zoo, arrays
from torch_grad_exporter.actions import AGC, AutoClip, Clipper, LayerScale, MaxNorm, MaxValue, Plateau, ZClip

POLICIES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "MaxNorm": (MaxNorm(3.0), lambda: references.MaxNorm(3.0)),
    "MaxNorm by layer": (MaxNorm(1.0, scope="layer"), lambda: references.MaxNorm(1.0, "layer")),
    "MaxNorm by unit": (MaxNorm(0.8, scope="unit"), lambda: references.MaxNormOfUnits(0.8)),
    "MaxValue": (MaxValue(0.3), lambda: references.MaxValue(0.3)),
    "LayerScale": (
        LayerScale({"^linear$": 0.1, "^conv$": 3, "gpt": 0.0}),
        lambda: references.LayerScale({"linear": 0.1, "conv": 3, "gpt": 0}),
    ),
    "AutoClip": (AutoClip(history_size=50), lambda: references.AutoClip(10, 50)),
    "AutoClip by layer": (AutoClip(37.5, history_size=40, scope="layer"), lambda: references.AutoClip(37.5, 40, "layer")),
    "ZClip": (ZClip(0.9, 2.0, 7, max_norm=4.0), lambda: references.ZClip(0.9, 2.0, 7, 4.0)),
    "ZClip by layer": (ZClip(scope="layer"), lambda: references.ZClip(0.97, 2.5, 25, scope="layer")),
    "AGC": (AGC(0.5, eps=0.9), lambda: references.AGC(0.5, 0.9)),
    "AGC by layer": (AGC(0.5, scope="layer"), lambda: references.AGC(0.5, 1e-3, "layer")),
    "Plateau by layer": (Plateau(2.0, 0.7, 3, 0.1, "layer"), lambda: references.Plateau(2.0, 0.7, 3, 0.1, "layer")),
}  # fmt: skip


BAD = {3: math.nan, 30: math.inf, 31: math.nan}
"""By step: what a gradient contains."""


def gradients(model: torch.nn.Module, step: int, random: torch.Generator) -> None:
    """Make gradients whose size wanders over two orders of magnitude, differs by layer, and has spikes."""
    size = 10 ** (0.4 * math.sin(step / 50)) * (30.0 if step % 37 == 36 else 1.0)
    for place, parameter in enumerate(model.parameters()):
        own = size * (0.2 + 0.1 * place) * torch.rand((), generator=random)
        noise = torch.randn(parameter.shape, generator=random) * own
        parameter.grad = noise.to(parameter.dtype)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by name of parameter."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def follow(name: str, dtype: torch.dtype, steps: int, rtol: float, atol: float = 0.0) -> None:
    """Clip this many steps with the policy and its formula: `rtol` of a parameter's largest gradient may be between them."""
    policy, make = POLICIES[name]
    torch.manual_seed(0)
    model, random, reference = Zoo().to(dtype), torch.Generator().manual_seed(1), make()
    with torch.no_grad():
        model.norm.weight[:] *= 0.0  # of a weight of 0 AGC takes `eps`
    clipper = Clipper(model, policy)
    changed, losses = 0, list[list[float]]()
    for step in range(steps):
        gradients(model, step, random)
        before = arrays(gradients_of(model))
        if step % 4 == 3:
            losses.append([3.0 / (1 + step // 100), 2.0])
            clipper.observe(losses[-1][0], epoch=step // 4)
            clipper.observe(torch.tensor(losses[-1][1]), epoch=step // 4 + 0.5)
            if isinstance(reference, references.Plateau) and len(losses) > 1:
                reference.epoch(losses[-2])
        norm = clipper()
        expected, thresholds = reference.step(before, arrays(dict(model.named_parameters())))
        assert float(norm) == pytest.approx(references.whole(before), rel=1e-5)
        assert clipper.threshold is not None
        np.testing.assert_allclose(
            np.broadcast_to(clipper.threshold.double().numpy().reshape(-1), len(thresholds)), thresholds, rtol=1e-5
        )
        for key, gradient in arrays(gradients_of(model)).items():
            error = np.abs(gradient - expected[key]).max(initial=0)
            assert error <= rtol * np.abs(expected[key]).max(initial=0) + atol, f"{key} in step {step}"
            changed += not np.array_equal(gradient, before[key])
    assert changed > 0  # the formula clipped at times


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_follows_its_formula(name: str) -> None:
    """Norm, thresholds and clipped gradients are those of the published formula in float64, to 1e-5."""
    follow(name, torch.float32, steps=120, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["ZClip by layer", "AGC"])
def test_the_formula_holds_in_every_type(name: str, dtype: torch.dtype) -> None:
    """Thresholds are right to 1e-5, and gradients to the last bit of their type, in float64 and in both half types."""
    follow(name, dtype, steps=40, rtol=1e-5 + torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


def test_float16_norms_do_not_overflow() -> None:
    """Finite float16 gradients whose norm is above 65,504 are clipped to the limit, where clip_grad_norm_ makes them zero."""
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    parameter.grad = torch.full((1000,), 10_000.0, dtype=torch.float16)
    norm = Clipper([parameter], MaxNorm(1.0))()
    assert float(norm) == pytest.approx(10_000 * math.sqrt(1000), rel=1e-5)
    assert float(parameter.grad.double().norm()) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_nonfinite_norms_change_nothing(name: str) -> None:
    """A step with a NaN or an infinity keeps its gradients, and later steps are clipped as without it."""
    policy, _ = POLICIES[name]
    torch.manual_seed(0)
    model = Zoo()
    disturbed, calm = Clipper(model, policy), Clipper(model, policy)
    random = torch.Generator().manual_seed(1)
    for step in range(40):
        if step in BAD:
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            model.linear.weight.grad[1, 2] = BAD[step]
            before = {key: gradient.clone() for key, gradient in gradients_of(model).items()}
            assert not math.isfinite(disturbed())
            for key in before if policy.scope == "model" else ["linear.weight"]:
                rows = 1 if policy.scope == "unit" else slice(None)
                assert torch.equal(before[key][rows].nan_to_num(7.0), gradients_of(model)[key][rows].nan_to_num(7.0))
        gradients(model, step, random)
        kept = {key: gradient.clone() for key, gradient in gradients_of(model).items()}
        disturbed()
        first = {key: gradient.clone() for key, gradient in gradients_of(model).items()}
        for key, parameter in model.named_parameters():
            parameter.grad = kept[key]
        calm()
        if policy.scope == "model":
            assert all(torch.equal(first[key], gradient) for key, gradient in gradients_of(model).items())
    assert torch.equal(disturbed.threshold.reshape(-1)[0], calm.threshold.reshape(-1)[0])  # the first layer is the linear one
