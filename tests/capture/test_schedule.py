"""Which rounds are sampled, with costs and step times of our choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from torch_grad_exporter.capture.schedule import FIRST_SAMPLES, LONGEST, SamplingSchedule


def train(
    schedule: SamplingSchedule,
    rounds: int,
    step: Callable[[int], float],
    cost: Callable[[int], float],
    start: int = 0,
) -> tuple[list[int], list[int]]:
    """Runs rounds of the given lengths and costs; returns the sampled rounds and the interval after each sample."""
    sampled, intervals = [], []
    for number in range(start, start + rounds):
        schedule.stepped(step(number))
        if schedule.due(number):
            schedule.sampled(cost(number))
            sampled.append(number)
            intervals.append(schedule.interval)
    return sampled, intervals


def always(value: float) -> Callable[[int], float]:
    """The same length or cost for every round."""
    return lambda _: value


def test_the_first_ten_rounds_are_sampled() -> None:
    """A run starts with ten samples in a row, so that there is something to see, and then thins out."""
    sampled, _ = train(SamplingSchedule(), 10_000, always(0.01), always(0.01))
    assert sampled[:10] == list(range(10))
    assert [n // 128 for n in sampled[10:]] == list(range(sampled[10] // 128, 10_000 // 128 + (sampled[-1] >= 9984)))


def test_the_first_samples_take_two_seconds_at_most() -> None:
    """Samples that are slow end the beginning as soon as they took two seconds together."""
    sampled, _ = train(SamplingSchedule(), 300, always(1.0), always(0.5))
    assert sampled[:4] == [0, 1, 2, 3]
    assert [n // 64 for n in sampled[4:]] in ([1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4])


def test_the_interval_after_the_beginning_is_the_shortest_that_keeps_the_budget() -> None:
    """From the tenth sample on the interval is the smallest power of two with samples below 1 % of step time."""
    for share, expected in ((0.0099, 1), (0.011, 2), (0.019, 2), (0.021, 4), (0.5, 64), (1.0, 128)):
        schedule = SamplingSchedule()
        train(schedule, FIRST_SAMPLES, always(0.1), always(0.1 * share))
        assert schedule.interval == expected


def test_intervals_are_powers_of_two() -> None:
    """Under costs that vary wildly, the interval stays a power of two between 1 and the cap."""
    generator = random.Random(0)
    schedule = SamplingSchedule()
    seen = set()
    for number in range(200_000):
        schedule.stepped(0.01)
        if schedule.due(number):
            schedule.sampled(0.01 * 10 ** generator.uniform(-4, 4 * (number > 50_000)))
        seen.add(schedule.interval)
    assert len(seen) > 4
    assert all(interval.bit_count() == 1 and interval <= LONGEST for interval in seen)


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 10, 16, 100, 256, 1000, 4096])
def test_one_round_of_each_interval_is_sampled(interval: int) -> None:
    """Of each `interval` rounds in a row, from 0 on, exactly one is sampled, and it is not always the same place."""
    schedule = SamplingSchedule(every=interval)
    sampled = [n for n in range(40 * interval) if schedule.due(n)]
    assert [n // interval for n in sampled] == list(range(40))
    assert sampled[0] == 0
    assert len({n % interval for n in sampled}) >= min(interval, 8)


def test_the_rounds_of_a_long_interval_are_among_those_of_a_shorter() -> None:
    """Ranks whose intervals differ for a while still have samples of the same rounds."""
    rounds = [{n for n in range(20_000) if SamplingSchedule(every=2**k).due(n)} for k in range(8)]
    assert all(longer < shorter for shorter, longer in itertools.pairwise(rounds))


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("interval", [2, 3, 4, 8, 16, 64])
def test_a_loop_with_a_period_is_sampled_at_every_place(interval: int, period: int) -> None:
    """Of rounds that take turns, as a GAN's two optimizers do, each kind gets its share of the samples."""
    schedule = SamplingSchedule(every=interval)
    places = [n % period for n in range(200 * interval * period) if schedule.due(n)]
    assert all(100 < places.count(place) < 320 for place in range(period))


def test_the_interval_changes_once_in_eight_samples_at_most() -> None:
    """After the beginning, between two changes of the interval are at least eight samples, and it changes by 2."""
    costs = [1e-5] * 40 + [1.0] * 120 + [1e-5] * 120
    schedule = SamplingSchedule()
    intervals = []
    for cost in costs:
        schedule.stepped(0.01)
        schedule.sampled(cost)
        intervals.append(schedule.interval)
    changes = [n for n in range(FIRST_SAMPLES, len(costs)) if intervals[n] != intervals[n - 1]]
    assert len(changes) > 6
    assert all(b - a >= 8 for a, b in itertools.pairwise(changes))
    assert all(intervals[n] in (2 * intervals[n - 1], intervals[n - 1] / 2) for n in changes)


@pytest.mark.parametrize(("share", "expected"), [(0.0101, 32), (0.0099, 16), (0.0041, 16), (0.0039, 8)])
def test_doubled_above_the_budget_and_halved_far_below(share: float, expected: int) -> None:
    """An interval of 16 is doubled above 1 %, kept between 0.4 and 1 %, and halved below 0.4 %."""
    schedule = SamplingSchedule()
    train(schedule, FIRST_SAMPLES, always(0.01), always(0.01 * 0.15))
    assert schedule.interval == 16
    schedule._costs.extend([0.01 * 16 * share] * 32)  # as many as are remembered
    for _ in range(8):
        assert schedule.interval == 16
        schedule.sampled(0.01 * 16 * share)
    assert schedule.interval == expected


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("ratio", [0.0001, 0.003, 0.02, 0.3, 1.0, 2.5])
def test_the_overhead_converges_to_the_budget(budget: float, ratio: float) -> None:
    """For samples from 0.01 % to 250 % of a step, the long-run overhead is within the budget and not needlessly small."""
    generator = random.Random(1)
    schedule = SamplingSchedule(budget=budget)
    rounds = 60_000
    sampled, _ = train(
        schedule,
        rounds,
        lambda _: 0.02 * generator.uniform(0.9, 1.1),
        lambda _: 0.02 * ratio * generator.uniform(0.7, 1.3),
        start=4096,
    )
    last = [n for n in sampled if n > 4096 + rounds // 4]
    overhead = len(last) * ratio / (rounds * 3 / 4)
    assert overhead <= budget * 1.02
    assert overhead >= min(0.19 * budget, 0.9 * ratio)


def test_the_schedule_follows_a_run_whose_steps_become_shorter() -> None:
    """When steps are ten times as fast from some moment on, the interval grows until the budget holds again."""
    schedule = SamplingSchedule()
    train(schedule, 5_000, always(0.1), always(0.0019))
    assert schedule.interval == 2
    sampled, _ = train(schedule, 60_000, always(0.01), always(0.002), start=5_001)
    late = [n for n in sampled if n > 40_000]
    assert len(late) * 0.002 / (25_000 * 0.01) <= 0.0101


def test_single_outliers_change_nothing() -> None:
    """Steps that write a checkpoint and a sample that compiles something do not move the interval."""
    schedule = SamplingSchedule()
    intervals = []
    for number in range(200):
        schedule.stepped(60.0 if number % 10 == 3 else 0.01)
        schedule.sampled(5.0 if number == 100 else 0.0007)
        intervals.append(schedule.interval)
    assert set(intervals[FIRST_SAMPLES:]) == {8}


def test_samples_that_differ_count_by_their_mean() -> None:
    """Where every eighth sample costs ten times as much as the others, the overhead is still near the budget."""
    schedule = SamplingSchedule()
    costs = itertools.cycle([0.001] * 7 + [0.01])
    paid: list[tuple[int, float]] = []

    def cost(number: int) -> float:
        paid.append((number, next(costs)))
        return paid[-1][1]

    train(schedule, 100_000, always(0.01), cost)
    overhead = sum(seconds for number, seconds in paid if number >= 20_000) / (80_000 * 0.01)
    assert 0.0038 < overhead <= 0.0105


@pytest.mark.parametrize(("rare", "share"), [(16, 0.5), (40, 0.5), (100, 0.3)])
def test_rare_samples_that_cost_a_lot_are_paid_for(rare: int, share: float) -> None:
    """One sample in so many takes a large share of all, as an interrupted one does: no estimate without the worst one tells it."""
    usual = 0.0099 * 0.01 * 8 * 0.99
    costs = itertools.cycle([usual] * (rare - 1) + [usual * rare * share / (1 - share)])
    paid: list[tuple[int, float]] = []

    def cost(number: int) -> float:
        paid.append((number, next(costs)))
        return paid[-1][1]

    schedule = SamplingSchedule()
    train(schedule, 200_000, always(0.01), cost)
    overhead = sum(seconds for number, seconds in paid if number >= 20_000) / (180_000 * 0.01)
    assert 0.0038 < overhead <= 0.0105


def test_costs_of_long_ago_are_forgotten() -> None:
    """After very many samples near the budget that suddenly cost a tenth, the interval is halved within 500."""
    schedule = SamplingSchedule()
    for number in range(20_500):
        for _ in range(schedule.interval):
            schedule.stepped(0.01)
        schedule.sampled(0.75e-3 if number < 20_000 else 0.75e-4)
        if number == 19_999:
            assert schedule.interval == 8
    assert schedule.interval < 8


@pytest.mark.parametrize("step", [0.005, 0.01, 0.02, 0.04, 0.3])
@pytest.mark.parametrize(("followed", "counted", "sample"), [(450e-6, 70e-6, 3e-3), (60e-6, 7e-6, 0.3e-3), (450e-6, 7e-6, 0.5e-3)])
def test_all_rounds_together_keep_to_the_budget(step: float, followed: float, counted: float, sample: float) -> None:
    """Sampled rounds are followed, too, and those that are only counted cost what the user's calls take: all of it counts.

    Where the other rounds leave less than a quarter of the budget, samples take that quarter all the same.
    """
    schedule = SamplingSchedule()
    spent, others, number, rounds = 0.0, 0.0, 4096, 30_000
    while number < 4096 + rounds:
        late = number > 4096 + rounds / 4
        if schedule.due(number):
            schedule.stepped(step)
            schedule.sampled(sample)
            spent += late * (sample + followed)
        else:
            schedule.stepped(step, followed)
            spent, others = spent + late * followed, others + late * followed
        skipped = schedule.only_counted(number + 1)
        if skipped:
            schedule.counted([step] * skipped, skipped * counted)
            spent, others = spent + late * skipped * counted, others + late * skipped * counted
        number += 1 + skipped
    trained = rounds * 3 / 4 * step
    assert spent / trained <= max(0.01, others / trained + 0.0025) * 1.03
    assert spent / trained >= min(0.0035, 0.99 * (sample + followed) / step)


def test_the_cap_is_reported() -> None:
    """Where the budget asks for a longer interval than there is, the interval stays at the cap and says so."""
    schedule = SamplingSchedule(budget=0.0001)
    train(schedule, FIRST_SAMPLES, always(0.01), always(0.19))
    assert schedule.interval == LONGEST
    assert schedule.capped
    for _ in range(40):
        schedule.sampled(0.19)
    assert schedule.interval == LONGEST
    for _ in range(40):
        schedule.sampled(0.001)
    assert not schedule.capped


def test_without_step_times_no_interval_grows() -> None:
    """While no step time is known, every round is sampled."""
    schedule = SamplingSchedule()
    for _ in range(30):
        schedule.sampled(1.0)
    assert schedule.interval == 1
    assert not schedule.capped


@pytest.mark.parametrize("every", [1, 3, 10, 4096])
def test_a_fixed_interval_stays(every: int) -> None:
    """With a number for `every`, one round of as many is sampled, whatever samples cost."""
    schedule = SamplingSchedule(every=every)
    sampled, intervals = train(schedule, 3 * 4096, always(0.001), always(10.0))
    assert len(sampled) == -(-3 * 4096 // every)
    assert set(intervals) == {every}
    assert not schedule.capped


def test_rounds_that_are_not_sampled_take_their_share_of_the_budget() -> None:
    """What the other rounds cost is taken off the budget, so the interval is longer; a quarter stays for samples."""

    def interval(floor: float) -> int:
        schedule = SamplingSchedule(budget=0.01)
        for _ in range(400):
            schedule.stepped(1.0, floor)
            schedule.sampled(0.1)
        return schedule.interval

    assert [interval(floor) for floor in (0.0, 0.006, 0.5)] == [16, 32, 64]


def test_hooks_that_are_interrupted_now_and_then_count_by_their_mean() -> None:
    """Of rounds with 20 us in hooks one in 50 has 20 ms, as on a busy machine: 5 of the last 256, of which one is left out."""
    schedule = SamplingSchedule()
    for number in range(1000):
        schedule.stepped(0.1, 20e-3 if number % 50 == 25 else 20e-6)
    assert schedule._available() == pytest.approx(0.01 - (4 * 20e-3 + 251 * 20e-6) / 255 / 0.1)
    assert schedule.counting.rounds_to_a_followed == 2
    steady = SamplingSchedule()
    for number in range(1000):
        steady.stepped(0.1, 20e-3 if number == 990 else 20e-6)
    assert steady._available() == pytest.approx(0.01 - 20e-6 / 0.1)
    assert steady.counting.rounds_to_a_followed == 1
