"""What the tests of rounds share: names of series, exporters that collect little else, and plain loops."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from tests.support.loops import PlainLoop
from tests.support.models import Perceptron, batch
from tests.support.record import gradients_of, norm
from tests.support.scrape import OFF, errors, mode, value
from torch_grad_exporter import Exporter, start_exporter

ACCUMULATED = "torch_grad_norm_squared_accumulated_total"
BACKWARDS = "torch_train_backward_passes_total"
CAPTURES = "torch_grad_exporter_captures_total"
DURATION = "torch_train_step_duration_seconds"
LAYER_CAPTURES = "torch_grad_captures_total"
MISSING = "torch_grad_missing_parameters"
NORM = "torch_grad_global_norm"
PHASE = "torch_train_phase_seconds_total"
SAMPLED_AT = "torch_grad_sample_step"
SAMPLES = "torch_train_samples_total"
SKIPPED = "torch_train_skipped_steps_total"
STATE = "torch_train_state"
STEPS = "torch_train_steps_total"

COUNTED = {"every": 4096, "overhead_budget": 0.0001}
"""The budget pays for next to nothing, so nearly all rounds are only counted."""

REGIMES = {"sampled": {"every": 1}, "mixed": {"every": 8}, "counted": COUNTED}

each_regime = pytest.mark.parametrize("regime", ["sampled", "counted"])
all_regimes = pytest.mark.parametrize("regime", REGIMES)
clearing = pytest.mark.parametrize("set_to_none", [True, False])

LONG = 280
"""More rounds than are counted in a row: after them everything is known about the rounds before."""


@contextlib.contextmanager
def watching(model: torch.nn.Module | Mapping[str, torch.nn.Module], **options: object) -> Iterator[Exporter]:
    """Start an exporter that samples every round and serves nothing; assert at the end that nothing failed in it."""
    with start_exporter(model, port=None, **{"every": 1, "collectors": OFF, **options}) as exporter:
        yield exporter
        assert errors(exporter) == {}


def reads_after_backward(exporter: Exporter) -> bool:
    """Return whether gradients are read after the backward, and not at the step."""
    return mode(exporter) != "optimizer"


def loss_of(model: torch.nn.Module, *, nan: bool = False) -> torch.Tensor:
    """Return a loss over a random batch. `nan`: all its gradients are NaN."""
    return model(batch()).square().mean() * (math.nan if nan else 1.0)


def whole(model: torch.nn.Module) -> float:
    """Return the float64 norm of all gradients."""
    return norm(gradients_of(model).values())


class Loop(PlainLoop):
    """A plain loop that can train until rounds are only counted."""

    def is_counted(self, exporter: Exporter, step: Callable[[], None] | None = None) -> bool:
        """Train once; return whether that round was only counted, which shows in a backward that was not timed."""
        before = value(exporter, PHASE, phase="backward")
        (step or self.step)()
        return before is not None and value(exporter, PHASE, phase="backward") == before

    def until_counted(self, exporter: Exporter, step: Callable[[], None] | None = None) -> None:
        """Train until two rounds in a row were only counted."""
        for _ in range(300):
            for _ in range(4):
                (step or self.step)()
            if self.is_counted(exporter, step) and self.is_counted(exporter, step):
                return
        pytest.fail("no round was only counted")

    def warm_up(self, exporter: Exporter, regime: str, step: Callable[[], None] | None = None) -> None:
        """Train until the regime has set in."""
        if regime == "counted":
            self.until_counted(exporter, step)
            return
        for _ in range(4 if regime == "sampled" else 40):
            (step or self.step)()

    def go_on(self, regime: str, step: Callable[[], None] | None = None) -> None:
        """Train on until everything is known about the rounds before."""
        for _ in range(4 if regime == "sampled" else LONG):
            (step or self.step)()


class Headed(Perceptron):
    """A model whose backward stops at its head while `head_only` is set."""

    head_only = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden.detach() if self.head_only else hidden)
