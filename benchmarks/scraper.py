"""A process that scrapes an address once a second, and the handle by which a benchmark tells it when."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from benchmarks import record

Moments = NDArray[np.float64]
"""Seconds of the system's monotonic clock, which is the same in all processes."""


class Scraper:
    """Another process that scrapes once a second, but only inside of `with scraper.on():`."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.scraper", url]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=record.ROOT)  # noqa: S603 - ourselves

    @contextmanager
    def on(self) -> Iterator[None]:
        """Scrapes at once and then each second."""
        self._say("on")
        try:
            yield
        finally:
            self._say("off")

    def close(self) -> Moments:
        """Ends the process; when each of its scrapes began and ended, shape (scrapes, 2)."""
        told, _ = self._process.communicate(timeout=60)
        return np.array(json.loads(told))

    def _say(self, word: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()


def scrape(url: str) -> None:
    """The scraping process: told on or off by its input, ends with it and then tells when it scraped."""
    moments: list[tuple[float, float]] = []
    running, due = False, 0.0
    while True:
        wait = max(0.0, due - time.monotonic()) if running else None
        if select.select([sys.stdin], [], [], wait)[0]:
            word = sys.stdin.readline()
            if not word:
                break
            running, due = word.strip() == "on", time.monotonic()
        elif running:
            due += 1.0
            start = time.monotonic()
            request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})  # noqa: S310 - our own server
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - as above
                answer.read()
            moments.append((start, time.monotonic()))
    print(json.dumps(moments))


if __name__ == "__main__":
    scrape(sys.argv[1])
