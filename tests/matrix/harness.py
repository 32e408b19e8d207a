"""What a regime of training is here, and the ways in which one is run.

A regime is a function that takes a `Run`, builds a model and trains it for some steps, telling the run of every backward and
every step. It is run without an exporter, with one at its defaults, with one that samples every round beside a `Recorder`,
and with one whose capture was moved to a naive place, to see that its checks would notice.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.record import Recorder
from tests.support.scrape import errors, value
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import MaxNorm

MODELS = torch.nn.Module | Mapping[str, torch.nn.Module]
OPTIMIZERS = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


class Way(enum.Enum):
    """How a regime is run."""

    PLAIN = "without an exporter"
    DEFAULTS = "with an exporter at its defaults"
    EVERYTHING = "with an exporter that measures all it can in every round"
    CLIPPING = "with one that also clips to a limit which leaves every bit as it is"
    INSIDE = "with one that also looks inside of the models"
    ORIGIN = "with one that looks in every round for the place where a value became non-finite"


class Naive(enum.Flag):
    """Where a naive monitor reads gradients; the checks of a regime notice the one or the other."""

    ACCUMULATE = enum.auto()
    """In post-accumulate-grad hooks that are registered once, at the start."""
    STEP = enum.auto()
    """In a pre-hook of the optimizer's step."""


CUMULATIVE = (
    "torch_grad_captures_total", "torch_grad_norm_squared_accumulated_total", "torch_grad_norm_distribution",
    "torch_grad_global_norm_distribution", "torch_grad_norm_recent_max", "torch_grad_dead_ratio",
)  # fmt: skip
"""What depends on every sample so far, and so on those that a rung of the ladder missed before it was left."""

NO_MATTER_OF_READING = ("torch_train_", "torch_grad_clip", "torch_grad_global_norm_after_clip")
"""What naive captures cannot know, since they see no backward or see gradients once only."""


def of_reading(wrong: Iterable[str]) -> list[str]:
    """Those differences that tell a naive capture."""
    return [line for line in wrong if not line.startswith(NO_MATTER_OF_READING)]


UNSEEN = ("torch_train_backward_passes_total", "torch_grad_clip_coefficient", "torch_grad_global_norm_after_clip")
"""What cannot be known on the rung `optimizer`, where gradients are first read when the optimizer steps."""

OTHERS = dict.fromkeys(("process", "host", "container", "gpu", "cuda_memory"), False)
"""Collectors that say nothing of gradients. On a busy machine they may not answer within a second, which counts as a failure."""

EVERYTHING = {"every": 1, "moments": True, "weights": True, "dead_window": 3, "collectors": OTHERS}

CLIPPING = {"every": 1, "collectors": OTHERS, "clip": MaxNorm(1e30), "dry_run": [MaxNorm(0.1, scope="layer")]}

INSIDE = {"every": 1, "collectors": OTHERS, "activations": True, "layer_times": True}
ORIGIN = {"every": 1, "collectors": OTHERS, "nan_origin": "always"}


@dataclass
class Run:
    """One run of a regime. `losses`, `state`: what must be the same in each way, to the last bit.

    `tolerant`: differences between scrape and record are collected, not raised. `naive`: they are, until there is one that a
    naive capture has made: then it has been noticed, and the rest of the run is not compared.
    """

    way: Way
    tolerant: bool = False
    naive: bool = False
    exporter: Exporter | None = None
    record: Recorder | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(
        self, model: MODELS, optimizers: OPTIMIZERS, /, *, watched: MODELS | None = None, **options: object
    ) -> Iterator[None]:
        """The exporter over the loop. `watched`: what it is started with, where that is not `model` itself.

        `options` go to `start_exporter`. What the models hold in the end is kept.
        """
        with contextlib.ExitStack() as stack:
            if self.way is not Way.PLAIN:
                ways = {
                    Way.DEFAULTS: {"collectors": OTHERS},
                    Way.EVERYTHING: EVERYTHING,
                    Way.CLIPPING: CLIPPING,
                    Way.INSIDE: INSIDE,
                    Way.ORIGIN: ORIGIN,
                }
                chosen = ways[self.way]
                target = model if watched is None else watched
                self.exporter = stack.enter_context(start_exporter(target, port=None, **{**chosen, **options}))
            if self.way is Way.EVERYTHING:
                self.record = Recorder(model, optimizers, dead_window=3, moments=True)
            yield
        for one in model.values() if isinstance(model, Mapping) else [model]:
            self.state += [t.detach().clone() for t in (*one.parameters(), *one.buffers())]

    def uses(self, optimizers: OPTIMIZERS) -> None:
        """These optimizers step from now on, those of a known name in the place of the one before."""
        if self.record is not None:
            self.record.use(optimizers)

    def backward(self, loss: torch.Tensor, *, unused: Iterable[str] = (), **options: bool) -> None:
        """`loss.backward(**options)`. `unused`: full names of the parameters that it does not reach."""
        self.losses.append(loss.detach().clone())
        loss.backward(**options)
        self.passed(unused=unused)

    def passed(self, *, unused: Iterable[str] = ()) -> None:
        """A backward that the regime ran itself is over, and its gradients are there."""
        if self.record is not None:
            self.record.passed(unused=unused)

    def stepping(self, name: str = "") -> None:
        """An optimizer is about to step, and its gradients are as it will see them."""
        if self.record is not None:
            self.record.stepping(name)

    def step(self, optimizer: torch.optim.Optimizer, name: str = "") -> None:
        """`optimizer.step()`. `name`: its name where there are several."""
        self.stepping(name)
        optimizer.step()

    def skipped(self, outcome: str = "skipped", name: str | None = None) -> None:
        """The step of the last backward does not take place, or only that of the optimizer `name`."""
        if self.record is not None:
            self.record.skipped(outcome, name)

    def unscale(self, factor: float) -> None:
        """What the gradients of the next backwards are to be multiplied with to be unscaled."""
        if self.record is not None:
            self.record.unscale = factor

    def check(self, *, without: Iterable[str] = (), optional: Iterable[str] = (), rel: float = 1e-5) -> None:
        """Compares the scrape with the record.

        `without`, `optional`: beginnings of the names of metrics that are left out, or may be absent where they cannot be known.
        """
        if self.exporter is None or self.record is None or self._noticed():
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # so that the samples have arrived
        if self.tolerant:
            self.wrong += self.record.differences(self.exporter, without=without, optional=optional, rel=rel)
        else:
            self.record.check(self.exporter, without=without, optional=optional, rel=rel)

    def shows(self, expected: object, name: str, **labels: str) -> None:
        """One series that is compared with a given value, `None` if it is to be absent."""
        if self.exporter is None or self.way is not Way.EVERYTHING or self._noticed():
            return
        shown = value(self.exporter, name, **labels)
        if self.tolerant:
            self.wrong += [] if shown == expected else [f"{name}{labels}: shown {shown}, expected {expected}"]
        else:
            assert shown == expected, f"{name}{labels}"

    def _noticed(self) -> bool:
        return self.naive and bool(of_reading(self.wrong))


@dataclass(frozen=True)
class Regime:
    """A kind of training loop. `catches`: the naive captures that its checks notice."""

    body: Callable[..., None]
    options: Mapping[str, Any]
    catches: Naive

    def run(self, way: Way, *, tolerant: bool = False, naive: bool = False, failing: Collection[str] = ()) -> Run:
        """Runs it, seeded. `failing`: the sources of failures that there have to be where nothing else is checked."""
        torch.manual_seed(0)
        run = Run(way, tolerant=tolerant or naive, naive=naive)
        self.body(run, **self.options)
        if run.exporter is not None and run.record is None:  # else each check has looked for failures, too
            assert {*errors(run.exporter)} == {*failing}
        return run


REGIMES: dict[str, Regime] = {}
NOTHING = Naive(0)
Catches = Naive | Mapping[Any, Naive]


def regime(catches: Catches = NOTHING, **variants: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a function into `REGIMES`, once for each value of the one keyword argument in `variants`, if any.

    `catches`: the naive captures that its checks notice; by value of that argument where they differ.
    """
    return enter_into(REGIMES, catches, variants)


def enter_into(
    table: dict[str, Regime], catches: Catches, variants: Mapping[str, Iterable[Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `regime`, into any table."""

    def enter(body: Callable[..., None]) -> Callable[..., None]:
        cases = [{name: one} for name, many in variants.items() for one in many] or [{}]
        for case in cases:
            noticed = catches if isinstance(catches, Naive) else catches.get(next(iter(case.values())), NOTHING)
            suffix = "".join(f"[{name}={_short(one)}]" for name, one in case.items())
            assert body.__name__ + suffix not in table
            table[body.__name__ + suffix] = Regime(body, case, noticed)
        return body

    return enter


def _short(value: object) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
