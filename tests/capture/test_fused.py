"""Steps that fused optimizers left out, told late as on a GPU: tickets that the test opens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from torch_grad_exporter.capture.fused_optimizer import FusedSteps
from torch_grad_exporter.capture.progress import StepClock

NO = torch.zeros(1)


@dataclass
class Late:
    """An answer that is under way until `value` is set."""

    value: float | None = None

    def ready(self) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
        return None if self.value is None else np.array([self.value])


@dataclass
class LateTransfer:
    """Stands for the transfer from a busy device."""

    sent: list[Late] = field(default_factory=list)

    def send(self, _vector: torch.Tensor) -> Late:
        self.sent.append(Late())
        return self.sent[-1]


def scene() -> tuple[FusedSteps, StepClock, list[Late]]:
    """Fused steps whose answers the test gives."""
    clock, transfer = StepClock(deque()), LateTransfer()
    return FusedSteps(clock, transfer), clock, transfer.sent


def test_a_step_that_was_left_out_is_made_up_for_by_the_next() -> None:
    """Counted before the answer is there, a step that did not take place is not counted again, and no counter ever falls."""
    steps, clock, sent = scene()
    counted = []
    for number, answer in enumerate([0.0, 1.0, 0.0, 0.0]):
        steps.settle(number)
        steps.stepped(number, 0, NO)
        counted.append(clock.steps[0])
        sent[-1].value = answer
    steps.settle(4)
    assert counted == [1, 2, 2, 3]
    assert (clock.steps[0], clock.skipped) == (3, 1)


def test_answers_that_come_late_together() -> None:
    """Two rounds without an answer are settled when both are there, each once."""
    steps, clock, sent = scene()
    for number in range(2):
        steps.settle(number)
        steps.stepped(number, 0, NO)
    assert (clock.steps[0], clock.skipped) == (2, 0)
    for one in sent:
        one.value = 1.0
    assert steps.settle(2)
    assert not steps.settle(3)
    assert clock.skipped == 2
    for number in range(3, 6):
        steps.stepped(number, 0, None)
    assert clock.steps[0] == 3


def test_a_round_in_which_one_of_two_stepped_was_not_skipped() -> None:
    """With two optimizers under one scaler a round is skipped only if both left their step out."""
    steps, clock, sent = scene()
    steps.stepped(0, 0, NO)
    steps.stepped(0, 1, NO)
    sent[0].value, sent[1].value = 1.0, 0.0
    assert not steps.settle(1)
    steps.stepped(1, 0, NO)
    steps.stepped(1, 1, None)
    sent[2].value = 1.0
    assert not steps.settle(2)
    assert clock.skipped == 0


def test_an_answer_that_is_there_at_once_is_believed_at_once() -> None:
    """On the CPU a step that did not take place is never counted."""
    clock = StepClock(deque())
    steps = FusedSteps(clock)
    steps.stepped(0, 0, torch.ones(1))
    assert clock.steps == {}
    assert steps.settle(1)
    assert clock.skipped == 1
