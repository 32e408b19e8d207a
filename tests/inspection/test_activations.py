"""Activations: each number against a float64 reference of outputs and gradients that hooks of the test kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.inspection.nan_origin.causes import Function
from tests.support.scrape import errors, key, value, values
from tests.support.torch_hooks import all_hooks, module_hooks
from torch_grad_exporter import Exporter, start_exporter

NAMES = ("dead_ratio", "zero_ratio", "rms", "max_magnitude", "grad_norm", "kurtosis", "channel_ratio")


class Kept:
    """Copies of all outputs of modules, and of the gradients that a hook at each of them gets."""

    def __init__(self, model: nn.Module, unit_dims: dict[str, int]) -> None:
        self.clear()
        self._dims = unit_dims
        for name, module in model.named_modules():
            if not [*module.children()]:
                module.register_forward_hook(lambda _m, _a, output, name=name: self._keep(name, output))

    def _keep(self, name: str, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        self.outputs.setdefault(name, []).append(output.detach().clone())
        if output.grad_fn is not None:
            node, place = output.grad_fn, output.output_nr
            node.register_prehook(lambda g: self.gradients.setdefault(name, []).append(g[place].detach().clone()))

    def clear(self) -> None:
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self.gradients: dict[str, list[torch.Tensor]] = {}

    def reference(self, name: str, scale: float = 1.0) -> dict[str, float | None]:
        """Return the definitions in float64, computed plainly."""
        outputs = [output.double() for output in self.outputs[name]]
        flat = torch.cat([output.reshape(-1) for output in outputs])
        dim = self._dims[name]
        per_unit = [output.movedim(dim, 0).reshape(output.shape[dim], -1) for output in outputs]
        dead = sum(all(not bool((units[unit] != 0).any()) for units in per_unit) for unit in range(len(per_unit[0])))
        squares = torch.cat(per_unit, dim=1).square().mean(dim=1)
        middle = squares.sort().values[(len(squares) - 1) // 2]
        gradients = [gradient.double().reshape(-1) for gradient in self.gradients.get(name, [])]
        return {
            "dead_ratio": dead / len(per_unit[0]),
            "zero_ratio": float((flat == 0).sum()) / flat.numel(),
            "rms": math.sqrt(float(flat.square().sum()) / flat.numel()),
            "max_magnitude": float(flat.abs().max()),
            "grad_norm": float(torch.cat(gradients).norm()) / scale if gradients else None,
            "kurtosis": float(squares.square().mean() / squares.mean().square()) if squares.any() else None,
            "channel_ratio": float((squares.max() / middle).sqrt()) if middle else None,
        }


def shown(exporter: Exporter, layer: str) -> dict[str, float | None]:
    """Return what the scrape has of a layer."""
    return {name: value(exporter, f"torch_activation_{name}", layer=layer) for name in NAMES}


def convnet() -> nn.Sequential:
    """Return a model with an in-place ReLU after a norm, and a ReLU that leaves dead units."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(96, 12), nn.ReLU(), nn.Linear(12, 2)
    )  # fmt: skip
    with torch.no_grad():
        model[0].bias[2] = -50.0
        model[1].weight[3], model[1].bias[3] = 0.0, -1.0  # a dead channel after the ReLU
        model[4].weight[5:8], model[4].bias[5:8] = 0.0, -1.0
    return model


DIMS = dict.fromkeys("0123456", 1)


@contextmanager
def watched(model: nn.Module, **options: object) -> Iterator[Exporter]:
    """Start an exporter of every round that fails in nothing."""
    with start_exporter(model, None, **{"every": 1, "activations": True, **options}) as exporter:
        yield exporter
        assert errors(exporter) == {}


def agree(found: dict[str, float | None], expected: dict[str, float | None], rel: float) -> None:
    """Compare sizes to `rel`, and shares, which are counts, exactly."""
    for name, wanted in expected.items():
        exact = name in ("dead_ratio", "zero_ratio")
        assert found[name] == (wanted if wanted is None or exact else pytest.approx(wanted, rel=rel)), name


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: torch.Tensor) -> None:
    """Take one step over these micro-batches."""
    optimizer.zero_grad()
    for x in batches:
        model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scale"), [(None, 1.0), (torch.bfloat16, 1.0), (None, 1024.0)])
def test_every_number_is_that_of_float64(dtype: torch.dtype | None, scale: float) -> None:
    """Sizes are right to 1e-5, under autocast to 1e-2, shares exact, and gradients without the scale of the loss."""
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    kept = Kept(model, DIMS)
    with watched(model, grad_scaler=scaler) as exporter:
        for _ in range(3):
            kept.clear()
            optimizer.zero_grad()
            for x in torch.randn(3, 4, 3, 6, 6):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                    loss = model(x).square().mean()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(scale if scaler.is_enabled() else None)
        exporter.close()
        for name in DIMS:
            agree(shown(exporter, name), kept.reference(name, scale), 1e-5 if dtype is None else 1e-2)
        assert shown(exporter, "2")["dead_ratio"] == 1 / 6
        assert shown(exporter, "5")["dead_ratio"] == 3 / 12 if dtype is None else True
        assert value(exporter, "torch_activation_captures_total", layer="0") == 3


class Odd(nn.Module):
    """A module called twice, under two names, and outputs that are nested, integers, empty, complex or sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.also_twice = self.twice
        self.nested = Function(lambda x: {"a": [torch.arange(3)], "b": (x * 2, x)})
        self.integers = Function(lambda x: x.argmax(dim=1))
        self.empty = Function(lambda x: x[:0])
        self.complex = Function(lambda x: torch.complex(x, 2 * x))
        self.sparse = Function(lambda x: x.to_sparse())
        self.scalar = Function(lambda x: x.mean())
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.also_twice(self.twice(x))
        self.integers(y), self.empty(y)
        z = self.nested(y)["b"][0] + self.complex(y).abs() + self.sparse(y).to_dense()
        attended = self.attention(z[None], z[None], z[None])[0]
        return self.scalar(self.lstm(attended)[0])


def test_outputs_of_all_kinds() -> None:
    """Both outputs of a module called twice count, and the first floating tensor of a nested output."""
    torch.manual_seed(0)
    model = Odd()
    outputs: list[torch.Tensor] = []
    model.twice.register_forward_hook(lambda _m, _a, output: outputs.append(output.detach().double()))
    with watched(model) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4))
        exporter.close()
        both = torch.cat(outputs)
        assert len(outputs) == 2
        found = values(exporter)
        rms = {dict(labels)["layer"]: number for (name, labels), number in found.items() if name == "torch_activation_rms"}
        size = float(outputs[1].square().mean().sqrt())
        expected = {"twice": float(both.square().mean().sqrt()), "nested": 2 * size, "complex": math.sqrt(5) * size}
        assert {layer: rms[layer] for layer in expected} == pytest.approx(expected)
        assert rms.keys() - expected == {"scalar", "attention", "lstm"}
        assert found[key("torch_activation_grad_norm", layer="scalar")] == pytest.approx(2 * rms["scalar"])
        assert key("torch_activation_dead_ratio", layer="scalar") not in found
        assert found[key("torch_activation_modules_left_out", reason="output")] == 3


def test_forwards_that_do_not_train_do_not_count() -> None:
    """Evaluations, forwards without a backward and micro-batches whose gradients were cleared change no number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = Kept(model, dict.fromkeys("012", 1))
    with watched(model) as exporter:
        for step in range(6):
            if step == 5:
                optimizer.zero_grad()
                model(1000 * torch.randn(3, 4)).sum().backward()
            optimizer.zero_grad()
            kept.clear()
            for x in torch.randn(2, 3, 4):
                loss = model(x).square().mean()
                with torch.no_grad():
                    model(100 * x)
                loss.backward()
            optimizer.step()
            expected = {name: kept.reference(name) for name in "012"}
            model(torch.full((3, 4), 1e3))  # of which there is no backward
            with torch.no_grad():
                model.eval()(100 * x)
            model.train()
        exporter.close()
        assert value(exporter, "torch_train_skipped_steps_total") == 1
        for name in "012":
            agree(shown(exporter, name), expected[name], 1e-5)


class Head(nn.Module):
    """A frozen body below a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def test_outputs_below_which_all_is_frozen_are_shown() -> None:
    """Where no module's output has a gradient, outputs are shown all the same, without one."""
    model = Head()
    kept = Kept(model, {"body": 1})
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    with watched(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            kept.clear()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        exporter.close()
        agree(shown(exporter, "body"), kept.reference("body"), 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_once(reentrant: bool) -> None:
    """A checkpointed part shows each output once, and its gradients unless the checkpoint is reentrant."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(4, 6), nn.ReLU())

    model, sizes = nn.ModuleDict({"first": nn.Linear(4, 4), "part": part}), []
    model.forward = lambda x: torch.utils.checkpoint.checkpoint(part, model["first"](x), use_reentrant=reentrant).square().mean()
    part[0].register_forward_hook(lambda _m, _a, output: sizes.append(output.detach().double().square().mean().sqrt()))
    with watched(model) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
        exporter.close()
        assert len(sizes) == 2
        assert value(exporter, "torch_activation_rms", layer="part.0") == pytest.approx(float(sizes[0]), rel=1e-6)
        assert (value(exporter, "torch_activation_grad_norm", layer="part.0") is None) == reentrant
        assert value(exporter, "torch_activation_grad_norm", layer="first") is not None


def test_a_generator_and_its_discriminator() -> None:
    """A generator whose forward comes before the discriminator's step shows outputs and gradients."""
    torch.manual_seed(0)
    networks = {"g": nn.Sequential(nn.Linear(2, 4)), "d": nn.Sequential(nn.Linear(4, 1))}
    g, d = (torch.optim.SGD(network.parameters(), lr=0.01) for network in networks.values())
    with start_exporter(networks, None, every=1, activations=True) as exporter:
        for _ in range(4):
            fake = networks["g"](torch.randn(3, 2))
            d.zero_grad()
            networks["d"](fake.detach()).mean().backward()
            d.step()
            g.zero_grad()
            networks["d"](fake).mean().backward()
            g.step()
        exporter.close()
        assert errors(exporter) == {}
        expected = float(fake.detach().double().square().mean().sqrt())
        assert value(exporter, "torch_activation_rms", layer="g.0") == pytest.approx(expected, rel=1e-5)
        assert value(exporter, "torch_activation_grad_norm", layer="g.0") is not None
        assert value(exporter, "torch_activation_captures_total", layer="g.0") == 4
        assert value(exporter, "torch_activation_captures_total", layer="d.0") == 8


# What it may not do


def test_nothing_is_left_at_the_modules_between_rounds() -> None:
    """After each step no inner module has a hook, and in an unsampled round it has none."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner, counts = [*model.children()], []
    inner[0].register_forward_hook(lambda *_: counts.append(len(module_hooks(inner[1]))))
    with watched(model, every=4):
        for _ in range(12):
            train(model, optimizer, torch.randn(2, 3, 6, 6))
            assert not any(module_hooks(module) for module in inner[1:])
    assert min(counts) == 0 < max(counts)


def test_more_modules_than_labels_are_folded() -> None:
    """40 modules with `max_layers=5` have five labels at most, and the folded modules are counted."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(20)])
    with watched(model, max_layers=5) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
        exporter.close()
        found = values(exporter)
        assert 1 <= sum(name == "torch_activation_rms" for name, _ in found) <= 5
        assert found[key("torch_activation_layers_folded")] == 40


@pytest.mark.parametrize(("chosen", "layers"), [(False, set()), (r"^0$|\.1", {"0", "0.1"})])
def test_a_pattern_chooses_modules(chosen: bool | str, layers: set[str]) -> None:
    """A pattern chooses modules by name, also those with children; without the option nothing is shown."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))
    with watched(model, activations=chosen) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
        exporter.close()
        assert {dict(labels)["layer"] for name, labels in values(exporter) if name == "torch_activation_rms"} == layers
    if chosen:
        with pytest.raises(ValueError, match="activations='conv'"):
            start_exporter(model, None, activations="conv")
    assert all_hooks(model) == []


class Extreme(nn.Module):
    """Modules whose outputs are extreme or not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.large, self.small, self.huge = (
            Function(lambda x, size=size, dtype=dtype: torch.full_like(x, size, dtype=dtype))
            for size, dtype in ((6e4, torch.float16), (1e-7, torch.float16), (1e200, torch.float64))
        )
        self.planted = Function(lambda x: x + torch.tensor([math.nan, math.inf, -math.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for module in (self.large, self.small, self.huge, self.planted):
            module(y)
        return y


def test_extreme_and_nonfinite_outputs() -> None:
    """The rms is right where squares overflow or underflow, and NaN and infinite elements are counted by kind."""
    model = Extreme()
    with watched(model) as exporter:
        for _ in range(2):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
        exporter.close()
        for layer, expected in (("large", 6e4), ("small", float(torch.tensor(1e-7).half())), ("huge", 1e200)):
            assert value(exporter, "torch_activation_rms", layer=layer) == pytest.approx(expected, rel=1e-6)
        name = "torch_activation_nonfinite_elements_total"
        counts = [[value(exporter, name, layer=layer, kind=kind) for kind in ("nan", "inf")] for layer in ("huge", "planted")]
        assert counts == [[0, 0], [4, 8]]
        assert math.isnan(shown(exporter, "planted")["rms"] or 0.0)
