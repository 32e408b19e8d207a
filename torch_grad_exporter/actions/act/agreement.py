"""Agreement: the ranks of a job do something after one and the same step, though none waits for another.

One rank proposes what exactly to do, and a step that is a little ahead of it. Each rank that hears of it in time promises to do
then as the verdict says, and the one that has proposed gives the verdict "yes" once all have promised. Who hears of it too late,
comes to that step before there is a verdict, was told to do something else at this place, or cannot do it, gives the verdict "no".
The first verdict counts, as the store decides, so all ranks know the same one: either all do it after that step, or none does, and
it is tried again, further ahead.

The store may outlive the ranks, as where torchrun starts them again. So a proposal and the promises to it carry a token of the
process that proposes, and only that process says "yes" to it.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch_grad_exporter.distributed.store import GoneError, JobStore, StoreError
from torch_grad_exporter.errors import caught

MARGIN_SECONDS = 4.0
"""How far ahead a step is proposed: all ranks ask the store once a second, twice until there is a verdict."""

MARGIN_STEPS = 2
"""And at least so many steps."""

TRIES = 6
"""Each twice as far ahead as the one before."""

STORE_SECONDS = 1.0
"""How long a question waits for the store, at most."""

DECIDING = 10
"""Questions at most, one a second, by which the training thread asks for a verdict that it does not know when its step comes.

Who gives up may be the only one that does not know it, and then this rank does something else than all others.
"""

AT_ONCE = 100
"""Proposals that are over and looked at in a row, at most."""

YES, NO = "yes", "no"


Choose = Callable[[], str | None]
Prepare = Callable[[str], object]


class RefusedError(RuntimeError):
    """The ranks cannot agree; nothing was done."""


@dataclass(slots=True)
class StepCount:
    """The steps of this process, for all its agreements. `due`: none of them has promised anything for an earlier step.

    `lock` is held for moments only. `clock`: seconds. `rate`: steps in a second.
    """

    clock: Callable[[], float] = time.monotonic
    steps: int = 0
    due: float = math.inf
    rate: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    _measured: tuple[float, int] | None = None

    def over(self) -> bool:
        """A step is over, on the training thread; whether something may have been promised for now."""
        with self.lock:
            self.steps += 1
            return self.steps >= self.due

    def measure(self) -> None:
        """Measures the rate, over a second at least. Slow steps count more slowly than fast ones: being late costs a try."""
        now, steps = self.clock(), self.steps
        if self._measured is None:
            self._measured = now, steps
            return
        then, before = self._measured
        if now - then >= 1.0:
            latest = (steps - before) / (now - then)
            self.rate = max(latest, (self.rate + latest) / 2)
            self._measured = now, steps


@dataclass(frozen=True, slots=True)
class Proposal:
    """To do `what` after a step. `token`: of the process that proposes, whose rank this is. `choice`: how exactly, as it chose."""

    step: int
    rank: int
    token: str
    what: str
    choice: str = ""

    def __str__(self) -> str:
        return f"{self.step} {self.rank} {self.token} {self.what}" + (f"\n{self.choice}" if self.choice else "")

    @classmethod
    def read(cls, text: str) -> Proposal:
        """From its text."""
        first, _, choice = text.partition("\n")
        step, rank, token, what = first.split(" ", 3)
        return cls(int(step), int(rank), token, what, choice)


@dataclass(slots=True, eq=False)
class _Promise:
    """What this rank has promised: to do as the verdict on a proposal says once `step` is over. `told`: whether the others know."""

    number: int
    step: int
    verdict: str = ""
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """This rank of the job, and its way to the others. `ring`: makes them look at their agreements. `on_error`: of the store."""

    store: JobStore
    rank: int
    world_size: int
    count: StepCount
    on_error: Callable[[Exception], None]
    ring: Callable[[], None]
    pause: Callable[[float], None] = time.sleep


class Agreement:
    """This rank's part in one thing that is done again and again. `step_over` is for the training thread, the rest for another.

    `name`: the same on all ranks, and that of nothing else in the store. `what`: what is to be done, and from which step
    steps are counted; it has to be the same text on all ranks.
    """

    def __init__(self, member: Member, name: str, what: str) -> None:
        self._member = member
        self._store = member.store
        self._count = member.count
        self._name = name
        self._what = what
        self._token = secrets.token_hex(8)
        self._number = 0
        """Of the proposal that is next or under way."""
        self._rung = -1
        """The last proposal of which the others were told."""
        self._promise: _Promise | None = None
        self._wanted = False
        self._listening = True
        self._tries = 0
        self._objection = ""
        self._silent: list[int] = []

    @property
    def wanted(self) -> bool:
        """Whether this rank has asked for it, and it is neither done nor refused."""
        return self._wanted

    @property
    def busy(self) -> bool:
        """Whether the store is to be asked; else only once somebody rings."""
        return self._wanted or self._promise is not None or self._listening

    @property
    def promised(self) -> float:
        """The step for which this rank has promised something, infinite if it has not."""
        promise = self._promise
        return math.inf if promise is None else promise.step

    def want(self) -> None:
        """This rank has a cause: `exchange` proposes it."""
        self._wanted = True

    def exchange(self, choose: Choose, prepare: Prepare) -> None:
        """Asks the store, about once a second. `prepare` is called before this rank promises anything, with what was chosen.

        `choose`: what exactly this rank would propose, `None` if there is nothing to be done any more. Raises what the two raise,
        `StoreError` where the store does not answer, and `RefusedError` where this rank's cause is given up.
        """
        self._listening = True
        for _ in range(AT_ONCE):
            if self._given_up or not self._look(choose, prepare):
                break
        if self._given_up:
            why = self._objection or f"not in {TRIES} tries{self._who_was_silent()}"
            self._tries, self._wanted, self._objection = 0, False, ""
            fix = "call on() with the same actions, in the same order and after the same step, on all ranks"
            raise RefusedError(f"the ranks did not agree on a step: {why}; {fix}")

    def step_over(self) -> bool:
        """A step is over and counted: whether it is to be done now. Asks the store only where there is no verdict yet."""
        promise = self._promise
        if promise is None or self._count.steps < promise.step:
            return False
        verdict = promise.verdict or self._decided(promise.number)
        with self._count.lock:
            if self._promise is promise:
                self._end(verdict)
        return verdict == YES

    def _decided(self, number: int) -> str:
        """The verdict: "no", unless there is one. Waits for the store: what this rank does not know, all others may."""
        for question in range(DECIDING):
            try:
                return self._agreed("verdict", number, NO)
            except StoreError as error:
                if isinstance(error, GoneError) or question == DECIDING - 1:
                    self._member.on_error(error)
                    break
                self._member.pause(STORE_SECONDS)
        return NO

    # The other thread

    def _look(self, choose: Choose, prepare: Prepare) -> bool:
        """Does this rank's part in the proposal that is under way. Whether it is over, and the next one is to be looked at."""
        number = self._number
        text = self._found("proposal", number)
        if not text and not self._wanted:
            self._listening = False
            return False
        if not text:
            choice = choose()
            if choice is None:
                self._wanted = self._listening = False
                return False
            text = self._agreed("proposal", number, str(self._mine(choice)))
        proposal = Proposal.read(text)
        if proposal.token == self._token and self._rung != number:
            self._member.ring()
            self._rung = number
        verdict = self._found("verdict", number)
        if not verdict:
            verdict = self._answered(proposal, number, prepare)
        if not verdict and proposal.token == self._token and self._all_have_promised(number):
            verdict = self._agreed("verdict", number, YES)
        if verdict:
            self._heard(number, verdict, mine=proposal.token == self._token)
        return self._number != number

    def _mine(self, choice: str) -> Proposal:
        """A step that all ranks hear of before they come to it."""
        margin = MARGIN_STEPS + math.ceil(self._count.rate * MARGIN_SECONDS)
        return Proposal(self._count.steps + (margin << self._tries), self._member.rank, self._token, self._what, choice)

    def _answered(self, proposal: Proposal, number: int, prepare: Prepare) -> str:
        """Promises to do as the verdict says, or says "no", which is returned."""
        if self._promise is None:
            objection = self._objection_to(proposal)
            if objection is not None:
                return self._agreed("verdict", number, f"{NO}: {objection}" if objection else NO)
            if (error := caught(prepare, proposal.choice)) is not None:
                verdict = self._agreed("verdict", number, f"{NO}: rank {self._member.rank} cannot do it, as its log says")
                self._heard(number, verdict, mine=proposal.token == self._token)
                raise error
            with self._count.lock:
                if self._count.steps < proposal.step:
                    self._promise = _Promise(number, proposal.step)
                    self._count.due = min(self._count.due, proposal.step)
        promise = self._promise
        if promise is None:
            return self._agreed("verdict", number, NO)
        if not promise.told:
            key = self._key(f"promise/{proposal.token}/{self._member.rank}", number)
            self._store.publish(key, b"1", seconds=STORE_SECONDS)
            promise.told = True
        return ""

    def _objection_to(self, proposal: Proposal) -> str | None:
        """Why this rank says "no" to a proposal, empty where that is nothing to tell, `None` if it does not."""
        rank, ranks = self._member.rank, self._member.world_size
        if proposal.rank >= ranks or (proposal.rank == rank and proposal.token != self._token):
            return ""  # its process has ended
        if proposal.what != self._what:
            return f"rank {rank} has {self._what} where rank {proposal.rank} has {proposal.what}"
        return None

    def _all_have_promised(self, number: int) -> bool:
        keys = {rank: self._key(f"promise/{self._token}/{rank}", number) for rank in range(self._member.world_size)}
        found = self._store.collect(keys.values(), seconds=STORE_SECONDS)
        self._silent = [rank for rank, key in keys.items() if key not in found]
        return not self._silent

    def _heard(self, number: int, verdict: str, *, mine: bool) -> None:
        with self._count.lock:
            if self._number != number:  # the training thread was faster
                return
            if self._promise is not None and verdict == YES:
                self._promise.verdict = YES
            else:
                self._end(verdict, mine=mine)

    def _end(self, verdict: str, *, mine: bool = False) -> None:
        """This proposal is over. One in which this rank had no part, as of an earlier start, is no try and no success."""
        took_part = mine or self._promise is not None
        self._promise = None
        self._number += 1
        self._listening = True
        if verdict == YES and took_part:
            self._tries, self._wanted = 0, False
        elif self._wanted and took_part:
            self._tries += 1
            self._objection = verdict.partition(": ")[2]

    @property
    def _given_up(self) -> bool:
        return self._wanted and (self._tries >= TRIES or bool(self._objection))

    def _who_was_silent(self) -> str:
        some = ", ".join(map(str, self._silent[:10]))
        return f"; the last one had no answer of rank {some}{' and others' if len(self._silent) > 10 else ''}" if some else ""

    # The store

    def _found(self, what: str, number: int) -> str:
        key = self._key(what, number)
        return self._store.collect([key], seconds=STORE_SECONDS).get(key, b"").decode()

    def _agreed(self, what: str, number: int, value: str) -> str:
        return self._store.agree(self._key(what, number), value, seconds=STORE_SECONDS)

    def _key(self, what: str, number: int) -> str:
        return f"{self._name}/{number}/{what}"
