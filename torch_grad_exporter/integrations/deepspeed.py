"""What follows an engine of DeepSpeed that your own code has made; `engines.py` is what it shares with the other integrations.

See docs/deepspeed.md. Where one process trains in float32, without ZeRO or at its first stage, the parameters have the gradients
that they are trained with, and all is shown as in any loop. Elsewhere the engine averages them over ranks in tensors of its own,
keeps them in parts, or scales them. Then layers are absent, and the global norm is the engine's own. No collective is called.
"""

from __future__ import annotations

from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter.integrations.requirement import require
from torch_grad_exporter.integrations.session import Session, running_exporter

require("deepspeed", "0.16", extra="deepspeed")

from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402 - what is missing has been said by now
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402


def watch_engine(engine: DeepSpeedEngine, exporter: Exporter | None = None, *, log: bool | str = False, **options: Any) -> Exporter:
    """Shows the gradients and the course of an engine's training: `watch_engine(engine, port=9100)`, before the first backward.

    `exporter`: one that you have started yourself; without it one is started, with the `options` of `start_exporter`, and returned.
    An exporter that is running on the engine or its module is used as well. The loss is what `engine.backward` is given, the mean
    over the batches of a step. `log`: whether what the exporter shows also goes to the engine's monitor, on rank 0 and every
    `steps_per_print` steps: with `True` norms, clipping and skipped steps, or the names in which a regular expression is found.

    Raises `TypeError` where it is no engine, or a pipeline's, and `TypeError` or `ValueError` where another argument is wrong.
    Later failures are counted, in `torch_grad_exporter_errors_total{source="integration"}`.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"watch_engine({type(engine).__name__}): expected the engine that deepspeed.initialize returned")
    if isinstance(engine, PipelineEngine):
        raise TypeError("watch_engine(PipelineEngine): a pipeline's steps are not followed; pass another engine")
    found = exporter or running_exporter(engine) or running_exporter(engine.module)
    session = Session("watch_engine", found, None if found is not None and exporter is None else options, log=log)
    session.begin(engine)
    if session.engines is not None:
        session.engines.tell_losses()
        if log is not False:
            session.engines.log(session.logged)
    told = session.exporter or found
    assert told is not None  # noqa: S101 - it was found, or begun
    return told
