"""The listening socket: which ports a rank tries, the first of them that is free, and what comes in there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator

from torch_grad_exporter.errors import say

MAX_CANDIDATES = 64
MAX_PORT = 65535
BACKLOG = 128
ACCEPTS_PER_TURN = 32
PAUSE_SECONDS = 0.5

_log = logging.getLogger("torch_grad_exporter")


def candidate_ports(port: int, local_rank: int, local_world_size: int) -> tuple[int, ...]:
    """The ports that a rank tries, in this order; no two ranks of one host share any. 0 means any free port."""
    if port == 0:
        return (0,)
    first = port + local_rank
    return tuple(range(first, min(first + MAX_CANDIDATES * local_world_size, MAX_PORT + 1), local_world_size))


def open_listener(addr: str, ports: Iterable[int]) -> socket.socket:
    """A non-blocking socket that listens on the first free port; a warning is logged if that is not the first.

    `addr`: "" and "0.0.0.0" for all IPv4 interfaces, "::" for all of IPv6 and IPv4, else one address or
    host name. Raises OSError if no port is free, and at once for an address that this host does not have.
    """
    tried: list[int] = []
    for port in ports:
        try:
            listener = _listen(addr, port)
        except OSError as exc:
            if exc.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
            tried.append(port)
            continue
        listener.setblocking(False)
        if tried:
            message = "port %d is taken, metrics are served on port %d instead"
            say(_log, logging.WARNING, message, tried[0], listener.getsockname()[1])
        return listener
    raise OSError(errno.EADDRINUSE, f"no free port at address {addr!r}, tried {tried}")


def _listen(addr: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(addr or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # noqa: S104 documented default
    family, _, _, _, address = found[0]
    dual_stack = addr == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this host can connect."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class Acceptor:
    """Takes connections from a listening socket that a selector watches; `on_error` gets what goes wrong. `clock`: seconds."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._on_error = on_error
        self._clock = clock
        self.resumes_at: float | None = None
        """When it goes on, if it pauses."""
        self._watch()

    def accepted(self) -> Iterator[socket.socket]:
        """Those that have come, some at a time and never blocking; pauses where there are no more file descriptors, say."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # The socket stays readable, so without a pause this would spin.
                self._on_error(error)
                self._unwatch()
                self.resumes_at = self._clock() + PAUSE_SECONDS
                return
            try:
                sock.setblocking(False)
                # A small body after its head would else wait for the client's delayed acknowledgement.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # some systems report here that the client is gone already
                sock.close()
                continue
            yield sock

    def resume(self, now: float) -> None:
        """Goes on after a pause that is over."""
        if self.resumes_at is not None and self.resumes_at <= now:
            self.resumes_at = None
            self._watch()

    def close(self) -> None:
        """Frees the port. Idempotent."""
        self._unwatch()
        self.resumes_at = None
        self.abandon()

    def abandon(self) -> None:
        """Closes the socket and leaves the selector's entry alone. Idempotent."""
        self._listener.close()

    def _watch(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self)

    def _unwatch(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not registered, or closed
            self._selector.unregister(self._listener)
