"""StepClock: counts and times what happens on the training thread; a scrape reads it at any moment, from any thread.

The clock receives events and changes only itself. Durations of steps go to the worker through the mailbox.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.cost import HOOKS_SECONDS
from torch_grad_exporter.capture.device_events import EventPool, Stretch, Timeline
from torch_grad_exporter.capture.interruptions import EVALUATION, Interruptions
from torch_grad_exporter.store.records import PLACED, Mailbox, StepsTaken, TraceIds

PHASES = ("outside", "data", "forward", "backward", "optimizer")
OUTSIDE, DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES

# Rounds that a device may be behind, at most; while it is, further ones are not timed.
BEHIND = 64


class PhaseTimes:
    """The seconds of each phase of training. Belongs to the training thread and to that of the backward.

    By the host's clock they are without what the exporter takes, which mostly comes in sampled rounds.

    Args:
        clock: Seconds from any origin.
        events: Those of devices; without them there is the host's clock alone.

    Attributes:
        seconds: By phase.
        seen: The phases that there were.
        current: The present one.
        stepping: Whether that is the optimizer's: one is in its step, or raised in it.
        own: What the exporter has taken so far, in seconds.
        untimed: Rounds that were followed and are in no phase: the device was too far behind, or a graph was being captured.
        paused: Whether no phase is entered, since rounds are only counted.
        device: Where the time passes; None while that is not known, and then like on the CPU.
        by_events: Whether they are the times of a device.
    """

    def __init__(self, clock: Callable[[], float], events: EventPool | None = None) -> None:
        self._clock, self._events = clock, events
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.seen: set[str] = set()
        self.current, self.stepping = OUTSIDE, False
        self.own = 0.0
        self.untimed = 0
        self.paused = False
        self.device: torch.device | None = None
        self.by_events = False
        self._since, self._own_since = clock(), 0.0
        self._on_device: Timeline[str] | None = None
        self._pending: deque[Stretch[str]] = deque()

    @property
    def known(self) -> bool:
        """Whether the time of the phases is known on this kind of device."""
        return self.by_events or self.device is None or self.device.type == "cpu"

    def on(self, device: torch.device) -> None:
        """The parameters are on this device, which times the phases from now on if it was another one before."""
        if device == self.device:
            return
        for stretch in self._pending:
            stretch.release()
        self._pending.clear()
        if self._on_device is not None:
            self._on_device.restart()
        events = None if self._events is None else self._events.of(device)
        self._on_device, self.device = None if events is None else Timeline(events), device
        self.by_events = events is not None
        self.restart(self.current)

    def enter(self, phase: str, moment: float | None = None, *, step_over: bool = False) -> None:
        """The time from now on belongs to this phase, unless an optimizer is stepping: with a closure everything is `optimizer`.

        Args:
            phase: The phase.
            moment: The present time of the clock, if known.
            step_over: Whether an optimizer has stepped, or raised in its step.
        """
        if self.paused or (self.stepping and not step_over):
            return
        self.seen.add(phase)
        self.stepping = phase == OPTIMIZER
        if self._on_device is None:
            moment = self._clock() if moment is None else moment
            self.seconds[self.current] += max(0.0, moment - self._since - (self.own - self._own_since))
            self.current, self._since, self._own_since = phase, moment, self.own
        elif phase != self.current:
            self.current = phase
            self._on_device.enter(phase)

    def restart(self, phase: str = OUTSIDE) -> None:
        """Enter a phase; the time since the last one began belongs to none."""
        self.current, self._since, self._own_since = phase, self._clock(), self.own
        self.stepping = phase == OPTIMIZER
        if self._on_device is not None:
            self._on_device.restart()
            self._on_device.enter(phase)

    def round_over(self) -> None:
        """A round is over: read the times of earlier rounds that the device has passed by now. Its own are read later."""
        if self._on_device is None:
            return
        stretch = self._on_device.cut()
        if stretch is not None and len(self._pending) < BEHIND:
            self._pending.append(stretch)
        else:
            self.untimed += 1
            if stretch is not None:
                stretch.release()
        self._on_device.enter(self.current)
        while self._pending and (seconds := self._pending[0].read()) is not None:
            self.untimed += self._pending.popleft().failed
            for phase, added in seconds.items():
                self.seconds[phase] += added


def main_device(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device with the most parameters, the first of several; None if there are no parameters."""
    most = Counter(parameter.device for parameter in parameters).most_common(1)
    return most[0][0] if most else None


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted up to one moment."""

    steps: dict[int, int]  # by optimizer
    backward_passes: int
    examples: int  # training examples that went into forwards


@dataclass(frozen=True, slots=True)
class _CountedRounds:
    """Rounds that are only counted until `StepClock.commit`, see `StepClock.leave_counting_to`.

    One object that is set and taken away as a whole, so that another thread sees no round twice and misses none.
    """

    before: Counts  # what was counted until they began
    optimizer: int
    steps: StepsTaken
    backwards: Sequence[object]
    examples: float  # to each backward

    def counts(self) -> Counts:
        """Return all counts up to now."""
        before, backwards = self.before, len(self.backwards)
        return Counts(
            {**before.steps, self.optimizer: before.steps[self.optimizer] + len(self.steps.moments)},
            before.backward_passes + backwards,
            before.examples + round(backwards * self.examples),
        )


class StepClock:
    """Counts and times. Belongs to the training thread, but for reading.

    Args:
        mailbox: Where the durations of steps go.
        clock: Seconds from any origin, for durations.
        now: Unix time.
        events: Those of devices, which time the phases there.
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
        self.interruptions = Interruptions(clock)
        self.skipped = 0  # rounds that ended without a step
        self.evaluating = False
        self.examples_known = True  # whether examples can be seen, and the user does not report them
        self.forward_came = False  # whether there was a training forward, outside of a backward, since the last step
        self.own_seconds = 0.0  # of the exporter on this thread since the last round
        self.device_seconds = 0.0  # of the exporter on devices, as far as that became known since the last round
        self._mailbox = mailbox
        # Without rounds that are not committed. Apart, so that what one thread counts never writes back what another has counted.
        self.steps: dict[int, int] = {}
        self.backward_passes = 0
        self.examples = 0
        self.earlier: int | None = None  # steps before those that are counted here, None unless `resume` gave them
        self._owed: dict[int, int] = {}  # by optimizer, steps that were counted and did not take place
        self._uncommitted: _CountedRounds | None = None
        self._placed = 0  # rounds whose step was reported
        self._round_at: float | None = None
        self._last_step: float | None = None
        self._last_activity: float | None = None

    # Counts

    def step_done(self, optimizer: int) -> None:
        """Count a step of an optimizer."""
        if self._owed.get(optimizer):
            self._owed[optimizer] -= 1
        else:
            # A new dict instead of a new key: a scrape may be reading the old one.
            self.steps = {**self.steps, optimizer: self.steps.get(optimizer, 0) + 1}

    def step_undone(self, optimizer: int) -> None:
        """Take back a step that did not take place: the next one is not counted, since a counter must not fall."""
        self._owed[optimizer] = self._owed.get(optimizer, 0) + 1

    def resume(self, step: int) -> None:
        """Take this number as that of the training's last step, from which the numbers of steps go on."""
        self.earlier = step - max(self.counts().steps.values(), default=0)

    @property
    def number(self) -> int:
        """The number of the last step of the optimizer that took the most, in the whole training. From any thread."""
        uncommitted = self._uncommitted
        steps = self.steps if uncommitted is None else uncommitted.counts().steps
        return max(steps.values(), default=0) + (self.earlier or 0)

    def counts(self) -> Counts:
        """Return what was counted so far, with rounds that are not committed. From any thread."""
        while True:
            uncommitted = self._uncommitted
            counts = self._committed() if uncommitted is None else uncommitted.counts()
            if self._uncommitted is uncommitted:  # else they were committed meanwhile
                return counts

    def _committed(self) -> Counts:
        return Counts(self.steps, self.backward_passes, self.examples)

    # Times

    def active(self, *, evaluating: bool) -> None:
        """Note that the loop is alive: a forward begins."""
        self._last_activity = self.now()
        if evaluating:
            self.interruptions.evaluation_seen(self.last_moment)
        self.evaluating = evaluating

    def interrupted(self, cause: str, *, now: bool, here: bool) -> bool:
        """Note that something else than training begins or ends.

        Args:
            cause: What it is.
            now: Whether it begins.
            here: Whether the training waits for it, as it is on its thread.

        Returns:
            Whether it begins, or ends, with this: False if it was reported before and goes on.
        """
        self._last_activity = self.now()
        if cause == EVALUATION:
            self.evaluating = now
        if here and now:
            return self.interruptions.begin(cause, self.last_moment)
        if here:
            self.interruptions.end(cause)
        return True

    @property
    def is_interrupted(self) -> bool:
        """Whether an evaluation, a checkpoint or a compilation goes on that was reported."""
        return self.interruptions.goes_on(self.last_moment)

    def spent(self, start: float) -> float:
        """Add the time since `start`, which the exporter took on the training thread; return it."""
        seconds = self.clock() - start
        self.own_seconds += seconds
        self.phases.own += seconds
        return seconds

    @property
    def _last_counted(self) -> tuple[float, float] | None:
        """The end of the last step that was only counted, in seconds of the clock, and what Unix time is ahead of it."""
        uncommitted = self._uncommitted
        if uncommitted is None or not uncommitted.steps.moments:
            return None
        return uncommitted.steps.moments[-1], uncommitted.steps.offset

    @property
    def last_step(self) -> float | None:
        """When the last step was over, as Unix time; None before the first."""
        counted = self._last_counted
        return self._last_step if counted is None else sum(counted)

    @property
    def last_activity(self) -> float | None:
        """When the loop last showed that it is alive, as Unix time; None before it ever did."""
        times = [moment for moment in (self.last_step, self._last_activity) if moment is not None]
        return max(times, default=None)

    @property
    def last_moment(self) -> float:
        """When the last step was over, in seconds of `clock`; 0 before the first."""
        counted = self._last_counted
        return self._round_at or 0.0 if counted is None else counted[0]

    def step_ended(self, start: float, *, first_of_round: bool, traced: bool, lent: bool = False) -> tuple[float | None, float]:
        """Note the end of a step.

        Args:
            start: When the hook of its end began, in seconds of the clock.
            first_of_round: Whether it is the first step of its round; the others only show that the loop is alive.
            traced: Whether its record is to have the active trace.
            lent: Whether it is one of the first samples.

        Returns:
            The seconds since the round before, if that is known, and what the exporter took on this thread since then.
        """
        self.phases.enter(OUTSIDE, start, step_over=True)
        if first_of_round and self.phases.by_events:
            self.phases.round_over()
        self.spent(start - HOOKS_SECONDS if first_of_round else start)
        now = self._last_step = self._last_activity = self.now()
        self.evaluating = False
        if not first_of_round:
            return None, self.own_seconds
        moment, before, own = self.clock(), self._round_at, self.own_seconds
        own_seconds, self.own_seconds, self.device_seconds = own + self.device_seconds, 0.0, 0.0
        self._round_at = moment
        step = None
        if self._placed <= PLACED:  # the first one has no duration
            self._placed, step = self._placed + 1, self.number - 1
        trace = active_trace() if traced else None
        self._mailbox.append(StepsTaken(before, (moment,), now - moment, own_seconds, trace, step, lent))
        return None if before is None else moment - before, own

    # Rounds that something else counts

    def leave_counting_to(self, optimizer: int, moments: Sequence[float], backwards: Sequence[object], *, examples: float) -> None:
        """Let something else count from now on, right after a round; phases are not timed meanwhile.

        Args:
            optimizer: The number of the one that steps.
            moments: Grows by the end of each of its steps, in seconds of the clock.
            backwards: Grows by an item for each backward.
            examples: To a backward, as estimated.
        """
        offset = self.now() - self.clock()
        step = self.number if self._placed <= PLACED else None
        steps = StepsTaken(self._round_at, moments, offset, step=step)
        # In this order: whoever asks for `counts`, and then the worker, has a duration for each step.
        self._mailbox.append(steps)
        self._uncommitted = _CountedRounds(self._committed(), optimizer, steps, backwards, examples)
        self.phases.paused = True

    def commit(self, own_to_a_round: float) -> tuple[tuple[float, ...], float]:
        """Take over what was counted since `leave_counting_to`.

        Args:
            own_to_a_round: What counting a round costs, in seconds.

        Returns:
            The seconds from step to step of those rounds, and what the exporter took in them, with the user's calls.
        """
        counted = self._uncommitted
        if counted is None:
            return (), 0.0
        moments, since, own = (*counted.steps.moments,), self._round_at, 0.0
        pairs = itertools.pairwise(moments if since is None else (since, *moments))
        durations = tuple(after - before for before, after in pairs)
        if durations:
            own, self.own_seconds = self.own_seconds + len(durations) * own_to_a_round, 0.0
            self._placed += len(durations)
            self._round_at = moments[-1]
        counted.steps.own_seconds = own
        self._last_step, self._last_activity = self.last_step, self.last_activity
        counts = counted.counts()
        self.steps, self.backward_passes, self.examples = counts.steps, counts.backward_passes, counts.examples
        self._uncommitted, self.phases.paused = None, False
        self.phases.restart()
        return durations, own


class TrainingThread:
    """The thread of the last step of an optimizer of the models: before the first one it may be any.

    Attributes:
        ident: That of the thread; None while it is not known.
    """

    def __init__(self) -> None:
        self.ident: int | None = None

    def may_be_here(self) -> bool:
        """Return whether the calling thread trains, or it is not known yet which one does."""
        return self.ident in (None, threading.get_ident())

    def frame(self) -> types.FrameType | None:
        """Return what that thread executes; the calling thread's own frame if it is not known yet which one trains."""
        return sys._current_frames().get(threading.get_ident() if self.ident is None else self.ident)


def active_trace() -> TraceIds | None:
    """Return the active span of this thread, None unless one is recorded. Takes about a microsecond; imports nothing."""
    api = sys.modules.get("opentelemetry.trace")  # a program that traces has imported it
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return context.trace_id.to_bytes(16), context.span_id.to_bytes(8)
