"""MetricsServer: the HTTP server of a training process, bounded in threads, connections, time and bytes.

Tornado's event loop talks to all clients in one thread (`clients`), a few workers compute the answers (`endpoints`), and all
scrapers of a second share one of them (`shared`). All threads are daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from tornado.platform.asyncio import AsyncIOLoop

from torch_grad_exporter.lifecycle import THREAD_TIME, BackgroundThread
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.admission import Admission
from torch_grad_exporter.outputs.http.clients import Client, Clients
from torch_grad_exporter.outputs.http.endpoints import Endpoints
from torch_grad_exporter.outputs.http.listener import is_loopback, open_listener
from torch_grad_exporter.outputs.http.message import Request, Response, plain
from torch_grad_exporter.outputs.http.shared import SharedScrape
from torch_grad_exporter.outputs.http.web_config import WebConfigFile, WebSettings
from torch_grad_exporter.outputs.http.workers import Workers
from torch_grad_exporter.outputs.prometheus.text import Renderer

# One may scrape, one check a password and one read the files of the web configuration, each for as long as it takes,
# and none of these is done by two at a time. So one is always free for /healthz and everything else that is quick.
WORKERS = 4

# What the libraries log to; the training may use both for itself.
LOGGERS = ("asyncio", "tornado.general", "tornado.application")


class MetricsServer:
    """Serves `/metrics`, `/healthz` and `/` from the moment it is built until `close`.

    Args:
        scrape: Called in a worker, by one at a time and at most once a second.
        renderer: Makes text of what it returns.
        addr: See `open_listener`.
        ports: Tried in order.
        on_error: Gets each failure with the source `"request"` or `"web_config"`, from any thread, and must not raise.
        health: For `/healthz`.
        targets: For `/sd`.
        page: Answers for other paths.
        timeout: Seconds that a client has for sending its request, again for waiting, which then ends with a 503, and again for
            reading the answer.
        clock: Seconds from any origin.
        web_config: TLS, users and the rest; without it plain HTTP is served to every client.

    Raises:
        OSError: There is no free port, or no such address.
        RuntimeError: There are no more threads to be had.
    """

    def __init__(
        self,
        scrape: Callable[[], Iterable[Family]],
        renderer: Renderer,
        *,
        addr: str,
        ports: Iterable[int],
        on_error: Callable[[str, BaseException], None],
        health: Callable[[], Mapping[str, object]],
        targets: Callable[[], bytes] = lambda: b"[]",
        page: Callable[[Request], Response | None] = lambda _request: None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        web_config: WebConfigFile | None = None,
    ) -> None:
        self._on_error, self._web_config, self._clock, self._closed = on_error, web_config, clock, False
        failed = functools.partial(on_error, "request")
        listener = open_listener(addr, ports)
        self.port: int = listener.getsockname()[1]
        self.scheme = "https" if web_config is not None and web_config.current.tls is not None else "http"
        self.open_to_all = (web_config is None or not web_config.authenticates) and not is_loopback(listener)
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.set_exception_handler(self._loop_failed)
        # Closed in place of the loop: Tornado would keep that until another one is made, and with it all that it refers to.
        self._tornado = AsyncIOLoop(asyncio_loop=self._loop, make_current=False)
        self._workers = Workers(WORKERS, self._loop)
        self._clients = Clients(
            listener, self._loop, answer=self._answer, settings=self._settings, on_error=failed, timeout=timeout
        )
        self._endpoints = Endpoints(
            SharedScrape(scrape, renderer, self._workers, clock),
            self._workers,
            refusal=None if web_config is None else Admission(web_config, clock).refusal,
            health=health, targets=targets, page=page, on_error=failed,
        )  # fmt: skip
        self._thread = BackgroundThread("http-loop", self._run)
        try:
            self._thread.start()
            self._workers.start()
        except BaseException:  # no more threads to be had, or Ctrl-C
            self.close()
            raise

    def close(self, timeout: float = 5.0) -> None:
        """Free the port, let answers in progress out for half of the time, and end the threads.

        Idempotent and from any thread; waits for at most about `timeout` seconds, also where a scrape hangs.
        """
        if self._closed:
            return
        self._closed = True
        give_up_at = time.monotonic() + timeout
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._begin_end, timeout / 2)
        self._thread.join(timeout)
        self._workers.stop()
        self._workers.join(give_up_at - time.monotonic())
        self._clients.abandon()
        if not (self._thread.running or self._loop.is_closed()):  # it has never started
            self._tornado.close()

    def after_fork_in_child(self) -> None:
        """Close the sockets that a forked child inherits, else the port stays taken when the parent is gone.

        Touches no lock and no thread: the child has none of the threads, and a lock may be held permanently. The loop itself would
        take what it waits for out of the parent's list as well.
        """
        self._closed = True
        self._clients.abandon()
        self._selector.close()
        for name in ("_ssock", "_csock"):  # by which threads wake the loop; asyncio has no public name for them
            if (sock := getattr(self._loop, name, None)) is not None:
                sock.close()

    # In the thread of the loop

    def _run(self) -> None:
        with _unlogged():
            self._loop.call_soon(self._clients.watch)
            try:
                self._loop.run_forever()
            finally:
                self._clients.abandon()
                self._tornado.close()

    def _begin_end(self, grace: float) -> None:
        self._ending = self._loop.create_task(self._end(grace))
        self._ending.add_done_callback(lambda _: self._loop.stop())

    async def _end(self, grace: float) -> None:
        await self._clients.end(grace)
        waiting = asyncio.all_tasks() - {self._ending}  # for a scrape that hangs
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _loop_failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):  # a client that has left
            self._on_error("request", error or RuntimeError(context["message"]))

    async def _settings(self) -> WebSettings:
        config = self._web_config
        if config is None:
            return WebSettings()
        if config.due(self._clock()):  # this client is the first to get what is in the files now
            await self._workers.run(config.reload, self._on_error)
        return config.current

    async def _answer(self, request: Request, client: Client) -> Response:
        settings = WebSettings() if self._web_config is None else self._web_config.current
        if settings.tls is None or settings.tls.admits(client.sock):
            response = await self._endpoints.answer(request)
        else:
            response = plain(HTTPStatus.FORBIDDEN, "no name in the client's certificate is allowed here")
        THREAD_TIME.note()
        return replace(response, headers=(*response.headers, *settings.headers))


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what the libraries have to say of this thread's clients out of the log of the training."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)
