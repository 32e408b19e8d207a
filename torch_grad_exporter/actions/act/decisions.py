"""JobDecisions: rank 0 decides for all ranks of a job, and all of them act after the same step.

1. Rank 0 writes a decision into the job's store: which action, and what exactly it is to do.
2. Each rank reads it within about a second, prepares the action, and answers. If one cannot, or does not answer, none does it.
3. Once all have answered, rank 0 adds the step after which they act. It lies so far ahead that each rank reads it before.

A thread does all of this; the training thread counts steps. After its answer a rank reads the store at least every `lease` steps,
until it knows the step. A lease takes about two seconds by the pace so far. Only if the training becomes much faster just then, or
the store is slow, the training thread waits for the next read. So a rank knows the step in time, unless the store does not answer
for ten seconds. Then the rank goes on without it. If it learns later that the step has passed, ranks may differ: that is an error
which is counted and logged, and the rank gives the action up.

The store may outlive the ranks, as under torchrun. So the process of rank 0 names its session by a random token, and a rank
acts only on what it has answered itself.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch_grad_exporter.actions.act.reports import SOURCE, ActionReports
from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.actions.act.trigger import StepTrigger
from torch_grad_exporter.collectors.outcomes import ActionOutcome
from torch_grad_exporter.distributed.store import JobStore, StoreError
from torch_grad_exporter.lifecycle import BackgroundLoop

POLL_SECONDS = 1.0  # between two reads of the store
LEASE_SECONDS = 2.0  # the steps of this time are those within which a rank reads a decision that it has answered
ANSWER_SECONDS = 60.0  # time for all ranks to answer
STORE_SECONDS = 1.0  # the longest that a question waits for the store
PACE_STEPS = 32  # steps of which the pace is the median
FASTEST = 1e-4  # seconds of a step; shorter ones end in a moment, and the training would not come to the step for long

# Exporters of this process whose ranks act together, by job and rank: in the store, each one's decisions are apart.
GENERATIONS: Counter[tuple[str, int]] = Counter()


@dataclass(frozen=True, slots=True)
class JobOfRanks:
    """The ranks that act together.

    Attributes:
        name: Of the job, the same on all ranks.
        wait_seconds: The longest that the training thread waits for a read.
    """

    store: JobStore
    name: str
    rank: int
    world_size: int
    wait_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class JobDecision:
    """What rank 0 has decided: open until it has a `step` or is `refused`, with the reason."""

    number: int
    what: str
    choice: Any
    lease: int
    step: int | None = None
    refused: str = ""

    @property
    def open(self) -> bool:
        """Whether rank 0 waits for answers."""
        return self.step is None and not self.refused


class JobDecisions:
    """This rank's part in the decisions of rank 0, in a thread from the first `add` until `close`.

    `step_over` is for the training thread, `add`, `want`, `remove` and `close` for any.
    """

    def __init__(self, job: JobOfRanks, training: Training, reports: ActionReports, clock: Callable[[], float]) -> None:
        self._job, self._training, self._reports, self._clock = job, training, reports, clock
        self._base = ""
        self._session = "" if job.rank else secrets.token_hex(8)
        self._triggers: Mapping[int, StepTrigger] = {}
        # What follows is shared with the training thread, under the lock of this condition, which a read notifies.
        self._changed = threading.Condition()
        self._steps = 0
        self._times: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._read_at = 0
        self._bound: JobDecision | None = None
        self._scheduled: list[tuple[int, StepTrigger, Any]] = []
        # What follows belongs to the thread: the number of the next decision, and of the last one that was considered.
        self._number = 0
        self._considered = -1
        self._objection = ""
        self._prepared: Any = None
        self._asked_at = 0.0
        guard = reports.errors.boundary(SOURCE, "decisions", limit=None)
        self._loop = BackgroundLoop("decisions", self._poll, guard=guard, pause=POLL_SECONDS)

    @property
    def steps(self) -> int:
        """Steps since the first `add`."""
        return self._steps

    def follows(self, action: StepAction) -> bool:
        """Return whether this rank leaves the judging to rank 0."""
        return self._job.rank != 0 and action.changes_weights

    def start(self) -> None:
        """Begin this rank's session, once. Raises `StoreError` if the store does not answer, `RuntimeError` without a thread."""
        member = self._job.name, self._job.rank
        with self._changed:
            if self._base:
                return
            base = f"act/{self._job.name}/{GENERATIONS[member]}"
            if self._job.rank == 0:
                self._job.store.publish(base, self._session.encode())
            else:
                self._collect(base)
            self._loop.start()
            GENERATIONS[member] += 1
            self._base = base

    def add(self, trigger: StepTrigger) -> None:
        """Take part in decisions about an action."""
        self._triggers = {**self._triggers, trigger.number: trigger}

    def want(self, trigger: StepTrigger, choice: object) -> None:
        """Ask for an action: rank 0 decides on it, another rank reports it to rank 0."""
        trigger.choice = choice
        self._loop.wake()

    def remove(self, trigger: StepTrigger) -> None:
        """Take no part in further decisions about an action."""
        self._triggers = {number: other for number, other in self._triggers.items() if other is not trigger}

    def close(self) -> None:
        """End the thread, which may be in a question to the store. Idempotent."""
        self._triggers = {}
        with self._changed:
            self._bound, self._scheduled = None, []
            self._changed.notify_all()
        self._loop.close(STORE_SECONDS)

    # The training thread

    def step_over(self) -> list[tuple[StepTrigger, Any]]:
        """Count a step. Returns the actions that are due now, each with what it has prepared."""
        with self._changed:
            self._steps += 1
            self._times.append(time.monotonic())
            if self._must_read():
                self._wait()
            due = [(trigger, prepared) for step, trigger, prepared in self._scheduled if step <= self._steps]
            if due:
                self._scheduled = [entry for entry in self._scheduled if entry[0] > self._steps]
        return due

    def _must_read(self) -> bool:
        return self._bound is not None and self._steps - self._read_at >= self._bound.lease

    def _wait(self) -> None:
        until = time.monotonic() + self._job.wait_seconds
        while self._must_read() and (left := until - time.monotonic()) > 0:
            self._loop.wake()
            self._changed.wait(min(left, POLL_SECONDS))
        if self._bound is not None and self._must_read():
            what, self._bound = self._bound.what, None
            message = f"no answer for {self._job.wait_seconds:g} s about the step after which other ranks may do it"
            self._reports.failed(f"{what}: the job's store", StoreError(message))

    # The thread

    def _poll(self) -> None:
        if not self._base or not self._triggers:
            return
        try:
            self._look()
        except StoreError as error:  # it may answer again; what was asked for stays
            if self._loop.stopping:
                return
            bound = self._bound
            self._reports.failed("the job's store" if bound is None else f"{bound.what}: the job's store", error)

    def _look(self) -> None:
        """Do this rank's part in the next decision: make it, answer or close it, and follow it once it is closed."""
        begun = self._steps
        decision, wish = self._read()
        decision = decision or self._proposed(wish)
        if decision is not None and decision.open:
            self._answer(decision)
            decision = self._closed(decision) if self._job.rank == 0 else decision
        if decision is not None and decision.open:
            decision = None
        trigger, late = None, False
        if decision is not None and self._considered == self._number:  # else it is that of an earlier start
            trigger = self._slot(decision)
        with self._changed:
            self._read_at = begun
            if decision is not None:
                self._bound = None
            if decision is not None and decision.step is not None and trigger is not None:
                late = self._steps >= decision.step
                if not late or not trigger.action.changes_weights:  # Stop rather late than never
                    self._scheduled.append((decision.step, trigger, self._prepared))
            self._changed.notify_all()
        if decision is not None:
            self._number += 1
            if trigger is not None:
                self._report(trigger, decision, late=late)

    def _read(self) -> tuple[JobDecision | None, str]:
        """Return the next decision, if there is one, and on rank 0 the number of the action that another rank wants."""
        if self._job.rank == 0:
            values = self._collect(self._key(), self._key("wish"))
        else:
            values = self._collect(self._base, self._key())
            session = values.get(self._base, b"").decode()
            if session != self._session:
                with self._changed:  # those of an earlier start are over
                    self._session, self._number, self._bound, self._scheduled = session, 0, None, []
                self._considered = -1
                values = self._collect(self._key())
        text = values.get(self._key())
        return JobDecision(*json.loads(text)) if text else None, values.get(self._key("wish"), b"").decode()

    def _proposed(self, wish: str) -> JobDecision | None:
        """Return the decision that rank 0 makes now, None without a cause. Another rank reports to rank 0 that it has one."""
        wanted = next((trigger for trigger in self._triggers.values() if trigger.choice is not None), None)
        if self._job.rank:
            if wanted is not None and self._session:
                self._job.store.agree(self._key("wish"), str(wanted.number), seconds=STORE_SECONDS)
            return None
        if wanted is None and not wish:
            return None
        number = int(wish) if wanted is None else wanted.number
        trigger = self._triggers.get(number)
        what, choice = ("", None) if trigger is None else (trigger.what, trigger.choice)
        with self._changed:
            gaps = [after - before for before, after in itertools.pairwise(self._times)]
        # Two at least: where a step takes seconds, the last read has begun before it ended.
        lease = max(2, math.ceil(LEASE_SECONDS / max(statistics.median(gaps), FASTEST))) if gaps else 2
        decision = JobDecision(number, what, choice, lease)
        self._asked_at = self._clock()
        self._publish(decision)
        return decision

    def _answer(self, decision: JobDecision) -> None:
        """Prepare, and report to rank 0 that this rank can do it, or why not."""
        if self._considered != self._number:
            self._considered = self._number
            self._objection = self._prepare(decision)
            if not self._objection:
                with self._changed:  # before others can know of the answer
                    self._bound, self._read_at = decision, self._steps
        answer = json.dumps([self._steps, self._objection]).encode()
        self._job.store.publish(self._key(f"answer/{self._job.rank}"), answer, seconds=STORE_SECONDS)

    def _prepare(self, decision: JobDecision) -> str:
        """Prepare the action. Returns why this rank cannot do it, empty if it can."""
        trigger, rank = self._slot(decision), self._job.rank
        if trigger is None:
            other = self._triggers.get(decision.number)
            mine = "no such action" if other is None else other.what
            return f"rank {rank} has {mine} where rank 0 has {decision.what or 'none'}"
        trigger.choice, trigger.pending = None, True
        if trigger.idle:
            return f"rank {rank} has disabled it, as its log says"
        try:
            self._prepared = trigger.action.prepare(self._training, decision.choice)
        except Exception as error:  # noqa: BLE001 - the boundary: no other rank may do it either
            trigger.action_guard.failed(error)
            return f"rank {rank} cannot do it, as its log says"
        return ""

    def _closed(self, decision: JobDecision) -> JobDecision:
        """Return the decision with its step or its refusal, once all ranks have answered or one is silent for too long."""
        keys = [self._key(f"answer/{rank}") for rank in range(self._job.world_size)]
        answers = self._job.store.collect(keys, seconds=STORE_SECONDS * (1 + len(keys) / 1000))
        steps, objections = zip(*map(json.loads, answers.values()), strict=True) if answers else ((), ())
        silent = [str(rank) for rank, key in enumerate(keys) if key not in answers]
        if any(objections):
            decision = replace(decision, refused="; ".join([text for text in objections if text][:10]))
        elif not silent:
            # Until this is visible rank 0 takes one lease at most, then each rank another one until it reads it. Within a round
            # ranks may be apart by the steps of all optimizers.
            apart = 1 + max(1, len(self._training.optimizers.numbered()))
            decision = replace(decision, step=max(self._steps, *steps) + 2 * decision.lease + apart)
        elif self._clock() - self._asked_at > ANSWER_SECONDS:
            more = " and others" if len(silent) > 10 else ""
            decision = replace(decision, refused=f"no answer of rank {', '.join(silent[:10])}{more}")
        else:
            return decision
        self._publish(decision)
        return decision

    def _report(self, trigger: StepTrigger, decision: JobDecision, *, late: bool) -> None:
        """Report a refusal, or that this rank has missed the step."""
        name = f"{trigger.name}: {trigger.action!r}"
        if decision.refused:
            trigger.choice, trigger.pending = None, False
            trigger.action.refused()
            trigger.timing.acted(self._clock())
            if self._job.rank == 0:
                fix = "call on() with the same actions, in the same order and after the same step, on all ranks"
                error = RuntimeError(f"the ranks did not agree on a step: {decision.refused}; {fix}")
                self._reports.failed(name, error)
            self._reports.note(trigger, ActionOutcome.REFUSED)
        elif late and trigger.action.changes_weights:
            trigger.ended = True
            reason = f"rank {self._job.rank} learned too late that all do it after step {decision.step}; from there on ranks differ"
            self._reports.disabled(name, reason)
            self._reports.note(trigger, ActionOutcome.FAILED)

    def _slot(self, decision: JobDecision) -> StepTrigger | None:
        trigger = self._triggers.get(decision.number)
        return None if trigger is None or trigger.what != decision.what else trigger

    # The store

    def _key(self, part: str = "") -> str:
        return f"{self._base}/{self._session}/{self._number}/{part}"

    def _collect(self, *keys: str) -> dict[str, bytes]:
        return self._job.store.collect(keys, seconds=STORE_SECONDS)

    def _publish(self, decision: JobDecision) -> None:
        self._job.store.publish(self._key(), json.dumps(astuple(decision)).encode(), seconds=STORE_SECONDS)
