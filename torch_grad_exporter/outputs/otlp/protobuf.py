"""Protobuf's wire format, as much of it as a message of metrics needs.

A field is its number and type, then a varint, eight bytes, or a length and so many bytes; a message is its fields one after the
other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache


@lru_cache(4096)
def varint(number: int) -> bytes:
    """A whole number from 0 on, seven bits to a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


def packed(numbers: Sequence[int]) -> bytes:
    """Whole numbers from 0 on, one after the other."""
    return bytes(numbers) if max(numbers, default=0) <= 0x7F else b"".join(map(varint, numbers))


def zigzag(number: int) -> int:
    """A whole number of either sign as one from 0 on, as the types `sint32` and `sint64` are sent."""
    return 2 * number if number >= 0 else -2 * number - 1


def opening(field: int, size: int) -> bytes:
    """What stands before so many bytes of a field that is a message, a text or packed numbers."""
    return varint(field << 3 | 2) + varint(size)


def delimited(field: int, content: bytes) -> bytes:
    """A field that is a message, a text or packed numbers."""
    return opening(field, len(content)) + content


def text(field: int, content: str) -> bytes:
    """A field that is a text; what is no valid Unicode becomes `?`. An empty one is left out, as it is the default."""
    return delimited(field, content.encode("utf-8", "replace")) if content else b""


def integer(field: int, value: int) -> bytes:
    """A field that is an enumeration, a truth value or a whole number from 0 on."""
    return varint(field << 3) + varint(value)


def fixed(field: int, value: bytes = bytes(8)) -> bytes:
    """A field of eight bytes: a float, or a number of fixed length."""
    return varint(field << 3 | 1) + value


def attribute(field: int, key: str, value: object) -> bytes:
    """An OpenTelemetry `KeyValue`, also of an empty text: text, numbers, truth values and sequences of them."""
    return delimited(field, text(1, key) + delimited(2, _any_value(value)))


def _any_value(value: object) -> bytes:
    match value:
        case bool():
            return integer(2, value)
        case int():
            return integer(3, value % (1 << 64))
        case float():
            return fixed(4, struct.pack("<d", value))
        case list() | tuple():
            return delimited(5, b"".join(delimited(1, _any_value(one)) for one in value))
        case _:
            return delimited(1, str(value).encode("utf-8", "replace"))
