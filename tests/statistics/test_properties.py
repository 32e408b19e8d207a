"""Properties of every statistic, for gradients of any shape, type, memory layout and value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.statistics.test_device_chunks import NARROW, ON_DEVICE
from tests.support.gradients import (
    FULL,
    INF,
    LARGE,
    NAN,
    REAL,
    SMALL,
    Drawn,
    Shape,
    bits,
    close,
    dense_gradients,
    given_gradient,
    models,
    numbers,
    true_norm,
    true_sum,
)
from tests.support.properties import both_formats, no_timeout_in_a_soak, totals
from tests.support.record import Recorder, norm
from tests.support.statistics import WITH_MOMENTS, by_position
from torch_grad_exporter import start_exporter
from torch_grad_exporter.metrics.buckets import HALF_DECADES
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.eager import EagerStatistics

pytestmark = [no_timeout_in_a_soak, pytest.mark.slow]


PATHS: dict[str, Callable[..., EagerStatistics]] = {
    "host": EagerStatistics,
    "device": ON_DEVICE,
    "chunks": functools.partial(ON_DEVICE, chunk_elements=1),
}
"""Ways to measure a CPU tensor: its own, that of other devices, and that of other devices in as many chunks as possible."""

ALL_PATHS: dict[str, Callable[..., EagerStatistics]] = {**PATHS, "no float64": NARROW}


def examples(share: float) -> settings:
    """Return settings with a part of the profile's examples."""
    return settings(max_examples=int(settings.default.max_examples * share))


def plan_of(drawn: Sequence[Drawn]) -> tuple[torch.nn.Module, ParameterTable]:
    """Return a model of all modules, to keep it alive, and its table, in which positions are those of the list."""
    model = torch.nn.ModuleList([one.module for one in drawn])
    return model, LayerIndex({"": model}).table


def tolerance(dtype: torch.dtype) -> float:
    """Return how far a norm may be off: sums of squares run in float32 except for the widest types."""
    return 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5


def assert_true(found: Sequence[float], drawn: Drawn) -> None:
    """Check a measured row: counts and extremes exactly, the norm and the sum within rounding."""
    values = drawn.flat
    nans = sum(map(math.isnan, values))
    assert found[Column.NANS] == nans
    assert found[Column.INFS] == sum(map(math.isinf, values))
    assert found[Column.ZEROS] == values.count(0.0)
    assert found[Column.ZERO_UNITS] == (drawn.units == 0).all(axis=1).sum()
    assert close(found[Column.MIN], NAN if nans else min(values), 0)
    assert close(found[Column.MAX], NAN if nans else max(values), 0)
    assert close(found[Column.NORM], true_norm(values), tolerance(drawn.gradient.dtype))
    assert_sum(found[Column.SUM], values)


def assert_sum(found: float, values: Sequence[float]) -> None:
    """Check a sum up to the rounding of float64 additions."""
    total, error = true_sum(values)
    assert error == INF or close(found, total, 0, error)


# Statistics


TWICE = torch.sparse_coo_tensor([[0, 0, 2]], torch.ones(3, 2), (5, 2), check_invariants=True)
ONE_LARGE = torch.full((64, 1024), 2.3e-4).index_fill(1, torch.tensor([0]), 1.0)


@examples(0.6)
@given(models(SMALL | LARGE), st.data())
def test_every_gradient_is_measured_as_it_is(drawn: list[Drawn], data: st.DataObject) -> None:
    """The row of any gradient says what a sum by hand says, measured again it has the same bits, and no gradient is changed."""
    part = [position for position in range(len(drawn)) if data.draw(st.booleans())]
    for path in PATHS:
        check(path, drawn, part)


@pytest.mark.parametrize(
    "drawn",
    [
        # Found once: small squares beside a large one, rounded away where torch sums up in one accumulator.
        [given_gradient(ONE_LARGE.t().contiguous().t())],
        # Torch's lazily negated tensors cannot become arrays.
        [given_gradient(torch.ones(40_000, dtype=torch.complex64).conj().imag)],
        # A sum that overflows must do so silently.
        [given_gradient(torch.full((200_000,), 1e308, dtype=torch.float64))],
        # Complex numbers of two float64, beyond what float32 holds.
        [given_gradient(torch.full((3,), 1.3e154 + 1.3e154j, dtype=torch.complex128))],
        # Squares that are subnormal numbers.
        [given_gradient(torch.full((3,), 1e-22)), given_gradient(torch.full((3,), 1e-158, dtype=torch.float64))],
        # Repeated entries add up before they are squared, and what is not stored takes part in the smallest element.
        [given_gradient(TWICE, torch.nn.Embedding(1, 1))],
    ],
    ids=["one large", "negated", "overflow", "complex", "subnormal", "sparse"],
)
def test_gradients_that_were_wrong_once(drawn: list[Drawn]) -> None:
    """The same holds for gradients that were measured wrongly once."""
    for path in PATHS:
        check(path, drawn, range(len(drawn)))


def check(path: str, drawn: list[Drawn], part: Sequence[int]) -> None:
    """Measure gradients, together, alone, and some of them, and compare with sums by hand."""
    model, table = plan_of(drawn)
    before = [bits(one.gradient) for one in drawn]
    measuring = PATHS[path](9, WITH_MOMENTS)
    gradients = [(position, one.gradient) for position, one in enumerate(drawn)]
    measured = measuring.measure(table, gradients, 1)
    whole = by_position(measured)
    assert sorted(whole) == [position for position, one in enumerate(drawn) if one.values.size]
    for position, found in whole.items():
        assert_true(found, drawn[position])
    for some in measured:
        assert some.elements.tolist() == [drawn[position].values.size for position in some.positions]
        assert some.units.tolist() == [len(drawn[position].units) for position in some.positions]
    for members in (gradients, [gradients[position] for position in part], *([pair] for pair in gradients)):
        for position, (alone,) in by_position(measuring.norms(table, members)).items():
            assert repr(alone) == repr(whole[position][Column.NORM])
    for pair in gradients:
        anew = PATHS[path](9, WITH_MOMENTS)  # whose first sample has zeros and extremes, whatever the size
        for position, alone in by_position(anew.measure(table, [pair], 1)).items():
            for column in set(Column) - {Column.DEAD_UNITS, Column.SUM}:
                assert repr(alone[column]) == repr(whole[position][column])
            assert_sum(alone[Column.SUM], drawn[position].flat)
    for one, kept in zip(drawn, before, strict=True):
        assert all(map(np.array_equal, bits(one.gradient), kept))
    del model


@examples(0.6)
@given(st.sampled_from([*PATHS]), st.sampled_from(REAL), FULL | LARGE, st.data())
def test_order_sign_and_scale(path: str, dtype: torch.dtype, shape: Shape, data: st.DataObject) -> None:
    """For elements in another order, of the other sign, or times a power of two, counts stay and values follow."""
    values = data.draw(numbers(dtype, math.prod(shape)))
    factor = 2.0 ** data.draw(st.integers(-20, 20))
    scaled = values * factor
    assume(bool(((scaled / factor == values) | values.isnan()).all()))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    table = LayerIndex({"": module}).table
    first, shuffled, negated, larger = (
        by_position(PATHS[path](9, WITH_MOMENTS).measure(table, [(0, v.reshape(shape))], 1))[0]
        for v in (values, values[order], -values, scaled)
    )
    for other, times in ((shuffled, 1.0), (negated, 1.0), (larger, factor)):
        for column in (Column.ZEROS, Column.NANS, Column.INFS):
            assert other[column] == first[column]
        if math.isfinite(first[Column.NORM]) and math.isfinite(other[Column.NORM]):  # one of them may be beyond float64
            assert close(other[Column.NORM], first[Column.NORM] * times, 2 * tolerance(dtype))
    for one, opposite in ((Column.MIN, Column.MAX), (Column.MAX, Column.MIN)):
        assert close(shuffled[one], first[one], 0)
        assert close(negated[one], -first[opposite], 0)
        assert close(larger[one], first[one] * factor, 0)


UNIT = {"zero": [0.0, -0.0], "alive": [0.0, -1e-30], "infinite": [INF, 0.0], "nan": [NAN, 1.0]}


@examples(0.6)
@given(st.data())
def test_dead_units_were_silent_in_the_last_samples(data: st.DataObject) -> None:
    """Over any samples of any parameters, read in parts or again, dead units are those by hand."""
    window = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    model = torch.nn.ModuleList([torch.nn.Linear(2, n, bias=False) for n in sizes])
    table = LayerIndex({"": model}).table
    measuring = {name: path(window) for name, path in ALL_PATHS.items()}
    history: list[dict[int, list[str]]] = [{} for _ in sizes]
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        number += data.draw(st.booleans())
        for past in history:
            past.pop(number, None)
        gradients = []
        for position in data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True)):
            states = data.draw(st.tuples(*[st.sampled_from([*UNIT, "zero", "zero"])] * sizes[position]))
            history[position][number] = list(states)
            gradients.append((position, torch.tensor([UNIT[state] for state in states])))
        cut = data.draw(st.integers(0, len(gradients)))
        expected = {}
        for position, _ in gradients:
            units = zip(*history[position].values(), strict=True)
            known = [[state for state in states if state != "nan"] for states in units]
            expected[position] = sum(bool(k) and set(k[-window:]) == {"zero"} for k in known)
        for name, statistics in measuring.items():
            readings = [*statistics.read(table, gradients[:cut]), *statistics.read(table, gradients[cut:])]
            rows = by_position(statistics.finish(readings, number))
            assert {position: row[Column.DEAD_UNITS] for position, row in rows.items()} == expected, name


# From autograd to the scrape

WRAPPERS = ("module", "_orig_mod")
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=6) | st.sampled_from(
    [*WRAPPERS, '"', "\\", "\n", "\\n", "\r\n", 'a"} 1\nb{', "ü", "🔥", "weight", " ", "\u2028", "\x00"]
)


@examples(0.25)
@given(st.lists(NAMES, min_size=1, max_size=5, unique=True), NAMES)
def test_layers_of_any_name_parse(names: list[str], label: str) -> None:
    """Modules may have any name: both formats parse, and each layer has its own series with its name unchanged."""
    model = torch.nn.Module()
    assume(not any(hasattr(model, name) for name in names))
    for name in names:
        model.add_module(name, torch.nn.Linear(1, 1, bias=False))
    with start_exporter(model, port=None, every=1, labels={"user": label}) as exporter:
        found = both_formats(exporter.collect())
    layers = {part for name, *labels in found if name == "torch_grad_captures_total" for part in labels}
    assert {f"layer={name}" for name in names if name not in WRAPPERS} <= layers
    assert len(layers) == len(names)


class Given(torch.nn.Module):
    """A model whose gradients are its inputs: the gradient of `sum(p * g)` is `g`, to the last bit."""

    def __init__(self, kinds: Sequence[tuple[torch.dtype, Shape]]) -> None:
        super().__init__()
        for number, (dtype, shape) in enumerate(kinds):
            owner = torch.nn.Module()
            owner.register_parameter("weight", torch.nn.Parameter(torch.ones(shape, dtype=dtype)))
            self.add_module(f"layer{number}", owner)

    def forward(self, gradients: dict[int, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for position, parameter in enumerate(self.parameters()):
            if position in gradients:
                pair = (parameter, gradients[position])
                p, g = map(torch.view_as_real, pair) if parameter.is_complex() else pair
                total = total + (p * g).sum().float()
        return total


def on_an_edge(record: Recorder) -> bool:
    """Return whether a norm is so close to the bound of a bucket that rounding decides."""
    norms = [one for optimizer in record.optimizers.values() for one in optimizer.norms]
    norms += [norm(gradient for _, gradient in sample) for layer in record.layers.values() for sample in layer.samples]
    return any(0 < abs(one / bound - 1) < 1e-5 for one in norms for bound in HALF_DECADES)


TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
ROUNDS = st.lists(st.sampled_from(["stepped", "stepped", "skipped"]), max_size=5).map(lambda some: ["stepped", *some, "stepped"])
"""Before the first step a skipped one cannot be told from two passes to a step."""


@examples(0.4)
@given(st.lists(st.tuples(st.sampled_from(TYPES), FULL), min_size=1, max_size=4), ROUNDS, st.data())
def test_a_scrape_says_what_the_gradients_were(
    kinds: list[tuple[torch.dtype, Shape]], rounds: list[str], data: st.DataObject
) -> None:
    """For any gradients of any parameters, in rounds that step or are skipped, a scrape equals the loop's own record."""
    model = Given(kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with start_exporter(model, port=None, every=1, moments=True, dead_window=3) as exporter:
        record = Recorder(model, optimizer, dead_window=3, moments=True)
        for outcome in rounds:
            present = data.draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, unique=True))
            wanted = {position: data.draw(dense_gradients(*kinds[position])) for position in present}
            optimizer.zero_grad()
            record.backward(model(wanted))
            got = {i: p.grad for i, p in enumerate(model.parameters()) if p.grad is not None}
            assert got.keys() == wanted.keys()
            assert all(map(np.array_equal, bits(got[i]), bits(wanted[i])) for i in wanted)
            if outcome == "stepped":
                record.step(optimizer)
            else:
                record.skipped()
        without = ["torch_grad_stddev"]  # of a norm in float32, so good to three digits only
        if on_an_edge(record):
            without += ["torch_grad_norm_distribution_bucket", "torch_grad_global_norm_distribution_bucket"]
        # Where all is zero there is nothing to compare with: whether it was clipped stays absent.
        record.check(exporter, optional=["torch_grad_global_norm_after_clip"], without=without)
        assert all(map(math.isfinite, totals(both_formats(exporter.collect())).values()))
