"""StepActionRunner: runs actions on the training thread, at the end of an optimizer's step, and only while there are any."""

from __future__ import annotations

import functools
import itertools
import math
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_grad_exporter.actions.act.agreement import STORE_SECONDS, Agreement, Member, StepCount
from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.actions.act.trigger import SOURCE, Failures, Trigger
from torch_grad_exporter.capture.torch_hooks import GuardedHook, HookHandle
from torch_grad_exporter.distributed.identity import Identity, process_group
from torch_grad_exporter.distributed.store import JobStore, NoStoreError, StoreError
from torch_grad_exporter.errors import ErrorLog, Guard, caught
from torch_grad_exporter.rules import Rule
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.torch_compat.autograd import at_end_of_backward, graph_task
from torch_grad_exporter.torch_compat.optimizers import called_from_step, remove_step_hooks

HOOK_SECONDS = 2e-6
"""What a call of the hook takes before and after what a clock inside of it measures."""

GENERATIONS = itertools.count()
"""Numbers the exporters of this process that need agreement: in the store, each one's proposals are apart."""


@dataclass(frozen=True, slots=True)
class JobOfRanks:
    """The ranks that have to agree. `name`: of the job, the same on all ranks."""

    store: JobStore
    name: str
    rank: int
    world_size: int


@dataclass(eq=False, slots=True)
class ActionSlot:
    """One action between steps. `ready`: what the next step's end is to call; `prepared`: the same, once all ranks agree."""

    trigger: Trigger
    action: StepAction
    done: Callable[[bool], None]
    agreement: Agreement | None
    each: Guard
    """Of what the action does at each step."""
    named: Sequence[str] = ()
    """The layers that the rule's problems named when this was last asked for."""
    ready: Callable[[], None] | None = None
    prepared: Callable[[], None] | None = None

    def choose(self, training: Training) -> str | None:
        """What exactly this rank would do now."""
        return self.action.chosen(training, self.named)

    def prepare(self, training: Training, choice: str) -> None:
        """Makes what is to be called when all ranks agree."""
        self.prepared = self.action.prepared(training, choice)

    def due(self) -> Callable[[], None] | None:
        """What is to be called now that a step is over. For the training thread."""
        if self.agreement is not None:
            return self.prepared if self.agreement.step_over() else None
        run, self.ready = self.ready, None
        return run


@dataclass(eq=False)
class StepActionRunner:
    """Holds the actions and the hook that runs them. `concerns`: whether an optimizer trains the models.

    `spent` is told what each step costs, in seconds. `steps`: those of optimizers since the start of the exporter. `group`: the
    process group. `add`, `remove` and `close` are for any thread; `ask` and `exchange` for the one that evaluates.
    """

    training: Training
    concerns: Callable[[torch.optim.Optimizer], bool]
    errors: ErrorLog
    failures: Failures
    job: JobOfRanks | None
    spent: Callable[[float], object] = float
    steps: Callable[[], int] = int
    group: Callable[[], Identity | None] = process_group
    _slots: tuple[ActionSlot, ...] = ()
    _hook: GuardedHook | None = None
    _handle: HookHandle | None = None
    _task: int = -1
    """The graph task of the last backward in which an optimizer has stepped."""
    _hooked: bool = False
    """Whether a hook has seen a step since the user last reported one."""
    _inner: bool = False
    """Whether an optimizer has stepped within the step of another one that is not over."""
    _asked: bool = False
    """Whether any slot is ready."""
    _count: StepCount = field(default_factory=StepCount)
    _bell: bytes = b""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _generation: int | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = field(default_factory=weakref.WeakKeyDictionary)
    """Steps since the first action, by optimizer, and those that no hook has seen."""
    _reported: int = 0

    def check(self, action: StepAction, rule: Rule | None = None, *, own: bool = False) -> None:
        """Raises what the action finds wrong, and `RuntimeError` where the ranks of the job cannot agree."""
        action.check(self.training, rule, own=own)
        if self.job is None:
            self._check_alone(action)
            return
        try:
            self.job.store.collect(())
        except StoreError as error:
            fix = "; use torchrun, or call it after init_process_group" if isinstance(error, NoStoreError) else ""
            raise RuntimeError(
                f"action={action!r}: all {self.job.world_size} ranks have to do it after the same step, on which they agree in the "
                f"job's store, and there is none: {error}{fix}"
            ) from error

    def _check_alone(self, action: StepAction) -> None:
        """Raises `RuntimeError` where a rank would act alone, since the exporter knows of no other."""
        group = self.group() if self.job is None else None
        if group is not None and group.world_size > 1:
            raise RuntimeError(
                f"action={action!r}: all {group.world_size} ranks have to do it after the same step, and the exporter knows of "
                "one; start it after init_process_group"
            )

    def add(self, trigger: Trigger, action: StepAction, done: Callable[[bool], None]) -> ActionSlot:
        """Adds an action; the first one sets the hook. `done` is told of each time, and whether it raised nothing."""
        with self._lock:
            action.begin(self.training, own=trigger.by_itself)
            each = self.failures.guard(f"{trigger.name}: {action!r}")
            slot = ActionSlot(trigger, action, done, self._agreement(trigger, action), each)
            self._slots = (*self._slots, slot)
            if self._handle is None:
                self._hook = GuardedHook(SOURCE, self._step_over, self.errors)
                self._handle = register_optimizer_step_post_hook(self._hook)
            return slot

    def _agreement(self, trigger: Trigger, action: StepAction) -> Agreement | None:
        if self.job is None:
            return None
        if self._generation is None:
            self._generation = next(GENERATIONS)
            self._count.measure()
        job, count = self.job, self._count
        on_error = functools.partial(self.failures.failed, f"{trigger.name}: the job's store")
        member = Member(store=job.store, rank=job.rank, world_size=job.world_size, count=count, on_error=on_error, ring=self._ring)
        # The same step has the same number on all ranks only where they have counted from the same one.
        what = f"{action!r}, with steps counted from {self.steps() - count.steps}"
        return Agreement(member, self._key(str(next(self._numbers))), what)

    def _key(self, name: str) -> str:
        return "" if self.job is None else f"act/{self.job.name}/{self._generation}/{name}"

    def remove(self, slot: ActionSlot) -> None:
        """Removes an action; with the last one the hook goes."""
        with self._lock:
            self._slots = tuple(one for one in self._slots if one is not slot)
            if not self._slots:
                self.close()
        self._end(slot)

    def _end(self, slot: ActionSlot) -> None:
        self.failures.guard(f"{slot.trigger.name}: the end of {slot.action!r}")(slot.action.end)

    def close(self) -> None:
        """Removes the hook, and ends the actions; idempotent."""
        hook, handle, slots = self._hook, self._handle, self._slots
        self._slots, self._hook, self._handle = (), None, None
        if hook is not None:
            hook.disconnect()
        remove_step_hooks([] if handle is None else [handle])
        for slot in slots:
            self._end(slot)

    def disconnect(self) -> None:
        """Makes the hook do nothing. Takes no lock: a fork may have left it held."""
        if self._hook is not None:
            self._hook.disconnect()

    @property
    def slots(self) -> Sequence[ActionSlot]:
        """All of them."""
        return self._slots

    # The thread that evaluates

    def ask(self, slot: ActionSlot, named: Sequence[str] = ()) -> bool:
        """Lets an action run at the end of the next step, or of one on which the ranks agree. Raises what preparing raises.

        `named`: layers that the rule's problems name. Whether there is anything to be done, as far as that is known now.
        """
        slot.named = named
        if slot.agreement is not None:
            slot.agreement.want()
            return True
        self._check_alone(slot.action)
        if slot.ready is None:
            choice = slot.choose(self.training)
            if choice is None:
                return False
            slot.ready = slot.action.prepared(self.training, choice)
            self._asked = True
        return True

    @property
    def exchanges(self) -> bool:
        """Whether `exchange` has anything to do, now or later."""
        return self.job is not None and bool(self._slots)

    def exchange(self, failed: Callable[[ActionSlot, Exception], object]) -> None:
        """With other ranks: hears and says which steps are proposed. `failed` is told of what an agreement raises.

        While there is nothing to agree on, it is one question to the store, whatever the number of actions.
        """
        slots = [slot for slot in self._slots if slot.agreement is not None and not slot.trigger.idle]
        if self.job is None or not slots:
            return
        self._count.measure()
        key = self._key("bell")
        try:
            bell = self.job.store.collect([key], seconds=STORE_SECONDS).get(key, b"")
        except StoreError as error:  # it may answer again; what was asked for stays
            self.failures.failed("the job's store", error)
            return
        changed, self._bell = bell != self._bell, bell
        for slot in slots:
            agreement = slot.agreement
            if agreement is None or not (changed or agreement.busy):
                continue
            choose, prepare = functools.partial(slot.choose, self.training), functools.partial(slot.prepare, self.training)
            failure = caught(agreement.exchange, choose, prepare)
            if failure is not None:
                failed(slot, failure)  # the agreement stays busy

    def _ring(self) -> None:
        """Makes all ranks look at their agreements."""
        if self.job is not None:
            self.job.store.publish(self._key("bell"), secrets.token_hex(8).encode(), seconds=STORE_SECONDS)

    # The training thread

    def reported(self) -> None:
        """The user says that a step is over, which no hook may have seen."""
        hooked, self._hooked = self._hooked, False
        if not hooked:
            self._reported += 1
            GuardedHook(SOURCE, self._timed, self.errors)()

    def _step_over(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """After any optimizer's step. One that steps within a backward is over when the backward is."""
        start = time.perf_counter()
        if not (self.concerns(optimizer) or self._inner):
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
        self.spent(time.perf_counter() - start + HOOK_SECONDS)

    def _at_end(self) -> None:
        self._task = -1
        if self._hook is not None and self._slots:
            GuardedHook(SOURCE, self._timed, self.errors)()

    def _timed(self) -> None:
        start = time.perf_counter()
        self.step_over()
        self.spent(time.perf_counter() - start)

    def step_over(self) -> None:
        """A step is over: runs what is due. While a graph is captured nothing is, since it would be captured as well."""
        if not self._slots or capturing_graph():
            return
        steps = max((self._reported, *self._counts.values()))
        for slot in self._slots:
            if slot.action.each_step:
                slot.each(slot.action.step_over, steps)
        count, asked = self._count, self._asked
        if not (count.over() if self.job is not None else asked):
            return
        self._asked = False
        for slot in self._slots:
            run = slot.due()
            if run is not None:
                slot.done(slot.trigger.actions(run))
        with count.lock:
            count.due = min((slot.agreement.promised for slot in self._slots if slot.agreement is not None), default=math.inf)
