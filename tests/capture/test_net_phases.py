"""The phase that the time of slow code belongs to. The code sleeps for a known time, and at least that must be in its phase."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.utils.checkpoint

from tests.capture.scenes import DURATION, PHASE, watching
from tests.support.models import batch, sgd
from tests.support.scrape import value
from torch_grad_exporter import Exporter

SLOW = 0.02
"""Seconds."""


class Slowly(torch.autograd.Function):
    """The identity with a slow backward."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW)
        return gradient


class Loop(torch.nn.Module):
    """A model and its training step, slow at one named place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 3)
        self.optimizer = sgd(self)
        if place == "optimizer":
            self.optimizer.register_step_pre_hook(lambda *_: time.sleep(SLOW))

    def here(self, place: str) -> None:
        """Sleep, if this is the place."""
        if place == self.place:
            time.sleep(SLOW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.here("forward")
        return self.second(Slowly.apply(x) if self.place == "backward" else x)

    def step(self, data: Iterator[torch.Tensor] | None = None) -> None:
        """Train one step."""
        self.here("before the forward")
        inputs = batch() if data is None else next(data)
        self.optimizer.zero_grad()
        loss = self(inputs).square().mean()
        self.here("between forward and backward")
        loss.backward()
        self.here("between backward and step")
        self.optimizer.step()
        self.here("after the step")


def phases(exporter: Exporter) -> dict[str, float]:
    """Return the seconds of each phase."""
    return {phase: value(exporter, PHASE, phase=phase) or 0.0 for phase in ("outside", "data", "forward", "backward", "optimizer")}


PLACES = {
    "before the forward": "outside",
    "forward": "forward",
    "between forward and backward": "outside",
    "backward": "backward",
    "between backward and step": "outside",
    "optimizer": "optimizer",
    "after the step": "outside",
}


@pytest.mark.slow
def test_slow_code_counts_in_its_phase() -> None:
    """The time of a slow place is in its phase and in the duration of its round, and that after a step in the next one's."""
    for place, phase in PLACES.items():
        loop = Loop(place)
        with watching(loop) as exporter:
            loop.step()
            loop.step()
            before, spent = phases(exporter), value(exporter, f"{DURATION}_sum")
            for _ in range(3):
                loop.step()
            assert value(exporter, f"{DURATION}_sum") - spent >= 3 * SLOW
            loop(batch())  # ends the phase after the last step
            assert phases(exporter)[phase] - before[phase] >= 3 * SLOW, place
            assert value(exporter, f"{DURATION}_count") == 4
            assert value(exporter, "torch_train_slowest_step_seconds") >= SLOW


@pytest.mark.slow
@pytest.mark.parametrize("stops_early", [True, False])
def test_a_checkpointed_root_stays_in_the_backward(stops_early: bool) -> None:
    """A root that a checkpoint runs again within the backward leaves that backward in its phase."""
    loop = Loop("backward")
    with watching(loop) as exporter, torch.utils.checkpoint.set_checkpoint_early_stop(stops_early):
        before = phases(exporter)
        for _ in range(4):
            loop.optimizer.zero_grad()
            torch.utils.checkpoint.checkpoint(loop, batch(), use_reentrant=False).square().mean().backward()
            loop.optimizer.step()
        assert phases(exporter)["backward"] - before["backward"] >= 4 * SLOW


def test_an_evaluation_is_outside_of_the_phases() -> None:
    """Forwards in evaluation mode or without gradients are not in the phase `forward`."""
    loop = Loop("forward")
    with watching(loop) as exporter:
        loop.step()
        before = phases(exporter)
        loop.eval()
        loop(batch())
        with torch.no_grad():
            loop(batch())
            loop.train()
            loop(batch())
        loop.place = "nowhere"
        loop.step()
        after = phases(exporter)
        assert after["outside"] - before["outside"] >= 3 * SLOW
