"""An `Act` whose time, values and problems a test chooses, and which evaluates when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from torch_grad_exporter.actions.act.act import Act, Sources
from torch_grad_exporter.actions.act.between_steps import Training
from torch_grad_exporter.actions.act.steps import BetweenTheSteps, JobOfRanks
from torch_grad_exporter.actions.act.trigger import Failures
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.outcomes import ActionTotals
from torch_grad_exporter.distributed.identity import Identity
from torch_grad_exporter.distributed.store import GoneError, JobStore, StoreError
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.metrics.families import LabelledRows
from torch_grad_exporter.outputs.live.live import Judged
from torch_grad_exporter.rules import Problem, Values

NORM, CPU, LOSS = "torch_grad_global_norm", "torch_host_cpu_ratio", "torch_train_loss"
METRICS = REGISTRY.catalogue

Rows = dict[tuple[str, ...], float]


def values(numbers: dict[str, float | Rows]) -> Values:
    """The values of a scrape: of each metric one number, or one for each row of labels."""
    families = []
    for name, found in numbers.items():
        spec = METRICS[name]
        rows = found if isinstance(found, dict) else {("",) * len(spec.labels): found}
        families.append(LabelledRows().family(spec, rows))
    return Values(families)


class Memory:
    """A job's store. `down`: it does not answer; `gone`: it never will; `slow`: so many of the next questions have no answer."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.down = self.gone = False
        self.slow = 0
        self.asked = 0

    def _asked(self) -> None:
        self.asked += 1
        if self.gone:
            raise GoneError("gone")
        if self.down or self.slow:
            self.slow -= bool(self.slow)
            raise StoreError("down")

    def agree(self, key: str, value: str, *, seconds: float = 0.0) -> str:
        self._asked()
        return self.kept.setdefault(key, value.encode()).decode()

    def publish(self, key: str, value: bytes, *, seconds: float = 0.0) -> None:
        self._asked()
        self.kept[key] = value

    def collect(self, keys: Iterable[str], *, seconds: float = 0.0) -> dict[str, bytes]:
        self._asked()
        return {key: self.kept[key] for key in keys if key in self.kept}


class Still(BackgroundLoop):
    """A loop without a thread."""

    def start(self) -> None:
        pass


class World:
    """What an `Act` sees. `at`: the time."""

    def __init__(self, job: JobOfRanks | None = None) -> None:
        self.at = 0.0
        self.step = 0
        self.numbers: dict[str, float | Rows] = {}
        self.problems: list[Problem] = []
        self.judged = 0
        self.stopped = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.errors = ErrorLog(("action", "close"))
        self.totals = ActionTotals()
        training = Training(lambda: self.optimizers, self._stop)
        concerns: Callable[[Any], bool] = lambda optimizer: optimizer in self.optimizers  # noqa: E731 - has a type
        self.group: Identity | None = None
        self.spent: list[float] = []
        steps = BetweenTheSteps(
            training, concerns, self.errors, Failures(self.errors), job, spent=self.spent.append, steps=lambda: self.step,
            group=lambda: self.group,
        )  # fmt: skip
        steps._count.clock = lambda: 0.0  # no rate is ever measured, however slow the machine
        sources = Sources(
            judge=self._judge, fed=False, metrics=lambda: METRICS, step=lambda: self.step, clock=lambda: self.at,
            now=lambda: 1_700_000_000.0 + self.at,
        )  # fmt: skip
        self.act = Act(sources, steps, self.totals, self.errors, loop=Still)

    def _judge(self, _last: bool) -> Judged:
        self.judged += 1
        return Judged(values(self.numbers), self.problems)

    def _stop(self) -> None:
        self.stopped = True

    def on(self, what: object, action: object, **more: Any) -> Any:  # noqa: ANN401 - as `Exporter.on`
        """As `Exporter.on`."""
        options: dict[str, Any] = {"name": None, "for_": 0, "cooldown": 600} | more
        return self.act.on(what, action, **options)

    def evaluate(self, at: float, **numbers: float | Rows) -> None:
        """An evaluation at this time, with these numbers."""
        self.at, self.numbers = at, numbers
        self.act.evaluate()

    def turn(self) -> None:
        """What the thread does that judges, a second after the last time."""
        self.at += 1.0
        self.act._in_turn()

    def step_over(self) -> None:
        """A step is over."""
        self.step += 1
        self.act._steps.step_over()

    def count(self, action: str, result: str) -> int:
        """How many actions of a name had this result."""
        return self.totals.counts[action, result]


def world_of_ranks(ranks: int) -> tuple[Memory, list[World]]:
    """A store, and what so many ranks see."""
    store = Memory()
    worlds = [World(JobOfRanks(cast("JobStore", store), "run", rank, ranks)) for rank in range(ranks)]
    for world in worlds:
        world.act._steps._generation = 0  # as in processes of their own
    return store, worlds
