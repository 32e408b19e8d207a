"""What a regime of training is here, and the ways in which one is run.

A regime is a function that takes a `Run`, builds a model and trains it for some steps, and reports every backward and every step
to the run. It runs without an exporter, with one at its defaults, with one that samples every round beside a `Recorder`, and with
a naive monitor instead of an exporter, to see that its checks notice wrong norms.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.matrix.naive import Naive, NaiveMonitor
from tests.support.models import sgd
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


CUMULATIVE = (
    "torch_grad_captures_total", "torch_grad_norm_squared_accumulated_total", "torch_grad_norm_distribution",
    "torch_grad_global_norm_distribution", "torch_grad_norm_recent_max", "torch_grad_dead_ratio",
)  # fmt: skip
"""What depends on every sample so far, and so on those that a rung of the ladder missed before it was left."""

UNSEEN = ("torch_train_backward_passes_total", "torch_grad_clip_coefficient", "torch_grad_global_norm_after_clip")
"""What cannot be known on the rung `optimizer`, where gradients are first read when the optimizer steps."""

OTHERS = dict.fromkeys(("process", "host", "container", "gpu", "cuda_memory"), False)
"""Collectors that say nothing of gradients. On a busy machine they may not answer within a second, which counts as a failure."""

EVERYTHING = {"every": 1, "moments": True, "weights": True, "dead_window": 3, "collectors": OTHERS}

CLIPPING = {"every": 1, "collectors": OTHERS, "clip": MaxNorm(1e30), "dry_run": [MaxNorm(0.1, scope="layer")]}

INSIDE = {"every": 1, "collectors": OTHERS, "activations": True, "layer_times": True}
ORIGIN = {"every": 1, "collectors": OTHERS, "nan_origin": "always"}


OPTIONS = {
    Way.DEFAULTS: {"collectors": OTHERS},
    Way.EVERYTHING: EVERYTHING,
    Way.CLIPPING: CLIPPING,
    Way.INSIDE: INSIDE,
    Way.ORIGIN: ORIGIN,
}
NORMS = ("torch_grad_norm", "torch_grad_shard_norm")


@dataclass
class Run:
    """One run of a regime. `losses`, `state`: what must be the same in each way, to the last bit.

    `tolerant`: differences between scrape and record are collected, not raised. `naive`: a naive monitor runs instead of an
    exporter, and its norms are compared until one is wrong.
    """

    way: Way
    tolerant: bool = False
    naive: Naive | None = None
    exporter: Exporter | None = None
    record: Recorder | None = None
    monitor: NaiveMonitor | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(
        self, model: MODELS, optimizers: OPTIMIZERS, /, *, watched: MODELS | None = None, **options: object
    ) -> Iterator[None]:
        """Watches the loop in the run's way, and keeps the state of the models at its end.

        Args:
            model: One model, or models by name.
            optimizers: One optimizer, or optimizers by name.
            watched: The argument of `start_exporter`, where that is not `model` itself.
            options: Further options of `start_exporter`.
        """
        with contextlib.ExitStack() as stack:
            if self.way is not Way.PLAIN:
                target = model if watched is None else watched
                self.exporter = stack.enter_context(start_exporter(target, port=None, **{**OPTIONS[self.way], **options}))
            if self.way is Way.EVERYTHING or self.naive is not None:
                self.record = Recorder(model, optimizers, dead_window=3, moments=True)
            if self.naive is not None:
                self.monitor = NaiveMonitor(self.record.models, self.naive)
                stack.enter_context(self.monitor.attached())
            yield
        for module in model.values() if isinstance(model, Mapping) else [model]:
            self.state += [t.detach().clone() for t in (*module.parameters(), *module.buffers())]

    def uses(self, optimizers: OPTIMIZERS) -> None:
        """Reports that these optimizers step from now on, and replace those of the same name."""
        if self.record is not None:
            self.record.use(optimizers)

    def backward(self, loss: torch.Tensor, *, unused: Iterable[str] = (), **options: bool) -> None:
        """Runs `loss.backward(**options)`. `unused`: full names of the parameters that it does not reach."""
        self.losses.append(loss.detach().clone())
        loss.backward(**options)
        self.passed(unused=unused)

    def passed(self, *, unused: Iterable[str] = ()) -> None:
        """Reports the end of a backward that the regime ran itself."""
        if self.record is not None:
            self.record.passed(unused=unused)

    def stepping(self, name: str = "") -> None:
        """Reports that an optimizer is about to step, with the gradients as it will see them."""
        if self.record is not None:
            self.record.stepping(name)

    def step(self, optimizer: torch.optim.Optimizer, name: str = "") -> None:
        """Runs `optimizer.step()`. `name`: its name where there are several."""
        self.stepping(name)
        optimizer.step()

    def skipped(self, outcome: str = "skipped", name: str | None = None) -> None:
        """Reports that the step of the last backward does not take place, or only that of the optimizer `name`."""
        if self.record is not None:
            self.record.skipped(outcome, name)

    def unscale(self, factor: float) -> None:
        """Reports the factor that unscales the gradients of the next backwards."""
        if self.record is not None:
            self.record.unscale = factor

    def observe(self, **observed: object) -> None:
        """Calls `exporter.observe`, if there is an exporter."""
        if self.exporter is not None:
            self.exporter.observe(**observed)

    def stepped(self, *number: int) -> None:
        """Calls `exporter.step`, if there is an exporter."""
        if self.exporter is not None:
            self.exporter.step(*number)

    def rounds(
        self,
        model: torch.nn.Module,
        steps: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clear: bool = True,
        set_to_none: bool = True,
        since: int = 0,
        **check: Iterable[str] | float,
    ) -> Iterator[int]:
        """Watches a loop, clears gradients before each of its rounds, and steps and checks after it. Yields the round's number.

        Args:
            model: The model that is trained and watched.
            steps: The number of rounds.
            optimizer: By default `sgd(model)`.
            clear: Whether gradients are cleared.
            set_to_none: How they are cleared.
            since: The first round that is checked.
            check: The arguments of `check`.
        """
        optimizer = optimizer or sgd(model)
        with self.watching(model, optimizer):
            for step in range(steps):
                if clear:
                    optimizer.zero_grad(set_to_none=set_to_none)
                yield step
                self.step(optimizer)
                if step >= since:
                    self.check(**check)

    def check(self, *, without: Iterable[str] = (), optional: Iterable[str] = (), rel: float = 1e-5) -> None:
        """Compares the scrape with the record, or the norms of the naive monitor.

        Args:
            without: Prefixes of the metrics to leave out.
            optional: Prefixes of the metrics that may be absent, because they may be unknown.
            rel: The relative tolerance of norms.
        """
        if self.monitor is not None:
            if not self.wrong and not "torch_grad_norm".startswith((*without,)):
                self._compare_norms(optional=(*optional,), rel=rel)
            return
        if self.exporter is None or self.record is None:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # so that the samples have arrived
        if self.tolerant:
            self.wrong += self.record.differences(self.exporter, without=without, optional=optional, rel=rel)
        else:
            self.record.check(self.exporter, without=without, optional=optional, rel=rel)

    def _compare_norms(self, *, optional: tuple[str, ...], rel: float) -> None:
        shown = self.monitor.norms()
        recorded = {dict(labels)["layer"]: norm for (name, labels), norm in self.record.expected().items() if name in NORMS}
        if "torch_grad_norm".startswith(optional):
            recorded = {layer: norm for layer, norm in recorded.items() if layer in shown}
        if shown != pytest.approx(recorded, rel=rel, abs=1e-12, nan_ok=True):
            self.wrong.append(f"torch_grad_norm: shown {shown}, recorded {recorded}")

    def shows(self, expected: object, name: str, **labels: str) -> None:
        """Compares one series with a given value, None if it must be absent."""
        if self.monitor is not None:
            shown = self.monitor.norms().get(labels["layer"]) if name == "torch_grad_norm" else expected
        elif self.exporter is None or self.way is not Way.EVERYTHING:
            return
        else:
            shown = value(self.exporter, name, **labels)
        if self.tolerant:
            self.wrong += [] if shown == expected else [f"{name}{labels}: shown {shown}, expected {expected}"]
        else:
            assert shown == expected, f"{name}{labels}"


@dataclass(frozen=True)
class Regime:
    """A kind of training loop. `catches`: the naive monitors whose norms are wrong in it."""

    body: Callable[..., None]
    options: Mapping[str, Any]
    catches: Naive

    def run(self, way: Way, *, tolerant: bool = False, naive: Naive | None = None, failing: Collection[str] = ()) -> Run:
        """Runs it with a fixed seed. `failing`: the sources of the failures that must have been counted at the end."""
        torch.manual_seed(0)
        run = Run(way, tolerant=tolerant or naive is not None, naive=naive)
        self.body(run, **self.options)
        if run.exporter is not None:
            assert {*errors(run.exporter)} == {*failing}
        return run


REGIMES: dict[str, Regime] = {}
NOTHING = Naive(0)
Catches = Naive | Mapping[Any, Naive]


def regime(catches: Catches = NOTHING, **variants: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a function into `REGIMES`, once for each value of the only keyword argument in `variants`, if any.

    `catches`: the naive monitors whose norms are wrong in it, by the value of that argument where they differ.
    """
    return enter_into(REGIMES, catches, variants)


def enter_into(
    table: dict[str, Regime], catches: Catches, variants: Mapping[str, Iterable[Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Does the same as `regime` for any table."""

    def enter(body: Callable[..., None]) -> Callable[..., None]:
        cases = [{name: option} for name, many in variants.items() for option in many] or [{}]
        for case in cases:
            wrong = catches if isinstance(catches, Naive) else catches.get(next(iter(case.values())), NOTHING)
            suffix = "".join(f"[{name}={_short(option)}]" for name, option in case.items())
            assert body.__name__ + suffix not in table
            table[body.__name__ + suffix] = Regime(body, case, wrong)
        return body

    return enter


def _short(value: object) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
