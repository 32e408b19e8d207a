"""The dashboard "Resources": memory of devices, GPUs, processes, hosts and containers."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import panels as draw
from dashboards.generate.board import Row, board
from dashboards.generate.panels import Panel, Query
from dashboards.generate.queries import by_host, counted, ever, in_order, of_rank, rate, with_host, with_rank_name
from dashboards.generate.tables import Column, rows

UID = "torch-grad-resources"
THROTTLED = {0: ("Full speed", "green"), 1: ("Held back at times", "yellow"), 2: ("Throttled", "orange")}
NO_CUDA = "No CUDA device is in use"
NO_GPU = "No GPU that NVML knows, or the extra `gpu` is not installed"
DEVICE = "{{host}} rank {{rank}} {{device}}"
ROW = "{{host}} {{rank_name}} {{device}}"
RANK = "{{run}} rank {{rank}}"


def _cuda(name: str) -> str:
    return of_rank(f"torch_cuda_memory_{name}_bytes")


def _devices() -> Panel:
    share = f"({_cuda('reserved')} / {_cuda('total')})"
    columns = [
        Column("run", "Run"), Column("host", "Host"), Column("rank", "Rank", width=70), Column("device", "Device", width=80),
        Column("Value #A", "Reserved", "percentunit", full=1, orange=0.95, width=150),
        Column("Value #B", "Allocated", "bytes", width=100), Column("Value #C", "Most allocated", "bytes", width=120),
        Column("Value #D", "Most reserved", "bytes", width=120), Column("Value #E", "Of", "bytes", width=100),
    ]  # fmt: skip
    fields = ("allocated", "peak_allocated", "peak_reserved", "total")
    queries = [Query(with_host(expression)) for expression in (share, *map(_cuda, fields))]
    text = "Memory of each device by PyTorch's allocator, the fullest first. The cache is what is reserved and not allocated."
    return rows("Devices", text, queries, columns, nothing=NO_CUDA, order=["Run", "-Reserved", "Host", "Rank"])


def _allocator() -> Panel:
    text = (
        "Share of the device's memory that tensors occupy, without the allocator's cache. If it grows from step to "
        "step, the program keeps tensors alive, often by adding up a loss with its graph."
    )
    panel = draw.lines(
        "Memory that tensors occupy", text, "percentunit",
        Query(with_host(f"({_cuda('allocated')} / {_cuda('total')})"), DEVICE), nothing=NO_CUDA, many=True,
    )  # fmt: skip
    return panel.min(0).max(1)


def _reserved() -> Panel:
    panel = draw.lines(
        "Memory that the allocator holds", (
            "Share of the device's memory that is reserved. Near 1, the next large tensor makes the allocator flush "
            "its cache, which stalls the device."
        ), "percentunit",
        Query(with_host(f"({_cuda('reserved')} / {_cuda('total')})"), DEVICE), nothing=NO_CUDA, many=True,
    )  # fmt: skip
    return draw.limit(panel.min(0).max(1), 0.95)


def _fragmentation() -> Panel:
    text = (
        "Share of the reserved memory in free parts of blocks that are partly in use, and the share that rounding "
        "up adds to the requested sizes. Above 0.3, expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF helps."
    )
    split = f"({_cuda('inactive_split')} / ({_cuda('reserved')} > 0))"
    rounding = f"(1 - {_cuda('requested')} / ({_cuda('allocated')} > 0))"
    panel = draw.lines(
        "Fragmentation", text, "percentunit",
        Query(with_host(split), f"{DEVICE} split"), Query(with_host(rounding), f"{DEVICE} rounding"), nothing=NO_CUDA, many=True,
    )  # fmt: skip
    return draw.limit(panel.min(0).axis_soft_max(0.4), 0.3)


def _waiting_for_streams() -> Panel:
    waiting = f"({_cuda('active')} - {_cuda('allocated')})"
    text = "Freed memory that waits until another stream is done with it: the cost of record_stream, as under FSDP."
    return draw.lines(
        "Memory waiting for streams", text, "bytes", Query(with_host(waiting), DEVICE), nothing=NO_CUDA, many=True
    ).min(0)


def _retries() -> Panel:
    text = (
        "Allocations in each interval that only succeeded after a flush of the cache, as bars, and those that failed, as red "
        "points. Investigate any of them."
    )
    panel = draw.lines(
        "Allocation retries and out of memory", text, "short",
        Query(with_host(counted(of_rank("torch_cuda_alloc_retries_total"))), f"{DEVICE} retries"),
        Query(f"{with_host(counted(of_rank('torch_cuda_ooms_total')))} > 0", f"{DEVICE} out of memory"),
        nothing=NO_CUDA, many=True,
    )  # fmt: skip
    point = {"custom.drawStyle": "points", "custom.pointSize": 12, "color": {"mode": "fixed", "fixedColor": "red"}}
    return draw.bars(panel).override_by_query("B", [draw.setting(name, value) for name, value in point.items()])


def _gpu(title: str, text: str, unit: str, name: str) -> Panel:
    query = Query(with_host(of_rank(name)), DEVICE)
    return draw.lines(title, text, unit, query, nothing=NO_GPU, many=True).min(0)


def _gpu_memory() -> Panel:
    text = "Memory used on the whole GPU: by PyTorch, CUDA, NCCL and other programs. Dashed: all that the largest device has."
    panel = draw.lines(
        "Memory used by all processes", text, "bytes",
        Query(with_host(of_rank("torch_gpu_memory_used_bytes")), DEVICE), Query(f"max({_cuda('total')})", "largest device"),
        nothing=NO_GPU, many=True,
    )  # fmt: skip
    dashed = {"fill": "dash", "dash": [8, 8]}
    return panel.min(0).override_by_query("B", [draw.setting("custom.lineStyle", dashed)])


def _throttled() -> Panel:
    share = rate(of_rank("torch_gpu_throttled_seconds_total"))
    most = f"max by (job, instance, run, rank, device, uuid) ({share})"
    state = f"(({most} > bool 0.01) + ({most} > bool 0.1))"
    query = Query(in_order(with_rank_name(with_host(state)), "host", "rank", "device"), ROW)
    text = (
        "Whether the driver held the clocks down: at times, or for more than a tenth of the time, as alert GpuThrottled has it. A "
        "slow GPU slows all ranks down."
    )
    known = ever(of_rank("torch_gpu_throttled_seconds_total"))
    return draw.timeline("Throttled", text, query, THROTTLED, NO_GPU, ever=known)


def _reasons() -> Panel:
    share = rate(of_rank("torch_gpu_throttled_seconds_total"))
    state = f"(({share} > 0.01) * 0 + 1 + ({share} > bool 0.1))"
    query = Query(in_order(with_rank_name(with_host(state)), "host", "rank", "device", "reason"), f"{ROW} {{{{reason}}}}")
    text = "For which reasons the driver held the clocks down for more than a hundredth of the time, or a tenth; they may overlap."
    reasons = {number: found for number, found in THROTTLED.items() if number}
    return draw.timeline("Reasons for throttling", text, query, reasons, "No GPU is held down")


def _errors() -> Panel:
    query = Query(with_host(counted(of_rank("torch_gpu_ecc_errors_total"))), f"{DEVICE} {{{{kind}}}}")
    text = "Memory errors in each interval. Uncorrected errors may have spoilt results: take the GPU out of service."
    return draw.bars(draw.lines("Memory errors", text, "short", query, nothing=NO_GPU, many=True))


def _energy() -> Panel:
    joules = f"sum by (run) ({rate(of_rank('torch_gpu_energy_joules_total'))})"
    samples = f"sum by (run) ({rate(of_rank('torch_train_samples_total'))})"
    text = "Energy that the GPUs of the chosen ranks spend on one training example."
    return draw.lines(
        "Energy per training example",
        text,
        "joule",
        Query(f"{joules} / ({samples} > 0)", "{{run}}"),
        nothing=f"{NO_GPU}; or no example is known",
    ).min(0)


def _gpus() -> list[Panel]:
    return [
        _gpu("Utilisation", "Share of the last sample period in which a kernel ran.", "percentunit",
            "torch_gpu_utilization_ratio").max(1),
        _gpu_memory(),
        _gpu("Power", "Power that the GPU draws.", "watt", "torch_gpu_power_watts"),
        draw.limit(_gpu("Temperature", "Temperature of the GPU. Most slow down between 83 and 90 degrees; Throttled shows if so.",
            "celsius", "torch_gpu_temperature_celsius"), 83),
        _gpu("Clock of the multiprocessors", "Clock frequency of the multiprocessors. A GPU below the others makes all ranks wait.",
            "hertz", "torch_gpu_sm_clock_hertz"),
        _throttled(), _reasons(), _errors(), _energy(),
    ]  # fmt: skip


def _processors() -> Panel:
    panel = draw.lines(
        "Processors in use", "Cores that the process and its children, the workers of its data loaders, keep busy.", "short",
        Query(rate(of_rank("process_cpu_seconds_total")), f"{RANK} process"),
        Query(rate(of_rank("torch_process_children_cpu_seconds_total")), f"{RANK} children"), many=True,
    )  # fmt: skip
    return panel.min(0)


def _process_memory() -> Panel:
    text = (
        "Resident memory of the process, and the pages that only its children have. Children that grow without end "
        "copy what they share with the process: Python objects in a dataset cause that."
    )
    panel = draw.lines(
        "Memory of process and children", text, "bytes",
        Query(of_rank("process_resident_memory_bytes"), f"{RANK} process"),
        Query(of_rank("torch_process_children_memory_bytes"), f"{RANK} children"), many=True,
    )  # fmt: skip
    return panel.min(0)


def _tasks() -> Panel:
    panel = draw.lines(
        "Threads and children", "Threads and child processes. A child fewer in the middle of an epoch is a dead loader worker.",
        "short",
        Query(of_rank("torch_process_threads"), f"{RANK} threads"), Query(of_rank("torch_process_children"), f"{RANK} children"),
        many=True,
    )  # fmt: skip
    return panel.min(0)


def _files() -> Panel:
    share = f"{of_rank('process_open_fds')} / ({of_rank('process_max_fds')} > 0)"
    text = "Share of the file descriptors that the process may open. Each tensor that a loader worker sends takes one."
    return draw.lines("Open files", text, "percentunit", Query(share, RANK), many=True).min(0).axis_soft_max(0.01)


def _storage() -> Panel:
    panel = draw.lines(
        "Storage of the process", "Bytes read from and written to storage, without reads from the page cache.", "Bps",
        Query(rate(of_rank("torch_process_io_read_bytes_total")), f"{RANK} read"),
        Query(rate(of_rank("torch_process_io_write_bytes_total")), f"{RANK} written"), many=True,
    )  # fmt: skip
    return panel.min(0)


def _collections() -> Panel:
    query = Query(rate(of_rank("python_gc_collections_total", 'generation="2"')), RANK)
    text = "Full collections of Python's garbage collector. Each stops the training loop, on each rank at another moment."
    return draw.lines("Full garbage collections", text, "count:/s", query, many=True).min(0).axis_soft_max(0.1)


def _host_processors() -> Panel:
    query = Query(by_host(of_rank("torch_host_cpu_ratio")), "{{host}}")
    text = "Share of all the host's processors that is busy."
    nothing = draw.NO_RUN + draw.ONE_SCRAPE
    return draw.lines("Processors of the host", text, "percentunit", query, nothing=nothing).min(0).max(1)


def _host_memory() -> Panel:
    limit = f"({of_rank('torch_container_memory_working_set_bytes')} / {of_rank('torch_container_memory_limit_bytes')})"
    used = f"(1 - {of_rank('torch_host_memory_available_bytes')} / {of_rank('torch_host_memory_total_bytes')})"
    text = "Share of the host's memory in use, and of the container's limit. Beyond that limit the kernel kills processes."
    panel = draw.lines(
        "Memory of host and container", text, "percentunit",
        Query(by_host(used), "{{host}} host"), Query(by_host(limit), "{{host}} container"),
    )  # fmt: skip
    return draw.limit(panel.min(0).max(1), 0.9)


def _container() -> Panel:
    text = (
        "Working set and its limit, where there is one. On the right the limit in processors, and the seconds per second for which "
        "it held the container back."
    )
    panel = draw.lines(
        "Container and its limits", text, "bytes",
        Query(by_host(of_rank("torch_container_memory_working_set_bytes")), "{{host}} working set"),
        Query(by_host(of_rank("torch_container_memory_limit_bytes")), "{{host}} limit"),
        Query(by_host(of_rank("torch_container_cpu_limit_cores")), "{{host}} processors"),
        Query(by_host(rate(of_rank("torch_container_cpu_throttled_seconds_total"))), "{{host}} held back"),
        nothing="No control group is known here",
    )  # fmt: skip
    right = [draw.setting("custom.axisPlacement", "right"), draw.setting("unit", "short")]
    return panel.min(0).override_by_query("C", right).override_by_query("D", right)


def _both_ways(title: str, text: str, into: tuple[str, str], out: tuple[str, str]) -> Panel:
    panel = draw.lines(
        title, text, "Bps",
        Query(by_host(rate(of_rank(into[0]))), f"{{{{host}}}} {into[1]}"),
        Query(by_host(rate(of_rank(out[0]))), f"{{{{host}}}} {out[1]}"),
    )  # fmt: skip
    return panel.min(0)


def _hosts() -> list[Panel]:
    return [
        _host_processors(), _host_memory(), _container(),
        _both_ways("Disks of the host", "Bytes that all programs on the host read and write.",
            ("torch_host_disk_read_bytes_total", "read"), ("torch_host_disk_write_bytes_total", "written")),
        _both_ways("Network of the host", "Bytes that all programs receive and send. RDMA bypasses the kernel and is not included.",
            ("torch_host_network_receive_bytes_total", "received"), ("torch_host_network_transmit_bytes_total", "sent")),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """The whole dashboard: what each machine has comes first, so that a run on CPUs does not open with empty panels."""
    cuda = [_reserved(), _allocator(), _fragmentation(), _retries(), _waiting_for_streams()]
    processes = [_processors(), _process_memory(), _tasks(), _storage(), _files(), _collections()]
    content = [
        Row("Hosts and containers", [panel.span(8) for panel in _hosts()]),
        Row("GPUs", [panel.span(12) for panel in _gpus()], collapsed=True),
        Row("CUDA allocator", [_devices().span(24).height(7), *(panel.span(12) for panel in cuda)], collapsed=True),
        Row("Processes and their data loaders", [panel.span(12) for panel in processes]),
    ]
    return board(UID, "Resources", "Memory of devices, GPUs, processes, hosts and containers.", content)
