"""RoundCosts: what rounds cost that are not sampled, be they followed by hooks or only counted."""

from __future__ import annotations

from collections import deque
from statistics import median

HOOKS_SECONDS = 10e-6
"""What PyTorch takes to call the hooks of a round, which a clock inside them cannot measure; as `make bench` measures it."""

COUNTED_SECONDS = 7e-6
"""What a round costs that is only counted, as `make bench` measures it; a clock around its one hook would cost as much."""

COUNTED_ROUNDS = 255
COUNTING_SECONDS = 0.5
"""Rounds that are only counted in a row, at most."""

STEPS_REMEMBERED = 32
"""Whose durations are known."""

_FLOORS_REMEMBERED = 256
_ROUNDS_REMEMBERED = 1024


class StepTimes(deque[float]):
    """Seconds of the last rounds, in their order."""

    def __init__(self) -> None:
        super().__init__(maxlen=STEPS_REMEMBERED)

    @property
    def typical(self) -> float:
        """The median, since a step that compiles or writes a checkpoint is not typical; above 0."""
        return max(median(self), 1e-9)


class RoundCosts:
    """Learns what rounds cost that are not sampled, in seconds. Belongs to the training thread."""

    def __init__(self) -> None:
        self._floors: deque[float] = deque(maxlen=_FLOORS_REMEMBERED)
        self._counted: tuple[float, float] = (0.0, 0.0)
        """Rounds that were only counted, and what they cost together in seconds; older ones halved."""
        self._recent: tuple[float, float] = (0.0, 0.0)
        """Rounds that were followed and that were only counted, older ones halved."""

    @property
    def timing_interval(self) -> int:
        """Of how many of the last rounds that were not sampled one was followed by hooks."""
        return round(1 / self._followed)

    def followed(self, own: float) -> None:
        """Learns what a round cost that was followed by hooks and not sampled."""
        self._floors.append(own)
        self._note(1, 0)

    def counted(self, rounds: int, own: float) -> None:
        """Learns what rounds cost together that were only counted."""
        before, spent = self._counted
        if before > _ROUNDS_REMEMBERED:
            before, spent = before / 2, spent / 2
        self._counted = before + rounds, spent + own
        self._note(0, rounds)

    def _note(self, followed: int, counted: int) -> None:
        self._recent = self._recent[0] + followed, self._recent[1] + counted
        if sum(self._recent) > _ROUNDS_REMEMBERED:
            self._recent = max(1.0, self._recent[0] / 2), self._recent[1] / 2

    @property
    def _followed(self) -> float:
        """The share of rounds followed by hooks, of the last ones that were not sampled."""
        followed, counted = self._recent
        return max(followed, 1.0) / max(followed + counted, 1.0)

    def rest(self) -> float:
        """What a round costs that is not sampled, be it followed or only counted; the user's calls cost something in each."""
        rounds, spent = self._counted
        counted = spent / rounds if rounds else COUNTED_SECONDS
        return self._followed * self.floor() + (1 - self._followed) * counted

    def more(self) -> float:
        """What a sampled round costs more than others, in addition to the sample: it is one that is followed."""
        return self.floor() - self.rest()

    def floor(self) -> float:
        """What a round costs that is followed and not sampled; 0 while there was none.

        The mean over many rounds, without the most expensive one. On a shared machine a few rounds are interrupted within a
        hook, and the interruption takes a hundred times as long as the hook; steps are interrupted as often, but by a small
        share of their duration.
        """
        if len(self._floors) < 2:
            return sum(self._floors)
        return (sum(self._floors) - max(self._floors)) / (len(self._floors) - 1)
