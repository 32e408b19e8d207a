"""A process that scrapes an address at a rate, and the handle by which a benchmark starts and stops it."""

from __future__ import annotations

import http.client
import json
import os
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

# Not from `record`: that would have the client load torch.
_ROOT = Path(__file__).resolve().parent.parent

Moments = NDArray[np.float64]
"""Seconds of the system's monotonic clock, which is the same in all processes."""


@dataclass(frozen=True, slots=True, eq=False)
class Scrapes:
    """When each scrape began and ended, shape (scrapes, 2), and how many ended how: by status, or the error's name."""

    moments: Moments
    outcomes: dict[str, int]


class Scraper:
    """Another process that scrapes, but only inside of `with scraper.on():`. `rate`: scrapes a second.

    It scrapes one after the other; what it is late it makes up for, so that the rate is kept in the mean.
    """

    def __init__(self, url: str, rate: float = 1.0) -> None:
        command = [sys.executable, "-m", "benchmarks.scraper", url, str(rate)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=_ROOT)  # noqa: S603 - ourselves
        if self._process.stdout is not None:
            self._process.stdout.readline()  # it is there, and misses nothing

    @contextmanager
    def on(self) -> Iterator[None]:
        """Scrapes at once and then at its rate."""
        self._say("on")
        try:
            yield
        finally:
            self._say("off")

    def seconds(self) -> float:
        """What its process has taken of processors so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def end(self) -> Scrapes:
        """Ends the process and tells of all its scrapes."""
        printed, _ = self._process.communicate(timeout=60)
        found = json.loads(printed)
        return Scrapes(np.array(found["moments"]).reshape(-1, 2), found["outcomes"])

    def close(self) -> Moments:
        """Ends the process; when each of its scrapes began and ended. Raises RuntimeError if one had no answer of status 200."""
        scrapes = self.end()
        if set(scrapes.outcomes) - {"200"}:
            raise RuntimeError(f"scrapes failed: {scrapes.outcomes}")
        return scrapes.moments

    def _say(self, word: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()


def scrape(url: str, rate: float) -> None:
    """Run the scraping process: its input starts and stops it; at the end of the input it prints when it scraped."""
    moments: list[tuple[float, float]] = []
    outcomes: Counter[str] = Counter()
    running, due = False, 0.0
    print("ready", flush=True)
    while True:
        wait = max(0.0, due - time.monotonic()) if running else None
        if select.select([sys.stdin], [], [], wait)[0]:
            # Not by lines: what else has come would wait where `select` does not see it.
            words = os.read(sys.stdin.fileno(), 4096).split()
            if not words:
                break
            running, due = words[-1] == b"on", time.monotonic()
        elif running:
            due += 1.0 / rate
            start = time.monotonic()
            outcomes[outcome(url)] += 1
            moments.append((start, time.monotonic()))
    print(json.dumps({"moments": moments, "outcomes": outcomes}))


def outcome(url: str) -> str:
    """What becomes of one scrape that is read to its end: the status, or the name of the error."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - as above
            answer.read()
            return str(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return str(error.code)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__


if __name__ == "__main__":
    scrape(sys.argv[1], float(sys.argv[2]))
