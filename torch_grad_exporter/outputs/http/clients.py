"""Clients: accepts connections, reads one request from each and sends its answer, all in the thread of the event loop.

Tornado reads and writes. This adds limits: on the number of clients at a time; the TLS of the web configuration at the moment of
the connection; a timeout for each phase: handshake and head of the request together, computing the answer, and reading it.
Further clients wait in the backlog of the socket, and one that has had its time makes room for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from tornado.http1connection import HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream, SSLIOStream

from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.outputs.http.endpoints import Endpoints
from torch_grad_exporter.outputs.http.messages import Request, plain

# At a time, at most; and the share of the descriptors that this process may have open, most of which are the training's.
MAX_CLIENTS, SHARE = 1024, 8

MAX_HEAD, ACCEPTED_AT_ONCE = 16_384, 32

# What a client has at least, from its connection on, before another one takes its place; until the next look at the backlog when no
# place is free; and after a failure to accept, such as without free descriptors, when the socket stays readable.
LEAST_SECONDS, FULL_SECONDS, PAUSE_SECONDS = 0.4, 0.02, 0.5


def max_clients() -> int:
    """Return how many clients this process can have at a time."""
    try:
        import resource  # noqa: PLC0415 - Windows has none, and no such limit
    except ImportError:
        return MAX_CLIENTS
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CLIENTS if descriptors == resource.RLIM_INFINITY else max(1, min(MAX_CLIENTS, descriptors // SHARE))


@dataclass(slots=True, eq=False)
class Client:
    """A connection since `at`. `answering`: its request is complete. `overdue`: closes it if it does not read its answer."""

    sock: socket.socket
    at: float
    stream: IOStream | None = None
    answering: bool = False
    overdue: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self.overdue is not None:
            self.overdue.cancel()
        if self.stream is not None:
            self.stream.close()
        self.sock.close()


class Clients(HTTPServerConnectionDelegate):
    """All connections of a server, with its listening sockets. All methods but `abandon` are for the thread of the loop.

    `timeout`: seconds for each phase of a connection.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        loop: asyncio.AbstractEventLoop,
        endpoints: Endpoints,
        errors: ErrorLog,
        timeout: float,
    ) -> None:
        self._listeners, self._loop, self._endpoints = listeners, loop, endpoints
        self._errors, self._timeout = errors, timeout
        self._parameters = HTTP1ConnectionParameters(
            no_keep_alive=True, max_header_size=MAX_HEAD, header_timeout=timeout, body_timeout=timeout
        )
        self._most = max_clients()
        self._clients: dict[Client, None] = {}  # a set in the order of arrival
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only
        self._gone = asyncio.Event()

    def watch(self) -> None:
        """Accept connections from now on."""
        for listener in self._listeners:
            if listener.fileno() != -1:
                self._loop.add_reader(listener, self._accept, listener)

    def _pause(self, seconds: float) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self.watch)

    async def end(self, grace: float) -> None:
        """Free the port and return when the answers in progress are out, at most after `grace` seconds."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        for client in [client for client in self._clients if not client.answering]:
            self._drop(client)
        until = self._loop.time() + grace
        while self._clients and (left := until - self._loop.time()) > 0:
            self._gone.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), left)
        for client in list(self._clients):
            self._drop(client)

    def abandon(self) -> None:
        """Close every socket of this process, and no more: in a forked child the loop's entries are the parent's. Idempotent."""
        for sock in (*self._listeners, *(client.sock for client in list(self._clients))):
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            # Those that are being answered are the last to go.
            leaving = None if len(self._clients) < self._most else min(self._clients, key=lambda client: client.answering)
            if leaving is not None and self._loop.time() < leaving.at + LEAST_SECONDS:
                self._pause(FULL_SECONDS)
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._errors.count("request", error)
                self._pause(PAUSE_SECONDS)
                return
            if leaving is not None:
                self._drop(leaving)
            client = Client(sock, self._loop.time())
            self._clients[client] = None
            self._begin(self._open(client))

    def _begin(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, client: Client) -> None:
        try:
            settings = await asyncio.wait_for(self._endpoints.settings(), self._timeout)
            if client not in self._clients:  # dropped meanwhile
                return
            client.sock.getpeername()  # raises where the client is gone, of which `ssl` would leave a socket open
            client.sock.setblocking(False)
            # A small body after its head would else wait for the client's delayed acknowledgement.
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if settings.tls is None:
                client.stream = IOStream(client.sock)
            else:
                client.sock = secured = settings.tls.wrap(client.sock)
                client.stream = SSLIOStream(secured)
        except OSError:  # it is gone already, or its time is up
            self._drop(client)
            return
        HTTP1ServerConnection(client.stream, self._parameters, client).start_serving(self)

    def _drop(self, client: Client) -> None:
        """Forget a client, in whatever state it is."""
        self._clients.pop(client, None)
        self._gone.set()
        client.close()

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """See `HTTPServerConnectionDelegate`: a request begins. Only the first one of a client is answered."""
        client: Client = server_conn.context  # type: ignore[attr-defined]

        def begin(request: Request) -> None:
            if not client.answering:
                client.answering = True
                self._begin(self._respond(client, request, request_conn))

        return _Head(begin)

    def on_close(self, server_conn: object) -> None:
        """See `HTTPServerConnectionDelegate`: a connection is closed."""
        self._drop(server_conn.context)  # type: ignore[attr-defined]

    async def _respond(self, client: Client, request: Request, connection: HTTPConnection) -> None:
        try:
            response = await asyncio.wait_for(self._endpoints.answer(request, client.sock), self._timeout)
        except TimeoutError:
            response = plain(HTTPStatus.SERVICE_UNAVAILABLE, "the answer took too long", (("Retry-After", "1"),))
        if client not in self._clients:
            return
        fields = {
            "Date": formatdate(usegmt=True),
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        headers = HTTPHeaders({**fields, **dict(response.headers)})
        client.overdue = self._loop.call_later(self._timeout, self._drop, client)
        start = ResponseStartLine("HTTP/1.1", response.status.value, response.status.phrase)
        connection.write_headers(start, headers)
        if request.method != "HEAD":
            connection.write(response.body)  # apart from the headers, so that it is not copied
        connection.finish()


class _Head(HTTPMessageDelegate):
    """Takes the head of a request; a body is not waited for, and ends with the connection."""

    def __init__(self, begin: Callable[[Request], None]) -> None:
        self._begin = begin

    def headers_received(self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders) -> None:
        """See `HTTPMessageDelegate`."""
        if isinstance(start_line, RequestStartLine):
            self._begin(Request.of(start_line.method, start_line.path, headers))
