"""Workers, which compute for the event loop, and the scrape that all clients of a second share.

The workers are daemons: the end of a program waits for threads of `concurrent.futures`, so that a scrape that hangs would keep a
finished training.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from torch_grad_exporter.errors import BusyError
from torch_grad_exporter.lifecycle import THREAD_TIME, BackgroundThread
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.message import Content
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

# Seconds for which the bodies of a scrape are handed out, from its end.
MAX_AGE = 1.0

# Clients that wait for a scrape at a time, at most.
MAX_WAITING = 64

Result = TypeVar("Result")


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
                result, failure = None, None
                try:
                    result = function(*arguments)
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    failure = error
                except BaseException as error:  # noqa: BLE001 - would end the loop that it is raised in
                    failure = RuntimeError(f"{type(error).__name__}: {error}")
                THREAD_TIME.note()
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(failure)
                del result, failure
            del job, future, function, arguments  # a thread that waits keeps nothing alive


class Body(NamedTuple):
    """A body of `/metrics`, and whether it shows the end of the run."""

    content: bytes
    saw_end: bool


class _Taken(NamedTuple):
    families: list[Family]
    saw_end: bool


class SharedScrape:
    """The last scrape and its bodies, made when first asked for. Belongs to the thread of the event loop.

    One scrape runs at a time, and later clients wait for one that hangs. After one that raises the next request begins another.

    Args:
        content: Its `scrape` runs in a worker.
        renderer: Makes text of the metrics; in a worker, too.
        workers: Where both run.
        clock: Seconds from any origin.
    """

    def __init__(
        self,
        content: Content,
        renderer: Renderer,
        workers: Workers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._content, self._renderer, self._workers, self._clock = content, renderer, workers, clock
        self._running: asyncio.Task[_Taken] | None = None
        self._bodies: dict[tuple[Format, bool], asyncio.Task[bytes]] = {}
        self._finished = 0.0
        self._waiting = 0

    async def body(self, form: Format, *, compressed: bool) -> Body:
        """Return the body in this format. Raises what the scrape has raised, or `BusyError` where too many wait."""
        if self._waiting >= MAX_WAITING:
            raise BusyError("too many wait for a scrape that is still running")
        if self._running is None or (self._running.done() and not self._is_young(self._running)):
            self._running, self._bodies = asyncio.create_task(self._take()), {}
        scrape, key = self._running, (form, compressed)
        if key not in self._bodies:
            self._bodies[key] = asyncio.create_task(self._made(scrape, *key))
        self._waiting += 1
        try:
            # A client that is given up must not end what others wait for.
            content = await asyncio.shield(self._bodies[key])
            return Body(content, scrape.result().saw_end)
        finally:
            self._waiting -= 1

    def _is_young(self, scrape: asyncio.Task[_Taken]) -> bool:
        if scrape.cancelled() or scrape.exception() is not None:
            return False
        # What was scraped before the end of the run does not show it.
        return scrape.result().saw_end == self._content.ended and self._clock() - self._finished < MAX_AGE

    async def _take(self) -> _Taken:
        ended = self._content.ended  # before the values are taken
        families = await self._workers.run(lambda: list(self._content.scrape()))
        self._finished = self._clock()
        return _Taken(families, ended)

    async def _made(self, scrape: asyncio.Task[_Taken], form: Format, compressed: bool) -> bytes:
        return await self._workers.run(self._written, (await scrape).families, form, compressed)

    def _written(self, families: list[Family], form: Format, compressed: bool) -> bytes:
        text = self._renderer.render(families, form)
        return gzip.compress(text, compresslevel=1, mtime=0) if compressed else text
