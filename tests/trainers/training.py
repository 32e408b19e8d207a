"""One training by a package's own trainer, run without an exporter, with one, and compared."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.matrix.harness import EVERYTHING, Way
from tests.support.scrape import OFF, errors_in, value, values
from tests.trainers.heard import Heard
from torch_grad_exporter import Exporter, start_exporter

QUICK: dict[str, Any] = {"port": None, "every": 1, "collectors": OFF}
"""Options of an exporter that looks at each step, and at no machine."""

AMPLE = {"overhead_budget": 0.2}
"""For a training of a second at the default schedule: on a busy machine the usual budget allows for its first samples only."""

CLIPPING = "torch_grad_clip_coefficient", "torch_grad_clipped_steps_total"
"""What has a comparison of its own."""


def spent(exporter: Exporter, cause: str) -> float:
    """Return the seconds that a cause has taken so far."""
    return value(exporter, "torch_train_time_seconds_total", cause=cause) or 0.0


MOST = 12
"""Differences of a scrape that are printed."""


class Broken(RuntimeError):
    """What a training fails with."""


@dataclass
class Training:
    """One run. `told`: numbers that the trainer itself logs; they and the state must be the same with an exporter.

    `between`: the steps after which a scrape is compared, and once in the end. `gauges`: only norms are compared, with
    those of the step that they are said to be of; else all that a `Recorder` knows.
    """

    way: Way
    between: int = 1
    gauges: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rel: float = 1e-5
    by_limit: bool = True
    exporter: Exporter | None = None
    callback: Any = None
    heard: Heard | None = None
    told: list[Any] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    samples: set[float] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    failed: bool = False

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module, **options: object) -> Iterator[None]:
        """The exporter over whatever trains the model; what it holds in the end is kept."""
        with contextlib.ExitStack() as stack:
            if self.way is not Way.PLAIN:
                chosen: dict[str, Any] = EVERYTHING if self.way is Way.EVERYTHING else {"collectors": OFF}
                self.exporter = stack.enter_context(start_exporter(model, port=None, **{**chosen, **self.options, **options}))
                self.heard = Heard(model, between=self._check_between, dead_window=3, moments=self.way is Way.EVERYTHING)
                stack.enter_context(self.heard.hearing())
            yield
        self.state += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
        self.check()

    @contextlib.contextmanager
    def called_back(self, model: torch.nn.Module, callback: Callable[..., Any], **options: object) -> Iterator[list[Any]]:
        """A callback that starts the exporter when the trainer says so, to be given to the trainer; none without an exporter."""
        with contextlib.ExitStack() as stack:
            if self.way is not Way.PLAIN:
                chosen: dict[str, Any] = EVERYTHING if self.way is Way.EVERYTHING else {"collectors": OFF}
                self.callback = callback(port=None, **{**chosen, **self.options, **options})
                self.heard = Heard(model, between=self._check_between, dead_window=3, moments=self.way is Way.EVERYTHING)
                stack.enter_context(self.heard.hearing())
            yield [] if self.callback is None else [self.callback]
        self.state += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
        self.check()

    def keep(self) -> None:
        """Keeps the exporter that the callback has by now."""
        if self.callback is not None:
            self.exporter = self.callback.exporter

    def loader(self, loader: Any) -> Any:
        """The loader, watched where there is an exporter."""
        return loader if self.exporter is None else self.exporter.watch_loader(loader)

    def _check_between(self) -> None:
        self.keep()  # there is none any more when the training is over
        # Which optimizers there are is known when the second round begins: until then the first is not settled.
        most = 0 if self.heard is None else max(map(len, self.heard.steps.values()), default=0)
        if self.between and most > 1 and most % self.between == 0:
            self.check()

    def check(self) -> None:
        """Compares a scrape with what was heard."""
        if self.exporter is None or self.heard is None or not self.heard.steps or self.failed:
            return
        after = max(len(steps) for steps in self.heard.steps.values())
        scrape = values(self.exporter)
        if not self.gauges:
            without = (*self.without, *CLIPPING)
            found = self.heard.differences(self.exporter, without=without, optional=self.optional, rel=self.rel)
            found += self.heard.wrong_clipping(scrape, by_limit=self.by_limit)
        else:
            self.samples |= {value for one, value in scrape.items() if one[0] == "torch_grad_sample_step"}
            found = self.heard.wrong_norms(scrape, self.rel)
            found += [f"errors: {failures}"] if (failures := errors_in(scrape)) else []
        self.failed = bool(found)
        self.wrong += [f"after {after} steps: {line}" for line in found[:MOST]]
        self.wrong += [f"and {len(found) - MOST} more"] if len(found) > MOST else []


def compared(
    train: Callable[[Training], None],
    way: Way = Way.EVERYTHING,
    *,
    without: Iterable[str] = (),
    optional: Iterable[str] = (),
    rel: float = 1e-5,
    by_limit: bool = True,
    between: int = 1,
    gauges: bool = False,
    **options: object,
) -> Training:
    """Trains without an exporter and with one, and compares; returns the second run.

    `without`, `optional`, `rel`: as of `Recorder.check`. At defaults only norms are compared, with those of their step.
    `by_limit`: gradients are clipped by their global norm, if at all. `options` go to `start_exporter`.
    """
    plain = _run(train, Training(Way.PLAIN))
    assert plain.state
    gauges |= way is Way.DEFAULTS
    run = _run(train, Training(way, between, gauges, dict(options), tuple(without), tuple(optional), rel, by_limit))
    assert not run.wrong, "\n" + "\n".join(run.wrong)
    assert run.heard is not None
    assert run.heard.steps, "no step was heard"
    assert repr(run.told) == repr(plain.told)
    for position, (a, b) in enumerate(zip(run.state, plain.state, strict=True)):
        assert torch.equal(a, b), f"tensor {position} of the state"
    return run


def _run(train: Callable[[Training], None], run: Training) -> Training:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what the trainers draw from
    train(run)
    return run


def ending_of(exporter: Exporter, folder: Path) -> tuple[str, str | None]:
    """How an exporter's run has ended: its state, and the exception's name, both as they are saved."""
    exporter.save(folder / "saved.json")
    status = json.loads((folder / "saved.json").read_text())["status"]
    assert value(exporter, "torch_train_state", state=status["state"]) == 1
    return status["state"], status["ended_by"]


def reset_accelerate() -> None:
    """Forget the state that Accelerate keeps for the process."""
    from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415 - the other trainers do without

    AcceleratorState._reset_state(reset_partial_state=True)  # private: Accelerate has no public way
    GradientState._reset_state()  # private: as above
