"""Activations: each number against a float64 reference of the outputs and gradients that the test keeps by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.scrape import errors, key, value, values
from torch_grad_exporter import Exporter, start_exporter

NAMES = ("dead_ratio", "zero_ratio", "rms", "max_magnitude", "grad_norm")


class Kept:
    """What a user would keep: copies of all outputs of modules, and the gradients that a hook at each of them is given."""

    def __init__(self, model: nn.Module, unit_dims: dict[str, int], skip: tuple[str, ...] = ()) -> None:
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self.gradients: dict[str, list[torch.Tensor]] = {}
        self._dims = unit_dims
        for name, module in model.named_modules():
            if not [*module.children()] and name not in skip:
                module.register_forward_hook(lambda _m, _a, output, name=name: self._keep(name, output))

    def _keep(self, name: str, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        self.outputs.setdefault(name, []).append(output.detach().clone())
        if output.grad_fn is not None:
            node, place = output.grad_fn, output.output_nr
            node.register_prehook(lambda g: self.gradients.setdefault(name, []).append(g[place].detach().clone()))

    def clear(self) -> None:
        self.outputs, self.gradients = {}, {}

    def reference(self, name: str, scale: float = 1.0) -> dict[str, float | None]:
        """The definitions, in float64 and without any cleverness."""
        outputs = [one.double() for one in self.outputs[name]]
        flat = torch.cat([one.reshape(-1) for one in outputs])
        dim = self._dims[name]
        per_unit = [one.movedim(dim, 0).reshape(one.shape[dim], -1) for one in outputs]
        dead = sum(all(not bool((one[unit] != 0).any()) for one in per_unit) for unit in range(len(per_unit[0])))
        gradients = [one.double().reshape(-1) for one in self.gradients.get(name, [])]
        return {
            "dead_ratio": dead / len(per_unit[0]),
            "zero_ratio": float((flat == 0).sum()) / flat.numel(),
            "rms": math.sqrt(float(flat.square().sum()) / flat.numel()),
            "max_magnitude": float(flat.abs().max()),
            "grad_norm": float(torch.cat(gradients).norm()) / scale if gradients else None,
        }


def shown(exporter: Exporter, layer: str) -> dict[str, float | None]:
    """What the scrape has of a layer."""
    return {name: value(exporter, f"torch_activation_{name}", layer=layer) for name in NAMES}


def convnet() -> nn.Sequential:
    """A convolution, an in-place ReLU after a norm, and a linear layer with a ReLU that leaves dead units."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6 * 16, 12),
        nn.ReLU(),
        nn.Linear(12, 2),
    )
    with torch.no_grad():
        model[0].bias[2] = -50.0
        model[1].weight[3], model[1].bias[3] = 0.0, -1.0  # a dead channel after the ReLU
        model[4].weight[5:8], model[4].bias[5:8] = 0.0, -1.0
    return model


DIMS = {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1, "5": 1, "6": 1}


@contextmanager
def watched(model: nn.Module, **options: object) -> Iterator[Exporter]:
    """An exporter of every round that fails in nothing."""
    with start_exporter(model, None, **{"every": 1, "activations": True, **options}) as exporter:
        yield exporter
        assert errors(exporter) == {}


def agree(found: dict[str, float | None], expected: dict[str, float | None], rel: float) -> None:
    """Whether sizes are right to `rel`, and shares, which are counts, exact."""
    for name, wanted in expected.items():
        exact = name.endswith("ratio")
        assert found[name] == (wanted if wanted is None or exact else pytest.approx(wanted, rel=rel)), name


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """One step over these micro-batches."""
    optimizer.zero_grad()
    for x in batches:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x).square().mean()
        loss.backward()
    optimizer.step()


@pytest.mark.parametrize(("dtype", "rel"), [(None, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_number_is_that_of_a_loop_in_float64(dtype: torch.dtype | None, rel: float, micro_batches: int) -> None:
    """Sizes to 1e-5, under autocast to 1e-2, and shares exactly, over all micro-batches of a step and after an in-place ReLU."""
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = Kept(model, DIMS)
    with watched(model) as exporter:
        for _ in range(3):
            kept.clear()
            train(model, optimizer, *torch.randn(micro_batches, 4, 3, 6, 6), dtype=dtype)
        exporter._training.capture.close()  # closes the round
        for name in DIMS:
            agree(shown(exporter, name), kept.reference(name), rel)
        assert shown(exporter, "2")["dead_ratio"] == 1 / 6
        assert shown(exporter, "5")["dead_ratio"] == 3 / 12 if dtype is None else True
        assert value(exporter, "torch_activation_captures_total", layer="0") == 3


def test_sizes_that_no_square_of_the_type_holds() -> None:
    """float16 outputs of 6e4 and of 1e-7, and float64 ones of 1e200: sizes are right, and nothing is not finite."""

    class Times(nn.Module):
        def __init__(self, factor: float, dtype: torch.dtype) -> None:
            super().__init__()
            self.factor, self.dtype = factor, dtype

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.double() * self.factor).to(self.dtype)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.large = Times(6e4, torch.float16)
            self.small = Times(1e-7, torch.float16)
            self.huge = Times(1e200, torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            ones = torch.ones_like(y)
            return y.sum() + sum(one(ones).double().mean() * 0 for one in (self.large, self.small, self.huge))

    model = Model()
    with watched(model) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
        exporter._training.capture.close()
        for layer, expected in (("large", 6e4), ("small", float(torch.tensor(1e-7).half())), ("huge", 1e200)):
            assert value(exporter, "torch_activation_rms", layer=layer) == pytest.approx(expected, rel=1e-6)
            assert value(exporter, "torch_activation_nonfinite_elements_total", layer=layer, kind="inf") == 0


def test_elements_that_are_not_finite_are_counted_by_kind_and_layer() -> None:
    """Two NaN and three infinite elements planted behind a layer: just these, and a rms that is NaN, not a made-up number."""

    class Plants(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            planted = torch.zeros_like(x)
            planted[0, :2], planted[1, :3] = math.nan, math.inf
            return x + planted

    model = nn.Sequential(nn.Linear(4, 5), Plants())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model) as exporter:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).nan_to_num(0, 0, 0).sum().backward()
            optimizer.step()
        exporter._training.capture.close()
        found = {one: value(exporter, "torch_activation_nonfinite_elements_total", layer="1", kind=one) for one in ("nan", "inf")}
        assert found == {"nan": 2 * 2, "inf": 2 * 3}
        assert math.isnan(shown(exporter, "1")["rms"] or 0.0)
        assert value(exporter, "torch_activation_nonfinite_elements_total", layer="0", kind="nan") == 0


class Odd(nn.Module):
    """A module called twice, one under two names, nested outputs, integers, empty ones, complex and sparse ones."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.also_twice = self.twice
        self.nested = Calls(lambda x: {"a": [torch.arange(3)], "b": (x * 2, x)})
        self.integers = Calls(lambda x: x.argmax(dim=1))
        self.empty = Calls(lambda x: x[:0])
        self.complex = Calls(lambda x: torch.complex(x, 2 * x))
        self.sparse = Calls(lambda x: x.to_sparse())
        self.scalar = Calls(lambda x: x.mean())
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.also_twice(self.twice(x))
        self.integers(y), self.empty(y)
        z = self.nested(y)["b"][0] + self.complex(y).abs() + self.sparse(y).to_dense()
        attended = self.attention(z[None], z[None], z[None])[0]
        return self.scalar(self.lstm(attended)[0])


class Calls(nn.Module):
    """A module that is a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def test_outputs_of_all_kinds() -> None:
    """Of a module called twice both outputs count; of a nested output the first floating tensor; what has none is left out."""
    torch.manual_seed(0)
    model = Odd()
    outputs: list[torch.Tensor] = []
    model.twice.register_forward_hook(lambda _m, _a, output: outputs.append(output.detach().double()))
    with watched(model) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4))
        exporter._training.capture.close()
        both = torch.cat(outputs)
        assert len(outputs) == 2
        assert value(exporter, "torch_activation_rms", layer="twice") == pytest.approx(float(both.square().mean().sqrt()), rel=1e-6)
        second = outputs[1]
        assert value(exporter, "torch_activation_rms", layer="nested") == pytest.approx(2 * float(second.square().mean().sqrt()))
        size = math.sqrt(5) * float(second.square().mean().sqrt())
        assert value(exporter, "torch_activation_rms", layer="complex") == pytest.approx(size)
        layers = {dict(labels)["layer"] for name, labels in values(exporter) if name == "torch_activation_rms"}
        assert layers == {"twice", "nested", "complex", "scalar", "attention", "lstm"}
        assert value(exporter, "torch_activation_dead_ratio", layer="scalar") is None
        rms = value(exporter, "torch_activation_rms", layer="scalar")
        assert value(exporter, "torch_activation_grad_norm", layer="scalar") == pytest.approx(2 * (rms or 0.0))
        assert value(exporter, "torch_activation_modules_left_out", reason="output") == 3


def test_forwards_that_are_no_training_do_not_count() -> None:
    """An evaluation between forward and backward, one in evaluation mode, and a forward without a backward change no number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(3, 4)
    found = []
    for disturbed in (False, True):
        with watched(model) as exporter:
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                if disturbed:
                    with torch.no_grad():
                        model(100 * x)
                loss.backward()
                optimizer.step()
                if disturbed:
                    model(1000 * x)  # of which there is no backward
                    model.eval()
                    with torch.no_grad():
                        model(100 * x)
                    model.train()
            exporter._training.capture.close()
            found.append([shown(exporter, layer) for layer in ("0", "1")])
    assert found[0] == found[1]
    assert found[0][0]["rms"] is not None


def test_micro_batches_that_are_given_up_do_not_count() -> None:
    """Of a step whose gradients are cleared after one of two micro-batches nothing is in the sample of the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = Kept(model, {"0": 1, "1": 1, "2": 1})
    with watched(model) as exporter:
        for step in range(6):
            if step == 5:
                optimizer.zero_grad()
                model(1000 * torch.randn(3, 4)).sum().backward()
            kept.clear()
            train(model, optimizer, *torch.randn(2, 3, 4))
        exporter._training.capture.close()
        assert value(exporter, "torch_train_skipped_steps_total") == 1
        for name in ("0", "1", "2"):
            agree(shown(exporter, name), kept.reference(name), 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_second_forward_of_a_checkpoint_is_left_out(reentrant: bool) -> None:
    """A checkpointed part shows each output once; its gradients as well, where the checkpoint is not reentrant."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(4, 6), nn.ReLU())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(4, 4), part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.part, self.first(x), use_reentrant=reentrant).square().mean()

    model, sizes = Model(), []
    part[0].register_forward_hook(lambda _m, _a, output: sizes.append(output.detach().double().square().mean().sqrt()))
    with watched(model) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
        exporter._training.capture.close()
        assert len(sizes) == 2
        assert value(exporter, "torch_activation_rms", layer="part.0") == pytest.approx(float(sizes[0]), rel=1e-6)
        assert (value(exporter, "torch_activation_grad_norm", layer="part.0") is None) == reentrant
        assert value(exporter, "torch_activation_grad_norm", layer="first") is not None


def test_a_gradient_is_without_the_scale_of_the_loss() -> None:
    """With a scaler at 1024 the norm is that of a run without one; before a scaler is known there is none."""
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kept = Kept(model, DIMS)
    with watched(model, grad_scaler=scaler) as exporter:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 3, 6, 6)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update(1.0)  # what comes later changes nothing
        exporter._training.capture.close()
        agree(shown(exporter, "4"), kept.reference("4", 1024.0), 1e-5)


def test_a_first_sample_whose_scaler_is_not_known_shows_no_gradient() -> None:
    """The step is skipped, so that nothing has shown whether there is a scaler: the gradient's norm is absent, the rms is not."""
    model = nn.Sequential(nn.Linear(4, 6))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with watched(model) as exporter:
        for _ in range(2):
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            model[0].weight.grad = model[0].bias.grad = None  # as by hand
        exporter._training.capture.close()
        assert shown(exporter, "0")["rms"] is not None
        assert shown(exporter, "0")["grad_norm"] is None


def test_a_scaler_that_is_disabled_hides_no_gradient() -> None:
    """As in scripts that switch it off on the CPU: the norm is there from the first step on."""
    model = nn.Sequential(nn.Linear(4, 6))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    with watched(model) as exporter:
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert (shown(exporter, "0")["grad_norm"] is not None) or step == 0


def test_a_gradient_penalty_counts_once() -> None:
    """What `torch.autograd.grad` has passed before is not part of the gradient that the backward brings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    with watched(model) as exporter:
        x = torch.randn(3, 4, requires_grad=True)
        y = model(x)
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + inner.norm(dim=1).sub(1).square().mean()
        y.register_hook(lambda g: seen.append(g.detach().clone()))
        loss.backward()
        optimizer.step()
        exporter._training.capture.close()
        assert shown(exporter, "2")["grad_norm"] == pytest.approx(float(seen[0].double().norm()), rel=1e-5)


def test_two_networks_of_which_one_waits_for_its_backward() -> None:
    """A generator whose forward comes before the step of the discriminator shows its outputs and its gradients all the same."""
    torch.manual_seed(0)
    networks = {"g": nn.Sequential(nn.Linear(2, 4)), "d": nn.Sequential(nn.Linear(4, 1))}
    g, d = (torch.optim.SGD(one.parameters(), lr=0.01) for one in networks.values())
    with start_exporter(networks, None, every=1, activations=True) as exporter:
        for _ in range(4):
            fake = networks["g"](torch.randn(3, 2))
            d.zero_grad()
            networks["d"](fake.detach()).mean().backward()
            d.step()
            g.zero_grad()
            networks["d"](fake).mean().backward()
            g.step()
        exporter._training.capture.close()
        assert errors(exporter) == {}
        expected = float(fake.detach().double().square().mean().sqrt())
        assert value(exporter, "torch_activation_rms", layer="g.0") == pytest.approx(expected, rel=1e-5)
        assert value(exporter, "torch_activation_grad_norm", layer="g.0") is not None
        assert value(exporter, "torch_activation_captures_total", layer="g.0") == 4
        assert value(exporter, "torch_activation_captures_total", layer="d.0") == 8


# What it may not do


class NoRead(TorchDispatchMode):
    """Refuses what waits for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - as its base
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique_consecutive"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dims", [None, 0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_on_a_device_nothing_is_read(dims: int | None, dtype: torch.dtype) -> None:
    """All that is done for an output and a gradient runs on the meta device, which has no data, and reads no value elsewhere."""
    from torch_grad_exporter.inspection import tallies  # noqa: PLC0415 - one of its private functions is tried

    for device in ("meta", "cpu"):
        with NoRead():
            found = []
            for _ in range(3):
                row, peaks = tallies._on_device(torch.ones(3, 4, 5, dtype=dtype, device=device), dims, tallies.Scratch())
                found.append(tallies.Tally(60, 0 if dims is None else (3, 4, 5)[dims], [row], peaks))
            for one in found[1:]:
                found[0].include(one)
            packing, vector = tallies.packed(found[:1])
        assert vector.shape == (4 + 1 + 1,)
    rows = packing.values(vector.double().numpy())[0]
    assert rows.tolist() == pytest.approx([math.sqrt(180), 0, 0, 0, 1, 0, 0])


def test_the_two_ways_to_measure_agree() -> None:
    """What the CPU finds by branching, other devices find without: every column, of outputs with zeros, NaN and dead units."""
    from torch_grad_exporter.inspection import tallies  # noqa: PLC0415 - private functions are compared

    torch.manual_seed(0)
    for planted in (0.0, math.nan, math.inf):
        for shape, dim in (((6, 5, 4, 3), 1), ((7, 5), 1), ((3, 8, 6), 2), ((9,), None), ((3, 3, 4), 0)):
            x = torch.randn(shape).relu()
            if dim is not None:
                x.select(dim, 1).zero_()
                x.select(dim, 2).zero_()
                x.select(dim, 2)[(0,) * (x.dim() - 1)] = planted
            for laid_out in (x, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.flip(0)):
                vectors = []
                for way in (tallies._on_host, tallies._on_device):
                    row, peaks = way(laid_out, dim, tallies.Scratch())
                    vectors.append(tallies.packed([tallies.Tally(1, 1, [row], peaks)])[1])
                torch.testing.assert_close(vectors[0], vectors[1].double(), rtol=1e-6, atol=0, equal_nan=True)


def test_the_training_reads_nothing_while_it_is_watched() -> None:
    """A whole sampled step under a mode that refuses reads."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model):
        train(model, optimizer, torch.randn(4, 3, 6, 6))
        with NoRead():
            train(model, optimizer, torch.randn(4, 3, 6, 6))


def test_a_hook_of_the_user_after_an_in_place_module_gets_what_it_would_get() -> None:
    """The gradient of a tensor that was modified in place after we had seen it is the same with and without an exporter."""
    seen = []
    for option in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
        with start_exporter(model, None, every=1, activations=option):
            y = model(torch.randn(3, 4))
            y.register_hook(lambda g: seen.append(g.clone()))
            y.square().sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_nothing_is_left_at_the_modules_between_rounds() -> None:
    """After each step no inner module has a hook, and after a round that is not sampled none has had one."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = [*model.children()]
    counts = []
    inner[0].register_forward_hook(lambda *_: counts.append(len(inner[1]._forward_hooks)))
    with watched(model, every=4):
        for _ in range(12):
            train(model, optimizer, torch.randn(2, 3, 6, 6))
            assert all(not one._forward_hooks for one in inner[1:])
    assert set(counts) == {0, 1}


def test_more_modules_than_labels_are_folded_and_said() -> None:
    """Of 40 modules with `max_layers=5` there are five labels at most, whose counts are those of all."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(20)])
    with watched(model, max_layers=5) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
        exporter._training.capture.close()
        found = values(exporter)
        assert 1 <= sum(name == "torch_activation_rms" for name, _ in found) <= 5
        assert found[key("torch_activation_layers_folded")] == 40
        shares = [value for (name, _), value in found.items() if name == "torch_activation_dead_ratio"]
        assert all(0 <= share <= 1 for share in shares)


# What is asked for


def test_a_pattern_chooses_modules_by_name() -> None:
    """Also those that have children; others are not there."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))
    with watched(model, activations=r"^0$|\.1") as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
        exporter._training.capture.close()
        assert {dict(labels)["layer"] for name, labels in values(exporter) if name == "torch_activation_rms"} == {"0", "0.1"}


def test_a_pattern_that_matches_nothing_raises_before_anything_is_registered() -> None:
    """It names the argument, its value and some of the modules that there are."""
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=r"activations='conv': is found in the name of none of the 2 modules; there are 'model', '0'"
    ):
        start_exporter(model, None, activations="conv")
    assert not model._forward_hooks


def test_layers_that_are_excluded_have_no_activations() -> None:
    """`include` and `exclude` count for `activations=True`."""
    model = convnet()
    with watched(model, exclude=["^4$", "^[0-3]$"]) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3, 6, 6))
        exporter._training.capture.close()
        assert {dict(labels)["layer"] for name, labels in values(exporter) if name == "torch_activation_rms"} == {"5", "6"}


def test_a_layer_that_is_no_longer_called_loses_its_gauges_and_keeps_its_counts() -> None:
    """After eight samples without it."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.at_first, self.on = nn.Linear(3, 3), nn.Tanh(), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.at_first(self.always(x)) if self.on else self.always(x)

    model = Switch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model) as exporter:
        train(model, optimizer, torch.randn(2, 3))
        model.on = False
        for steps, present in ((7, True), (2, False)):
            for _ in range(steps):
                train(model, optimizer, torch.randn(2, 3))
            assert (value(exporter, "torch_activation_rms", layer="at_first") is not None) == present
        assert value(exporter, "torch_activation_captures_total", layer="at_first") == 1


def test_without_the_option_there_is_no_such_metric() -> None:
    """Not a single series, and no hook in any module."""
    model = convnet()
    with start_exporter(model, None, every=1) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3, 6, 6))
        assert not [name for name, _ in values(exporter) if "activation" in name]
