"""Which rounds are sampled, with costs and step times of our choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.lifecycle import ThreadTime

FIRST = 10
"""Samples in a row at the start."""

LONGEST = 4096


def train(
    schedule: SamplingSchedule, rounds: int, step: Callable[[int], float], cost: Callable[[int], float], start: int = 0
) -> list[int]:
    """Run rounds of the given lengths and costs; return the sampled rounds."""
    sampled = []
    for number in range(start, start + rounds):
        seconds = 0.0
        if schedule.next_due(number) == number:
            seconds = cost(number)
            schedule.sampled(seconds)
            sampled.append(number)
        schedule.stepped(step(number), seconds, sampled=seconds > 0)
    return sampled


def always(value: float) -> Callable[[int], float]:
    """Return the same length or cost for every round."""
    return lambda _: value


# Places


@pytest.mark.parametrize("interval", [1, 3, 16, 100, 4096])
def test_one_round_of_each_interval_is_sampled(interval: int) -> None:
    """Of each `interval` rounds in a row, from 0 on, one is sampled, at changing places."""
    schedule = SamplingSchedule(every=interval)
    sampled = [n for n in range(40 * interval) if schedule.next_due(n) == n]
    assert [n // interval for n in sampled] == list(range(40))
    assert sampled[0] == 0
    assert len({n % interval for n in sampled}) >= min(interval, 8)


def test_rounds_of_longer_intervals_are_a_subset() -> None:
    """Ranks whose intervals differ for a while still have samples of the same rounds."""
    schedules = [SamplingSchedule(every=2**k) for k in range(8)]
    rounds = [{n for n in range(4_000) if schedule.next_due(n) == n} for schedule in schedules]
    assert all(longer < shorter for shorter, longer in itertools.pairwise(rounds))


@pytest.mark.parametrize("period", [2, 3, 5, 16])
@pytest.mark.parametrize("interval", [2, 3, 16])
def test_a_periodic_loop_is_sampled_at_every_place(interval: int, period: int) -> None:
    """Of rounds that take turns, like those of a GAN's two optimizers, each kind gets its share of the samples."""
    schedule = SamplingSchedule(every=interval)
    places = [n % period for n in range(200 * interval * period) if schedule.next_due(n) == n]
    assert all(100 < places.count(place) < 320 for place in range(period))


@pytest.mark.parametrize("every", [1, 10, 4096])
def test_a_fixed_interval_stays(every: int) -> None:
    """With a number for `every` one round of each interval is sampled, whatever samples cost."""
    schedule = SamplingSchedule(every=every)
    assert len(train(schedule, 3 * 4096, always(0.001), always(10.0))) == -(-3 * 4096 // every)
    assert schedule.interval == every
    assert not schedule.capped


# The start


@pytest.mark.parametrize(("cost", "first"), [(0.0001, [*range(10)]), (0.01, [0, 1, 2]), (0.03, [0]), (3.0, [0])])
def test_the_first_rounds_are_sampled(cost: float, first: list[int]) -> None:
    """A run starts with ten samples in a row, or with what the budget of 2.5 s pays for, and then thins out."""
    sampled = train(SamplingSchedule(), 30_000, always(0.01), always(cost))
    assert [number for number, place in zip(sampled, range(10), strict=False) if number == place] == first
    assert len(sampled) > len(first) + 2


def test_samples_go_on_where_hooks_take_the_budget() -> None:
    """Rounds that cost three times the budget without a sample, as of several optimizers, leave samples a quarter of it."""
    schedule, taken = SamplingSchedule(), []
    for number in range(20_000):
        sampled = schedule.next_due(number) == number
        if sampled:
            schedule.sampled(0.003)
        schedule.stepped(0.01, 0.0033 if sampled else 0.0003, sampled=sampled)
        taken.append(sampled)
    assert [sum(taken[start : start + 5_000]) for start in (5_000, 10_000, 15_000)] == pytest.approx([40, 40, 40], abs=25)


@pytest.mark.parametrize(
    ("step", "cost", "rest"),
    [
        (0.028, 0.0037, 1.5e-4), (0.0015, 0.002, 5e-6), (0.1, 0.009, 1e-5), (0.6, 0.041, 1e-5), (0.015, 0.005, 1e-5),
        (0.3, 0.08, 1e-4), (3.0, 0.005, 1e-3),
    ],
)  # fmt: skip
def test_the_budget_holds_after_ten_seconds(step: float, cost: float, rest: float) -> None:
    """What the first samples took is paid back within ten seconds, and at no moment after that is more taken than 1 %."""
    schedule = SamplingSchedule()
    elapsed, own, ratios, lent = 0.0, 0.0, [], []
    for number in range(int(60 / step)):
        sampled = schedule.next_due(number) == number
        if sampled:
            schedule.sampled(cost)
        took = cost + 5 * rest if sampled else rest
        schedule.stepped(step if number else None, took, sampled=sampled)
        elapsed, own = elapsed + step + took, own + took
        lent.append(schedule.repaying)
        if elapsed > 10:
            ratios.append(own / elapsed)
    assert max(ratios) <= max(0.01, (cost + 5 * rest) / 10)  # a single sample may be more than ten seconds pay for
    assert ratios[-1] > 0.0025
    assert lent.index(False) == lent.count(True)
    assert 0 < lent.count(True) * step < 20


@pytest.mark.parametrize(("share", "expected"), [(0.0099, 1), (0.011, 2), (0.021, 4), (1.0, 128)])
def test_the_interval_after_the_beginning(share: float, expected: int) -> None:
    """From the tenth sample on the interval is the smallest power of two with samples below 1 % of step time."""
    schedule = SamplingSchedule()
    train(schedule, FIRST, always(0.1), always(0.1 * share))
    assert schedule.interval == expected


def test_without_step_times_no_interval_grows() -> None:
    """While no step time is known, every round is sampled."""
    schedule = SamplingSchedule()
    for _ in range(30):
        schedule.sampled(1.0)
    assert schedule.interval == 1
    assert not schedule.capped


# Changes


def test_single_outliers_change_nothing() -> None:
    """Steps that write a checkpoint and a sample that compiles something do not move the interval."""
    schedule = SamplingSchedule()
    intervals = []
    for number in range(200):
        schedule.stepped(60.0 if number % 10 == 3 else 0.01)
        schedule.sampled(5.0 if number == 100 else 0.0007)
        intervals.append(schedule.interval)
    assert set(intervals[FIRST:]) == {8}


def test_the_cap_is_reported() -> None:
    """Where the budget asks for a longer interval than there is, the interval stays at the cap and says so."""
    schedule = SamplingSchedule(budget=0.0001)
    train(schedule, FIRST, always(0.01), always(0.19))
    assert schedule.interval == LONGEST
    assert schedule.capped
    for _ in range(40):
        schedule.sampled(0.19)
    assert schedule.interval == LONGEST
    for _ in range(40):
        schedule.sampled(0.001)
    assert not schedule.capped


# The budget


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.001, 0.1])
@pytest.mark.parametrize("ratio", [0.0001, 0.02, 2.5])
def test_the_overhead_converges_to_the_budget(budget: float, ratio: float) -> None:
    """For samples from 0.01 % to 250 % of a step the overhead is within the budget in the long run, and not needlessly small."""
    generator = random.Random(1)
    rounds = 60_000 if ratio > 1 else 8_000
    sampled = train(
        SamplingSchedule(budget=budget),
        rounds,
        lambda _: 0.02 * generator.uniform(0.9, 1.1),
        lambda _: 0.02 * ratio * generator.uniform(0.7, 1.3),
        start=4096,
    )
    overhead = sum(n > 4096 + rounds // 4 for n in sampled) * ratio / (rounds * 3 / 4)
    assert min(0.19 * budget, 0.9 * ratio) <= overhead <= budget * 1.02


def test_steps_that_become_shorter() -> None:
    """When steps are ten times as fast from some moment on, the interval grows until the budget holds again."""
    schedule = SamplingSchedule()
    train(schedule, 5_000, always(0.1), always(0.0019))
    assert schedule.interval == 2
    sampled = train(schedule, 60_000, always(0.01), always(0.002), start=5_001)
    assert sum(n > 40_000 for n in sampled) * 0.002 / (25_000 * 0.01) <= 0.0101


@pytest.mark.slow
@pytest.mark.parametrize(
    "costs",
    [
        [0.001] * 7 + [0.01],
        *([7.8e-4] * (rare - 1) + [7.8e-4 * rare * share / (1 - share)] for rare, share in ((16, 0.5), (100, 0.3))),
    ],
)
def test_samples_that_differ_count_by_their_mean(costs: list[float]) -> None:
    """Where one sample of several takes a large share of all, the overhead is still near the budget."""
    several = itertools.cycle(costs)
    paid: list[tuple[int, float]] = []

    def cost(number: int) -> float:
        paid.append((number, next(several)))
        return paid[-1][1]

    train(SamplingSchedule(), 60_000, always(0.01), cost)
    overhead = sum(seconds for number, seconds in paid if number >= 10_000) / (50_000 * 0.01)
    assert 0.0038 < overhead <= 0.0105


def test_other_rounds_take_their_share_of_the_budget() -> None:
    """What the other rounds cost is taken off the budget, so the interval is longer; a quarter stays for samples."""

    def interval(own: Callable[[int], float]) -> int:
        schedule = SamplingSchedule(budget=0.01)
        for number in range(400):
            schedule.stepped(1.0, own(number))
            schedule.sampled(0.1)
        return schedule.interval

    assert [interval(always(own)) for own in (0.0, 0.006, 0.5)] == [16, 32, 64]
    assert interval(lambda number: 0.006 if number == 390 else 0.0) == 16  # a single round that was interrupted


def test_a_sampled_round_costs_its_hooks_too() -> None:
    """Where most rounds are only counted, a sampled one costs the hooks that follow it, besides the sample."""
    schedule = SamplingSchedule(budget=0.01)
    for _ in range(100):
        schedule.counted([0.1] * 99, 99 * 4e-6)
        schedule.stepped(0.1, 0.001)
        schedule.sampled(0.003)
    assert schedule.interval == 8
    assert 50 < schedule.timing_interval < 200


def test_the_timing_interval_is_of_the_last_rounds() -> None:
    """After a training whose rounds were counted, one whose rounds are all followed shows that."""
    schedule = SamplingSchedule()
    schedule.counted([0.1] * 10_000, 0.04)
    for _ in range(6_000):
        schedule.stepped(0.1, 1e-5)
    assert schedule.timing_interval == 1


def test_own_threads_are_part_of_the_budget() -> None:
    """What the exporter's own threads take of a core leaves less of the budget to samples."""
    now, spent = 0.0, 0.0
    threads = ThreadTime(lambda: now, lambda: spent)
    alone, beside = SamplingSchedule(budget=0.02), SamplingSchedule(budget=0.02, threads=threads)
    now, spent = 100.0, 1.2  # 1.2 % of a core
    threads.note()
    assert threads.share == pytest.approx(0.012)
    for schedule in (alone, beside):
        train(schedule, 20_000, always(0.01), always(0.001))
    assert beside.interval >= 2 * alone.interval


def test_a_sample_beside_the_regular_ones_is_affordable_until_it_is_paid_back() -> None:
    """What a sample beside the others costs may be owed up to 30 seconds' budget, and is paid back by the steps that follow."""
    schedule = SamplingSchedule(budget=0.01)
    train(schedule, 2_000, always(0.1), always(0.01))
    assert schedule.affords_another
    for _ in range(40):
        schedule.sampled(0.01)
        schedule.stepped(0.1, 0.01, sampled=True)
    assert not schedule.affords_another
    train(schedule, 1_000, always(0.1), always(0.01), start=2_000)
    assert schedule.affords_another


def test_a_sample_that_costs_more_than_may_be_owed_is_never_beside_the_others() -> None:
    """What one such sample costs would be forgotten, not paid back."""
    schedule = SamplingSchedule(budget=0.01)
    train(schedule, 20_000, always(1.0), always(3.0))
    assert not schedule.affords_another


@pytest.mark.parametrize("every", [1, 100])
def test_a_fixed_interval_has_no_budget(every: int) -> None:
    """With a fixed interval further samples are always affordable, but not where none is wanted at all."""
    schedule = SamplingSchedule(every=every)
    for _ in range(100):
        schedule.sampled(1.0)
    assert schedule.affords_another
    schedule.never()
    assert not schedule.affords_another
