"""What is asked and answered; workers, which compute for the event loop; the scrape that clients of a second share; and scrapers.

The workers are daemons: the end of a program waits for threads of `concurrent.futures`, so that a scrape that hangs would keep a
finished training.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from torch_grad_exporter.errors import BusyError, contained
from torch_grad_exporter.lifecycle import THREAD_TIME, BackgroundThread
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

# Seconds for which the bodies of a scrape are handed out, from its end; clients that wait for one at a time, at most.
MAX_AGE, MAX_WAITING = 1.0, 64

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Request:
    """A request without its body. `headers`: names in any case. `query`: the part of its target after the question mark."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: str = ""

    @classmethod
    def of(cls, method: str, target: str, headers: Mapping[str, str]) -> Request:
        """Return the request for a target, which is a path, or a whole address where a proxy sends it."""
        without_origin = re.sub(r"^https?://[^/?#]*", "", target, flags=re.IGNORECASE)
        path, _, query = without_origin.partition("#")[0].partition("?")
        return cls(method, path or "/", headers, query)


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer; its length is known before its first byte is sent."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def plain(status: HTTPStatus, text: str = "", headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return a one-line answer for people; without a text the status alone."""
    return Response(status, "text/plain; charset=utf-8", f"{text or status.phrase}\n".encode(), headers)


class Content(Protocol):
    """Everything that a server shows. Its methods but `scraped` are called in the server's worker threads, and may take long.

    `ended`: whether a scrape that begins now shows the end of the run.
    """

    ended: bool

    def scraped(self, by: str, *, saw_end: bool) -> None:
        """Note who is about to get a scrape: a scraper's address, empty for anybody else. In the thread of the loop."""

    def scrape(self) -> Iterable[Family]:
        """Return the metrics. Called by one thread at a time, and at most once a second."""

    def health(self) -> Mapping[str, object]:
        """Return the object of `/healthz`."""

    def targets(self) -> bytes:
        """Return the body of `/sd`, which Prometheus' http_sd reads."""

    def page(self, request: Request) -> Response | None:
        """Return the answer for any other path, None where there is nothing."""


class Workers:
    """Runs functions in this many threads. `run` is for the thread of the loop, everything else for any."""

    def __init__(self, number: int) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._threads = [BackgroundThread(f"http-worker-{i}", self._work) for i in range(number)]

    def start(self) -> None:
        """Start the threads. Raises `RuntimeError` if no more can be started."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread end after its present job; returns at once."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, for this many seconds each at most."""
        for thread in self._threads:
            thread.join(seconds)

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:  # noqa: ANN401 - of any function
        """Return the function's result, or raise its error. A caller that is cancelled does not stop a function that runs."""
        future: Future[Result] = Future()
        self._jobs.put((future, function, arguments))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, arguments = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(contained(function, *arguments))
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    future.set_exception(error)
                THREAD_TIME.note()
            del job, future, function, arguments  # a thread that waits keeps nothing alive


# A scrape, and whether it shows the end of the run.
_Taken = tuple[list[Family], bool]


class SharedScrape:
    """The last scrape and its bodies, made when first asked for. Belongs to the thread of the event loop; the workers compute.

    One scrape runs at a time, and later clients wait for one that hangs. After one that raises the next request begins another.
    """

    def __init__(self, content: Content, renderer: Renderer, workers: Workers, clock: Callable[[], float]) -> None:
        self._content, self._renderer, self._workers, self._clock = content, renderer, workers, clock
        self._running: asyncio.Task[_Taken] | None = None
        self._bodies: dict[tuple[Format, bool], asyncio.Task[bytes]] = {}
        self._finished = 0.0
        self._waiting = 0

    async def body(self, form: Format, *, compressed: bool) -> tuple[bytes, bool]:
        """Return the body in this format, and whether it shows the end of the run.

        Raises what the scrape has raised, or `BusyError` where too many wait.
        """
        if self._waiting >= MAX_WAITING:
            raise BusyError("too many wait for a scrape that is still running")
        if (running := self._running) is not None and running.done():
            failed = running.cancelled() or running.exception() is not None
            # What was scraped before the end of the run does not show it.
            if failed or running.result()[1] != self._content.ended or self._clock() - self._finished >= MAX_AGE:
                self._running = None
        if self._running is None:
            self._running, self._bodies = asyncio.create_task(self._take()), {}
        scrape, key = self._running, (form, compressed)
        if key not in self._bodies:
            self._bodies[key] = asyncio.create_task(self._made(scrape, *key))
        self._waiting += 1
        try:
            # A client that is given up must not end what others wait for.
            return await asyncio.shield(self._bodies[key]), scrape.result()[1]
        finally:
            self._waiting -= 1

    async def _take(self) -> _Taken:
        ended = self._content.ended  # before the values are taken
        families = await self._workers.run(lambda: list(self._content.scrape()))
        self._finished = self._clock()
        return families, ended

    async def _made(self, scrape: asyncio.Task[_Taken], form: Format, compressed: bool) -> bytes:
        families, _ = await scrape

        def written() -> bytes:
            text = self._renderer.render(families, form)
            return gzip.compress(text, compresslevel=1, mtime=0) if compressed else text

        return await self._workers.run(written)


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
