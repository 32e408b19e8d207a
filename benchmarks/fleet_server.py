"""Many ranks served from one thread: each has a port of its own on loopback, and shows recorded scrapes as its own."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tornado.netutil import bind_sockets

from benchmarks.fleet_job import PLACE, RUN, Recording
from torch_grad_exporter.distributed.discovery import ScrapeTarget
from torch_grad_exporter.outputs.prometheus.text import Format

RANKS_PER_HOST = 8
TARGETS = b"/sd"
"""The path of the list of all ranks, as http_sd wants it; any other path is a scrape."""

_STARTS_IN = 30.0


class Fleet:
    """Rank 0 shows the `first` recording, every other one `others`: with each scrape the next body, after the last the first.

    Bodies are compressed as the exporter does it. A context manager: leaving it ends the thread and closes every socket.
    `answers`, `seconds` and `sent`: how many, how long it took from the whole request to the written answer, and bytes.
    """

    def __init__(self, first: Recording, others: Recording, ranks: int) -> None:
        self._first, self._others = _split(first), _split(others)
        self._listeners = [bind_sockets(0, "127.0.0.1")[0] for _ in range(ranks)]
        self._turns = [0] * ranks
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self.targets = [_target(rank, listener.getsockname()[1]) for rank, listener in enumerate(self._listeners)]
        self.answers, self.seconds, self.sent = 0, 0.0, 0
        self.connections: set[_Connection] = set()

    def listed(self) -> bytes:
        """What http_sd reads: the groups of all ranks."""
        return json.dumps([target.group() for target in self.targets]).encode()

    def cpu_seconds(self) -> float:
        """Processor time of the thread that serves."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))

    def body(self, rank: int) -> bytes:
        """The rank's next scrape."""
        bodies = self._others if rank else self._first
        turn = self._turns[rank] % len(bodies)
        self._turns[rank] += 1
        return str(rank).encode().join(bodies[turn])

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(_STARTS_IN):
            raise RuntimeError("the fleet does not listen")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STARTS_IN)

    def _run(self) -> None:
        servers = [self._loop.run_until_complete(self._listen(rank)) for rank in range(len(self._listeners))]
        self._loop.call_soon(self._started.set)
        self._loop.run_forever()
        for server in servers:
            server.close()
        for connection in list(self.connections):
            connection.end()
        while self.connections:
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _listen(self, rank: int) -> asyncio.Server:
        return await self._loop.create_server(lambda: _Connection(self, rank), sock=self._listeners[rank])


class _Connection(asyncio.Protocol):
    """One client of one rank, which asks one thing after the other."""

    def __init__(self, fleet: Fleet, rank: int) -> None:
        self._fleet, self._rank = fleet, rank
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._fleet.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self._fleet.connections.discard(self)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        start = time.perf_counter()
        self._received += data
        while b"\r\n\r\n" in self._received and self._transport is not None:
            request, _, self._received = self._received.partition(b"\r\n\r\n")
            answer = self._answer(request.lower())
            self._transport.write(answer)
            self._fleet.answers += 1
            self._fleet.sent += len(answer)
            self._fleet.seconds += time.perf_counter() - start

    def _answer(self, request: bytes) -> bytes:
        wants_targets = request.split(b" ", 2)[1] == TARGETS
        body = self._fleet.listed() if wants_targets else self._fleet.body(self._rank)
        lines = ["HTTP/1.1 200 OK", f"Content-Type: {'application/json' if wants_targets else Format.OPENMETRICS.value}"]
        if b"gzip" in request:
            body = gzip.compress(body, compresslevel=1, mtime=0)
            lines.append("Content-Encoding: gzip")
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _target(rank: int, port: int) -> ScrapeTarget:
    """What the rank's exporter says of where it is, on a host that there is not."""
    host, local_rank = divmod(rank, RANKS_PER_HOST)
    return ScrapeTarget(address=f"127.0.0.1:{port}", run=RUN, rank=rank, local_rank=local_rank, host=f"host-{host:04}")


def _split(recording: Recording) -> Sequence[list[bytes]]:
    """Each body in pieces, between which the rank belongs."""
    return [body.split(PLACE.encode()) for body in recording.bodies]
