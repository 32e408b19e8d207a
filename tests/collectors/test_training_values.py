"""Metrics of the training itself: rates, losses, samples, times, state, weights."""

from __future__ import annotations

import contextlib
import math
import platform
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import torch_grad_exporter
from tests.matrix.compiled import EAGER, dynamo
from tests.support.models import Perceptron, batch
from tests.support.scrape import key, value, values
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def start(model: torch.nn.Module, **options: object) -> Exporter:
    """Start an exporter that samples every round and serves nothing."""
    return start_exporter(model, port=None, **{"every": 1, **options})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, **inputs: torch.Tensor) -> torch.Tensor:
    """Take plain steps and return the last loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).square().mean() if inputs else model(batch()).square().mean()
        loss.backward()
        optimizer.step()
    return loss


def test_learning_rates_per_group() -> None:
    """The rate of every group of every optimizer is that of the last sample, also if it is a tensor."""
    model = Perceptron()
    first = torch.optim.SGD([{"params": model.first.weight}, {"params": [model.first.bias], "lr": 0.25}], lr=0.5)
    second = torch.optim.AdamW(model.second.parameters(), lr=torch.tensor(0.125))
    with start(model) as exporter:
        for rate in (0.5, 0.0625):
            first.param_groups[0]["lr"] = rate
            first.zero_grad()
            second.zero_grad()
            model(batch()).square().mean().backward()
            first.step()
            second.step()
            shown = values(exporter)
            assert shown[key("torch_train_learning_rate", optimizer="SGD", group="0")] == rate
            assert shown[key("torch_train_learning_rate", optimizer="SGD", group="1")] == 0.25
            assert shown[key("torch_train_learning_rate", optimizer="AdamW", group="0")] == 0.125


@pytest.mark.slow
def test_a_learning_rate_between_two_samples() -> None:
    """A rate that changes long before the next sample is shown."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with start(model, every=4096) as exporter:
        for rate in (0.5, 0.25, 0.125):
            optimizer.param_groups[0]["lr"] = rate

            def is_shown(rate: float = rate) -> bool:
                train(model, optimizer)
                return value(exporter, "torch_train_learning_rate", optimizer="SGD", group="0") == rate

            assert eventually(is_shown)


def test_losses_that_are_not_finite() -> None:
    """A loss may be a number or a tensor; NaN and Inf are counted and shown, and are not spikes."""
    with start(Perceptron()) as exporter:
        exporter.observe(loss=torch.tensor([0.75], dtype=torch.bfloat16))
        assert value(exporter, "torch_train_loss") == 0.75
        for loss in (1.0, math.nan, torch.tensor(math.inf), -math.inf):
            exporter.observe(loss=loss)
        assert value(exporter, "torch_train_loss") == -math.inf
        exporter.observe(loss=math.nan)
        assert math.isnan(value(exporter, "torch_train_loss") or 0)
        assert value(exporter, "torch_train_loss_nonfinite_total") == 4
        assert value(exporter, "torch_train_loss_spikes_total") == 0


def test_loss_spikes() -> None:
    """A loss far above its past is a spike, one that falls is not."""
    with start(Perceptron()) as exporter:
        for step in range(60):
            exporter.observe(loss=2.0 + 0.01 * math.sin(step))
        assert value(exporter, "torch_train_loss_spikes_total") == 0
        exporter.observe(loss=20.0)
        assert value(exporter, "torch_train_loss_spikes_total") == 1
        exporter.observe(loss=0.1)
        assert value(exporter, "torch_train_loss_spikes_total") == 1


def test_tokens_and_epoch() -> None:
    """Tokens add up, an epoch replaces the one before, and both are absent until given."""
    with start(Perceptron()) as exporter:
        assert value(exporter, "torch_train_tokens_total") is None
        assert value(exporter, "torch_train_epoch") is None
        for epoch in range(3):
            exporter.observe(tokens=torch.tensor(100), epoch=epoch)
            exporter.observe(tokens=11)
        assert value(exporter, "torch_train_tokens_total") == 333
        assert value(exporter, "torch_train_epoch") == 2


class Pair(Perceptron):
    """A model of two inputs."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


def test_ambiguous_samples_are_absent() -> None:
    """If the inputs have different first dimensions the number of samples is absent."""
    model = Pair()
    with start(model) as exporter:
        model(batch(5), batch(5))
        assert value(exporter, "torch_train_samples_total") == 5
        model(batch(5), batch(7))
        assert value(exporter, "torch_train_samples_total") is None


@pytest.mark.slow
def test_phases_sum_up_to_wall_time() -> None:
    """The phases and the exporter's own time sum up to the time since the start, and the loader's time is in `data`."""
    model = Perceptron(64, 256, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    waited = loading = 0.0

    def loader() -> Iterator[torch.Tensor]:
        nonlocal waited
        for _ in range(20):
            start_ = time.perf_counter()
            inputs = torch.randn(4000, 64).sort(dim=0).values
            waited += time.perf_counter() - start_
            yield inputs

    before = time.perf_counter()
    with start(model) as exporter:
        begun = time.perf_counter()
        batches = iter(exporter.watch_loader(loader()))
        while True:
            asked = time.perf_counter()
            inputs = next(batches, None)
            loading += time.perf_counter() - asked
            if inputs is None:
                break
            optimizer.zero_grad()
            model(inputs[:64]).square().mean().backward()
            optimizer.step()
        ended = time.perf_counter()
        model(batch(1, 64))  # the clock is read at borders: a forward ends the last one
        over = time.perf_counter()
        found = values(exporter)
        phases = {k[1][0][1]: v for k, v in found.items() if k[0] == "torch_train_phase_seconds_total"}
        own = found["torch_grad_exporter_overhead_seconds_total", ()]
    assert set(phases) == {"outside", "data", "forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in phases.values())
    assert ended - begun <= sum(phases.values()) + own <= over - before + 20 * 1e-5  # an allowance to each step
    assert waited <= phases["data"] <= loading


def test_timestamps() -> None:
    """Start, last step and last activity are Unix times."""
    model = Perceptron()
    before = time.time()
    with start(model) as exporter:
        assert value(exporter, "torch_train_last_step_timestamp_seconds") is None
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        stepped = time.time()
        model(batch())
        shown = values(exporter)
        begun = shown[key("torch_train_start_timestamp_seconds")]
        last = shown[key("torch_train_last_step_timestamp_seconds")]
        active = shown[key("torch_train_last_activity_timestamp_seconds")]
        assert before <= begun <= last <= stepped <= active <= time.time()


def test_info_and_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts about the process are those of the process and of its launcher."""
    for name, given in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, given)
    model = Perceptron()
    with start(model) as exporter:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        shown = values(exporter)
        assert exporter.rank == 5
        assert shown[key("torch_train_world_size")] == 8
        info = next(dict(labels) for name, labels in shown if name == "torch_train_info")
        assert info == {
            "torch_version": str(torch.__version__),
            "exporter_version": torch_grad_exporter.__version__,
            "python_version": platform.python_version(),
            "host": socket.gethostname(),
            "local_rank": "1",
            "devices": "cpu",
        }


@pytest.mark.parametrize("compiled", [False, True])
def test_weights(compiled: bool) -> None:
    """With `weights` the norm of a layer and the ratio of its last update are those of float64, also of a compiled model."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trained = torch.compile(model, backend=EAGER) if compiled else model
    with dynamo() if compiled else contextlib.nullcontext(), start(model, weights=True) as exporter:
        for _ in range(3):
            before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            train(trained, optimizer)
        after = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        for layer in ("first", "second"):
            mine = [n for n in before if n.startswith(layer)]
            size = math.sqrt(sum(float(after[n].square().sum()) for n in mine))
            was = math.sqrt(sum(float(before[n].square().sum()) for n in mine))
            moved = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in mine))
            assert value(exporter, "torch_weight_norm", layer=layer) == pytest.approx(size, rel=1e-5)
            assert value(exporter, "torch_weight_update_ratio", layer=layer) == pytest.approx(moved / was, rel=1e-4)
            elements = sum(after[n].numel() for n in mine)
            assert value(exporter, "torch_update_rms", layer=layer) == pytest.approx(moved / math.sqrt(elements), rel=1e-4)
            assert value(exporter, "torch_weight_unchanged_ratio", layer=layer) == 0


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-2])
def test_elements_that_an_update_leaves(rate: float) -> None:
    """In bf16 the share of elements that an update leaves as they were is exactly that; a smaller rate leaves more."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 8)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with start(model, weights=True) as exporter:
        for _ in range(2):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            model(torch.randn(16, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
        shares = [(then == now).double().mean().item() for then, now in zip(before, model.parameters(), strict=True)]
        expected = {"0": shares[0], "1": (shares[1] * 256 + shares[2] * 8) / 264}
        for layer, share in expected.items():
            assert value(exporter, "torch_weight_unchanged_ratio", layer=layer) == pytest.approx(share, abs=1e-9)
    assert (expected["0"] > 0.5) is (rate < 1e-3)


def test_distributions_of_weights() -> None:
    """Each element of a measured layer is one observation, counted as numpy does on float64."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 5, dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: dict[str, list[np.ndarray[tuple[int], np.dtype[np.float64]]]] = {"0": [], "1": []}
    with start(model, weights=True) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
            for layer, elements in seen.items():
                elements += [np.abs(p.detach().double().numpy().reshape(-1)) for p in model.get_submodule(layer).parameters()]
        shown = values(exporter)
    for layer, parts in seen.items():
        elements = np.concatenate(parts)
        for bound in WEIGHT_MAGNITUDES:
            in_buckets = shown[key("torch_weight_distribution_bucket", layer=layer, le=repr(bound))]
            assert in_buckets == np.count_nonzero(elements <= bound)
        assert shown[key("torch_weight_distribution_count", layer=layer)] == elements.size
        assert shown[key("torch_weight_distribution_sum", layer=layer)] == pytest.approx(elements.sum(), rel=1e-6)


def test_a_step_that_a_scaler_skips_is_not_an_update() -> None:
    """A fused step that a scaler skips keeps the ratio of the update before, and is not counted."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with start(model, weights=True) as exporter:
        measured = []
        for factor in (1.0, 1.0, torch.inf, torch.inf):
            optimizer.zero_grad()
            scaler.scale(model(batch()).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            shown = values(exporter)
            names = ("torch_weight_update_ratio", "torch_weight_captures_total")
            measured.append([shown[key(name, layer="first")] for name in names])
        assert [count for _, count in measured] == [1, 2, 2, 2]
        assert measured[1][0] == measured[2][0] == measured[3][0] != 0


def test_a_round_of_several_backwards_is_one_for_units() -> None:
    """A unit that is zero throughout one round of two backwards has been zero for one sample, not for two."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start(model, dead_window=2) as exporter:
        for units, backwards, ratio in ((2, 1, None), (1, 2, 0.0), (1, 2, 0.5)):
            optimizer.zero_grad()
            for _ in range(backwards):
                model(torch.ones(4, 3))[:, :units].sum().backward()
            optimizer.step()
            assert value(exporter, "torch_grad_dead_ratio", layer="weight") == ratio
