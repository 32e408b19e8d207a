"""Each number of the programs against its definition, for all that a dense gradient may be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cuda_cuts
from benchmarks.cuda_cuts import CUTS, Cut, applied
from tests.kernels.conftest import WHERE, there
from tests.support.statistics import WITH_MOMENTS, by_definition
from torch_grad_exporter.model.units import UnitLayout
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.kernels import launch, tables
from torch_grad_exporter.statistics.kernels.launch import Launcher
from torch_grad_exporter.statistics.kernels.tables import BLOCK, BLOCKS, GROUP, KINDS, MOST_TILES, Read, readable
from torch_grad_exporter.statistics.layout import ORDINARY

NAN, INF = math.nan, math.inf

TILE = BLOCKS * BLOCK
"""Elements of a tile of a gradient that is not very large."""

kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def some(shape: Sequence[int], kind: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random values, a fifth of which is zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator) * (torch.rand(tuple(shape), generator=generator) >= 0.2)
    return values.to(kind)


def rows_first(*shape: int) -> UnitLayout:
    """Units along the first dimension."""
    return UnitLayout((shape[0], -1), (0,))


def assert_right(programs: Launcher, gradients: Sequence[Read]) -> launch.Found:
    """Every number and flag of gradients that are read together is what its definition says."""
    given = [(there(gradient), layout) for gradient, layout in gradients]
    assert all(readable(*one) for one in given)
    found = programs(given)
    found = launch.Found(found.rows.cpu(), found.zero.cpu(), found.alive.cpu())
    ends = np.cumsum([0 if layout is None else layout.count for _, layout in gradients])
    for place, (gradient, layout) in enumerate(gradients):
        row, expected = found.rows[place].tolist(), by_definition(gradient, layout)
        for column in (Column.ZEROS, Column.NANS, Column.INFS, Column.MIN, Column.MAX):
            assert row[column] == pytest.approx(getattr(expected, column.name.lower()), rel=0, abs=0, nan_ok=True), column.name
        assert row[Column.NORM] == pytest.approx(expected.norm, rel=1e-12, abs=0, nan_ok=True)
        rounding = 1e-14 * expected.elements * max(abs(expected.min), abs(expected.max))
        assert row[Column.SUM] == pytest.approx(expected.sum, rel=0, abs=rounding if math.isfinite(rounding) else 0, nan_ok=True)
        if layout is not None:
            units = layout.rows(gradient).float()
            own = slice(ends[place] - layout.count, ends[place])
            assert found.zero[own].tolist() == (units == 0).all(dim=1).tolist()
            assert found.alive[own].tolist() == ((units != 0).any(dim=1) & ~units.isnan().any(dim=1)).tolist()
    return found


@kinds
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, TILE, TILE + 3, 2 * TILE + BLOCK + 7])
def test_sizes(programs: Launcher, kind: torch.dtype, size: int) -> None:
    """Any number of elements, up to several tiles, at addresses for wide loads and at others."""
    values = some((size + 1,), kind)
    assert_right(programs, [(values[:-1], None), (values[1:], None)])


@kinds
def test_values_that_are_hard_to_square(programs: Launcher, kind: torch.dtype) -> None:
    """Tiny and huge values, subnormal ones and negative zeros: no square is lost, nothing becomes zero or infinite."""
    finfo = torch.finfo(kind)
    tiny, huge = (1e-24, 2e19) if kind is not torch.float16 else (finfo.tiny, 6e4)
    for values in (
        [tiny] * 50, [huge] * 50, [finfo.max, -finfo.max], [finfo.smallest_normal / 4] * 3 + [0.0], [-0.0, 0.0, -1.0],
        [tiny, huge, -tiny, -huge],
    ):  # fmt: skip
        gradient = torch.tensor(values).to(kind)
        found = assert_right(programs, [(gradient, None)])
        assert 0 < found.rows[0, Column.NORM] < INF


@kinds
@pytest.mark.parametrize("values", [[NAN], [INF], [-INF], [INF, -INF], [NAN, INF, -INF, 0.0], [NAN] * 20])
@pytest.mark.parametrize("at", [0, BLOCK - 3, BLOCK + 100])
def test_what_is_not_finite(programs: Launcher, kind: torch.dtype, values: list[float], at: int) -> None:
    """NaN and Inf are counted apart, and spoil what their definitions say and nothing else."""
    gradient = some((2 * BLOCK,), kind)
    gradient[at : at + len(values)] = torch.tensor(values).to(kind)
    assert_right(programs, [(some((100,), kind), None), (gradient, None), (some((100,), kind, 1), None)])


@kinds
@pytest.mark.parametrize(
    "shape",
    [
        (1, 5), (7, 1), (3, 2), (5, GROUP), (40, GROUP + 1), (300, 2 * GROUP), (33, 300), (3, BLOCK), (4, BLOCK + 16),
        (3, 2 * BLOCK + 5), (6, 4, 3, 3), (BLOCK + 5, 2), (BLOCK + 5, GROUP), (BLOCK, 1), (70, BLOCK // 2), (90, 5 * GROUP),
        (31, BLOCK - GROUP), (5, BLOCK + GROUP), (4, TILE + GROUP),
    ],
    ids=str,
)  # fmt: skip
def test_units(programs: Launcher, kind: torch.dtype, shape: tuple[int, ...]) -> None:
    """Units shorter and longer than a block, in runs that end with a group of elements and in others; some are zero, some NaN."""
    gradient = some(shape, kind)
    gradient[:: max(2, shape[0] // 3)] = 0
    if shape[0] > 2:
        gradient[1].view(-1)[-1] = NAN
        gradient[2] = 0
        gradient[2].view(-1)[-1] = torch.finfo(kind).smallest_normal / 2
    if shape[0] > 3:
        gradient[3] = 0
        gradient[3].view(-1)[0] = -INF
    assert_right(programs, [(gradient, rows_first(*shape)), (gradient.clone(), None), (gradient.clone(), rows_first(*shape))])


PERMUTED = [
    ((8, 4, 3, 5), (0, 2, 3, 1), rows_first(8)),
    ((70, 90), (1, 0), rows_first(70)),
    ((70, 90), (1, 0), UnitLayout((1, 70, 90, -1), (0, 2))),
    ((64, 130), (0, 1), UnitLayout((1, 64, 130, -1), (0, 2))),
    ((64, 128), (0, 1), UnitLayout((1, 64, 128, -1), (0, 2))),
    ((900, 2, 8), (0, 1, 2), UnitLayout((1, 900, 2, 8, -1), (0, 2))),
    ((3, 5, 24, 64), (0, 1, 2, 3), UnitLayout((1, 3, 5, 24, 64, -1), (0, 2))),
    ((40, 3, 56), (0, 1, 2), UnitLayout((1, 40, 3, 56, -1), (0, 2))),
    ((2, BLOCK + 8, 8), (0, 1, 2), UnitLayout((1, 2, BLOCK + 8, 8, -1), (0, 2))),
    ((3, BLOCK + 1), (0, 1), UnitLayout((1, 3, BLOCK + 1, -1), (0, 2))),
    ((5, 900), (0, 1), UnitLayout((1, 5, 900, -1), (0, 2))),
    ((6, 7, 3, 3), (0, 2, 3, 1), UnitLayout((1, 6, 7, 3, 3, -1), (0, 2))),
    ((1, 40, 50), (0, 1, 2), UnitLayout((1, 1, 40, 50, -1), (0, 3))),
    ((1, 40, 50), (0, 2, 1), UnitLayout((1, 1, 40, 50, -1), (0, 3))),
    ((4, 6, 50), (0, 1, 2), UnitLayout((24, -1), (0,))),
    ((4, 6, 50), (2, 0, 1), UnitLayout((24, -1), (0,))),
    ((1, 6, 50), (1, 0, 2), UnitLayout((6, -1), (0,))),
    ((6, 1, 50), (1, 0, 2), UnitLayout((6, -1), (0,))),
    ((3, 4, 5), (2, 1, 0), None),
]


@kinds
@pytest.mark.parametrize(("shape", "order", "layout"), PERMUTED, ids=str)
def test_orders_of_dimensions(
    programs: Launcher, kind: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...], layout: UnitLayout | None
) -> None:
    """A gradient that lies in memory in another order than that of its dimensions is read without a copy, its units too."""
    values = some(shape, kind)
    values[..., 1] = 0
    if shape[1] > 1:
        values[:, 1] = 0
    gradient = values.permute(order).contiguous().permute([order.index(place) for place in range(len(order))])
    assert torch.equal(gradient, values)
    assert_right(programs, [(gradient, layout)])


def left_alone() -> dict[str, tuple[torch.Tensor, UnitLayout | None]]:
    """Gradients that the programs are not given."""
    bases = torch.ones(6, 8)
    return {
        "float64": (bases.double(), None),
        "complex": (torch.ones(4, dtype=torch.complex64), None),
        "negated": (torch.ones(4, dtype=torch.complex64).conj().imag, None),
        "gaps": (bases[:, :4], None),
        "expanded": (torch.ones(1).expand(5), None),
        "sparse": (bases.to_sparse(), None),
        "one byte": (bases.to(torch.float8_e5m2), None),
        "parameter": (torch.nn.Parameter(bases), None),
        "two dimensions of units": (torch.ones(4, 5, 6), UnitLayout((4, 1, 5, 6, -1), (0, 3))),
        "groups of a transposed convolution": (torch.ones(4, 3, 2), UnitLayout((2, 2, 3, -1), (0, 2))),
        "units that are apart in memory": (torch.ones(4, 5, 6).permute(1, 0, 2), UnitLayout((20, -1), (0,))),
        "freed": (freed(), None),
        "an odd address": (torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1, count=3), None),
    }


def freed() -> torch.Tensor:
    """A tensor whose memory was given back, as FSDP does with what it has gathered."""
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("name", left_alone())
def test_what_the_programs_are_not_given(name: str) -> None:
    """What is not dense in memory, or of another type, or has units along several dimensions is left to torch."""
    assert not readable(*left_alone()[name])


def test_many_small_gradients(programs: Launcher) -> None:
    """Hundreds of gradients of a few elements, of all types, are read by one launch."""
    made = [(some((1 + i % 7, 3), list(KINDS)[i % 3], i), rows_first(1 + i % 7) if i % 2 else None) for i in range(300)]
    assert_right(programs, made)


def test_several_launches_are_as_one(programs: Launcher) -> None:
    """Where tiles take more memory than there is for them, the numbers are the same, bit by bit."""
    gradients = [(some((3, TILE // 2 * i + 1), seed=i), rows_first(3) if i % 2 else None) for i in range(5)]
    small = Launcher(WHERE, WITH_MOMENTS, launch.programs(), most=3)
    assert len(list(tables.flights(gradients, 3))) > 2
    one, several = assert_right(programs, gradients), assert_right(small, gradients)
    for name in ("rows", "zero", "alive"):
        assert torch.equal(getattr(one, name), getattr(several, name))
    assert_right(small, gradients[:2])
    assert_right(small, gradients)


def test_a_number_does_not_depend_on_the_company(programs: Launcher) -> None:
    """A gradient's row has the same bits whatever else is read with it: norms of some compare with those of all."""
    gradients: list[Read] = [(there(some((size,), kind, size)), None) for size in (5, 3 * BLOCK + 9) for kind in KINDS]
    alone = torch.cat([programs([one]).rows for one in gradients])
    assert torch.equal(programs(gradients).rows, alone)
    assert torch.equal(programs(gradients[::-1]).rows, alone.flip(0))


def test_a_table_follows_its_gradients(programs: Launcher) -> None:
    """Other numbers in place, other memory, another order of dimensions, other gradients: each call says what is there then."""
    gradient = there(some((40, 50)))
    first = programs([(gradient, rows_first(40))]).rows[0, Column.NORM]
    gradient.mul_(2)
    assert programs([(gradient, rows_first(40))]).rows[0, Column.NORM] == 2 * first
    assert_right(programs, [(some((40, 50), seed=1), rows_first(40))])
    assert_right(programs, [(some((50, 40), seed=2).t(), rows_first(40))])
    assert_right(programs, [(some((40, 50), seed=2), rows_first(40)), (some((3,)), None)])
    assert_right(programs, [(some((40, 50), torch.bfloat16, seed=2), rows_first(40))])


def test_without_moments_there_is_no_sum() -> None:
    """The sum of the elements is left 0 where it is not asked for, and the rest is the same."""
    gradient = there(some((40, 50)))
    found = Launcher(WHERE, ORDINARY, launch.programs())([(gradient, None)])
    whole = Launcher(WHERE, WITH_MOMENTS, launch.programs())([(gradient, None)])
    assert whole.rows[0, Column.SUM] != 0
    whole.rows[0, Column.SUM] = 0
    assert torch.equal(found.rows, whole.rows)


@kinds
def test_offsets_beyond_32_bits(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements beyond the 2**33rd are found, and so are their units.

    There is no such gradient here: the table says that the tiles of this one come after 2**33 elements, which lie below it.
    """
    inner, count, before = 2**31 + 48, 7, 2**33
    gradient = there(some((2 * BLOCK + 77,), kind))
    gradient[100:] = 0
    units = [(before + place) // inner % count for place in (0, 99, len(gradient) - 1)]
    made = tables.tables([(gradient, None)])
    made.entries[0] = before + len(gradient), KINDS[kind], BLOCK, -before // BLOCK, 3, inner, count, 0
    owners = torch.zeros(3, dtype=torch.int32, device=WHERE)
    address = gradient.data_ptr() - before * gradient.element_size()
    flags = torch.zeros((2, 16), dtype=torch.uint8, device=WHERE)
    partials = torch.zeros(3 * tables.PARTIALS, dtype=torch.float64, device=WHERE)
    programs = launch.programs()
    programs.read[3,](
        owners, torch.from_numpy(made.entries).to(WHERE), torch.tensor([address], device=WHERE),
        partials, flags[0], flags[1],
        COLUMNS=tables.COLUMNS, PARTIALS=tables.PARTIALS, BLOCK=BLOCK, GROUP=GROUP, MOMENTS=True,
    )  # fmt: skip
    assert flags[0, :count].nonzero().flatten().tolist() == sorted(set(units[:2]))
    assert float(partials.view(3, -1)[:, 0].sum().sqrt()) == pytest.approx(float(gradient.double().norm()), rel=1e-12)
    assert partials.view(3, -1)[:, 2].sum() == int((gradient == 0).sum())


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_reads_the_same(cut: Cut) -> None:
    """Each way to cut the work that the benchmark on a GPU tries gives the right numbers."""
    gradients = [(some((5, 3 * cut.block // 2), kind, place), rows_first(5)) for place, kind in enumerate(KINDS)]
    with applied(cut):
        assert_right(Launcher(WHERE, WITH_MOMENTS, launch.programs()), [*gradients, (some((90, 24)), rows_first(90))])


def test_the_table_of_cuts_has_a_row_for_each() -> None:
    """What a GPU is to tell is asked of it without an error."""
    model = torch.nn.Linear(40, 30).to(WHERE)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    found = cuda_cuts.table(model, WHERE, CUTS[:2])
    assert [row[:2] for row in found["rows"]] == [[BLOCK, BLOCKS], [BLOCK, CUTS[1].blocks]]
    assert all(row[4] > 0 for row in found["rows"])


@pytest.mark.parametrize("elements", [1, BLOCK, BLOCK * MOST_TILES, BLOCK * MOST_TILES + 1, 10**9, 2**31 + 5, 2**40])
def test_tiles_cover_a_gradient_once(elements: int) -> None:
    """However large a gradient is, its tiles are whole blocks, cover it, and are as few as can be added up by one program."""
    length, count = tables.tiles(elements)
    assert length % BLOCK == 0
    assert (count - 1) * length < elements <= count * length
    assert count <= MOST_TILES


DRAWN = st.tuples(
    st.sampled_from(list(KINDS)),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.integers(0, 2),
    st.floats(-30, 30),
    st.sampled_from([0.0, NAN, INF, -INF, 1.0]),
    st.integers(0, 1000),
)
"""Type, shape, order in memory, which units, magnitude, a value and its place."""


@given(drawn=st.lists(DRAWN, min_size=1, max_size=6))
def test_any_gradients(programs: Launcher, drawn: list[tuple[torch.dtype, list[int], list[int], int, float, float, int]]) -> None:
    """Gradients of any type, shape, order in memory and magnitude, with units or without, and a value that is not finite."""
    gradients: list[Read] = []
    for number, (kind, shape, places, units, magnitude, value, at) in enumerate(drawn):
        order = [place for place in places if place < len(shape)]
        lying = (some([shape[place] for place in order], torch.float32, number) * 10.0**magnitude).to(kind)
        lying.view(-1)[at % lying.numel()] = value
        gradient = lying.permute([order.index(place) for place in range(len(order))])
        layouts = [None, rows_first(*shape), UnitLayout((1, *shape, -1), (0, 2)) if len(shape) > 1 else None]
        gradients.append((gradient, layouts[units]))
    assert_right(programs, gradients)
