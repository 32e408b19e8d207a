"""StepClock: what time it is in the training loop. Steps, phases, samples, activity.

All of it belongs to the training thread and costs a few additions per call. The numbers only grow, and a
scrape reads them as they are; what needs a histogram goes through the mailbox.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch_grad_exporter.transfer.events import Mailbox, Stepped
from torch_grad_exporter.transfer.tracing import TraceIds

PHASES = ("outside", "data", "forward", "backward", "optimizer")
OUTSIDE, DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted up to one moment. `steps`: by optimizer."""

    steps: dict[int, int]
    backward_passes: int
    samples: int


@dataclass(frozen=True, slots=True)
class _Pause:
    """Rounds that are only counted, since `before`: `moments` of the steps of `optimizer`, and an item for each backward.

    One object that is set and taken away as a whole, so that nobody on another thread sees a round twice or not at all.
    """

    before: Counts
    optimizer: int
    moments: list[float]
    backwards: list[object]
    samples: float
    """Samples to a backward."""
    offset: float
    """What Unix time was ahead of the moments' clock when it began."""

    def counts(self) -> Counts:
        """All up to now."""
        before, backwards = self.before, len(self.backwards)
        return Counts(
            {**before.steps, self.optimizer: before.steps[self.optimizer] + len(self.moments)},
            before.backward_passes + backwards,
            before.samples + round(backwards * self.samples),
        )


@dataclass(slots=True)
class StepClock:
    """Counts and times. `clock`: seconds from any origin, for durations; `now`: Unix time."""

    mailbox: Mailbox
    clock: Callable[[], float] = time.perf_counter
    now: Callable[[], float] = time.time
    backward_passes: int = 0
    skipped: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    samples: int = 0
    samples_known: bool = True
    evaluating: bool = False
    started: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    phases_seen: set[str] = field(default_factory=set)
    own_seconds: float = 0.0
    """What the exporter took on this thread since the last round."""
    device_seconds: float = 0.0
    """What it took on devices, as far as that became known since the last round."""
    gradient_waits: int | None = None
    """Sampled rounds in which the wait for other ranks' gradients was timed; `None` where there are no other ranks."""
    gradient_wait_seconds: float = 0.0
    _last_step: float | None = None
    _last_activity: float | None = None
    _pause: _Pause | None = None
    _owed: dict[int, int] = field(default_factory=dict)
    _phase: str = OUTSIDE
    _phase_since: float = 0.0
    _round_at: float | None = None

    def __post_init__(self) -> None:
        self.started = self.now()
        self._phase_since = self.clock()

    def switch(self, phase: str) -> None:
        """Enters a phase, unless an optimizer is stepping: with a closure everything is `optimizer`."""
        if self._phase != OPTIMIZER:
            self._enter(phase)

    @property
    def stepping(self) -> bool:
        """Whether an optimizer is in its step, or raised in it."""
        return self._phase == OPTIMIZER

    def leave_step(self) -> None:
        """The step that had begun will not end: it raised."""
        self._enter(OUTSIDE)

    def _enter(self, phase: str) -> None:
        if self._pause is not None:
            return
        moment = self.clock()
        self.phase_seconds[self._phase] += moment - self._phase_since
        self._phase, self._phase_since = phase, moment
        self.phases_seen.add(phase)

    def active(self) -> None:
        """Notes that the loop is alive."""
        self._last_activity = self.now()

    def counts(self) -> Counts:
        """What was counted so far, also of rounds that are only counted. From any thread."""
        while True:
            pause = self._pause
            found = Counts(self.steps, self.backward_passes, self.samples) if pause is None else pause.counts()
            if self._pause is pause:  # else it ended meanwhile, and what it had counted may be gone
                return found

    @property
    def last_step(self) -> float | None:
        """When the last step was over, as Unix time; `None` before the first."""
        pause = self._pause
        return self._last_step if pause is None or not pause.moments else pause.moments[-1] + pause.offset

    @property
    def last_activity(self) -> float | None:
        """When the loop last showed that it is alive, as Unix time; `None` before it ever did."""
        times = [moment for moment in (self.last_step, self._last_activity) if moment is not None]
        return max(times, default=None)

    @property
    def last_moment(self) -> float:
        """When the last step was over, in seconds of `clock`; 0 before the first."""
        pause = self._pause
        return self._round_at or 0.0 if pause is None or not pause.moments else pause.moments[-1]

    def step_began(self) -> None:
        """An optimizer's step begins."""
        self._enter(OPTIMIZER)

    def step_done(self, optimizer: int) -> None:
        """Counts an optimizer's step."""
        # A new dict instead of a new key: a scrape may be reading the old one.
        if self._owed.get(optimizer):
            self._owed[optimizer] -= 1
        else:
            self.steps = {**self.steps, optimizer: self.steps.get(optimizer, 0) + 1}

    def step_undone(self, optimizer: int) -> None:
        """A step that was counted did not take place: the next one makes up for it, since a counter must not fall."""
        self._owed[optimizer] = self._owed.get(optimizer, 0) + 1

    def pause(self, optimizer: int, moments: list[float], backwards: list[object], samples: float) -> None:
        """From now on, right after a round, rounds are only counted, and phases are not timed.

        `moments`: when steps of `optimizer` were over. `backwards`: has an item for each. `samples`: to a backward.
        """
        before = Counts(self.steps, self.backward_passes, self.samples)
        self._pause = _Pause(before, optimizer, moments, backwards, samples, self.now() - self.clock())

    def resume(self) -> list[float]:
        """Ends `pause`; returns the seconds from step to step of the rounds that were only counted."""
        pause = self._pause
        moments = [] if pause is None else pause.moments
        counts = self.counts()
        self._last_step, self._last_activity = self.last_step, self.last_activity
        self.steps, self.backward_passes, self.samples = counts.steps, counts.backward_passes, counts.samples
        self._pause = None
        self._phase, self._phase_since = OUTSIDE, self.clock()
        if not moments or self._round_at is None:
            return []
        times, self._round_at = [self._round_at, *moments], moments[-1]
        return [after - before for before, after in itertools.pairwise(times)]

    def step_ended(self, *, first_of_round: bool, trace: TraceIds | None = None) -> float | None:
        """Back outside of the optimizer; returns the seconds since the round before, for a round's first step only.

        `trace`: the one that is active.
        """
        self._enter(OUTSIDE)
        now = self._last_step = self._last_activity = self.now()
        self.evaluating = False
        if not first_of_round:
            return None
        moment = self.clock()
        seconds = None if self._round_at is None else moment - self._round_at
        self._round_at = moment
        self.mailbox.append(Stepped(seconds, self.own_seconds + self.device_seconds, now, trace))
        self.own_seconds = self.device_seconds = 0.0
        return seconds
