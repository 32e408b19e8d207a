"""The one thread that talks to clients: it accepts, reads request heads and writes responses, never blocking.

Because no other thread waits for a client, a client that is silent, sends a byte now and then or does not
read its answer costs a table entry and delays no other client, with TLS as without. Guarantees: at most
`max_connections` at a time, beyond that the longest idle one is dropped; each phase of a connection ends after
`timeout` seconds, the TLS handshake and the request together, and also the one in which others compute the answer;
what one connection raises costs that connection alone; no TLS byte is sent by closing.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.outputs.http import tls
from torch_grad_exporter.outputs.http.connection import Connection, Phase
from torch_grad_exporter.outputs.http.listener import Acceptor
from torch_grad_exporter.outputs.http.message import Request, RequestError, Response, parse, plain
from torch_grad_exporter.outputs.http.web_config import WebConfigFile

# As much as a TLS record holds: with less, a part could stay decrypted in memory, where the selector does not see it.
_RECEIVE_BYTES = 16384
_FAREWELL_SECONDS = 1.0


class Waker:
    """Makes a selector return, from any thread and from a signal's handler."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        selector.register(self._receiver, selectors.EVENT_READ, self)

    def wake(self) -> None:
        """The selector returns now or the next time."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: there is no thread to wake
            self._sender.send(b"\0")

    def woken(self) -> None:
        """It has returned."""
        self._receiver.recv(_RECEIVE_BYTES)

    def abandon(self) -> None:
        """Closes its sockets and leaves the selector's entry alone. Idempotent."""
        self._receiver.close()
        self._sender.close()


class ConnectionLoop:
    """Owns the listening socket and all connections.

    `dispatch` takes a request and has `respond` called with its connection, from any thread; it returns False where
    there is no room, and the client gets a 503, as it does when time is up. It takes `None` for a request when it is
    time to check `web_config` for changes, and has `begin` called instead. `timeout` and `clock` in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        dispatch: Callable[[Connection, Request | None], bool],
        *,
        on_error: Callable[[str, BaseException], None],
        timeout: float = 10.0,
        max_connections: int = 128,
        clock: Callable[[], float] = time.monotonic,
        web_config: WebConfigFile | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._on_error = on_error
        self._guard = Guard(self._step_failed)
        self._timeout = timeout
        self._max_connections = max_connections
        self._clock = clock
        self._web_config = web_config
        self._connections: dict[Connection, None] = {}  # a set in the order of arrival
        self._finished: deque[tuple[Connection, Callable[[Connection], None]]] = deque()
        self._stop_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        self._acceptor = Acceptor(listener, self._selector, functools.partial(on_error, "request"), clock)

    def run(self) -> None:
        """Serves until `stop`; then nothing is open any more. The body of the thread."""
        try:
            Guard(self._ended_by)(self._serve)
        finally:
            self.abandon()

    def respond(self, connection: Connection, response: Response | None) -> None:
        """Hands over the response, `None` for none; from any thread. Without effect where there was one already."""
        self._finished.append((connection, self._drop if response is None else lambda c: self._send(c, response)))
        self._waker.wake()

    def begin(self, connection: Connection) -> None:
        """Starts to listen to a client that came before; from any thread."""
        self._finished.append((connection, self._begin))
        self._waker.wake()

    def stop(self, grace: float) -> None:
        """Makes `run` free the port at once and return when the answers in progress are out, at most after `grace` seconds."""
        self._stop_at = self._clock() + grace
        self._waker.wake()

    def abandon(self) -> None:
        """Closes every socket of this process. Idempotent, takes no lock and leaves the selector's entries alone.

        In a forked child the entries are the parent's: removing one there would remove it in the parent.
        """
        for connection in list(self._connections):
            connection.sock.close()
        self._connections.clear()
        self._acceptor.abandon()
        self._waker.abandon()
        self._selector.close()

    def _serve(self) -> None:
        while not self._done():
            self._turn()

    def _ended_by(self, error: Exception) -> None:
        if self._stop_at is None:
            self._on_error("request", error)

    def _done(self) -> bool:
        if self._stop_at is None:
            return False
        self._acceptor.close()
        for connection in [c for c in self._connections if c.phase < Phase.SENDING]:
            self._drop(connection)
        return not self._connections or self._clock() >= self._stop_at

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            if key.data is self._acceptor:
                for sock in self._acceptor.accepted():
                    self._admit(sock)
            elif key.data is self._waker:
                self._waker.woken()
            else:
                self._attempt(self._advance, key.data)
        self._take_finished()
        self._end_overdue(self._clock())

    def _take_finished(self) -> None:
        while self._finished:
            connection, go_on = self._finished.popleft()
            # Else it was dropped meanwhile, or answered as its time was up.
            if connection in self._connections and connection.phase is Phase.WORKING:
                self._attempt(go_on, connection)

    def _end_overdue(self, now: float) -> None:
        for connection in [c for c in self._connections if c.deadline <= now]:
            self._attempt(self._give_up, connection)
        self._acceptor.resume(now)

    def _patience(self) -> float | None:
        """Seconds until something is due even if no client moves."""
        due = [c.deadline for c in self._connections]
        due += [moment for moment in (self._acceptor.resumes_at, self._stop_at) if moment is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def _admit(self, sock: socket.socket) -> None:
        while len(self._connections) >= self._max_connections:
            self._drop(min(self._connections, key=operator.attrgetter("reluctance")))
        connection = Connection(sock, self._clock() + self._timeout)
        self._connections[connection] = None
        self._attempt(self._welcome, connection)

    def _welcome(self, connection: Connection) -> None:
        # Another thread reads the files, since a disk may be slow; this client is the first to get their present content.
        if self._web_config is None or not self._web_config.due(self._clock()) or not self._dispatch(connection, None):
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        connection.tls = None if self._web_config is None else self._web_config.current.tls
        self._enter(connection, Phase.READING if connection.tls is None else Phase.HANDSHAKE, selectors.EVENT_READ)

    def _drop(self, connection: Connection) -> None:
        """Forgets it, in whatever state it is."""
        self._connections.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):  # not registered, as others are at work on it, or closed
            self._selector.unregister(connection.sock)
        with contextlib.suppress(OSError):
            connection.sock.close()

    def _give_up(self, connection: Connection) -> None:
        """Ends a phase whose time is up: a client that waits for its answer gets a response that says so."""
        if connection.phase is Phase.WORKING and connection.received:
            self._send(connection, plain(HTTPStatus.SERVICE_UNAVAILABLE, "no answer in time, as when a scrape hangs"))
        else:
            self._drop(connection)

    def _attempt(self, step: Callable[[Connection], None], connection: Connection) -> None:
        """A step of one connection; what it raises costs that connection alone."""
        dropped = connection not in self._connections  # earlier in this turn, to make room
        if not dropped and not self._guard(step, connection):
            self._drop(connection)

    def _step_failed(self, error: Exception) -> None:
        if not isinstance(error, OSError):  # else the client is gone, or does not keep to the protocol
            self._on_error("request", error)

    def _advance(self, connection: Connection) -> None:
        try:
            if connection.phase is Phase.READING:
                self._read(connection)
            elif connection.phase is Phase.SENDING:
                self._write(connection)
            elif connection.phase is Phase.HANDSHAKE and connection.tls is not None:
                self._shake_hands(connection, connection.tls)
            elif not connection.sock.recv(_RECEIVE_BYTES):
                self._drop(connection)
        except BlockingIOError:
            return
        except ssl.SSLWantReadError:
            self._enter(connection, connection.phase, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._enter(connection, connection.phase, selectors.EVENT_WRITE)

    def _shake_hands(self, connection: Connection, secure: tls.Tls) -> None:
        sock = connection.sock if isinstance(connection.sock, ssl.SSLSocket) else self._secured(connection, secure)
        if sock is None:
            return
        try:
            sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:  # the client's fault, and the alert that says so has been sent
            self._take_leave(connection)
            return
        connection.phase = Phase.READING
        connection.admitted = secure.admits(sock)
        self._read(connection)

    def _secured(self, connection: Connection, secure: tls.Tls) -> ssl.SSLSocket | None:
        """The socket with TLS; `None` where the client does not speak it, which gets an answer that says so."""
        first = connection.sock.recv(1, socket.MSG_PEEK)
        if not first:
            self._drop(connection)
            return None
        if first != tls.HANDSHAKE:
            self._send(connection, plain(HTTPStatus.BAD_REQUEST, "this port serves HTTPS; the request was plain HTTP"))
            return None
        self._hand_over(connection)
        connection.sock = sock = secure.wrap(connection.sock)
        self._enter(connection, Phase.HANDSHAKE, selectors.EVENT_READ)
        return sock

    def _read(self, connection: Connection) -> None:
        data = connection.sock.recv(_RECEIVE_BYTES)
        if not data:
            self._drop(connection)
            return
        try:
            head = connection.receive(data)
            if head is None:
                return
            request = parse(head)
        except RequestError as exc:
            connection.body_wanted = not connection.received.startswith(b"HEAD ")
            self._send(connection, plain(exc.status))
            return
        connection.body_wanted = request.method != "HEAD"
        if not connection.admitted:
            self._send(connection, plain(HTTPStatus.FORBIDDEN, "no name in the client's certificate is allowed here"))
            return
        self._hand_over(connection)
        connection.deadline = self._clock() + self._timeout
        if not self._dispatch(connection, request):
            self._send(connection, plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once", (("Retry-After", "1"),)))

    def _send(self, connection: Connection, response: Response) -> None:
        extra = () if self._web_config is None else self._web_config.current.headers
        connection.outgoing = [memoryview(response.head(extra))]
        if connection.body_wanted:
            connection.outgoing.append(memoryview(response.body))
        connection.deadline = self._clock() + self._timeout
        self._enter(connection, Phase.SENDING, selectors.EVENT_WRITE)

    def _write(self, connection: Connection) -> None:
        while connection.outgoing:
            sent = connection.sock.send(connection.outgoing[0])
            connection.outgoing[0] = connection.outgoing[0][sent:]
            if not connection.outgoing[0]:
                del connection.outgoing[0]
        self._take_leave(connection)

    def _take_leave(self, connection: Connection) -> None:
        if isinstance(connection.sock, ssl.SSLSocket):
            tls.close_notify(connection.sock)
        connection.sock.shutdown(socket.SHUT_WR)
        connection.deadline = self._clock() + _FAREWELL_SECONDS
        self._enter(connection, Phase.FAREWELL, selectors.EVENT_READ)

    def _enter(self, connection: Connection, phase: Phase, event: int) -> None:
        """Makes the selector report when the socket is ready for this."""
        change = self._selector.register if connection.phase is Phase.WORKING else self._selector.modify
        change(connection.sock, event, connection)
        connection.phase = phase

    def _hand_over(self, connection: Connection) -> None:
        """Keeps the selector from the socket, which others work on."""
        self._selector.unregister(connection.sock)
        connection.phase = Phase.WORKING
