"""The same questions on a GPU, at about a billion parameters in bfloat16: `make bench-cuda`, about five minutes.

Overhead at defaults and with every step sampled, in interleaved blocks that begin and end with an idle device; one sample beside
one read of the gradients at the memory's bandwidth, by torch and by the programs in Triton, also on very many small tensors and
on 7 billion elements where there is room; kernel launches; and what the training thread itself spends. Four trainings
with AdamW take about 50 GB on the device; `--layers 5` makes do with a quarter. `--device cpu --tiny` runs the same code to see
that it works; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from benchmarks import cuda_cuts, record
from benchmarks.apart import OptimizerHooks
from benchmarks.device import device_seconds, extra_memory, host_seconds, launches, synchronise
from benchmarks.interleave import compare, interleave
from benchmarks.workloads import Decoder
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.layout import ORDINARY
from torch_grad_exporter.store.host_transfer import HostTransfer

ARMS: dict[str, str | int | None] = {"plain": None, "control": None, "defaults": "auto", "every=1": 1}
"""`every` of each arm's exporter, `None` for none."""

LONGEST_INTERVAL = 256
"""A block holds a whole sampling interval, if it is not longer than this."""


@dataclass(frozen=True, slots=True)
class Size:
    """A decoder and its batch. The default has about 1.07 billion parameters."""

    layers: int = 20
    width: int = 2048
    heads: int = 16
    vocabulary: int = 32_768
    length: int = 1024
    batch: int = 4


READ, COPY = "one read of the bytes (sum)", "a copy of the bytes"

SMALL = 10_000
"""Small tensors."""

LARGE = (4096, 32)
"""Width and layers of the decoder of 7 billion elements."""

TINY = Size(layers=2, width=32, heads=2, vocabulary=128, length=16, batch=2)


@dataclass(slots=True)
class Arm:
    """A training of its own with the optimizer hooks that are its own, and perhaps an exporter."""

    size: Size
    device: torch.device
    hooks: OptimizerHooks = field(default_factory=OptimizerHooks)
    exporter: Exporter | None = None
    model: torch.nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    text: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.size
        torch.manual_seed(0)
        with self.device:
            decoder = Decoder(size.layers, size.width, size.heads, size.vocabulary, size.length)
            self.text = torch.randint(size.vocabulary, (size.batch, size.length + 1))
        self.model = decoder.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=True)

    def watch(self, every: str | int) -> None:
        """Starts an exporter, after ending the one before."""
        self.close()
        with self.hooks.there():
            self.exporter = start_exporter(self.model, port=None, every=every)  # type: ignore[arg-type]

    def backward(self) -> None:
        """Clears the gradients and runs forward and backward."""
        self.optimizer.zero_grad()
        logits = self.model(self.text[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.text[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]

    def steps(self, number: int) -> None:
        """So many training steps, from an idle device to an idle device."""
        synchronise(self.device)
        for _ in range(number):
            self.backward()
            self.optimizer.step()
        synchronise(self.device)

    def counters(self) -> tuple[float, float, float]:
        """What the exporter says: seconds that it took on the training thread, samples, and its interval."""
        values = {family.spec.name: family.values for family in self.exporter.collect()} if self.exporter is not None else {}
        names = ("overhead_seconds_total", "captures_total", "sampling_interval_steps")
        own, samples, interval = (float(values[f"torch_grad_exporter_{name}"][0]) for name in names)
        return own, samples, interval

    def close(self) -> None:
        """Ends the exporter, if there is one."""
        exporter, self.exporter = self.exporter, None
        with self.hooks.there():
            if exporter is not None:
                exporter.close()


def overhead(arms: dict[str, Arm], seconds: float) -> record.Table:
    """Blocks of steps of all arms in turns."""
    for name, arm in arms.items():
        every = ARMS[name]
        if every is not None:
            arm.watch(every)
        with arm.hooks.there():
            arm.steps(40)
    interval = arms["defaults"].counters()[2]
    # A whole interval and no half one: each block of `defaults` has as many samples as the next.
    steps = math.ceil(8 / min(interval, LONGEST_INTERVAL)) * int(min(interval, LONGEST_INTERVAL))
    blocks = interleave(
        {name: lambda arm=arm: arm.steps(steps) for name, arm in arms.items()},  # type: ignore[misc]
        steps_per_block=1,
        seconds=seconds,
        least_rounds=4,
        around={name: arm.hooks.there for name, arm in arms.items()},
    )
    rows: list[list[record.Cell]] = [["plain", round(1e3 * median(blocks["plain"]) / steps, 3), "", "", ""]]
    for name, found in compare(blocks).items():
        percent = [100 * value for value in (found.overhead, found.low, found.high)]
        own = arms[name].counters() if arms[name].exporter is not None else None
        cells = ["", ""] if own is None else [int(own[2]), int(own[1])]
        rows.append(
            [name, round(1e3 * found.seconds / steps, 3), f"{percent[0]:+.2f} [{percent[1]:+.2f}, {percent[2]:+.2f}]", *cells]
        )
    notes = [
        f"{len(blocks['plain'])} blocks of {steps} steps each, from an idle device to an idle device.",
        f"The sampling interval at the defaults was {interval:.0f} before the blocks; the bar at the defaults is 1 %.",
    ]
    return record.table("Overhead of a step", ("arm", "step ms", "beside plain %", "interval", "samples"), rows, notes)


def by_programs(device: torch.device) -> EagerStatistics:
    """Statistics by the programs in Triton, compiled and compared. On the CPU, where there are none, torch's operations stay."""
    errors = ErrorLog(())
    kernels = Kernels(ORDINARY, errors.boundary("kernels"), HostTransfer(ring=1).post)
    statistics = EagerStatistics(100, kernels=kernels)
    model = torch.nn.Linear(8, 8, device=device)
    table = LayerIndex({"": model}).table
    for number in range(3):
        statistics.measure(table, [(0, torch.ones_like(model.weight))], number)
        synchronise(device)
    if device.type == "cuda" and not kernels.trusted:
        raise RuntimeError(f"the programs do not measure on {device}: {errors.counts()}")
    return statistics


def sample(arm: Arm) -> record.Table:
    """The statistics of one sample on the gradients of a real backward."""
    with arm.hooks.there():
        arm.backward()
    return beside_one_read("One sample beside one read of the gradients", arm.model, arm.device)


def small_tensors(device: torch.device, count: int) -> record.Table:
    """The same on very many very small tensors."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(16, 16 + i % 4, device=device)) for i in range(count)])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return beside_one_read(f"The same on {count} small tensors", model, device)


def large_model(device: torch.device, width: int, layers: int) -> record.Table | None:
    """The same on the gradients of the matrices of a decoder in bfloat16, of 7 billion elements; `None` where they have no room."""
    shapes = [(width, width)] * 4 * layers + [(width * 43 // 16, width)] * 3 * layers
    elements = sum(rows * columns for rows, columns in shapes)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the trainings that were here before
        if torch.cuda.mem_get_info(device)[0] < 6 * elements:  # weights, gradients, and room for one read and one copy
            return None
    options = {"dtype": torch.bfloat16, "device": device}
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape, **options)) for shape in shapes])  # type: ignore[call-overload]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return beside_one_read(f"The same on {elements / 1e9:.1f} billion elements in bfloat16", model, device)


def beside_one_read(title: str, model: torch.nn.Module, device: torch.device) -> record.Table:
    """The statistics of one sample of a model's gradients, beside what any such thing must take, in the same minutes.

    The bytes are read and copied as one tensor of at most 4 GB, and that is scaled to all of them.
    """
    table = LayerIndex({"": model}).table
    gradients = [(i, g) for i, parameter in enumerate(table.tracked) if (g := parameter.gradient()) is not None]
    own = [g for _, g in gradients]
    size = sum(g.numel() * g.element_size() for g in own)
    numbers = itertools.count()
    part = torch.zeros(min(size, 1 << 32) // own[0].element_size(), dtype=own[0].dtype, device=device)
    other = torch.empty_like(part)
    scale = size / (part.numel() * part.element_size())
    by_torch, programs = EagerStatistics(100), by_programs(device)
    actions: dict[str, Callable[[], object]] = {
        READ: part.sum,
        COPY: lambda: other.copy_(part),
        "torch._foreach_norm": lambda: torch._foreach_norm(own),
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        "all default statistics by torch": lambda: by_torch.measure(table, gradients, next(numbers)),
        "all default statistics by the programs": lambda: programs.measure(table, gradients, next(numbers)),
        "norms alone by torch, as when the optimizer steps": lambda: by_torch.norms(table, gradients),
        "norms alone by the programs": lambda: programs.norms(table, gradients),
    }
    times = {name: device_seconds(action, device) * (scale if name in (READ, COPY) else 1) for name, action in actions.items()}
    rows: list[list[record.Cell]] = []
    for name, action in actions.items():
        memory = extra_memory(action, device)
        megabytes = None if memory is None else round(memory / 1e6, 1)
        host = round(1e3 * host_seconds(action, device), 3)
        rows.append(
            [name, round(1e3 * times[name], 3), round(times[name] / times[READ], 2), host, launches(action, device), megabytes]
        )
    columns = ("what", "ms", "times one read", "host ms", "launches" if device.type == "cuda" else "operators", "memory MB")
    notes = [
        f"{len(gradients)} gradients, {size / 1e9:.3f} GB, read at {size / times[READ] / 1e9:.0f} GB/s.",
        f"Copied at {2 * size / times[COPY] / 1e9:.0f} GB/s, reading and writing counted.",
        "ms: ten calls in a row between two device events, per call. Host ms: until the call returns, the device idle before it.",
    ]
    return record.table(title, columns, rows, notes)


def host_time(arm: Arm, plain: Arm) -> record.Table:
    """What the training thread spends per step, as the exporter counts it, and launches per step."""
    rows: list[list[record.Cell]] = []
    for label, every in (("a step that is sampled", 1), ("a step that is not", 4096)):
        arm.watch(every)
        with arm.hooks.there():
            arm.steps(3)
            own, samples, _ = arm.counters()
            arm.steps(32)
            later, taken, _ = arm.counters()
            found = launches(lambda: arm.steps(1), arm.device)
        rows.append([label, round(1e6 * (later - own) / 32, 1), int(taken - samples), found])
    with plain.hooks.there():
        rows.append(["a plain step", None, 0, launches(lambda: plain.steps(1), plain.device)])
    columns = ("what", "own count us", "samples in 32 steps", "launches" if arm.device.type == "cuda" else "operators")
    return record.table(
        "The training thread", columns, rows, ["Own count: what the exporter says that it took on that thread, per step."]
    )


def run(size: Size, device: torch.device, seconds: float) -> Iterator[record.Table]:
    """Each table, as soon as it is measured."""
    arms = {name: Arm(size, device) for name in ARMS}
    elements = sum(p.numel() for p in arms["plain"].model.parameters())
    steps = overhead(arms, seconds)
    steps["notes"].append(f"{elements / 1e9:.3f} billion parameters in bfloat16, {size.batch} x {size.length} tokens.")
    yield steps
    for name in ("control", "defaults"):
        arms.pop(name).close()  # what follows needs the room
    yield sample(arms["plain"])
    yield host_time(arms["every=1"], arms["plain"])
    if device.type == "cuda":
        yield cuda_cuts.table(arms["plain"].model, device)
    arms.pop("every=1").close()
    yield small_tensors(device, SMALL if size is not TINY else 50)
    arms.clear()
    large = large_model(device, *(LARGE if size is not TINY else (32, 1)))
    if large is not None:
        yield large


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it and writes `results/cuda.json`, of a trial `cuda-trial.json`; status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that this runs")
    parser.add_argument("--layers", type=int, default=Size().layers, help="of 50 million parameters each")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the overhead's blocks")
    chosen = parser.parse_args(arguments)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch sees no CUDA device, and this measures one; `--device cpu --tiny` tries the code without", file=sys.stderr)
        return 2
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    name = "cuda-trial" if chosen.tiny or chosen.device == "cpu" else "cuda"
    tables: list[record.Table] = []
    for table in run(TINY if chosen.tiny else Size(layers=chosen.layers), torch.device(chosen.device), chosen.seconds):
        tables.append(table)
        print(f"\n{table['title']}")
        for row in (table["columns"], *table["rows"], *table["notes"]):
            print(row if isinstance(row, str) else " | ".join(map(str, row)))
        written = record.save(name, {"tables": tables})  # after each, so that what was measured is kept if it is ended
    print(f"written to {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
