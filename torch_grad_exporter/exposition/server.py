"""The HTTP server of a training process: bounded in threads, connections, time and bytes.

One thread talks to all clients (`loop`), a few workers compute the answers (`endpoints`), and all
scrapers of a second share one of them (`shared`). All threads are daemons.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue

from torch_grad_exporter.exposition.endpoints import Endpoints
from torch_grad_exporter.exposition.listener import open_listener
from torch_grad_exporter.exposition.loop import Connection, ConnectionLoop
from torch_grad_exporter.exposition.message import Request
from torch_grad_exporter.exposition.shared import SharedScrape
from torch_grad_exporter.exposition.text import Renderer
from torch_grad_exporter.families import Family

# Workers wait for nobody but each other: one renders, another answers /healthz while a scrape hangs.
_WORKERS = 4
_MAX_WAITING_REQUESTS = 64
_GRACE_SECONDS = 1.0


class MetricsServer:
    """Serves `/metrics`, `/healthz` and `/` from the moment it is built until `close`.

    `scrape` is called in a worker thread, by one at a time and at most once a second. `ports` are tried in
    order, see `open_listener`, whose OSError this raises. `on_error` gets each failure with the source
    `"request"`, from any thread, and must not raise. `timeout`: seconds that a client has for sending its
    request, and again for reading the answer.
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
        version: str,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shared = SharedScrape(scrape, renderer, patience=timeout, clock=clock)
        self._endpoints = Endpoints(shared, health=health, version=version, on_error=on_error)
        listener = open_listener(addr, ports)
        self.port: int = listener.getsockname()[1]
        self._jobs: SimpleQueue[tuple[Connection, Request] | None] = SimpleQueue()
        self._loop = ConnectionLoop(listener, self._dispatch, on_error=on_error, timeout=timeout, clock=clock)
        self._closed = False
        self._threads = [
            threading.Thread(target=target, name=f"torch-grad-exporter-http-{name}", daemon=True)
            for name, target in (("loop", self._loop.run), *((f"worker-{i}", self._work) for i in range(_WORKERS)))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # no more threads to be had
            self.close()
            raise

    def close(self, timeout: float = 5.0) -> None:
        """Frees the port, lets answers in progress out for up to a second, and ends the threads.

        Idempotent and from any thread; waits for at most about `timeout` seconds, also where a scrape hangs.
        """
        if self._closed:
            return
        self._closed = True
        give_up_at = time.monotonic() + timeout
        self._loop.stop(min(_GRACE_SECONDS, timeout))
        for _ in range(_WORKERS):
            self._jobs.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, give_up_at - time.monotonic()))
        self._loop.abandon()

    def after_fork_in_child(self) -> None:
        """Closes the sockets that a forked child inherits, else the port stays taken when the parent is gone.

        Touches no lock and no thread: the child has none of the threads, and a lock may be held for ever.
        """
        self._closed = True
        self._loop.abandon()

    def _dispatch(self, connection: Connection, request: Request) -> bool:
        if self._jobs.qsize() >= _MAX_WAITING_REQUESTS:
            return False
        self._jobs.put((connection, request))
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            connection, request = job
            response = None
            try:
                response = self._endpoints.answer(request)
            finally:  # also where the scrape ends this thread: the client must not wait for it
                self._loop.respond(connection, response)
