"""A client's connection, and where it stands."""

from __future__ import annotations

import enum
import socket
from dataclasses import dataclass, field

from torch_grad_exporter.outputs.http.message import complete_head
from torch_grad_exporter.outputs.http.tls import Tls


class Phase(enum.IntEnum):
    """Where a connection stands, in the order in which room is made for new ones."""

    FAREWELL = 0
    """The response is out; the client's end is awaited, as closing on unread data would destroy the response."""
    HANDSHAKE = 1
    """With TLS only, until both ends have the keys."""
    READING = 2
    SENDING = 3
    WORKING = 4
    """Other threads work on it, and the selector does not have it. They have until its deadline too."""


@dataclass(slots=True, eq=False)
class Connection:
    """A client's socket and how far its one request has come."""

    sock: socket.socket
    deadline: float
    phase: Phase = Phase.WORKING
    tls: Tls | None = None
    admitted: bool = True
    received: bytearray = field(default_factory=bytearray)
    outgoing: list[memoryview] = field(default_factory=list)
    body_wanted: bool = True

    @property
    def reluctance(self) -> Phase:
        """How late the connection is dropped to make room: a handshake counts as a request that is yet to come."""
        return Phase.READING if self.phase is Phase.HANDSHAKE else self.phase

    def receive(self, data: bytes) -> bytes | None:
        """Adds what came; the request's head once it is complete. Raises `RequestError`. Each byte is searched once."""
        scanned = len(self.received)
        self.received += data
        return complete_head(self.received, scanned)
