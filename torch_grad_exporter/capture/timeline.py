"""Timeline: what training was busy with from moment to moment, by the host's clock or by a device's events.

A moment of a device is known only later. So the marks of a round are cut off as a `Stretch`, which says when all of them have
been passed, and then the seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)
Moment = TypeVar("Moment")


class Stopwatch(Protocol[Moment]):
    """Whose moments are compared: the host's clock, or `DeviceEvents`."""

    def now(self) -> Moment | None:
        """The present moment; `None` if it cannot be had."""

    def passed(self, moments: Sequence[Moment]) -> bool:
        """Whether the times of all of them are known."""

    def between(self, moments: Sequence[Moment]) -> list[float] | None:
        """The seconds from each to the next, once all times are known; `None` if they cannot be had."""

    def give_back(self, moments: Iterable[Moment]) -> None:
        """These are not needed any more."""


@dataclass(frozen=True, slots=True)
class HostWatch:
    """The host's clock, whose moments are known at once. `clock`: seconds from any origin."""

    clock: Callable[[], float]

    def now(self) -> float:
        """As of `Stopwatch`, as all that follows."""
        return self.clock()

    def passed(self, moments: Sequence[float]) -> bool:  # noqa: ARG002 - as of `Stopwatch`
        """Always."""
        return True

    def between(self, moments: Sequence[float]) -> list[float]:
        """The differences."""
        return [max(0.0, end - begin) for begin, end in itertools.pairwise(moments)]

    def give_back(self, moments: Iterable[float]) -> None:
        """Nothing: a number is no resource."""


Mark = tuple[Key | None, Moment]
"""From this moment on it was this, until the next mark; `None` for nothing that counts."""


class Stretch(Generic[Key, Moment]):
    """Marks that are complete; the last one is an end."""

    def __init__(self, watch: Stopwatch[Moment], marks: list[Mark[Key, Moment]]) -> None:
        self._watch = watch
        self._keys = [key for key, _ in marks]
        self._moments = [moment for _, moment in marks]

    def passed(self) -> bool:
        """Whether all of its times are known."""
        return self._watch.passed(self._moments)

    def seconds(self) -> dict[Key, float] | None:
        """How long each of them was, in all, once `passed`; those that were not are not there. `None` if that cannot be had."""
        found: dict[Key, float] = {}
        between = self._watch.between(self._moments)
        if between is None:
            return None
        for key, seconds in zip(self._keys, between, strict=False):
            if key is not None:
                found[key] = found.get(key, 0.0) + seconds
        return found

    def release(self) -> None:
        """Gives all moments back; idempotent."""
        moments, self._moments = self._moments, []
        self._watch.give_back(moments)


class Timeline(Generic[Key, Moment]):
    """The marks since the last cut. Where one cannot be made, the stretch that it belongs to is lost as a whole."""

    def __init__(self, watch: Stopwatch[Moment]) -> None:
        self._watch = watch
        self._marks: list[Mark[Key, Moment]] = []
        self._before: Mark[Key, Moment] | None = None
        """The end of what `go_on` continues, until the next mark."""
        self._lost = False

    def enter(self, key: Key | None) -> None:
        """From now on it is this."""
        self._forget_end()
        if self._lost:
            return
        moment = self._watch.now()
        if moment is None:
            self.lose()
        else:
            self._marks.append((key, moment))

    def go_on(self, key: Key) -> None:
        """As `enter`; but if it was this until the last mark, and nothing since, what was in between belongs to it as well."""
        marks = self._marks
        if len(marks) > 1 and marks[-1][0] is None and marks[-2][0] == key:
            self._forget_end()
            self._before = marks.pop()
        else:
            self.enter(key)

    def again(self) -> None:
        """What it is now begins only now: from the last `enter` or `go_on` up to here it was nothing that counts."""
        if not self._marks or self._marks[-1][0] is None:
            return
        key, before = self._marks[-1][0], self._before
        if before is not None:
            self._before = None
            self._marks.append(before)
        else:
            self._watch.give_back([self._marks.pop()[1]])
        self.enter(key)

    def forget(self) -> None:
        """What it is now counts for nothing, from the last `enter` or `go_on`: how long it was is not known."""
        before, self._before = self._before, None
        if before is not None:
            self._marks.append(before)
        elif self._marks:
            self._marks[-1] = None, self._marks[-1][1]

    @property
    def current(self) -> Key | None:
        """What it is now."""
        return self._marks[-1][0] if self._marks else None

    def cut(self) -> Stretch[Key, Moment] | None:
        """Takes all marks since the last cut, up to now; `None` if they are lost."""
        self.enter(None)
        marks, self._marks = self._marks, []
        lost, self._lost = self._lost, False
        return None if lost else Stretch(self._watch, marks)

    def lose(self) -> None:
        """Gives up the marks since the last cut, and those until the next one."""
        self.restart()
        self._lost = True

    def restart(self) -> None:
        """Forgets the marks since the last cut: what comes begins anew."""
        self._forget_end()
        marks, self._marks, self._lost = self._marks, [], False
        self._watch.give_back(moment for _, moment in marks)

    def _forget_end(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            self._watch.give_back([before[1]])
