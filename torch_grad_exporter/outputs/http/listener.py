"""The listening socket: which ports a rank tries, and the first of them that is free."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Iterable

from torch_grad_exporter.errors import say

MAX_CANDIDATES = 64
MAX_PORT = 65535
BACKLOG = 128

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
