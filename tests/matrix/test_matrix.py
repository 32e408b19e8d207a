"""Every regime of training: the numbers are right, and the training is unchanged."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.matrix import REGIMES
from tests.matrix.harness import Run, Way


@functools.cache
def without_exporter(name: str) -> Run:
    """A regime's run without an exporter."""
    return REGIMES[name].run(Way.PLAIN)


@pytest.mark.parametrize(
    "way", [Way.EVERYTHING, pytest.param(Way.DEFAULTS, marks=pytest.mark.full)], ids=lambda way: way.name.lower()
)
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
