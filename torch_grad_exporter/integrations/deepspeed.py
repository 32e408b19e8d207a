"""Follows an engine of DeepSpeed that your own code has made; `engines.py` has what other integrations need, too.

See docs/frameworks.md. If one process trains in float32, without ZeRO or at its first stage, the parameters have the gradients that
they are trained with, and all is shown as in any loop. Else the engine averages them over ranks in tensors of its own, keeps them
in parts, or scales them. Then layers are absent, and the global norm is the engine's own. No collective is called.
"""

from __future__ import annotations

from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter.integrations.common import RoundLosses, require
from torch_grad_exporter.integrations.session import Session, running_exporter

require("deepspeed", "0.16", extra="deepspeed")

from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402 - require() has raised if it is missing
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402


def watch_engine(engine: DeepSpeedEngine, exporter: Exporter | None = None, *, log: bool | str = False, **options: Any) -> Exporter:
    """Show the gradients and the course of an engine's training: `watch_engine(engine, port=9100)`, before the first backward.

    The loss is what `engine.backward` is given, the mean over the batches of a step. Later failures are counted, in
    `torch_grad_exporter_errors_total{source="integration"}`.

    Args:
        engine: What `deepspeed.initialize` returned.
        exporter: One that you have started yourself. Without it one is started, with the `options` of `start_exporter`. An
            exporter that is running on the engine or its module is used as well.
        log: Whether the exporter's values also go to the engine's monitor, on rank 0 and every `steps_per_print` steps: with
            `True` norms, clipping and skipped steps, or the names that match a regular expression.
        options: Those of `start_exporter`.

    Returns:
        The running exporter.

    Raises:
        TypeError: It is not an engine, or a pipeline's, or an option is of a wrong type.
        ValueError: An option is wrong.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"watch_engine({type(engine).__name__}): expected the engine that deepspeed.initialize returned")
    if isinstance(engine, PipelineEngine):
        raise TypeError("watch_engine(PipelineEngine): a pipeline's steps are not followed; pass another engine")
    running = exporter or running_exporter(engine) or running_exporter(engine.module)
    session = Session("watch_engine", running, None if running is not None and exporter is None else options, log=log)
    session.begin(engine)
    if session.engines is not None:
        session.engines.losses, session.engines.logs = RoundLosses(), log is not False
    result = session.exporter or running
    assert result is not None  # noqa: S101 - it was running, or begun
    return result
