"""The HTTP server of a training process: bounded in threads, connections, time and bytes.

One thread talks to all clients (`loop`), a few workers compute the answers (`endpoints`), and all
scrapers of a second share one of them (`shared`). Whatever hangs, one worker is free. All threads are daemons.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundThread
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.admission import Admission
from torch_grad_exporter.outputs.http.connection import Connection
from torch_grad_exporter.outputs.http.endpoints import Endpoints
from torch_grad_exporter.outputs.http.listener import is_loopback, open_listener
from torch_grad_exporter.outputs.http.loop import ConnectionLoop
from torch_grad_exporter.outputs.http.message import Request, Response
from torch_grad_exporter.outputs.http.shared import SharedScrape
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.prometheus.text import Renderer

# One may scrape, one check a password and one read the files of the web configuration, each for as long as it takes,
# and none of these is done by two at a time. So one is always free for /healthz and everything else that is quick.
_WORKERS = 4
_MAX_WAITING_REQUESTS = 64
_GRACE_SECONDS = 1.0


class MetricsServer:
    """Serves `/metrics`, `/healthz` and `/` from the moment it is built until `close`.

    `scrape` is called in a worker thread, by one at a time and at most once a second. `ports` are tried in
    order, see `open_listener`, whose OSError this raises. `on_error` gets each failure with the source
    `"request"` or `"web_config"`, from any thread, and must not raise. `timeout`: seconds that a client has for
    sending its request, again for waiting, which then ends with a 503, and again for reading the answer.
    `web_config`: TLS, users and the rest; without it plain HTTP is served to every client.
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
        self._on_error = on_error
        self._guard = Guard(functools.partial(on_error, "request"))
        self._web_config = web_config
        self._endpoints = Endpoints(
            shared=SharedScrape(scrape, renderer, patience=timeout, clock=clock),
            health=health,
            targets=targets,
            page=page,
            on_error=on_error,
            refusal=Admission(web_config, clock).refusal if web_config is not None else lambda _request: None,
        )
        listener = open_listener(addr, ports)
        self.port: int = listener.getsockname()[1]
        self.scheme = "https" if web_config is not None and web_config.current.tls is not None else "http"
        self.open_to_all = (web_config is None or not web_config.authenticates) and not is_loopback(listener)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loop = ConnectionLoop(
            listener, self._dispatch, on_error=on_error, timeout=timeout, clock=clock, web_config=web_config
        )
        self._closed = False
        self._threads = [
            BackgroundThread("http-loop", self._loop.run),
            *(BackgroundThread(f"http-worker-{number}", self._work) for number in range(_WORKERS)),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no more threads to be had, or Ctrl-C
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
            thread.join(give_up_at - time.monotonic())
        self._loop.abandon()

    def after_fork_in_child(self) -> None:
        """Closes the sockets that a forked child inherits, else the port stays taken when the parent is gone.

        Touches no lock and no thread: the child has none of the threads, and a lock may be held permanently.
        """
        self._closed = True
        self._loop.abandon()

    def _dispatch(self, connection: Connection, request: Request | None) -> bool:
        if self._jobs.qsize() >= _MAX_WAITING_REQUESTS:
            return False
        do = (
            functools.partial(self._reload, connection) if request is None else functools.partial(self._answer, connection, request)
        )
        self._jobs.put(do)
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._guard(job)
            del job  # a worker that waits holds no client and no answer

    def _answer(self, connection: Connection, request: Request) -> None:
        try:
            self._endpoints.answer(request, functools.partial(self._loop.respond, connection))
        except BaseException:
            self._loop.respond(connection, None)  # also where this thread ends: the client must not wait for it
            raise

    def _reload(self, connection: Connection) -> None:
        try:
            if self._web_config is not None:
                self._web_config.reload(self._on_error)
        finally:
            self._loop.begin(connection)
