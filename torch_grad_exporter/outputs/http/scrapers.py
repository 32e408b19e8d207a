"""Scrapers: who scrapes, and whether each has seen the end of the run, for which the end waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

# How long the end waits, at most, for scrapers.
LONGEST_SECONDS = 60.0

# Scrapes of each that are remembered, since two jobs of one Prometheus scrape by turns, and addresses.
REMEMBERED, MOST = 5, 32


def is_scraper(headers: Mapping[str, str]) -> bool:
    """Return whether Prometheus sent the request, or a scraper with the same header, such as VictoriaMetrics'."""
    regular = "x-prometheus-scrape-timeout-seconds" in headers
    return regular or headers.get("user-agent", "").startswith("Prometheus/")


class Scrapers:
    """The scrapers by address. One that has come twice is expected again, after the longest gap between its last few scrapes.

    From any thread. `clock`: seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, deque[float]] = {}
        self._saw_end: set[str] = set()
        self._news = threading.Condition()

    def note(self, address: str, *, saw_end: bool) -> None:
        """Note a scrape, and whether it has shown the end of the run."""
        with self._news:
            times = self._times.pop(address, None) or deque(maxlen=REMEMBERED)
            times.append(self._clock())
            self._times[address] = times  # the one that came last is last
            if len(self._times) > MOST:
                del self._times[next(iter(self._times))]
            if saw_end:
                self._saw_end.add(address)
            self._news.notify_all()

    def seconds_to_wait(self) -> float:
        """Return how long those that have not seen the end may take to come, 0 if none is expected.

        One that is late by another gap has left, and one that comes after `LONGEST_SECONDS` is not waited for.
        """
        with self._news:
            now, left = self._clock(), 0.0
            for address, times in self._times.items():
                gap = max((later - earlier for earlier, later in zip(times, list(times)[1:], strict=False)), default=0.0)
                if address not in self._saw_end and times[-1] + gap - now < LONGEST_SECONDS:
                    left = max(left, times[-1] + 2 * gap - now)
            return min(left, LONGEST_SECONDS)

    def wait(self) -> None:
        """Wait until all have seen the end, or none is expected any more."""
        give_up_at = self._clock() + LONGEST_SECONDS
        with self._news:
            while (left := min(self.seconds_to_wait(), give_up_at - self._clock())) > 0:
                self._news.wait(left)
