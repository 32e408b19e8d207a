"""What the statistics keep from one sample to the next: memory to work in, and how gradients are grouped."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.statistics.test_statistics import NAN, Bare, assert_agrees, plan_of, rows_of, some, sparse
from tests.support.statistics import WITH_MOMENTS
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.blocks import BLOCK_ELEMENTS
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.layout import ORDINARY
from torch_grad_exporter.statistics.units import sums, sums_on_host

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda g: g,
    "strides": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:1].clone().expand(g.shape),
    "a type of two bytes": lambda g: g.bfloat16(),
    "a type of one byte": lambda g: g.to(torch.float8_e5m2),
    "double": lambda g: g.double() * 1e-200,
    "complex": lambda g: torch.complex(g, -g).conj(),
    "negated": lambda g: torch.complex(torch.zeros_like(g), -g).conj().imag,
    "sparse": lambda g: g.to_sparse(),
    "sparse, uncoalesced": lambda g: sparse(torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.ones(3), g.shape),
    "a subclass": torch.nn.Parameter,
    "a graph": lambda g: g.clone().requires_grad_() * 2,
    "not finite": lambda g: g.clone().fill_(NAN),
}
"""What may happen to a gradient between two samples."""


@pytest.mark.parametrize("shape", [(4, 6), (300, 400)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_of_another_kind_than_in_the_last_sample(change: str, shape: tuple[int, int]) -> None:
    """Samples whose gradients change their type, layout or strides are each measured by what they are, and so is what follows."""
    dtype = torch.complex64 if change == "complex" else torch.float32
    module = Bare(shape, shape, shape, (5,), dtype=dtype)
    table, statistics = plan_of(module), EagerStatistics(9, WITH_MOMENTS)
    ordinary = [some(s, dtype, seed=seed) for seed, s in enumerate([shape, shape, shape, (5,)])]
    other = [ordinary[0], CHANGES[change](some(shape, seed=7)), *ordinary[2:]]
    for sample, gradients in enumerate([ordinary, ordinary, other, other, ordinary, other]):
        rows = rows_of(statistics, table, gradients, sample)
        (norms,) = statistics.norms(table, list(enumerate(gradients)))
        again = dict(zip(norms.positions.tolist(), norms.vector.tolist(), strict=True))
        for position, gradient in enumerate(gradients):
            exact = gradient.detach()
            exact = exact.float() if exact.element_size() == 1 else exact
            assert_agrees(rows[position], exact, table, position)
            assert np.array_equal(again[position], rows[position][Column.NORM], equal_nan=True)


def test_gradients_that_come_and_go() -> None:
    """Other parameters in each sample, and other models, are told apart though their gradients are of the same kinds."""
    statistics = EagerStatistics(9)
    plans = [plan_of(Bare((3, 2), (3, 2), (3, 2))) for _ in range(2)]
    gradients = [(position, torch.full((3, 2), float(position + 1))) for position in range(3)]
    samples = [(table, part) for part in (gradients, gradients[:2], gradients[1:]) for table in plans] * 2
    for sample, (table, part) in enumerate(samples):
        (measured,) = statistics.measure(table, part, sample)
        norms = measured.vector.reshape(-1, measured.packing.width)[:, Column.NORM].tolist()
        expected = {position: pytest.approx((position + 1) * math.sqrt(6)) for position, _ in part}
        assert dict(zip(measured.positions.tolist(), norms, strict=True)) == expected


def test_units_of_another_model_have_a_past_of_their_own() -> None:
    """Two models with gradients of the same kinds: that units of the one were alive is nothing to silent ones of the other."""
    statistics = EagerStatistics(5)
    first, second = (plan_of(Bare((3, 2))) for _ in range(2))
    alive, silent = torch.ones(3, 2), torch.zeros(3, 2)
    found = [
        rows_of(statistics, table, [gradient], sample)[0][Column.DEAD_UNITS]
        for sample, (table, gradient) in enumerate([(first, alive), (second, silent), (first, silent)])
    ]
    assert found == [0, 3, 0]


def test_no_gradient_is_kept() -> None:
    """When the gradients of a sample are thrown away, nothing of the statistics holds them or their memory."""
    shapes = [(4, 6), (4, 6), (7,), (600, 700), (600, 700)]
    statistics, table = EagerStatistics(9), plan_of(Bare(*shapes))
    for sample in range(2):
        gradients = [some(shape, torch.bfloat16 if n == 3 else torch.float32) for n, shape in enumerate(shapes)]
        kept = [weakref.ref(gradient.untyped_storage()) for gradient in gradients]
        statistics.measure(table, list(enumerate(gradients)), sample)
        statistics.norms(table, list(enumerate(gradients)))
        del gradients
        gc.collect()
        assert [reference() for reference in kept] == [None] * len(shapes)


class LargestResult(TorchDispatchMode):
    """Notes the most bytes that an operation has made a new tensor of."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known = known.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.known:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


LARGE: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: some((4096, 1024)),
    "float64": lambda: some((4096, 1024)).double(),
    "bfloat16": lambda: some((4096, 1024), torch.bfloat16),
    "transposed": lambda: some((1024, 4096)).t(),
    "strided": lambda: some((4096, 2048))[:, ::2],
    "expanded": lambda: some((1, 1024)).expand(4096, 1024),
    "few rows": lambda: some((2, 2_000_000)),
    "few rows, transposed": lambda: some((2_000_000, 2)).t(),
    "narrow": lambda: some((2_000_000, 2)),
    "convolution": lambda: some((1024, 512, 3, 3)),
    "channels last": lambda: some((1024, 512, 3, 3)).to(memory_format=torch.channels_last),
    "tiny": lambda: some((4096, 1024)) * 1e-25,
    "huge": lambda: some((4096, 1024)) * 1e25,
    "all zero": lambda: torch.zeros(4096, 1024),
    "not finite": lambda: torch.full((4096, 1024), NAN),
}


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("kind", LARGE)
def test_the_memory_needed_does_not_grow_with_the_gradient(kind: str, *, moments: bool) -> None:
    """Measuring a gradient of 4 million elements makes no tensor and no array larger than a few blocks."""
    gradient = LARGE[kind]()
    table, statistics = plan_of(Bare(gradient.shape)), EagerStatistics(9, WITH_MOMENTS if moments else ORDINARY)
    with LargestResult(gradient):  # what torch imports for the first such mode is no memory of ours
        torch.zeros(1)
    tracemalloc.start()
    try:
        with LargestResult(gradient) as mode:
            (measured,) = statistics.measure(table, [(0, gradient)], 1)
            statistics.norms(table, [(0, gradient)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mode.bytes <= 2 * BLOCK_ELEMENTS * 8 + 4 * gradient.shape[0]
    assert peak <= 6 * BLOCK_ELEMENTS * 8 + 20 * gradient.shape[0]
    expected = float(gradient.double().norm())
    assert measured.vector[Column.NORM].item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_memory_is_used_again_for_other_shapes() -> None:
    """Statistics that have measured anything measure everything else as new ones do."""
    shapes = [(3, 5), (512, 1024), (7,), (2, 400_000), (64, 64), (300, 300), (1,), (1000, 1000)]
    used = EagerStatistics(9)
    for sample in range(3):
        for shape in shapes if sample % 2 else shapes[::-1]:
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                gradient, table = some(shape, dtype, seed=sample), plan_of(Bare(shape, dtype=dtype))
                found, fresh = (rows_of(statistics, table, [gradient])[0] for statistics in (used, EagerStatistics(9)))
                assert np.array_equal(found, fresh)


def test_two_threads_do_not_share_the_memory_they_work_in() -> None:
    """Statistics of several exporters, and of one, measure on threads at once as each does alone."""
    shared = EagerStatistics(9)
    shapes = [[(200, 300)] * 3, [(64, 64)] * 20, [(500, 400)], [(90_000,)] * 2]
    wrong: list[object] = []

    def work(number: int) -> None:
        gradients = [some(shape, torch.bfloat16, seed=number) for shape in shapes[number]]
        table, own = plan_of(Bare(*shapes[number])), EagerStatistics(9)
        expected = rows_of(EagerStatistics(9), table, gradients)
        for sample in range(30):
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


@pytest.mark.parametrize("shape", [(8, 6), (600, 700)], ids=str)
def test_a_sample_in_inference_mode_does_no_harm(shape: tuple[int, int]) -> None:
    """Memory that was first needed in an inference mode can be used after it."""
    gradients = [some(shape, torch.bfloat16), some(shape[::-1], torch.bfloat16).t()]
    statistics, table = EagerStatistics(9), plan_of(Bare(shape, shape, dtype=torch.bfloat16))
    with torch.inference_mode():
        first = rows_of(statistics, table, gradients, 1)
    second = rows_of(statistics, table, gradients, 2)
    assert all(np.array_equal(first[position], second[position]) for position in first)


@pytest.mark.parametrize(
    ("change", "shape"),
    [*((change, (2, 3)) for change in CHANGES), *((change, (600, 700)) for change in CHANGES if "uncoalesced" not in change)],
    ids=str,
)
def test_where_new_tensors_are_made_does_not_matter(change: str, shape: tuple[int, int]) -> None:
    """In a loop that makes tensors elsewhere by default, as for weights that come later, a sample is what it is in any other."""
    gradient, table = CHANGES[change](some(shape)), plan_of(Bare(shape))
    expected = rows_of(EagerStatistics(1, WITH_MOMENTS), table, [gradient])[0]
    statistics = EagerStatistics(1, WITH_MOMENTS)
    with torch.device("meta"):
        (measured,) = statistics.measure(table, [(0, gradient)], 1)
        (norms,) = statistics.norms(table, [(0, gradient)])
    np.testing.assert_array_equal(measured.packing.rows(measured.vector.numpy(), 1)[0], expected)
    assert norms.packing.rows(norms.vector.numpy(), 1)[0, 0] == pytest.approx(expected[Column.NORM], rel=0, abs=0, nan_ok=True)


def test_norms_do_not_need_the_newest_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numpy has no `vecdot`, norms and squares are those of the reference all the same."""
    monkeypatch.delattr(np, "vecdot", raising=False)
    for shape in ((), (7,), (4, 6), (300, 1000), (70_001,)):
        gradient, table = some(shape), plan_of(Bare(shape))
        assert_agrees(rows_of(EagerStatistics(9, WITH_MOMENTS), table, [gradient])[0], gradient, table, 0)


def test_units_are_summed_on_the_host_as_on_a_device() -> None:
    """The two ways to sum flags by parameter agree, and with a loop."""
    flags = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)) < 0.3
    sizes = [1, 7, 300, 1, 191]
    ends = torch.tensor(sizes).cumsum(0) - 1
    expected = [[int(part.sum()) for part in row.split(sizes)] for row in flags]
    assert sums(flags, ends).tolist() == sums_on_host(flags, ends).tolist() == expected
    none = torch.zeros_like(flags)
    assert sums(none, ends).tolist() == sums_on_host(none, ends).tolist() == [[0] * 5] * 2
    none[1, -1] = True
    assert sums(none, ends).tolist() == sums_on_host(none, ends).tolist() == [[0] * 5, [0, 0, 0, 0, 1]]
