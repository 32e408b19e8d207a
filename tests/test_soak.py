"""Nothing piles up over many steps, and nothing is counted wrong. `make soak` does the same over a million."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.soak import Soaked, complaints, soak
from benchmarks.soak_counts import Counts

STEPS = {"auto": 5000, 1: 4000}
"""The longest of the exporter's windows is over the last 1,000 steps, and the live page has the first 600 values of a quantity by
themselves: all of that is full when the second half of the steps begins."""

OBJECTS = 300
"""Objects that may be added: hooks of an armed round, times of counted rounds. A leak of one in two steps is more."""

RESIDENT = 16 * 2**20
"""Generous: memory that the allocator has not given back belongs to all tests before this one as well."""


@pytest.fixture(scope="module", params=["auto", pytest.param(1, marks=pytest.mark.full)])
def soaked(request: pytest.FixtureRequest) -> Soaked:
    """Run a loop with observed values, evaluations and scrapes, at defaults and with every step sampled."""
    return soak(STEPS[request.param], request.param, readings=20)


@pytest.mark.slow
def test_nothing_piles_up(soaked: Soaked) -> None:
    """Threads, descriptors, hooks and memory stay the same during the steps and are those of before after `close`."""
    assert complaints("exporter", soaked, RESIDENT) == []


def test_the_counters_are_exact(soaked: Soaked) -> None:
    """The last scrape has each step, backward, sample and token, and each duration but the first step's."""
    counts, steps = soaked.counts, soaked.steps
    assert counts == Counts(steps, steps, 4 * steps, 4 * steps, steps - 1, counts.captures, 0)
    assert 3 <= counts.captures <= steps  # the first ones, as far as the budget lends them, and later ones


def test_no_container_of_the_exporter_grows(soaked: Soaked) -> None:
    """The objects that can be reached from the exporter grow no more in the second half of the run, but for one jump."""
    counts = [one.objects for step, one in soaked.readings if step > soaked.steps / 2]
    grown = [after - before for before, after in itertools.pairwise(counts)]
    # What comes at a time and not at a step, such as records that wait for their thread, comes at any reading.
    assert sum(grown) - max(grown) <= OBJECTS, counts
