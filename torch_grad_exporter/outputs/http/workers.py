"""Workers: a few daemon threads that compute for an event loop.

Those of `concurrent.futures` are waited for at the end of the program, so that a scrape that hangs would keep a finished training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from torch_grad_exporter.lifecycle import THREAD_TIME, BackgroundThread

Result = TypeVar("Result")


class Workers:
    """Runs functions in threads of its own. `run` is for the thread of the loop, everything else for any.

    Args:
        number: Of threads.
        loop: The loop that waits for results.
    """

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._threads = [BackgroundThread(f"http-worker-{i}", self._work) for i in range(number)]

    def start(self) -> None:
        """Start the threads. Raises `RuntimeError` where there are no more to be had."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread end after what it is at; returns at once."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, each for so long at most."""
        for thread in self._threads:
            thread.join(seconds)

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:  # noqa: ANN401 - of any function
        """Return what the function returns, or raise what it raises. A caller that is cancelled does not stop the function."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self._jobs.put((future, function, arguments))
        return await future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, arguments = job
            result, failure = None, None
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                failure = error
            except BaseException as error:  # noqa: BLE001 - would end the loop that it is raised in
                failure = RuntimeError(f"{type(error).__name__}: {error}")
            THREAD_TIME.note()
            try:
                self._loop.call_soon_threadsafe(_settle, future, result, failure)
            except RuntimeError:  # the loop is closed
                return
            del job, future, function, arguments, result, failure  # a thread that waits keeps nothing alive


def _settle(future: asyncio.Future[Any], result: object, failure: Exception | None) -> None:
    if future.done():  # cancelled, since its time was up
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)
