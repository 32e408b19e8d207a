"""Rules on memory, GPUs and the host, as `dashboards/prometheus/resources.alerts.yml` has them."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.container import CONTAINER_MEMORY_LIMIT, CONTAINER_MEMORY_WORKING_SET
from torch_grad_exporter.collectors.cuda_memory import (
    CUDA_ALLOC_RETRIES,
    CUDA_MEMORY_INACTIVE_SPLIT,
    CUDA_MEMORY_RESERVED,
    CUDA_MEMORY_TOTAL,
    CUDA_OOMS,
)
from torch_grad_exporter.collectors.gpu import GPU_ECC_ERRORS, GPU_THROTTLED, GPU_UTILIZATION
from torch_grad_exporter.collectors.host import HOST_MEMORY_AVAILABLE, HOST_MEMORY_TOTAL
from torch_grad_exporter.collectors.training import TRAIN_STATE
from torch_grad_exporter.rules.context import BUSY, GOING, THRESHOLDS, Finding, RuleContext, rule, times
from torch_grad_exporter.rules.memory import HOUR, MINUTES_5, MINUTES_10

USUAL = frozenset({"power", "sync_boost"})
"""`GpuThrottled`: reasons for which a GPU at work is held down day in, day out."""


@rule("CudaOutOfMemory", GOING | {"failed"})
def out_of_memory(context: RuleContext) -> Iterator[Finding]:
    """An allocation failed. Also in a run that failed: that is why."""
    for labels, ooms in context.lately(CUDA_OOMS, MINUTES_10).items():
        if ooms > 0:
            yield Finding("critical", f"Device {labels[0]}: {times(ooms, 'allocation')} failed {context.since(MINUTES_10)}.")


@rule("CudaMemoryNearLimit", GOING)
def near_limit(context: RuleContext) -> Iterator[Finding]:
    """Nearly all of a device's memory is reserved, and that was not enough."""
    for labels, retries in context.increase(CUDA_ALLOC_RETRIES, MINUTES_10).items():
        reserved, total = context.values.one(CUDA_MEMORY_RESERVED, *labels), context.values.one(CUDA_MEMORY_TOTAL, *labels)
        if retries > 0 and reserved is not None and total and reserved / total > THRESHOLDS["CudaMemoryNearLimit"]:
            yield Finding("warning", f"Device {labels[0]}: {reserved / total:.0%} of the memory is reserved.")


@rule("CudaAllocRetries", GOING)
def retries(context: RuleContext) -> Iterator[Finding]:
    """Allocations needed a second try."""
    for labels, more in context.increase(CUDA_ALLOC_RETRIES, MINUTES_10).items():
        if more > 0:
            yield Finding(
                "warning", f"Device {labels[0]}: {times(more, 'allocation')} needed a second try {context.within(MINUTES_10)}."
            )


@rule("CudaMemoryFragmented", GOING)
def fragmented(context: RuleContext) -> Iterator[Finding]:
    """Much of the reserved memory lies in unused parts of blocks."""
    for labels, split in context.values.rows(CUDA_MEMORY_INACTIVE_SPLIT):
        reserved = context.values.one(CUDA_MEMORY_RESERVED, *labels)
        if reserved and split / reserved > THRESHOLDS["CudaMemoryFragmented"]:
            yield Finding("info", f"Device {labels[0]}: {split / reserved:.0%} of the reserved memory is in rests of blocks.")


@rule("GpuThrottled", GOING)
def throttled(context: RuleContext) -> Iterator[Finding]:
    """A GPU's clocks are held down, for other reasons than usual."""
    for (device, _, reason), seconds in context.increase(GPU_THROTTLED, MINUTES_5).items():
        if reason not in USUAL and seconds / MINUTES_5 > THRESHOLDS["GpuThrottled"]:
            yield Finding("warning", f"GPU {device}: held down for {seconds / MINUTES_5:.0%} of the last 5 minutes ({reason}).")


@rule("GpuEccErrors", GOING)
def ecc_errors(context: RuleContext) -> Iterator[Finding]:
    """A GPU's memory had errors that were not corrected."""
    for (device, _, kind), errors in context.increase(GPU_ECC_ERRORS, HOUR).items():
        if kind == "uncorrected" and errors > 0:
            yield Finding("critical", f"GPU {device}: {times(errors, 'uncorrected memory error')} {context.within(HOUR)}.")


@rule("GpuUnderused", BUSY)
def underused(context: RuleContext) -> Iterator[Finding]:
    """A GPU is idle most of the time though the run trains. Only after five whole minutes: at the start every GPU is idle."""
    trained = context.highest(TRAIN_STATE, MINUTES_10).at((("training",),))
    if trained[0] != 1 or not context.remembers(GPU_UTILIZATION, MINUTES_5):
        return
    for (device, _), share in context.mean(GPU_UTILIZATION, MINUTES_5).items():
        if share < THRESHOLDS["GpuUnderused"]:
            yield Finding("info", f"GPU {device}: in use for {share:.0%} of the last 5 minutes.")


@rule("HostMemoryPressure", GOING)
def memory(context: RuleContext) -> Iterator[Finding]:
    """The container's memory is nearly full, or the host's where it has no limit."""
    limit, used, where = (
        context.values.one(CONTAINER_MEMORY_LIMIT),
        context.values.one(CONTAINER_MEMORY_WORKING_SET),
        "container",
    )
    if limit is None:
        limit, available = context.values.one(HOST_MEMORY_TOTAL), context.values.one(HOST_MEMORY_AVAILABLE)
        used, where = None if limit is None or available is None else limit - available, "host"
    if limit and used is not None and used / limit > THRESHOLDS["HostMemoryPressure"]:
        yield Finding("warning", f"{used / limit:.0%} of the {where}'s memory is in use.")


RULES = (out_of_memory, near_limit, retries, fragmented, throttled, ecc_errors, underused, memory)
