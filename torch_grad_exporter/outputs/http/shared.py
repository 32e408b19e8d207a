"""What a server shows, the workers that compute it for the event loop, and the scrape that clients of a second share.

The workers are daemons: the end of a program waits for threads of `concurrent.futures`, so that a scrape that hangs would keep a
finished training.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from torch_grad_exporter.errors import BusyError, contained
from torch_grad_exporter.lifecycle import THREAD_TIME, BackgroundThread
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.messages import Request, Response
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

# Seconds for which the bodies of a scrape are handed out, from its end; clients that wait for one at a time, at most.
MAX_AGE, MAX_WAITING = 1.0, 64

Result = TypeVar("Result")


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
