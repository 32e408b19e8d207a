"""One rendering for all scrapers; a client that waits for it delays no other client.

Guarantees: one scrape runs at a time, in the thread of the first request; requests that come while it runs are called
with its outcome when it is over, and wait without a thread; a body is handed out for `max_age` seconds at
most; a scrape that raises leaves nothing behind and the next one starts anew.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch_grad_exporter.errors import caught
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer


class ScrapeBusyError(Exception):
    """The largest number of clients waits for a scrape already."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A request for a body, and until when it waits; `take` gets the body, or what was raised instead."""

    form: Format
    compressed: bool
    take: Callable[[bytes | BaseException], None]
    until: float


class SharedScrape:
    """The bodies of the last scrape, by format and encoding, made when first asked for.

    `max_age` and `patience` in seconds; `max_waiting` clients wait at a time, each for `patience` at most: those beyond
    their time are dropped where a new one comes, and their connections answer them.
    """

    def __init__(
        self,
        scrape: Callable[[], Iterable[Family]],
        renderer: Renderer,
        *,
        max_age: float = 1.0,
        patience: float = 10.0,
        max_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scrape = scrape
        self._renderer = renderer
        self._max_age = max_age
        self._patience = patience
        self._max_waiting = max_waiting
        self._clock = clock
        self._lock = threading.Lock()  # held for moments only, never while something is computed
        self._waiting: deque[_Waiter] = deque()
        self._serving = False
        # Of the thread that serves, of which there is one at a time.
        self._families: list[Family] = []
        self._bodies: dict[tuple[Format, bool], bytes] = {}
        self._finished = 0.0

    def ask(self, form: Format, *, compressed: bool, take: Callable[[bytes | BaseException], None]) -> None:
        """Has `take` called with the body, or with what the scrape has raised: from here, or from a thread that scrapes already.

        Raises `ScrapeBusyError` instead, at once, where too many wait; and what is no `Exception`, after all have been called.
        """
        if not self._enlist(_Waiter(form, compressed, take, self._clock() + self._patience)):
            return
        try:
            while self._serve(form):
                pass
        except BaseException as error:
            for waiter in self._dismiss():
                waiter.take(error)
            raise

    def _enlist(self, waiter: _Waiter) -> bool:
        """Whether the caller has to serve the waiting requests."""
        with self._lock:
            while self._waiting and self._waiting[0].until <= self._clock():
                self._waiting.popleft()
            if len(self._waiting) >= self._max_waiting:
                raise ScrapeBusyError
            self._waiting.append(waiter)
            served, self._serving = self._serving, True
            return not served

    def _dismiss(self) -> deque[_Waiter]:
        """All waiting requests; the next request serves."""
        with self._lock:
            waiting, self._waiting, self._serving = self._waiting, deque(), False
        return waiting

    def _serve(self, form: Format) -> bool:
        """A scrape if the last one is too old, for all that wait at its end; whether there are others by now."""
        failure = caught(self._refresh, form)
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        while waiting:
            waiter = waiting.popleft()
            waiter.take(failure or self._outcome(waiter))
        with self._lock:
            self._serving = bool(self._waiting)
            return self._serving

    def _outcome(self, waiter: _Waiter) -> bytes | Exception:
        bodies: list[bytes] = []
        failure = caught(lambda: bodies.append(self._made(waiter.form, compressed=waiter.compressed)))
        return failure or bodies[0]

    def _refresh(self, form: Format) -> None:
        """A scrape, where the bodies of the last one are too old."""
        if self._bodies and self._clock() - self._finished < self._max_age:
            return
        self._bodies = {}
        self._families = list(self._scrape())
        self._made(form, compressed=False)
        # The age counts from the end, else a scrape of more than a second would be too old for the first request after it.
        self._finished = self._clock()

    def _made(self, form: Format, *, compressed: bool) -> bytes:
        key = (form, compressed)
        if key not in self._bodies:
            if compressed:
                self._bodies[key] = gzip.compress(self._made(form, compressed=False), compresslevel=1, mtime=0)
            else:
                self._bodies[key] = self._renderer.render(self._families, form)
        return self._bodies[key]
