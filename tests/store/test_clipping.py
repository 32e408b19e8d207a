"""How gradients change between backward and step: clipping and division, as a scrape shows them."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest

from tests.store.support import Training, by_layer
from tests.support.tools import eventually


class Shown(NamedTuple):
    """What a scrape shows of the last sample of an optimizer. `clipped`: of all steps so far, None while that is unknown."""

    norm: float | None
    coefficient: float | None
    after: float | None
    clipped: float | None


def shown(training: Training, optimizer: str = "") -> Shown:
    """Return it of this scrape."""
    names = ("global_norm", "clip_coefficient", "global_norm_after_clip", "clipped_steps_total")
    return Shown(*(training.whole(name, optimizer=optimizer) for name in names))


def edited(training: Training, norm: float, *factors: float) -> Shown:
    """Train a round whose gradients have this norm, multiplied by one factor, or by one for each layer."""
    training.backward(a=0.6 * norm, b=0.8 * norm)
    training.multiply(factors[0], "a")
    training.multiply(factors[-1], "b")
    training.step()
    return shown(training)


def norms(number: int, seed: int = 0) -> list[float]:
    """Return norms around 1."""
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0, 0.3)) for _ in range(number)]


# One factor


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 1e-20])
def test_a_limit_is_known_when_it_repeats(size: float) -> None:
    """Clipped samples have a coefficient once two others came out at the same norm, and then these count as well.

    Untouched ones have a coefficient of 1 at once.
    """
    short = 0
    with Training() as training:
        for norm in (number * size for number in norms(15)):
            limited = norm > 0.9 * size
            short += limited
            found = edited(training, norm, min(1.0, 0.9 * size / norm))
            coefficient = None if limited and short <= 2 else min(1.0, 0.9 * size / norm)
            assert found.coefficient == (coefficient and pytest.approx(coefficient))
            assert (found.norm, found.after) == (pytest.approx(norm), pytest.approx(min(norm, 0.9 * size)))
            assert found.clipped == (None if 0 < short < 3 else short)
    assert short > 3


@pytest.mark.parametrize("divisions", [0, 1, 20])
def test_what_stays_unknown_stays_absent(divisions: int) -> None:
    """A limit that repeats does not say what an earlier division was: the number of clipped steps stays unknown."""
    with Training() as training:
        for norm in norms(divisions):
            edited(training, norm, 0.5)
        counted = [edited(training, norm, 0.1 / norm).clipped for norm in norms(20)]
    assert counted == ([None] * 20 if divisions else [None, None, *range(3, 21)])


# Different factors


def test_a_step_that_is_skipped_has_no_coefficient() -> None:
    """A sample that no optimizer saw has no coefficient, and nothing of it goes into the next one."""
    with Training() as training:
        for number in range(1, 5):
            found = edited(training, 2.0, 1.0, 0.5)
            assert (found.coefficient, found.clipped) == (pytest.approx(math.hypot(0.6, 0.4)), number)
            training.backward(a=math.nan, b=1.0)
            training.multiply(0.1, "b")
            training.exporter.step_skipped()
            found = shown(training)
            assert (found.coefficient, found.after, found.clipped) == (None, None, number)
        assert training.outcomes() == {"skipped": 4}


# Several optimizers


@pytest.mark.slow
def test_a_late_step_is_clipped_once() -> None:
    """A sample that is counted while its other optimizer may still step counts as clipped once."""
    with Training(optimizers=by_layer) as training:
        training.round(a=1.0, a_bias=1.0, b=1.0)
        training.backward(a=3.0, a_bias=1.0, b=2.0)
        training.parameter("a").grad.mul_(0.1)  # type: ignore[union-attr]
        training.step(0)
        assert eventually(lambda: shown(training, "SGD").clipped == 1)
        training.step(1)
        assert eventually(lambda: shown(training, "Adam").norm == 2.0)
        assert shown(training, "SGD").clipped == 1
        training.round(a=1.0, a_bias=1.0, b=1.0)
        assert (shown(training, "SGD").clipped, shown(training, "Adam").clipped) == (1, 0)


# Norms that the loop gives
