"""What every integration does with an exporter: starts one or uses the user's, reports what the trainer knows, and ends it."""

from __future__ import annotations

import inspect
import os
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeVar, TypeVarTuple

import torch

from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.config.option import resolve
from torch_grad_exporter.config.settings import Arguments
from torch_grad_exporter.errors import Guard, warn
from torch_grad_exporter.exporter import open_exporters
from torch_grad_exporter.integrations.common import RoundLosses, TrainingInterrupted, numbers_of
from torch_grad_exporter.integrations.engines import FollowedEngines, followed_engines, steps_of

# What a trainer's own logger gets with `log=True`: the norms, the clipping, and what went wrong.
LOGGED = r"^torch_(grad_global_norm|grad_norm/|grad_clip_coefficient|grad_nonfinite_steps_total|train_skipped_steps_total)"

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

Models = torch.nn.Module | Mapping[str, torch.nn.Module]


class _Reporter(NamedTuple):
    """The session that reports to an exporter, whether it started it, and the trainer that called it, if that is known."""

    session: weakref.ref[Session]
    started: bool
    trainer: weakref.ref[object] | None

    def active(self, trainer: object | None) -> Session | None:
        """Return the session, None if its training was interrupted: it or its trainer is gone, or another of this kind begins."""
        session = self.session()
        if session is None or self.trainer is None or trainer is None:
            return session
        before = self.trainer()
        same_kind = isinstance(trainer, type(before)) or isinstance(before, type(trainer))
        return None if before is None or (before is not trainer and same_kind) else session


# One for each exporter: two would count everything twice.
_REPORTERS: weakref.WeakKeyDictionary[Exporter, _Reporter] = weakref.WeakKeyDictionary()


class Session:
    """The exporter of a trainer, from one `fit` to the next, for messages of `who`; see `SessionOwner`. Of the training thread.

    It can be pickled, as trainers do with their callbacks; what is unpickled reports no training yet.
    """

    def __init__(
        self,
        who: str,
        exporter: Exporter | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        log: bool | str = False,
        log_values: bool = True,
    ) -> None:
        if exporter is not None and options:
            raise TypeError(
                f"{who}(exporter=..., {', '.join(f'{name}=...' for name in options)}): "
                "give an exporter or options of start_exporter, not both; pass the options to start_exporter"
            )
        if exporter is not None and not isinstance(exporter, Exporter):
            raise TypeError(f"{who}(exporter={exporter!r}): expected what start_exporter returned")
        if unknown := set(options or {}) - (set(inspect.signature(start_exporter).parameters) - {"model"}):
            raise TypeError(f"{who}({', '.join(sorted(unknown))}=...): not an option of start_exporter; docs/options.md lists them")
        if not isinstance(log, bool | str):
            raise TypeError(f"{who}(log={log!r}): expected True, False or a regular expression")
        try:
            re.compile(log if isinstance(log, str) else "")
        except re.error as error:
            raise ValueError(f"{who}(log={log!r}): not a regular expression: {error}") from None
        if not isinstance(log_values, bool):
            raise TypeError(f"{who}(log_values={log_values!r}): expected True or False")
        self._who, self._given, self._options = who, exporter, dict(options or {})
        self._log, self._log_values = LOGGED if log is True else log, log_values
        self._current: Exporter | None = None
        self._started = self._failed_before = False
        self._reports_losses: bool | None = None
        self.engines: FollowedEngines | None = None  # of DeepSpeed, that train the model

    @property
    def active(self) -> bool:
        """Whether this session reports a training that has begun and not ended."""
        return self._current is not None

    def reports(self, trainer: object) -> bool:
        """Return whether this session reports the training of this trainer, as where a callback was added to it twice."""
        reporter = None if self._current is None else _REPORTERS.get(self._current)
        return reporter is not None and reporter.trainer is not None and reporter.trainer() is trainer

    @property
    def exporter(self) -> Exporter | None:
        """The exporter of this training; before `begin` and after `end` the user's own, or None."""
        return self._current or self._given

    def check_options(self) -> None:
        """Raise `TypeError` or `ValueError` if the value of an option is wrong, whatever the model."""
        if self._given is None:
            resolve(self._options, os.environ)
            Arguments.checked(self._options)

    def begin(
        self, model: Models, *, step: int | None = None, trainer: object | None = None, knows_step: bool = True, **known: object
    ) -> None:
        """Begin to report a training of the model. Raises `TypeError` or `ValueError` if an option is wrong.

        An exporter that the user has started on the model is used. If another session reports to it already, as where a
        callback was added twice, this one does nothing. Some frameworks have no event for an exception: if another trainer of the
        same kind trained the model, or the other session is gone, that training was interrupted. The exporter that it started
        ends, and that of the user is taken over.

        Args:
            model: What is trained.
            step: The steps that were done before, as in a checkpoint.
            trainer: Whose training begins.
            knows_step: Whether the trainer knows its step, so that it has none before it where `step` is None.
            known: Options that the trainer knows, such as `optimizers`; the user's own win.
        """
        self.end()
        running = self._given or running_exporter(model)
        if running is not None and (reporter := _REPORTERS.get(running)) is not None:
            if (other := reporter.active(trainer)) is not None:
                warn("%s: %s reports to this exporter already; remove one of them", self._who, other._who)
                return
            running = self._take_over(running, reporter)
        self._started = running is None
        self._current = running or start_exporter(model, **{**known, **self._options})
        _REPORTERS[self._current] = _Reporter(weakref.ref(self), self._started, None if trainer is None else weakref.ref(trainer))
        self._reports_losses = None
        if self._started:
            self._options.setdefault("run", self._current.run)  # the next fit is the same training
        self.during(self._follow_engines, model, step is None)
        knows_step &= trainer is not None and self._started and self.engines is None
        if step is None and knows_step and self._current.settings.state_dir:
            step = 0
        if step is not None:
            self._current.resume(step)

    def _take_over(self, running: Exporter, reporter: _Reporter) -> Exporter | None:
        """Return the exporter of an interrupted training, if the user has started it; else end it and return None."""
        kept, other = self._given is running or not reporter.started, reporter.session()
        if other is not None:
            other._started = not kept
            other.end(TrainingInterrupted())
        elif not kept:
            running.end(TrainingInterrupted())
        return running if kept else None

    def _follow_engines(self, model: Models, number_steps: bool) -> None:
        """Follow DeepSpeed's engine if it trains the model: it knows what the parameters' gradients do not show."""
        engines = followed_engines(model if isinstance(model, torch.nn.Module) else model.values())
        if engines and self._current is not None:
            if number_steps and len(engines) == 1 and (done := steps_of(engines[0])):
                self._current.resume(done)
            self.engines = FollowedEngines(self._current, engines, number_steps=number_steps)
            self.engines.session = self

    def observe(self, **values: Number | None) -> None:
        """Report values of the step; those that are None are left out."""
        if self._current is not None:
            self._current.observe(**values)

    def logged_loss(self, loss: Number) -> None:
        """Report a loss that the trainer logs, unless the model returns its loss itself, as a scrape shows at the first loss."""
        if self._current is None:
            return
        if self._reports_losses is None:
            seen = self._current.values(r"^torch_train_loss(_nonfinite_total)?$")
            self._reports_losses = "torch_train_loss" not in seen and not seen.get("torch_train_loss_nonfinite_total")
        if self._reports_losses:
            self._current.observe(loss=loss)

    def log_values(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Show the numbers that the trainer logs, without those that `logged` has put there, unless the user wants none."""
        if self._current is not None and self._log_values:
            numbers = numbers_of(values)
            if numbers:
                self._current.log(numbers, step if isinstance(step, int) and step >= 0 else None)

    def backward_comes(self, loss: torch.Tensor) -> None:
        """Report that a backward begins; see `Exporter.backward_comes`."""
        if self._current is not None:
            self._current.backward_comes(loss)

    def evaluating(self, now: bool = True) -> None:
        """Report that an evaluation runs, or has ended; see `Exporter.evaluating`."""
        if self._current is not None:
            if now:  # no framework reports that a checkpoint is written
                self._current.checkpointing(False)
            self._current.evaluating(now)

    def checkpointing(self, now: bool = True) -> None:
        """Report that a checkpoint is being written, until the next step or evaluation; see `Exporter.checkpointing`."""
        if self._current is not None:
            self._current.checkpointing(now)

    def before_start(self, look: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result | None:
        """Return what an integration reads from its trainer before there is an exporter; None if that fails, which is logged."""
        return Guard(self._failed_before_start).result(look, *arguments)

    def _failed_before_start(self, error: Exception) -> None:
        if not self._failed_before:
            self._failed_before = True
            message = "%s: the trainer could not be read; the training begins without what it knows: %s: %s"
            warn(message, self._who, type(error).__name__, error, error=error)

    def during(self, action: Callable[[*_Arguments], object], *arguments: *_Arguments) -> None:
        """Run what an integration does at an event of an active training; a failure is counted and does not reach the training."""
        if self._current is not None:
            self._current.guarded(action, *arguments)

    @property
    def should_stop(self) -> bool:
        """Whether a `Stop()` asks the training to end."""
        return self._current is not None and self._current.should_stop

    def logged(self) -> dict[str, float]:
        """Return what the trainer's own logger gets now, empty if the user wants nothing."""
        return {} if self._log is False or self._current is None else self._current.values(self._log)

    def end(self, error: BaseException | None = None) -> None:
        """End the training, by this exception if there is one. An exporter that the user has started goes on."""
        exporter, self._current = self._current, None
        engines, self.engines = self.engines, None
        if exporter is not None:
            _REPORTERS.pop(exporter, None)
            exporter.checkpointing(False)
            if self._started:
                exporter.end(error)
            if engines is not None:
                exporter.guarded(engines.remove)


class SessionOwner:
    """A callback or hook of a framework, with the session by which it reports.

    In a `with` around the training an exception ends the run as failed, where the framework has no event for it. Failures in a
    training are counted, in `torch_grad_exporter_errors_total{source="integration"}`.
    """

    def __init__(
        self, exporter: Exporter | None = None, *, log: bool | str = False, log_values: bool = True, **options: object
    ) -> None:
        """Check the arguments; some are checked when a training begins.

        Args:
            exporter: One that you have started yourself, which goes on after the training. Without it each training starts one and
                ends it. An exporter that is running on the model is used as well.
            log: Whether the exporter's values are also logged by the framework: with `True` norms, clipping and skipped steps, or
                the names that match a regular expression.
            log_values: Whether what the framework logs is shown by the exporter, under its own names; see docs/your-metrics.md.
            options: Those of `start_exporter`.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: An argument is wrong.
        """
        super().__init__()
        self._session = Session(type(self).__name__, exporter, options, log=log, log_values=log_values)
        self._logs = log is not False
        self._losses = RoundLosses()

    @property
    def exporter(self) -> Exporter | None:
        """The exporter of the training, None while there is none."""
        return self._session.exporter

    @property
    def should_stop(self) -> bool:
        """Whether a `Stop()` asks the training to end, for a loop of your own; in a job after the same step on all ranks."""
        return self._session.should_stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._session.end(error)


def running_exporter(model: Models) -> Exporter | None:
    """Return the open exporter that watches this model, or one of these; None if there is none."""
    models = [model] if isinstance(model, torch.nn.Module) else [*model.values()]
    return next((exporter for exporter in open_exporters() if exporter.watches(models)), None)
