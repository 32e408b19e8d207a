"""StepEnd: what is done when an optimizer's step is over, however it became known, and the steps that the user reports."""

from __future__ import annotations

from collections.abc import Callable

from torch_grad_exporter.capture.count_only.budget import HOOKS_SECONDS
from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.forwards import ForwardWatch
from torch_grad_exporter.capture.observations import Observations
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import OptimizerView
from torch_grad_exporter.capture.round_events import RoundNumbered
from torch_grad_exporter.capture.round_executor import Rounds
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.capture.torch_hooks import GuardedHook
from torch_grad_exporter.capture.weight_watch import WeightWatch
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.transfer.tracing import active_trace


class StepEnd:
    """Belongs to the training thread.

    `periodic`: something else that belongs to that thread, to be done behind a guard of its own at the end of steps.
    """

    def __init__(
        self,
        *,
        clock: StepClock,
        rounds: Rounds,
        steps: StepWatch,
        forwards: ForwardWatch,
        count_only: CountOnly,
        observations: Observations,
        schedule: SamplingSchedule,
        weights: WeightWatch | None,
        periodic: Callable[[], None] | None,
    ) -> None:
        self._clock = clock
        self._rounds = rounds
        self._steps = steps
        self._forwards = forwards
        self._count_only = count_only
        self._observations = observations
        self._schedule = schedule
        self._weights = weights
        self._periodic = periodic
        self._hooked = False
        """Whether an optimizer's hook has reported a step since the user last did."""

    def of(self, number: int, over: GuardedHook) -> None:
        """A hook reports that the optimizer of this number has stepped. `over`: as of `CountOnly.round_over`."""
        self._hooked = True
        self._ended(number, over)

    def reported(self, optimizers: Optimizers, number: int | None, over: GuardedHook) -> None:
        """The user says that a step is done; counts it unless an optimizer's hook has said so already. `number`: of the step."""
        self._count_only.settle()
        if not (self._hooked and self._rounds.tracker.current.stepped):
            optimizer = optimizers.manual()
            self._clock.step_began()
            self._steps.began(OptimizerView(optimizer), closure=False)
            self._ended(optimizer, over)
        self._hooked = False
        if number is not None:
            self._rounds.handle(RoundNumbered(number))

    def _ended(self, number: int, over: GuardedHook) -> None:
        clock = self._clock
        start = clock.clock()
        self._forwards.step_over()
        sampled = self._rounds.tracker.current.sampled
        first = self._steps.ended(number)
        if first is None:
            return
        if sampled and self._weights is not None:
            self._weights.after(number)
        self._observations.settings(start, sampled=sampled)
        if self._periodic is not None:
            self._periodic()
        clock.spent(clock.clock() - start + (HOOKS_SECONDS if first else 0.0))
        own = clock.own_seconds
        seconds = clock.step_ended(first_of_round=first, trace=active_trace() if sampled else None)
        if seconds is not None:
            self._schedule.stepped(seconds - own, None if sampled else own)
        if first:
            self._count_only.round_over(self._steps.regular_optimizer, over, self._steps.node_hook)
