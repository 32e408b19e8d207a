"""SharedScrape: one scrape for all clients of a second, in whatever format they want it."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Iterable

from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.workers import Workers
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

# Seconds for which the bodies of a scrape are handed out, from its end.
MAX_AGE = 1.0

# Clients that wait for a scrape at a time, at most.
MAX_WAITING = 64


class ScrapeBusyError(Exception):
    """The largest number of clients waits for a scrape already."""


class SharedScrape:
    """The last scrape and its bodies, made when first asked for. Belongs to the thread of the event loop.

    One scrape runs at a time, and one that hangs is waited for by those who come later. After one that raises the next request
    begins another.

    Args:
        scrape: Returns the values; runs in a worker.
        renderer: Makes text of them; in a worker, too.
        workers: Where both run.
        clock: Seconds from any origin.
    """

    def __init__(
        self,
        scrape: Callable[[], Iterable[Family]],
        renderer: Renderer,
        workers: Workers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scrape, self._renderer, self._workers, self._clock = scrape, renderer, workers, clock
        self._running: asyncio.Task[list[Family]] | None = None
        self._bodies: dict[tuple[Format, bool], asyncio.Task[bytes]] = {}
        self._finished = 0.0
        self._waiting = 0

    async def body(self, form: Format, *, compressed: bool) -> bytes:
        """Return the body in this format. Raises what the scrape has raised, or `ScrapeBusyError` where too many wait."""
        if self._waiting >= MAX_WAITING:
            raise ScrapeBusyError
        if self._running is None or (self._running.done() and not self._is_young(self._running)):
            self._running, self._bodies = asyncio.create_task(self._take()), {}
        self._waiting += 1
        try:
            # A client that is given up must not end what others wait for.
            return await asyncio.shield(self._made(self._running, form, compressed=compressed))
        finally:
            self._waiting -= 1

    def _is_young(self, scrape: asyncio.Task[list[Family]]) -> bool:
        failed = scrape.cancelled() or scrape.exception() is not None
        return not failed and self._clock() - self._finished < MAX_AGE

    async def _take(self) -> list[Family]:
        families = await self._workers.run(lambda: list(self._scrape()))
        self._finished = self._clock()
        return families

    def _made(self, scrape: asyncio.Task[list[Family]], form: Format, *, compressed: bool) -> asyncio.Task[bytes]:
        key = form, compressed
        if key not in self._bodies:
            made = self._compressed(self._made(scrape, form, compressed=False)) if compressed else self._rendered(scrape, form)
            self._bodies[key] = asyncio.create_task(made)
        return self._bodies[key]

    async def _rendered(self, scrape: asyncio.Task[list[Family]], form: Format) -> bytes:
        return await self._workers.run(self._renderer.render, await scrape, form)

    async def _compressed(self, text: asyncio.Task[bytes]) -> bytes:
        return await self._workers.run(lambda body: gzip.compress(body, compresslevel=1, mtime=0), await text)
