"""What the statistics keep from one sample to the next: working memory and the grouping of gradients."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.statistics.test_device_chunks import Largest
from tests.statistics.test_statistics import NAN, Bare, assert_agrees, plan_of, rows_of, some, sparse
from tests.support.statistics import WITH_MOMENTS
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.host import BLOCK_ELEMENTS

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda g: g,
    "strides": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:1].clone().expand(g.shape),
    "a type of two bytes": lambda g: g.bfloat16(),
    "a type of one byte": lambda g: g.to(torch.float8_e5m2),
    "double": lambda g: g.double() * 1e-200,
    "complex": lambda g: torch.complex(g, -g).conj(),
    "sparse": lambda g: g.to_sparse(),
    "sparse, uncoalesced": lambda g: sparse(torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.ones(3), g.shape),
    "a graph": lambda g: g.clone().requires_grad_() * 2,
    "not finite": lambda g: g.clone().fill_(NAN),
}
"""What may happen to a gradient between two samples."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 6), (80, 500)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_may_change_its_kind(change: str, shape: tuple[int, int]) -> None:
    """Gradients that change their type, layout or strides between samples are measured as they are, and so are the next ones."""
    dtype = torch.complex64 if change == "complex" else torch.float32
    module = Bare(shape, shape, shape, (5,), dtype=dtype)
    table, statistics = plan_of(module), EagerStatistics(9, WITH_MOMENTS)
    ordinary = [some(s, dtype, seed=seed) for seed, s in enumerate([shape, shape, shape, (5,)])]
    other = [ordinary[0], CHANGES[change](some(shape, seed=7)), *ordinary[2:]]
    for sample, gradients in enumerate([ordinary, other, other, ordinary]):
        rows = rows_of(statistics, table, gradients, sample)
        (norms,) = statistics.norms(table, list(enumerate(gradients)))
        again = dict(zip(norms.positions.tolist(), norms.vector.tolist(), strict=True))
        for position, gradient in enumerate(gradients):
            exact = gradient.detach()
            exact = exact.float() if exact.element_size() == 1 else exact
            assert_agrees(rows[position], exact, table, position)
            assert np.array_equal(again[position], rows[position][Column.NORM], equal_nan=True)


LARGE: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: some((4096, 1024), torch.bfloat16),
    "transposed": lambda: some((1024, 4096)).t(),
    "expanded": lambda: some((1, 1024)).expand(4096, 1024),
    "narrow": lambda: some((2_000_000, 2)),
    "channels last": lambda: some((1024, 512, 3, 3)).to(memory_format=torch.channels_last),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
def test_memory_does_not_grow_with_the_gradient(kind: str) -> None:
    """Measuring 4 million elements makes no tensor and no array larger than a few blocks."""
    gradient = LARGE[kind]()
    table, statistics = plan_of(Bare(gradient.shape)), EagerStatistics(9, WITH_MOMENTS)
    with Largest(gradient):  # the first such mode makes torch import modules
        torch.zeros(1)
    tracemalloc.start()
    try:
        with Largest(gradient) as mode:
            (measured,) = statistics.measure(table, [(0, gradient)], 1)
            statistics.norms(table, [(0, gradient)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mode.bytes <= 2 * BLOCK_ELEMENTS * 8 + 4 * gradient.shape[0]
    assert peak <= 6 * BLOCK_ELEMENTS * 8 + 20 * gradient.shape[0]
    expected = float(gradient.double().norm())
    assert measured.vector[Column.NORM].item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_threads_do_not_share_working_memory() -> None:
    """Several threads measure at once, with statistics of their own and shared ones, as each does alone."""
    shared = EagerStatistics(9)
    shapes = [[(200, 300)] * 3, [(64, 64)] * 20, [(500, 400)], [(90_000,)] * 2]
    wrong: list[object] = []

    def work(number: int) -> None:
        gradients = [some(shape, torch.bfloat16, seed=number) for shape in shapes[number]]
        table, own = plan_of(Bare(*shapes[number])), EagerStatistics(9)
        expected = rows_of(EagerStatistics(9), table, gradients)
        for sample in range(10):
            for statistics in (own, shared):
                (norms,) = statistics.norms(table, list(enumerate(gradients)))
                if norms.vector.tolist() != [expected[p][Column.NORM] for p in norms.positions.tolist()]:
                    wrong.append((number, sample))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
