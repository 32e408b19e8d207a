"""A step without a sample, by number of parameters: what the exporter adds to a step that it does not look at.

Steps of one arm alternate with those of the others, single steps at a time, each after one step that is not timed; what is
compared is neighbours. Everything is repeated with new models, whose places in memory are others. Arms: plain training, a
second plain one as control, PyTorch's own hooks at the same places that do nothing, the exporter with the longest interval
there is, which only counts most of so short steps, and the same where it follows each of them. Blocks with a sample are left out.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks import record
from benchmarks.apart import OptimizerHooks
from benchmarks.bars import verdict
from benchmarks.interleave import interval, trimmed_mean
from torch_grad_exporter import Exporter, start_exporter

CASES = ((6, 6), (60, 60), (400, 400), (2_000, 2_000), (10_000, 10_000), (400, 6), (2_000, 6), (10_000, 6))
"""Parameters that are tracked, and how many of them take part in the step and get a gradient."""

REPEATS = 8
BLOCK_SECONDS = 0.25
"""Between two looks at the counter of samples."""

BAR = 8e-6

SETTLED = 700
"""Steps after which the exporter follows rounds together that are alike."""

FOLLOWED_UP_TO = 400
"""Parameters that take part in a step, up to which this many steps take no minutes."""

SAMPLES = "torch_grad_exporter_captures_total"
OWN_SECONDS = "torch_grad_exporter_overhead_seconds_total"


class Layer(torch.nn.Module):
    """Two parameters of four elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.bias = torch.nn.Parameter(torch.randn(4))


class Toy(torch.nn.Module):
    """Many layers whose parameters all meet in one operation, so that a step is as short as it can be with that many."""

    def __init__(self, parameters: int, taking_part: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(parameters // 2))
        self.taking_part: list[torch.Tensor] = [*self.parameters()][:taking_part]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One row of all parameters that take part, times the inputs."""
        return torch.cat(self.taking_part) * inputs


@dataclass(slots=True)
class Arm:
    """A model of its own with its optimizer, the optimizer hooks that belong to it and perhaps an exporter."""

    model: Toy
    optimizer: torch.optim.Optimizer
    inputs: torch.Tensor
    hooks: OptimizerHooks = field(default_factory=OptimizerHooks)
    exporter: Exporter | None = None

    def step(self) -> None:
        """An ordinary training step."""
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        self.optimizer.step()

    def timed(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of one step, after another one that brings what it needs back into the caches."""
        others = self.hooks.enter()
        self.step()
        start = clock()
        self.step()
        seconds = clock() - start
        self.hooks.leave(others)
        return seconds

    def counter(self, name: str) -> float:
        """A metric of the exporter without labels; 0 without one."""
        families = self.exporter.collect() if self.exporter is not None else ()
        return sum(float(family.values[0]) for family in families if family.spec.name == name)

    def close(self) -> None:
        """Ends the exporter, if there is one, where its hooks are."""
        with self.hooks.there():
            if self.exporter is not None:
                self.exporter.close()


def new_arm(parameters: int, taking_part: int) -> Arm:
    """Plain training of a new model."""
    model = Toy(parameters, taking_part)
    return Arm(model, torch.optim.SGD(model.taking_part, lr=1e-6, foreach=True), torch.randn(4 * taking_part))


def hooked(arm: Arm) -> Arm:
    """With hooks that do nothing: around the forward, at the output, at the end of the backward and around the step."""

    def nothing(*_: object) -> None:
        return

    def at_output(_gradient: object) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(nothing)

    def after_forward(_module: object, _args: object, _kwargs: object, output: torch.Tensor) -> None:
        output.register_hook(at_output)  # type: ignore[no-untyped-call]

    arm.model.register_forward_pre_hook(nothing, with_kwargs=True)
    arm.model.register_forward_hook(after_forward, with_kwargs=True)
    with arm.hooks.there():
        register_optimizer_step_pre_hook(nothing)
        register_optimizer_step_post_hook(nothing)
    return arm


def watched(arm: Arm) -> Arm:
    """With an exporter that has taken its first sample and takes one in 4,096 rounds from now on."""
    with arm.hooks.there():
        arm.exporter = start_exporter(arm.model, port=None, every=4096)
        for _ in range(6):
            arm.step()
    return arm


def followed(arm: Arm) -> Arm:
    """The same where no step is only counted, since the model has a hook of others."""

    def nothing(*_: object) -> None:
        return

    arm.model.register_forward_hook(nothing)
    watched(arm)
    with arm.hooks.there():
        for _ in range(SETTLED):
            arm.step()
    return arm


@dataclass(slots=True)
class Turns:
    """What one repeat saw.

    `seconds`: of a step by arm, one of each arm per turn. `counted`: what the exporter itself says that a step costs;
    `background`: processor time of all other threads, per second.
    """

    seconds: dict[str, list[float]]
    counted: float = 0.0
    background: float = 0.0

    def beyond(self, arm: str, other: str = "plain") -> list[float]:
        """What an arm's step took beyond that of another arm in the same turn."""
        return [one - less for one, less in zip(self.seconds[arm], self.seconds[other], strict=True)]


MAKERS: dict[str, Callable[[Arm], Arm]] = {
    "plain": lambda arm: arm,
    "control": lambda arm: arm,
    "no-op hooks": hooked,
    "exporter": watched,
    "followed": followed,
}


def repeat(parameters: int, taking_part: int, seconds: float, seed: int) -> Turns:
    """One repeat with new models."""
    torch.manual_seed(seed)
    chance = random.Random(seed)  # noqa: S311 - an order, no secret
    names = [name for name in MAKERS if name != "followed" or taking_part <= FOLLOWED_UP_TO]
    chance.shuffle(names)  # who is made first lies elsewhere in memory
    arms = {name: MAKERS[name](new_arm(parameters, taking_part)) for name in names}
    for arm in arms.values():
        for _ in range(3):
            arm.timed()
    turns = Turns({name: [] for name in arms})
    _run(arms, seconds, chance, turns)
    for arm in arms.values():
        arm.close()
    return turns


def _run(arms: dict[str, Arm], seconds: float, chance: random.Random, turns: Turns) -> None:
    """Blocks of turns until the time is up; those with a sample in them do not count."""
    exporter, end = arms["exporter"], time.monotonic() + seconds
    own = wall = other = 0.0
    while not turns.seconds["plain"] or time.monotonic() < end:
        samples, before = sum(arm.counter(SAMPLES) for arm in arms.values()), exporter.counter(OWN_SECONDS)
        others, start = time.process_time() - time.thread_time(), time.monotonic()
        block = _block(arms, chance)
        others, passed = time.process_time() - time.thread_time() - others, time.monotonic() - start
        if sum(arm.counter(SAMPLES) for arm in arms.values()) == samples:
            own, wall, other = own + exporter.counter(OWN_SECONDS) - before, wall + passed, other + others
            for name, values in block.items():
                turns.seconds[name] += values
    turns.counted, turns.background = own / (2 * len(turns.seconds["exporter"])), other / wall


def _block(arms: dict[str, Arm], chance: random.Random) -> dict[str, list[float]]:
    """Turns in which each arm has one step timed, in an order that changes."""
    block: dict[str, list[float]] = {name: [] for name in arms}
    names, end = list(arms), time.monotonic() + BLOCK_SECONDS
    while time.monotonic() < end:
        chance.shuffle(names)
        for name in names:
            block[name].append(arms[name].timed())
    return block


def measure(seconds: float) -> record.Table:
    """All cases, each for about this many seconds."""
    torch.set_num_threads(1)
    rows: list[list[record.Cell]] = []
    logging.getLogger("torch_grad_exporter").setLevel(logging.ERROR)  # that thousands of layers are folded is known
    for parameters, taking_part in CASES:
        repeats = [repeat(parameters, taking_part, seconds / REPEATS, seed) for seed in range(REPEATS)]
        rows.append([parameters, taking_part, *_cells(repeats)])
        print(rows[-1], flush=True)
    columns = (
        "parameters", "taking part", "plain step us", *(f"{arm} us" for arm in ARMS), "exporter, median us", "own count us",
        "background ms/s", "within the bar", "followed, beyond no-op hooks us",
    )  # fmt: skip
    return record.table("A step without a sample, by number of parameters", columns, rows, NOTES)


ARMS = ("control", "no-op hooks", "exporter")
NOTES = [
    "Microseconds beyond the plain step of the same turn: trimmed mean per repeat, then the mean of the repeats with new models.",
    "In brackets: what holds 95 % of resampled repeats.",
    "Where 2,000 and more parameters take part, the noise of so long a step is larger than the bar.",
    "Where six take part the step is short and all are tracked: work per parameter would show.",
    "No-op hooks: PyTorch's own price for being called at the same places. Own count: what the exporter says it took.",
    "Background: processor time of all other threads. It is not in the columns before, but in those of `benchmarks.scraped`.",
    f"Bar: {1e6 * BAR:.0f} us for the exporter, with its whole interval.",
    f"Followed: the exporter where a hook of others keeps it from only counting steps, after {SETTLED} of them.",
]


def _cells(repeats: list[Turns]) -> list[record.Cell]:
    cells: list[record.Cell] = [round(1e6 * fmean(trimmed_mean(turns.seconds["plain"]) for turns in repeats), 1)]
    low = high = 0.0
    for arm in ARMS:
        values = [1e6 * trimmed_mean(turns.beyond(arm)) for turns in repeats]
        low, high = interval(values, fmean)
        cells.append(f"{fmean(values):.1f} [{low:.1f}, {high:.1f}]")
    cells.append(round(1e6 * fmean(median(turns.beyond("exporter")) for turns in repeats), 1))
    cells.append(round(1e6 * fmean(turns.counted for turns in repeats), 1))
    cells.append(round(1e3 * fmean(turns.background for turns in repeats), 2))
    return [*cells, verdict(low, high, 1e6 * BAR), _followed(repeats)]


def _followed(repeats: list[Turns]) -> str:
    """What the exporter takes beyond PyTorch's own price for hooks, where it follows each step."""
    values = [1e6 * trimmed_mean(turns.beyond("followed", "no-op hooks")) for turns in repeats if "followed" in turns.seconds]
    if not values:
        return "not measured"
    low, high = interval(values, fmean)
    return f"{fmean(values):.1f} [{low:.1f}, {high:.1f}]"
