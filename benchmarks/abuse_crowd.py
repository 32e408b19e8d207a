"""A crowd of connections that never come to the end of a request, and how a training process that is scraped bears it.

A third of them is silent, a third sends a byte each second, a third one header line after the other without an end.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field

from benchmarks.abuse_victim import State, Victim, kept, settled
from benchmarks.scraper import outcome

CONNECTIONS = 300
MAX_THREADS = 16
MAX_SCRAPE_SECONDS = 1.0
MAX_FREED_SECONDS = 15.0

GIVE_UP_SECONDS = 60.0
"""After which the crowd leaves by itself, and is held to have never been let go."""

SCRAPE_EVERY = 0.25
SEND_EVERY = 1.0

HEAD = b"GET /metrics HTTP/1.1\r\nHost: t\r\n"
LINE = b"X-Header: " + b"a" * 64 + b"\r\n"


@dataclass(slots=True)
class Client:
    """One connection. `sends`: what it still has to say, a piece each second."""

    sock: socket.socket
    sends: list[bytes]
    due: float = 0.0


def _silent() -> list[bytes]:
    return []


def _dripping() -> list[bytes]:
    return [HEAD[i : i + 1] for i in range(len(HEAD))] + [b"X"] * 1000


def _without_end() -> list[bytes]:
    return [HEAD] + [LINE] * 1000


KINDS = (_silent, _dripping, _without_end)


class Crowd:
    """`size` connections, of each kind as many. What the server closes stays closed, or comes back if `persistent`."""

    def __init__(self, port: int, size: int) -> None:
        self._port = port
        self._left: list[int] = []
        self._clients = [self._connected(number) for number in range(size)]
        self.persistent = False
        self.connected = size

    def turn(self, now: float) -> int:
        """Says what is due and looks who was let go; how many are still there."""
        there = []
        for number, client in enumerate(self._clients):
            if _closed(client.sock):
                client.sock.close()
                if self.persistent:
                    there.append(self._connected(number))
                    self.connected += 1
                continue
            there.append(client)
            if client.sends and client.due <= now:
                client.due = now + SEND_EVERY
                # Full or closed: it shows the next time.
                with contextlib.suppress(OSError):
                    client.sock.send(client.sends.pop(0))
        self._clients = there
        return len(there)

    def leave(self) -> None:
        """Closes what is still open."""
        for client in self._clients:
            client.sock.close()

    def _connected(self, number: int) -> Client:
        sock = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        sock.setblocking(False)
        return Client(sock, KINDS[number % len(KINDS)]())


def _closed(sock: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    try:
        while data := sock.recv(65536):  # an answer: the head became too long
            del data
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@dataclass(slots=True)
class Siege:
    """What was seen. `scrapes`: seconds of each beside the crowd. `freed`: seconds until all were let go, `None` if never."""

    connections: int
    before: State
    after: State
    threads: int = 0
    largest: int = 0
    """The most clients in the process' memory at once."""
    scrapes: list[float] = field(default_factory=list)
    outcomes: set[str] = field(default_factory=set)
    freed: float | None = None
    log: str = ""


def besiege(victim: Victim, size: int = CONNECTIONS, *, persistent_for: float = 0.0) -> Siege:
    """Lets a crowd at the victim and waits until all are let go. For `persistent_for` seconds who was let go comes back."""
    outcome(victim.url)
    before = victim.state()
    siege = Siege(size, before, before)
    start = scraped = time.monotonic()
    crowd = Crowd(victim.port, size)
    try:
        while (now := time.monotonic()) < start + GIVE_UP_SECONDS + persistent_for:
            crowd.persistent = now < start + persistent_for
            if crowd.turn(now) == 0 and not crowd.persistent:
                siege.freed = now - start - persistent_for
                break
            if now - scraped >= SCRAPE_EVERY:
                scraped = now
                _look(victim, siege)
            time.sleep(0.01)
    finally:
        crowd.leave()
    siege.connections = crowd.connected
    siege.after = settled(victim, before)
    siege.log = victim.log()
    return siege


def _look(victim: Victim, siege: Siege) -> None:
    """A scrape beside the crowd, and what the process holds meanwhile."""
    start = time.monotonic()
    siege.outcomes.add(outcome(victim.url))
    siege.scrapes.append(time.monotonic() - start)
    state = victim.state()
    siege.threads = max(siege.threads, state.ours)
    siege.largest = max(siege.largest, state.connections)


def complaints(siege: Siege) -> list[str]:
    """What of the siege is beyond the bars; empty if all is well."""
    found = kept(siege.before, siege.after)
    if siege.threads > MAX_THREADS:
        found.append(f"{siege.threads} threads, the bar is {MAX_THREADS}")
    if siege.outcomes != {"200"} or max(siege.scrapes) > MAX_SCRAPE_SECONDS:
        found.append(f"scrapes ended with {siege.outcomes} after up to {max(siege.scrapes, default=0):.2f} s")
    if siege.freed is None or siege.freed > MAX_FREED_SECONDS:
        found.append(f"clients were let go after {siege.freed} s, the bar is {MAX_FREED_SECONDS:.0f} s")
    if siege.log:
        found.append(f"the training's log says: {siege.log}")
    return [f"{siege.connections} half-open connections: {one}" for one in found]
