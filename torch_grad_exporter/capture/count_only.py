"""CountOnly: rounds that are only counted, where even the hooks of rounds that are not sampled cost too much.

A forward, a backward and a step with hooks that do nothing cost 10 to 30 microseconds, which is more than 1 % of a step of
a millisecond. So where steps are short and training runs as it did before, all hooks rest for a stretch of rounds but the
one after the step, which notes the moment, and a witness: a parameter that says when it has received its gradient. Then
one round is followed closely again. Steps and their durations are exact in a stretch, too, and so are backwards and skipped
steps but for what `_skipped_steps` says; each backward is taken for as many samples as those of the last rounds that were
followed, and phases are not timed. A stretch lasts half a second at most.

A parameter is a witness only after a trial: in a round that was followed closely it fired once for each backward.

Everything that is no such step ends the stretch first, by `settle`; and when no step has come for a second, the hooks
around the forward come back, so that an evaluation shows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

from torch_grad_exporter.capture.capture import GradientCapture
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.rounds import GradientVersion
from torch_grad_exporter.capture.schedule import COUNTED_SECONDS, STRETCH_SECONDS, SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import CountingHook, GuardedHook, Handle, Hooks, count_backwards
from torch_grad_exporter.model.layers import TrackedParameter
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.transfer.events import Counted, Mailbox, Outcome, OutcomeResolved

STILL_SECONDS = 1.0
"""Without a step, after which the hooks around the forward come back."""

AFTER_TROUBLE = 256
"""Rounds without a stretch after a skipped step, and after a stretch that ended otherwise than thought."""

SIZES = 8
"""Rounds followed closely whose mean size is that of the rounds that are only counted."""


@dataclass(slots=True)
class Witness:
    """A parameter that tells of backwards. `fired`: an item for each; `mark`: its gradient as it was after a round."""

    fired: list[object]
    handle: Handle
    mark: GradientVersion
    growth: int | None = None
    """How often a round writes to the gradient, if it stays the same tensor."""

    @classmethod
    def on_trial(cls, called: TrackedParameter) -> Witness | None:
        """Calls a parameter, right after a round; `None` if it is not in its place."""
        parameter, fired = called.parameter(), list[object]()
        return None if parameter is None else cls(fired, count_backwards(parameter, fired), GradientVersion.of(called))

    def begin(self) -> None:
        """A round, or a stretch of them, begins."""
        self.mark = GradientVersion.of(self.mark.tracked)
        self.fired.clear()

    def passed(self, backwards: int) -> bool:
        """Whether it has told of all backwards of the round that is over. Begins anew."""
        told, before = len(self.fired), self.mark
        self.begin()
        self.growth = self.mark.version - before.version if self.mark.gradient == before.gradient else None
        return told == backwards

    def added_up(self, steps: int, surplus: int) -> bool:
        """Whether `surplus` backwards more than the last of so many steps accounts for went into the same gradient.

        A gradient that is made anew in each round has then been written to more often than usual. One that stays has been
        written to once more for each, and not once more for clearing it as well.
        """
        now = GradientVersion.of(self.mark.tracked)
        if now.gradient != self.mark.gradient:
            return now.gradient is not None and now.version > self.mark.version
        return self.growth is None or now.version - self.mark.version - steps * self.growth <= surplus


class CountOnly:
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
        self._witness: Witness | None = None
        """Tells of backwards, in a stretch or on trial."""
        self._sizes: deque[float] = deque(maxlen=SIZES)
        self._seen = (0, 0)
        """Samples and backward passes up to the last round."""
        self._skipped = 0
        self._not_before = 0
        self._norm_at: tuple[int, int] | None = None
        """Steps and backwards when the user gave a global norm whose outcome is not told yet."""

    @property
    def counting(self) -> bool:
        """Whether rounds are only counted at present."""
        return self._counting is not None

    def round_over(self) -> None:
        """A round that was followed closely is over; begins a stretch, or a witness' trial, if the next ones need not be."""
        clock, number = self._clock, self._capture.current.number
        samples, backwards = clock.samples - self._seen[0], clock.backward_passes - self._seen[1]
        self._seen = clock.samples, clock.backward_passes
        if samples and backwards:
            self._sizes.append(samples / backwards)
        if clock.skipped != self._skipped:
            self._skipped, self._not_before = clock.skipped, number + AFTER_TROUBLE
        rounds = self._schedule.only_counted(number + 1)
        stepper = self._capture.regular_stepper() if rounds and number >= self._not_before else None
        found = self._optimizers.numbered() if stepper is not None else []
        if len(found) != 1 or found[0][0] != stepper:
            self._dismiss()
        elif self._on_trial(backwards):
            self._begin(found[0], rounds)

    def _on_trial(self, backwards: int) -> bool:
        """Whether the witness has told of the round's backwards, no more and no less; calls another one if there is none."""
        witness = self._witness
        passed = witness is not None and witness.passed(backwards)
        if witness is not None and not passed:
            self._not_before = self._capture.current.number + AFTER_TROUBLE
        if not passed:
            self._dismiss()
            called = self._capture.witness()
            self._witness = None if called is None else Witness.on_trial(called)
        return passed

    def _begin(self, optimizer: tuple[int, torch.optim.Optimizer], rounds: int) -> None:
        witness, clock = self._witness, self._clock
        if witness is None:
            return
        counting = CountingHook(
            weakref.ref(optimizer[1]),
            rounds=rounds,
            until=clock.clock() + STRETCH_SECONDS,
            backwards=witness.fired,
            to_a_step=self._capture.current.backwards,
            clock=clock.clock,
            otherwise=self._over,
        )
        # In this order: whatever interrupts this, `settle` puts back what there is.
        self._counting = counting
        clock.pause(optimizer[0], counting.moments, counting.backwards, fmean(self._sizes) if self._sizes else 0.0)
        if not self._hooks.rest(counting):
            self.settle()

    def _no_longer(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if not self._optimizers.concerns(optimizer):
            return
        counting = self._counting
        mine = counting is not None and optimizer is counting.optimizer
        self.settle(after_step=mine)
        if not mine:
            self._other(optimizer)

    def settle(self, *, after_step: bool = False) -> None:
        """Ends a stretch, if there is one, and leaves everything as if its rounds had been followed; idempotent.

        `after_step`: a step is just over, so that no round is under way.
        """
        counting = self._counting
        if counting is None:
            return
        self._hooks.wake()
        durations = self._clock.resume()
        self._counting = None
        steps, surplus, witness = len(counting.moments), counting.surplus, self._witness
        skipped = 0 if witness is None else _skipped_steps(counting, witness, after_step=after_step)
        unfinished = 0 if after_step else max(0, surplus - skipped * counting.to_a_step)
        if not steps or (surplus and after_step):
            self._not_before = self._capture.current.number + AFTER_TROUBLE
        norm_waits = self._tell(counting, skipped)
        self._add(durations, counting)
        self._capture.passed_over(steps, skipped=skipped, backwards=unfinished)
        self._norm_at = None
        if norm_waits:
            self._capture.norm_observed()
        if witness is not None and after_step and not surplus:
            witness.begin()  # the next round is its trial for the next stretch
        else:
            self._dismiss()

    def _add(self, durations: list[float], counting: CountingHook) -> None:
        clock = self._clock
        if counting.surplus == -counting.to_a_step:
            # Nothing came before the last step: a backward in which the witness had no part, rather than a step without one.
            clock.backward_passes += counting.to_a_step
            clock.samples += round(counting.to_a_step * fmean(self._sizes or [0.0]))
        self._seen = clock.samples, clock.backward_passes
        if durations:
            # With what the user's calls in the stretch have cost.
            own, clock.own_seconds = clock.own_seconds + len(durations) * COUNTED_SECONDS, 0.0
            self._schedule.counted(durations, own)
            self._mailbox.append(Counted(tuple(durations), own))

    def _dismiss(self) -> None:
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.handle.remove()

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
            self._mailbox.append(OutcomeResolved(Outcome.STEPPED))

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
        self._mailbox.append(OutcomeResolved(outcome))
        return False

    # From other threads

    def look(self) -> None:
        """Puts the hooks around forwards back if no step has come for long. A few times a second."""
        counting = self._counting
        if counting is not None and self._clock.clock() - self._clock.last_moment > STILL_SECONDS:
            self._hooks.wake_modules()

    def release(self) -> None:
        """Lets go of the parameter that is a witness; idempotent."""
        witness = self._witness
        self._dismiss()
        if witness is not None:
            witness.fired[:] = [None] * len(witness.fired)


def _skipped_steps(counting: CountingHook, witness: Witness, *, after_step: bool) -> int:
    """How many rounds ended without a step, of those with more backwards than their steps account for.

    The witness' gradient tells: without a step since, it is gone, or another backward came on top. After a step it shows
    whether more than one backward was added up in it. What cannot be told is not called skipped.
    """
    surplus, to_a_step = max(0, counting.surplus), counting.to_a_step
    if after_step:
        return 0 if surplus % to_a_step or witness.added_up(len(counting.moments), surplus) else surplus // to_a_step
    gone = witness.mark.tracked.gradient() is None
    return (surplus if gone else max(0, surplus - 1)) // to_a_step
