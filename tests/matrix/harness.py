"""Regimes of training, and the ways in which one is run.

A regime is a function that takes a `Run`, builds a model, trains it for some steps, and reports every backward and step to the run.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import batch, sgd
from tests.support.record import Recorder, norm, wide
from tests.support.scrape import OFF, errors, value
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
    INSIDE = "with one that also inspects modules, and every round for the origin of non-finite values"


CUMULATIVE = (
    "torch_grad_captures_total", "torch_grad_norm_squared_accumulated_total", "torch_grad_norm_distribution",
    "torch_grad_global_norm_distribution", "torch_grad_norm_recent_max", "torch_grad_dead_ratio",
)  # fmt: skip
"""Metrics that depend on every sample so far, and so on those that were not seen."""

AFTER = ("torch_grad_clip_coefficient", "torch_grad_global_norm_after_clip")
"""What a step makes of the gradients."""

OF_THE_STEP = (*AFTER, "torch_grad_clipped_steps_total")
"""Metrics that are unknown where it cannot be seen what the optimizer uses: whether that was clipped is unknown as well."""

UNSEEN = ("torch_train_backward_passes_total", *OF_THE_STEP)
"""Metrics that are unknown where gradients are first read when the optimizer steps."""

EVERYTHING = {
    "every": 1, "dead_window": 3, "collectors": OFF,
    **dict.fromkeys(("moments", "weights", "optimizer_state", "attention", "routers", "local_norm"), True),
}  # fmt: skip

OPTIONS: dict[Way, dict[str, Any]] = {
    Way.DEFAULTS: {"collectors": OFF},
    Way.EVERYTHING: EVERYTHING,
    Way.CLIPPING: {"every": 1, "collectors": OFF, "clip": MaxNorm(1e30), "dry_run": [MaxNorm(0.1, scope="layer")]},
    Way.INSIDE: {"every": 1, "collectors": OFF, "activations": True, "layer_times": True, "nan_origin": "always"},
}


class LocalGradients:
    """What this rank's own backwards computed in a round, in float64: hooks on parameters run before a reduction over ranks."""

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self.over = False
        for parameter in [p for model in models.values() for p in model.parameters() if p.requires_grad]:
            parameter.register_hook(functools.partial(self._add, parameter))

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.over:
            self._sums, self.over = {}, False
        goes_on = parameter in self._sums and parameter.grad is not None and bool(wide(parameter.grad).any())
        self._sums[parameter] = wide(gradient) + (self._sums[parameter] if goes_on else 0.0)

    def norm(self) -> float:
        """Return the norm over all parameters."""
        return norm(self._sums.values())


@dataclass
class Run:
    """One run of a regime. `losses`, `state`: what must be the same in each way, to the last bit.

    `tolerant`: differences between scrape and record are collected in `wrong`, not raised. `compared`: the number of scrapes that
    were compared with the record. `skips`: the step of the round does not take place.
    `local`: the gradients of this rank under DDP; `local_norms`: the number of times that their norm was shown and compared.
    """

    way: Way
    tolerant: bool = False
    exporter: Exporter | None = None
    record: Recorder | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    skips: bool = False
    local: LocalGradients | None = None
    local_norms: int = 0

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
            replicated = any(
                isinstance(m, DistributedDataParallel) for m in (model.values() if isinstance(model, Mapping) else [model])
            )
            if self.way is Way.EVERYTHING and replicated:
                options = {"replicas": True, **options}
                self.local = None if isinstance(optimizers, Mapping) else LocalGradients({"": model})
            if self.way is not Way.PLAIN:
                target = model if watched is None else watched
                self.exporter = stack.enter_context(start_exporter(target, port=None, **{**OPTIONS[self.way], **options}))
            if self.way is Way.EVERYTHING:
                self.record = Recorder(model, optimizers, dead_window=3, moments=True)
            yield
        for module in model.values() if isinstance(model, Mapping) else [model]:
            self.state += [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
        self.state.append(torch.get_rng_state())

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
        if self.local is not None:
            self.local.over = True

    def step(self, optimizer: torch.optim.Optimizer, name: str = "") -> None:
        """Runs `optimizer.step()`. `name`: its name where there are several."""
        self.stepping(name)
        optimizer.step()

    def skipped(self, outcome: str = "skipped", name: str | None = None) -> None:
        """Reports that the step of the last backward does not take place, or only that of the optimizer `name`."""
        self.skips = True
        if self.record is not None:
            self.record.skipped(outcome, name)
        if self.local is not None:
            self.local.over = True

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
        model: MODELS,
        steps: int,
        optimizers: OPTIMIZERS | None = None,
        *,
        watched: MODELS | None = None,
        named: bool = False,
        clear: bool | Literal["after"] = True,
        set_to_none: bool = True,
        since: int = 0,
        **check: Iterable[str] | float,
    ) -> Iterator[int]:
        """Watches a loop, clears gradients before each of its rounds, and steps and checks after it. Yields the round's number.

        A round that the body reports as skipped, or in which it sets `skips`, has no step and no check.

        Args:
            model: What is trained and watched.
            steps: The number of rounds.
            optimizers: By default `sgd(model)`.
            watched: The argument of `start_exporter`, where that is not `model` itself.
            named: Whether the optimizers are given to the exporter by name.
            clear: Whether gradients are cleared, or that they are after the step.
            set_to_none: How they are cleared.
            since: The first round that is checked.
            check: The arguments of `check`.
        """
        if optimizers is None:
            assert isinstance(model, torch.nn.Module)
            optimizers = sgd(model)
        every = optimizers if isinstance(optimizers, Mapping) else {"": optimizers}
        with self.watching(model, optimizers, watched=watched, **({"optimizers": optimizers} if named else {})):
            for step in range(steps):
                if clear is True:
                    _clear(every, set_to_none)
                self.skips = False
                yield step
                if self.skips:
                    continue
                for name, optimizer in every.items():
                    self.step(optimizer, name)
                if clear == "after":
                    _clear(every, set_to_none)
                if step >= since:
                    self.check(**check)

    def train(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int = 2,
        data: Callable[[], torch.Tensor] = batch,
        *,
        of: torch.nn.Module | None = None,
        clip: float | None = None,
        factor: float = 1.0,
    ) -> None:
        """Some ordinary steps in a loop that is watched already, with a check after each. `of`: whose gradients are clipped."""
        for _ in range(steps):
            optimizer.zero_grad()
            self.backward(model(data()).square().mean() * factor)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_((of or model).parameters(), clip)
            self.step(optimizer)
            self.check()

    def check(self, *, without: Iterable[str] = (), optional: Iterable[str] = (), rel: float = 1e-5) -> None:
        """Compares the scrape with the record.

        Args:
            without: Prefixes of the metrics to leave out.
            optional: Prefixes of the metrics that may be absent, because they may be unknown.
            rel: The relative tolerance of norms.
        """
        if self.exporter is None or self.record is None:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # so that the samples have arrived
        self.compared += 1
        self._judge(self.record.differences(self.exporter, without=without, optional=optional, rel=rel))
        shown = value(self.exporter, "torch_grad_local_norm")
        if self.local is not None and shown is not None:
            self.local_norms += 1
            expected = self.local.norm() * self.record.unscale
            self._judge([] if shown == pytest.approx(expected, rel=rel) else [f"local norm: shown {shown}, expected {expected}"])

    def shows(self, expected: object, name: str, **labels: str) -> None:
        """Compares one series with a given value, None if it must be absent."""
        if self.exporter is None or self.way is not Way.EVERYTHING:
            return
        self.compared += 1
        shown = value(self.exporter, name, **labels)
        self._judge([] if shown == expected else [f"{name}{labels}: shown {shown}, expected {expected}"])

    def _judge(self, wrong: list[str]) -> None:
        self.wrong += wrong
        assert self.tolerant or not wrong, "\n".join(wrong)


def _clear(optimizers: Mapping[str, torch.optim.Optimizer], set_to_none: bool) -> None:
    for optimizer in optimizers.values():
        optimizer.zero_grad(set_to_none=set_to_none)


@dataclass(frozen=True)
class Regime:
    """A kind of training loop."""

    body: Callable[..., None]
    options: Mapping[str, Any]

    def run(self, way: Way, *, tolerant: bool = False, failing: Collection[str] = ()) -> Run:
        """Runs it with a fixed seed. `failing`: the sources of the failures that must have been counted at the end."""
        torch.manual_seed(0)
        run = Run(way, tolerant=tolerant)
        self.body(run, **self.options)
        if run.exporter is not None:
            assert {*errors(run.exporter)} == {*failing}
        assert run.compared > 0 or way is not Way.EVERYTHING
        return run


REGIMES: dict[str, Regime] = {}


def regime(
    table: dict[str, Regime] = REGIMES, /, **variants: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a function into a table, once for each value of the only keyword argument in `variants`, if any."""

    def enter(body: Callable[..., None]) -> Callable[..., None]:
        cases = [{name: option} for name, many in variants.items() for option in many] or [{}]
        for case in cases:
            suffix = "".join(f"[{name}={_short(option)}]" for name, option in case.items())
            assert body.__name__ + suffix not in table
            table[body.__name__ + suffix] = Regime(body, case)
        return body

    return enter


def _short(value: object) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
