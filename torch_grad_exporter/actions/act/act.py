"""Act: does what `exporter.on` was given, when a rule or a condition holds.

Without any `on` there is no thread and nothing is judged. From the first one on the run is judged once a second, together with
Notify where that is on, in a thread of its own. Actions of the user run in another one; those that change the training run between
steps on the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_grad_exporter.actions.act.agreement import RefusedError
from torch_grad_exporter.actions.act.event import Action, Event, Timing
from torch_grad_exporter.actions.act.measurements import Measurements
from torch_grad_exporter.actions.act.queue import ActionQueue
from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.actions.act.trigger import (
    SOURCE,
    Condition,
    RuleProblems,
    Trigger,
    asked,
    name_of,
    seconds,
)
from torch_grad_exporter.actions.act.windows import ConditionError
from torch_grad_exporter.actions.users_code import contained
from torch_grad_exporter.collectors.happened import Happened
from torch_grad_exporter.collectors.outcomes import ActionOutcome, ActionTotals
from torch_grad_exporter.distributed.store import StoreError
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError
from torch_grad_exporter.rules import RULES
from torch_grad_exporter.rules.episodes import Episodes

if TYPE_CHECKING:
    from torch_grad_exporter.actions.act.runner import ActionSlot, StepActionRunner
    from torch_grad_exporter.actions.act.sample_feed import SampleFeed
    from torch_grad_exporter.metrics.families import Spec
    from torch_grad_exporter.outputs.live.live import Judged

logger = logging.getLogger("torch_grad_exporter")

EVALUATION_SECONDS = EXCHANGE_SECONDS = 1.0
"""Between two evaluations, and between two questions to the job's store."""

SHARE = 0.05
"""Of the time that evaluations may take; where one takes long, the next one comes later."""

FED_SECONDS = 5.0
"""Without a judgement by Notify, where that is on, after which this judges itself."""

CLOSE_SECONDS, HURRIED_SECONDS = 2.0, 1.0
"""How long the end waits for actions, at most, and where a user or a launcher waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What it reads. `judge`: judges the run now, as `Live.judged`, for the last time if its argument says so. `metrics`: by name.

    `fed`: whether Notify judges as well, and hands it to `Act.take`. `samples`: the values of each sample, for windows; None if
    nothing shows them.
    """

    judge: Callable[[bool], Judged]
    fed: bool
    metrics: Callable[[], Mapping[str, Spec]]
    step: Callable[[], int]
    samples: SampleFeed | None = None
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


class Handle:
    """What `exporter.on` returns: `remove()` ends it. `name`: as in events and in the log."""

    def __init__(self, name: str, remove: Callable[[], None]) -> None:
        self.name = name
        self._remove = remove

    def remove(self) -> None:
        """Ends it: nothing new happens by it. Idempotent, from any thread."""
        self._remove()

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}>"


class Act:
    """Judges and acts, from the first `on` until `close`. `on`, `close` and handles are for any thread."""

    def __init__(
        self,
        sources: Sources,
        steps: StepActionRunner,
        totals: ActionTotals,
        errors: ErrorLog,
        *,
        loop: type[BackgroundLoop] = BackgroundLoop,
    ) -> None:
        self._sources = sources
        self._steps = steps
        self.totals = totals
        self._failures = steps.failures
        self._triggers: tuple[Trigger, ...] = ()
        self._slots: dict[Trigger, ActionSlot] = {}
        self._lock = threading.RLock()
        self._episodes: Episodes | None = None
        self._taken: Judged | None = None
        self._due, self._exchange_due, self._closed = 0.0, 0.0, False
        self._make_loop = loop
        self._loop: BackgroundLoop | None = None
        self._guard = errors.boundary(SOURCE, "judging")
        self._actions = ActionQueue(errors.boundary(SOURCE, "running", limit=None), sources.clock)

    def on(self, what: object, action: object, *, name: str | None, for_: object, cooldown: object) -> Handle:
        """As `Exporter.on`."""
        if name is not None and not (isinstance(name, str) and name):
            raise TypeError(f"name={name!r}: expected a text that is not empty")
        timing = Timing(seconds("for_", for_), seconds("cooldown", cooldown))
        rule, condition, chosen = asked(what, action, timing)
        self._check_open()
        if isinstance(chosen, StepAction):
            self._steps.check(chosen, rule, own=action is None)
        named = rule.name if rule is not None else None
        trigger = self._made(name or named or name_of(what), named, condition, chosen, timing)
        with self._lock:
            self._check_open()  # it may have been closed meanwhile
            if isinstance(chosen, StepAction):
                self._slots[trigger] = self._steps.add(trigger, chosen, functools.partial(self._done, trigger))
            try:
                loop = self._started()
            except RuntimeError:
                self._remove(trigger)
                raise
            if rule is not None and self._episodes is None:
                self._episodes = Episodes(RULES)
            self._triggers = (*self._triggers, trigger)
            loop.wake()  # only now: the thread would go back to sleep for good where it finds no trigger
        try:
            self._check_open()  # or just now, by a signal's handler
        except RuntimeError:
            self._remove(trigger)
            raise
        return Handle(trigger.name, functools.partial(self._remove, trigger))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("on(): the exporter is closed")

    def _made(
        self, name: str, rule: str | None, condition: Condition | None, action: Action | StepAction, timing: Timing
    ) -> Trigger:
        of_action = name_of(action)
        return Trigger(
            name=name,
            rule=rule,
            condition=condition,
            action=action,
            timing=timing,
            measurements=Measurements(self._sources.metrics(), self._sources.samples),
            counted=self.totals.know(of_action),
            conditions=self._failures.guard(f"the condition {name}"),
            actions=self._failures.guard(f"the action {of_action} on {name}"),
        )

    def _started(self) -> BackgroundLoop:
        """Returns the thread that judges, running. Raises `RuntimeError` where there are no more to be had."""
        if self._loop is None:
            loop = self._make_loop("act", self._in_turn, guard=self._guard, pause=self._until_due, last=self._judge_last)
            loop.start()
            self._loop = loop
            self._due = self._sources.clock() + (FED_SECONDS if self._sources.fed else 0.0)
        return self._loop

    def _remove(self, trigger: Trigger) -> None:
        trigger.removed = True
        trigger.measurements.forget()
        with self._lock:
            self._triggers = tuple(one for one in self._triggers if one is not trigger)
            slot = self._slots.pop(trigger, None)
            if not any(one.rule for one in self._triggers):
                self._episodes = None
        if slot is not None:
            self._steps.remove(slot)

    def close(self, *, hurried: bool = False) -> None:
        """Judges the rules for the last time, and lets actions end, for a limited time. Idempotent."""
        with self._lock:
            self._closed = True
        self._steps.close()
        if self._loop is not None:
            limit, since = HURRIED_SECONDS if hurried else CLOSE_SECONDS, self._sources.clock()
            self._loop.close(limit / 2)
            self._actions.close(max(0.0, limit - (self._sources.clock() - since)))
        self._triggers, self._slots, self._episodes = (), {}, None  # they hold the user's functions, and these his models

    def after_fork_in_child(self) -> None:
        """The threads are the parent's, and the child does nothing."""
        self._closed = True
        self._triggers = ()
        self._lock = threading.RLock()
        self._steps.disconnect()
        self.totals.after_fork_in_child()

    def take(self, judged: Judged) -> None:
        """Takes a judgement that Notify needed as well. Costs nothing without any `on`."""
        if self._triggers and self._loop is not None:
            self._taken = judged
            self._loop.wake()

    def step_reported(self) -> None:
        """The user says that a step is over, on the thread that trains."""
        if self._slots:
            self._steps.reported()

    # The thread that judges

    def _until_due(self) -> float:
        if not self._triggers:
            return float("inf")
        due = min(self._due, self._exchange_due) if self._steps.exchanges else self._due
        return due - self._sources.clock()

    def _in_turn(self) -> None:
        clock = self._sources.clock
        if self._taken is not None or clock() >= self._due:  # else woken by another `on`, or before Notify has judged
            start = clock()
            self._due = start + (FED_SECONDS if self._sources.fed else EVALUATION_SECONDS)
            # Others may be busy with the same values: the next evaluation has them.
            with contextlib.suppress(ScrapeBusyError, TimeoutError):
                self.evaluate()
            # Conditions take their time as well, and with it that of the training: one thread at a time runs Python.
            self._due = max(self._due, clock() + (clock() - start) / SHARE)
            self._exchange_due = 0.0
        if clock() >= self._exchange_due:
            self._exchange_due = clock() + EXCHANGE_SECONDS
            self._steps.exchange(self._not_agreed)

    def _judge_last(self) -> None:
        with contextlib.suppress(ScrapeBusyError, TimeoutError):
            self.evaluate(last=True)

    def evaluate(self, *, last: bool = False) -> None:
        """Judges once, and lets happen what is due. `last`: the run is over, and only rules are judged."""
        triggers = []
        for trigger in self._triggers:
            if trigger.off:
                trigger.measurements.forget()  # nobody reads its windows any more
            else:
                triggers.append(trigger)
        if not triggers:
            return
        taken, self._taken = self._taken, None
        episodes = self._episodes
        judged = self._sources.judge(last) if taken is None or last else taken
        now = self._sources.clock()
        active = {} if episodes is None else episodes.judge(judged.problems, now, last=last)
        for trigger in triggers:
            if trigger.rule is not None:
                found = RuleProblems.of(trigger.rule, active)
                holds = bool(found.problems)
            else:
                found = RuleProblems()
                holds = not last and trigger.conditions.result(self._holds, trigger, judged, now) is True
            if trigger.timing.due(holds, now) and not trigger.off:
                self._act(trigger, found, now, last=last)

    def _holds(self, trigger: Trigger, judged: Judged, now: float) -> bool:
        """Whether a condition does, which is the user's code."""
        try:
            return trigger.judge(judged.values, now)
        except ConditionError as error:
            trigger.wrong = True
            self._failures.wrong(f"the condition {trigger.name}", error)
            return False

    def _act(self, trigger: Trigger, found: RuleProblems, now: float, *, last: bool) -> None:
        slot = self._slots.get(trigger)
        if slot is not None:
            named = tuple(dict.fromkeys(layer for one in found.problems for layer in (one.layer, *one.others) if layer))
            if last:
                return
            if slot.agreement is not None:
                self._steps.ask(slot, named)
            elif trigger.actions.result(self._steps.ask, slot, named):
                trigger.acted(now)
            return
        values = found.values if trigger.rule is not None else dict(trigger.measurements.read)
        event = Event(
            name=trigger.name, alert=trigger.rule, values=values, step=self._sources.step(), time=self._sources.now(),
            problems=found.problems,
        )  # fmt: skip
        trigger.timing.acted(now)
        drop = functools.partial(self.totals.count, trigger.counted, ActionOutcome.DROPPED)
        self._actions.offer(functools.partial(self._run, trigger, event), drop)

    def _not_agreed(self, slot: ActionSlot, error: Exception) -> None:
        """The ranks did not agree, or the store did not answer."""
        trigger = slot.trigger
        if not isinstance(error, RefusedError | StoreError):  # it cannot be done here
            trigger.actions.failed(error)
            return
        if isinstance(error, RefusedError):
            trigger.timing.acted(self._sources.clock())
            self._note(trigger, ActionOutcome.REFUSED)
        self._failures.failed(f"{trigger.name}: {trigger.action!r}", error)

    # The thread of actions, and that of the training

    def _run(self, trigger: Trigger, event: Event) -> None:
        if trigger.off or isinstance(trigger.action, StepAction):
            return
        succeeded = trigger.actions(contained, trigger.action, event)
        self._note(trigger, ActionOutcome.DONE if succeeded else ActionOutcome.FAILED)

    def _note(self, trigger: Trigger, outcome: ActionOutcome) -> None:
        """Counts what became of an action, and marks it for the live page."""
        self.totals.count(trigger.counted, outcome)
        action = repr(trigger.action) if isinstance(trigger.action, StepAction) else trigger.counted
        mark = Happened(self._sources.now(), self._sources.step(), trigger.name, action, outcome.value)
        self.totals.happened.add(mark, trigger.counted)

    def _done(self, trigger: Trigger, succeeded: bool) -> None:
        """An action ran between two steps."""
        trigger.acted(self._sources.clock())
        self._note(trigger, ActionOutcome.DONE if succeeded else ActionOutcome.FAILED)
        if succeeded:
            say(
                logger,
                logging.WARNING,
                "%s: %r changed the training at step %d",
                trigger.name,
                trigger.action,
                self._sources.step(),
            )
