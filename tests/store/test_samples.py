"""What samples add up to: rounds and their outcome, the parts of several optimizers, sums, histograms and values of layers."""

from __future__ import annotations

import bisect
import math
import time

import numpy as np
import pytest
import torch
from torch import nn

from tests.store.support import Given, Training, by_layer
from tests.support.scrape import errors, key, values
from tests.support.tools import eventually
from torch_grad_exporter.metrics.buckets import DECADES, HALF_DECADES

NAN, INF = math.nan, math.inf
COUNTED = ("captures_total", "norm_distribution_count", "norm_distribution_sum", "norm_squared_accumulated_total")


def counted(training: Training, layer: str) -> list[float]:
    """Return the samples of a layer, the norms in its histogram, their sum, and that of their squares."""
    return [training.layer(name, layer) or 0.0 for name in COUNTED]


# Rounds


def nans(training: Training) -> float | None:
    """Return the elements of layer `a` that were NaN."""
    return training.layer("nonfinite_elements_total", "a", kind="nan")


@pytest.mark.slow
def test_a_nan_before_a_hang_is_counted_after_1_s() -> None:
    """A NaN that no step follows shows after a second; the finite layer waits for the end of the round, each counts once."""
    with Training() as training:
        training.round(a=1.0, b=1.0)
        start = time.monotonic()
        training.backward(a=NAN, b=1.0)
        assert nans(training) == 0 or time.monotonic() - start >= 1
        assert eventually(lambda: nans(training) == 1)
        assert time.monotonic() - start >= 0.9
        for _ in range(2):
            assert (counted(training, "b"), training.layer("norm", "b")) == ([2, 1, 1, 1], None)
            assert training.outcomes() == {"unknown": 1}
        training.backward(clear=False, b=4.0)
        training.step()
        assert (counted(training, "b"), training.layer("norm", "b")) == ([2, 2, 6, 26], 5)
        assert (nans(training), training.outcomes(), training.whole("exporter_captures_total")) == (1, {"unknown": 1}, 2)
        assert errors(training.exporter) == {}


# Several optimizers


@pytest.mark.slow
def test_an_optimizer_that_steps_late_counts_once() -> None:
    """A sample shows what was stepped on a second later, and the rest as the other optimizers step."""

    def optimizers(model: Given) -> list[torch.optim.Optimizer]:
        return [*by_layer(model), torch.optim.RMSprop(model["c"].parameters(), 0.0)]

    model = Given({name: nn.Linear(2, 2, bias=False) for name in "abc"}).double()
    with Training(model, optimizers) as training:
        for _ in range(3):
            training.round(a=1.0, b=1.0, c=1.0)
        training.backward(a=3.0, b=4.0, c=5.0)
        training.step(0)
        assert eventually(lambda: counted(training, "a") == [4, 4, 6, 12])
        assert counted(training, "b") == counted(training, "c") == [3, 3, 3, 3]
        training.step(1)
        assert eventually(lambda: counted(training, "b") == [4, 4, 7, 19])
        assert (counted(training, "a"), counted(training, "c")) == ([4, 4, 6, 12], [3, 3, 3, 3])
        training.step(2)
        training.backward(a=3.0, b=4.0, c=5.0)
        assert [counted(training, layer) for layer in "abc"] == [[4, 4, 6, 12], [4, 4, 7, 19], [4, 4, 8, 28]]
        assert [training.whole("global_norm", optimizer=name) for name in ("SGD", "Adam", "RMSprop")] == [3, 4, 5]


def test_a_layer_of_two_optimizers() -> None:
    """Where two optimizers own parts of a layer, a round of one shows the norm of its part."""

    def optimizers(model: Given) -> list[torch.optim.Optimizer]:
        weight, bias, other = model.parameters()
        return [torch.optim.SGD([weight], 0.0), torch.optim.Adam([bias, other], 0.0)]

    with Training(optimizers=optimizers) as training:
        training.round(a=1.0, a_bias=1.0, b=1.0)
        for _ in range(2):
            training.backward(a=3.0, a_bias=4.0, b=2.0)
            training.step(1)
        training.backward(a=3.0, a_bias=4.0, b=2.0)
        assert training.layer("norm", "a") == 4.0
        assert training.whole("global_norm", optimizer="Adam") == pytest.approx(math.sqrt(20))


# Histograms and sums


@pytest.mark.slow
def test_histograms_and_sums_are_exact() -> None:
    """Over samples of every size, also exactly on the bounds, buckets and sums are those of a loop."""
    generator = np.random.default_rng(0)
    norms = [*np.exp(generator.uniform(-22, 12, 100)).tolist(), 0.0, *DECADES, *HALF_DECADES, 1e5]
    with Training() as training:
        for norm in norms:
            training.round(b=norm)
        found = values(training.exporter)
    for bounds, name, labels in (
        (DECADES, "torch_grad_norm_distribution", {"layer": "b"}),
        (HALF_DECADES, "torch_grad_global_norm_distribution", {}),
    ):
        ordered = sorted(norms)
        for bound in bounds:
            assert found[key(f"{name}_bucket", le=str(bound), **labels)] == bisect.bisect_right(ordered, bound), bound
        assert found[key(f"{name}_count", **labels)] == len(norms)
        assert found[key(f"{name}_sum", **labels)] == pytest.approx(math.fsum(norms), rel=1e-12)
    squares = found[key("torch_grad_norm_squared_accumulated_total", layer="b")]
    assert squares == pytest.approx(math.fsum(norm * norm for norm in norms), rel=1e-12)
    assert found[key("torch_grad_captures_total", layer="b")] == len(norms)
    assert found[key("torch_grad_captures_total", layer="a")] == 0


@pytest.mark.parametrize("norms", [(1e200, 1e200), (1e-200, 1e-200), (INF, 1e200)])
def test_norms_are_combined_without_overflow(norms: tuple[float, float]) -> None:
    """A norm over several parameters is the root of the sum of squares, whatever their size, without a warning."""
    with Training() as training:
        training.round(a=norms[0], a_bias=norms[1])
        assert training.layer("norm", "a") == pytest.approx(math.hypot(*norms), rel=1e-12)
        assert training.whole("global_norm") == pytest.approx(math.hypot(*norms), rel=1e-12)
        assert errors(training.exporter) == {}


# Values of layers


@pytest.mark.slow
def test_the_recent_maximum_is_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest finite norm is the recent maximum for a minute, then the largest one that came later."""
    with Training() as training:
        earliest = int(time.time())
        training.round(a=9.0)
        latest = int(time.time())
        assert eventually(lambda: time.time() > latest + 2)
        between = int(time.time())
        for norm in (3.0, INF, 2.0):
            training.round(a=norm)
        end = int(time.time())
        assert training.layer("norm_recent_max", "a") == 9
        for now, largest in ((earliest + 59, 9), (latest + 60, 3), (between + 59, 3), (end + 60, None)):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            assert training.layer("norm_recent_max", "a") == largest
            monkeypatch.undo()


@pytest.mark.slow
def test_a_spike_counts_for_its_layer_and_the_whole() -> None:
    """A norm of 1,000 times the usual one is one spike of its layer and one of the whole; 20 samples come before a z-score."""
    generator = np.random.default_rng(2)
    usual = np.exp(generator.normal(0.0, 0.2, (50, 2)))
    usual[40, 0] *= 1000
    with Training() as training:
        for number, (a, b) in enumerate(usual.tolist()):
            training.round(a=a, b=b)
            if number in (19, 20):
                assert (training.layer("norm_zscore", "a") is None) == (number == 19)
        assert [training.layer("norm_spikes_total", layer) for layer in "ab"] == [1, 0]
        assert training.whole("global_norm_spikes_total") == 1
        assert 0 < abs(training.layer("norm_zscore", "a") or 0.0) < 6


# Norms that the user observes


def test_an_observed_norm_takes_over() -> None:
    """From the first observed norm on the global norm, its histogram and its spikes are those that the user observes."""
    with Training() as training:
        for _ in range(25):
            training.round(a=1.0)
        for norm in (100.0, NAN, 30.0):
            training.exporter.observe(grad_norm=norm)
        training.round(a=5.0)
        assert (training.whole("global_norm"), training.whole("global_norm_spikes_total")) == (30, 0)
        assert [training.whole(f"global_norm_distribution_{name}") for name in ("count", "sum")] == [2, 130]
        assert (training.layer("norm", "a"), training.whole("sample_step")) == (5, 26)
        for norm in (*[50.0, 60.0] * 12, 1e5):
            training.exporter.observe(grad_norm=norm)
        assert training.whole("global_norm_spikes_total") == 1
