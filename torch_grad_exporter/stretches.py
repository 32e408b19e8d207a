"""Stretches: rounds that are only counted, where even the hooks of rounds that are not sampled cost too much.

A forward, a backward and a step with hooks that do nothing cost some 20 microseconds, which is more than 1 % of a step of
a millisecond. So where steps are short and training runs as it did before, all hooks rest for a stretch of rounds but the
one after the step, which notes the moment. Then one round is followed closely again, and says what the rounds of the next
stretch are taken for: as many backwards, as many samples. Steps and their durations are exact; phases are left out;
a skipped step within a stretch goes unseen, so there are no stretches where a gradient scaler is known or steps were
skipped lately.

Everything that is no such step ends the stretch first, by `settle`; and when no step has come for a second, the hooks
around the forward come back, so that an evaluation shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from torch_grad_exporter.capture import GradientCapture
from torch_grad_exporter.events import Counted, Mailbox, Outcome, Told
from torch_grad_exporter.hooks import CountingHook, GuardedHook, Hooks
from torch_grad_exporter.optimizers import Optimizers
from torch_grad_exporter.progress import StepClock
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
        self._number = -1
        self._seen = (0, 0)
        """Backward passes and samples up to the last round that was followed closely."""
        self._a_round = (0, 0)
        """Backward passes and samples of that round."""
        self._skipped = 0
        self._not_before = 0
        self._norm_at: int | None = None
        """How many steps had been counted when the user gave a global norm whose outcome is not told yet."""

    @property
    def counting(self) -> bool:
        """Whether rounds are only counted at present."""
        return self._counting is not None

    def round_over(self) -> None:
        """A round that was followed closely is over; begins a stretch if the next ones need not be."""
        clock, number = self._clock, self._capture.current.number
        self._a_round = clock.backward_passes - self._seen[0], clock.samples - self._seen[1]
        self._seen = clock.backward_passes, clock.samples
        if clock.skipped != self._skipped:
            self._skipped, self._not_before = clock.skipped, number + PATIENCE
        rounds = self._schedule.only_counted(number + 1)
        if rounds and number >= self._not_before:
            self._begin(rounds)

    def _begin(self, rounds: int) -> None:
        stepper = self._capture.regular_stepper()
        found = self._optimizers.numbered()
        if stepper is None or len(found) != 1 or found[0][0] != stepper or not self._a_round[0]:
            return
        counting = CountingHook(weakref.ref(found[0][1]), rounds, self._clock.clock, self._over)
        if self._hooks.rest(counting):
            self._counting, self._number = counting, stepper
            backward_passes, samples = self._a_round
            self._clock.pause(counting.moments, stepper, backward_passes=backward_passes, samples=samples)

    def _no_longer(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        counting = self._counting
        mine = counting is not None and optimizer is counting.optimizer
        self.settle()
        if not mine:
            self._other(optimizer)

    def settle(self) -> None:
        """Ends a stretch, if there is one, and leaves everything as if its rounds had been followed; idempotent."""
        counting, self._counting = self._counting, None
        if counting is None:
            return
        self._hooks.wake()
        self._tell(len(counting.moments))
        durations = self._clock.resume()
        rounds = len(durations)
        self._seen = self._clock.backward_passes, self._clock.samples
        self._schedule.counted(durations)
        if not durations:
            self._not_before = self._capture.current.number + PATIENCE
        else:
            self._mailbox.append(Counted(tuple(durations), rounds * COUNTED_SECONDS))
        self._capture.passed_over(rounds, norm_observed=self._norm_at is not None)
        self._norm_at = None

    def norm_observed(self) -> None:
        """The user gives the global norm of a round that is only counted, before it is posted."""
        if self._counting is not None:
            steps = len(self._counting.moments)
            self._tell(steps)
            self._norm_at = steps

    def _tell(self, steps: int) -> None:
        """Tells what became of the round of the norm that was observed last, if its step has come."""
        if self._norm_at is not None and steps > self._norm_at:
            self._norm_at = None
            self._mailbox.append(Told(Outcome.STEPPED))

    def look(self) -> None:
        """Puts the hooks around forwards back if no step has come for long. From any thread, a few times a second."""
        counting = self._counting
        if counting is not None and self._clock.clock() - self._clock.last_moment > STILL_SECONDS:
            self._hooks.wake_modules()
