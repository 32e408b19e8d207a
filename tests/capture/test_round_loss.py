"""`torch_train_loss` of models that return a loss: the loss of a whole round, as the loop itself would compute it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from tests.support.tools import eventually
from torch_grad_exporter import Exporter, start_exporter

LOSS = "torch_train_loss"
NONFINITE = "torch_train_loss_nonfinite_total"


class Model(nn.Module):
    """Returns a mean per micro-batch, or the sum over the items of the whole round, like models of Transformers."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or Perceptron()

    def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> dict[str, torch.Tensor]:
        squares = self.inner(x).square().mean(dim=1)
        loss = squares.mean() if num_items_in_batch is None else squares.sum() / num_items_in_batch
        return {"loss": loss, "out": squares}


class Loop:
    """Trains a model in rounds of micro-batches of several sizes."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or Model()
        self.optimizer = sgd(self.model)

    def losses(self, sizes: Sequence[int], **told: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - for the model
        """Yield the loss of each micro-batch right after its forward."""
        for size in sizes:
            yield self.model(batch(size), **told)["loss"]

    def round(self, sizes: Sequence[int] = (2, 5, 3), *, step: bool = True, **told: Any) -> list[float]:  # noqa: ANN401
        """Train one round; return the losses of the micro-batches."""
        found = []
        self.optimizer.zero_grad()
        for loss in self.losses(sizes, **told):
            loss.backward()
            found.append(float(loss.detach().double()))
        if step:
            self.optimizer.step()
        return found


def mean(losses: Sequence[float]) -> Any:  # noqa: ANN401 - what pytest makes of it
    """Return the mean, for a comparison."""
    return pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.fixture
def loop() -> Loop:
    """Make a loop for each test."""
    return Loop()


def watching(loop: Loop, **options: object) -> Exporter:
    """Start an exporter that reads each round."""
    return start_exporter(loop.model, port=None, **{"every": 1, **options})


@pytest.fixture
def exporter(loop: Loop) -> Iterator[Exporter]:
    """Start an exporter that reads each round and must not fail."""
    with watching(loop) as one:
        yield one
        assert errors(one) == {}


@pytest.mark.parametrize("told", [{}, {"num_items_in_batch": None}], ids=["nothing", "no number"])
def test_a_mean_for_each_micro_batch(loop: Loop, exporter: Exporter, told: dict[str, None]) -> None:
    """The loss is the mean over the micro-batches of the round, shown once the step is done."""
    for _ in range(4):
        before = value(exporter, LOSS)
        losses = []
        loop.optimizer.zero_grad()
        for loss in loop.losses((2, 5, 3), **told):
            (loss / 3).backward()
            losses.append(loss.item())
            assert value(exporter, LOSS) == before
        loop.optimizer.step()
        assert value(exporter, LOSS) == mean(losses)


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_shares_of_the_whole_round(loop: Loop, exporter: Exporter, kind: Callable[[int], Any]) -> None:
    """With the number of items of the whole round, the loss is the sum over the micro-batches."""
    for _ in range(4):
        state = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        torch.manual_seed(1)
        losses = loop.round(num_items_in_batch=kind(10))
        assert value(exporter, LOSS) == pytest.approx(sum(losses), rel=1e-6)
        whole = Model()
        whole.load_state_dict(state)
        torch.manual_seed(1)
        inputs = torch.cat([batch(size) for size in (2, 5, 3)])
        assert value(exporter, LOSS) == pytest.approx(whole(inputs)["loss"].item(), rel=1e-5)


def test_other_ranks_have_the_rest(loop: Loop, exporter: Exporter) -> None:
    """A share of the items of all ranks is not shown as the loss; a mean is."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        loop.round(num_items_in_batch=10)
        assert value(exporter, LOSS) is None
        losses = loop.round()
        assert value(exporter, LOSS) == mean(losses)
    finally:
        dist.destroy_process_group()


def test_forwards_without_a_backward_do_not_count(loop: Loop, exporter: Exporter) -> None:
    """Forwards in train mode that no backward follows count in no round."""
    for _ in range(3):
        list(loop.losses((4, 4)))
        loop.optimizer.zero_grad()
        losses = []
        for loss in loop.losses((2, 3)):
            list(loop.losses((4,)))
            loss.backward()
            losses.append(loss.item())
            kept = [*loop.losses((4,))]
        loop.optimizer.step()
        assert value(exporter, LOSS) == mean(losses)
        del kept


def test_a_loss_that_is_changed_in_place(loop: Loop, exporter: Exporter) -> None:
    """Changing the loss in place after the forward, like scaling, does not change what is shown."""
    (loss,) = loop.losses((4,))
    expected = loss.item()
    loss.mul_(1024.0)
    loss.backward()
    with torch.no_grad():
        loss.zero_()
    loop.optimizer.step()
    assert value(exporter, LOSS) == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_a_skipped_round(loop: Loop, exporter: Exporter) -> None:
    """The NaN of a round without a step is counted and does not enter the loss of the next round."""
    loop.round()
    loop.round()
    loop.optimizer.zero_grad()
    for number, loss in enumerate(loop.losses((2, 3))):
        (loss * (math.nan if number else 1.0)).backward()
    with torch.no_grad():
        loop.model.inner.first.bias[0] = math.nan
    loop.round(step=False)
    with torch.no_grad():
        loop.model.inner.first.bias[0] = 0.0
    losses = loop.round()
    assert value(exporter, NONFINITE) == 1
    assert value(exporter, LOSS) == mean(losses)
    assert value(exporter, "torch_train_skipped_steps_total") == 2


def test_an_observed_loss_wins(loop: Loop, exporter: Exporter) -> None:
    """While the user gives the loss, that of the model is not shown."""
    loop.round()
    for after in (False, True, True):
        loop.optimizer.zero_grad()
        next(loop.losses((4,))).backward()
        if not after:
            exporter.observe(loss=0.125)
        loop.optimizer.step()
        if after:
            exporter.observe(loss=0.125)
        assert value(exporter, LOSS) == 0.125
    for _ in range(2):
        loop.round()
    losses = loop.round()
    assert value(exporter, LOSS) == mean(losses)


@pytest.mark.slow
def test_losses_shown_are_those_of_whole_rounds(loop: Loop) -> None:
    """Where few rounds are sampled and most are only counted, each loss shown is that of one whole round."""
    with watching(loop, every=32, overhead_budget=0.0001) as exporter:
        truths: set[float | None] = {None}
        shown = set()

        def steps() -> bool:
            for _ in range(10):
                losses = loop.round()
                truths.add(round(sum(losses) / len(losses), 5))
                loss = value(exporter, LOSS)
                shown.add(None if loss is None else round(loss, 5))
            return len(shown) > 4

        assert eventually(steps)
        assert shown <= truths
        assert errors(exporter) == {}


LOSSES: dict[str, Callable[[torch.Tensor], object]] = {
    "bfloat16": lambda loss: loss.bfloat16().reshape(1, 1),
    "without a graph": lambda loss: loss.detach(),
    "two": lambda loss: loss.detach().expand(2),
    "complex": lambda loss: loss.detach().to(torch.complex64),
    "float": lambda loss: float(loss.detach()),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_every_kind(kind: str) -> None:
    """A loss may have any real type and any shape of one element, and needs no graph; what is no such number shows nothing."""

    class Odd(Model):
        def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> dict[str, Any]:
            loss = super().forward(x, num_items_in_batch)["loss"]
            return {"out": loss, "loss": LOSSES[kind](loss)}

    loop = Loop(Odd())
    with watching(loop) as exporter:
        losses = []
        for size in (2, 3):
            loop.model(batch(size))
            output = loop.model(batch(size))
            (output["loss"].sum() if kind == "bfloat16" else output["out"]).backward()
            losses.append(output["loss"])
        loop.optimizer.step()
        shown = kind in ("bfloat16", "without a graph")
        assert value(exporter, LOSS) == (mean([loss.item() for loss in losses]) if shown else None)
        assert errors(exporter) == {}


class OnOtherDevice(torch.Tensor):
    """Like the losses of several devices, these cannot be added up."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - as torch has it
        if function in (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__) and all(
            isinstance(each, cls) for each in args
        ):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_losses_of_several_models_are_not_added() -> None:
    """Where several models return a loss, which may be on several devices, none is shown, and nothing fails."""

    class Elsewhere(Model):
        def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(x, num_items_in_batch)["loss"].as_subclass(OnOtherDevice)}

    models = {"a": Elsewhere(), "b": Elsewhere()}
    optimizers = [sgd(model) for model in models.values()]
    with start_exporter(models, port=None, every=1, optimizers=optimizers) as exporter:
        for _ in range(3):
            for model in models.values():
                model(batch(2))["loss"].backward()
            for optimizer in optimizers:
                optimizer.step()
        assert value(exporter, LOSS) is None
        assert errors(exporter) == {}


def test_a_loss_keeps_no_graph(loop: Loop, exporter: Exporter) -> None:
    """The loss of a forward that no backward follows keeps neither its graph nor its activations alive."""
    loop.round()
    kept: list[weakref.ref[torch.Tensor]] = []
    handle = loop.model.inner.first.register_forward_hook(lambda _module, _inputs, output: kept.append(weakref.ref(output)))
    list(loop.losses((2, 3)))
    gc.collect()
    assert [activation() for activation in kept] == [None, None]
    handle.remove()
