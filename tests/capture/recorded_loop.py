"""A loop that records the norm of each step and each skipped step by itself, and compares a scrape with them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.capture.scenes import NORM, SAMPLED_AT, SKIPPED, STEPS, Loop, whole
from tests.support.scrape import key, value, values
from torch_grad_exporter import Exporter


class RecordedLoop(Loop):
    """A loop whose model has one optimizer. `norms`: the float64 norm at each step. `skipped`: steps left out."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__(model)
        self.norms: list[float] = []
        self.skipped = 0

    def take(self) -> None:
        """Take the optimizer's step, with the gradients as they are."""
        self.norms.append(whole(self.model))
        self.optimizer.step()
        self.steps += 1

    def step(self, size: int = 5, **clearing: bool) -> None:
        """Train one plain step."""
        self.backward(size, **clearing)
        self.take()

    def check_counts(self, exporter: Exporter) -> None:
        """Assert that steps and skipped steps are those that were recorded, and that no other optimizer is said to have stepped."""
        shown = values(exporter)
        steps = {labels: count for (name, labels), count in shown.items() if name == STEPS}
        assert steps == {(("optimizer", type(self.optimizer).__name__),): self.steps}
        assert shown[key(SKIPPED)] == self.skipped

    def check_norm(self, exporter: Exporter) -> None:
        """Assert that the global norm is that of the step which the exporter says it sampled."""
        shown, step = value(exporter, NORM), value(exporter, SAMPLED_AT)
        assert shown is not None
        assert step is not None
        assert math.isfinite(shown)
        assert shown == pytest.approx(self.norms[int(step) - 1], rel=1e-5)

    def check(self, exporter: Exporter) -> None:
        """Assert that steps, skipped steps and the norm are those that were recorded."""
        self.check_counts(exporter)
        self.check_norm(exporter)
