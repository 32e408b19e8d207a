"""What the matrix is worth: in the regimes that say so, a capture in a naive place would be noticed."""

from __future__ import annotations

import pytest

from tests.matrix import REGIMES
from tests.matrix.harness import Naive, Way, of_reading
from tests.matrix.naive import naive_capture

pytestmark = pytest.mark.full


@pytest.mark.parametrize("naive", Naive, ids=lambda naive: naive.name.lower())
@pytest.mark.parametrize("name", REGIMES)
def test_naive_capture_is_noticed(name: str, naive: Naive) -> None:
    """With the capture moved to a naive place the regime's checks fail, or hold where the regime says so."""
    try:
        with naive_capture(naive):
            wrong = REGIMES[name].run(Way.EVERYTHING, naive=True).wrong
    except Exception as error:  # noqa: BLE001 - whatever a naive capture breaks is a way to notice it
        wrong = [repr(error)]
    wrong = of_reading(wrong)
    assert bool(wrong) == (naive in REGIMES[name].catches), wrong
