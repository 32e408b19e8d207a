"""An `Act` whose time, values and problems a test chooses, and which evaluates when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.support.tools import PATIENCE
from torch_grad_exporter import Exporter
from torch_grad_exporter.actions.act.act import Act, Sources
from torch_grad_exporter.actions.act.runner import StepActionRunner
from torch_grad_exporter.actions.act.step_actions import Training
from torch_grad_exporter.actions.act.trigger import Failures
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.outcomes import ActionTotals
from torch_grad_exporter.distributed.identity import Identity
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.metrics.families import LabelledRows
from torch_grad_exporter.outputs.live.live import Judged
from torch_grad_exporter.rules import Problem, Values

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


class World:
    """The surroundings of an `Act`. `at`: the time; `group`: the process group; `optimizers`: those that train the models."""

    def __init__(self) -> None:
        self.at = 0.0
        self.step = 0
        self.numbers: dict[str, float | Rows] = {}
        self.problems: list[Problem] = []
        self.judged = 0
        self.stopped = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.errors = ErrorLog(("action", "close"))
        self.totals = ActionTotals()
        self.group: Identity | None = None
        concerns: Callable[[Any], bool] = lambda optimizer: optimizer in self.optimizers  # noqa: E731 - has a type
        self.steps = StepActionRunner(
            Training(lambda: self.optimizers, self._stop), concerns, self.errors, Failures(self.errors), None,
            steps=lambda: self.step, group=lambda: self.group,
        )  # fmt: skip
        sources = Sources(
            judge=self._judge, fed=False, metrics=lambda: METRICS, step=lambda: self.step, clock=lambda: self.at,
            now=lambda: 1_700_000_000.0 + self.at,
        )  # fmt: skip
        self.act = Act(sources, self.steps, self.totals, self.errors, loop=Still)

    def _judge(self, _last: bool) -> Judged:
        self.judged += 1
        return Judged(values(self.numbers), self.problems)

    def _stop(self) -> None:
        self.stopped = True

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
        self.steps.step_over()

    def count(self, action: str, result: str) -> int:
        """Return how many actions of a name had this result."""
        return self.totals.counts[action, result]
