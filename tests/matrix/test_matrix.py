"""Every regime of training: the numbers are right, and the training is unchanged."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.matrix import REGIMES
from tests.matrix.harness import Run, Way


def thinned() -> Iterator[str | ParameterSet]:
    """The regimes; of those that differ in a parameter all but the first are left to `make test-full`."""
    seen = set[str]()
    for name in REGIMES:
        kind = name.partition("[")[0]
        yield pytest.param(name, marks=pytest.mark.full) if kind in seen else name
        seen.add(kind)


@functools.cache
def without_exporter(name: str) -> Run:
    """A regime's run without an exporter."""
    return REGIMES[name].run(Way.PLAIN)


@pytest.mark.parametrize(
    "way", [Way.EVERYTHING, pytest.param(Way.DEFAULTS, marks=pytest.mark.full)], ids=lambda way: way.name.lower()
)
@pytest.mark.parametrize("name", list(thinned()))
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
