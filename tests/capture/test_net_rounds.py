"""What rounds count for, seen from outside: counted rounds, samples that are never closed, loss scales, intervals that change."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.schedule import SamplingSchedule

QUIET = dict.fromkeys(("host", "process", "container", "gpu", "cuda_memory"), False)
"""Collectors that ask the machine."""

CAPTURES = "torch_grad_exporter_captures_total"
NONFINITE = "torch_grad_nonfinite_steps_total"
NORM = "torch_grad_global_norm"
SLOWEST = "torch_train_slowest_step_seconds"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def started(model: torch.nn.Module, **options: object) -> Exporter:
    """An exporter without a server that samples every round."""
    return start_exporter(model, None, **{"every": 1, "collectors": QUIET, **options})


class Loop:
    """A plain loop, which notes when its steps are over."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.model = Perceptron() if model is None else model
        self.optimizer = sgd(self.model)
        self.moments: list[tuple[float, float]] = []
        """Before and after each step."""

    def backward(self, scale: float = 1.0) -> None:
        """Clears, and runs one backward of the loss times the scale."""
        self.optimizer.zero_grad()
        (self.model(batch()).square().mean() * scale).backward()

    def finish(self) -> None:
        """The optimizer's step."""
        before = time.perf_counter()
        self.optimizer.step()
        self.moments.append((before, time.perf_counter()))

    def step(self, scale: float = 1.0) -> None:
        """A backward and a step."""
        self.backward(scale)
        self.finish()

    def steps(self, number: int) -> None:
        """So many of both."""
        for _ in range(number):
            self.step()

    def norm(self) -> float:
        """The norm of all gradients as they are now."""
        return math.hypot(*(float(p.grad.double().norm()) for p in self.model.parameters() if p.grad is not None))

    def is_slowest(self, last: int, seconds: float | None) -> bool:
        """Whether that may be the longest of so many of the last times from step to step."""
        times = [(now[0] - then[1], now[1] - then[0]) for then, now in itertools.pairwise(self.moments)][-last:]
        least, most = (max(bounds) for bounds in zip(*times, strict=True))
        return seconds is not None and least <= seconds <= most


# The slowest step


@pytest.mark.parametrize("after", [50, 127, 128])
def test_the_slowest_step_is_one_of_the_last_128_where_rounds_are_only_counted(after: int) -> None:
    """A step of 0.3 s is the slowest of the 128 from it on, and not any more after that; nearly all of them are only counted."""
    loop = Loop()
    exporter = started(loop.model, every=4096, overhead_budget=0.0001)
    loop.steps(400)
    assert (value(exporter, "torch_grad_exporter_timing_interval_steps") or 0) > 4  # else rounds are not only counted
    loop.backward()
    time.sleep(0.3)  # a step that is slow
    loop.finish()
    loop.steps(after)
    exporter.close()
    assert value(exporter, "torch_train_step_duration_seconds_count") == len(loop.moments) - 1
    assert loop.is_slowest(128, value(exporter, SLOWEST))
    first, last = loop.moments[0], loop.moments[-1]
    assert last[0] - first[1] <= (value(exporter, "torch_train_step_duration_seconds_sum") or 0.0) <= last[1] - first[0]
    assert not errors(exporter)


def test_the_slowest_step_of_counted_rounds_outlasts_followed_ones() -> None:
    """A slow step among counted rounds is still the slowest when an evaluation has ended them and others are followed."""
    loop = Loop()
    exporter = started(loop.model, every=4096, overhead_budget=0.0001)
    loop.steps(400)
    loop.backward()
    time.sleep(0.3)  # a step that is slow
    loop.finish()
    loop.steps(3)
    exporter.step()  # ends what is only counted; the optimizer has told of this step
    assert loop.is_slowest(128, value(exporter, SLOWEST))
    loop.steps(30)
    exporter.close()
    assert value(exporter, "torch_train_steps_total", optimizer="SGD") == len(loop.moments)
    assert loop.is_slowest(128, value(exporter, SLOWEST))
    assert (value(exporter, SLOWEST) or 0) > 0.25


# Samples whose outcome comes late


def outcomes(exporter: Exporter) -> dict[str, float]:
    """The steps with a gradient that is not finite, by what became of them."""
    found = {one: value(exporter, NONFINITE, outcome=one) for one in ("stepped", "skipped", "unknown")}
    return {name: number for name, number in found.items() if number}


@pytest.mark.parametrize("scrapes", [1, 5])
def test_a_sample_that_was_counted_as_unknown_is_not_counted_again_by_its_step(scrapes: int) -> None:
    """A NaN that no step follows for a second is `unknown`; when the step comes after all, every counter stays what it is."""
    loop = Loop()
    shown = ("torch_grad_captures_total", "torch_grad_norm_distribution_count", "torch_grad_norm_squared_accumulated_total")

    def numbers() -> list[float | None]:
        whole = [value(exporter, name) for name in (CAPTURES, "torch_grad_global_norm_distribution_count")]
        elements = value(exporter, "torch_grad_nonfinite_elements_total", layer="first", kind="nan")
        return [*whole, *(value(exporter, name, layer="first") for name in shown), elements]

    with started(loop.model) as exporter:
        loop.steps(3)
        squares = value(exporter, shown[2], layer="first")
        start = time.monotonic()
        loop.backward(math.nan)
        nans = sum(int(p.grad.isnan().sum()) for p in loop.model.first.parameters())
        assert outcomes(exporter) == {} or time.monotonic() - start >= 1
        assert eventually(lambda: outcomes(exporter) == {"unknown": 1})
        for _ in range(scrapes):
            assert outcomes(exporter) == {"unknown": 1}
            assert numbers() == [4, 3, 4, 3, squares, nans]
        loop.finish()
        assert outcomes(exporter) == {"unknown": 1}
        assert numbers() == [4, 3, 4, 3, squares, nans]
        assert value(exporter, "torch_grad_sample_step") == 4
        loop.step()  # the parameters are NaN by now
        nans += sum(int(p.grad.isnan().sum()) for p in loop.model.first.parameters())
        assert outcomes(exporter) == {"unknown": 1, "stepped": 1}
        assert numbers() == [5, 3, 5, 3, squares, nans]
        assert not errors(exporter)


def test_a_finite_sample_that_no_step_followed_for_long_is_entered_once() -> None:
    """Histogram, sums and captures have a sample that no step followed for long when its step comes, and the next one adds one."""
    loop = Loop()
    squares = 0.0

    def accumulated() -> float:
        found = [value(exporter, "torch_grad_norm_squared_accumulated_total", layer=name) or 0.0 for name in ("first", "second")]
        return sum(found)

    with started(loop.model) as exporter:
        for _ in range(2):
            loop.step()
            squares += loop.norm() ** 2
        loop.backward()
        exporter._host._gradients.expire(time.time() + 3600)
        assert value(exporter, "torch_grad_captures_total", layer="first") == 2
        assert accumulated() == pytest.approx(squares)
        squares += loop.norm() ** 2
        loop.finish()
        assert accumulated() == pytest.approx(squares)
        assert value(exporter, "torch_grad_global_norm_distribution_count") == 3
        assert value(exporter, CAPTURES) == 3
        loop.step()
        squares += loop.norm() ** 2
        assert accumulated() == pytest.approx(squares)
        assert value(exporter, CAPTURES) == 4
        assert value(exporter, "torch_grad_global_norm_distribution_count") == 4


# Loss scales


def test_the_scale_of_the_step_counts_and_not_that_of_the_backward() -> None:
    """A scaler was given, and another one, four times as large, is used: norms and extremes are those of unscaled gradients.

    The first sample is divided by the scale that was known at its backward, until its step shows the right one.
    """
    loop = Loop()
    given, used = (torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6) for scale in (2.0**8, 2.0**10))
    given.scale(torch.zeros(1))
    with started(loop.model, grad_scaler=given) as exporter:
        for _ in range(3):
            loop.optimizer.zero_grad()
            used.scale(loop.model(batch()).square().mean()).backward()
            used.unscale_(loop.optimizer)
            before, extreme = loop.norm(), max(float(p.grad.abs().max()) for p in loop.model.first.parameters())
            torch.nn.utils.clip_grad_norm_(loop.model.first.parameters(), 1e-4)
            after = loop.norm()
            used.step(loop.optimizer)
            used.update()
            assert value(exporter, NORM) == pytest.approx(before, rel=1e-5)
            assert value(exporter, "torch_grad_global_norm_after_clip") == pytest.approx(after, rel=1e-4)
            assert value(exporter, "torch_grad_clip_coefficient") == pytest.approx(after / before, rel=1e-4)
            assert value(exporter, "torch_grad_max_magnitude", layer="first") == pytest.approx(extreme, rel=1e-5)
        assert value(exporter, "torch_grad_clipped_steps_total") == 3
        assert not errors(exporter)


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_a_scale_that_changes_between_backward_and_step(factor: float) -> None:
    """Where a scaler's scale is set anew after the backward, the norm is that of what the optimizer sees, which is not clipped."""
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6)
    with started(loop.model, grad_scaler=scaler) as exporter:
        for step in range(4):
            loop.optimizer.zero_grad()
            scaler.scale(loop.model(batch()).square().mean()).backward()
            if step == 2:
                scaler.update(scaler.get_scale() * factor)
            scaler.step(loop.optimizer)
            scaler.update()
            assert value(exporter, NORM) == pytest.approx(loop.norm(), rel=1e-5)
            assert value(exporter, "torch_grad_global_norm_after_clip") == pytest.approx(loop.norm(), rel=1e-5)
            assert value(exporter, "torch_grad_clip_coefficient") == pytest.approx(1.0)
            assert value(exporter, "torch_train_loss_scale") == 2.0**8 * (1.0 if step < 2 else factor)
        assert value(exporter, "torch_grad_clipped_steps_total") == 0


# Intervals that change


def alone(interval: int, number: int) -> bool:
    """Whether a schedule of this interval that was never asked before samples the round."""
    return SamplingSchedule(every=interval).due(number)


@pytest.fixture
def schedule() -> SamplingSchedule:
    """A schedule that has had its first samples, and whose interval is 64."""
    found = SamplingSchedule()
    for _ in range(10):
        found.stepped(0.01)
        found.sampled(0.005)
    assert found.interval == 64
    return found


@pytest.mark.parametrize(("cost", "interval"), [(1.0, 128), (1e-9, 32)])
@pytest.mark.parametrize("place", [1, 17, 32, 40, 63])
def test_an_interval_that_changes_within_a_block(schedule: SamplingSchedule, cost: float, interval: int, place: int) -> None:
    """Before a change the rounds of the old interval are sampled, and from the very next round on those of the new one.

    Schedules that were never asked before tell which these are. Nothing is asked for twice, though rounds ahead were asked about.
    """
    start, rounds = 64 * 100, 64 * 8
    change = start + 64 * 3 + place
    expected = [n for n in range(start, start + rounds) if alone(64 if n < change else interval, n)]
    found: list[int] = []
    for number in range(start, start + rounds):
        if number == change:
            for _ in range(64):  # what samples cost is known later, on a device
                if schedule.interval == 64:
                    schedule.sampled(cost)
        if schedule.next_due(number) == number:
            assert schedule.due(number)
            found.append(number)
    assert schedule.interval == interval
    assert found == expected


def test_what_samples_cost_before_a_change_of_the_interval_is_forgotten(schedule: SamplingSchedule) -> None:
    """One expensive sample of 32 doubles the interval; the eight cheap ones after it halve it again, as nothing else has a say."""

    def cost(seconds: float, samples: int = 1) -> None:
        for _ in range(samples):
            schedule.stepped(0.01)
            schedule.sampled(seconds)

    cost(0.2)
    cost(0.004, 30)
    assert schedule.interval == 64
    cost(0.004)
    assert schedule.interval == 128
    cost(0.004, 7)
    assert schedule.interval == 128
    cost(0.004)
    assert schedule.interval == 64


def test_no_round_of_a_changed_interval_is_only_counted(schedule: SamplingSchedule) -> None:
    """What need only be counted ends before the next round that is sampled, also when the interval has just been halved."""
    for _ in range(300):
        schedule.stepped(0.001, 100e-6)
    number, seen = 64 * 100, set()
    for _ in range(400):
        if number % 3 == 0:
            schedule.sampled(1e-9)
        seen.add(schedule.interval)
        ahead = schedule.only_counted(number)
        assert not any(alone(schedule.interval, n) for n in range(number, number + ahead))
        number += ahead + 1
    assert len(seen) > 3


def test_at_most_255_rounds_in_a_row_are_only_counted() -> None:
    """However little of the budget hooks may take and however far away the next sample is, a round is followed now and then."""
    schedule = SamplingSchedule(every=4096, budget=0.0001)
    for _ in range(32):
        schedule.stepped(0.001, 100e-6)
    ahead = [schedule.only_counted(number) for number in range(1, 3000, 7)]
    assert max(ahead) == 255
    assert len(set(ahead)) > 10
