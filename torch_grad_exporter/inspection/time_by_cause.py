"""TimeByCause: where the time since the start of the exporter went.

It is derived from the ends of steps, which are recorded anyway, and from what interrupts the training. The rest of the time from
one step to the next is that of the step, unless it took much longer than usual. All causes together are the time since the start,
without the time since the last step while it may still be that of any cause.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise, product, repeat
from statistics import fmean, median

from torch_grad_exporter.capture.interruptions import CHECKPOINT, COMPILING, EVALUATION, Interruption, Interruptions
from torch_grad_exporter.capture.progress import DATA, OUTSIDE, PHASES, StepClock

STARTING, STEP, STALLED, RECOMPUTED, OTHER = "starting", "step", "stalled", "recomputed", "other"
CAUSES = (STARTING, COMPILING, DATA, STEP, EVALUATION, CHECKPOINT, STALLED, RECOMPUTED, OTHER)

# From one step to the next, beyond `SLOW` times the slower ones of the last `STEPS` steps, and of these seconds at least.
PAUSE_SECONDS, STALL_SECONDS, SLOW, STEPS = 1.0, 10.0, 5.0, 128

# The share of the last steps that is usual: a pause that comes seldom is one each time, and slower steps are soon usual.
USUAL = 0.9

# Between two looks at the phases of followed rounds.
LOOK_SECONDS = 0.5

# Of training: then what phases took before counts half.
PHASE_SECONDS = 60.0


class TimeByCause:
    """Adds up the time by cause. `take` belongs to the thread that drains, the rest to any.

    `steps`: how many there were; `recomputed_to`: number of the last step that an earlier process has computed, None if unknown.
    """

    def __init__(self, clock: StepClock, interruptions: Interruptions) -> None:
        self._clock, self._interruptions = clock, interruptions
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._at = interruptions.started  # up to which all is counted: the end of the last step
        self.steps = 0
        self._recent = deque[float](maxlen=STEPS)
        self._seen = deque[bool](maxlen=STEPS)  # whether an evaluation was seen before each of the last steps
        self._shown, self._moved = dict.fromkeys(CAUSES, 0.0), dict.fromkeys(CAUSES, 0.0)
        self._phases = dict.fromkeys(PHASES, 0.0)  # at the last look
        self._data, self._followed = 0.0, 0.0  # seconds in followed rounds, of which those for data
        self._look_at = 0.0  # when the phases are looked at again
        self._explained = 0.0  # seconds since the last look that are those of no step
        self.recomputed_to: int | None = None
        self._over_at = math.inf

    # The worker

    def take(self, moments: Sequence[float]) -> None:
        """Count the time until the ends of further steps."""
        if not moments:
            return
        ended, seen = self._interruptions.until(moments[-1])
        with self._lock:
            if moments[-1] >= self._look_at:
                self._look_at_phases()
                self._look_at = moments[-1] + LOOK_SECONDS
            seconds = [after - before for before, after in pairwise((self._at, *moments))]
            usual = max(seconds) <= PAUSE_SECONDS or max(seconds) <= self._pause(PAUSE_SECONDS)
            if not ended and not seen and self.steps and usual:
                self._count_steps(moments[-1] - self._at, len(moments))
                self._recent.extend(seconds)
                self._seen.extend(repeat(False, min(len(seconds), STEPS)))
                self._at = moments[-1]
                return
            for moment in moments:
                here = [each for each in ended if self._at <= each.start < moment]
                self._until(moment, here, seen=any(self._at <= at < moment for at in seen))

    def _until(self, moment: float, interruptions: list[Interruption], *, seen: bool) -> None:
        """Count the time until the end of one step."""
        usual, rest = self._usual(), moment - self._at
        for each in interruptions:
            seconds = min(each.end, moment) - each.start
            if each.end > moment:  # the step has ended it, and took its own time before
                seconds = max(0.0, seconds - usual)
            self._add(each.cause, seconds)
            rest -= seconds
        self._at = moment
        if not self.steps:
            self.steps = 1
            self._add(STARTING, rest)
            return
        cause = self._cause(rest, seen=seen)
        self._seen.append(seen)
        beyond = 0.0 if cause is None else max(0.0, rest - usual)
        if cause is not None:
            self._add(cause, beyond)
        self._count_steps(rest - beyond, 1)
        self._recent.append(rest - beyond if cause == EVALUATION else rest)  # a stall may be the first of slower steps

    def _cause(self, rest: float, *, seen: bool) -> str | None:
        """Return what explains that a step took so long, None if it is usual."""
        # Forwards in evaluation mode in most rounds are part of training: of frozen statistics, or of a teacher.
        if seen and self._recent and 2 * sum(self._seen) <= len(self._seen):
            return EVALUATION
        if rest > self._pause(STALL_SECONDS):
            return STALLED
        return OTHER if self._recent and rest > self._pause(PAUSE_SECONDS) else None

    def _pause(self, at_least: float) -> float:
        """Return the seconds beyond which a step is not usual; before there are any, the start stands for one."""
        slow = sorted(self._recent)[int(USUAL * len(self._recent))] if self._recent else self._seconds[STARTING]
        return max(at_least, SLOW * slow)

    def _usual(self) -> float:
        return median(self._recent) if self._recent else 0.0

    def _add(self, cause: str, seconds: float) -> None:
        self._seconds[cause] += seconds
        self._explained += seconds

    def _count_steps(self, seconds: float, steps: int) -> None:
        """Count the usual time of steps: as recomputed, or by the share of the data in the rounds that were followed."""
        self.steps += steps
        if self.recomputed_to is not None:
            # The number of rounds, or where several optimizers step in turn, that of the one that took the most.
            number = min(self._clock.number, self.steps + (self._clock.earlier or 0))
            again = seconds * max(0, steps - max(0, number - self.recomputed_to)) / steps
            self._seconds[RECOMPUTED] += again
            seconds -= again
        data = seconds * self._data / self._followed if self._followed else 0.0
        self._seconds[DATA] += data
        self._seconds[STEP] += seconds - data

    def _look_at_phases(self) -> None:
        """Take what was added to the phases of followed rounds; of the time between them without what else explains it."""
        seconds = self._clock.phases.seconds
        new = {phase: seconds[phase] - self._phases[phase] for phase in seconds}
        if any(new.values()):
            self._phases = dict(seconds)
            new[OUTSIDE] = max(0.0, new[OUTSIDE] - self._explained)
            self._explained = 0.0
            if self._followed > PHASE_SECONDS:
                self._data, self._followed = self._data / 2, self._followed / 2
            self._data += new[DATA]
            self._followed += sum(new.values())

    # Readers

    @property
    def mean_step(self) -> float | None:
        """The mean duration of the last steps in seconds, None if it is not known."""
        with self._lock:
            most = self._pause(STALL_SECONDS)
            return fmean(each for each in self._recent if each <= most) if self._recent else None

    def seconds(self, *, over: bool) -> dict[str, float]:
        """Return the seconds by cause until now, without causes of which nothing is known. `over`: the run has ended.

        None ever falls: what was shown as one cause stays that, though what comes later explains it by another.
        """
        ended, seen = self._interruptions.since_last_step()
        now = self._interruptions.clock()
        with self._lock:
            if over:  # the end is when that was asked for first
                now = self._over_at = min(self._over_at, now)
            seconds, rest, usual = dict(self._seconds), max(0.0, now - self._at), self._usual()
            for each in ended:
                if each.start >= self._at:
                    # A step may end the one that goes on, and take its usual time; see `_until`.
                    held = 0.0 if each.end != math.inf or over or each.cause == COMPILING else usual
                    passed = min(each.end, now) - each.start
                    seconds[each.cause] += max(0.0, passed - held)
                    rest -= passed
            if not self.steps:
                seconds[STARTING] += rest
            elif over:
                seconds[OTHER] += rest
            elif (cause := self._cause(rest, seen=seen)) is not None and cause != OTHER:
                seconds[cause] += max(0.0, rest - usual)
            self._keep_shown(seconds)
            if DATA not in self._clock.phases.seen:
                del seconds[DATA]
            if self.recomputed_to is None:
                del seconds[RECOMPUTED]
        return seconds

    def _keep_shown(self, seconds: dict[str, float]) -> None:
        """Raise what would fall to what was shown, and lower for ever what has grown instead."""
        for cause in CAUSES:
            seconds[cause] += self._moved[cause]
        for cause, other in product(CAUSES, (OTHER, EVALUATION, STEP, *CAUSES)):
            moved = min(self._shown[cause] - seconds[cause], seconds[other] - self._shown[other])
            if moved > 0:
                for each, added in ((cause, moved), (other, -moved)):
                    self._moved[each] += added
                    seconds[each] += added
        for cause in CAUSES:
            self._shown[cause] = seconds[cause] = max(self._shown[cause], seconds[cause])
