"""Requests that are not quite right: a corpus of valid ones, and what chance makes of them. The same seed gives the same bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

_FIELDS = (
    b"Host: trainer:9100\r\nUser-Agent: Prometheus/3.5.0\r\nAccept: application/openmetrics-text;version=1.0.0;q=0.5,"
    b"text/plain;version=0.0.4;q=0.3,*/*;q=0.1\r\nAccept-Encoding: gzip\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n"
)

CORPUS = (
    b"GET /metrics HTTP/1.1\r\n" + _FIELDS + b"\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /metrics HTTP/1.0\n\n",
    b"GET /metrics?name[]=a&name[]=b#part HTTP/1.1\r\nHost: t\r\nAccept: */*;q=0.000\r\n\r\n",
    b"GET http://trainer:9100/metrics HTTP/1.1\r\nHost: trainer:9100\r\n\r\n",
    b"HEAD /metrics HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: t\r\nConnection: keep-alive\r\n\r\n",
    b'GET / HTTP/1.1\r\nHost: [::1]:9100\r\nCookie: a=b; c=d\r\nRange: bytes=0-1\r\nIf-None-Match: "x"\r\n\r\n',
    b"GET /%6d%65trics/../metrics HTTP/1.1\r\nHost: t\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: t\r\nContent-Length: 11\r\nExpect: 100-continue\r\n\r\nhello=world",
    b"PUT / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n",
    b"CONNECT t:9100 HTTP/1.1\r\nHost: t:9100\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: t\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: t\r\nAuthorization: Basic dXNlcjpwYXNzd29yZA==\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(range(32)) + b"\x00\x00\x02\x13\x01\x01\x00\x00\x99",
)  # fmt: skip

ODD = (
    b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\t", b" ", b":", b",", b";", b"=", b"/", b"//", b"?", b"#", b"%", b"%00", b"%zz",
    b"..", b"\x7f", b"\x80", b"\xff", b"\xc0\xae", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\x16", b"\x85", b"\xa0", b"\x1b[2J", b"%s%n",
    b"HTTP/1.1", b"HTTP/9.9", b"http://", b"q=", b"q=nan", b"q=-1", b"q=1e999", b"gzip", b"gzip;q=0", b"*", b"${jndi:x}", b"<a>",
)  # fmt: skip
"""What parsers are known to stumble over."""

NUMBERS = (b"0", b"-1", b"00", b"1e9", b"0x10", b"65536", b"4294967296", b"18446744073709551616", b"9" * 400, b"", b"1.5", b"\xb2")

HEADERS = (
    b"Host",
    b"Accept",
    b"Accept-Encoding",
    b"Content-Length",
    b"Transfer-Encoding",
    b"Connection",
    b"Expect",
    b"",
    b"X" * 300,
)

_NUMBER = re.compile(rb"\d+")

Mutation = Callable[[Random, bytes], bytes]


def _flipped(chance: Random, sent: bytes) -> bytes:
    made = bytearray(sent)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if made:
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    return bytes(made)


def _inserted(chance: Random, sent: bytes) -> bytes:
    at = chance.randint(0, len(sent))
    what = chance.choice(ODD) if chance.random() < 0.8 else chance.randbytes(chance.randint(1, 40))
    return sent[:at] + what * chance.choice((1, 1, 1, 2, 50)) + sent[at:]


def _cut(chance: Random, sent: bytes) -> bytes:
    return sent[: chance.randint(0, len(sent))]


def _left_out(chance: Random, sent: bytes) -> bytes:
    first, last = sorted(chance.randint(0, len(sent)) for _ in range(2))
    return sent[:first] + sent[min(last, first + 20) :]


def _spliced(chance: Random, sent: bytes) -> bytes:
    other = chance.choice(CORPUS)
    return sent[: chance.randint(0, len(sent))] + other[chance.randint(0, len(other)) :]


def _renumbered(chance: Random, sent: bytes) -> bytes:
    places = [found.span() for found in _NUMBER.finditer(sent)]
    if not places:
        return sent
    first, last = chance.choice(places)
    return sent[:first] + chance.choice(NUMBERS) + sent[last:]


def _with_header(chance: Random, sent: bytes) -> bytes:
    line = chance.choice(HEADERS) + chance.choice((b":", b": ", b" : ", b"", b":\t")) + chance.choice((*ODD, *NUMBERS))
    at = sent.find(b"\n") + 1
    return sent[:at] + (line + chance.choice((b"\r\n", b"\n", b"\r\n "))) * chance.choice((1, 2, 2, 100)) + sent[at:]


def _repeated(chance: Random, sent: bytes) -> bytes:
    """A line many times, now and then so often that the head becomes too long."""
    lines = sent.splitlines(keepends=True)
    if not lines:
        return sent
    at = chance.randrange(len(lines))
    return b"".join([*lines[:at], *lines[at : at + 1] * chance.choice((2, 2, 10, 400)), *lines[at + 1 :]])


def _stretched(chance: Random, sent: bytes) -> bytes:
    """One byte as often as it takes to reach the limits, or to stay just below them."""
    if not sent:
        return sent
    at = chance.randrange(len(sent))
    return sent[:at] + sent[at : at + 1] * chance.choice((100, 4000, 4096, 4097, 16300, 16384, 16385, 40000)) + sent[at:]


def _chunked(chance: Random, sent: bytes) -> bytes:
    size = chance.choice((b"5", b"0", b"ffffffffffffffff", b"-1", b"5;a=b", b""))
    return sent + size + b"\r\nhello\r\n" + chance.choice((b"0\r\n\r\n", b""))


def _pipelined(chance: Random, sent: bytes) -> bytes:
    return sent + b"".join(chance.choices(CORPUS, k=chance.choice((1, 2, 20))))


def _absolute(chance: Random, sent: bytes) -> bytes:
    origin = chance.choice((b"http://t:9100", b"HTTPS://", b"http://[::1", b"//t", b"ftp://t", b"http://t:99999", b"http://\xff"))
    return sent.replace(b" /", b" " + origin + b"/", 1)


def _other_ends(chance: Random, sent: bytes) -> bytes:
    return sent.replace(b"\r\n", chance.choice((b"\n", b"\r", b"\n\r", b"\r\r\n", b"\x0b", b"\xc2\x85")))


def _folded(_chance: Random, sent: bytes) -> bytes:
    return sent.replace(b": ", b":\r\n ", 1)


def _random(chance: Random, _sent: bytes) -> bytes:
    return chance.randbytes(chance.choice((1, 10, 100, 1000, 20000)))


MUTATIONS: tuple[Mutation, ...] = (
    _flipped, _flipped, _inserted, _inserted, _inserted, _cut, _left_out, _spliced, _renumbered, _with_header, _with_header,
    _repeated, _stretched, _chunked, _pipelined, _absolute, _other_ends, _folded,
)  # fmt: skip


def mutated(chance: Random) -> bytes:
    """One request of the corpus after one to five mutations; one in forty is nothing but random bytes."""
    if chance.random() < 0.025:
        return _random(chance, b"")
    made = chance.choice(CORPUS)
    for _ in range(chance.choice((1, 1, 2, 3, 5))):
        made = chance.choice(MUTATIONS)(chance, made)
    return made


def requests(count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield this many mutated requests."""
    chance = Random(seed)  # noqa: S311 - no secret
    return (mutated(chance) for _ in range(count))
