"""A call of `observe` and of `log` within a training loop: with numbers and with tensors on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import record
from benchmarks.interleave import interval
from torch_grad_exporter import Exporter, start_exporter

CALLS = 500
"""Calls per block; the background thread takes them in between blocks."""


def measure(seconds: float) -> record.Table:
    """Each way to call it, for about this many seconds together."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with start_exporter(model, port=None, every=1) as exporter:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
        found = _in_turns(exporter, _ways(exporter), seconds)
    rows: list[list[record.Cell]] = []
    for label, values in found.items():
        low, high = interval(values, median, resamples=1000)
        rows.append([label, round(1e6 * median(values), 2), f"[{1e6 * low:.2f}, {1e6 * high:.2f}]"])
    notes = [f"Median over blocks of {CALLS} calls in turns, less what an empty call of a Python function takes; one thread."]
    return record.table("A call of observe() and of log()", ("call", "us", "95 %"), rows, notes)


def _ways(exporter: Exporter) -> dict[str, Callable[[], object]]:
    loss, norm = torch.tensor(1.5), torch.tensor(0.5)
    numbers = {f"name {number}": float(number) for number in range(10)}
    tensors = {name: torch.tensor(number) for name, number in numbers.items()}
    return {
        "observe(loss=float)": lambda: exporter.observe(loss=1.5),
        "observe(loss=float, grad_norm=float, tokens=int)": lambda: exporter.observe(loss=1.5, grad_norm=0.5, tokens=64),
        "observe(loss=tensor)": lambda: exporter.observe(loss=loss),
        "observe(loss=tensor, grad_norm=tensor, tokens=int)": lambda: exporter.observe(loss=loss, grad_norm=norm, tokens=64),
        "log(ten floats)": lambda: exporter.log(numbers),
        "log(ten tensors)": lambda: exporter.log(tensors),
        "loss.item() alone, for comparison": loss.item,
    }


def _in_turns(exporter: Exporter, ways: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds per call by block."""
    found: dict[str, list[float]] = {label: [] for label in ways}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for label, action in ways.items():
            empty = _block(lambda: None)
            found[label].append((_block(action) - empty) / CALLS)
            list(exporter.collect())  # takes in what was observed, outside of the timed calls
    return found


def _block(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        action()
    return time.perf_counter() - start
