"""The one thread that talks to clients: it accepts, reads request heads and writes responses, never blocking.

Because no other thread waits for a client, a client that is silent, sends a byte now and then or does not
read its answer costs a table entry and holds nobody up. Guarantees: at most `max_connections` at a time,
beyond that the longest idle one is dropped; each phase of a connection ends after `timeout` seconds; what
one connection raises costs that connection alone.
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from torch_grad_exporter.exposition.message import Request, RequestError, Response, complete_head, parse, plain

_RECEIVE_BYTES = 16384
_ACCEPTS_PER_TURN = 32
_PAUSE_SECONDS = 0.5
_FAREWELL_SECONDS = 1.0


class Phase(enum.IntEnum):
    """Where a connection stands, in the order in which room is made for new ones."""

    FAREWELL = 0
    """The response is out; the client's end is awaited, as closing on unread data would destroy the response."""
    READING = 1
    SENDING = 2
    WORKING = 3


@dataclass(slots=True, eq=False)
class Connection:
    """A client's socket and how far its one request has come."""

    sock: socket.socket
    deadline: float
    phase: Phase = Phase.READING
    received: bytearray = field(default_factory=bytearray)
    outgoing: list[memoryview] = field(default_factory=list)
    body_wanted: bool = True


class ConnectionLoop:
    """Owns the listening socket and all connections.

    `dispatch` takes a request and has `respond` called with its connection, once, from any thread; it
    returns False where there is no room, and the client gets a 503. `timeout` and `clock` in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        dispatch: Callable[[Connection, Request], bool],
        *,
        on_error: Callable[[str, BaseException], None],
        timeout: float = 10.0,
        max_connections: int = 128,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._dispatch = dispatch
        self._on_error = on_error
        self._timeout = timeout
        self._max_connections = max_connections
        self._clock = clock
        self._connections: dict[Connection, None] = {}  # a set in the order of arrival
        self._finished: deque[tuple[Connection, Response | None]] = deque()
        self._accept_again_at: float | None = None
        self._stop_at: float | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves until `stop`; then nothing is open any more. The body of the thread."""
        try:
            while not self._done():
                self._turn()
        except Exception as exc:  # noqa: BLE001 the boundary of the thread: it ends, and that is counted
            if self._stop_at is None:
                self._on_error("request", exc)
        finally:
            self.abandon()

    def respond(self, connection: Connection, response: Response | None) -> None:
        """Hands over the response, `None` for none; from any thread."""
        self._finished.append((connection, response))
        self._wake()

    def stop(self, grace: float) -> None:
        """Makes `run` free the port at once and return when the answers in progress are out, at most after `grace` seconds."""
        self._stop_at = self._clock() + grace
        self._wake()

    def abandon(self) -> None:
        """Closes every socket of this process. Idempotent, takes no lock and leaves the selector's entries alone.

        In a forked child the entries are the parent's: taking one out there would deafen the parent.
        """
        for connection in list(self._connections):
            connection.sock.close()
        self._connections.clear()
        self._listener.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is there to wake
            self._wake_sender.send(b"\0")

    def _done(self) -> bool:
        if self._stop_at is None:
            return False
        self._stop_accepting()
        self._accept_again_at = None
        self._listener.close()
        for connection in [c for c in self._connections if c.phase < Phase.SENDING]:
            self._drop(connection)
        return not self._connections or self._clock() >= self._stop_at

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(_RECEIVE_BYTES)
            else:
                self._advance(key.data)
        self._send_finished()
        self._end_overdue(self._clock())

    def _send_finished(self) -> None:
        while self._finished:
            connection, response = self._finished.popleft()
            if connection not in self._connections:
                continue
            if response is None:
                self._drop(connection)
            else:
                self._send(connection, response)

    def _end_overdue(self, now: float) -> None:
        for connection in [c for c in self._connections if c.phase is not Phase.WORKING and c.deadline <= now]:
            self._drop(connection)
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _patience(self) -> float | None:
        """Seconds until something is due even if no client moves."""
        due = [c.deadline for c in self._connections if c.phase is not Phase.WORKING]
        due += [moment for moment in (self._accept_again_at, self._stop_at) if moment is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                # Out of file descriptors, mostly. The socket stays readable, so without a pause this would spin.
                self._on_error("request", exc)
                self._stop_accepting()
                self._accept_again_at = self._clock() + _PAUSE_SECONDS
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        while len(self._connections) >= self._max_connections:
            self._drop(min(self._connections, key=lambda connection: connection.phase))
        connection = Connection(sock, self._clock() + self._timeout)
        try:
            sock.setblocking(False)
            # A small body after its head would else wait for the client's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ, connection)
        except OSError:  # some systems report here that the client is gone already
            sock.close()
            return
        self._connections[connection] = None

    def _stop_accepting(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not registered, or closed
            self._selector.unregister(self._listener)

    def _drop(self, connection: Connection) -> None:
        if connection.phase is not Phase.WORKING:
            self._selector.unregister(connection.sock)
        connection.sock.close()
        del self._connections[connection]

    def _advance(self, connection: Connection) -> None:
        if connection not in self._connections:  # dropped earlier in this turn, to make room
            return
        try:
            if connection.phase is Phase.READING:
                self._read(connection)
            elif connection.phase is Phase.SENDING:
                self._write(connection)
            elif not connection.sock.recv(_RECEIVE_BYTES):
                self._drop(connection)
        except BlockingIOError:
            return
        except OSError:  # the client is gone
            self._drop(connection)

    def _read(self, connection: Connection) -> None:
        data = connection.sock.recv(_RECEIVE_BYTES)
        if not data:
            self._drop(connection)
            return
        connection.received += data
        try:
            head = complete_head(connection.received)
            if head is None:
                return
            request = parse(head)
        except RequestError as exc:
            self._send(connection, plain(exc.status))
            return
        connection.body_wanted = request.method != "HEAD"
        self._selector.unregister(connection.sock)
        connection.phase = Phase.WORKING
        if not self._dispatch(connection, request):
            self._send(connection, plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once", (("Retry-After", "1"),)))

    def _send(self, connection: Connection, response: Response) -> None:
        connection.outgoing = [memoryview(response.head())]
        if connection.body_wanted:
            connection.outgoing.append(memoryview(response.body))
        self._enter(connection, Phase.SENDING, selectors.EVENT_WRITE, self._timeout)

    def _write(self, connection: Connection) -> None:
        while connection.outgoing:
            sent = connection.sock.send(connection.outgoing[0])
            connection.outgoing[0] = connection.outgoing[0][sent:]
            if not connection.outgoing[0]:
                del connection.outgoing[0]
        connection.sock.shutdown(socket.SHUT_WR)
        self._enter(connection, Phase.FAREWELL, selectors.EVENT_READ, _FAREWELL_SECONDS)

    def _enter(self, connection: Connection, phase: Phase, event: int, seconds: float) -> None:
        if connection.phase is Phase.WORKING:
            self._selector.register(connection.sock, event, connection)
        else:
            self._selector.modify(connection.sock, event, connection)
        connection.phase = phase
        connection.deadline = self._clock() + seconds
