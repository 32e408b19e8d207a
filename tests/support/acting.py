"""An `Act` whose time, values and problems a test chooses, and which evaluates when the test says so."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.support.tools import PATIENCE
from torch_grad_exporter import Exporter
from torch_grad_exporter.actions.act.act import Act
from torch_grad_exporter.actions.act.decisions import JobOfRanks
from torch_grad_exporter.actions.act.reports import ActionReports
from torch_grad_exporter.actions.act.runner import StepActionRunner
from torch_grad_exporter.actions.act.step_actions import Training
from torch_grad_exporter.actions.freeze.layers import FrozenLayers
from torch_grad_exporter.actions.rollback.state import TrainingState
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
from torch_grad_exporter.collectors.outcomes import ActionTotals
from torch_grad_exporter.collectors.rollbacks import RollbackTotals
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.metrics.families import LabelledRows
from torch_grad_exporter.outputs.live.live import Judged
from torch_grad_exporter.rules import Problem, Values
from torch_grad_exporter.torch_compat.optimizers import LossScale

NORM, CPU, LOSS = "torch_grad_global_norm", "torch_host_cpu_ratio", "torch_train_loss"
METRICS = REGISTRY.catalogue

Rows = dict[tuple[str, ...], float]


def values(numbers: dict[str, float | Rows]) -> Values:
    """Return the values of a scrape: for each metric one number, or one for each row of labels."""
    families = []
    for name, content in numbers.items():
        spec = METRICS[name]
        rows = content if isinstance(content, dict) else {("",) * len(spec.labels): content}
        families.append(LabelledRows().family(spec, rows))
    return Values(families)


def due(exporter: Exporter, action: object) -> None:
    """Register an action, and wait until it is due at the end of the next step."""
    asked, seen = list[bool](), threading.Event()
    exporter.on(lambda m: asked.append(True) or True, action)
    exporter.on(lambda m: bool(asked), lambda event: seen.set())  # judged later, by the same thread
    assert seen.wait(PATIENCE)


class Still(BackgroundLoop):
    """A loop without a thread."""

    def start(self) -> None:
        pass


class Trained:
    """The optimizers of a `World`, in place of those of an exporter."""

    def __init__(self) -> None:
        self.known: list[torch.optim.Optimizer] = []

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether it trains the models."""
        return optimizer in self.known

    def numbered(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """Return them with their numbers."""
        return [*enumerate(self.known)]


class Rooted:
    """The layers of a `World`'s model, in place of those of an exporter."""

    fully_sharded = False

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def roots(self) -> list[torch.nn.Module]:
        """Return the model."""
        return [self._model]


class World:
    """The surroundings of an `Act`. `at`: the time; `judgements`: how many there were; `job`: the ranks that act together.

    `model`: what can go back to a copy.
    """

    def __init__(self, job: JobOfRanks | None = None, model: torch.nn.Module | None = None) -> None:
        self.at = 0.0
        self.step = 0
        self.numbers: dict[str, float | Rows] = {}
        self.problems: list[Problem] = []
        self.judgements = 0
        self.trained: Any = Trained()
        self.errors = ErrorLog(("action", "close"))
        self.totals = ActionTotals()
        self.stop = threading.Event()
        reports = ActionReports(self.errors, self.totals, self, lambda: 1_700_000_000.0 + self.at)
        self.rollbacks = RollbackTotals()
        index: Any = Rooted(torch.nn.Module() if model is None else model)
        frozen = FrozenLayers(index, self.trained, FrozenLabels())
        state = TrainingState(index, self.trained, LossScale())
        unused: Any = None
        clock: Any = self
        training = Training(self.trained, self.stop, frozen, unused, state, clock, unused, self.rollbacks)
        self.runner = StepActionRunner(training, reports, job, clock=lambda: self.at)
        self.act = Act(self, self.runner, reports, clock=lambda: self.at, loop=Still)

    @property
    def number(self) -> int:
        """The steps so far, as a `StepClock` has them."""
        return self.step

    @property
    def stopped(self) -> bool:
        """Whether the run is to stop."""
        return self.stop.is_set()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that train the models."""
        return self.trained.known

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.trained.known = optimizers

    def judged(self, *, last: bool = False) -> Judged:
        """Judge as `Live` does."""
        self.judgements += 1
        return Judged(values(self.numbers), self.problems)

    def on(self, what: object, action: object, **more: Any) -> Any:  # noqa: ANN401 - as `Exporter.on`
        """Do what `Exporter.on` does."""
        options: dict[str, Any] = {"name": None, "for_": 0, "cooldown": 600} | more
        return self.act.on(what, action, **options)

    def evaluate(self, at: float, **numbers: float | Rows) -> None:
        """Evaluate at this time, with these numbers."""
        self.at, self.numbers = at, numbers
        self.act.evaluate()

    def step_over(self) -> None:
        """End a step."""
        self.step += 1
        self.runner.step_over()

    def count(self, action: str, result: str) -> int:
        """Return how many actions of a name had this result."""
        return self.totals.counts[action, result]
