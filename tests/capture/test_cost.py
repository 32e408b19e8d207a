"""Work on a device is timed by events that are read when they have passed, and charged to the budget."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from tests.support.device import CUDA, FakeDevice
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.capture.cost import PAIRS, SAMPLES, DeviceTimer, SampleCost
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.transfer.events import Mailbox, Stepped


def test_nothing_is_read_before_the_device_has_passed() -> None:
    """What a sample cost is told once the device has passed all of its work, host and device together."""
    device, schedule = FakeDevice(0.25), SamplingSchedule()
    moments = iter([0.0, 0.5])
    clock = StepClock(deque(), clock=lambda: 0.0)
    timer = DeviceTimer(device.pool())
    cost = SampleCost(clock, schedule, timer)
    clock.clock = lambda: next(moments)
    cost.of(lambda: [timer.end(timer.begin([CUDA, torch.device("cpu")])) for _ in range(2)])
    cost.sample_over()
    cost.settle()
    assert not schedule._costs
    device.catch_up()
    cost.settle()
    assert list(schedule._costs) == [0.5 + 2 * 0.25]
    assert clock.device_seconds == 0.5


def test_what_only_one_sample_costs_is_overhead_alone() -> None:
    """A sample with a compilation in it counts as time taken, and says nothing of what samples cost."""
    device, schedule = FakeDevice(5.0), SamplingSchedule()
    clock = StepClock(deque(), clock=lambda: 0.0)
    timer = DeviceTimer(device.pool())
    cost = SampleCost(clock, schedule, timer)
    timer.end(timer.begin([CUDA]))
    clock.clock = iter([0.0, 3.0]).__next__
    cost.spent(cost.now(), sampled=True)
    cost.sample_over(once=True)
    device.passed = device.launched
    cost.settle()
    assert clock.own_seconds == 3
    assert not schedule._costs
    clock.clock = iter([10.0, 10.5]).__next__
    cost.of(lambda: None)
    cost.sample_over()
    cost.settle()
    assert list(schedule._costs) == [0.5]


def test_a_device_that_is_always_behind_is_charged_sample_by_sample() -> None:
    """Where the device is two samples behind for ever, each sample's own device time is told, none with another's."""
    device, schedule = FakeDevice(0.1), SamplingSchedule()
    timer = DeviceTimer(device.pool())
    cost = SampleCost(StepClock(deque(), clock=lambda: 0.0), schedule, timer)
    for _ in range(100):
        timer.end(timer.begin([CUDA]))
        cost.sample_over()
        device.passed = device.launched - 0.45  # each sample's two events are 0.2 apart
        cost.settle()
    assert list(schedule._costs) == pytest.approx([0.1] * 32)


def test_a_device_that_never_comes_along_fills_no_memory() -> None:
    """Beyond a number of samples under way, the oldest are forgotten."""
    device = FakeDevice(1.0)
    timer = DeviceTimer(device.pool())
    cost = SampleCost(StepClock(deque()), SamplingSchedule(), timer)
    for _ in range(3 * SAMPLES):
        for _ in range(2 * PAIRS):
            timer.end(timer.begin([CUDA]))
        cost.sample_over()
        cost.settle()
    assert len(cost._unsettled) == SAMPLES
    assert all(len(pairs) == PAIRS for _, pairs in cost._unsettled)
    assert len(device.made) == 2 * PAIRS * (SAMPLES + 1)  # those of forgotten samples are used again


def test_device_time_counts_as_overhead_and_lengthens_the_interval() -> None:
    """A sample whose launches cost the host next to nothing, and the device a whole second, is a rare one."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, port=None) as exporter:
        device = FakeDevice(1.0)
        reader = exporter._training.capture._parts.reader
        reader.cost.timer._events = device.pool()
        reader._places = frozenset([CUDA])
        for _ in range(30):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
            device.catch_up()
        samples = value(exporter, "torch_grad_exporter_captures_total")
        assert 2 <= samples <= 4  # the first ones take two seconds at most
        assert value(exporter, "torch_grad_exporter_sampling_interval_steps") == 4096
        assert value(exporter, "torch_grad_exporter_overhead_seconds_total") > samples - 1
        assert not errors(exporter)


def test_what_the_exporter_took_is_told_with_one_step() -> None:
    """The time on the training thread and on devices since the step before, together, and none of it again."""
    post = Mailbox()
    clock = StepClock(post, clock=lambda: 0.0)
    for host, devices in ((0.25, 0.5), (0.0, 0.0), (0.5, 1.0)):
        clock.spent(host)
        clock.spent_on_devices(devices)
        clock.step_ended(first_of_round=True)
        clock.step_ended(first_of_round=False)
    assert [event.own_seconds for event in post if isinstance(event, Stepped)] == [0.75, 0.0, 1.5]


def test_what_is_done_at_steps_is_timed_as_well() -> None:
    """The norms of weights around a step cost the device something, too."""
    recorded = []
    for weights in (False, True):
        model = Perceptron()
        optimizer = sgd(model)
        device = FakeDevice(place=torch.device("cpu"))
        with start_exporter(model, port=None, every=1, weights=weights) as exporter:
            exporter._training.cost.timer._events = device.pool()
            for _ in range(10):
                optimizer.zero_grad()
                model(batch()).sum().backward()
                optimizer.step()
            assert not errors(exporter)
        recorded.append(sum(event.records for event in device.made))
    assert recorded[1] == recorded[0] + 10 * 4
