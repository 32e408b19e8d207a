"""Storms: many requests that are wrong, too large or broken off, and what a training process keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks import abuse_fuzz
from benchmarks.abuse_clients import Manner, Tally, attack, exchange
from benchmarks.abuse_victim import State, Victim, kept, misread, settled
from benchmarks.scraper import outcome

REQUESTS, LARGE, RESETS = 100_000, 500, 1000

LONG_LABEL = 25_000
"""Characters of a label with which a scrape has more bytes than the buffers of a connection hold: it gets stuck in mid-body."""

MEGABYTE = 2**20

GET = b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n"

LARGE_REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: t\r\nX: " + b"a" * MEGABYTE + b"\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"X-Header: a\r\n" * (MEGABYTE // 13) + b"\r\n",
    b"GET /" + b"a" * MEGABYTE + b" HTTP/1.1\r\nHost: t\r\n\r\n",
    b"\0" * MEGABYTE,
    b"\r" * MEGABYTE,
)
"""Heads of a megabyte."""


@dataclass(frozen=True, slots=True)
class Storm:
    """What was seen. `misread`: what was wrong with the scrapes after it."""

    name: str
    tally: Tally
    before: State
    after: State
    misread: list[str]
    log: str


def mutated(victim: Victim, count: int = REQUESTS, seed: int = 0) -> Storm:
    """Requests after random mutations, of which a few are broken off."""
    return _storm(victim, "mutated requests", lambda: attack(victim.port, abuse_fuzz.requests(count, seed), seed=seed))


def large(victim: Victim, count: int = LARGE) -> Storm:
    """Heads of a megabyte, each of which is refused, and read to its end."""
    return _storm(
        victim, "heads of a megabyte", lambda: attack(victim.port, _so_many(LARGE_REQUESTS, count), manners=[Manner.READS])
    )


def resets(victim: Victim, count: int = RESETS) -> Storm:
    """Scrapes whose clients take a few bytes or none, in a small window, and reset the connection."""
    manners = [Manner.RESETS_ANSWER, Manner.RESETS_ANSWER, Manner.RESETS_AT_ONCE]
    name = f"scrapes of {len(exchange(victim.port, GET) or b'') / 1e6:.1f} MB, broken off"
    return _storm(victim, name, lambda: attack(victim.port, [GET] * count, manners=manners, window=4096))


def complaints(storm: Storm) -> list[str]:
    """What the storm has done to the process; empty if all is well."""
    found = [*storm.tally.wrong, *kept(storm.before, storm.after), *storm.misread]
    if storm.log:
        found.append(f"the training's log says: {storm.log}")
    return [f"{storm.tally.requests} {storm.name}: {one}" for one in found]


def _storm(victim: Victim, name: str, run: Callable[[], Tally]) -> Storm:
    outcome(victim.url)
    before = victim.state()
    tally = run()
    return Storm(name, tally, before, settled(victim, before), misread(victim), victim.log())


def _so_many(requests: Iterable[bytes], count: int) -> Iterator[bytes]:
    return itertools.islice(itertools.cycle(requests), count)
