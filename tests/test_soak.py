"""Nothing piles up over many steps. `make soak` does the same over 100,000, with a tighter bar on memory."""

from __future__ import annotations

import pytest

from benchmarks.soak import Soaked, complaints, soak

STEPS = {"auto": 2000, 1: 1600}
"""The longest of the exporter's windows is over the last 1,000 steps; it is full when the last quarter of the steps begins."""

OBJECTS = 300
"""By which objects behind the exporter may differ: hooks of an armed round, moments of a stretch. A leak of one a step is more."""

RESIDENT = 16 * 2**20
"""Generous: memory that the allocator has not given back belongs to all tests before this one as well."""


@pytest.fixture(scope="module", params=STEPS, ids=str)
def soaked(request: pytest.FixtureRequest) -> Soaked:
    """A loop with observed values, evaluations and scrapes, at defaults and with every step sampled."""
    return soak(STEPS[request.param], request.param, readings=20)


def test_nothing_is_left_of_threads_descriptors_hooks_and_memory(soaked: Soaked) -> None:
    """Their numbers stay the same during the steps and are those of before after `close()`."""
    assert soaked.samples >= 10
    assert complaints("exporter", soaked, RESIDENT) == []


def test_no_container_of_the_exporter_grows(soaked: Soaked) -> None:
    """As many objects can be reached from the exporter in the last quarter of the run as in the quarter before."""
    counts = [one.objects for step, one in soaked.readings if step > soaked.steps / 2]
    half = len(counts) // 2
    assert max(counts[half:]) - max(counts[:half]) <= OBJECTS, counts
