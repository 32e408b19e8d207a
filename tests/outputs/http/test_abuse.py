"""Clients that abuse a training process change nothing in it. `make soak` does the same for longer, and measures it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks import abuse_crowd, abuse_storm
from benchmarks.abuse_victim import Victim, kept, settled
from benchmarks.scraper import Scraper, outcome
from tests.support.tools import eventually

PACE = 0.005
"""Seconds between two steps of a victim, which leave the core to its server and to other tests."""


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A training process with a small model that is scraped now and then."""
    with Victim(pace=PACE) as made:
        yield made


# Wrong requests


@pytest.mark.process
def test_3000_mutated_requests_do_no_harm(victim: Victim) -> None:
    """Of 3,000 mutated requests each has an answer that HTTP has for it; no failure, log line, thread or descriptor is left."""
    storm = abuse_storm.mutated(victim, 3000, seed=5)
    assert abuse_storm.complaints(storm) == []
    assert storm.tally.requests == 3000
    assert {"200", "400", "404", "405", "none"} <= set(storm.tally.answers)
    assert storm.after.steps > storm.before.steps


@pytest.mark.process
def test_heads_of_a_megabyte_are_refused(victim: Victim) -> None:
    """Each of 20 clients that send a megabyte is refused, and the process does not grow."""
    storm = abuse_storm.large(victim, 20)
    assert abuse_storm.complaints(storm) == []
    assert "200" not in storm.tally.answers
    assert storm.after.resident - storm.before.resident < 8 * 2**20


# Clients that never end


@pytest.mark.full
def test_300_half_open_connections_are_closed(victim: Victim) -> None:
    """Silent, dripping and endless connections are all closed, and scrapes beside them are answered, without more threads."""
    siege = abuse_crowd.besiege(victim)
    # How long it takes is measured by `make soak`, on a machine without other work.
    assert [item for item in abuse_crowd.complaints(siege) if " after " not in item] == []
    assert siege.freed is not None
    assert (siege.connections, siege.outcomes) == (300, {"200"})
    assert siege.largest >= 100  # they were there


# Many scrapes


@pytest.mark.full
def test_50_scrapes_a_second_beside_training(victim: Victim) -> None:
    """All of 50 scrapes a second are answered with 200 while the training goes on, and nothing is left."""
    assert outcome(victim.url) == "200"
    before = victim.state()
    scraper = Scraper(victim.url, 50.0)
    began = time.monotonic()
    with scraper.on():
        assert eventually(lambda: time.monotonic() > began + 1 and victim.state().steps > before.steps + 20)
    took = time.monotonic() - began
    scrapes = scraper.end()
    after = settled(victim, before)  # the last answer may still be closing
    assert set(scrapes.outcomes) == {"200"}
    # No faster than they are answered, on a machine with other work.
    assert scrapes.outcomes["200"] >= 0.6 * took / max(0.02, np.diff(scrapes.moments).mean())
    assert kept(before, after) == []
    assert victim.log() == ""
