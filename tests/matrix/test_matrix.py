"""Every regime of training: the numbers are right, and the training is unchanged."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from tests.matrix import REGIMES
from tests.matrix.harness import Run, Way

UNCLIPPED = {
    "sparse_embeddings": "sparse gradients",
    "sparse_embedding_with_sgd": "sparse gradients",
    "sparse_weight": "sparse gradients",
    "optimizers_within_the_backward": "steps before all gradients are known",
    "optimizers_within_the_backward_from_before": "steps before all gradients are known",
    "optimizers_within_the_backward_and_after": "steps before all gradients are known",
    "accumulation_with_steps_in_the_last_backward": "steps before all gradients are known",
}
"""Regimes in which `clip=` fails, which is counted and changes nothing, with the reason."""

BREAKS = {"compiled_training_step", "compiled_optimizer"}
"""Those with a compiled step, in which clipping breaks the graph once more; the last of their state are the compiler's counts."""

FIRST = {name.partition("[")[0]: name for name in reversed(REGIMES)}
"""One variant of each regime."""

SLOW = {"inductor", "compiled_training_step", "compiled_optimizer"}
"""Regimes that `make test` leaves out: a compiler takes seconds."""

AT_DEFAULTS = {"accumulation", "closure", "autocast_and_scaler", "gradient_penalty", "submodules_called_directly"}
"""Regimes that `make test` also runs with an exporter at its defaults."""

INSPECTED = {"accumulation", "inplace_activations", "module_used_twice"}
"""Regimes that `make test` also runs with inspections."""


def thinned(often: Collection[str]) -> list[object]:
    """Return all kinds, those that are not named here only for `make test-full`."""
    return [kind if kind in often else pytest.param(kind, marks=pytest.mark.full) for kind in FIRST]


@functools.cache
def without_exporter(name: str) -> Run:
    """Return a regime's run without an exporter."""
    return REGIMES[name].run(Way.PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name == FIRST[kind := name.partition("[")[0]] and kind not in SLOW else pytest.param(name, marks=pytest.mark.full)
        for name in REGIMES
    ],
)
def test_regime(name: str) -> None:
    """Each scrape agrees with the loop's record, and losses and state are those of a run without an exporter."""
    assert unchanged(REGIMES[name].run(Way.EVERYTHING), without_exporter(name)) == []


@pytest.mark.parametrize("kind", thinned(AT_DEFAULTS))
def test_defaults(kind: str) -> None:
    """An exporter at its defaults leaves losses and state unchanged, and nothing fails."""
    assert unchanged(REGIMES[FIRST[kind]].run(Way.DEFAULTS), without_exporter(FIRST[kind])) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", FIRST)
def test_clipping_to_a_huge_norm(kind: str) -> None:
    """Clipping to a limit that no gradient reaches leaves losses and state unchanged."""
    run = REGIMES[FIRST[kind]].run(Way.CLIPPING, failing={"clip"} if kind in UNCLIPPED else ())
    plain = without_exporter(FIRST[kind])
    if kind in BREAKS:
        run, plain = replace(run, state=run.state[:-1]), replace(plain, state=plain.state[:-1])
    assert unchanged(run, plain) == []


@pytest.mark.parametrize("kind", thinned(INSPECTED))
def test_inspections(kind: str) -> None:
    """With inspections of modules and of origins losses and state are unchanged, and nothing fails."""
    assert unchanged(REGIMES[FIRST[kind]].run(Way.INSIDE), without_exporter(FIRST[kind])) == []


def unchanged(run: Run, plain: Run) -> list[str]:
    """Return the losses, and the tensors that the model holds, that differ in a bit."""
    losses, state = (zip(a, b, strict=True) for a, b in ((run.losses, plain.losses), (run.state, plain.state)))
    wrong = [f"loss {position}" for position, pair in enumerate(losses) if not same(*pair)]
    return wrong + [f"tensor {position} of the state" for position, pair in enumerate(state) if not same(*pair)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal in every bit, with NaN equal to NaN."""
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if a.dtype.itemsize == 1 and a.is_floating_point():
        a, b = a.float(), b.float()  # torch can hardly compute with types of one byte
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
