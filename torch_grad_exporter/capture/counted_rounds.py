"""CountedRounds: begins to only count rounds after one that was followed closely, and ends that.

Steps and their durations are exact meanwhile, and so are backwards and skipped steps but for what `_skipped_steps` says; each
backward is taken for as many examples as those of the last rounds that were followed, and phases are not timed. It lasts
half a second at most. Every other event ends it first, by `settle`; and when no step has come for a second, the
hooks around the forward come back, so that an evaluation shows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.capture.cost import COUNTED_SECONDS
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.inspections import Inspection, Inspections
from torch_grad_exporter.capture.schedule import COUNTING_SECONDS
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Removable
from torch_grad_exporter.model.parameters import TrackedParameter
from torch_grad_exporter.requests import SURPRISE
from torch_grad_exporter.store.records import Outcome
from torch_grad_exporter.torch_compat.compiler import never_compile

if TYPE_CHECKING:
    from torch_grad_exporter.capture.detection import BackwardDetection
    from torch_grad_exporter.capture.progress import StepClock
    from torch_grad_exporter.capture.rounds import RoundTracker
    from torch_grad_exporter.capture.schedule import SamplingSchedule
    from torch_grad_exporter.capture.torch_hooks import Hooks
    from torch_grad_exporter.model.optimizers import Optimizers
    from torch_grad_exporter.requests import Requests

STILL_SECONDS = 1.0
"""Without a step, after which the hooks around the forward come back."""

AFTER_TROUBLE = 32
"""Rounds that are all followed after a skipped step, and after counted rounds that ended otherwise than thought."""

AT_LEAST = 2
"""Rounds: to begin and to end counting costs as much as to follow one."""

SIZES = 8
"""Rounds followed closely whose mean size is that of the rounds that are only counted."""

Regular = tuple[int, torch.optim.Optimizer]
"""The only optimizer of a training whose rounds are alike, with its number."""


@dataclass(slots=True, kw_only=True, eq=False)
class CountingHook:
    """Notes in `moments` when each step of `optimizer` is over, in seconds of `clock`.

    `backwards`: has an item for each backward since; `to_a_step`: how many are expected to each step. `otherwise` is called with
    the arguments at the last of `rounds` steps, at the first after `until`, where there were more or fewer backwards, where
    `requested` is not empty, and where this fails; also where another optimizer has stepped, unless `concerned` says that it is
    a foreign one.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    rounds: int
    until: float
    backwards: list[object]
    to_a_step: int
    clock: Callable[[], float]
    otherwise: GuardedHook
    concerned: Callable[[torch.optim.Optimizer], bool]
    requested: Collection[object]
    moments: list[float] = field(default_factory=list)

    @property
    def surplus(self) -> int:
        """How many more backwards there were than the steps account for."""
        return len(self.backwards) - self.to_a_step * len(self.moments)

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Note the moment."""
        if is_compiling():
            return
        moments = self.moments
        try:
            if optimizer is self.optimizer():
                moment = self.clock()
                moments.append(moment)
                steps = len(moments)
                if (
                    steps < self.rounds
                    and moment < self.until
                    and len(self.backwards) == steps * self.to_a_step
                    and not self.requested
                ):
                    return
            elif not self.concerned(optimizer):
                return
        except Exception as error:  # noqa: BLE001 - the boundary, as in `GuardedHook`
            self.otherwise.failed(error)
        self.otherwise(optimizer, args, kwargs)


never_compile(CountingHook.__call__)


@dataclass(slots=True)
class Witness:
    """A parameter whose post-accumulate hook is `list.append`: each backward leaves an item, and no Python frame runs.

    It makes skipped steps exact: a backward without a step shows nowhere else. It is one only after a trial: in a round that was
    followed closely it fired once for each backward. `fired`: the items; `seen`: its gradient as it was after a round.
    """

    fired: list[object]
    handle: Removable
    seen: GradientVersions
    growth: int | None = None
    """How often a round writes to the gradient, if it stays the same tensor."""

    @classmethod
    def on_trial(cls, tracked: TrackedParameter) -> Witness:
        """Make a parameter that has a gradient the witness, right after a round."""
        fired = list[object]()
        parameter: Any = tracked.parameter()
        handle: Removable = parameter.register_post_accumulate_grad_hook(fired.append)
        return cls(fired, handle, GradientVersions.of([tracked]))

    def begin(self) -> None:
        """Begin one or several rounds."""
        self.seen = GradientVersions.of(self.seen.tracked)
        self.fired.clear()

    def passed(self, backwards: int) -> bool:
        """Return whether it has reported all backwards of the round that is over, and begin the next round."""
        reported, before = len(self.fired), self.seen
        self.begin()
        self.growth = self.seen.versions[0] - before.versions[0] if self.seen.numbers == before.numbers else None
        return reported == backwards

    def added_up(self, steps: int, surplus: int) -> bool:
        """Return whether `surplus` backwards more than the last of these steps accounts for went into the same gradient.

        A gradient that is a new tensor in each round has then been written to more often than usual. One that stays has been
        written to once more for each, and not once more for clearing it as well.
        """
        before, now = self.seen, GradientVersions.of(self.seen.tracked)
        more = now.versions[0] - before.versions[0]
        if now.numbers != before.numbers:
            return now.numbers != [None] and more > 0
        return self.growth is None or more - steps * self.growth <= surplus

    def dismiss(self) -> None:
        """Remove its hook; what it has reported stays as many items, none of which keeps the parameter."""
        self.handle.remove()
        self.fired[:] = [None] * len(self.fired)


class CountedRounds:
    """Belongs to the training thread, but for `look` and `release`.

    Attributes:
        counting: What counts the current rounds; None where they are followed closely.
    """

    def __init__(
        self,
        *,
        optimizers: Optimizers,
        clock: StepClock,
        schedule: SamplingSchedule,
        hooks: Hooks,
        inspections: Inspections,
        rounds: RoundTracker,
        detection: BackwardDetection,
        requests: Requests,
    ) -> None:
        self._optimizers, self._clock, self._schedule, self._hooks = optimizers, clock, schedule, hooks
        self._inspections, self._rounds, self._detection, self._requests = inspections, rounds, detection, requests
        self._sizes: deque[float] = deque(maxlen=SIZES)
        """Training examples to a backward in the last rounds that were followed."""
        self._seen = (0, 0)
        """Examples and backward passes up to the last round."""
        self.counting: CountingHook | None = None
        self._witness: Witness | None = None
        """Reports backwards, in rounds that are only counted or on trial."""
        self._skipped = 0
        self._not_before = 0
        self._norm_at: tuple[int, int] | None = None
        """Steps and backwards when the user gave a global norm whose outcome is not reported yet."""

    def round_over(self, regular: Callable[[], Regular | None], over: GuardedHook) -> None:
        """Begin to only count, or a witness' trial, after a round that was followed closely, if the next ones need not be.

        `regular`: the only optimizer that ever steps, where all recent rounds were alike. `over`: is called with the step that ends
        the counting, and with that of another optimizer.
        """
        number, clock = self._rounds.current.number, self._clock
        examples, backwards = clock.examples - self._seen[0], clock.backward_passes - self._seen[1]
        self._seen = clock.examples, clock.backward_passes
        if examples and backwards:
            self._sizes.append(examples / backwards)
        if clock.skipped != self._skipped:
            self._skipped, self._not_before = clock.skipped, number + AFTER_TROUBLE
        rounds = self._schedule.only_counted(number + 1)
        if self._requests.pending:  # where the root's forward is never called
            self.take_requests()
            self._detection.arm(sampled=self._rounds.next_is_sampled)
        follow = number < self._not_before
        optimizer, witness = None if rounds < AT_LEAST or follow else regular(), self._witness
        if optimizer is not None and witness is not None and witness.passed(backwards):
            self._begin(optimizer, witness, rounds, over)
            return
        if witness is not None:
            self.release()
            if optimizer is not None:
                self.follow(AFTER_TROUBLE)
        if optimizer is not None:  # the next round is a trial of a parameter that gets a gradient in each backward
            self._witness = next((Witness.on_trial(probe) for probe, _ in self._detection.probes.present()), None)

    def take_requests(self) -> None:
        """Follow, and sample, the rounds that the worker has asked for."""
        requested = self._requests.take()
        self.follow(max(requested.values(), default=0) + 1)
        self._rounds.sample_more(requested.get(SURPRISE, 0))
        self._inspections.tell(Inspection.requested, requested)

    def follow(self, rounds: int) -> None:
        """Follow at least this many of the next rounds instead of counting them."""
        self._not_before = max(self._not_before, self._rounds.current.number + rounds)

    @property
    def _mean_size(self) -> float:
        """How many training examples a backward is taken for, 0 while that is not known."""
        return fmean(self._sizes) if self._sizes else 0.0

    def _begin(self, optimizer: Regular, witness: Witness, rounds: int, over: GuardedHook) -> None:
        clock = self._clock
        counting = CountingHook(
            optimizer=weakref.ref(optimizer[1]),
            rounds=rounds,
            until=clock.clock() + COUNTING_SECONDS,
            backwards=witness.fired,
            to_a_step=self._rounds.current.backwards,
            clock=clock.clock,
            otherwise=over,
            concerned=self._optimizers.concerns,
            requested=self._requests.pending,
        )
        # In this order: whatever interrupts this, `settle` puts back what there is.
        self.counting = counting
        clock.leave_counting_to(optimizer[0], counting.moments, counting.backwards, examples=self._mean_size)
        self._detection.nodes.disarm()
        if not self._hooks.suspend(counting):
            self.settle()

    def settle(self, *, after_step: bool = False, over: bool = False) -> None:
        """End the counting and leave everything as if each round had been followed by itself; idempotent.

        `after_step`: a step is just over, so that no round is under way. `over`: no step will come any more.
        """
        counting = self.counting
        if counting is None:
            return
        self._hooks.resume()
        durations, own = self._clock.commit(COUNTED_SECONDS)  # with what the user's calls meanwhile have cost
        self.counting = None
        steps, surplus, witness = len(counting.moments), counting.surplus, self._witness
        skipped = 0 if witness is None else _skipped_steps(counting, witness, after_step=after_step, over=over)
        unfinished = 0 if after_step else max(0, surplus - skipped * counting.to_a_step)
        if not steps or (surplus and after_step):
            self.follow(AFTER_TROUBLE)
        norm_waits = self._tell(counting, skipped)
        clock, rounds = self._clock, self._rounds
        if surplus == -counting.to_a_step:
            # Nothing came before the last step: a backward in which the witness had no part, rather than a step without one.
            clock.backward_passes += counting.to_a_step
            clock.examples += round(counting.to_a_step * self._mean_size)
        self._seen = clock.examples, clock.backward_passes
        if durations:
            self._schedule.counted(durations, own)
        rounds.rounds_counted(steps, skipped)
        if steps:
            self._inspections.tell(Inspection.step_over, sampled=rounds.next_is_sampled)
            self._detection.arm(sampled=rounds.next_is_sampled)
        if unfinished:
            rounds.backwards_counted(unfinished)
            self._detection.probes.backward_over(rounds.current.models)
        self._inspections.tell(Inspection.counted, unfinished=unfinished > 0)
        self._norm_at = None
        if norm_waits:
            rounds.norm_observed()
        if witness is not None and after_step and not surplus:
            witness.begin()  # the next round is its trial for the next time
        else:
            self.release()

    # Norms that the user gives

    def norm_comes(self) -> None:
        """The user gives the global norm of a round; the outcome of the one before is reported first."""
        counting = self.counting
        if counting is not None and self._norm_at is not None:
            if len(counting.moments) == self._norm_at[0] and len(counting.backwards) > self._norm_at[1]:
                self.settle()
            else:
                self._tell(counting, 0)

    def norm_observed(self) -> None:
        """The norm of a round was posted: where it is only counted, of one that is not over, or of the one before."""
        counting = self.counting
        if counting is None or not (counting.moments or counting.backwards):
            self._rounds.norm_observed()
        elif counting.surplus > 0:
            self._norm_at = len(counting.moments), len(counting.backwards)
        else:
            self._rounds.norm_resolved(Outcome.STEPPED)

    def _tell(self, counting: CountingHook, skipped: int) -> bool:
        """Report the outcome of the round whose norm was observed last; return whether it is not known yet."""
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
        self._rounds.norm_resolved(outcome)
        return False

    # From other threads

    @property
    def surplus(self) -> int | None:
        """How many more backwards there were than steps account for; `None` where rounds are followed closely."""
        counting = self.counting
        return None if counting is None else counting.surplus

    def look(self) -> float:
        """Put the hooks around forwards back if no step has come for long; return the seconds until the next call."""
        left = self._clock.last_moment + STILL_SECONDS - self._clock.clock()
        if self.counting is not None and left <= 0:
            self._hooks.resume_modules()
        return left if self.counting is not None and left > 0 else STILL_SECONDS

    def release(self) -> None:
        """Release the parameter that is the witness; idempotent."""
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.dismiss()


def _skipped_steps(counting: CountingHook, witness: Witness, *, after_step: bool, over: bool) -> int:
    """Return how many rounds ended without a step, of those with more backwards than their steps account for.

    The witness' gradient shows it: without a step since, it is gone, or another backward was added to it. After a step it shows
    whether more than one backward was added up in it. Where this cannot be known, no step counts as skipped.
    """
    surplus, to_a_step = max(0, counting.surplus), counting.to_a_step
    if after_step:
        return 0 if surplus % to_a_step or witness.added_up(len(counting.moments), surplus) else surplus // to_a_step
    gone = witness.seen.tracked[0].gradient() is None
    return (surplus if gone or over else max(0, surplus - 1)) // to_a_step
