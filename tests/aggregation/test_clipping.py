"""What a factor between the backward and the step is: a clipping, a division or the unscaling of a loss."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import no_timeout_in_a_soak
from torch_grad_exporter.aggregation.clipping import Clipping, Clippings, Said
from torch_grad_exporter.aggregation.edits import Edit
from torch_grad_exporter.aggregation.scale_by_hand import ScalesByHand

pytestmark = no_timeout_in_a_soak

NOTHING = Said()
PARTS = np.array([0.6, 0.8])
"""The norms of two gradients, of the whole."""


def edit(whole: float, *factors: float) -> Edit:
    """Two gradients of this norm together; one factor for both, or one for each."""
    return Edit(whole * PARTS, whole * PARTS * np.array(factors))


def judged(
    edits: Iterable[Edit], said: Said = NOTHING, *, norms: Sequence[float] | None = None, by: Clippings | None = None
) -> list[Clipping]:
    """The judgements of one optimizer's samples. `norms`: the one that the loop gave of each."""
    clippings = Clippings() if by is None else by
    every = [said] * 10**3 if norms is None else [Said(norm=norm) for norm in norms]
    return [clippings.judge(number, {0: one}, what)[0] for number, (one, what) in enumerate(zip(edits, every, strict=False))]


def wholes(seed: int, spread: float = 0.3) -> list[float]:
    """Norms of 100 samples of a training."""
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0, spread)) for _ in range(100)]


def clipped_to(limit: float, norms: Iterable[float]) -> list[Edit]:
    """Clipping as `clip_grad_norm_` does it."""
    return [edit(norm, min(1.0, limit / (norm + 1e-6))) for norm in norms]


# One factor


@pytest.mark.parametrize("limit", [0.9, 0.05])
@given(seed=st.integers(0, 10**6))
def test_a_limit_is_known_from_the_third_clipped_sample_on(limit: float, seed: int) -> None:
    """Norms that are clipped to a limit have a coefficient once two others came out the same; untouched ones have 1 at once."""
    norms, short = wholes(seed), 0
    for norm, found in zip(norms, judged(clipped_to(limit, norms)), strict=True):
        short += norm > limit
        if norm <= limit:
            assert (found.coefficient, found.clipped, found.after) == (1, False, pytest.approx(norm))
        else:
            known = short > 2
            assert found.coefficient == (pytest.approx(limit / norm, rel=1e-4) if known else None)
            assert (found.clipped, found.after) == (known, pytest.approx(limit, rel=1e-4))


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_a_division_by_varying_numbers_is_no_clipping(seed: int, spread: float) -> None:
    """Gradients that are divided by the number of tokens have no coefficient, and the norm after it is shown all the same."""
    generator = random.Random(seed + 1)
    norms = wholes(seed, spread)
    edits = [edit(norm, 1 / generator.randint(100, 5000)) for norm in norms]
    for one, found in zip(edits, judged(edits), strict=True):
        assert found == Clipping(None, one.seen)


@given(divisor=st.sampled_from([3.0, 113.0, 8.0]), steady=st.booleans(), seed=st.integers(0, 10**6))
def test_a_division_by_a_constant_is_no_clipping(divisor: float, steady: bool, seed: int) -> None:
    """That norms repeat after it shows nothing where they did so before."""
    norms = [2.0] * 100 if steady else wholes(seed)
    assert not any(found.clipped or found.coefficient is not None for found in judged([edit(norm, 1 / divisor) for norm in norms]))


def test_gradients_that_grew_are_not_clipped() -> None:
    """Gradients that are all made to have one norm are not clipped where that makes them longer."""
    found = judged([edit(norm, 2.0 / norm) for norm in wholes(0)])
    assert all(not one.clipped for one, norm in zip(found, wholes(0), strict=True) if norm < 2)


@given(seed=st.integers(0, 10**6), size=st.floats(1e-30, 1e30))
def test_the_size_of_gradients_does_not_matter(seed: int, size: float) -> None:
    """Gradients and limit a thousand times as large have the same coefficients."""
    norms = wholes(seed)
    small, large = ([edit(n * unit, min(1.0, 0.9 / n)) for n in norms] for unit in (1.0, size))
    pairs = zip(judged(small), judged(large), strict=True)
    assert all(a.clipped == b.clipped and a.coefficient == pytest.approx(b.coefficient) for a, b in pairs)


# Rounding


def rounded(seed: int, dtype: torch.dtype, factor: float | None, limit: float | None = None) -> Edit:
    """Gradients of a type that are divided, or clipped by torch."""
    generator = torch.Generator().manual_seed(seed)
    size = math.exp(random.Random(seed).gauss(0, 0.3))
    gradients = [(torch.randn(n, generator=generator) * size).to(dtype) for n in (4, 30, 1000)]
    before = np.array([float(g.double().norm()) for g in gradients])
    for gradient in gradients:
        if factor is not None:
            gradient.mul_(factor)
    if limit is not None:
        parameters = [torch.nn.Parameter(g) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, limit)
    return Edit(before, np.array([float(g.double().norm()) for g in gradients]))


def test_a_limit_shows_through_rounding() -> None:
    """Clipping of bfloat16 gradients, whose norm and factor are rounded as well, is known after eight that came out alike."""
    found = judged(rounded(seed, torch.bfloat16, None, 0.1) for seed in range(40))
    assert [one.clipped for one in found] == [False] * 8 + [True] * 32
    assert all(one.coefficient is None or one.coefficient < 1 for one in found)


def test_a_division_of_rounded_gradients_is_no_clipping() -> None:
    """Factors of bfloat16 gradients differ by rounding: that is no clipping of each by itself, nor one to a limit."""
    factors = [1 / random.Random(seed).randint(3, 400) for seed in range(300)]
    found = judged(rounded(seed, torch.bfloat16, factor) for seed, factor in enumerate(factors))
    assert not any(one.clipped or one.coefficient is not None for one in found)
    told = judged([rounded(seed, torch.bfloat16, 1 / 113) for seed in range(20)])
    assert not any(one.clipped for one in told)


# Different factors


@given(
    factors=st.tuples(st.floats(0, 1), st.floats(0, 1)).filter(lambda two: abs(two[0] - two[1]) > 0.01), whole=st.floats(0.1, 10)
)
def test_gradients_that_were_cut_differently_have_a_coefficient_at_once(factors: tuple[float, float], whole: float) -> None:
    """Clipping by value, by group, or of some gradients alone: the ratio of the whole norms."""
    (found,) = judged([edit(whole, *factors)])
    assert found.coefficient == pytest.approx(math.hypot(0.6 * factors[0], 0.8 * factors[1]))
    assert found.clipped


def test_a_cut_of_one_small_gradient_is_a_clipping() -> None:
    """A gradient that alone is shorter was cut, by however little; one that was removed was cut to nothing."""
    for factors in ((1.0, 0.9999), (1.0, 0.0)):
        (found,) = judged([edit(3.0, *factors)])
        assert (found.clipped, found.coefficient) == (True, pytest.approx(math.hypot(0.6, 0.8 * factors[1])))


@pytest.mark.parametrize("factors", [(1.0, 1.5), (0.5, 1.1)])
def test_gradients_of_which_some_grew_are_not_clipped(factors: tuple[float, float]) -> None:
    """As by noise: there is a ratio of the norms, but no clipped step."""
    (found,) = judged([edit(3.0, *factors)])
    assert found.coefficient == pytest.approx(math.hypot(0.6 * factors[0], 0.8 * factors[1]))
    assert not found.clipped


def test_noise_where_there_was_no_gradient() -> None:
    """A gradient of zeros that is none any more has changed by another factor than the others."""
    (found,) = judged([Edit(np.array([3.0, 0.0]), np.array([3.0, 4.0]))])
    assert (found.coefficient, found.clipped) == (pytest.approx(5 / 3), False)


def test_what_cannot_be_compared() -> None:
    """Without a finite norm before the change, or without any, there is no coefficient; a norm that becomes infinite shows."""
    infinite, zero, grown = judged(
        [Edit(np.array([math.inf, 1.0]), np.array([math.nan, 0.0])), edit(0.0, 0.5), Edit(np.array([1.0]), np.array([math.inf]))]
    )
    assert infinite == Clipping(None)
    assert zero == Clipping(None, 0.0)
    assert (grown.coefficient, grown.after, grown.clipped) == (math.inf, math.inf, False)


# Samples that are settled twice, and several optimizers


@given(seed=st.integers(0, 10**6), times=st.lists(st.integers(1, 3), min_size=100, max_size=100))
def test_a_sample_that_is_judged_again_is_judged_alike(seed: int, times: list[int]) -> None:
    """However often a sample is settled, it enters what is remembered once, and does not repeat itself."""
    edits = clipped_to(0.9, wholes(seed))
    clippings = Clippings()
    found = [
        [clippings.judge(number, {0: one}, NOTHING)[0] for _ in range(count)]
        for number, (one, count) in enumerate(zip(edits, times, strict=True))
    ]
    assert [one[-1] for one in found] == judged(edits)
    assert all(len(set(one)) == 1 for one in found)


def test_rounded_samples_and_given_norms_are_remembered_once() -> None:
    """The same of bfloat16 gradients, of which eight others have to agree, and of given norms of divided gradients."""
    coarse = [rounded(seed, torch.bfloat16, None, 0.1) for seed in range(12)]
    norms = wholes(0)[:12]
    pairs: list[tuple[list[Edit], list[Said]]] = [
        (coarse, [NOTHING] * 12),
        ([edit(n, 1e-3 / n) for n in norms], [Said(norm=n / (100 + i)) for i, n in enumerate(norms)]),
    ]
    for edits, said in pairs:
        once, twice = Clippings(), Clippings()
        for number, (one, what) in enumerate(zip(edits, said, strict=True)):
            found = {twice.judge(number, {0: one}, what)[0] for _ in range(3)}
            assert found == {once.judge(number, {0: one}, what)[0]}


def test_several_optimizers_that_are_clipped_together() -> None:
    """One clipping over the gradients of all: the norm of none of them repeats, but that of all together does."""
    clippings, generator = Clippings(), random.Random(0)
    for number in range(10):
        first, second = (math.exp(generator.gauss(0, 0.5)) for _ in range(2))
        factor = 0.1 / math.hypot(first, second)
        found = clippings.judge(number, {0: edit(first, factor), 1: edit(second, factor)}, NOTHING)
        assert [found[o].clipped for o in (0, 1)] == [number > 1] * 2
        assert [found[o].coefficient for o in (0, 1)] == [pytest.approx(factor) if number > 1 else None] * 2


def test_several_optimizers_of_which_one_is_clipped() -> None:
    """Each is judged by its own norms."""
    clippings = Clippings()
    for number, norm in enumerate(wholes(0)):
        found = clippings.judge(number, {0: edit(norm, 0.01 / norm), 1: edit(norm, 1.0)}, NOTHING)
        assert (found[0].clipped, found[1].coefficient, found[1].clipped) == (number > 1, 1, False)


# What the loop says


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_that_tells_its_divisor_has_clipped_the_rest(dtype: torch.dtype) -> None:
    """Then a common factor is a clipping at once, and rounding of the division is none."""
    told = Said(divided=True)
    assert judged([edit(2.0, 0.3)], told) == [Clipping(0.3, pytest.approx(0.6), clipped=True)]
    for seed in range(20):
        divided = rounded(seed, dtype, 1 / 113)
        (found,) = judged([Edit(divided.before / 113, divided.after)], told)
        assert (found.clipped, found.coefficient) == (False, pytest.approx(1, rel=4e-3))


def test_a_norm_that_is_given_without_a_division() -> None:
    """Where it is the norm of the backward's gradients, a common factor is a clipping, at once."""
    norms = wholes(0)
    found = judged([edit(norm, 0.5) for norm in norms], norms=norms)
    assert all(
        one == Clipping(pytest.approx(0.5), pytest.approx(norm / 2), clipped=True) for one, norm in zip(found, norms, strict=True)
    )


def test_a_norm_that_is_given_after_a_division() -> None:
    """It shows the divisor at once where the optimizer saw just that norm; with clipping once the limit repeats."""
    generator, norms = random.Random(0), wholes(0)
    tokens = [generator.randint(100, 5000) for _ in norms]
    plain = judged(
        [edit(n, 1 / t) for n, t in zip(norms, tokens, strict=True)], norms=[n / t for n, t in zip(norms, tokens, strict=True)]
    )
    assert all(
        (one.coefficient, one.divisor, one.clipped) == (pytest.approx(1), pytest.approx(t), False)
        for one, t in zip(plain, tokens, strict=True)
    )
    clipped = judged([edit(n, 1e-5 / n) for n in norms], norms=[n / t for n, t in zip(norms, tokens, strict=True)])
    assert [one.sure for one in clipped] == [False] * 2 + [True] * 98
    for one, norm, token in list(zip(clipped, norms, tokens, strict=True))[2:]:
        assert (one.divisor, one.coefficient, one.clipped) == (pytest.approx(token), pytest.approx(1e-5 * token / norm), True)


def test_a_division_and_clipping_by_value() -> None:
    """Once the given norm has shown to be that of all gradients, it shows the divisor of those that were cut differently, too."""
    edits = [edit(2.0, 0.01), edit(3.0, 0.02), edit(4.0, 0.01, 0.005)]
    found = judged(edits, norms=[0.02, 0.06, 0.04])[-1]
    assert (found.divisor, found.clipped) == (pytest.approx(100), True)
    assert found.coefficient == pytest.approx(math.hypot(0.6, 0.4))


@pytest.mark.parametrize("share", [0.3, 1.7])
def test_a_given_norm_of_another_kind_divides_nothing(share: float) -> None:
    """The largest norm of a layer, or the sum of magnitudes, which a loop may clip by: no divisor follows from it, ever.

    While it might be one the sample is not sure; after three such samples it is not asked any more.
    """
    generator, norms = random.Random(0), wholes(0)
    others = [norm * share * math.exp(generator.gauss(0, 0.1)) for norm in norms]
    found = judged([edit(norm, 0.01 / other) for norm, other in zip(norms, others, strict=True)], norms=others)
    assert all(one.divisor == 1 and not one.clipped for one in found)
    assert [one.sure for one in found] == ([False] * 3 + [True] * 97 if share < 1 else [True] * 100)


def test_a_part_knows_a_limit_by_the_given_norm_alone() -> None:
    """By the norm of all ranks, times the factor, a limit is known; a rank's own norms mean nothing, though they may repeat."""
    generator, norms = random.Random(0), wholes(0)
    factors = [0.1 / norm for norm in norms]
    parts = [edit(norm * generator.random(), factor) for norm, factor in zip(norms, factors, strict=True)]
    clippings = Clippings()
    for number, (one, norm) in enumerate(zip(parts, norms, strict=True)):
        found = clippings.judge(number, {0: one}, Said(norm=norm, part=True))[0]
        assert (found.clipped, found.divisor, found.after) == (number > 1, 1, one.seen)
    unknown = judged([edit(norm, 0.1 / norm) for norm in norms], Said(part=True))
    assert not any(one.clipped for one in unknown)


# Loss scales


def looked(edits: Iterable[Edit]) -> list[float | None]:
    """The scale of one optimizer's samples."""
    scales = ScalesByHand()
    return [scales.look(number, 0, one) for number, one in enumerate(edits)]


def test_a_steady_power_of_two_is_a_loss_scale() -> None:
    """From the sixth sample on; a scale that doubles or backs off is one, too."""
    exponents = [10, 10, 11, 11, 10, 10, 11, 12, 12]
    found = looked(edit(n * 2.0**e, 2.0**-e) for n, e in zip(wholes(0), exponents, strict=False))
    assert found == [None] * 5 + [2.0**e for e in exponents[5:]]


@pytest.mark.parametrize("first", [0, 3])
def test_one_step_of_128_tokens_costs_no_other_its_norm(first: int) -> None:
    """A power of two among other divisors, or among untouched gradients, is a division."""
    divisors = [113, 97, 150, 101, 140] * 4
    divisors[first] = 128
    scales = ScalesByHand()
    for number, divisor in enumerate(divisors):
        assert scales.look(number, 0, edit(1.0, 1 / divisor)) is None
        assert scales.may_be(0) == (first <= number < 4)
    scales = ScalesByHand()
    assert [scales.look(number, 0, edit(1.0, 1 / (128 if number == first else 1))) for number in range(20)][first + 1 :] == [1] * (
        19 - first
    )
    assert not scales.may_be(0)


def test_powers_of_two_that_jump_are_no_scale() -> None:
    """Divisions by 32 and by 128 in no order are those of batches."""
    generator = random.Random(0)
    found = looked(edit(1.0, 1 / generator.choice([32, 128, 512])) for _ in range(200))
    assert set(found) == {None}


def test_a_gradient_that_was_cut_by_less_was_not_scaled() -> None:
    """Where any gradient keeps more than a 32nd part, no loss was scaled, and later powers of two are divisions."""
    assert looked([edit(1.0, 2**-6, 0.5), *[edit(1.0, 2**-6)] * 10]) == [1] * 11


def test_a_scale_that_clipping_hides() -> None:
    """While a scale is there, and the factor is none of a scaler's, the scale is unknown."""
    scales = ScalesByHand()
    for number in range(6):
        scales.look(number, 0, edit(1.0, 2**-10))
    assert scales.look(6, 0, edit(1.0, 2**-10 / 3)) is None
    assert scales.may_be(0)
    assert not scales.may_be(1)


def test_gradients_that_are_not_finite_show_no_scale() -> None:
    """Overflows neither reveal a scale nor hide one."""
    scales = ScalesByHand()
    assert scales.look(0, 0, Edit(np.array([math.inf]), np.array([1.0]))) is None
    assert scales.look(1, 0, edit(0.0, 1.0)) is None
    assert not scales.may_be(0)
