"""Clients that send whatever they are given, and hang up where they like; what is wrong with the answers they get.

Each connection ends with a reset, so that a hundred thousand of them use up no ports.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

CLIENTS = 8
"""Connections at a time."""

MAX_HEAD = 16_384
"""Bytes of a request's head beyond which the server hangs up, as its documentation says."""

STATUSES = {200, 400, 404, 405, 503}
"""What a request may be answered with. Not 500: nothing that a client sends is a failure of the exporter."""

BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\n\r\n"
"""The answer to a request that is not HTTP. It ends with the connection."""

CONTINUE = b"HTTP/1.1 100 (Continue)\r\n\r\n"
"""What comes before the answer to a client that asks for it."""

_RESET = struct.pack("ii", 1, 0)
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]+\r\n")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n")
_KEPT = 10


class Manner(enum.Enum):
    """How a client behaves. Only with the first one is there an answer to be judged."""

    READS = "reads its answer"
    RESETS_REQUEST = "resets in its request"
    RESETS_AT_ONCE = "resets after its request"
    RESETS_ANSWER = "resets in its answer"


MANNERS = (Manner.READS,) * 7 + (Manner.RESETS_REQUEST, Manner.RESETS_AT_ONCE, Manner.RESETS_ANSWER)


@dataclass(slots=True)
class Tally:
    """What became of many requests. `answers`: by status or by what there was instead; `wrong`: a few that should not have been."""

    requests: int = 0
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def exchange(port: int, sent: bytes, manner: Manner = Manner.READS, *, window: int | None = None) -> bytes | None:
    """Sends the bytes and returns what comes back up to the end, `None` if the client did not wait for it.

    `window`: bytes that the client has room for, so that a long answer gets stuck on its way.
    """
    with socket.socket() as sock:
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if manner is Manner.RESETS_REQUEST:
            sock.send(sent[: len(sent) // 2])
            return None
        with contextlib.suppress(ConnectionError):  # it has been refused before its end: there is an answer to be read
            sock.sendall(sent)
        if manner is Manner.RESETS_AT_ONCE:
            return None
        if not _HEAD_END.search(sent):  # a server may take the end of a client's sending for the end of the client
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        if manner is Manner.RESETS_ANSWER:
            sock.recv(20)
            return None
        answer = b""
        try:
            while data := sock.recv(65536):
                answer += data
        except ConnectionError:  # the server had not read all that was sent behind the request; the answer must be whole
            if not answer:
                raise
        return answer


def complaint(sent: bytes, answer: bytes) -> str | None:
    """What is wrong with an answer, `None` if nothing is. Knows of HTTP only what it needs, nothing of the server's code."""
    if not answer:
        # A body in broken chunks ends the connection, like a head that is too long.
        chunked = b"transfer-encoding" in sent.lower()
        return "no answer" if _HEAD_END.search(sent, 0, MAX_HEAD) and not chunked else None
    answer = answer.removeprefix(CONTINUE)
    status, length, end = _STATUS.match(answer), _LENGTH.search(answer), answer.find(b"\r\n\r\n")
    if status is None or end < 0 or (length is None and answer != BAD_REQUEST):
        return "no HTTP"
    if int(status[1]) not in STATUSES:
        return f"status {int(status[1])}"
    body, expected = len(answer) - end - 4, 0 if length is None or sent.lstrip(b"\r\n").startswith(b"HEAD ") else int(length[1])
    return None if body == expected else f"{body} bytes of {expected}"


def attack(
    port: int,
    requests: Iterable[bytes],
    *,
    manners: Sequence[Manner] = MANNERS,
    window: int | None = None,
    clients: int = CLIENTS,
    seed: int = 0,
) -> Tally:
    """Sends all requests, each over a connection of its own and several at a time. `window`: as in `exchange`."""
    tally, lock, chance = Tally(), threading.Lock(), Random(seed)  # noqa: S311 - no secret
    jobs = ((sent, chance.choice(manners)) for sent in requests)
    start = time.monotonic()

    def work() -> None:
        while batch := _batch(jobs, lock):
            found = [(sent, *_outcome(port, sent, manner, window)) for sent, manner in batch]
            with lock:
                for sent, outcome, wrong in found:
                    tally.requests += 1
                    tally.answers[outcome] += 1
                    if wrong and len(tally.wrong) < _KEPT:
                        tally.wrong.append(f"{wrong} to {sent[:300]!r}")

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(work) for _ in range(clients)]:
            done.result()
    tally.seconds = time.monotonic() - start
    return tally


def _batch(jobs: Iterator[tuple[bytes, Manner]], lock: threading.Lock) -> list[tuple[bytes, Manner]]:
    with lock:
        return list(itertools.islice(jobs, 20))


def _outcome(port: int, sent: bytes, manner: Manner, window: int | None) -> tuple[str, str | None]:
    """A word for the table, and what is wrong."""
    try:
        answer = exchange(port, sent, manner, window=window)
    except OSError as error:
        name = type(error).__name__
        hung_up_on = isinstance(error, ConnectionError) and not _HEAD_END.search(sent, 0, MAX_HEAD)
        return name, name if manner is Manner.READS and not hung_up_on else None
    if answer is None:
        return manner.value, None
    status = _STATUS.match(answer)
    return status[1].decode() if status else "none", complaint(sent, answer)
