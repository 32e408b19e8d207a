"""Rules on memory, GPUs and the host, as `dashboards/prometheus/resources.alerts.yml` has them."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.rules.look import BUSY, GOING, THRESHOLDS, Found, Look, rule, times
from torch_grad_exporter.rules.memory import HOUR, MINUTES_5, MINUTES_10

USUAL = frozenset({"power", "sync_boost"})
"""`GpuThrottled`: reasons for which a GPU at work is held down day in, day out."""


@rule("CudaOutOfMemory", GOING | {"failed"})
def out_of_memory(look: Look) -> Iterator[Found]:
    """An allocation failed. Also in a run that failed: that is why."""
    for labels, ooms in look.lately(c.CUDA_OOMS, MINUTES_10).items():
        if ooms > 0:
            yield Found("critical", f"Device {labels[0]}: {times(ooms, 'allocation')} failed {look.since(MINUTES_10)}.")


@rule("CudaMemoryNearLimit", GOING)
def near_limit(look: Look) -> Iterator[Found]:
    """Nearly all of a device's memory is reserved, and that was not enough."""
    for labels, retries in look.increase(c.CUDA_ALLOC_RETRIES, MINUTES_10).items():
        reserved, total = look.values.one(c.CUDA_MEMORY_RESERVED, *labels), look.values.one(c.CUDA_MEMORY_TOTAL, *labels)
        if retries > 0 and reserved is not None and total and reserved / total > THRESHOLDS["CudaMemoryNearLimit"]:
            yield Found("warning", f"Device {labels[0]}: {reserved / total:.0%} of the memory is reserved.")


@rule("CudaAllocRetries", GOING)
def retries(look: Look) -> Iterator[Found]:
    """Allocations needed a second try."""
    for labels, more in look.increase(c.CUDA_ALLOC_RETRIES, MINUTES_10).items():
        if more > 0:
            yield Found(
                "warning", f"Device {labels[0]}: {times(more, 'allocation')} needed a second try {look.within(MINUTES_10)}."
            )


@rule("CudaMemoryFragmented", GOING)
def fragmented(look: Look) -> Iterator[Found]:
    """Much of the reserved memory lies in rests of blocks."""
    for labels, split in look.values.rows(c.CUDA_MEMORY_INACTIVE_SPLIT):
        reserved = look.values.one(c.CUDA_MEMORY_RESERVED, *labels)
        if reserved and split / reserved > THRESHOLDS["CudaMemoryFragmented"]:
            yield Found("info", f"Device {labels[0]}: {split / reserved:.0%} of the reserved memory is in rests of blocks.")


@rule("GpuThrottled", GOING)
def throttled(look: Look) -> Iterator[Found]:
    """A GPU's clocks are held down, for other reasons than usual."""
    for (device, _, reason), seconds in look.increase(c.GPU_THROTTLED, MINUTES_5).items():
        if reason not in USUAL and seconds / MINUTES_5 > THRESHOLDS["GpuThrottled"]:
            yield Found("warning", f"GPU {device}: held down for {seconds / MINUTES_5:.0%} of the last 5 minutes ({reason}).")


@rule("GpuEccErrors", GOING)
def ecc_errors(look: Look) -> Iterator[Found]:
    """A GPU's memory had errors that nobody corrected."""
    for (device, _, kind), errors in look.increase(c.GPU_ECC_ERRORS, HOUR).items():
        if kind == "uncorrected" and errors > 0:
            yield Found("critical", f"GPU {device}: {times(errors, 'uncorrected memory error')} {look.within(HOUR)}.")


@rule("GpuUnderused", BUSY)
def underused(look: Look) -> Iterator[Found]:
    """A GPU is idle most of the time though the run trains. Told only of five whole minutes: at the start every GPU is idle."""
    trained = look.highest(c.TRAIN_STATE, MINUTES_10).at((("training",),))
    if trained[0] != 1 or not look.remembers(c.GPU_UTILIZATION, MINUTES_5):
        return
    for (device, _), share in look.mean(c.GPU_UTILIZATION, MINUTES_5).items():
        if share < THRESHOLDS["GpuUnderused"]:
            yield Found("info", f"GPU {device}: in use for {share:.0%} of the last 5 minutes.")


@rule("HostMemoryPressure", GOING)
def memory(look: Look) -> Iterator[Found]:
    """The container's memory is nearly full, or the host's where it has no limit."""
    limit, used, where = look.values.one(c.CONTAINER_MEMORY_LIMIT), look.values.one(c.CONTAINER_MEMORY_WORKING_SET), "container"
    if limit is None:
        limit, available = look.values.one(c.HOST_MEMORY_TOTAL), look.values.one(c.HOST_MEMORY_AVAILABLE)
        used, where = None if limit is None or available is None else limit - available, "host"
    if limit and used is not None and used / limit > THRESHOLDS["HostMemoryPressure"]:
        yield Found("warning", f"{used / limit:.0%} of the {where}'s memory is in use.")


RULES = (out_of_memory, near_limit, retries, fragmented, throttled, ecc_errors, underused, memory)
