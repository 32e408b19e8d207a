"""`observe(grad_divisor=)`: by what a loop says that it divides its gradients."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.record import gradients_of, norm
from tests.support.scrape import errors, value
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.transfer.events import Divided

NORM, AFTER = "torch_grad_global_norm", "torch_grad_global_norm_after_clip"


class Loop:
    """A loop whose gradients are sums over tokens. `whole`: the norm after the last division."""

    def __init__(self) -> None:
        self.model = Perceptron()
        self.optimizer = sgd(self.model)
        self.whole = 0.0

    def backward(self, tokens: float) -> None:
        (self.model(batch()).square().mean() * tokens).backward()

    def divide(self, tokens: float) -> None:
        for parameter in self.model.parameters():
            parameter.grad.div_(tokens)
        self.whole = norm(gradients_of(self.model).values())

    def step(self, tokens: float, told: Callable[[], object] = lambda: None) -> None:
        """One step. `told`: is called between the division and the clearing of the step."""
        self.optimizer.zero_grad()
        self.backward(tokens)
        told()
        self.divide(tokens)
        self.optimizer.step()


def posted(exporter: Exporter) -> list[Divided]:
    """What lies in the mailbox."""
    return [event for event in [*exporter._training.mailbox] if isinstance(event, Divided)]


def test_a_divisor_is_that_of_the_coming_round_after_a_step_and_of_the_current_one_before_it() -> None:
    """Told right after the step before, before the first backward, or before the step: norms are those after the division."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=1) as exporter:
        exporter.observe(grad_divisor=50)
        for tokens, coming in ((50, 70), (70, 90), (90, 113)):
            loop.step(tokens)
            exporter.observe(grad_divisor=coming)
            assert value(exporter, NORM) == pytest.approx(loop.whole, rel=1e-5)
            assert value(exporter, "torch_grad_clip_coefficient") == pytest.approx(1.0, rel=1e-5)
        loop.step(113)
        for tokens in (60.0, 80.0):
            loop.step(tokens, lambda tokens=tokens: exporter.observe(grad_divisor=torch.tensor(tokens)))
            assert value(exporter, NORM) == pytest.approx(loop.whole, rel=1e-5)
        assert value(exporter, "torch_grad_clipped_steps_total") == 0
        assert not errors(exporter)


def test_a_tensor_that_changes_later_has_the_value_of_its_moment() -> None:
    """A loop that counts tokens in a tensor of its own clears it after the step."""
    loop, tokens = Loop(), torch.zeros(())
    with start_exporter(loop.model, port=None, every=1) as exporter:
        for count in (30.0, 50.0):
            tokens += count
            exporter.observe(grad_divisor=tokens)
            tokens.zero_()
            loop.step(count)
            assert value(exporter, NORM) == pytest.approx(loop.whole, rel=1e-5)


@pytest.mark.parametrize("early", [True, False])
def test_only_sampled_rounds_are_told_of(early: bool) -> None:
    """A step that is not sampled posts nothing; each sample is divided by what was told of its own round."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=4) as exporter:
        exporter._host._drain = lambda: None  # type: ignore[method-assign] # so that what is posted stays
        for step in range(16):
            tokens, before = 50.0 + step, len(posted(exporter))
            due = exporter._training.schedule.due(step)

            def tell(tokens: float = tokens) -> None:
                exporter.observe(grad_divisor=tokens)

            if early:
                tell()
            loop.step(tokens, (lambda: None) if early else tell)
            new = posted(exporter)[before:]
            assert [(one.round, one.divisor) for one in new] == ([(step, tokens)] if due else [])


@pytest.mark.parametrize(
    "bad",
    [0, -1.0, math.nan, math.inf, "12", torch.zeros(()), torch.tensor(math.nan), torch.ones(3), torch.ones(0), object(), [1.0]],
)
@pytest.mark.parametrize("every", [1, 1000])
def test_what_is_no_divisor_is_counted_and_divides_nothing(bad: object, every: int) -> None:
    """Whether the step is sampled or not, nothing is raised, the error is counted, and norms are as if nothing was told."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=every) as exporter:
        loop.step(1.0)
        exporter.observe(grad_divisor=bad, tokens=5)  # type: ignore[arg-type]
        loop.step(1.0, lambda: exporter.observe(grad_divisor=bad))  # type: ignore[arg-type]
        assert errors(exporter) == {"observe": 2}
        assert value(exporter, "torch_train_tokens_total") == 5
        if every == 1:
            assert value(exporter, NORM) == pytest.approx(loop.whole, rel=1e-5)


def test_a_divisor_from_another_thread_is_none_of_this_round(caplog: pytest.LogCaptureFixture) -> None:
    """Of which step it is cannot be known: it is counted as an error, told, and changes nothing."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=1) as exporter:
        loop.step(1.0)
        thread = threading.Thread(target=lambda: exporter.observe(grad_divisor=7))
        thread.start()
        thread.join()
        assert errors(exporter) == {"observe": 1}
        assert "on the thread that trains" in caplog.text
        loop.step(1.0)
        assert value(exporter, NORM) == pytest.approx(loop.whole, rel=1e-5)


@pytest.mark.parametrize("early", [True, False])
def test_skipped_steps_leave_no_divisor_to_others(early: bool) -> None:
    """A loop that throws a round away and tells its divisors before the backward, or after it: no norm is divided by another's.

    The round that was thrown away and the one after it may be absent; the ones after them are right.
    """
    loop = Loop()
    with start_exporter(loop.model, port=None, every=1) as exporter:
        absent = 0
        for step in range(16):
            tokens = 50.0 + 7 * step
            loop.optimizer.zero_grad()
            if early:
                exporter.observe(grad_divisor=tokens)
            loop.backward(tokens)
            if not early:
                exporter.observe(grad_divisor=tokens)
            loop.divide(tokens)
            if step in (5, 9, 10):
                continue
            loop.optimizer.step()
            shown = value(exporter, NORM)
            assert shown is None or shown == pytest.approx(loop.whole, rel=1e-5)
            absent += shown is None
        assert absent <= (2 if early else 0)
        assert not errors(exporter)


def test_where_gradients_are_read_at_the_step_they_are_divided_already() -> None:
    """On the rung `optimizer` a divisor changes nothing, and nothing is posted."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=1) as exporter:
        for step in range(8):
            loss = model(batch()).square().mean() * 50
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                parameter.grad = gradient / 50
            exporter.observe(grad_divisor=50)
            whole = norm(gradients_of(model).values())
            optimizer.step()
            if step > 4:
                assert value(exporter, NORM) == pytest.approx(whole, rel=1e-5)
        exporter._host._drain = lambda: None  # type: ignore[method-assign] # so that what is posted stays
        exporter.observe(grad_divisor=50)
        assert not posted(exporter)
        assert not errors(exporter)


def test_clipping_after_a_division_that_was_told_counts_at_once() -> None:
    """No limit has to repeat: all that is left of the factor is clipping."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=1) as exporter:
        for clipped in range(1, 4):

            def clip() -> None:
                loop.divide(40.0)
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1 * loop.whole)

            loop.optimizer.zero_grad()
            loop.backward(40.0)
            exporter.observe(grad_divisor=40.0)
            clip()
            loop.optimizer.step()
            assert value(exporter, NORM) == pytest.approx(loop.whole, rel=1e-5)
            assert value(exporter, AFTER) == pytest.approx(0.1 * loop.whole, rel=1e-4)
            assert value(exporter, "torch_grad_clipped_steps_total") == clipped
