"""What Adam and its kin remember of gradients, against float64."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from tests.support.models import Perceptron
from tests.support.record import wide
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import MaxNorm

BETAS, EPS = (0.8, 0.95), 1e-8
Adams = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
ADAMS: dict[str, Adams] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, betas=BETAS, eps=EPS, foreach=False),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, betas=BETAS, eps=EPS, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, betas=BETAS, eps=EPS, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, betas=BETAS, eps=EPS, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, betas=BETAS, eps=EPS),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, betas=BETAS, eps=EPS),
}


class Moments:
    """Adam's two moments in float64, made of the gradients alone."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.first = [torch.zeros_like(wide(p)) for p in parameters]
        self.second = [torch.zeros_like(wide(p)) for p in parameters]
        self.steps = 0

    def take(self, gradients: list[torch.Tensor]) -> None:
        """Take those of one step."""
        self.steps += 1
        for m, v, g in zip(self.first, self.second, gradients, strict=True):
            m.lerp_(g, 1 - BETAS[0])
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)

    def rms_ratio(self, gradients: list[torch.Tensor], chosen: list[int]) -> float:
        """Of some parameters together."""
        bias = 1 - BETAS[1] ** (self.steps + 1)
        after = {i: BETAS[1] * self.second[i] + (1 - BETAS[1]) * gradients[i] ** 2 for i in chosen}
        terms = [gradients[i] ** 2 / (after[i] / bias).clamp(min=EPS**2) for i in chosen]
        return torch.cat([term.flatten() for term in terms]).mean().sqrt().item()

    def signal_ratio(self, chosen: list[int]) -> float:
        """Of some parameters together."""
        biases = [1 - beta**self.steps for beta in BETAS]
        squares = sum((self.first[i] / biases[0]).square().sum() for i in chosen)
        return float(squares / sum((self.second[i] / biases[1]).sum() for i in chosen))


@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("name", ADAMS)
def test_moments_are_those_of_float64(name: str, closure: bool) -> None:
    """Both ratios are those of moments that are summed up in float64; before the second step there is none."""
    torch.manual_seed(0)
    model = Perceptron()
    parameters = [*model.parameters()]
    layers: dict[str, list[int]] = {}
    for place, (parameter, _) in enumerate(model.named_parameters()):
        layers.setdefault(parameter.rpartition(".")[0], []).append(place)
    optimizer, moments = ADAMS[name](parameters), Moments(parameters)
    with start_exporter(model, None, every=1, optimizer_state=True) as exporter:
        for step in range(6):
            gradients: list[torch.Tensor] = []

            def evaluate(scale: float = 10.0**step, gradients: list[torch.Tensor] = gradients) -> torch.Tensor:
                optimizer.zero_grad()
                loss = scale * model(torch.randn(5, 6)).square().mean()
                loss.backward()
                gradients.extend(wide(p.grad) for p in parameters)
                return loss

            if closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
            for layer, places in layers.items():
                shown = [value(exporter, f"torch_optimizer_{what}_ratio", layer=layer) for what in ("rms", "signal")]
                expected = [moments.rms_ratio(gradients, places), moments.signal_ratio(places)] if step else [None, None]
                assert shown == (pytest.approx(expected, rel=1e-5) if step else expected)
            moments.take(gradients)
        assert errors(exporter) == {}


def test_clipped_gradients_and_a_scaler() -> None:
    """The gradient is the one that the optimizer gets: clipped, and without the scale of a gradient scaler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False))
    (parameter,) = model.parameters()
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=BETAS, eps=EPS, fused=True)
    scaler, moments = torch.amp.GradScaler("cpu", init_scale=256.0), Moments([parameter])
    with start_exporter(model, None, every=1, optimizer_state=True, grad_scaler=scaler) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            factor = torch.inf if step == 3 else 10.0**step
            scaler.scale(factor * model(torch.randn(5, 6)).square().mean()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([parameter], 0.5)
            gradient = wide(parameter.grad) / (1.0 if step % 2 else scaler.get_scale())
            before = value(exporter, "torch_optimizer_rms_ratio", layer="0")
            scaler.step(optimizer)
            scaler.update()
            shown = value(exporter, "torch_optimizer_rms_ratio", layer="0")
            if step == 3:
                assert shown == before
                continue
            assert shown == (pytest.approx(moments.rms_ratio([gradient], [0]), rel=1e-5) if step else None)
            moments.take([gradient])
        assert errors(exporter) == {}


def test_the_gradient_is_that_after_clip() -> None:
    """With `clip=` it is what the optimizer gets, whose second moment is of clipped gradients as well."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False))
    (parameter,) = model.parameters()
    optimizer, moments = torch.optim.AdamW([parameter], lr=0.01, betas=BETAS, eps=EPS), Moments([parameter])
    with start_exporter(model, None, every=1, optimizer_state=True, clip=MaxNorm(0.01)) as exporter:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            gradient = wide(parameter.grad)
            assert gradient.norm().item() == pytest.approx(0.01, rel=1e-4)
            if step:
                expected = moments.rms_ratio([gradient], [0])
                assert value(exporter, "torch_optimizer_rms_ratio", layer="0") == pytest.approx(expected, rel=1e-5)
            moments.take([gradient])
        assert errors(exporter) == {}


class Rotated(torch.optim.AdamW):
    """An optimizer whose second moment is of something else than the gradient, as its further state shows."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["basis"] = torch.eye(2)


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16])
def test_small_types(state: torch.dtype) -> None:
    """Moments in 16 bits are read as they are."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False)).to(state)
    (parameter,) = model.parameters()
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=BETAS, eps=EPS)
    with start_exporter(model, None, every=1, optimizer_state=True) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.randn(5, 8, dtype=state)) * 4).square().sum().backward()
            kept = {name: wide(optimizer.state[parameter][name]) for name in ("exp_avg_sq", "step") if optimizer.state}
            gradient = wide(parameter.grad)
            optimizer.step()
        second = BETAS[1] * kept["exp_avg_sq"] + (1 - BETAS[1]) * gradient**2
        second /= 1 - BETAS[1] ** (float(kept["step"]) + 1)
        expected = (gradient**2 / second).mean().sqrt().item()
        assert value(exporter, "torch_optimizer_rms_ratio", layer="0") == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor, Rotated])
def test_other_optimizers_are_absent_and_said(kind: type[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer without these moments has no such metrics, which is said once."""
    model = Perceptron()
    optimizer = kind(model.parameters(), lr=0.01)
    with caplog.at_level(logging.WARNING), start_exporter(model, None, every=1, optimizer_state=True) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
        assert value(exporter, "torch_optimizer_rms_ratio", layer="first") is None
        assert errors(exporter) == {}
    said = [record.getMessage() for record in caplog.records if "optimizer_state" in record.getMessage()]
    assert len(said) == 1
    assert kind.__name__ in said[0]


def test_each_layer_has_its_turn() -> None:
    """Of a model with more layers than a sample covers, all are shown after some samples."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    with start_exporter(model, None, every=1, optimizer_state=True) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
        assert all(value(exporter, "torch_optimizer_rms_ratio", layer=str(layer)) is not None for layer in range(20))
