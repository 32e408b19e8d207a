"""What a scrape says about the training itself: rates, losses, samples, times, state."""

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
from tests.support.models import Perceptron, batch
from tests.support.scrape import errors, key, value, values
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def start(model: torch.nn.Module, **options: object) -> Exporter:
    """An exporter that samples every round and serves nothing."""
    return start_exporter(model, port=None, **{"every": 1, **options})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, **inputs: torch.Tensor) -> torch.Tensor:
    """Plain steps; returns the last loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).square().mean() if inputs else model(batch()).square().mean()
        loss.backward()
        optimizer.step()
    return loss


def test_learning_rates_per_group() -> None:
    """The rate of every group of every optimizer is shown as it is at the last sample, a tensor rate too."""
    model = Perceptron()
    one = torch.optim.SGD([{"params": model.first.weight}, {"params": [model.first.bias], "lr": 0.25}], lr=0.5)
    two = torch.optim.AdamW(model.second.parameters(), lr=torch.tensor(0.125))
    with start(model) as exporter:
        for rate in (0.5, 0.0625):
            one.param_groups[0]["lr"] = rate
            one.zero_grad()
            two.zero_grad()
            model(batch()).square().mean().backward()
            one.step()
            two.step()
            shown = values(exporter)
            assert shown[key("torch_train_learning_rate", optimizer="SGD", group="0")] == rate
            assert shown[key("torch_train_learning_rate", optimizer="SGD", group="1")] == 0.25
            assert shown[key("torch_train_learning_rate", optimizer="AdamW", group="0")] == 0.125


class Own(torch.Tensor):
    """A tensor of a class of the user's."""


LOSSES = [
    0.75,
    torch.tensor(0.75),
    torch.tensor([0.75]),
    torch.tensor(0.75, dtype=torch.bfloat16),
    torch.tensor(0.75, requires_grad=True) * 1,
    torch.nn.Parameter(torch.tensor(0.75)),
    torch.tensor([0.75]).as_subclass(Own),
]


@pytest.mark.parametrize("given", LOSSES, ids=range(len(LOSSES)))
def test_loss_of_every_type(given: float | torch.Tensor) -> None:
    """A loss may be a number or a tensor of any kind."""
    with start(Perceptron()) as exporter:
        assert value(exporter, "torch_train_loss") is None
        exporter.observe(loss=given)
        assert value(exporter, "torch_train_loss") == 0.75
        assert errors(exporter) == {}


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.int64])
def test_numbers_of_numpy(kind: type[np.generic]) -> None:
    """A mean of numpy's or a count of its is a number like any other."""
    with start(Perceptron()) as exporter:
        exporter.observe(loss=kind(2), tokens=kind(2))
        assert value(exporter, "torch_train_loss") == 2
        assert value(exporter, "torch_train_tokens_total") == 2


def test_loss_with_a_graph_is_let_go() -> None:
    """A loss that still has its graph is taken and changed afterwards without changing what was observed."""
    model = Perceptron()
    with start(model) as exporter:
        loss = model(batch()).square().mean()
        expected = loss.item()
        exporter.observe(loss=loss)
        with torch.no_grad():
            loss.mul_(2)
        assert value(exporter, "torch_train_loss") == pytest.approx(expected, rel=1e-7)


def test_losses_that_are_not_finite() -> None:
    """NaN and Inf are counted and shown, and are no spikes."""
    with start(Perceptron()) as exporter:
        for loss in (1.0, math.nan, torch.tensor(math.inf), -math.inf):
            exporter.observe(loss=loss)
        assert value(exporter, "torch_train_loss") == -math.inf
        exporter.observe(loss=math.nan)
        assert math.isnan(value(exporter, "torch_train_loss") or 0)
        assert value(exporter, "torch_train_loss_nonfinite_total") == 4
        assert value(exporter, "torch_train_loss_spikes_total") == 0


def test_loss_spikes() -> None:
    """A loss far above its own past is a spike, one that falls is none."""
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


def test_samples_from_the_first_dimension() -> None:
    """Samples are the rows of the batches of training forwards."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start(model) as exporter:
        for size in (5, 5, 3):
            optimizer.zero_grad()
            model(batch(size)).square().mean().backward()
            optimizer.step()
        assert value(exporter, "torch_train_samples_total") == 13


class Pair(Perceptron):
    """A model of two inputs."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


def test_samples_that_are_ambiguous_are_absent() -> None:
    """Where the inputs have different first dimensions there is no number of samples."""
    model = Pair()
    with start(model) as exporter:
        model(batch(5), batch(5))
        assert value(exporter, "torch_train_samples_total") == 5
        model(batch(5), batch(7))
        assert value(exporter, "torch_train_samples_total") is None


def test_observed_samples_win() -> None:
    """Samples that the user gives replace those that are guessed."""
    model = Perceptron()
    with start(model) as exporter:
        exporter.observe(samples=64)
        model(batch(5))
        exporter.observe(samples=64)
        assert value(exporter, "torch_train_samples_total") == 128


def test_phases_sum_up_to_wall_time() -> None:
    """The phases are the whole time since the start, each second in one of them, and the loader's own in `data`."""
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
        phases = {k[1][0][1]: v for k, v in values(exporter).items() if k[0] == "torch_train_phase_seconds_total"}
    assert set(phases) == {"outside", "data", "forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in phases.values())
    assert ended - begun <= sum(phases.values()) <= over - before
    assert waited <= phases["data"] <= loading


def test_a_watched_loader_is_still_the_loader() -> None:
    """A watched loader has the length, the attributes and the batches of the loader, each time it is gone through."""
    loader = torch.utils.data.DataLoader(torch.arange(10), batch_size=4)
    with start(Perceptron()) as exporter:
        watched = exporter.watch_loader(loader)
        assert len(watched) == 3
        assert watched.batch_size == 4
        for _ in range(2):
            assert torch.equal(torch.cat(list(watched)), torch.arange(10))


def test_phase_after_an_optimizer_that_raised() -> None:
    """A closure that raises does not leave the clock in the phase `optimizer` for the forwards after it."""
    model = Perceptron(64, 512, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with start(model) as exporter:

        def fail() -> float:
            raise RuntimeError("the user's own")

        train_inputs = torch.randn(2000, 64)
        model(train_inputs).square().mean().backward()
        optimizer.step()
        before = values(exporter)
        with pytest.raises(RuntimeError, match="the user's own"):
            optimizer.step(fail)
        for _ in range(3):
            model(train_inputs)
        after = values(exporter)
        forward = key("torch_train_phase_seconds_total", phase="forward")
        assert after[forward] > before[forward]


def test_step_durations() -> None:
    """Of n steps there are n - 1 durations, which sum up to the time from the first to the last step."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with start(model) as exporter:
        moments = []
        for steps in (1, 9, 1):
            moments.append(time.perf_counter())
            train(model, optimizer, steps)
            moments.append(time.perf_counter())
        shown = values(exporter)
        assert shown[key("torch_train_step_duration_seconds_count")] == 10
        before, first, *_, last, after = moments
        assert last - first <= shown[key("torch_train_step_duration_seconds_sum")] <= after - before
        assert shown[key("torch_train_slowest_step_seconds")] <= after - before


def test_timestamps() -> None:
    """Times are Unix times: start, last step and last activity."""
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


ENDS = [
    (None, "finished", None),
    (ValueError("secret"), "failed", "ValueError"),
    (KeyboardInterrupt(), "finished", None),
    (SystemExit(), "finished", None),
    (SystemExit(0), "finished", None),
    (SystemExit(3), "failed", "SystemExit"),
    (SystemExit("no more"), "failed", "SystemExit"),
]


@pytest.mark.parametrize("way", ["with", "end"])
@pytest.mark.parametrize(("error", "state", "name"), ENDS, ids=[repr(error) for error, _, _ in ENDS])
def test_state_at_the_end(error: BaseException | None, state: str, name: str | None, way: str) -> None:
    """A run that leaves the `with`, or the interpreter, by an exception has failed, and its page names it; others finished."""
    exporter = start(Perceptron())
    if way == "end":
        exporter.end(error)
    else:
        with contextlib.suppress(ValueError, KeyboardInterrupt, SystemExit), exporter:
            if error is not None:
                raise error
    shown = {k[1][0][1]: v for k, v in values(exporter).items() if k[0] == "torch_train_state"}
    assert shown.pop(state) == 1
    assert set(shown.values()) == {0}
    assert exporter._view.live.status()["ended_by"] == name


def test_moments() -> None:
    """With `moments` mean, standard deviation and extremes of a layer's gradient are those of float64 arithmetic."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start(model, moments=True) as exporter:
        for _ in range(3):
            train(model, optimizer)
        for layer in ("first", "second"):
            everything = torch.cat([p.grad.double().flatten() for p in getattr(model, layer).parameters()])
            for name, expected in {
                "torch_grad_mean": everything.mean(),
                "torch_grad_stddev": everything.std(correction=0),
                "torch_grad_min": everything.min(),
                "torch_grad_max": everything.max(),
            }.items():
                assert value(exporter, name, layer=layer) == pytest.approx(expected.item(), rel=1e-4, abs=1e-9)


def test_weights() -> None:
    """With `weights` the norm of a layer and the ratio of its last update are those of float64 arithmetic."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with start(model, weights=True) as exporter:
        for _ in range(3):
            before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            train(model, optimizer)
        after = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        for layer in ("first", "second"):
            mine = [n for n in before if n.startswith(layer)]
            size = math.sqrt(sum(float(after[n].square().sum()) for n in mine))
            was = math.sqrt(sum(float(before[n].square().sum()) for n in mine))
            moved = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in mine))
            assert value(exporter, "torch_weight_norm", layer=layer) == pytest.approx(size, rel=1e-5)
            assert value(exporter, "torch_weight_update_ratio", layer=layer) == pytest.approx(moved / was, rel=1e-4)


def test_distributions_of_weights() -> None:
    """Each time that a layer is measured, each of its elements is one observation, counted as numpy does on float64."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 5, dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: dict[str, list[np.ndarray[tuple[int], np.dtype[np.float64]]]] = {"0": [], "1": []}
    with start(model, weights=True) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
            for layer, found in seen.items():
                found += [np.abs(p.detach().double().numpy().reshape(-1)) for p in model.get_submodule(layer).parameters()]
        shown = values(exporter)
    for layer, found in seen.items():
        elements = np.concatenate(found)
        for bound in WEIGHT_MAGNITUDES:
            in_buckets = shown[key("torch_weight_distribution_bucket", layer=layer, le=repr(bound))]
            assert in_buckets == np.count_nonzero(elements <= bound)
        assert shown[key("torch_weight_distribution_count", layer=layer)] == elements.size
        assert shown[key("torch_weight_distribution_sum", layer=layer)] == pytest.approx(elements.sum(), rel=1e-6)


def test_elements_of_weights_that_are_not_finite_are_left_out() -> None:
    """A NaN and an infinity in a layer's weights are in no bucket and not in the sum, which stay right for the others."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[math.nan, math.inf], [0.5, -2.0]]))
    with start(model, weights=True) as exporter:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        shown = values(exporter)
        assert shown[key("torch_weight_captures_total", layer="0")] == 2
        assert shown[key("torch_weight_distribution_count", layer="0")] == 4
        assert shown[key("torch_weight_distribution_sum", layer="0")] == 5


def test_weights_with_two_optimizers() -> None:
    """With two optimizers in a round each layer's update ratio is that of the optimizer that owns it."""
    model = Perceptron()
    one = torch.optim.SGD(model.first.parameters(), lr=0.5)
    two = torch.optim.SGD(model.second.parameters(), lr=0.5)
    with start(model, weights=True, optimizers={"one": one, "two": two}) as exporter:
        for _ in range(3):
            before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            one.zero_grad()
            two.zero_grad()
            model(batch()).square().mean().backward()
            one.step()
            two.step()
        for layer in ("first", "second"):
            now = dict(getattr(model, layer).named_parameters())
            moved = math.sqrt(sum(float((p.detach().double() - before[f"{layer}.{n}"]).square().sum()) for n, p in now.items()))
            was = math.sqrt(sum(float(before[f"{layer}.{n}"].square().sum()) for n in now))
            assert value(exporter, "torch_weight_update_ratio", layer=layer) == pytest.approx(moved / was, rel=1e-4)


def test_weights_that_nobody_updates() -> None:
    """A layer that the only optimizer does not have, and one whose group has the rate 0, have updates of exactly 0."""
    model = torch.nn.Sequential(Perceptron(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    with start(model, weights=True) as exporter:
        train(model, optimizer, 3)
        assert value(exporter, "torch_weight_update_ratio", layer="0.first") > 0  # type: ignore[operator]
        assert [value(exporter, "torch_weight_update_ratio", layer=layer) for layer in "12"] == [0, 0]
        assert value(exporter, "torch_weight_captures_total", layer="1") == 3


def test_updates_that_low_precision_rounds_away() -> None:
    """In bf16 an update of a thousandth of the weight is nothing, in float32 it is what it is."""
    for dtype, moves in ((torch.float32, True), (torch.bfloat16, False)):
        layer = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        torch.nn.init.ones_(layer.weight)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        model = torch.nn.Sequential(layer)
        with start(model, weights=True) as exporter:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 4, dtype=dtype)).sum().backward()
                optimizer.step()
            assert (value(exporter, "torch_weight_update_ratio", layer="0") > 0) is moves  # type: ignore[operator]


def test_how_often_weights_were_measured() -> None:
    """A sample measures eight layers and the next one goes on after them: in five samples each of twenty has two turns."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with start(model, weights=True) as exporter:
        shown = values(exporter)
        assert {shown[key("torch_weight_captures_total", layer=str(layer))] for layer in range(20)} == {0}
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        shown = values(exporter)
        assert [shown[key("torch_weight_captures_total", layer=str(layer))] for layer in range(20)] == [2] * 20


def test_a_step_that_a_scaler_left_out_is_no_update() -> None:
    """A fused optimizer that does nothing under a scaler leaves the ratio of the update before, and counts nothing."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with start(model, weights=True) as exporter:
        found = []
        for factor in (1.0, 1.0, torch.inf, torch.inf):
            optimizer.zero_grad()
            scaler.scale(model(batch()).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            shown = values(exporter)
            names = ("torch_weight_update_ratio", "torch_weight_captures_total")
            found.append([shown[key(name, layer="first")] for name in names])
        assert [count for _, count in found] == [1, 2, 2, 2]
        assert found[1][0] == found[2][0] == found[3][0] != 0


def test_dead_units() -> None:
    """A unit that never fires is dead after the window, one that fires once in it is not."""
    model = Perceptron(6, 4, 3)
    with torch.no_grad():
        model.first.bias[0] = -1e6
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with start(model, dead_window=10) as exporter:
        train(model, optimizer, 9)
        assert value(exporter, "torch_grad_dead_ratio", layer="first") is None
        train(model, optimizer, 10)
        assert value(exporter, "torch_grad_dead_ratio", layer="first") == 1 / 4
        with torch.no_grad():
            model.first.bias[0] = 0.0
        train(model, optimizer, 1, x=batch(500))
        assert value(exporter, "torch_grad_dead_ratio", layer="first") == 0


def test_two_models_and_their_norms() -> None:
    """Of models that are trained against each other it says how many they are, and a global norm for the optimizer of each."""
    models = {"generator": torch.nn.Linear(4, 4), "discriminator": torch.nn.Linear(4, 1)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    with start_exporter(models, port=None, every=1, optimizers=optimizers) as exporter:
        for name in ("discriminator", "generator"):
            optimizers[name].zero_grad()
            models["discriminator"](models["generator"](torch.randn(3, 4))).sum().backward()
            expected = math.sqrt(
                sum(float(p.grad.double().square().sum()) for p in models[name].parameters() if p.grad is not None)
            )
            optimizers[name].step()
            # The other optimizer may still step on the same gradients, so the sample is shown after a second.
            assert eventually(lambda name=name: value(exporter, "torch_grad_global_norm", optimizer=name) is not None)
            assert value(exporter, "torch_grad_global_norm", optimizer=name) == pytest.approx(expected, rel=1e-5)
        assert value(exporter, "torch_grad_exporter_models") == 2
    with start(Perceptron()) as exporter:
        assert value(exporter, "torch_grad_exporter_models") == 1
