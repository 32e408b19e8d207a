"""How ranks agree on a step: simulated, with every order of events that a seed gives, and a store in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from tests.support.acting import Memory
from torch_grad_exporter.actions.act.agreement import DECIDING, TRIES, Agreement, Member, RefusedError, StepCount
from torch_grad_exporter.distributed.store import StoreError

if TYPE_CHECKING:
    from torch_grad_exporter.distributed.store import JobStore


class Rank:
    """One rank: its steps, and at which of them it acted. `what`: it is to do."""

    def __init__(self, store: Memory, number: int, ranks: int, clock: Callable[[], float], what: str = "Stop() from 0") -> None:
        self.errors: list[Exception] = []
        self.rings = 0
        self.pauses: list[float] = []
        self.count = StepCount(clock)
        member = Member(
            store=cast("JobStore", store), rank=number, world_size=ranks, count=self.count, on_error=self.errors.append,
            ring=self._ring, pause=self.pauses.append,
        )  # fmt: skip
        self.agreement = Agreement(member, "act/run/0", what)
        self.number = number
        self.unable = False
        self.choice = ""
        self.acted: list[int] = []
        self.prepared = 0
        self.refusals: list[str] = []

    @property
    def steps(self) -> int:
        return self.count.steps

    @property
    def refused(self) -> int:
        return len(self.refusals)

    def step(self) -> None:
        if self.count.over() and self.agreement.step_over():
            self.acted.append(self.steps)

    def exchange(self) -> None:
        self.count.measure()
        try:
            self.agreement.exchange(lambda: f"of {self.number}", self._prepare)
        except RefusedError as error:
            self.refusals.append(str(error))

    def _ring(self) -> None:
        self.rings += 1

    def _prepare(self, choice: str) -> None:
        self.prepared += 1
        if self.unable:
            raise ValueError("not here")
        self.choice = choice


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def job(ranks: int) -> tuple[Memory, Clock, list[Rank]]:
    """A store, a clock and so many ranks."""
    store, clock = Memory(), Clock()
    return store, clock, [Rank(store, number, ranks, clock) for number in range(ranks)]


def test_all_act_after_the_same_step() -> None:
    """Rank 1 alone has a cause; ten steps a second, and each rank asks once a second: all three act once, after one step."""
    _, clock, ranks = job(3)
    for second in range(30):
        if second == 5:
            ranks[1].agreement.want()
        for _ in range(10):
            for rank in ranks:
                rank.step()
        clock.at += 1.0
        for rank in ranks:
            rank.exchange()
    (step,) = ranks[0].acted
    assert [rank.acted for rank in ranks] == [[step]] * 3
    assert 50 < step <= 150
    assert all(rank.prepared for rank in ranks)
    assert not any(rank.agreement.wanted for rank in ranks)


def test_several_causes_are_one() -> None:
    """What all ranks want at once is done once."""
    _, clock, ranks = job(2)
    for rank in ranks:
        rank.agreement.want()
    for _ in range(30):
        for rank in ranks:
            rank.exchange()
            rank.step()
        clock.at += 1.0
    assert len(ranks[0].acted) == 1
    assert ranks[0].acted == ranks[1].acted


@pytest.mark.parametrize("seed", range(200))
def test_whatever_the_order_none_acts_alone(seed: int) -> None:
    """Ranks whose background threads are late by any time, up to not at all, act after the same steps, or not.

    Steps go in lock step, as under DDP: a rank is at most one ahead. Causes come at random on any rank.
    """
    generator = random.Random(seed)
    _, clock, ranks = job(generator.choice([2, 3, 5]))
    chances = [generator.choice([0.01, 0.02, 0.9]) for _ in ranks]
    for _ in range(6000):
        number = generator.randrange(len(ranks))
        rank, clock.at = ranks[number], clock.at + 0.02
        if generator.random() < 0.02:
            rank.agreement.want()
        if generator.random() < chances[number]:
            rank.exchange()
        elif rank.steps == min(one.steps for one in ranks):
            rank.step()
    for rank in ranks:
        while rank.steps < max(one.steps for one in ranks):
            rank.step()
    assert all(rank.acted == ranks[0].acted for rank in ranks)


def test_random_orders_come_to_agreements() -> None:
    """The property above is not one of ranks that never act: with threads that are not late, each cause is followed."""
    _, clock, ranks = job(4)
    for cause in range(5):
        ranks[cause % 4].agreement.want()
        for _ in range(20):
            for rank in ranks:
                rank.exchange()
                rank.step()
            clock.at += 1.0
    assert len(ranks[0].acted) == 5
    assert all(rank.acted == ranks[0].acted for rank in ranks)


def test_a_rank_that_never_answers_keeps_all_from_acting() -> None:
    """Rank 2 asks nothing, as where it has no such `on`: nobody acts, and the cause is refused after some tries."""
    _, clock, ranks = job(3)
    ranks[0].agreement.want()
    for _ in range(2000):
        for rank in ranks:
            rank.step()
        for rank in ranks[:2]:
            rank.exchange()
        clock.at += 1.0
    assert [rank.acted for rank in ranks] == [[], [], []]
    assert [rank.refused for rank in ranks] == [1, 0, 0]
    assert not ranks[0].agreement.wanted


def test_a_rank_that_hears_of_it_too_late_says_no_and_the_next_try_is_further_ahead() -> None:
    """Rank 1 asks only every 12 seconds: the first tries fail for both, a later one succeeds for both."""
    store, clock, ranks = job(2)
    ranks[0].agreement.want()
    for second in range(400):
        for rank in ranks:
            rank.step()
        ranks[0].exchange()
        if second % 12 == 11:
            ranks[1].exchange()
        clock.at += 1.0
    assert len(ranks[0].acted) == 1
    assert ranks[0].acted == ranks[1].acted
    assert b"no" in store.kept.values()
    assert len([key for key in store.kept if key.endswith("proposal")]) <= TRIES


def promised() -> tuple[Memory, list[Rank]]:
    """Two ranks that have both promised to act after step 2; rank 1 does not know the verdict, which is "yes"."""
    store, _, ranks = job(2)
    ranks[0].agreement.want()
    for rank in (ranks[0], ranks[1], ranks[0]):
        rank.exchange()
    return store, ranks


def test_a_store_that_is_gone_at_the_step_costs_one_question() -> None:
    """The rank does not act, and goes on without a pause."""
    store, clock = Memory(), Clock()
    ranks = [Rank(store, number, 2, clock) for number in range(2)]
    ranks[0].agreement.want()
    for rank in ranks:
        rank.exchange()
    store.gone, store.asked = True, 0
    for _ in range(50):
        for rank in ranks:
            rank.step()
    assert [rank.acted for rank in ranks] == [[], []]
    assert [len(rank.errors) for rank in ranks] == [1, 1]
    assert (store.asked, ranks[0].pauses) == (2, [])


@pytest.mark.parametrize("slow", range(DECIDING))
def test_a_store_that_is_slow_at_the_step_is_asked_again(slow: int) -> None:
    """Rank 1 comes to the step without a verdict, and its first questions get no answer: it acts after the same step as rank 0."""
    store, ranks = promised()
    store.slow = slow
    for _ in range(5):
        for rank in reversed(ranks):
            rank.step()
    assert [rank.acted for rank in ranks] == [[2], [2]]
    assert len(ranks[1].pauses) == slow
    assert ranks[1].errors == []


def test_a_store_that_does_not_answer_at_the_step_costs_a_limited_time() -> None:
    """Ten questions and nine pauses of a second for a proposal, and then the training goes on."""
    store, ranks = promised()
    store.down, store.asked = True, 0
    for _ in range(50):
        ranks[1].step()
    assert (store.asked, len(ranks[1].pauses), ranks[1].acted) == (DECIDING, DECIDING - 1, [])
    assert len(ranks[1].errors) == 1


def test_a_promise_that_did_not_reach_the_store_is_told_again() -> None:
    """Rank 1's first one got no answer; all act at the first proposal."""
    store, clock, ranks = job(2)
    ranks[0].agreement.want()
    for rank in ranks:
        rank.count.rate = 10.0
    ranks[0].exchange()
    publish = store.publish

    def fails(key: str, value: bytes, *, seconds: float = 0.0) -> None:
        raise StoreError("no answer")

    store.publish = fails  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        ranks[1].exchange()
    store.publish = publish  # type: ignore[method-assign]
    for _ in range(60):
        for rank in ranks:
            rank.exchange()
            rank.step()
    assert len(ranks[0].acted) == 1
    assert ranks[0].acted == ranks[1].acted
    assert clock() == 0.0


def test_ranks_that_are_to_do_different_things_do_nothing() -> None:
    """Rank 0 would stop where rank 1 would halve: neither acts, and the refusal comes at once, with both, where the cause is."""
    store, clock = Memory(), Clock()
    ranks = [Rank(store, number, 2, clock, what) for number, what in enumerate(("Stop() from 0", "Halve() from 0"))]
    ranks[0].agreement.want()
    for _ in range(4):
        for rank in ranks:
            rank.exchange()
            rank.step()
        clock.at += 1.0
    assert [rank.acted for rank in ranks] == [[], []]
    assert len(ranks[0].refusals) == 1
    assert "rank 1 has Halve() from 0 where rank 0 has Stop() from 0; call on() with the same actions" in ranks[0].refusals[0]
    assert ranks[1].refusals == []


def test_a_refusal_says_which_ranks_did_not_answer() -> None:
    """Rank 2 of four has no such `on`."""
    _, clock, ranks = job(4)
    ranks[0].agreement.want()
    while not ranks[0].refusals:
        for rank in (ranks[0], ranks[1], ranks[3], ranks[0]):
            rank.exchange()
        for rank in ranks:
            rank.step()
        clock.at += 1.0
    assert f"not in {TRIES} tries; the last one had no answer of rank 2;" in ranks[0].refusals[0]


@pytest.mark.parametrize("seed", range(100))
def test_what_is_left_of_an_earlier_start_does_no_harm(seed: int) -> None:
    """Ranks that are started again at any moment, also as fewer, with the store of before, all act after the same steps."""
    generator = random.Random(seed)
    store, clock = Memory(), Clock()
    for number in (3, 3, 2):
        ranks = [Rank(store, one, number, clock) for one in range(number)]
        for _ in range(generator.randrange(20, 400)):
            rank, clock.at = generator.choice(ranks), clock.at + 0.05
            if generator.random() < 0.05:
                rank.agreement.want()
            if generator.random() < 0.3:
                rank.exchange()
            elif rank.steps == min(one.steps for one in ranks):
                rank.step()
        if number == 3:
            continue  # they are killed as they are
        for rank in ranks:
            while rank.steps < max(one.steps for one in ranks):
                rank.step()
        assert all(rank.acted == ranks[0].acted for rank in ranks)


def test_ranks_that_are_started_again_come_to_agree() -> None:
    """Behind 50 proposals of the start before, of which the last is open and promised by all, they act together soon."""
    store, clock, ranks = job(2)
    for number in range(50):
        store.kept[f"act/run/0/{number}/proposal"] = b"7 0 token Stop() from 0"
        store.kept[f"act/run/0/{number}/verdict"] = b"yes"
    store.kept["act/run/0/50/proposal"] = b"1000000 0 token Stop() from 0"
    for rank in range(2):
        store.kept[f"act/run/0/50/promise/token/{rank}"] = b"1"
    ranks[1].agreement.want()
    for _ in range(40):
        for rank in ranks:
            rank.exchange()
            rank.step()
        clock.at += 1.0
    assert len(ranks[0].acted) == 1
    assert ranks[0].acted == ranks[1].acted


def test_steps_that_begin_late_and_are_fast_are_agreed_on() -> None:
    """Ten minutes without a step, and then 200 a second: a step is found within 10 seconds, after two tries at most."""
    store, clock, ranks = job(2)
    for second in range(620):
        for rank in ranks:
            rank.exchange()
        for _ in range(200 if second >= 605 else 0):
            for rank in ranks:
                rank.step()
        clock.at += 1.0
        if second == 608:
            ranks[0].agreement.want()
    assert len(ranks[0].acted) == 1
    assert ranks[0].acted == ranks[1].acted
    assert len([key for key in store.kept if key.endswith("proposal")]) <= 2


def test_the_others_are_told_of_each_proposal_once() -> None:
    """By the rank that proposes; no other rings."""
    store, ranks = promised()
    for _ in range(3):
        for rank in ranks:
            rank.exchange()
    assert [rank.rings for rank in ranks] == [1, 0]
    assert store.kept


def test_a_step_costs_no_question_while_there_is_no_proposal() -> None:
    """A store that would raise is not asked by steps."""
    store, clock = Memory(), Clock()
    rank = Rank(store, 0, 2, clock)
    store.down = True
    for _ in range(1000):
        rank.step()
    assert rank.errors == []
    assert store.asked == 0


def test_all_do_what_the_proposer_has_chosen() -> None:
    """Ranks 1 and 2 have causes and would choose different things: all three prepare what one of them has proposed."""
    _, clock, ranks = job(3)
    for rank in ranks[1:]:
        rank.agreement.want()
    while not all(rank.acted for rank in ranks):
        clock.at += 1
        for rank in ranks:
            for _ in range(10):
                rank.step()
            rank.exchange()
    assert [rank.choice for rank in ranks] == ["of 1"] * 3
    assert [rank.acted for rank in ranks] == [ranks[0].acted] * 3


def test_nobody_acts_where_one_cannot() -> None:
    """Rank 2 cannot do it and says so: nobody acts, rank 1 is refused after its tries, and nobody waits for the step."""
    _, clock, ranks = job(3)
    ranks[2].unable = True
    ranks[1].agreement.want()
    failed = 0
    for _ in range(100):
        clock.at += 1
        for rank in ranks:
            rank.step()
            try:
                rank.exchange()
            except ValueError:
                failed += 1
    assert [rank.acted for rank in ranks] == [[]] * 3
    assert [rank.refused for rank in ranks] == [0, 1, 0]
    assert "rank 2 cannot do it" in ranks[1].refusals[0]
    assert failed == 1
    assert not ranks[1].agreement.wanted
