"""Times of layers: by a clock that only the layers of the test move on, so that each number is exact."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.device import CUDA, FakeDevice
from tests.support.scrape import errors, value, values
from tests.support.torch_versions import fully_shard
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.aggregation.layer_times import LayerTimes
from torch_grad_exporter.capture.timeline import HostWatch, Timeline
from torch_grad_exporter.inspection import layer_timer, own_nodes
from torch_grad_exporter.inspection.layer_timer import LayerTimer

SECONDS, STEPS = "torch_layer_seconds_total", "torch_layer_timed_steps_total"


class Clock:
    """A clock that stands still unless something takes time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> None:
        """Something takes so long."""
        self.now += seconds


class Takes(torch.autograd.Function):
    """The identity, which takes its time in the backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        context.clock, context.seconds = clock, seconds
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401 - autograd's own
        _ = context.saved_tensors  # where a checkpoint computes them anew
        context.clock.takes(context.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    """Takes `forward` seconds, and twice as many in the backward; with a parameter of its own, unless it is none of the layers."""

    def __init__(self, clock: Clock, seconds: float, *, owns: bool = True) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.scale = nn.Parameter(torch.ones(4)) if owns else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.takes(self.seconds)
        y = x if self.scale is None else x * self.scale
        return Takes.apply(y, self.clock, 2 * self.seconds)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def timed(model: nn.Module | dict[str, nn.Module], clock: Clock | None = None, **options: object) -> Iterator[Exporter]:
    """An exporter of every round by the clock of the test that fails in nothing."""
    with start_exporter(model, None, **{"every": 1, "layer_times": True, **options}) as exporter:
        if clock is not None:
            exporter._training.clock.clock = clock
        yield exporter
        assert errors(exporter) == {}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    """One step."""
    optimizer.zero_grad()
    for _ in range(micro_batches):
        model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    """An optimizer that leaves the model as it is."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def shown(exporter: Exporter, name: str = SECONDS) -> dict[tuple[str, str], float]:
    """By layer and pass, once all rounds are over."""
    exporter._training.capture.close()
    found = values(exporter)
    return {(dict(k)["layer"], dict(k)["pass"]): v for (metric, k), v in found.items() if metric == name}


def passes(**layers: float) -> dict[tuple[str, str], float]:
    """What is expected of layers whose forwards took so long."""
    return {(layer, one): s * (1 + (one == "backward")) for layer, s in layers.items() for one in ("forward", "backward")}


# What is measured


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_layer_has_its_own_time(micro_batches: int) -> None:
    """Forward and backward of each, over all micro-batches; what is none of the layers is in no time."""
    clock = Clock()
    model = nn.Sequential(
        Layer(clock, 0.5),
        Layer(clock, 64.0, owns=False),
        nn.Sequential(Layer(clock, 4.0), nn.ReLU(inplace=True), Layer(clock, 8.0)),
    )
    optimizer = sgd(model)
    with timed(model, clock) as exporter:
        for _ in range(5):
            train(model, optimizer, micro_batches)
            clock.takes(1e6)
        found = shown(exporter)
        times = 5.0 * micro_batches
        assert found == pytest.approx(passes(**{"0": 0.5 * times, "2.0": 4 * times, "2.2": 8 * times}))
        assert shown(exporter, STEPS) == dict.fromkeys(found, 5.0)


class Around(nn.Module):
    """A layer with another one within it, and time of its own before, between and after."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.scale = clock, nn.Parameter(torch.ones(4))
        self.inner = Layer(clock, 8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.takes(0.25)
        x = Takes.apply(x * self.scale, self.clock, 0.5)  # type: ignore[no-untyped-call]
        x = self.inner(self.inner(x))
        self.clock.takes(1.0)
        return Takes.apply(x * self.scale, self.clock, 2.0)  # type: ignore[no-any-return,no-untyped-call]


def test_a_layer_around_others_has_what_is_its_own() -> None:
    """Nothing counts twice: neither in the forward nor in the backward, nor of a layer that is called twice."""
    clock = Clock()
    model = nn.Sequential(Around(clock))
    with timed(model, clock) as exporter:
        train(model, sgd(model))
        assert shown(exporter) == pytest.approx(passes(**{"0": 1.25, "0.inner": 16.0}))


def test_what_the_exporter_takes_is_in_no_time() -> None:
    """What an inspection, or another hook of ours, takes within a layer is charged as overhead, and not to the layer."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5), Layer(clock, 2.0))
    with timed(model, clock) as exporter:
        step = exporter._training.clock

        def ours(*_: object) -> None:
            clock.takes(128.0)
            step.spent(128.0)

        def at_the_node(_module: object, _args: object, output: torch.Tensor) -> None:
            assert output.grad_fn is not None
            output.grad_fn.register_prehook(ours)  # as our own hook, behind it

        def then_hook(*_: object) -> None:
            ours()
            model[0].register_forward_hook(at_the_node)

        model.register_forward_pre_hook(then_hook)  # behind ours at the root
        model[0].register_forward_pre_hook(ours)
        train(model, sgd(model))
        assert shown(exporter) == pytest.approx(passes(**{"0": 0.5, "1": 2.0}))


def test_only_sampled_steps_are_timed() -> None:
    """As many steps as there were samples, and only their seconds."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5))
    optimizer = sgd(model)
    hooked = []
    with timed(model, clock, every=4) as exporter:
        for _ in range(16):
            train(model, optimizer)
            hooked.append(len(model[0]._forward_hooks))
        samples = value(exporter, "torch_grad_exporter_captures_total")
        assert samples == 4
        assert shown(exporter, STEPS) == dict.fromkeys(passes(**{"0": 0}), 4.0)
        assert shown(exporter) == pytest.approx(passes(**{"0": 4 * 0.5}))
        assert not any(hooked)


def test_evaluations_are_not_timed() -> None:
    """Neither one without gradients, in the middle of a sampled step, nor a single layer that is called without them."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5))
    optimizer = sgd(model)
    with timed(model, clock) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            with torch.no_grad():
                model(torch.randn(3, 4))
                model[0](torch.randn(3, 4))
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(3, 4))
        assert shown(exporter) == pytest.approx(passes(**{"0": 3 * 0.5}))


class Fails(nn.Module):
    """Raises the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.failed = nn.Parameter(torch.ones(4)), False
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.failed:
            self.failed = True
            raise MemoryError
        return x * self.scale


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    """The layer that raised is not open in the next forward, in which what comes after others is in no time."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5), Layer(clock, 4.0, owns=False), Fails())
    optimizer = sgd(model)
    with timed(model, clock) as exporter:
        with pytest.raises(MemoryError):
            model(torch.randn(3, 4))
        clock.takes(1e6)
        train(model, optimizer)
        found = shown(exporter)
        assert found["0", "forward"] == pytest.approx(2 * 0.5)
        assert found["0", "backward"] == pytest.approx(1.0)
        assert found["2", "forward"] == found["2", "backward"] == 0


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    """The layer in whose backward it raised is not open in the next step."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5))
    optimizer = sgd(model)

    def fail(_gradients: object) -> None:
        raise MemoryError

    with timed(model, clock) as exporter:
        y = model(torch.randn(3, 4))
        assert y.grad_fn is not None
        y.grad_fn.next_functions[0][0].register_prehook(fail)  # within the layer, behind our own hook
        with pytest.raises(MemoryError):
            y.square().mean().backward()
        clock.takes(1e6)
        train(model, optimizer)
        found = shown(exporter)
        assert found["0", "forward"] == pytest.approx(2 * 0.5)
        assert found["0", "backward"] == pytest.approx(2 * 1.0)


def timer_of(exporter: Exporter) -> LayerTimer:
    """The inspection that times layers."""
    (_, timer), *_ = exporter._training.capture._parts.inspections._all
    assert isinstance(timer, LayerTimer)
    return timer


def test_a_backward_that_is_not_of_the_sample_adds_nothing() -> None:
    """What came before a round that was withdrawn, and a second backward in a step that is not sampled, which marks nothing."""

    class Adds(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.clock.takes(self.seconds)
            return x + self.scale  # whose backward needs nothing that the step changes

    clock = Clock()
    model = nn.Sequential(Adds(clock, 0.5))
    optimizer = sgd(model)
    marks: list[int] = []
    with timed(model, clock, every=2) as exporter:
        timer = timer_of(exporter)
        model(torch.randn(3, 4))
        timer.backward_ended(0, sampled=False)
        x = torch.randn(3, 4, requires_grad=True)
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        assert not exporter._training.capture.is_sampled
        x.register_hook(lambda _: marks.append(len(timer._lines._host._marks)))
        loss.backward()
        optimizer.step()
        assert marks == [0]
        assert shown(exporter) == pytest.approx({("0", "forward"): 0.5, ("0", "backward"): 0.0})


def test_a_model_that_is_one_layer() -> None:
    """It has no other name than `model`; a model that owns a parameter besides its layers has none of its own."""
    clock = Clock()
    model = Layer(clock, 0.5)
    with timed(model, clock) as exporter:
        train(model, sgd(model))
        assert shown(exporter) == pytest.approx(passes(model=0.5))
    around = Around(clock)
    with timed(around, clock) as exporter:
        train(around, sgd(around))
        assert shown(exporter) == pytest.approx(passes(inner=16.0))


def test_an_autograd_within_a_forward() -> None:
    """As of a model of energies that gives forces: the inner backward is the backward of its layers, the rest stays forward."""

    class Forces(nn.Module):
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.clock, self.energy, self.scale = clock, Layer(clock, 0.5), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            self.clock.takes(16.0)
            return forces * self.scale

    clock = Clock()
    model = nn.Sequential(Forces(clock))
    with timed(model, clock) as exporter:
        train(model, sgd(model))
        found = shown(exporter)
        assert found["0.energy", "forward"] == pytest.approx(0.5)
        assert found["0.energy", "backward"] == pytest.approx(1.0)
        assert found["0", "forward"] == pytest.approx(16.0)


# Checkpoints, copies, wrappers


class Checkpointed(nn.Module):
    """A part that is computed again in the backward."""

    def __init__(self, clock: Clock, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.part = Layer(clock, 0.5), nn.Sequential(Layer(clock, 4.0), Layer(clock, 8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("early", [False, True])
def test_the_second_forward_of_a_checkpoint_is_in_no_time(early: bool) -> None:
    """It is computed within the backward of the layer that needs it first, and counts neither there nor anywhere."""
    clock = Clock()
    model = Checkpointed(clock, reentrant=False)
    with timed(model, clock) as exporter, torch.utils.checkpoint.set_checkpoint_early_stop(early):
        for _ in range(3):
            train(model, sgd(model))
        found, expected = shown(exporter), passes(**{"first": 1.5, "part.0": 12.0, "part.1": 24.0})
        if early:  # the last layer is not run to its end: what it has done by then is before its backward, not told apart
            assert found["part.1", "backward"] in (pytest.approx(48.0), pytest.approx(48.0 + 24.0))
            found.pop(("part.1", "backward")), expected.pop(("part.1", "backward"))
        assert found == pytest.approx(expected)


def test_a_reentrant_checkpoint_has_no_backward_of_its_layers() -> None:
    """Nothing of it is hooked in the forward that counts, which has no graph; other layers are timed as ever."""
    clock = Clock()
    model = Checkpointed(clock, reentrant=True)
    with timed(model, clock) as exporter:
        for _ in range(3):
            train(model, sgd(model))
        assert shown(exporter) == pytest.approx(
            {("first", "forward"): 1.5, ("first", "backward"): 3.0, ("part.0", "forward"): 12.0, ("part.1", "forward"): 24.0}
        )


def test_a_model_can_be_copied_and_pickled_in_a_timed_round() -> None:
    """Between forward and backward of a sampled step; the copy trains by itself and adds nothing."""
    clock = Clock()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with timed(model, clock) as exporter:
        for _ in range(2):
            loss = model(torch.randn(3, 4)).square().mean()
            assert model[0]._forward_hooks
            copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
            for one in copies:
                train(one, sgd(one))
            loss.backward()
            sgd(model).step()
        assert shown(exporter, STEPS) == dict.fromkeys(passes(**{"0": 0, "2": 0}), 2.0)


def test_wrappers_add_nothing_to_the_names() -> None:
    """A `DataParallel` on the CPU calls the module itself; replicas of it, which are others, would not be timed."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5))
    with timed(nn.DataParallel(model), clock) as exporter:
        train(nn.DataParallel(model), sgd(model))
        assert shown(exporter) == {}  # another wrapper than the one that is watched: no forward of a root
    wrapped = nn.DataParallel(model)
    with timed(wrapped, clock) as exporter:
        train(wrapped, sgd(model))
        assert shown(exporter) == pytest.approx(passes(**{"0": 0.5}))


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_time_their_own_layers(sharded: bool, tmp_path: Path) -> None:
    """Under DDP and FSDP2, by the names that layers have without them, over micro-batches of which only the last is reduced."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        clock = Clock()
        model: nn.Module = nn.Sequential(Layer(clock, 0.5), nn.ReLU(inplace=True), Layer(clock, 2.0))
        if sharded:
            for layer in (model[0], model[2], model):
                fully_shard(layer)
        else:
            model = DistributedDataParallel(model)
        optimizer = sgd(model)
        with timed(model, clock) as exporter:
            for _ in range(3):
                train(model, optimizer, 2)
            assert shown(exporter) == pytest.approx(passes(**{"0": 3.0, "2": 12.0}))
    finally:
        dist.destroy_process_group()


def test_frozen_layers_have_a_forward() -> None:
    """A layer before all that is trained has no backward; one behind it has, though its own parameters are frozen."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5), Layer(clock, 2.0), Layer(clock, 8.0))
    for frozen in (model[0], model[2]):
        frozen.requires_grad_(requires_grad=False)
    with timed(model, clock) as exporter:
        train(model, torch.optim.SGD(model[1].parameters(), lr=0.0))
        found = shown(exporter)
        assert ("0", "backward") not in found
        assert found["0", "forward"] == pytest.approx(0.5)
        assert found["2", "backward"] == pytest.approx(16.0)


def test_the_training_is_the_same() -> None:
    """The same bits, with in-place modules, a recurrent layer, an attention, and a hook of the user at a gradient."""
    after = []
    for option in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {
                "a": nn.Linear(4, 8),
                "b": nn.ReLU(inplace=True),
                "c": nn.LSTM(8, 8),
                "d": nn.MultiheadAttention(8, 2),
                "e": nn.Linear(8, 1),
            }
        )

        class Whole(nn.Module):
            def __init__(self, parts: nn.ModuleDict) -> None:
                super().__init__()
                self.parts = parts

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.parts["b"](self.parts["a"](x))
                y.register_hook(lambda g: g * 0.5)
                h, _ = self.parts["c"](y)
                return self.parts["e"](self.parts["d"](h, h, h)[0])  # type: ignore[no-any-return]

        whole = Whole(model)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
        with start_exporter(whole, None, every=1, layer_times=option) as exporter:
            for _ in range(4):
                optimizer.zero_grad()
                whole(torch.randn(5, 3, 4)).square().mean().backward()
                optimizer.step()
            found = shown(exporter)
            assert errors(exporter) == {}
        after.append([one.detach().clone() for one in whole.parameters()])
        assert {layer for layer, _ in found} == ({f"parts.{one}" for one in "acde"} if option else set())
        assert all(seconds > 0 for seconds in found.values())
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


def test_compiled_autograd_and_transforms_leave_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where backwards are compiled only forwards are timed, since a hook at a node would make another graph."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 0.5))
    monkeypatch.setattr(layer_timer, "compiles_backwards", lambda: True)
    with timed(model, clock) as exporter:
        train(model, sgd(model))
        assert shown(exporter) == pytest.approx({("0", "forward"): 0.5})
    with timed(model, clock) as exporter:
        assert shown(exporter) == {}
    plain = nn.Sequential(nn.Linear(4, 4))
    with timed(plain) as exporter:
        torch.func.grad(lambda x: plain(x).sum())(torch.randn(3, 4))
        assert not plain[0]._forward_hooks
        assert shown(exporter) == {}


# Bounds


def test_more_layers_than_rows_share_them() -> None:
    """Folded as layers are, and their times added up."""
    clock = Clock()
    model = nn.Sequential(*[nn.Sequential(Layer(clock, 1.0), Layer(clock, 2.0)) for _ in range(6)])
    with timed(model, clock, max_layers=6) as exporter:
        train(model, sgd(model))
        assert shown(exporter) == pytest.approx(passes(**{str(number): 3.0 for number in range(6)}))


def test_layers_that_are_left_out_are_not_timed() -> None:
    """By `include` and `exclude`."""
    clock = Clock()
    model = nn.Sequential(Layer(clock, 1.0), Layer(clock, 2.0), Layer(clock, 4.0))
    with timed(model, clock, exclude="1") as exporter:
        train(model, sgd(model))
        assert shown(exporter) == pytest.approx(passes(**{"0": 1.0, "2": 4.0}))


def test_the_times_of_removed_layers_go_on_in_one_remainder() -> None:
    """Counters never fall, and there are never more layers than are kept."""
    times = LayerTimes(2)
    for number in range(6):
        times.take({(str(number), "forward"): 1.0, (str(number), "backward"): 2.0})
    found = times.snapshot()
    assert {layer for layer, _ in found} == {"4", "5", "(removed)"}
    assert (found["(removed)", "forward"].seconds, found["(removed)", "forward"].rounds) == (4.0, 4)
    assert found["(removed)", "backward"].seconds == 8.0


def test_a_round_with_too_many_calls_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, and the next one with fewer is timed again."""
    monkeypatch.setattr(layer_timer, "CALLS", 10)
    clock = Clock()

    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.times = Layer(clock, 1.0), 20

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.cell(x)
            return x

    model = Often()
    with timed(model, clock) as exporter:
        train(model, sgd(model))
        model.times = 2
        train(model, sgd(model))
        assert shown(exporter) == pytest.approx(passes(cell=2.0))
        assert value(exporter, "torch_grad_exporter_untimed_steps_total", what="layers") == 1


@pytest.mark.parametrize("nodes", [20, 500, 10_000])
def test_a_layer_of_many_nodes(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its nodes are hooked, or the first and the last; where even the search takes too long there is no backward."""
    monkeypatch.setattr(own_nodes, "VISITED", 2000)

    class Long(nn.Module):
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.clock, self.scale = clock, nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(nodes // 2):
                x = Takes.apply(x * self.scale, self.clock, 0.5)  # type: ignore[no-untyped-call]
            return x

    clock = Clock()
    model = nn.Sequential(Layer(clock, 1.0), Long(clock), Layer(clock, 2.0))
    with timed(model, clock) as exporter:
        train(model, sgd(model))
        found = shown(exporter)
        assert found.get(("1", "backward")) == (pytest.approx(nodes / 4) if nodes <= 2000 else None)
        assert found["0", "backward"] == pytest.approx(2.0)


# On a device


@contextmanager
def on_the_fake(model: nn.Module, device: FakeDevice) -> Iterator[Exporter]:
    """An exporter that takes the layers of a model for layers on the fake device."""
    with timed(model) as exporter:
        events = device.pool().of(CUDA)
        assert events is not None
        timer_of(exporter)._lines._by_device[torch.device("cpu")] = Timeline(events)
        yield exporter


class OnDevice(Clock):
    """Has the fake device take its time in the place of the host."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def takes(self, seconds: float) -> None:
        self.device.work(seconds)


def test_on_a_device_times_are_read_when_it_has_passed() -> None:
    """The device's own seconds, a round later or more, by events that are used again."""
    device = FakeDevice()
    clock = OnDevice(device)
    model = nn.Sequential(Layer(clock, 0.5), Around(clock), Layer(clock, 64.0, owns=False))
    optimizer = sgd(model)
    with on_the_fake(model, device) as exporter:
        for _ in range(3):
            train(model, optimizer, 2)
        assert not [name for name, _ in values(exporter) if name == SECONDS]
        for _ in range(20):
            device.catch_up()
            train(model, optimizer, 2)
        device.catch_up()
        assert shown(exporter) == pytest.approx(
            passes(**{"0": 22.0, "1": 44 * 1.25, "1.inner": 44 * 16.0})
        )  # the last is not read yet
        assert max(event.records for event in device.made) > 5


def test_a_device_that_falls_behind_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many rounds, or without a graph's leave, nothing is recorded for ever, and it is counted."""
    monkeypatch.setattr(layer_timer, "BEHIND", 4)
    device = FakeDevice()
    clock = OnDevice(device)
    model = nn.Sequential(Layer(clock, 0.5))
    optimizer = sgd(model)
    with on_the_fake(model, device) as exporter:
        for _ in range(10):
            train(model, optimizer)
        made = len(device.made)
        for _ in range(10):
            train(model, optimizer)
        assert len(device.made) == made
        device.captures = True
        records = sum(event.records for event in device.made)
        train(model, optimizer)
        assert sum(event.records for event in device.made) == records
        device.captures = False
        device.catch_up()
        train(model, optimizer)
        device.catch_up()
        assert shown(exporter) == pytest.approx(passes(**{"0": 0.5 * 4}))
        assert value(exporter, "torch_grad_exporter_untimed_steps_total", what="layers") == 17


# The timeline


def test_a_timeline_goes_on_and_begins_again() -> None:
    """`go_on` joins what the last mark has parted; `again` takes out what was since, and not what was before."""
    clock = Clock()
    line: Timeline[str, float] = Timeline(HostWatch(clock))
    line.go_on("a")
    clock.takes(1.0)
    line.enter(None)
    clock.takes(2.0)
    line.go_on("a")
    clock.takes(4.0)
    line.again()
    clock.takes(8.0)
    line.enter(None)
    clock.takes(16.0)
    line.go_on("b")
    clock.takes(32.0)
    line.again()
    clock.takes(64.0)
    line.again()
    clock.takes(128.0)
    stretch = line.cut()
    assert stretch is not None
    assert stretch.passed()
    assert stretch.seconds() == {"a": 9.0, "b": 128.0}
    line.enter("a")
    clock.takes(1.0)
    line.enter("b")
    clock.takes(2.0)
    line.forget()
    clock.takes(4.0)
    stretch = line.cut()
    assert stretch is not None
    assert stretch.seconds() == {"a": 1.0}


def test_a_timeline_gives_every_event_back() -> None:
    """Whatever it is told, cut, lost or begun anew: no event is lost to the pool, and none is given back twice."""
    device = FakeDevice()
    events = device.pool().of(CUDA)
    assert events is not None
    generator = torch.Generator().manual_seed(0)
    line: Timeline[int, Any] = Timeline(events)
    stretches = []
    for _ in range(5000):
        choice, key = torch.randint(0, 9, (2,), generator=generator).tolist()
        if choice < 5:
            (line.go_on if choice % 2 else line.enter)(key % 3)
        elif choice == 5:
            line.enter(None)
        elif choice == 6:
            line.again()
        elif choice == 7 and (stretch := line.cut()) is not None:
            stretches.append(stretch)
        elif key < 3:
            (line.lose, line.restart, device.catch_up)[key]()
        while stretches and stretches[0].passed():
            stretches[0].seconds()
            stretches.pop(0).release()
    line.restart()
    for stretch in stretches:
        stretch.release()
    assert len(events._free) == len({id(one) for one in events._free}) == len(device.made)
