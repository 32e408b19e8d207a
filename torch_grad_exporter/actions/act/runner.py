"""StepActionRunner: runs actions on the training thread, at the end of an optimizer's step, and only while there are any."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_grad_exporter.actions.act.decisions import JobDecisions, JobOfRanks
from torch_grad_exporter.actions.act.reports import SOURCE, ActionReports
from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.actions.act.trigger import StepTrigger
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Removable
from torch_grad_exporter.collectors.outcomes import ActionOutcome
from torch_grad_exporter.distributed.identity import group_size
from torch_grad_exporter.distributed.store import NoStoreError, StoreError
from torch_grad_exporter.rules import Problem, Rule
from torch_grad_exporter.torch_compat.autograd import at_end_of_backward, capturing_graph, graph_task
from torch_grad_exporter.torch_compat.optimizers import called_from_step, remove_step_hooks

HOOK_SECONDS = 2e-6  # what a call of the hook takes before and after what a clock inside of it measures


class StepActionRunner:
    """Holds the step actions, and the hook that runs them. `add`, `remove` and `close` are for any thread.

    Args:
        training: What actions change.
        reports: Takes what becomes of them.
        job: The ranks that act together, None for a single process.
        spent: Takes the moment of `time.perf_counter` since which a step was kept waiting.
        clock: Returns seconds, for cooldowns.
    """

    def __init__(
        self,
        training: Training,
        reports: ActionReports,
        job: JobOfRanks | None,
        *,
        spent: Callable[[float], object] = float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._training, self._reports, self._job, self._spent, self._clock = training, reports, job, spent, clock
        self._decisions = None if job is None else JobDecisions(job, training, reports, clock)
        self._triggers: tuple[StepTrigger, ...] = ()
        self._numbers = itertools.count()
        self._ready: deque[tuple[StepTrigger, Any]] = deque()
        self._lock = threading.RLock()
        self._hook: GuardedHook | None = None
        self._handle: Removable | None = None
        self._task = -1  # that of the last backward in which an optimizer has stepped
        self._hooked = False  # whether a hook has seen a step since the user last reported one
        self._inner = False  # whether an optimizer has stepped within the step of another one that is not over
        # Steps since the first action, by optimizer, and those that no hook has seen.
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._reported = 0

    def check(self, action: StepAction, rule: Rule | None = None, *, own: bool = False) -> None:
        """Raise what the action finds wrong, and `RuntimeError` if the ranks of the job cannot act together."""
        action.check(self._training, rule, own=own)
        if self._job is None or self._decisions is None:
            self._check_alone(action)
            return
        try:
            self._decisions.start()
        except StoreError as error:
            fix = "; use torchrun, or call it after init_process_group" if isinstance(error, NoStoreError) else ""
            raise RuntimeError(
                f"action={action!r}: all {self._job.world_size} ranks have to do it after the same step, on which they agree in "
                f"the job's store, and there is none: {error}{fix}"
            ) from error

    def _check_alone(self, action: StepAction) -> None:
        if (ranks := group_size()) > 1:
            raise RuntimeError(
                f"action={action!r}: all {ranks} ranks have to do it after the same step, and the exporter knows of "
                "one; start it after init_process_group"
            )

    def add(self, trigger: StepTrigger) -> None:
        """Add an action; the first one sets the hook."""
        with self._lock:
            action = trigger.action
            action.begin(self._training, own=trigger.by_itself)
            # The same step has the same number on all ranks only if they have counted from the same one.
            counted_from = self._reports.steps - (0 if self._decisions is None else self._decisions.steps)
            trigger.number, trigger.what = next(self._numbers), f"{action!r}, with steps counted from {counted_from}"
            trigger.step_guard = self._reports.guard(f"{trigger.name}: {action!r}")
            self._triggers = (*self._triggers, trigger)
            if self._decisions is not None:
                trigger.judged = not self._decisions.follows(action)
                self._decisions.add(trigger)
            if self._handle is None:
                self._hook = GuardedHook(SOURCE, self._step_over, self._reports.errors)
                self._handle = register_optimizer_step_post_hook(self._hook)

    def remove(self, trigger: StepTrigger) -> None:
        """Remove an action; with the last one the hook goes."""
        with self._lock:
            self._triggers = tuple(other for other in self._triggers if other is not trigger)
            if not self._triggers:
                self._unhook()
        if self._decisions is not None:
            self._decisions.remove(trigger)
        self._end(trigger)

    def _end(self, trigger: StepTrigger) -> None:
        self._reports.guard(f"{trigger.name}: the end of {trigger.action!r}")(trigger.action.end)

    def _unhook(self) -> None:
        hook, handle = self._hook, self._handle
        self._hook = self._handle = None
        if hook is not None:
            hook.disconnect()
        remove_step_hooks([] if handle is None else [handle])

    def close(self) -> None:
        """Remove the hook, and end the actions; idempotent."""
        triggers, self._triggers = self._triggers, ()
        self._unhook()
        if self._decisions is not None:
            self._decisions.close()
        for trigger in triggers:
            self._end(trigger)

    def disconnect(self) -> None:
        """Make the hook do nothing. Takes no lock: a fork may have left it held."""
        if self._hook is not None:
            self._hook.disconnect()

    def ask(self, trigger: StepTrigger, problems: Sequence[Problem] = ()) -> None:
        """Let an action run at the end of the next step, or of the one that rank 0 decides on. Raises what preparing raises.

        On the thread that evaluates. `problems`: those of its rule.
        """
        if self._decisions is None:
            self._check_alone(trigger.action)
        if trigger.pending or trigger.timing.cooling(self._clock()):  # it may have been done since it was judged
            return
        choice = trigger.action.choose(self._training, problems)
        if choice is None:
            return
        if self._decisions is not None:
            self._decisions.want(trigger, choice)
            return
        prepared = trigger.action.prepare(self._training, choice)
        trigger.pending = True
        self._ready.append((trigger, prepared))

    # The training thread

    def reported(self) -> None:
        """Take a step that the user reports, which no hook may have seen."""
        hooked, self._hooked = self._hooked, False
        if not hooked and self._triggers:
            self._reported += 1
            GuardedHook(SOURCE, self._timed, self._reports.errors)()

    def _step_over(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Count a step that is over, of any optimizer. One within a backward is over when the backward is."""
        start = time.perf_counter()
        if not (self._training.optimizers.concerns(optimizer) or self._inner):
            return
        task = graph_task()
        if task != -1:
            self._hooked = True
            self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            if task != self._task and self._hook is not None:
                self._task = task
                at_end_of_backward(self._at_end)
        elif called_from_step(sys._getframe(2).f_back):
            self._inner = True  # by `super().step()`, or by what it wraps: the outer one is over later
        else:
            self._hooked, self._inner = True, False
            self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            self.step_over()
        self._spent(start - HOOK_SECONDS)

    def _at_end(self) -> None:
        self._task = -1
        if self._hook is not None and self._triggers:
            GuardedHook(SOURCE, self._timed, self._reports.errors)()

    def _timed(self) -> None:
        start = time.perf_counter()
        self.step_over()
        self._spent(start)

    def step_over(self) -> None:
        """Take the end of a step, and run what is due. While a graph is captured nothing is: it would be captured as well."""
        if not self._triggers or capturing_graph():
            return
        steps = max((self._reported, *self._counts.values()))
        for trigger in self._triggers:
            if trigger.action.each_step:
                trigger.step_guard(trigger.action.step_over, steps)
        if self._decisions is not None:
            self._ready.extend(self._decisions.step_over())
        while self._ready:
            trigger, prepared = self._ready.popleft()
            if trigger.ended:
                continue
            succeeded = trigger.action_guard(trigger.action.act, self._training, prepared)
            trigger.acted(self._clock())
            trigger.pending = False
            self._reports.note(trigger, ActionOutcome.DONE if succeeded else ActionOutcome.FAILED)
