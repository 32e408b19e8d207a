"""What follows an engine of DeepSpeed.

See docs/deepspeed.md. Where one process trains in float32, without ZeRO or at its first stage, the parameters have the gradients
that they are trained with, and all is shown as in any loop. Elsewhere the engine averages them over ranks in tensors of its own,
keeps them in parts, or scales them. Then layers are absent, and the global norm is the engine's own. No collective is called.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter.errors import say
from torch_grad_exporter.integrations.requirement import require
from torch_grad_exporter.integrations.round_losses import RoundLosses
from torch_grad_exporter.integrations.session import Session, running_exporter

require("deepspeed", "0.16", extra="deepspeed")

from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402 - what is missing has been said by now
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402

logger = logging.getLogger("torch_grad_exporter")


def watch_engine(engine: DeepSpeedEngine, exporter: Exporter | None = None, **options: Any) -> Exporter:
    """Shows the gradients and the course of an engine's training: `watch_engine(engine, port=9100)`, before the first backward.

    `exporter`: one that you have started yourself; without it one is started, with the `options` of `start_exporter`, and returned.
    An exporter that is running on the engine or its module is used as well. The loss is what `engine.backward` is given, the mean
    over the batches of a step.

    Raises `TypeError` where it is no engine, or a pipeline's, and `TypeError` or `ValueError` where another argument is wrong.
    Later failures are counted, in `torch_grad_exporter_errors_total{source="integration"}`.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"watch_engine({type(engine).__name__}): expected the engine that deepspeed.initialize returned")
    if isinstance(engine, PipelineEngine):
        raise TypeError("watch_engine(PipelineEngine): a pipeline's steps are not followed; pass another engine")
    found = exporter or running_exporter(engine) or running_exporter(engine.module)
    session = Session("watch_engine", found, None if found is not None and exporter is None else options)
    session.begin(engine, step=_steps(engine) or None)
    if session.telling and session.exporter is not None:
        session.exporter.adopt(_Watch(engine, session))
    told = session.exporter or found
    assert told is not None  # noqa: S101 - it was found, or begun
    return told


class _Watch:
    """Around the engine's `backward` and `step` until the end of the exporter."""

    def __init__(self, engine: DeepSpeedEngine, session: Session) -> None:
        self._engine = engine
        self._session = session
        self._losses = RoundLosses()
        self._elsewhere = _gradients_elsewhere(engine)
        self._reports = engine.zero_optimization_stage() > 0 or self._elsewhere
        if self._elsewhere and session.exporter is not None:
            session.exporter.gradients_elsewhere()
            say(
                logger, logging.INFO,
                "DeepSpeed keeps gradients elsewhere (ZeRO stage %d, %d ranks, %s): layers are not shown; the norm is the engine's",
                engine.zero_optimization_stage(), engine.dp_world_size,
                "reduced precision" if _reduced_precision(engine) else "float32",
            )  # fmt: skip
        self._backward, self._step = engine.backward, engine.step
        engine.backward = self._wrapped_backward()
        engine.step = self._wrapped_step()

    def _wrapped_backward(self) -> Any:
        @functools.wraps(self._backward)
        def backward(loss: Any, *arguments: Any, **named: Any) -> Any:
            self._session.during(self._losses.add, loss)
            return self._backward(loss, *arguments, **named)

        return backward

    def _wrapped_step(self) -> Any:
        @functools.wraps(self._step)
        def step(*arguments: Any, **named: Any) -> Any:
            before = self._engine.global_steps
            result = self._step(*arguments, **named)
            if self._engine.global_steps != before:
                self._session.during(self._stepped)
            return result

        return step

    def _stepped(self) -> None:
        """The engine was at the end of an accumulation, and has stepped or left its step out."""
        session, engine = self._session, self._engine
        session.observe(loss=self._losses.round_over())
        exporter = session.exporter
        if not self._reports or exporter is None:
            return
        if engine.was_step_applied():
            session.observe(grad_norm=engine.get_global_grad_norm())
            exporter.step(_steps(engine))
        elif self._elsewhere:
            exporter.step_skipped()

    def remove(self) -> None:
        """Gives the engine its own methods back."""
        for name in ("backward", "step"):
            self._engine.__dict__.pop(name, None)
        self._session.end()


def _steps(engine: DeepSpeedEngine) -> int:
    """Steps that the engine has taken; those that it has left out are not among them."""
    return int(engine.global_steps - engine.skipped_steps)


def _reduced_precision(engine: DeepSpeedEngine) -> bool:
    return bool(engine.fp16_enabled() or engine.bfloat16_enabled())


def _gradients_elsewhere(engine: DeepSpeedEngine) -> bool:
    """Whether what a parameter has as its gradient is not the one that it is trained with."""
    return bool(engine.zero_optimization_stage() > 1 or engine.dp_world_size > 1 or _reduced_precision(engine))
