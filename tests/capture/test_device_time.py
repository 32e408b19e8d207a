"""Time on a GPU: phases and the cost of samples are measured by its events, which are read when it has passed them.

The GPU is a fake behind `torch.cuda`: parameters and gradients in CPU memory say that they are there, and what is launched takes as
long as the test says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.device_events import EventPool, Timeline
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.store.records import Mailbox

GPU = torch.device("cuda", 0)
WORK = {"outside": 0.5, "data": 0.25, "forward": 1.0, "backward": 2.0, "optimizer": 4.0}
"""Seconds on the GPU in each phase of a round; sums of these are exact."""


class FakeGpu:
    """A GPU that has come as far as `passed` in its own time; each event takes `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.launched = self.passed = 0.0
        self.capturing = False
        self.made = self.calls = 0
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: self.event())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "stream")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def event(self) -> Event:
        self.made += 1
        return Event(self)

    def work(self, seconds: float) -> None:
        """Launch something that takes this long."""
        self.launched += seconds

    def catch_up(self) -> None:
        """Finish all that was launched."""
        self.passed = self.launched


class Event:
    """As `torch.cuda.Event`, of the fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.moment = 0.0

    def record(self, _stream: object) -> None:
        self.gpu.calls += 1
        self.gpu.launched += self.gpu.seconds
        self.moment = self.gpu.launched

    def query(self) -> bool:
        self.gpu.calls += 1
        return self.gpu.passed >= self.moment

    def elapsed_time(self, end: Event) -> float:
        if max(self.moment, end.moment) > self.gpu.passed:
            raise AssertionError("this would wait for the GPU")
        return 1000 * (end.moment - self.moment)


class There(torch.nn.Parameter):
    """A tensor in CPU memory that says it is on the GPU, or wherever `place` says."""

    place = GPU

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place


def in_cpu_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that makes tensors for the GPU in CPU memory."""

    def instead(*args: object, **kwargs: object) -> object:
        kwargs = {name: "cpu" if isinstance(given, torch.device) and given == GPU else given for name, given in kwargs.items()}
        kwargs.pop("pin_memory", None)
        return function(*("cpu" if isinstance(given, torch.device) and given == GPU else given for given in args), **kwargs)

    return instead


class BackwardWork(torch.autograd.Function):
    """The identity, whose backward launches work."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, gpu: FakeGpu) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        context.gpu = gpu
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401 - autograd's own
        context.gpu.work(WORK["backward"])
        return gradients[0], None


class Works(Perceptron):
    """A model on the fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu
        for module in (self.first, self.second):
            module.weight, module.bias = There(module.weight.data), There(module.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gpu.work(WORK["forward"])
        return BackwardWork.apply(super().forward(x), self.gpu)  # type: ignore[no-any-return,no-untyped-call]


class Loop:
    """Trains it."""

    def __init__(self, gpu: FakeGpu, exporter: Exporter, model: Works) -> None:
        self.gpu, self.exporter, self.model = gpu, exporter, model
        self.optimizer = sgd(model)
        self.optimizer.register_step_pre_hook(lambda *_: gpu.work(WORK["optimizer"]))
        self.loader = iter(exporter.watch_loader(self.inputs()))

    def inputs(self) -> Iterator[torch.Tensor]:
        while True:
            self.gpu.work(WORK["data"])
            yield batch()

    def steps(self, number: int, *, catch_up: bool = True) -> None:
        for _ in range(number):
            x = next(self.loader)
            self.gpu.work(WORK["outside"])
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            if catch_up:
                self.gpu.catch_up()

    def phases(self) -> dict[str, float | None]:
        return {phase: value(self.exporter, "torch_train_phase_seconds_total", phase=phase) for phase in WORK}

    def rounds(self) -> float:
        """Return how many rounds the phases are of, after a check that they are whole rounds."""
        shown = self.phases()
        rounds = (shown["forward"] or 0.0) / WORK["forward"]
        assert rounds == int(rounds)
        assert shown == {phase: rounds * seconds for phase, seconds in WORK.items()}
        return rounds

    def untimed(self) -> float | None:
        return value(self.exporter, "torch_grad_exporter_untimed_steps_total", what="phases")


@contextlib.contextmanager
def training(gpu: FakeGpu, **options: object) -> Iterator[Loop]:
    """An exporter and a loop on the GPU."""
    model = Works(gpu)
    with start_exporter(model, None, **{"every": 1, "overhead_budget": 0.9, **options}) as exporter:
        yield Loop(gpu, exporter, model)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The GPU, with events that take no time."""
    return FakeGpu(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 7])
def test_phases_have_the_time_of_the_gpu(gpu: FakeGpu, every: int) -> None:
    """Phases are whole rounds of the GPU's own seconds, whether rounds are sampled, followed or only counted."""
    with training(gpu, every=every) as loop:
        loop.steps(40)
        assert loop.rounds() == 39 if every == 1 else 0 < loop.rounds() < 40  # the last round is not read yet
        assert loop.untimed() == 0
        assert gpu.made < 50
        assert errors(loop.exporter) == {}


@pytest.mark.slow
def test_a_gpu_that_is_behind_is_not_waited_for(gpu: FakeGpu) -> None:
    """Rounds that the GPU has not passed are not read, and beyond a bound they make no event and are counted as untimed."""
    with training(gpu) as loop:
        loop.steps(10, catch_up=False)
        assert loop.rounds() == 0
        loop.steps(70, catch_up=False)
        made, untimed = gpu.made, loop.untimed()
        assert untimed
        loop.steps(20, catch_up=False)
        assert gpu.made == made
        assert loop.untimed() == untimed + 20
        loop.steps(30)
        assert loop.rounds() + loop.untimed() >= 128


def test_no_event_while_a_graph_is_captured(gpu: FakeGpu) -> None:
    """During the capture of a CUDA graph no event is recorded or queried; the rounds around it are timed."""
    with training(gpu) as loop:
        loop.steps(3)
        calls = gpu.calls
        gpu.capturing = True
        loop.steps(1)
        gpu.capturing = False
        assert gpu.calls == calls
        loop.steps(5)
        assert 1 <= loop.untimed() <= 2
        assert loop.rounds() + loop.untimed() == 8
        assert errors(loop.exporter) == {}


def test_a_model_may_move_to_the_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a move from the CPU the phases go on in the time of the GPU."""
    monkeypatch.setattr(There, "place", torch.device("cpu"))
    with training(gpu) as loop:
        loop.steps(3)
        assert gpu.made == 0
        assert (loop.phases()["forward"] or 0.0) > 0
        monkeypatch.setattr(There, "place", GPU)
        loop.steps(3)
        before = loop.phases()["optimizer"]
        loop.steps(5)
        assert loop.phases()["optimizer"] - before == pytest.approx(5 * WORK["optimizer"])


def test_a_device_without_timed_events_has_no_phases(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On MPS the phases are absent, since the host's clock would only time launches."""
    monkeypatch.setattr(There, "place", torch.device("mps"))
    with training(gpu) as loop:
        loop.steps(5)
        assert set(loop.phases().values()) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["event", "elapsed_time"])
def test_a_gpu_that_raises_times_nothing(gpu: FakeGpu, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are counted, no time is invented, and the training goes on."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(FakeGpu if broken == "event" else Event, broken, fail)
    with training(gpu) as loop:
        loop.steps(40)
        assert [*errors(loop.exporter)] == ["timing"]
        assert sum(seconds or 0.0 for seconds in loop.phases().values()) == 0
        assert loop.untimed()
        assert value(loop.exporter, "torch_train_steps_total", optimizer="SGD") == 40


class OnGpu(torch.Tensor):
    """A tensor in CPU memory that says it is on the GPU, as does all that is computed from it."""

    device = property(lambda _: GPU)  # type: ignore[assignment]


def to_the_gpu(parameter: torch.Tensor) -> None:
    """Put the gradient where the parameter is."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.as_subclass(OnGpu)


@pytest.mark.parametrize("weights", [False, True])
def test_gpu_time_of_samples_is_overhead(monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    """A sample that takes a second on the GPU counts as overhead once, and makes samples rare."""
    gpu = FakeGpu(monkeypatch, seconds=1.0)
    options = {"every": "auto", "overhead_budget": 0.01, "statistics": "torch", "weights": weights}
    for owner, name in ((torch, "zeros"), (torch, "empty"), (torch, "full"), (torch, "tensor"), (torch.Tensor, "to")):
        monkeypatch.setattr(owner, name, in_cpu_memory(getattr(owner, name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with training(gpu, **options) as loop:
        for parameter in loop.model.parameters():
            parameter.register_post_accumulate_grad_hook(to_the_gpu)
        loop.steps(30)
        samples = value(loop.exporter, "torch_grad_exporter_captures_total")
        assert 2 <= samples <= 4
        assert value(loop.exporter, "torch_grad_exporter_sampling_interval_steps") == 4096
        assert samples - 1 < value(loop.exporter, "torch_grad_exporter_overhead_seconds_total") < 20
        assert errors(loop.exporter) == {}


def raised(error: Exception) -> None:
    """Let the test fail with it."""
    raise error


def test_a_timeline_joins_and_forgets(gpu: FakeGpu) -> None:
    """Time between two spans of a key belongs to it, time before `again` to nothing, and few events are in use."""
    events = EventPool(Guard(raised)).of(GPU)
    assert events is not None
    line = Timeline[str](events)
    for _ in range(3):
        line.enter("a")
        gpu.work(1.0)
        line.restart()
        for _ in range(20):
            line.go_on("a")
            gpu.work(2.0)
            line.enter(None)
            gpu.work(4.0)
        line.go_on("b")
        gpu.work(8.0)
        line.again()
        gpu.work(16.0)
        stretch = line.cut()
        assert stretch is not None
        assert stretch.read() is None
        gpu.catch_up()
        assert stretch.read() == {"a": 20 * 2.0 + 19 * 4.0, "b": 16.0}
    assert gpu.made <= 6


def test_work_stands_for_other_work(gpu: FakeGpu) -> None:
    """Work on the GPU counts `times` as often, but for a first sample, and all events are used again."""
    clock = StepClock(Mailbox())
    kernels = SimpleNamespace(taken_once=iter([True, *[False] * 9]).__next__)
    cost = SampleCost(clock, SamplingSchedule(), EventPool(Guard(raised)), kernels)
    for number in range(10):
        begun = cost.begin([GPU, torch.device("cpu")])
        gpu.work(2.0)
        cost.end(begun, times=3)
        cost.sample_over()
        cost.settle()
        assert clock.device_seconds == 6.0 * max(0, number - 1)
        gpu.catch_up()
        cost.settle()
        assert clock.device_seconds == 6.0 * number
    assert gpu.made == 2
