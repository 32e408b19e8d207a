"""StepAction: the contract of actions that run at the end of an optimizer's step, on the training thread, and the simplest one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_grad_exporter.model.optimizers import Optimizers

if TYPE_CHECKING:
    from torch_grad_exporter.actions.freeze.layers import FrozenLayers
    from torch_grad_exporter.actions.rollback.state import TrainingState
    from torch_grad_exporter.capture.progress import StepClock
    from torch_grad_exporter.capture.rounds import RoundTracker
    from torch_grad_exporter.collectors.rollbacks import RollbackTotals
    from torch_grad_exporter.rules import Problem, Rule, Values
    from torch_grad_exporter.store.worker import Worker


@dataclass(frozen=True, slots=True)
class Training:
    """What a step action may change: what trains the models, and what knows of it.

    Attributes:
        stop: Set once `exporter.should_stop` is true.
        state: What goes back to a copy.
        rounds: Numbers rounds: optimizers share one that step after the same backward.
        ranks, ranks_here: The ranks of the job, and those of them that share this host.
    """

    optimizers: Optimizers
    stop: threading.Event
    layers: FrozenLayers
    worker: Worker
    state: TrainingState
    clock: StepClock
    rounds: RoundTracker
    rollbacks: RollbackTotals
    ranks: int = 1
    ranks_here: int = 1


class StepAction:
    """An action that runs at the end of an optimizer's step. In a job of several ranks all run it after the same step."""

    has_cause = False  # whether it knows by itself when it is due: `exporter.on(action)`
    each_step = False  # whether `step_over` is called after each step

    # Whether ranks that differ in it train different models. If not, any rank may ask for it, and a late rank does it late.
    changes_weights = True

    def check(self, training: Training, rule: Rule | None, *, own: bool) -> None:
        """Raise what is wrong with the call of `on`, before anything is registered.

        `rule`: that on which it acts, None for a condition; `own`: it acts by itself.
        """

    def begin(self, training: Training, *, own: bool = False) -> None:
        """Be in use from now on. On the thread that calls `on`; raises what prevents it."""

    def judged(self, _values: Values, *, holds: bool) -> bool:
        """Return whether to act, by the values of now. In the background, at each evaluation on the rank that judges.

        `holds`: whether the cause does; true if it acts by itself.
        """
        return holds

    def choose(self, _training: Training, _problems: Sequence[Problem]) -> Any:  # noqa: ANN401 - each action's own
        """Return what exactly to do, as JSON can hold it, which all ranks are given; None if there is nothing to do.

        In the background, on rank 0. `_problems`: those of its rule.
        """
        return ""

    def prepare(self, _training: Training, _choice: Any) -> Any:  # noqa: ANN401 - as above
        """Return what `act` needs. In the background on each rank, a little before the step; raises what prevents it."""
        return None

    def refused(self) -> None:
        """Take note that it is not done after all: the ranks did not agree. In the background."""

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
