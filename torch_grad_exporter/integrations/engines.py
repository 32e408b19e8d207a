"""Finds the engine of DeepSpeed that trains a model, and follows its steps.

See docs/frameworks.md. Trainers make engines themselves, as by `TrainingArguments(deepspeed=...)`; then what a parameter has as its
gradient may not be what it is trained with. DeepSpeed itself is not imported here: if nothing else has, there is no engine.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from torch_grad_exporter.errors import logger, say
from torch_grad_exporter.integrations.common import RoundLosses

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter
    from torch_grad_exporter.integrations.session import Session

# Steps from one write to the engine's monitor to the next if the engine's `steps_per_print` is None; its own default.
LOG_EVERY = 10


class FollowedEngines:
    """Wraps `backward` and `step` of engines until `remove`, which the end of the exporter calls, too.

    With engines of several models steps are counted and have no norm, which would be that of each in turn. A failure is counted,
    as `integration`, and the training goes on.

    Attributes:
        losses: Of what `backward` is given since the last step, to be reported; None if the model reports its loss.
        session: Reports this training: else nothing might refer to it, and it would seem to be interrupted.
        logs: Whether what the session logs is written to the engine's monitor, at its `steps_per_print`.

    `engines` train what the exporter watches. `number_steps`: whether the engine's own count numbers the steps.
    """

    def __init__(
        self,
        exporter: Exporter,
        engines: Iterable[Any],
        *,
        number_steps: bool,
        log: logging.Logger = logger,
    ) -> None:
        followed = [*engines]
        self._exporter = exporter
        self._engines = [weakref.ref(engine) for engine in followed]  # a training that is over is freed
        # An engine of an earlier training of the model may be kept alive by the parameters: it steps no more.
        self._one_model = len({id(engine.module) for engine in followed}) == 1
        self._numbers = number_steps and self._one_model
        # What a parameter has as its gradient is then not the one that it is trained with.
        facts = [
            (each.zero_optimization_stage(), each.dp_world_size, bool(each.fp16_enabled() or each.bfloat16_enabled()))
            for each in followed
        ]
        elsewhere = [(stage, ranks, reduced) for stage, ranks, reduced in facts if stage > 1 or ranks > 1 or reduced]
        self._elsewhere = bool(elsewhere)
        self.losses: RoundLosses | None = None
        self.session: Session | None = None
        self.logs = self._over = False
        if elsewhere:
            exporter.gradients_elsewhere()
            stage, ranks, reduced = elsewhere[0]
            message = (
                "DeepSpeed keeps gradients elsewhere (ZeRO stage %d, %d ranks, %s): layers are not shown; the norm is the engine's"
            )
            say(log, logging.INFO, message, stage, ranks, "reduced precision" if reduced else "float32")
        for engine in followed:
            engine.backward = self._around_backward(engine.backward)
            engine.step = self._around_step(engine, engine.step)
        exporter.adopt(self)

    def remove(self) -> None:
        """Give the engines their own methods back; idempotent. What others have wrapped since keeps working."""
        self._over, self.session = True, None
        for reference in self._engines:
            engine = reference()
            for name in () if engine is None else ("backward", "step"):
                wrapper: Any = engine.__dict__.get(name)
                if getattr(wrapper, "followed_by", None) is not self:
                    continue
                before = wrapper.__wrapped__
                if isinstance(before, types.MethodType) and before.__self__ is engine:
                    del engine.__dict__[name]
                else:
                    setattr(engine, name, before)
        self._engines = []

    def _around_backward(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self.losses is not None and not self._over:
                self._exporter.guarded(self.losses.add, next(iter((*arguments, *named.values())), None))
            return backward(*arguments, **named)

        wrapped.followed_by = self  # type: ignore[attr-defined]
        return wrapped

    def _around_step(self, engine: Any, step: Any) -> Any:
        @functools.wraps(step)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            before = engine.global_steps
            result = step(*arguments, **named)
            if engine.global_steps != before and not self._over:
                self._exporter.guarded(self._stepped, engine)
            return result

        wrapped.followed_by = self  # type: ignore[attr-defined]
        return wrapped

    def _stepped(self, engine: Any) -> None:
        """Report the end of an accumulation, at which the engine has stepped or skipped its step."""
        exporter = self._exporter
        if self.losses is not None and (loss := self.losses.round_over()) is not None:
            exporter.observe(loss=loss)
        if engine.zero_optimization_stage() > 0 or self._elsewhere:
            if engine.was_step_applied():
                norm = engine.get_global_grad_norm() if self._one_model else None
                if norm is not None:
                    exporter.observe(grad_norm=norm)
                exporter.step(steps_of(engine) if self._numbers else None)
            elif self._elsewhere:
                exporter.step_skipped()
        # To the engine's monitor, on the first rank at its logging steps, by the samples so far.
        writes = self.logs and engine.monitor.enabled and engine.global_rank == 0
        if writes and self.session is not None and engine.global_steps % (engine.steps_per_print() or LOG_EVERY) == 0:
            values = self.session.logged().items()
            engine.monitor.write_events([(name, value, engine.global_samples) for name, value in values])


def followed_engines(models: torch.nn.Module | Iterable[torch.nn.Module]) -> list[Any]:
    """Return the living engines of DeepSpeed that train one of these models: are one of them, or have a parameter of it.

    Looks at all objects of the process, which takes tens of milliseconds, only if something has imported DeepSpeed's engine.
    """
    kind = _class_of_engines()
    if kind is None:
        return []
    wanted = [models] if isinstance(models, torch.nn.Module) else [*models]
    if engines := [model for model in wanted if isinstance(model, kind)]:
        return engines
    parameters = {id(parameter) for model in wanted for parameter in model.parameters()}
    if len(_training_engines(kind, parameters)) > 1:
        gc.collect()  # one of them may be of an earlier training, which only the garbage collector frees
    return _training_engines(kind, parameters)


def living_engines(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return those of these modules that are engines of DeepSpeed with an optimizer."""
    kind = _class_of_engines()
    return [] if kind is None else [module for module in modules if issubclass(type(module), kind) and _trains(module)]


def steps_of(engine: Any) -> int:
    """Return the steps that the engine has taken, without those that it skipped."""
    return int(engine.global_steps - engine.skipped_steps)


def _class_of_engines() -> Any:
    return getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)


def _training_engines(kind: Any, parameters: set[int]) -> list[Any]:
    # By its type alone: to ask a proxy for its class may run code of others.
    engines = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return [each for each in engines if _trains(each) and not parameters.isdisjoint(map(id, each.parameters()))]


def _trains(engine: Any) -> bool:
    # Without an optimizer, as for a reference model that is held in parts, it only computes.
    return engine.__dict__.get("basic_optimizer") is not None
