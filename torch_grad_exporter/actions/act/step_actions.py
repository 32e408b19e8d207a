"""Actions that run between steps, on the thread that trains: they change the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch_grad_exporter.actions.act.schedulers import scale, schedulers_of

if TYPE_CHECKING:
    from torch_grad_exporter.actions.act.measurements import Measurements
    from torch_grad_exporter.actions.freeze.layers import FrozenLayers
    from torch_grad_exporter.actions.freeze.norms import LayerNorms
    from torch_grad_exporter.rules import Rule


@dataclass(frozen=True, slots=True)
class Training:
    """What such an action may change. `optimizers`: those that train the models; `stop`: makes `exporter.should_stop` true.

    `layers`: freezes layers; `norms`: a new reader of their norms; `None` where there are no models, as in a test.
    """

    optimizers: Callable[[], Sequence[torch.optim.Optimizer]]
    stop: Callable[[], None]
    layers: FrozenLayers | None = None
    norms: Callable[[], LayerNorms] | None = None


class StepAction:
    """An action that runs at the end of an optimizer's step. In a job of several ranks all run it at the same step."""

    has_cause = False
    """Whether it knows by itself when it is due: `exporter.on(action)`."""

    each_step = False
    """Whether `step_over` is to be called."""

    def check(self, training: Training, rule: Rule | None, *, own: bool) -> None:
        """Raises what is wrong with the call of `on`, before anything is registered. `rule`, `own`: what it is to act on."""

    def begin(self, training: Training, *, own: bool = False) -> None:
        """It is in use from now on, `own`: by itself. On the thread that calls `on`; raises what prevents it."""

    def holds(self, _measurements: Measurements) -> bool:
        """Whether it is due by itself, at an evaluation, where it `has_cause`."""
        raise NotImplementedError

    def chosen(self, _training: Training, _named: Sequence[str]) -> str | None:
        """What exactly is to be done, for all ranks to know; `None` if there is nothing to do. In the background.

        Made by the one rank that proposes it. `_named`: the layers that the problems of its rule name.
        """
        return ""

    def prepared(self, training: Training, _choice: str) -> Callable[[], None]:
        """What is to be called between two steps, which must not wait for a device. Made in the background, a little earlier.

        `_choice`: what one rank has chosen, the same on all of them.
        """
        raise NotImplementedError

    def step_over(self, steps: int) -> None:
        """A step is over, on the training thread, before what is prepared is called. `steps`: how many, the same on all ranks."""

    def end(self) -> None:
        """It is not in use any more. Idempotent, from any thread."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # the same on all ranks, which compare it


class Stop(StepAction):
    """Makes `exporter.should_stop` true; the training loop has to end when it is.

    In a job of several ranks it turns true after the same step on all of them.
    """

    def prepared(self, training: Training, _choice: str) -> Callable[[], None]:
        """As of `StepAction`."""
        return training.stop


class ScaleLearningRate(StepAction):
    """Multiplies the learning rates of all parameter groups of the optimizers by `factor`, down to `min_lr` at most.

    Schedulers of `torch.optim.lr_scheduler` go on from there: what they compute learning rates from is multiplied as well. A
    learning rate that is a tensor stays the same tensor, and stays on its device.
    """

    def __init__(self, factor: float, min_lr: float = 0.0) -> None:
        self.factor = _number("factor", factor, above=True)
        self.min_lr = _number("min_lr", min_lr, above=False)

    def prepared(self, training: Training, _choice: str) -> Callable[[], None]:
        """As of `StepAction`. Finds the schedulers, for which it goes through all objects of the process."""
        optimizers = training.optimizers()
        schedulers = schedulers_of(optimizers)
        return lambda: scale(training.optimizers(), schedulers, self.factor, self.min_lr)

    def __repr__(self) -> str:
        return f"ScaleLearningRate(factor={self.factor:g}, min_lr={self.min_lr:g})"


def _number(name: str, value: float, *, above: bool) -> float:
    expected = f"expected a number {'above 0' if above else 'that is not below 0'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: {expected}")
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise ValueError(f"{name}={value!r}: {expected}")
    return float(value)
