"""Pipeline schedules among the callers."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

from torch_grad_exporter.torch_compat.lost import gone


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline schedule. `divisor`: by what it divides gradients after its last backward, 1 for nothing; `None` if not known.

    `piecewise`: it may divide some gradients before the backwards of others, or write some without a backward.
    """

    divisor: int | None
    piecewise: bool


PIPELINES = "torch.distributed.pipelining.schedules"


def calling_pipeline(frame: types.FrameType | None) -> Pipeline | None:
    """Return the pipeline schedule among the callers, if any."""
    schedules = sys.modules.get(PIPELINES)
    while frame is not None and schedules is not None:
        if frame.f_globals is vars(schedules) and hasattr(schedule := frame.f_locals.get("self"), "_step_microbatches"):
            return _pipeline(schedules, schedule)
        frame = frame.f_back
    return None


def _pipeline(schedules: types.ModuleType, schedule: object) -> Pipeline:
    kinds = getattr(schedules, "PipelineScheduleSingle", ()), getattr(schedules, "_PipelineStageBase", None)
    single, divides = isinstance(schedule, kinds[0]), getattr(schedule, "scale_grads", None)
    if divides is None and not hasattr(kinds[1], "scale_grads"):
        divides = False  # before torch 2.6 no schedule divides
    chunks = getattr(schedule, "_n_microbatches", None)
    if divides is None or chunks is None or kinds[1] is None:
        gone("torch.distributed.pipelining.schedules._PipelineSchedule")
        return Pipeline(None, not single)
    return Pipeline(chunks if divides else 1, not single)
