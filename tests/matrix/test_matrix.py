"""Every regime of training: the numbers are right, the training is unchanged, and a naive capture would be noticed."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.matrix import REGIMES
from tests.matrix.harness import Naive, Run, Way, of_reading
from tests.matrix.naive import AtAccumulation, AtStep

NAIVE = {Naive.ACCUMULATE: AtAccumulation, Naive.STEP: AtStep}


@functools.cache
def without_exporter(name: str) -> Run:
    """A regime's run without an exporter."""
    return REGIMES[name].run(Way.PLAIN)


@pytest.mark.parametrize("way", [Way.EVERYTHING, Way.DEFAULTS], ids=lambda way: way.name.lower())
@pytest.mark.parametrize("name", REGIMES)
def test_regime(name: str, way: Way) -> None:
    """Each scrape agrees with the loop's own record; losses and what the model holds are those of a run without an exporter."""
    run, plain = REGIMES[name].run(way), without_exporter(name)
    assert run.exporter is not None
    for position, (a, b) in enumerate(zip(run.losses, plain.losses, strict=True)):
        assert same(a, b), f"loss {position}"
    for position, (a, b) in enumerate(zip(run.state, plain.state, strict=True)):
        assert same(a, b), f"tensor {position} of the state"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit, a NaN to a NaN."""
    if a.dtype.itemsize == 1 and a.is_floating_point():
        a, b = a.float(), b.float()  # torch can hardly compute with types of one byte
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("naive", Naive, ids=lambda naive: naive.name.lower())
@pytest.mark.parametrize("name", REGIMES)
def test_naive_capture_is_noticed(name: str, naive: Naive, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the capture moved to a naive place the regime's checks fail, or hold where the regime says so."""
    monkeypatch.setattr("torch_grad_exporter.capture.build.GradientCapture", NAIVE[naive])
    try:
        wrong = REGIMES[name].run(Way.EVERYTHING, naive=True).wrong
    except Exception as error:  # noqa: BLE001 - whatever a naive capture breaks is a way to notice it
        wrong = [repr(error)]
    wrong = of_reading(wrong)
    assert bool(wrong) == (naive in REGIMES[name].catches), wrong
