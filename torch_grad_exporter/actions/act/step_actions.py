"""Actions that run at the end of an optimizer's step, on the training thread: they change the training."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_grad_exporter.actions.act.learning_rates import scale, schedulers_of
from torch_grad_exporter.arguments import check_number, shown
from torch_grad_exporter.model.optimizers import Optimizers

if TYPE_CHECKING:
    from torch_grad_exporter.actions.act.measurements import Measurements
    from torch_grad_exporter.actions.freeze.layers import FrozenLayers
    from torch_grad_exporter.rules import Rule
    from torch_grad_exporter.store.worker import Worker


@dataclass(frozen=True, slots=True)
class Training:
    """What a step action may change.

    Attributes:
        optimizers: Those that train the models.
        stop: Set once `exporter.should_stop` is true.
        layers: Freezes layers; None without models, as in a test.
        worker: Has the norms of layers; None without models.
    """

    optimizers: Optimizers
    stop: threading.Event
    layers: FrozenLayers | None = None
    worker: Worker | None = None


class StepAction:
    """An action that runs at the end of an optimizer's step. In a job of several ranks all run it after the same step."""

    # Whether it knows by itself when it is due: `exporter.on(action)`.
    has_cause = False

    # Whether `step_over` is called after each step.
    each_step = False

    # Whether ranks that differ in it train different models. If not, any rank may ask for it, and a late rank does it late.
    changes_weights = True

    def check(self, training: Training, rule: Rule | None, *, own: bool) -> None:
        """Raise what is wrong with the call of `on`, before anything is registered.

        Args:
            training: What it will change.
            rule: The rule on which it acts, None for a condition.
            own: Whether it acts by itself.
        """

    def begin(self, training: Training, *, own: bool = False) -> None:
        """Be in use from now on. On the thread that calls `on`; raises what prevents it."""

    def holds(self, _measurements: Measurements) -> bool:
        """Return whether it is due by itself, at an evaluation, if it `has_cause`."""
        raise NotImplementedError

    def choose(self, _training: Training, _named: Sequence[str]) -> str | None:
        """Return what exactly to do, which all ranks are given; None if there is nothing to do.

        In the background, on rank 0.

        Args:
            _training: What it changes.
            _named: The layers that the problems of its rule name.
        """
        return ""

    def prepare(self, _training: Training, _choice: str) -> Any:  # noqa: ANN401 - each action's own
        """Return what `act` needs. In the background on each rank, a little before the step; raises what prevents it."""
        return None

    def act(self, training: Training, prepared: Any) -> None:  # noqa: ANN401 - as above
        """Change the training, between two steps and without waiting for a device. On the training thread."""
        raise NotImplementedError

    def step_over(self, steps: int) -> None:
        """Take note that a step is over, on the training thread, before `act`. `steps`: the number of all, equal on all ranks."""

    def end(self) -> None:
        """Be out of use. Idempotent, from any thread."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # the same on all ranks, which compare it


class Stop(StepAction):
    """Makes `exporter.should_stop` true; the training loop has to end when it is.

    In a job of several ranks it turns true after the same step on all of them, whichever rank has the cause.
    """

    changes_weights = False

    def act(self, training: Training, _prepared: object) -> None:
        """See `StepAction`."""
        training.stop.set()


class ScaleLearningRate(StepAction):
    """Multiplies the learning rates of all parameter groups of the optimizers by `factor`, down to `min_lr` at most.

    Schedulers of `torch.optim.lr_scheduler` go on from there: what they compute learning rates from is multiplied as well. A
    learning rate that is a tensor stays the same tensor, and stays on its device.
    """

    def __init__(self, factor: float, min_lr: float = 0.0) -> None:
        self.factor = check_number(f"factor={shown(factor)}", factor, above=0.0, example=0.5)
        self.min_lr = check_number(f"min_lr={shown(min_lr)}", min_lr, example=1e-6)

    def prepare(self, training: Training, _choice: str) -> Any:  # noqa: ANN401 - weak references
        """Return the schedulers, for which it goes through all objects of the process."""
        return schedulers_of([optimizer for _, optimizer in training.optimizers.numbered()])

    def act(self, training: Training, schedulers: Any) -> None:  # noqa: ANN401 - what `prepare` returned
        """See `StepAction`."""
        scale([optimizer for _, optimizer in training.optimizers.numbered()], schedulers, self.factor, self.min_lr)

    def __repr__(self) -> str:
        return f"ScaleLearningRate(factor={self.factor:g}, min_lr={self.min_lr:g})"
