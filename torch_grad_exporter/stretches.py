"""Stretches: rounds that are only counted, where even the hooks of rounds that are not sampled cost too much.

A forward, a backward and a step with hooks that do nothing cost some 20 microseconds, which is more than 1 % of a step of
a millisecond. So where steps are short and training runs as it did before, all hooks rest for a stretch of rounds but the
one after the step, which notes the moment, and a witness: a parameter that says when it has received its gradient. Then
one round is followed closely again. Steps, their durations, backwards and skipped steps are exact in a stretch, too; for
samples each backward is taken for one of the round before, and phases are not timed.

Everything that is no such step ends the stretch first, by `settle`; and when no step has come for a second, the hooks
around the forward come back, so that an evaluation shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from torch_grad_exporter.capture import GradientCapture
from torch_grad_exporter.events import Counted, Mailbox, Outcome, Told
from torch_grad_exporter.hooks import CountingHook, GuardedHook, Handle, Hooks, count_backwards
from torch_grad_exporter.optimizers import Optimizers
from torch_grad_exporter.progress import StepClock
from torch_grad_exporter.rounds import Mark
from torch_grad_exporter.schedule import COUNTED_SECONDS, SamplingSchedule

STILL_SECONDS = 1.0
"""Without a step, after which the hooks around the forward come back."""

PATIENCE = 256
"""Rounds without a stretch after a skipped step, and after a stretch that ended before its first step."""


class Stretches:
    """Begins a stretch after a round that was followed closely, and ends it. Belongs to the training thread.

    `other`: is called with an optimizer that has stepped in a stretch and is not the one whose steps are counted.
    """

    def __init__(
        self,
        *,
        clock: StepClock,
        capture: GradientCapture,
        schedule: SamplingSchedule,
        optimizers: Optimizers,
        mailbox: Mailbox,
        hooks: Hooks,
        other: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._clock = clock
        self._capture = capture
        self._schedule = schedule
        self._optimizers = optimizers
        self._mailbox = mailbox
        self._hooks = hooks
        self._other = other
        self._over: GuardedHook = hooks.guarded("optimizer_hook", self._no_longer)
        self._counting: CountingHook | None = None
        self._witness: Handle | None = None
        """Tells of backwards in a stretch."""
        self._mark: Mark | None = None
        """The gradient of the witness as it was before the stretch."""
        self._samples = 0
        """Samples up to the last round."""
        self._skipped = 0
        self._not_before = 0
        self._norm_at: tuple[int, int] | None = None
        """Steps and backwards when the user gave a global norm whose outcome is not told yet."""

    @property
    def counting(self) -> bool:
        """Whether rounds are only counted at present."""
        return self._counting is not None

    def round_over(self) -> None:
        """A round that was followed closely is over; begins a stretch if the next ones need not be."""
        clock, number = self._clock, self._capture.current.number
        samples, self._samples = clock.samples - self._samples, clock.samples
        if clock.skipped != self._skipped:
            self._skipped, self._not_before = clock.skipped, number + PATIENCE
        rounds = self._schedule.only_counted(number + 1)
        if rounds and number >= self._not_before:
            self._begin(rounds, samples)

    def _begin(self, rounds: int, samples: int) -> None:
        stepper, witness = self._capture.regular_stepper(), self._capture.witness()
        found = self._optimizers.numbered()
        parameter = None if witness is None else witness.parameter()
        if stepper is None or witness is None or parameter is None or len(found) != 1 or found[0][0] != stepper:
            return
        to_a_step = self._capture.current.backwards
        optimizer = weakref.ref(found[0][1])
        counting = CountingHook(optimizer, rounds=rounds, to_a_step=to_a_step, clock=self._clock.clock, otherwise=self._over)
        if self._hooks.rest(counting):
            self._counting = counting
            self._witness = count_backwards(parameter, counting.backwards)
            self._mark = Mark.of(witness)
            self._clock.pause(stepper, counting.moments, counting.backwards, samples / to_a_step)

    def _no_longer(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        counting = self._counting
        mine = counting is not None and optimizer is counting.optimizer
        self.settle(after_step=mine)
        if not mine:
            self._other(optimizer)

    def settle(self, *, after_step: bool = False) -> None:
        """Ends a stretch, if there is one, and leaves everything as if its rounds had been followed; idempotent.

        `after_step`: a step is just over, so that no round is under way.
        """
        counting, self._counting = self._counting, None
        if counting is None:
            return
        self._hooks.wake()
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.remove()
        steps, surplus = len(counting.moments), counting.surplus
        if not steps or surplus < 0:
            self._not_before = self._capture.current.number + PATIENCE
        skipped = self._skipped_steps(counting, after_step=after_step)
        unfinished = 0 if after_step else surplus - skipped * counting.to_a_step
        norm_waits = self._tell(counting, skipped)
        self._clock_resumes(counting)
        self._capture.passed_over(steps, skipped=skipped, backwards=max(unfinished, 0))
        self._norm_at = None
        if norm_waits:
            self._capture.norm_observed()

    def _clock_resumes(self, counting: CountingHook) -> None:
        durations = self._clock.resume()
        # A backward in which the witness had no part, rather than a step without one.
        self._clock.backward_passes += max(0, -counting.surplus)
        self._samples = self._clock.samples
        self._schedule.counted(durations)
        if durations:
            self._mailbox.append(Counted(tuple(durations), len(durations) * COUNTED_SECONDS))

    def _skipped_steps(self, counting: CountingHook, *, after_step: bool) -> int:
        """How many rounds ended without a step, of those with more backwards than their steps account for.

        After a step the gradient tells: more than one backward was added up in it, or it is as after any other round.
        """
        surplus = max(0, counting.surplus - (0 if after_step else 1))
        if after_step and (surplus % counting.to_a_step or self._mark is None or self._mark.added_to()):
            return 0
        return surplus // counting.to_a_step

    # Norms that the user gives

    def norm_comes(self) -> None:
        """The user gives the global norm of a round; what became of the one before is told first."""
        counting = self._counting
        if counting is not None and self._norm_at is not None:
            if len(counting.moments) == self._norm_at[0] and len(counting.backwards) > self._norm_at[1]:
                self.settle()
            else:
                self._tell(counting, 0)

    def norm_observed(self) -> None:
        """The norm of a round that is only counted was posted: of one that is not over, or of the one before."""
        counting = self._counting
        if counting is not None and counting.surplus > 0:
            self._norm_at = len(counting.moments), len(counting.backwards)
        else:
            self._mailbox.append(Told(Outcome.STEPPED))

    def _tell(self, counting: CountingHook, skipped: int) -> bool:
        """Tells what became of the round of the norm that was observed last; whether that is not known yet."""
        if self._norm_at is None:
            return False
        steps, backwards = self._norm_at
        others_came = len(counting.backwards) >= backwards + counting.to_a_step
        if skipped and others_came:
            outcome = Outcome.SKIPPED
        elif len(counting.moments) > steps:
            outcome = Outcome.STEPPED
        else:
            return True
        self._norm_at = None
        self._mailbox.append(Told(outcome))
        return False

    # From other threads

    def look(self) -> None:
        """Puts the hooks around forwards back if no step has come for long. A few times a second."""
        counting = self._counting
        if counting is not None and self._clock.clock() - self._clock.last_moment > STILL_SECONDS:
            self._hooks.wake_modules()

    def release(self) -> None:
        """Lets go of the parameter that is a witness; idempotent."""
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.remove()
        counting = self._counting
        if counting is not None:
            counting.backwards.clear()
