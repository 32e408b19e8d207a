"""Phases on a device: by its events, in its time, read once it has passed them. The device is a fake that waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.device import CUDA, FakeDevice, FakeEvent
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.device_events import EventPool, Kind
from torch_grad_exporter.capture.phases import BACKWARD, BEHIND, DATA, FORWARD, OPTIMIZER, OUTSIDE, READ, PhaseTimes, main_device
from torch_grad_exporter.errors import LIMIT, ErrorLog

WORK = {OUTSIDE: 0.5, DATA: 0.25, FORWARD: 1.0, BACKWARD: 2.0, OPTIMIZER: 4.0}
"""What the device takes in each phase of a round, in seconds; sums of these are exact."""


def phases_on(device: FakeDevice) -> PhaseTimes:
    """Those of a model on the fake device, with a host clock that may not be asked for a phase."""
    phases = PhaseTimes(lambda: 0.0, device.pool())
    phases.on(CUDA)
    return phases


def a_round(device: FakeDevice, phases: PhaseTimes) -> None:
    """One round, each phase once."""
    for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER, OUTSIDE):
        phases.enter(phase)
        device.work(WORK[phase])
    phases.round_over()


def test_each_phase_has_the_time_of_the_device() -> None:
    """What is launched in a phase counts to it, in the device's seconds, though the host's clock stands still."""
    device = FakeDevice()
    phases = phases_on(device)
    for _ in range(5):
        a_round(device, phases)
        device.catch_up()
    assert phases.seconds == dict.fromkeys(PhaseTimes(lambda: 0.0).seconds, 0.0) | {k: 4 * v for k, v in WORK.items()}
    assert phases.untimed == 0


def test_nothing_is_read_before_the_device_has_passed() -> None:
    """A round counts only once the device has passed its last event, not when it is in the middle of it."""
    device = FakeDevice()
    phases = phases_on(device)
    a_round(device, phases)
    after_the_first = device.launched
    a_round(device, phases)
    device.passed = after_the_first - 0.125
    phases.round_over()
    assert phases.seconds[FORWARD] == 0
    device.passed = after_the_first
    phases.round_over()
    assert phases.seconds[FORWARD] == WORK[FORWARD]


def test_events_are_used_again() -> None:
    """A hundred rounds take the events of the few that are under way."""
    device = FakeDevice()
    phases = phases_on(device)
    for _ in range(100):
        a_round(device, phases)
        device.catch_up()
    assert len(device.made) <= 3 * 7
    assert max(event.records for event in device.made) > 10


def test_a_device_that_falls_behind_costs_a_bounded_number_of_events() -> None:
    """Beyond so many rounds none is timed, and that is counted; as soon as the device has come along they are again."""
    device = FakeDevice()
    phases = phases_on(device)
    for _ in range(BEHIND + 30):
        a_round(device, phases)
    made = len(device.made)
    assert phases.untimed == 30
    assert made <= (BEHIND + 2) * 7
    device.catch_up()
    for _ in range(BEHIND):
        phases.round_over()
        device.catch_up()
    assert phases.seconds[BACKWARD] == BEHIND * WORK[BACKWARD]
    a_round(device, phases)
    assert len(device.made) == made


def test_one_round_reads_few_others() -> None:
    """A device that was far behind and has come along at once does not make one round pay for all."""
    device = FakeDevice()
    phases = phases_on(device)
    for _ in range(20):
        a_round(device, phases)
    device.catch_up()
    a_round(device, phases)
    assert phases.seconds[FORWARD] == READ * WORK[FORWARD]


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured() -> None:
    """The round of the capture is in no phase, and counted; the rounds around it are timed."""
    device = FakeDevice()
    phases = phases_on(device)
    a_round(device, phases)
    device.captures = True
    records, queries = sum(event.records for event in device.made), device.queries
    a_round(device, phases)
    assert (sum(event.records for event in device.made), device.queries) == (records, queries)
    device.captures = False
    a_round(device, phases)
    assert phases.untimed == 2  # the beginning of the round after it was not seen
    device.catch_up()
    a_round(device, phases)
    a_round(device, phases)
    device.catch_up()
    a_round(device, phases)
    assert phases.seconds[FORWARD] == 3 * WORK[FORWARD]


def test_what_was_only_counted_is_in_no_phase() -> None:
    """Between the end of a round and `restart` the time belongs to nothing, as on the host."""
    device = FakeDevice()
    phases = phases_on(device)
    a_round(device, phases)
    device.work(1000.0)
    phases.restart()
    a_round(device, phases)
    device.catch_up()
    phases.round_over()
    assert sum(phases.seconds.values()) == pytest.approx(2 * sum(WORK.values()))


def test_a_model_that_is_moved_is_timed_where_it_is() -> None:
    """From the host to the device and back: one counter, which only grows, and the time of the move in neither."""
    now, device = [0.0], FakeDevice()
    phases = PhaseTimes(lambda: now[0], device.pool())
    phases.on(torch.device("cpu"))
    phases.enter(FORWARD)
    now[0] += 3.0
    phases.enter(OUTSIDE)
    phases.on(CUDA)
    assert phases.by_events
    a_round(device, phases)
    device.catch_up()
    phases.round_over()
    assert phases.seconds[FORWARD] == 3.0 + WORK[FORWARD]
    phases.on(torch.device("cpu"))
    phases.enter(FORWARD)
    now[0] += 2.0
    phases.enter(OUTSIDE)
    assert phases.seconds[FORWARD] == 5.0 + WORK[FORWARD]
    device.work(1.0)
    phases.on(CUDA)
    a_round(device, phases)
    assert len(device.made) <= 3 * 7  # those of before were given back


@pytest.mark.parametrize("kind", ["mps", "meta"])
def test_a_device_without_such_events_has_no_phases(kind: str) -> None:
    """Absent, rather than the times of launches."""
    phases = PhaseTimes(lambda: 0.0, FakeDevice().pool())
    phases.on(torch.device(kind))
    assert not phases.known
    assert not phases.by_events


def test_kinds_of_devices_that_have_such_events() -> None:
    """CUDA has; of others those with the same interface, and not where reading would wait, or where there is no such module."""
    assert Kind.named("cuda") is not None
    assert [Kind.named(one) for one in ("cpu", "mps", "meta", "xla", "nonsense")] == [None] * 5


def test_the_device_is_that_of_most_parameters() -> None:
    """The first of several with equally many; none without parameters."""
    parameters = [torch.empty(1, device=one) for one in ("cpu", "meta", "meta", "cpu", "meta")]
    assert main_device(parameters) == torch.device("meta")
    assert main_device(parameters[:2]) == torch.device("cpu")
    assert main_device([]) is None


class Broken(FakeDevice):
    """A device whose events cannot be made, as where a kind of devices does not know time."""

    def event(self) -> object:  # type: ignore[override]
        raise NotImplementedError("no time")


def test_a_device_that_raises_is_left_alone() -> None:
    """What fails is counted as `timing` and goes no further; after ten in a row nothing is tried any more."""
    log = ErrorLog(("timing",))
    device = Broken()
    phases = PhaseTimes(lambda: 0.0, EventPool(log.boundary("timing"), device.of))
    phases.on(CUDA)
    for _ in range(3 * LIMIT):
        a_round(device, phases)
    assert log.counts() == {"timing": LIMIT}
    assert phases.untimed == 3 * LIMIT


def test_times_that_cannot_be_had_are_not_made_up() -> None:
    """Where the device cannot say how long it was, the round is in no phase, and counted."""

    class Mute(FakeEvent):
        def elapsed_time(self, end: FakeEvent) -> float:
            raise RuntimeError("no time")

    class MuteDevice(FakeDevice):
        def event(self) -> FakeEvent:
            return Mute(self)

    log = ErrorLog(("timing",))
    device = MuteDevice()
    phases = PhaseTimes(lambda: 0.0, EventPool(log.boundary("timing"), device.of))
    phases.on(CUDA)
    a_round(device, phases)
    device.catch_up()
    a_round(device, phases)
    assert phases.untimed == 1
    assert sum(phases.seconds.values()) == 0
    assert log.counts() == {"timing": 1}


# In a training


class BackwardWork(torch.autograd.Function):
    """The identity, whose backward launches something."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, device: FakeDevice) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        context.device = device
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401 - autograd's own
        context.device.work(WORK[BACKWARD])
        return gradients[0], None


class Works(Perceptron):
    """A model that tells the fake device what it launches."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.work(WORK[FORWARD])
        return BackwardWork.apply(super().forward(x), self.device)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def on_the_fake(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, **options: object) -> Iterator[tuple[Exporter, Works]]:
    """A model that the exporter takes for one on the fake device."""
    model = Works(device)
    with start_exporter(model, None, overhead_budget=0.9, **options) as exporter:
        clock = exporter._training.clock
        clock.phases = PhaseTimes(clock.clock, device.pool())
        clock.phases.on(CUDA)  # as the start does where the parameters are there
        monkeypatch.setattr(exporter._training.schedule, "only_counted", lambda number: 0)  # steps of this test are very short
        yield exporter, model
        assert not errors(exporter)


@pytest.mark.parametrize("every", [1, 7])
def test_a_training_is_timed_by_the_device(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, step and data of all rounds but the last, of which some are sampled, as the fake device has taken them."""
    device = FakeDevice()
    with on_the_fake(device, monkeypatch, every=every) as (exporter, model):
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda *_: device.work(WORK[OPTIMIZER]))

        def inputs() -> Iterator[torch.Tensor]:
            while True:
                device.work(WORK[DATA])
                yield batch()

        loader = iter(exporter.watch_loader(inputs()))
        for _ in range(30):
            x = next(loader)
            device.work(WORK[OUTSIDE])
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            device.catch_up()
        shown = {phase: value(exporter, "torch_train_phase_seconds_total", phase=phase) for phase in WORK}
        assert shown == {phase: 29 * seconds for phase, seconds in WORK.items()}  # the last round is not read yet
        assert value(exporter, "torch_grad_exporter_untimed_steps_total", what="phases") == 0


def test_the_start_and_each_sampled_forward_look_where_the_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is moved after the start is timed where it is from the next sampled round on."""
    seen: list[torch.device] = []
    monkeypatch.setattr(PhaseTimes, "on", lambda self, device: seen.append(device))
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, None, every=2) as exporter:
        assert seen == [torch.device("cpu")]
        for _ in range(4):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        assert seen == [torch.device("cpu")]
        model.to("meta")
        model(batch().to("meta")).square().mean().backward()
        model(batch().to("meta")).square().mean().backward()
        optimizer.step()
        model(batch().to("meta")).square().mean().backward()
        assert seen == [torch.device("cpu"), torch.device("meta")]
        assert not errors(exporter)


def test_a_training_on_the_cpu_records_no_event() -> None:
    """The phases there are of the host's clock."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, None, every=1) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        assert not any(exporter._training.events._by_device.values())
        assert not exporter._training.clock.phases.by_events
        assert (value(exporter, "torch_train_phase_seconds_total", phase="forward") or 0) > 0
