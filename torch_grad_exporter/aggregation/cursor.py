"""Cursors: each consumer reads what is new since its own last read, and takes nothing from the others.

A producer keeps what has come since the last read by any consumer. When one consumer reads, that part is first merged into the
summaries of all the others. Each has one summary (a largest value, a mean), however long it does not read. So a consumer that
has not read for days gets the largest of all these days, and memory grows with the number of cursors, never with time. A cursor
that its consumer has dropped is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Cursor:
    """How far one consumer has read. Belongs to that consumer; the producers reference it weakly."""

    __slots__ = ("__weakref__",)


class Unread(Generic[T]):
    """Of one producer, the summary of what each cursor has not read yet.

    `empty` makes a summary of nothing, `merge` one of two without changing either. For one thread at a time.
    """

    __slots__ = ("_by_cursor", "_empty", "_merge")

    def __init__(self, empty: Callable[[], T], merge: Callable[[T, T], T]) -> None:
        self._empty = empty
        self._merge = merge
        self._by_cursor: WeakKeyDictionary[Cursor, T] = WeakKeyDictionary()

    def follow(self, cursor: Cursor, latest: T) -> None:
        """Begins with a cursor: what comes from now on is new to it. `latest`: what has come since the last `follow` or `take`."""
        self._hand_on(latest)
        self._by_cursor[cursor] = self._empty()

    def take(self, cursor: Cursor, latest: T) -> T:
        """What is new to a cursor. Raises `KeyError` for one that does not follow."""
        self._hand_on(latest)
        found, self._by_cursor[cursor] = self._by_cursor[cursor], self._empty()
        return found

    def summaries(self) -> Iterable[T]:
        """What each cursor has not read, but for what has come since the last `follow` or `take`."""
        return list(self._by_cursor.values())

    def _hand_on(self, latest: T) -> None:
        for cursor, unread in list(self._by_cursor.items()):
            self._by_cursor[cursor] = self._merge(unread, latest)
