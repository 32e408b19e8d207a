"""Act: does what `exporter.on` was given, when a rule or a condition holds.

Without any `on` there is no thread and nothing is judged. From the first one on the run is judged once a second, in a thread of its
own. Actions of the user run in another one; those that change the training run between steps on the training thread.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_grad_exporter.actions.act.measurements import ConditionError, Measurements
from torch_grad_exporter.actions.act.reports import SOURCE, ActionReports
from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.actions.act.trigger import Event, StepTrigger, Timing, Trigger, cause_and_action, name_of
from torch_grad_exporter.arguments import shown
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.outcomes import ActionOutcome
from torch_grad_exporter.errors import BusyError, contained
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.rules import RULES, Problem
from torch_grad_exporter.rules.episodes import Episodes

if TYPE_CHECKING:
    from torch_grad_exporter.actions.act.runner import StepActionRunner
    from torch_grad_exporter.actions.act.sample_feed import SampleFeed
    from torch_grad_exporter.outputs.live.live import Judged, Live

EVALUATION_SECONDS = 1.0  # between two evaluations
SHARE = 0.05  # of the time that evaluations may take; if one takes long, the next one comes later

ROOM = 100  # events that wait for their action, at most

# How long the end waits for actions, at most, and where a user or a launcher waits for it.
CLOSE_SECONDS, HURRIED_SECONDS = 2.0, 1.0


class Handle:
    """What `exporter.on` returns: `remove()` ends it.

    Attributes:
        name: As in events and in the log.
    """

    def __init__(self, act: Act, trigger: Trigger) -> None:
        self.name = trigger.name
        self._act = act
        self._trigger = trigger

    def remove(self) -> None:
        """End it: nothing new happens by it. Idempotent, from any thread."""
        self._act.remove(self._trigger)

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}>"


class Act:
    """Judges and acts, from the first `on` until `close`. `on`, `close` and handles are for any thread.

    Args:
        judge: Judges the run.
        runner: Runs what changes the training.
        reports: Takes what becomes of conditions and actions.
        samples: The values of each sample, for windows; None if nothing shows them.
        clock: Returns seconds.
        loop: The class of the thread that judges.
    """

    def __init__(
        self,
        judge: Live,
        runner: StepActionRunner,
        reports: ActionReports,
        *,
        samples: SampleFeed | None = None,
        clock: Callable[[], float] = time.monotonic,
        loop: type[BackgroundLoop] = BackgroundLoop,
    ) -> None:
        self._judge, self._runner, self._reports, self._samples, self._clock = judge, runner, reports, samples, clock
        self._triggers: tuple[Trigger, ...] = ()
        self._lock = threading.RLock()
        self._episodes = Episodes(RULES)
        self._due = -math.inf
        self._started = self._closed = False
        guard = reports.errors.boundary(SOURCE, "judging")
        self._loop = loop("act", self._in_turn, guard=guard, pause=self._pause, last=lambda: self.evaluate(last=True))
        self._actions = ActionQueue(reports, clock)

    def on(self, what: object, action: object, *, name: str | None, for_: object, cooldown: object) -> Handle:
        """See `Exporter.on`."""
        if name is not None and not (isinstance(name, str) and name):
            raise TypeError(f"name={shown(name)}: expected a text that is not empty")
        timing = Timing.of(for_, cooldown)
        rule, condition, chosen = cause_and_action(what, action, timing)
        self._check_open()
        if isinstance(chosen, StepAction):
            self._runner.check(chosen, rule, own=action is None)
        rule_name = None if rule is None else rule.name
        name, action_name = name or rule_name or name_of(what), name_of(chosen)
        kind: type[Trigger] = StepTrigger if isinstance(chosen, StepAction) else Trigger
        trigger = kind(
            name=name,
            rule=rule_name,
            condition=condition,
            action=chosen,
            timing=timing,
            measurements=Measurements(REGISTRY.catalogue, self._samples),
            label=self._reports.totals.know(action_name),
            condition_guard=self._reports.guard(f"the condition {name}"),
            action_guard=self._reports.guard(f"the action {action_name} on {name}"),
        )
        try:
            with self._lock:
                self._check_open()  # it may have been closed meanwhile
                if isinstance(trigger, StepTrigger):
                    self._runner.add(trigger)
                if not self._started:
                    self._loop.start()
                    self._started = True
                if not self._triggers:
                    self._episodes = Episodes(RULES)
                self._triggers = (*self._triggers, trigger)
                self._loop.wake()  # only now: the thread would go back to sleep for good if it found no trigger
            self._check_open()  # or just now, by a signal's handler
        except RuntimeError:  # also if no thread can be started
            self.remove(trigger)
            raise
        return Handle(self, trigger)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("on(): the exporter is closed")

    def remove(self, trigger: Trigger) -> None:
        """End a trigger. Idempotent, from any thread."""
        trigger.ended = True
        trigger.measurements.forget()
        with self._lock:
            self._triggers = tuple(other for other in self._triggers if other is not trigger)
        if isinstance(trigger, StepTrigger):
            self._runner.remove(trigger)

    def close(self, *, hurried: bool = False) -> None:
        """Judge the rules for the last time, and let actions end, for a limited time. Idempotent."""
        with self._lock:
            self._closed = True
        self._runner.close()
        if self._started:
            limit, since = HURRIED_SECONDS if hurried else CLOSE_SECONDS, self._clock()
            self._loop.close(limit / 2)
            self._actions.close(max(0.0, limit - (self._clock() - since)))
        self._triggers = ()  # they hold the user's functions, and these his models

    def after_fork_in_child(self) -> None:
        """Do nothing in the child: the threads are the parent's."""
        self._closed = True
        self._triggers = ()
        self._lock = threading.RLock()
        self._runner.disconnect()
        self._reports.totals.after_fork_in_child()

    def step_reported(self) -> None:
        """Take a step that the user reports, on the thread that trains."""
        self._runner.reported()

    # The thread that judges

    def _pause(self) -> float:
        return self._due - self._clock() if self._triggers else math.inf

    def _in_turn(self) -> None:
        start = self._clock()
        if start < self._due:  # woken by another `on`
            return
        self._due = start + EVALUATION_SECONDS
        self.evaluate()
        # Conditions take their time as well, and with it that of the training: one thread at a time runs Python.
        self._due = max(self._due, self._clock() + (self._clock() - start) / SHARE)

    def evaluate(self, *, last: bool = False) -> None:
        """Judge once, and let happen what is due. `last`: the run is over, and only rules are judged."""
        triggers = []
        for trigger in self._triggers:
            if trigger.off:
                trigger.measurements.forget()  # its windows are no longer read
            elif trigger.judged:
                triggers.append(trigger)
        if not triggers:
            return
        try:
            judged = self._judge.judged(last=last)
        except BusyError:  # others are busy with the same values: the next evaluation has them
            return
        now = self._clock()
        active = self._episodes.judge(judged.problems, now, last=last)
        for trigger in triggers:
            problems = tuple(episode.problem for (alert, _, _), episode in active.items() if alert == trigger.rule)
            if trigger.rule is not None:
                holds = bool(problems)
            else:
                holds = not last and trigger.condition_guard.result(self._holds, trigger, judged, now) is True
            if isinstance(trigger, StepTrigger) and not last:
                holds = trigger.condition_guard.result(functools.partial(trigger.action.judged, judged.values, holds=holds)) is True
            if trigger.timing.due(holds, now) and not trigger.off:
                self._act(trigger, problems, now, last=last)

    def _holds(self, trigger: Trigger, judged: Judged, now: float) -> bool:
        try:
            return trigger.holds(judged.values, now)
        except ConditionError as error:
            trigger.wrong = True
            self._reports.disabled(f"the condition {trigger.name}", error)
            return False

    def _act(self, trigger: Trigger, problems: tuple[Problem, ...], now: float, *, last: bool) -> None:
        if isinstance(trigger, StepTrigger):
            if not last:
                trigger.action_guard(self._runner.ask, trigger, problems)
            return
        values = dict(trigger.measurements.read)
        if trigger.rule is not None:
            values = {problem.layer or "": problem.value for problem in problems if problem.value is not None}
        event = Event(
            name=trigger.name, alert=trigger.rule, values=values, step=self._reports.steps, time=self._reports.now(),
            problems=problems,
        )  # fmt: skip
        trigger.timing.acted(now)
        self._actions.offer(trigger, event)


class ActionQueue:
    """Runs actions on their events until `close`. The thread starts with the first one. `offer` is for one thread at a time."""

    def __init__(self, reports: ActionReports, clock: Callable[[], float] = time.monotonic) -> None:
        self._reports = reports
        self._clock = clock
        self._waiting: deque[tuple[Trigger, Event]] = deque()
        self._started = self._closed = False
        self._give_up_at = 0.0
        self._guard = reports.errors.boundary(SOURCE, "running", limit=None)
        self._loop = BackgroundLoop("action", self._work, guard=self._guard, last=self._work)

    def offer(self, trigger: Trigger, event: Event) -> None:
        """Run the action after those that wait, or drop it if there is no room. Raises `RuntimeError` without a thread."""
        if len(self._waiting) >= ROOM or self._closed:
            self._reports.note(trigger, ActionOutcome.DROPPED)
            return
        self._waiting.append((trigger, event))
        if not self._started:
            self._loop.start()
            self._started = True
        self._loop.wake()

    def close(self, seconds: float) -> None:
        """Run what waits for this many seconds at most, and drop the rest. One that hangs is left behind. Idempotent."""
        self._give_up_at = self._clock() + seconds
        self._loop.close(seconds)
        self._closed = True
        while (left := self._next()) is not None:
            self._reports.note(left[0], ActionOutcome.DROPPED)

    def _next(self) -> tuple[Trigger, Event] | None:
        try:
            return self._waiting.popleft()
        except IndexError:  # another thread may have taken the last one
            return None

    def _work(self) -> None:
        """Run what waits, in the thread; after `close` for a limited time."""
        while (not self._loop.stopping or self._clock() < self._give_up_at) and (following := self._next()) is not None:
            self._guard(self._run, *following)

    def _run(self, trigger: Trigger, event: Event) -> None:
        if trigger.off or isinstance(trigger.action, StepAction):  # the second never is
            return
        succeeded = trigger.action_guard(contained, trigger.action, event)
        self._reports.note(trigger, ActionOutcome.DONE if succeeded else ActionOutcome.FAILED)
