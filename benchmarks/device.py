"""What differs between measuring on a GPU and on the CPU, which stands in where there is none so that the code can be tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def synchronise(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(action: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Seconds from the first to the last work of `times` calls in a row on the device, per call; after one that does not count."""
    action()
    synchronise(device)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            action()
        return (time.perf_counter() - start) / times
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        action()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / times


def launches(action: Callable[[], object], device: torch.device) -> int:
    """Kernel launches of one call; on the CPU, where there are none, calls of operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    action()
    synchronise(device)
    with torch.profiler.profile(activities=activities) as profile:
        action()
        synchronise(device)
    wanted = "LaunchKernel" if device.type == "cuda" else "aten::"
    return sum(event.count for event in profile.key_averages() if wanted in event.key)


def extra_memory(action: Callable[[], object], device: torch.device) -> float | None:
    """Bytes that one call needs at most beside what is there; unknown on the CPU."""
    if device.type != "cuda":
        return None
    action()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    synchronise(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def host_seconds(action: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Seconds until a call returns, its median; the device is idle before each."""
    found = []
    for _ in range(times):
        synchronise(device)
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    synchronise(device)
    return median(found)
