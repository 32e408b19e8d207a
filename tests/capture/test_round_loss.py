"""`torch_train_loss` of models that return a loss: that of a whole round, as the loop itself would compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value, values
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture import round_loss
from torch_grad_exporter.capture.count_only.counting import CountOnly

LOSS = "torch_train_loss"
NONFINITE = "torch_train_loss_nonfinite_total"


class Model(nn.Module):
    """Returns a mean per micro-batch, or, told the items of the whole round, the sum over them, as Transformers' models do."""

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
        """The loss of each micro-batch, right after its forward."""
        for size in sizes:
            yield self.model(batch(size), **told)["loss"]

    def round(self, sizes: Sequence[int] = (2, 5, 3), *, step: bool = True, **told: Any) -> list[float]:  # noqa: ANN401
        """One round; returns the losses of the micro-batches."""
        found = []
        self.optimizer.zero_grad()
        for loss in self.losses(sizes, **told):
            loss.backward()
            found.append(float(loss.detach().double()))
        if step:
            self.optimizer.step()
        return found


def mean(losses: Sequence[float]) -> Any:  # noqa: ANN401 - what pytest makes of it
    """The mean."""
    return pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.fixture
def loop() -> Loop:
    """One for each test."""
    return Loop()


def watching(loop: Loop, **options: object) -> Exporter:
    """An exporter that reads each round."""
    return start_exporter(loop.model, port=None, **{"every": 1, **options})


@pytest.fixture
def exporter(loop: Loop) -> Iterator[Exporter]:
    """An exporter that reads each round, and must not fail."""
    with watching(loop) as one:
        yield one
        assert errors(one) == {}


@pytest.mark.parametrize("told", [{}, {"num_items_in_batch": None}], ids=["nothing", "no number"])
def test_a_mean_for_each_micro_batch(loop: Loop, exporter: Exporter, told: dict[str, None]) -> None:
    """The loss is the mean over the micro-batches of the round, once its step is done, and not before."""
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
    """Where the model is told the items of the whole round, the loss is the sum: that of all items."""
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
    """A share of the items of all ranks is no loss; a mean is this rank's own."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        loop.round(num_items_in_batch=10)
        assert value(exporter, LOSS) is None
        losses = loop.round()
        assert value(exporter, LOSS) == mean(losses)
    finally:
        dist.destroy_process_group()


def test_forwards_that_are_only_looked_at(loop: Loop, exporter: Exporter) -> None:
    """Forwards in train mode, with a graph, that no backward follows count in no round, wherever they are."""
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


def test_one_backward_over_several_forwards(loop: Loop, exporter: Exporter) -> None:
    """Losses that are added up before the backward are all of the round."""
    losses = [*loop.losses((2, 5, 3))]
    torch.stack(losses).sum().backward()
    loop.optimizer.step()
    assert value(exporter, LOSS) == mean([loss.item() for loss in losses])


def test_a_loss_that_is_changed_in_place(loop: Loop, exporter: Exporter) -> None:
    """What the loop does to the loss after the forward, as scaling it, does not change what the model returned."""
    (loss,) = loop.losses((4,))
    expected = loss.item()
    loss.mul_(1024.0)
    loss.backward()
    with torch.no_grad():
        loss.zero_()
    loop.optimizer.step()
    assert value(exporter, LOSS) == pytest.approx(expected, rel=1e-6)


def test_a_skipped_round_is_shown_when_the_next_one_begins(loop: Loop, exporter: Exporter) -> None:
    """The NaN of a round without a step is counted, by itself, and does not enter the next round's loss."""
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


def test_a_round_that_the_end_cuts_off(loop: Loop) -> None:
    """What a round without a step has when the exporter is closed is shown."""
    exporter = watching(loop)
    loop.round()
    with torch.no_grad():
        loop.model.inner.first.bias[0] = math.nan
    loop.round(step=False)
    exporter.close()
    assert {k[0]: v for k, v in values(exporter).items() if k[0] == NONFINITE} == {NONFINITE: 1}


def test_an_observed_loss_wins(loop: Loop, exporter: Exporter) -> None:
    """Where the user gives the loss, before or after the step, the model's is not shown, until the user has stopped."""
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


def test_only_whole_rounds_are_shown(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round whose reading becomes due in its middle has no loss; the next one that is due from its beginning has."""
    with watching(loop, every=1000) as exporter:
        for _ in range(4):
            loop.round()
        before = value(exporter, LOSS)
        monkeypatch.setattr(round_loss, "READ_SECONDS", math.inf)
        loop.round()
        loop.optimizer.zero_grad()
        losses = loop.losses((2, 3))
        next(losses).backward()
        monkeypatch.setattr(round_loss, "READ_SECONDS", 0.0)
        next(losses).backward()
        loop.optimizer.step()
        assert value(exporter, LOSS) == before
        found = loop.round()
        assert value(exporter, LOSS) == mean(found)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_rounds_that_are_only_counted(loop: Loop, accumulated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hooks rest, the losses shown are those of whole rounds that were followed, also where the rest ends amid a round."""
    monkeypatch.setattr(round_loss, "READ_SECONDS", 0.0)
    sizes = [2, 5, 3][:accumulated]
    with watching(loop, every=128, overhead_budget=0.0001) as exporter:
        counting: CountOnly = exporter._training.capture._count_only
        truths, shown, ended = set(), set(), 0
        for number in range(400):
            loop.optimizer.zero_grad()
            losses = []
            for place, loss in enumerate(loop.losses(sizes)):
                loss.backward()
                losses.append(loss.item())
                if place == 0 and number % 9 == 0 and counting._counting is not None:
                    counting.settle()
                    ended += 1
            loop.optimizer.step()
            truths.add(round(sum(losses) / len(losses), 5))
            shown.add(round(value(exporter, LOSS) or 0.0, 5))
        assert ended > 3
        assert len(shown) > 20
        assert shown <= truths
        assert errors(exporter) == {}


@pytest.mark.parametrize("clears_first", [True, False])
def test_a_closure_that_is_called_often(loop: Loop, clears_first: bool) -> None:
    """LBFGS shows the loss of its last evaluation, whether the closure clears before or after the forward."""
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=4)
    with watching(loop) as exporter:
        for _ in range(4):
            found = []

            def closure(found: list[float] = found) -> torch.Tensor:
                if clears_first:
                    loop.optimizer.zero_grad()
                (loss,) = loop.losses((5,))
                if not clears_first:
                    loop.optimizer.zero_grad()
                loss.backward()
                found.append(loss.item())
                return loss

            loop.optimizer.step(closure)
            assert len(found) > 1
            assert value(exporter, LOSS) == pytest.approx(found[-1], rel=1e-6)


def test_where_no_hook_sees_the_backward(loop: Loop) -> None:
    """On the rung `optimizer` the losses of all forwards since the step are those of the round."""
    with watching(loop) as exporter:
        for _ in range(6):
            losses, sums = [], [torch.zeros_like(p) for p in loop.model.parameters()]
            for loss in loop.losses((2, 3)):
                found = torch.autograd.grad(loss, list(loop.model.parameters()))
                sums = [one + other for one, other in zip(sums, found, strict=True)]
                losses.append(loss.item())
            for parameter, gradient in zip(loop.model.parameters(), sums, strict=True):
                parameter.grad = gradient
            loop.optimizer.step()
        assert value(exporter, "torch_grad_exporter_capture_mode", mode="optimizer") == 1
        assert value(exporter, LOSS) == mean(losses)


def test_losses_of_several_models_are_none_of_a_round() -> None:
    """Where two models return a loss in one round, there is none; with one of them there is."""
    loops = Loop(), Loop()
    with start_exporter({"one": loops[0].model, "other": loops[1].model}, port=None, every=1) as exporter:
        losses = loops[0].round()
        assert value(exporter, LOSS) == mean(losses)
        loops[0].round(step=False)
        loops[1].round()
        assert value(exporter, LOSS) == mean(losses)


@pytest.mark.parametrize(
    "make",
    [
        lambda loss: loss.bfloat16(),
        lambda loss: loss.reshape(1, 1),
        lambda loss: loss.as_subclass(Own),
        lambda loss: loss.detach(),
    ],
    ids=["bfloat16", "one element", "a subclass", "without a graph"],
)
def test_losses_of_every_kind(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A loss may be of any type and shape of one element; one without a graph counts if a backward follows."""

    class Odd(Model):
        def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> dict[str, torch.Tensor]:
            found = super().forward(x, num_items_in_batch)
            return {"out": found["loss"], "loss": make(found["loss"])}

    loop = Loop(Odd())
    with watching(loop) as exporter:
        losses = []
        for size in (2, 3):
            loop.model(batch(size))
            found = loop.model(batch(size))
            (found["loss"].sum() if found["loss"].requires_grad else found["out"]).backward()
            losses.append(found["loss"].item())
        loop.optimizer.step()
        assert value(exporter, LOSS) == mean(losses)
        assert errors(exporter) == {}


class Own(torch.Tensor):
    """A tensor of the user's own kind."""


@pytest.mark.parametrize(
    "loss", [torch.zeros(2), torch.zeros((), dtype=torch.complex64), torch.zeros((), device="meta"), None, 1.0]
)
def test_what_is_no_loss(loss: object) -> None:
    """An output whose `loss` is no real number of a tensor shows none and costs nothing."""

    class Odd(Model):
        def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> dict[str, Any]:
            return {"out": super().forward(x, num_items_in_batch)["loss"], "loss": loss}

    loop = Loop(Odd())
    with watching(loop) as exporter:
        loop.model(batch())["out"].backward()
        loop.optimizer.step()
        assert value(exporter, LOSS) is None
        assert errors(exporter) == {}


def test_a_long_round_keeps_few_losses(loop: Loop, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of losses they are added up, and forwards that were only looked at are forgotten."""
    monkeypatch.setattr(round_loss, "MOST", 5)
    losses = loop.round([2] * 23)
    assert value(exporter, LOSS) == mean(losses)
    assert value(exporter, NONFINITE) == 0
    held = exporter._training.capture._observations._losses
    list(loop.losses([2] * 23))
    assert len(held._waiting) <= 5
    loop.round([2, 2])
    losses = loop.round([2, 2])
    assert value(exporter, LOSS) == mean(losses)
    loop.round()
    loop.round()
    assert held._waiting == []


def test_a_loss_keeps_no_graph(loop: Loop, exporter: Exporter) -> None:
    """What is kept of a loss is a number, or has no graph."""
    for loss in loop.losses((2, 3)):
        loss.backward()
    held = exporter._training.capture._observations._losses
    next(loop.losses((2,)))
    kept = [one.value for one in held._waiting] + list(held._round.values if held._round else [])
    assert kept
    assert not any(isinstance(one, torch.Tensor) and one.requires_grad for one in kept)
