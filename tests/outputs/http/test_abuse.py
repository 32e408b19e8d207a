"""What a client can do to a training process: nothing. `make soak` does the same for longer, and measures it."""

from __future__ import annotations

import http
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks import abuse, abuse_crowd, abuse_load, abuse_storm
from benchmarks.abuse_clients import Manner, complaint, exchange
from benchmarks.abuse_fuzz import CORPUS, mutated, requests
from benchmarks.abuse_mirror import Mirror
from benchmarks.abuse_victim import State, Victim, kept, settled
from benchmarks.scraped import SERIES
from benchmarks.scraper import Scraper, Scrapes, outcome
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.outputs.http.message import MAX_HEAD, Request, RequestError, complete_head, parse

SEND_BUFFER = Path("/proc/sys/net/ipv4/tcp_wmem")
"""The smallest, usual and largest size of what the kernel takes of an answer before the client reads it."""

PACE = 0.005
"""Seconds between two steps of a victim, which leave the core to its server and to other tests."""


SERIES_OF_AN_IDLE_LAYER = 23
"""Of a layer that the last step gave no gradient: its counters and histogram."""


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A training process with a small model that is scraped now and then."""
    with Victim(pace=PACE) as made:
        yield made


# Requests that are wrong


def read(sent: bytes) -> Request | http.HTTPStatus | None:
    """What the server makes of these bytes, come at once: a request, a refusal, or `None` while it waits for more."""
    try:
        head = complete_head(sent)
        return None if head is None else parse(head)
    except RequestError as error:
        return error.status


def read_in_pieces(sent: bytes, chance: Random) -> Request | http.HTTPStatus | None:
    """The same if the bytes come in up to eight pieces."""
    ends = sorted(chance.randint(0, len(sent)) for _ in range(7))
    found = (read(sent[:end]) for end in (*ends, len(sent)))
    return next((one for one in found if one is not None), None)


def test_100_000_mutated_requests_are_read_or_refused() -> None:
    """Each is a request whose method and path are clean, or refused with one of four statuses, or waited for; nothing is raised."""
    refused, accepted, waited = set(), 0, 0
    for sent in requests(100_000, seed=1):
        found = read(sent)
        if found is None:
            waited += 1
            assert len(sent) < MAX_HEAD
        elif isinstance(found, Request):
            accepted += 1
            assert re.fullmatch(r"[!-~]+", found.method)
            assert not re.search(r"[\s?#]", found.path)
            assert all(re.fullmatch(r"[!-~]+", name) and name == name.lower() for name in found.headers)
        else:
            refused.add(int(found))
    assert refused == {400, 414, 431, 505}
    assert min(accepted, waited, 100_000 - accepted - waited) > 10_000


def test_pieces_make_no_difference() -> None:
    """Of 10,000 mutated requests each is read the same whether it comes at once or in pieces."""
    chance = Random(2)
    for sent in requests(10_000, seed=2):
        assert read_in_pieces(sent, chance) == read(sent)


def test_the_unmutated_ones_are_read() -> None:
    """All of the corpus are requests but what speaks another protocol, so that mutations start from what is valid."""
    assert [type(read(sent)) for sent in CORPUS] == [Request] * (len(CORPUS) - 2) + [http.HTTPStatus] * 2


def test_the_same_seed_makes_the_same_requests() -> None:
    """And another one others: a failure can be made again from its number."""
    assert list(requests(100, seed=3)) == list(requests(100, seed=3)) != list(requests(100, seed=4))
    assert mutated(Random(3)) == next(requests(1, seed=3))


def test_3000_mutated_requests_leave_the_training_alone(victim: Victim) -> None:
    """Over real sockets, a part of them broken off: every answer is one that HTTP has for it, and nothing is left behind.

    The next scrape has exactly the steps that were made, no failure is counted, nothing stands in the training's log, and
    threads and descriptors are as many as before.
    """
    storm = abuse_storm.mutated(victim, 3000, seed=5)
    assert abuse_storm.complaints(storm) == []
    assert storm.tally.requests == 3000
    assert {"200", "400", "404", "405", "414", "431", "505", "none"} <= set(storm.tally.answers)
    assert storm.after.steps > storm.before.steps


def test_heads_of_a_megabyte_are_refused_to_their_end(victim: Victim) -> None:
    """Each of 50 clients that send a megabyte gets its 414 or 431 and no reset, and the process is none the larger for it."""
    storm = abuse_storm.large(victim, 50)
    assert abuse_storm.complaints(storm) == []
    assert set(storm.tally.answers) == {"414", "431"}
    assert storm.after.resident - storm.before.resident < 8 * 2**20
    assert abuse.storm_table([storm])["rows"][0][:2] == [storm.name, 50]


def test_clients_that_hang_up_in_mid_body_leave_nothing() -> None:
    """60 clients reset the connection while an answer that no buffer holds is on its way; when it ends nothing of ours is left."""
    with Victim(label=abuse_storm.LONG_LABEL, pace=PACE) as victim:
        largest = int(SEND_BUFFER.read_text().split()[2]) if SEND_BUFFER.exists() else 4 * 2**20
        assert len(exchange(victim.port, abuse_storm.GET) or b"") > largest
        storm = abuse_storm.resets(victim, 60)
        assert abuse_storm.complaints(storm) == []
        assert set(storm.tally.answers) == {Manner.RESETS_ANSWER.value, Manner.RESETS_AT_ONCE.value}
        closed = victim.close_exporter()
        assert (closed.ours, closed.connections, closed.errors) == (0, 0, 0)
        assert victim.log() == ""


# Clients that never come to an end


def test_300_half_open_connections_are_let_go(victim: Victim) -> None:
    """Silent, dripping and endless ones, at the server's own 10 s: all are let go within 15 s, with 16 threads of ours at most.

    Each scrape beside them answers within a second, and no client of theirs stays in memory.
    """

    def is_in_time() -> bool:
        siege = abuse_crowd.besiege(victim)
        found = abuse_crowd.complaints(siege)
        assert all(" after " in one for one in found), found
        assert (siege.connections, siege.outcomes) == (300, {"200"})
        assert siege.largest >= 100  # they were there
        assert abuse.siege_table([siege])["rows"][0][0] == 300
        return not found and len(siege.scrapes) >= 20

    assert eventually(is_in_time)


# Many scrapes


def test_50_scrapes_a_second_beside_training() -> None:
    """With 10,000 series and for 100 steps all are answered with 200 while the training goes on, and nothing is left."""
    with Victim(layers=SERIES // SERIES_OF_AN_IDLE_LAYER, pace=PACE) as victim:
        assert outcome(victim.url) == "200"
        before = victim.state()
        scraper = Scraper(victim.url, 50.0)
        began = time.monotonic()
        with scraper.on():
            assert eventually(lambda: time.monotonic() > began + 3 and victim.state().steps > before.steps + 100)
        took = time.monotonic() - began
        scrapes = scraper.end()
        series = sum(not line.startswith(b"#") for line in lines(victim.url))
        after = settled(victim, before)  # the last answer may still be closing
        assert set(scrapes.outcomes) == {"200"}
        # No faster than they are answered, on a machine with other work.
        assert scrapes.outcomes["200"] >= 0.6 * took / max(0.02, np.diff(scrapes.moments).mean())
        assert series >= 9500
        assert kept(before, after) == []
        assert victim.log() == ""


# What measures


def test_the_mirror_serves_what_it_has_seen(victim: Victim) -> None:
    """A control that is scraped instead serves as many series as the training's own process, and always the same bytes."""
    with Mirror(victim.url) as mirror:
        bodies = [lines(mirror.url) for _ in range(2)]
    assert bodies[0] == bodies[1]
    assert len(bodies[0]) == len(lines(victim.url))


def lines(url: str) -> list[bytes]:
    """A scrape."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return list(answer)


def test_a_scraper_says_what_failed() -> None:
    """Asking for the moments of scrapes alone fails where one was not answered with 200."""
    with answering(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n") as url:
        scraper = Scraper(url, 0.01)
        with scraper.on():
            assert eventually(lambda: not any(thread.name == "answering" for thread in threading.enumerate()))
        assert scraper.seconds() > 0
        with pytest.raises(RuntimeError, match=r"'503': 1"):
            scraper.close()


def test_only_what_is_complete_is_published() -> None:
    """All kinds with at least the usual numbers; anything less is a trial."""
    assert abuse.complete(abuse.parsed([]))
    assert abuse.complete(abuse.parsed([*abuse.KINDS, "--requests", "200000"]))
    for less in (["crowd"], ["--requests", "10"], ["--long", "1"], ["--rounds", "2"]):
        assert not abuse.complete(abuse.parsed(less))


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The address of a server that gives these answers, one to each connection, and then is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                client, _ = listener.accept()
                with client:
                    client.recv(65536)
                    client.sendall(answer)

        thread = threading.Thread(target=serve, name="answering")
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        thread.join(PATIENCE)


def test_what_becomes_of_a_scrape_is_told() -> None:
    """A status, a body that is cut off, no answer and no server are distinguished."""
    head = "HTTP/1.1 {} x\r\nContent-Length: {}\r\n\r\n"
    answers = [head.format(200, 2).encode() + b"ab", head.format(503, 0).encode(), head.format(200, 9).encode() + b"ab", b""]
    with answering(*answers) as url:
        assert [outcome(url) for _ in answers] == ["200", "503", "IncompleteRead", "RemoteDisconnected"]
    assert outcome(url) == "URLError"


@pytest.mark.parametrize(
    ("sent", "answer", "wrong"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", None),
        (b"HEAD / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\n", b"", None),
        (b"GET / HTTP/1.1\r\n\r\n", b"", "no answer"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na", "1 bytes of 2"),
        (b"HEAD / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", "2 bytes of 0"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "status 500"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", "no HTTP"),
        (b"GET / HTTP/1.1\r\n\r\n", b"Traceback", "no HTTP"),
    ],
)
def test_a_wrong_answer_is_seen(sent: bytes, answer: bytes, wrong: str | None) -> None:
    """Too short, too long, a failure of the server's, none at all, or no HTTP."""
    assert complaint(sent, answer) == wrong


def test_what_a_process_keeps_is_seen() -> None:
    """One thread, descriptor or failure more than before, or more clients than threads, is a complaint each."""
    before = State(steps=1, errors=0, threads=7, ours=6, descriptors=8, connections=1, resident=0)
    assert kept(before, replace(before, steps=9, connections=6, resident=9)) == []
    for name in ("errors", "threads", "descriptors"):
        assert kept(before, replace(before, **{name: 9})) == [f"9 {name}, {getattr(before, name)} before"]
    assert kept(before, replace(before, connections=7)) == ["7 clients remembered by 6 threads"]


def load(steps_a_second: dict[str, list[float]], outcomes: dict[str, int]) -> abuse_load.Load:
    """A load of stretches of a second, in each of which 50 scrapes of 4 ms began."""
    stretches: dict[str, list[abuse_load.Stretch]] = {}
    start = 0.0
    for name, rates in steps_a_second.items():
        stretches[name] = []
        for rate in rates:
            stretches[name].append(abuse_load.Stretch(np.linspace(start, start + 1, int(rate) + 1), 0.9, 0.1, 0.05))
            start += 1
    began = np.arange(0.01, start, 0.02)
    scrapes = Scrapes(np.column_stack([began, began + 0.004]), outcomes)
    return abuse_load.Load(stretches, scrapes, Scrapes(scrapes.moments, {"200": 1}), 10_000, 1)


@pytest.mark.full
def test_the_throughput_that_is_left_is_found() -> None:
    """By rounds: 80 steps of 100 and 160 of 200 are 80 % and beyond the bar; 95 % are within it; a 503 is a complaint."""
    names = (abuse_load.SCRAPED, abuse_load.ELSEWHERE, abuse_load.QUIET, abuse_load.LONG)
    slow = load(dict(zip(names, ([80, 160], [99, 198], [100, 200], [80]), strict=True)), {"200": 9})
    assert abuse_load.kept(slow, abuse_load.SCRAPED) == abuse_load.Kept(*[pytest.approx(80.0)] * 3)
    assert len(abuse_load.complaints(slow)) == 1
    good = load(dict(zip(names, ([95, 190], [99, 198], [100, 200], [95]), strict=True)), {"200": 9})
    assert abuse_load.complaints(good) == []
    assert len(abuse_load.complaints(replace(good, own=Scrapes(good.own.moments, {"200": 9, "503": 1})))) == 1
    rows = abuse_load.table(good)["rows"]
    assert rows[0][:4] == ["scraped", 285, 142.5, "95.0 [95.0, 95.0]"]
    assert rows[0][4:] == [0.9, 0.1, 0.05, 50.0, 4.0, 4.0, 4.0, "yes"]
    assert [row[-1] for row in abuse_load.table(slow)["rows"]] == ["no", "", "", ""]
