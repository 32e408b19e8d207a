"""Which servers scrape a process regularly, and how long its end waits for them; by a clock of the test."""

from __future__ import annotations

import pytest

from torch_grad_exporter.outputs.http.scrapers import Scrapers, is_scraper


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("times", "now", "seconds"),
    [
        ([], 5, 0),
        ([0], 5, 0),
        ([0, 15], 20, 25),
        ([0, 15, 30, 45], 59, 16),
        ([0, 15, 31, 45, 60], 60, 32),  # at most one scrape may be late by the longest gap
        ([0, 1, 15, 16], 17, 27),  # two jobs of one server
        ([0, 60], 61, 60),
        ([0, 15], 46, 0),  # it has left
        ([0, 300], 310, 0),  # it comes too late
        ([0, 300, *range(315, 400, 15)], 392, 28),  # what was long ago is forgotten
    ],
)
def test_seconds_to_wait_for_a_scraper(times: list[float], now: float, seconds: float) -> None:
    """A scraper that came twice is waited for until its next scrape is late by another interval, 60 seconds at most."""
    clock = Clock()
    scrapers = Scrapers(clock)
    for clock.now in times:
        scrapers.note("10.0.0.1", saw_end=False)
    clock.now = now
    assert scrapers.seconds_to_wait() == seconds


def test_each_scraper_is_to_see_the_end() -> None:
    """Of two servers, the end waits for each that has not seen it."""
    clock = Clock()
    scrapers = Scrapers(clock)
    for clock.now, address in ((0, "a"), (5, "b"), (15, "a"), (20, "b")):
        scrapers.note(address, saw_end=False)
    clock.now = 30
    scrapers.note("a", saw_end=True)
    assert scrapers.seconds_to_wait() == 20
    scrapers.note("b", saw_end=True)
    assert scrapers.seconds_to_wait() == 0
    scrapers.wait()


@pytest.mark.parametrize(
    ("headers", "scrapes"),
    [
        ({"user-agent": "Prometheus/2.53.3"}, True),
        ({"user-agent": "vm_promscrape", "x-prometheus-scrape-timeout-seconds": "10.000"}, True),
        ({"user-agent": "Mozilla/5.0"}, False),
        ({}, False),
    ],
)
def test_who_scrapes(headers: dict[str, str], scrapes: bool) -> None:
    """Prometheus and vmagent are scrapers, a browser is not."""
    assert is_scraper(headers) == scrapes
