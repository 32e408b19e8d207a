"""Rules on memory, GPUs and the host."""

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
from torch_grad_exporter.rules.context import BUSY, GOING, HOUR, MINUTES_5, MINUTES_10, THRESHOLDS, RuleContext, times
from torch_grad_exporter.rules.declaration import Alert, Finding, Group, rule

USUAL = frozenset({"power", "sync_boost"})
"""`GpuThrottled`: reasons that are normal for a GPU under full load."""


@rule(
    "CudaOutOfMemory",
    GOING | {"failed"},
    Alert(
        "critical",
        """
        max by (run, rank, device) (
          increase(torch_cuda_ooms_total[10m]) > 0
          or
          torch_cuda_ooms_total > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
        )
        and on (run, rank) torch_train_state{state!="finished"} == 1
        """,
        summary="Rank {{ $labels.rank }} of run {{ $labels.run }} is out of memory on {{ $labels.device }}.",
        description=("An allocation failed in the last 10 minutes. Unless the program caught the error, the process has ended."),
    ),
    needs=(CUDA_OOMS,),
    first_steps=(
        "Read the message in the log, which names the size that failed, and look for other processes with nvidia-smi. "
        "Restart with a smaller batch or with checkpointed activations."
    ),
    why=(
        "One is enough. In the first 600 s of a process its whole count matters: failures are most likely at the "
        "first step, and `increase` does not show what came before the first scrape."
    ),
    note=(
        "Where the error ends the process, Prometheus learns of it only if it sees the end: with `linger=` or "
        "`textfile_dir=`. So the alert also fires in the state `failed`."
    ),
)
def out_of_memory(context: RuleContext) -> Iterator[Finding]:
    """An allocation failed. Also in a run that failed: that is why."""
    for labels, ooms in context.lately(CUDA_OOMS, MINUTES_10).items():
        if ooms > 0:
            yield Finding(
                "critical", f"Device {labels[0]}: {times(ooms, 'allocation')} failed {context.since(MINUTES_10)}.", value=ooms
            )


@rule(
    "CudaMemoryNearLimit",
    GOING,
    Alert(
        "warning",
        """
        max by (run, rank, device) (
          torch_cuda_memory_reserved_bytes / (torch_cuda_memory_total_bytes > 0) > 0.95
          and increase(torch_cuda_alloc_retries_total[10m]) > 0
        )
        and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary="The memory of {{ $labels.device }} on rank {{ $labels.rank }} of run {{ $labels.run }} is nearly used up.",
        description="PyTorch holds {{ $value | humanizePercentage }} of it and had to release cached memory to go on.",
    ),
    needs=(CUDA_MEMORY_RESERVED,),
    first_steps=(
        "If torch_cuda_memory_allocated_bytes rises from step to step, the program keeps tensors. Otherwise reduce "
        "the batch, or checkpoint activations, before an allocation fails."
    ),
    why=(
        "The allocator keeps memory that it once had, so 95 % alone are normal; memory is short only if there are retries as well."
    ),
)
def near_limit(context: RuleContext) -> Iterator[Finding]:
    """Nearly all of a device's memory is reserved, and that was not enough."""
    for labels, retries in context.increase(CUDA_ALLOC_RETRIES, MINUTES_10).items():
        reserved, total = context.values.one(CUDA_MEMORY_RESERVED, *labels), context.values.one(CUDA_MEMORY_TOTAL, *labels)
        if retries > 0 and reserved is not None and total and reserved / total > THRESHOLDS["CudaMemoryNearLimit"]:
            yield Finding(
                "warning", f"Device {labels[0]}: {reserved / total:.0%} of the memory is reserved.", value=reserved / total
            )


@rule(
    "CudaAllocRetries",
    GOING,
    Alert(
        "warning",
        """
        max by (run, rank, device) (increase(torch_cuda_alloc_retries_total[10m])) > 0
        and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary=(
            "Allocations on {{ $labels.device }} of rank {{ $labels.rank }} of run {{ $labels.run }} succeed only at the "
            "second try."
        ),
        description=(
            "PyTorch's allocator had to return its cached memory to the driver in the last 10 minutes. Each time "
            "the training waits; an out-of-memory error may be next."
        ),
    ),
    needs=(CUDA_ALLOC_RETRIES,),
    first_steps=(
        "With varying sizes, try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or pad to a few sizes; otherwise "
        "reduce the batch. Some retries at the first steps do no harm."
    ),
    why="Each retry waits for the device and releases all cached memory; torchtitan warns at the first.",
)
def retries(context: RuleContext) -> Iterator[Finding]:
    """Allocations needed a second attempt."""
    for labels, more in context.increase(CUDA_ALLOC_RETRIES, MINUTES_10).items():
        if more > 0:
            yield Finding(
                "warning",
                f"Device {labels[0]}: {times(more, 'allocation')} needed a second attempt {context.within(MINUTES_10)}.",
                value=more,
            )


@rule(
    "CudaMemoryFragmented",
    GOING,
    Alert(
        "info",
        """
        max by (run, rank, device) (torch_cuda_memory_inactive_split_bytes / (torch_cuda_memory_reserved_bytes > 0)) > 0.3
        and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        """,
        for_="15m",
        summary="The memory of {{ $labels.device }} on rank {{ $labels.rank }} of run {{ $labels.run }} is fragmented.",
        description=(
            "{{ $value | humanizePercentage }} of the memory that PyTorch holds lies in free parts of blocks that "
            "are partly in use."
        ),
    ),
    needs=(CUDA_MEMORY_INACTIVE_SPLIT,),
    first_steps="Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or pad to a few sizes.",
    why=("With a third of the memory in free parts of blocks, large tensors find no place long before the memory is full."),
)
def fragmented(context: RuleContext) -> Iterator[Finding]:
    """Much of the reserved memory lies in unused parts of blocks."""
    for labels, split in context.values.rows(CUDA_MEMORY_INACTIVE_SPLIT):
        reserved = context.values.one(CUDA_MEMORY_RESERVED, *labels)
        if reserved and split / reserved > THRESHOLDS["CudaMemoryFragmented"]:
            yield Finding(
                "info",
                f"Device {labels[0]}: {split / reserved:.0%} of the reserved memory is in free parts of blocks.",
                value=split / reserved,
            )


@rule(
    "GpuThrottled",
    GOING,
    Alert(
        "warning",
        """
        max by (run, rank, device, uuid, reason) (rate(torch_gpu_throttled_seconds_total{reason!~"power|sync_boost"}[5m])) > 0.1
        and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        """,
        for_="10m",
        summary=("{{ $labels.device }} of rank {{ $labels.rank }} of run {{ $labels.run }} is throttled ({{ $labels.reason }})."),
        description=(
            "The driver has throttled GPU {{ $labels.uuid }} for {{ $value | humanizePercentage }} of the time. In "
            "a synchronous job all ranks wait for it."
        ),
    ),
    needs=(GPU_THROTTLED,),
    first_steps=(
        "Compare its temperature and clocks with those of other GPUs of the host: all warm means the host or the room, one "
        "warm means the card."
    ),
    why=("A tenth of the time. `power` and `sync_boost` do not count: they are normal for a GPU under full load."),
)
def throttled(context: RuleContext) -> Iterator[Finding]:
    """A GPU is throttled, for other reasons than usual."""
    for (device, _, reason), seconds in context.increase(GPU_THROTTLED, MINUTES_5).items():
        if reason not in USUAL and seconds / MINUTES_5 > THRESHOLDS["GpuThrottled"]:
            yield Finding(
                "warning",
                f"GPU {device}: throttled for {seconds / MINUTES_5:.0%} of the last 5 minutes ({reason}).",
                value=seconds / MINUTES_5,
            )


@rule(
    "GpuEccErrors",
    GOING,
    Alert(
        "critical",
        """
        max by (run, rank, device, uuid) (increase(torch_gpu_ecc_errors_total{kind="uncorrected"}[1h])) > 0
        and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary=(
            "The memory of {{ $labels.device }} on rank {{ $labels.rank }} of run {{ $labels.run }} has errors that cannot "
            "be corrected."
        ),
        description=("GPU {{ $labels.uuid }} has had uncorrected memory errors in the last hour. Results since then may be wrong."),
    ),
    needs=(GPU_ECC_ERRORS,),
    first_steps=(
        "Take the run off this GPU and go back to a checkpoint from before the errors. If errors come back after a "
        "reset, replace the card."
    ),
    why="Uncorrected errors mean wrong numbers. 1h: the alert stays visible while the run goes on.",
)
def ecc_errors(context: RuleContext) -> Iterator[Finding]:
    """A GPU's memory had errors that were not corrected."""
    for (device, _, kind), errors in context.increase(GPU_ECC_ERRORS, HOUR).items():
        if kind == "uncorrected" and errors > 0:
            yield Finding(
                "critical", f"GPU {device}: {times(errors, 'uncorrected memory error')} {context.within(HOUR)}.", value=errors
            )


@rule(
    "GpuUnderused",
    BUSY,
    Alert(
        "info",
        """
        max by (run, rank, device, uuid) (avg_over_time(torch_gpu_utilization_ratio[5m])) < 0.5
        and on (run, rank) torch_train_state{state=~"training|evaluating"} == 1
        and on (run, rank) max_over_time(torch_train_state{state="training"}[10m]) == 1
        """,
        for_="15m",
        summary="{{ $labels.device }} of rank {{ $labels.rank }} of run {{ $labels.run }} is idle most of the time.",
        description=(
            "GPU {{ $labels.uuid }} has been busy for {{ $value | humanizePercentage }} of the last 5 minutes, "
            "although the run is training."
        ),
    ),
    needs=(GPU_UTILIZATION,),
    takes_seconds=MINUTES_5,
    first_steps=(
        "Check where the time of a step goes; more DataLoader workers, larger batches and torch.compile are the usual remedies."
    ),
    why=(
        "For 15m: evaluations and checkpoints do not take that long. 10m: the run must have trained in the last 10 "
        "minutes, since a longer evaluation may leave the GPU idle."
    ),
    note="MIG devices report no utilisation, so it cannot fire for them.",
)
def underused(context: RuleContext) -> Iterator[Finding]:
    """A GPU is idle most of the time though the run trains. Only after five whole minutes: at the start every GPU is idle."""
    trained = context.highest(TRAIN_STATE, MINUTES_10).at((("training",),))
    if trained[0] != 1 or not context.remembers(GPU_UTILIZATION, MINUTES_5):
        return
    for (device, _), share in context.mean(GPU_UTILIZATION, MINUTES_5).items():
        if share < THRESHOLDS["GpuUnderused"]:
            yield Finding("info", f"GPU {device}: in use for {share:.0%} of the last 5 minutes.", value=share)


@rule(
    "HostMemoryPressure",
    GOING,
    Alert(
        "warning",
        """
        max by (run, host) (
          (
            torch_container_memory_working_set_bytes / (torch_container_memory_limit_bytes > 0)
            or
            1 - torch_host_memory_available_bytes / (torch_host_memory_total_bytes > 0)
            unless torch_container_memory_limit_bytes
          )
          * on (run, rank, job, instance) group_left (host)
          max by (run, rank, job, instance, host) (torch_train_info)
          and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        ) > 0.9
        """,
        for_="5m",
        summary="Host {{ $labels.host }} of run {{ $labels.run }} is running out of memory.",
        description=(
            "{{ $value | humanizePercentage }} of the memory of the container, or of the host where there is no "
            "limit, is in use. At 100 % the kernel kills processes."
        ),
    ),
    needs=(CONTAINER_MEMORY_LIMIT, HOST_MEMORY_TOTAL),
    first_steps=(
        "Compare process_resident_memory_bytes and torch_process_children_memory_bytes over the last hours. If "
        "memory is nearly gone, write a checkpoint now; if the workers grow, use fewer of them."
    ),
    why=("The kernel kills processes at 100 %. Workers that start, or a checkpoint that is copied, fill the last tenth."),
    note=(
        "Fires once per host or container, however many ranks run there. It judges by the container's limit where "
        "there is one, else by the host's memory."
    ),
)
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
        yield Finding("warning", f"{used / limit:.0%} of the {where}'s memory is in use.", value=used / limit)


RULES = (out_of_memory, near_limit, retries, fragmented, throttled, ecc_errors, underused, memory)

GROUP = Group(
    "resources",
    "torch_grad_exporter_resource_alerts",
    "Alerts on memory, GPUs and hosts.",
    (
        (
            "Scrape with `honor_labels: true`. docs/runbook.md says what each alert means and what to do. Alerts "
            "carry `run` and, depending on what they are about, `rank` and `device`, or `host`; never `job` or "
            "`instance`, so that a process that two jobs scrape pages once."
        ),
        (
            '`and on (run, rank) torch_train_state{state!~"finished|failed"} == 1` restricts an alert to ranks that '
            "go on. Where torch_train_state is not stored (metric_relabel_configs), no alert of this file fires. "
            "Metrics that the device or its driver does not report are absent, and the alerts on them cannot fire: "
            "torch_cuda_* before the program has used a device, torch_gpu_* without NVML or nvidia-ml-py."
        ),
    ),
    RULES,
)
