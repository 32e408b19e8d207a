"""What every integration does with an exporter: starts one or takes the user's, tells it what the trainer knows, and ends it."""

from __future__ import annotations

import inspect
import logging
import os
import re
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar, TypeVarTuple

import torch

from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.config.option import resolve
from torch_grad_exporter.config.settings import Arguments
from torch_grad_exporter.errors import Guard, raised_by_handler, say
from torch_grad_exporter.exporter import open_exporters
from torch_grad_exporter.integrations.broke_off import TrainingBrokeOff
from torch_grad_exporter.integrations.engines import FollowedEngines, followed_engines, steps_of

logger = logging.getLogger("torch_grad_exporter")

LOGGED = r"^torch_(grad_global_norm|grad_norm/|grad_clip_coefficient|grad_nonfinite_steps_total|train_skipped_steps_total)"
"""What a trainer's own logger gets unless the user chooses: the norms, the clipping, and what went wrong."""

_Arguments = TypeVarTuple("_Arguments")
_Found = TypeVar("_Found")

Models = torch.nn.Module | Mapping[str, torch.nn.Module]


@dataclass(frozen=True, slots=True)
class _Teller:
    """Who tells an exporter of its training. `ends`: it has started it. `trainer`: the one that called it, if that is known."""

    session: weakref.ref[Session]
    ends: bool
    trainer: weakref.ref[object] | None

    def goes_on(self, trainer: object | None) -> Session | None:
        """The session, if its training may go on; `None` if it has broken off.

        It has if nothing has the session any more, or if another trainer of the same kind begins to train the model.
        """
        session = self.session()
        if session is None or self.trainer is None or trainer is None:
            return session
        before = self.trainer()
        if before is None or (before is not trainer and isinstance(trainer, type(before)) | isinstance(before, type(trainer))):
            return None
        return session


_TOLD_BY: weakref.WeakKeyDictionary[Exporter, _Teller] = weakref.WeakKeyDictionary()
"""Who tells an exporter of its training: two would count everything twice."""


class Session:
    """The exporter of a trainer, from one `fit` to the next. Not thread-safe: it belongs to the training thread.

    It can be pickled, as trainers do with their callbacks that start processes; what is unpickled tells of no training yet.

    `who`: the class that the user wrote, for messages. `exporter`: the user's own, which is told everything and is never ended
    here; else `options` go to `start_exporter`. `log`: what the trainer's own logger gets: nothing, what `LOGGED` says, or the
    names in which a regular expression is found.

    Raises `TypeError` where both `exporter` and `options` are given, or an option that there is not, and `ValueError` where `log`
    is no regular expression.
    """

    def __init__(
        self, who: str, exporter: Exporter | None = None, options: Mapping[str, Any] | None = None, *, log: bool | str = False
    ) -> None:
        if exporter is not None and options:
            raise TypeError(
                f"{who}(exporter=..., {', '.join(f'{name}=...' for name in options or {})}): "
                "give an exporter or options of start_exporter, not both; pass the options to start_exporter"
            )
        if exporter is not None and not isinstance(exporter, Exporter):
            raise TypeError(f"{who}(exporter={exporter!r}): expected what start_exporter returned")
        if unknown := set(options or {}) - (set(inspect.signature(start_exporter).parameters) - {"model"}):
            raise TypeError(f"{who}({', '.join(sorted(unknown))}=...): no option of start_exporter; docs/options.md lists them")
        _check_pattern(who, log)
        self._who = who
        self._given = exporter
        self._options = dict(options or {})
        self._log = LOGGED if log is True else log
        self._told: Exporter | None = None
        self._ends = False
        self._tells_losses: bool | None = None
        self._failed_before = False
        self.engines: FollowedEngines | None = None
        """The engines of DeepSpeed that train the model, where there are any."""

    @property
    def telling(self) -> bool:
        """Whether a training has begun, and not ended, of which this session tells."""
        return self._told is not None

    @property
    def exporter(self) -> Exporter | None:
        """The exporter that is told of this training; `None` before `begin` and after `end`, unless the user gave one."""
        return self._told or self._given

    def check_options(self) -> None:
        """Raises `TypeError` or `ValueError` where the value of an option is wrong by itself, whatever the model."""
        if self._given is None:
            resolve(self._options, os.environ)
            Arguments.checked(self._options)

    def begin(self, model: Models, *, step: int | None = None, trainer: object | None = None, **found: object) -> None:
        """The training of this model begins, or goes on after so many steps.

        `found`: options that the trainer knows, such as `optimizers` or `grad_scaler`; the user's own win. Where the user has
        started an exporter on the model, that one is told. What another session tells already, as where the same callback was
        added twice, this one leaves alone.

        `trainer`: whose training begins. Some tell nobody of an exception: where another one of its kind trained the model, or the
        session that told is gone, that training has broken off; what it had started ends, and what the user has started is told
        from here on.

        Raises what `start_exporter` raises where an option is wrong.
        """
        self.end()
        running = self._given or running_exporter(model)
        if running is not None and (teller := _TOLD_BY.get(running)) is not None:
            if (other := teller.goes_on(trainer)) is not None:
                say(logger, logging.WARNING, "%s: %s tells this exporter already; remove one of them", self._who, other._who)
                return
            running = self._take_over(running, teller)
        options: dict[str, Any] = {**found, **self._options}
        self._told = running or start_exporter(model, **options)
        self._ends = running is None
        _TOLD_BY[self._told] = _Teller(weakref.ref(self), self._ends, None if trainer is None else weakref.ref(trainer))
        self._tells_losses = None
        if self._ends:
            self._options.setdefault("run", self._told.run)  # the next fit is the same training
        self.during(self._follow_engines, model, step is None)
        if step is not None:
            self._told.resume(step)

    def _take_over(self, running: Exporter, teller: _Teller) -> Exporter | None:
        """The exporter of a training that has broken off, if the user has started it; `None` where it has ended by this."""
        kept, other = self._given is running or not teller.ends, teller.session()
        if other is not None:
            other._ends = not kept
            other.end(TrainingBrokeOff())
        elif not kept:
            running.end(TrainingBrokeOff())
        return running if kept else None

    def _follow_engines(self, model: Models, number_steps: bool) -> None:
        """Where DeepSpeed trains the model, by whichever way, its engine says what the parameters' gradients do not."""
        found = followed_engines(model if isinstance(model, torch.nn.Module) else model.values())
        if found and self._told is not None:
            if number_steps and len(found) == 1 and (done := steps_of(found[0])):
                self._told.resume(done)
            self.engines = FollowedEngines(self._told, found, number_steps=number_steps)
            self.engines.keep(self)

    def observe(self, **values: Number | None) -> None:
        """As `Exporter.observe`, without those that are `None`."""
        if self._told is not None:
            self._told.observe(**values)

    def logged_loss(self, loss: Number) -> None:
        """A loss that the trainer logs, such as a mean over many steps: it is told only where the exporter sees none itself.

        It does where the model returns a loss. One scrape finds it out, at the first of these that there is.
        """
        if self._told is None:
            return
        if self._tells_losses is None:
            seen = self._told.values(r"^torch_train_loss(_nonfinite_total)?$")
            self._tells_losses = "torch_train_loss" not in seen and not seen.get("torch_train_loss_nonfinite_total")
        if self._tells_losses:
            self._told.observe(loss=loss)

    def backward_comes(self, loss: torch.Tensor) -> None:
        """As `Exporter.backward_comes`."""
        if self._told is not None:
            self._told.backward_comes(loss)

    def evaluating(self, now: bool = True) -> None:
        """As `Exporter.evaluating`."""
        if self._told is not None:
            self._told.evaluating(now)

    def found(self, look: Callable[[*_Arguments], _Found], *arguments: *_Arguments) -> _Found | None:
        """What an integration finds in its trainer before there is an exporter; `None` where that fails, which is logged once."""
        return Guard(self._say_once).result(look, *arguments)

    def _say_once(self, error: Exception) -> None:
        if raised_by_handler(error):
            raise error
        if not self._failed_before:
            self._failed_before = True
            message = "%s: what the trainer knows could not be found; the training begins without it: %s: %s"
            say(logger, logging.WARNING, message, self._who, type(error).__name__, error, error=error)

    def during(self, action: Callable[[*_Arguments], object], *arguments: *_Arguments) -> None:
        """What an integration does at an event of the trainer, while a training is told of: if it fails, the training goes on.

        The failure is logged once and counted, in `torch_grad_exporter_errors_total{source="integration"}`.
        """
        if self._told is not None:
            self._told.guarded(action, *arguments)

    @property
    def should_stop(self) -> bool:
        """Whether a `Stop()` wants the training to end."""
        return self._told is not None and self._told.should_stop

    def logged(self) -> dict[str, float]:
        """What the trainer's own logger gets now; empty where the user wants none."""
        return {} if self._log is False or self._told is None else self._told.values(self._log)

    def end(self, error: BaseException | None = None) -> None:
        """The training has ended, by this exception if there is one. An exporter that the user has started goes on."""
        told, self._told = self._told, None
        engines, self.engines = self.engines, None
        if told is not None:
            _TOLD_BY.pop(told, None)
            if self._ends:
                told.end(error)
            if engines is not None:
                told.guarded(engines.remove)


class HasSession:
    """What is told of a training, by a session of its own."""

    _session: Session

    @property
    def exporter(self) -> Exporter | None:
        """The exporter of the training; `None` while there is none, unless it was given."""
        return self._session.exporter


class MayStop(HasSession):
    """The same in a loop of the user's, which ends itself."""

    @property
    def should_stop(self) -> bool:
        """Whether a `Stop()` wants the training to end, for the loop to look at; in a job after the same step on all ranks."""
        return self._session.should_stop


class EndsWith(HasSession):
    """The same of a trainer that tells nobody of an exception: a `with` around the training does."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self._session.end(error)


def _check_pattern(who: str, log: bool | str) -> None:
    """Raises what is wrong with what is to be logged."""
    if not isinstance(log, bool | str):
        raise TypeError(f"{who}(log={log!r}): expected True, False or a regular expression")
    try:
        re.compile(log if isinstance(log, str) else "")
    except re.error as error:
        raise ValueError(f"{who}(log={log!r}): no regular expression: {error}") from None


def running_exporter(model: Models) -> Exporter | None:
    """The open exporter that watches this model, or one of these; `None` if there is none."""
    models = [model] if isinstance(model, torch.nn.Module) else [*model.values()]
    return next((one for one in open_exporters() if one.watches(models)), None)
