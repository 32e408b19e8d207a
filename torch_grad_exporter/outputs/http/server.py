"""MetricsServer: the HTTP server of a training process, bounded in threads, connections, time and bytes.

Tornado's event loop talks to all clients in one thread (`clients`), a few workers compute the answers (`endpoints`), and all
scrapers of a second share one of them (`shared`). All threads are daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tornado.platform.asyncio import AsyncIOLoop

from torch_grad_exporter.errors import ErrorLog, warn
from torch_grad_exporter.lifecycle import BackgroundThread
from torch_grad_exporter.outputs.http.clients import Clients
from torch_grad_exporter.outputs.http.endpoints import Endpoints
from torch_grad_exporter.outputs.http.shared import Content, Workers
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.prometheus.text import Renderer

# One may scrape, one check a password and one read the files of the web configuration, each for as long as it takes,
# and none of these is done by two at a time. So one is always free for /healthz and everything else that is quick.
WORKERS = 4

# What the libraries log to; the training may use both for itself.
LOGGERS = ("asyncio", "tornado.general", "tornado.application")

MAX_CANDIDATES, MAX_PORT = 64, 65535
# Errors of a port that cannot be had.
TAKEN = frozenset({errno.EADDRINUSE, errno.EACCES})

# Connections that the kernel holds for us: many wait there for a moment, and one that does not fit is tried again after a second.
BACKLOG = 1024


class MetricsServer:
    """Serves `/metrics`, `/healthz` and `/` from the moment it is built until `close`.

    Args:
        addr: See `open_listeners`.
        ports: Tried in order.
        timeout: Seconds that a client has for sending its request, again for waiting, which then ends with a 503, and again for
            reading the answer.
        web_config: TLS, users and the rest; without it plain HTTP is served to every client.

    Raises:
        OSError: There is no free port, or no such address.
        RuntimeError: No more threads can be started.
    """

    def __init__(
        self,
        content: Content,
        renderer: Renderer,
        errors: ErrorLog,
        *,
        addr: str,
        ports: Iterable[int],
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        web_config: WebConfigFile | None = None,
    ) -> None:
        self._errors, self._closed = errors, False
        listeners = open_listeners(addr, ports)
        self.port: int = listeners[0].getsockname()[1]
        self.scheme = "https" if web_config is not None and web_config.current.tls is not None else "http"
        hosts = [ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]) for listener in listeners]
        self.open_to_all = (web_config is None or not web_config.authenticates) and not all(host.is_loopback for host in hosts)
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.set_exception_handler(self._loop_failed)
        # Closed in place of the loop: Tornado would keep that until another one is made, and with it all that it refers to.
        self._tornado = AsyncIOLoop(asyncio_loop=self._loop, make_current=False)
        self._workers = Workers(WORKERS)
        endpoints = Endpoints(content, renderer, errors, self._workers, web_config=web_config, clock=clock)
        self._clients = Clients(listeners, self._loop, endpoints, errors, timeout)
        self._thread = BackgroundThread("http-loop", self._run)
        try:
            self._thread.start()
            self._workers.start()
        except BaseException:  # no more threads can be started, or Ctrl-C
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
            self._loop.call_soon_threadsafe(self._end, timeout / 2)
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

    def _end(self, grace: float) -> None:
        async def end() -> None:
            try:
                await self._clients.end(grace)
                waiting = asyncio.all_tasks() - {self._ending}  # for a scrape that hangs
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            finally:
                self._loop.stop()

        self._ending = self._loop.create_task(end())

    def _loop_failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):  # a client that has left
            self._errors.count("request", error or RuntimeError(context["message"]))


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what the libraries log of this thread's clients out of the log of the training."""
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


def candidate_ports(port: int, local_rank: int, local_world_size: int) -> tuple[int, ...]:
    """Return the ports that a rank tries, in this order; no two ranks of one host share any. 0 means any free port."""
    if port == 0:
        return (0,)
    first = port + local_rank
    return tuple(range(first, min(first + MAX_CANDIDATES * local_world_size, MAX_PORT + 1), local_world_size))


def open_listeners(addr: str, ports: Iterable[int]) -> list[socket.socket]:
    """Return non-blocking sockets that listen on the first free port; a warning is logged if that is not the first.

    `addr`: "" and "::" for all interfaces, "0.0.0.0" for those of IPv4, else one address, or a host name with all of its addresses.
    Raises OSError if no port is free, and at once for an address that this host does not have.
    """
    tried: list[int] = []
    for port in ports:
        try:
            listeners = _listen(addr, port)
        except OSError as exc:
            if exc.errno not in TAKEN:
                raise
            tried.append(port)
            continue
        if tried:
            warn("port %d is taken, metrics are served on port %d instead", tried[0], listeners[0].getsockname()[1])
        return listeners
    raise OSError(errno.EADDRINUSE, f"no free port at address {addr!r}, tried {tried}")


def _listen(addr: str, port: int) -> list[socket.socket]:
    if addr in ("", "::"):
        try:
            # One socket for both families: of two, the second may find its port taken.
            return [_listener(socket.AF_INET6, ("::", port), dualstack_ipv6=True)]
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in TAKEN:
                raise
            addr = "0.0.0.0"  # noqa: S104 - this host has no IPv6
    known = dict.fromkeys(socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, _, _, _, (host, _, *scope) in known:
            same = listeners[0].getsockname()[1] if listeners else port
            try:
                listeners.append(opened.enter_context(_listener(family, (host, same, *scope))))
            except OSError as error:
                # Of several addresses this host may not have each: localhost may be ::1 also without IPv6.
                if error.errno in TAKEN or len(known) == 1:
                    raise
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, f"this host has none of the addresses of {addr!r}")
        opened.pop_all()
    return listeners


def _listener(family: int, address: tuple[Any, ...], *, dualstack_ipv6: bool = False) -> socket.socket:
    listener = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dualstack_ipv6)
    listener.setblocking(False)
    return listener
