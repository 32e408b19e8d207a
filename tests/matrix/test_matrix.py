"""Every regime of training: the numbers are right, and the training is unchanged."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.matrix import REGIMES
from tests.matrix.harness import Naive, Run, Way

UNCLIPPED = {
    "sparse_embeddings": "sparse gradients",
    "sparse_embedding_with_sgd": "sparse gradients",
    "optimizers_within_the_backward": "steps before all gradients are known",
    "optimizers_within_the_backward_from_before": "steps before all gradients are known",
    "optimizers_applied_in_the_backward_from_before": "steps before all gradients are known",
    "optimizers_within_the_backward_and_after": "steps before all gradients are known",
    "accumulation_with_steps_in_the_last_backward": "steps before all gradients are known",
}
"""Regimes in which `clip=` fails, which is counted and changes nothing, with the reason."""

BREAKS = {"compiled_training_step", "compiled_optimizer", "compiled_optimizer_and_told"}
"""Those with a compiled step, in which clipping breaks the graph once more; the last of their state are the compiler's counts."""


def thinned() -> Iterator[str | ParameterSet]:
    """Yields the regimes; all but the first of those that differ in a parameter are only for `make test-full`."""
    seen = {"inductor"}  # its compiler takes many seconds
    for name in REGIMES:
        kind = name.partition("[")[0]
        yield pytest.param(name, marks=pytest.mark.full) if kind in seen else name
        seen.add(kind)


@functools.cache
def without_exporter(name: str) -> Run:
    """Return a regime's run without an exporter."""
    return REGIMES[name].run(Way.PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [Way.EVERYTHING, pytest.param(Way.DEFAULTS, marks=pytest.mark.full)], ids=lambda way: way.name.lower()
)
@pytest.mark.parametrize("name", list(thinned()))
def test_regime(name: str, way: Way) -> None:
    """Each scrape agrees with the loop's record, and losses and state are those of a run without an exporter."""
    run = REGIMES[name].run(way)
    assert run.exporter is not None
    assert unchanged(run, without_exporter(name)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in thinned() if isinstance(name, str)])
def test_clipping_to_a_huge_norm(name: str) -> None:
    """Clipping to a limit that no gradient reaches leaves losses and state unchanged."""
    kind = name.partition("[")[0]
    run, plain = REGIMES[name].run(Way.CLIPPING, failing={"clip"} if kind in UNCLIPPED else ()), without_exporter(name)
    if kind in BREAKS:
        run, plain = replace(run, state=run.state[:-1]), replace(plain, state=plain.state[:-1])
    assert unchanged(run, plain) == []


CHEAP = {"accumulation", "inplace_relu", "a_module_called_twice"}
"""Regimes that `make test` also runs with `activations=` and `layer_times=`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.full) for name in thinned() if isinstance(name, str)]
)
def test_looking_inside(name: str) -> None:
    """With `activations=` and `layer_times=` losses and state are unchanged, and nothing fails."""
    assert unchanged(REGIMES[name].run(Way.INSIDE), without_exporter(name)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in thinned() if isinstance(name, str)])
def test_with_nan_origin(name: str) -> None:
    """With `nan_origin="always"` losses and state are unchanged."""
    assert unchanged(REGIMES[name].run(Way.ORIGIN), without_exporter(name)) == []


@pytest.mark.full
@pytest.mark.parametrize("naive", Naive, ids=lambda naive: naive.name.lower())
@pytest.mark.parametrize("name", REGIMES)
def test_naive_capture_is_noticed(name: str, naive: Naive) -> None:
    """The norms of a naive monitor are wrong in the regimes that say so, and right in the others."""
    wrong = REGIMES[name].run(Way.PLAIN, naive=naive).wrong
    assert bool(wrong) == (naive in REGIMES[name].catches), wrong


def unchanged(run: Run, plain: Run) -> list[str]:
    """Return the losses, and the tensors that the model holds, that differ in a bit."""
    losses, state = (zip(a, b, strict=True) for a, b in ((run.losses, plain.losses), (run.state, plain.state)))
    wrong = [f"loss {position}" for position, pair in enumerate(losses) if not same(*pair)]
    return wrong + [f"tensor {position} of the state" for position, pair in enumerate(state) if not same(*pair)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal in every bit, with NaN equal to NaN."""
    if a.dtype.itemsize == 1 and a.is_floating_point():
        a, b = a.float(), b.float()  # torch can hardly compute with types of one byte
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
