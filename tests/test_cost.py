"""Work on a device is timed by events that are read when they have passed, and charged to the budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from models import Perceptron, batch, sgd
from scrape import errors, value

from torch_grad_exporter import start_exporter
from torch_grad_exporter.cost import PAIRS, DeviceTimer

CUDA = torch.device("cuda", 0)


@dataclass
class FakeEvent:
    """An event at `moment`, in seconds of the fake device."""

    device: FakeDevice
    moment: float

    def query(self) -> bool:
        return self.device.passed >= self.moment

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        return 1000 * (end.moment - self.moment)


class FakeDevice:
    """A device on which everything between two events takes `seconds`; it has come as far as `passed`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.launched, self.passed = seconds, 0.0, 0.0

    def recorded(self, device: torch.device) -> FakeEvent:
        assert device.type == "cuda"
        self.launched += self.seconds
        return FakeEvent(self, self.launched)


def test_nothing_is_read_before_the_device_has_passed() -> None:
    """A timer is busy until the device has passed the last event, and then says how long the work took in all."""
    device = FakeDevice(0.25)
    timer = DeviceTimer(device.recorded)
    for _ in range(2):
        timer.end(timer.begin([CUDA, torch.device("cpu")]))
    assert timer.busy
    device.passed = device.launched
    assert not timer.busy
    assert timer.taken() == 0.5
    assert timer.taken() == 0


def test_a_device_that_never_comes_along_fills_no_memory() -> None:
    """Beyond a number of pairs under way, work is no longer timed."""
    timer = DeviceTimer(FakeDevice(1.0).recorded)
    for _ in range(3 * PAIRS):
        timer.end(timer.begin([CUDA]))
    assert len(timer._under_way) == PAIRS


def test_device_time_counts_as_overhead_and_stretches_the_interval() -> None:
    """A sample whose launches cost the host next to nothing, and the device a whole second, is a rare one."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, port=None) as exporter:
        device = FakeDevice(1.0)
        reader = exporter._capture._reader
        reader.timer._recorded = device.recorded
        reader._places = frozenset([CUDA])
        for _ in range(30):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
            device.passed = device.launched
        samples = value(exporter, "torch_grad_exporter_captures_total")
        assert 2 <= samples <= 4  # the first ones take two seconds at most
        assert value(exporter, "torch_grad_exporter_sampling_interval_steps") == 4096
        assert value(exporter, "torch_grad_exporter_overhead_seconds_total") > samples - 1
        assert not errors(exporter)
