"""StepClock: counts and times what happens on the training thread; a scrape reads it as it is, from any thread.

The clock receives events and changes only itself. What needs a histogram goes to the host side through the mailbox.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_grad_exporter.capture.device_events import EventPool
from torch_grad_exporter.capture.phases import OPTIMIZER, OUTSIDE, PhaseTimes
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.store.records import PLACED, Counting, StepsTaken, TraceIds


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted up to one moment. `steps`: by optimizer; `examples`: training examples that went into forwards."""

    steps: dict[int, int]
    backward_passes: int
    examples: int


@dataclass(frozen=True, slots=True)
class _CountedRounds:
    """Rounds that are only counted until `StepClock.commit`, see `StepClock.leave_counting_to`.

    One object that is set and taken away as a whole, so that another thread sees no round twice and misses none.
    `stretch`: how many times such rounds have begun; `before`: what was counted then; `round_at`: the end of the step before them,
    in seconds of the clock, `None` if there was none; `offset`: what Unix time was ahead of the clock then.
    """

    stretch: int
    before: Counts
    round_at: float | None
    offset: float
    optimizer: int
    moments: Sequence[float]
    backwards: Sequence[object]
    examples: float

    def counts(self) -> Counts:
        """All counts up to now."""
        before, backwards = self.before, len(self.backwards)
        return Counts(
            {**before.steps, self.optimizer: before.steps[self.optimizer] + len(self.moments)},
            before.backward_passes + backwards,
            before.examples + round(backwards * self.examples),
        )

    def durations(self) -> tuple[float, ...]:
        """The seconds from step to step up to now, none where the step before is not known."""
        if self.round_at is None:
            return ()
        return tuple(after - before for before, after in itertools.pairwise((self.round_at, *self.moments)))


class StepClock:
    """Counts and times. `clock`: seconds from any origin, for durations; `now`: Unix time. Belongs to the training thread.

    `events`: of devices, which time the phases there.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
        events: EventPool | None = None,
    ) -> None:
        self.clock = clock
        self.now = now
        self.started = now()
        self.phases = PhaseTimes(clock, events)
        self.skipped = 0
        self.evaluating = False
        self.examples_known = True
        self.forward_came = False
        """Whether there was a training forward, outside of a backward, since the last step."""
        self.own_seconds = 0.0
        """What the exporter took on this thread since the last round."""
        self.device_seconds = 0.0
        """What it took on devices, as far as that became known since the last round."""
        self._mailbox = mailbox
        # Apart, so that what one thread counts never writes back what another has counted.
        self.steps: dict[int, int] = {}
        """Steps by optimizer, without rounds that are not committed; so are the next two."""
        self.backward_passes = 0
        self.examples = 0
        self.earlier: int | None = None
        """Steps of the training before those that are counted here, as the loop told; `None` where it told none."""
        self._owed: dict[int, int] = {}
        self._uncommitted: _CountedRounds | None = None
        self._stretch = 0
        self._placed = 0
        """Of how many rounds the step was told."""
        self._round_at: float | None = None
        self._last_step: float | None = None
        self._last_activity: float | None = None

    # Phases

    def switch(self, phase: str, moment: float | None = None) -> None:
        """Enters a phase, unless an optimizer is stepping: with a closure everything is `optimizer`.

        `moment`: what the clock has just said.
        """
        if self.phases.current != OPTIMIZER and self._uncommitted is None:
            self.phases.enter(phase, moment)

    @property
    def stepping(self) -> bool:
        """Whether an optimizer is in its step, or raised in it."""
        return self.phases.current == OPTIMIZER

    def step_began(self, moment: float | None = None) -> None:
        """An optimizer's step begins. `moment`: as of `switch`."""
        self._enter(OPTIMIZER, moment)

    def leave_step(self) -> None:
        """The step that had begun will not end: it raised."""
        self._enter(OUTSIDE)

    def step_over(self, moment: float, *, first_of_round: bool) -> None:
        """An optimizer's step was over at this moment of the clock; `step_ended` is to follow."""
        self._enter(OUTSIDE, moment)
        if first_of_round and self._uncommitted is None:
            self.phases.round_over()

    def _enter(self, phase: str, moment: float | None = None) -> None:
        if self._uncommitted is None:
            self.phases.enter(phase, moment)

    # Counts

    def step_done(self, optimizer: int, times: int = 1) -> None:
        """Counts steps of an optimizer."""
        owed = min(self._owed.get(optimizer, 0), times) if self._owed else 0
        if owed:
            self._owed[optimizer] -= owed
        if times > owed:
            # A new dict instead of a new key: a scrape may be reading the old one.
            self.steps = {**self.steps, optimizer: self.steps.get(optimizer, 0) + times - owed}

    def step_undone(self, optimizer: int) -> None:
        """A step that was counted did not take place: the next one makes up for it, since a counter must not fall."""
        self._owed[optimizer] = self._owed.get(optimizer, 0) + 1

    def steps_skipped(self, steps: int) -> None:
        """So many rounds ended without a step."""
        self.skipped += steps

    def backwards_passed(self, backwards: int) -> None:
        """So many backwards are over."""
        self.backward_passes += backwards

    def examples_came(self, examples: int) -> None:
        """So many training examples go into a forward."""
        self.examples += examples

    def examples_unknown(self) -> None:
        """How many training examples there are cannot be seen, or the user reports it."""
        self.examples_known = False

    def resume(self, step: int) -> None:
        """The training is after its step of this number now, from which the numbers of steps go on."""
        self.earlier = step - max(self.counts().steps.values(), default=0)

    def numbers(self, steps: dict[int, int]) -> dict[int, int]:
        """The number that the last step of each optimizer has in the whole training, of what was counted here."""
        return {optimizer: count + (self.earlier or 0) for optimizer, count in steps.items()}

    @property
    def number(self) -> int:
        """The number of the last step of the optimizer that took the most, in the whole training. From any thread."""
        uncommitted = self._uncommitted
        steps = self.steps if uncommitted is None else uncommitted.counts().steps
        return max(steps.values(), default=0) + (self.earlier or 0)

    def counts(self) -> Counts:
        """What was counted so far, with rounds that are not committed. From any thread."""
        while True:
            uncommitted = self._uncommitted
            found = self._committed() if uncommitted is None else uncommitted.counts()
            if self._uncommitted is uncommitted:  # else they were committed meanwhile
                return found

    def _committed(self) -> Counts:
        return Counts(self.steps, self.backward_passes, self.examples)

    # Times

    def active(self, *, evaluating: bool) -> None:
        """The loop is alive: a forward begins."""
        self._last_activity = self.now()
        self.evaluating = evaluating

    def spent(self, seconds: float) -> None:
        """The exporter has taken so long on the training thread."""
        self.own_seconds += seconds
        self.phases.own += seconds

    def spent_on_devices(self, seconds: float) -> None:
        """The exporter has taken so long on devices."""
        self.device_seconds += seconds

    @property
    def last_step(self) -> float | None:
        """When the last step was over, as Unix time; `None` before the first."""
        uncommitted = self._uncommitted
        return uncommitted.moments[-1] + uncommitted.offset if uncommitted is not None and uncommitted.moments else self._last_step

    @property
    def last_activity(self) -> float | None:
        """When the loop last showed that it is alive, as Unix time; `None` before it ever did."""
        times = [moment for moment in (self.last_step, self._last_activity) if moment is not None]
        return max(times, default=None)

    @property
    def last_moment(self) -> float:
        """When the last step was over, in seconds of `clock`; 0 before the first."""
        uncommitted = self._uncommitted
        return uncommitted.moments[-1] if uncommitted is not None and uncommitted.moments else self._round_at or 0.0

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
        step = None
        if self._placed <= PLACED:  # the first one has no duration
            self._placed, step = self._placed + 1, self.number
        durations = () if seconds is None else (seconds,)
        self._mailbox.append(StepsTaken(durations, self.own_seconds + self.device_seconds, now, trace, step))
        self.own_seconds = self.device_seconds = 0.0
        return seconds

    # Rounds that something else counts

    def leave_counting_to(self, optimizer: int, moments: Sequence[float], backwards: Sequence[object], *, examples: float) -> None:
        """From now on, right after a round, something else counts, and phases are not timed.

        It notes in `moments` when each step of this optimizer is over, in seconds of the clock, and in `backwards` an item for each
        backward, which is taken for so many `examples`.
        """
        offset, self._stretch = self.now() - self.clock(), self._stretch + 1
        before, at = self._committed(), self._round_at
        self._uncommitted = _CountedRounds(self._stretch, before, at, offset, optimizer, moments, backwards, examples)

    def counting(self) -> Counting | None:
        """The rounds that are to be handed over together, as far as they have come; `None` without any. From any thread."""
        uncommitted = self._uncommitted
        return None if uncommitted is None else Counting(uncommitted.durations(), uncommitted.stretch)

    def commit(self, own_to_a_round: float) -> tuple[tuple[float, ...], float]:
        """Takes over what was counted; returns the seconds from step to step of those rounds, and what the exporter took in all.

        That is so much to each round, and what it took besides.
        """
        uncommitted = self._uncommitted
        durations = () if uncommitted is None else uncommitted.durations()
        own = 0.0
        if uncommitted is not None and durations:
            own, self.own_seconds = self.own_seconds + len(durations) * own_to_a_round, 0.0
            at, step = uncommitted.moments[-1] + uncommitted.offset, None
            if self._placed <= PLACED:
                self._placed, step = self._placed + len(durations), self.number
            # Before `counting` says nothing of them any more: who asks it and then takes what was posted misses none.
            self._mailbox.append(StepsTaken(durations, own, at, step=step, stretch=uncommitted.stretch))
            self._round_at = uncommitted.moments[-1]
        self._last_step, self._last_activity = self.last_step, self.last_activity
        counts = self.counts()
        self.steps, self.backward_passes, self.examples = counts.steps, counts.backward_passes, counts.examples
        self._uncommitted = None
        self.phases.restart()
        return durations, own
