"""How the programs in Triton cut their work: the default and its neighbours, on the same gradients and in the same minutes.

What is best depends on the GPU, and can be found on one alone. A part of `make bench-cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from benchmarks import record
from benchmarks.device import device_seconds
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics.kernels import launch, tables
from torch_grad_exporter.statistics.layout import ORDINARY


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements that a program reads at a time, blocks of a tile, warps of a program and registers of a thread."""

    block: int = tables.BLOCK
    blocks: int = tables.BLOCKS
    warps: int = launch.WARPS
    registers: int = launch.REGISTERS


CUTS = (
    Cut(),
    *(Cut(blocks=blocks) for blocks in (8, 32, 128)),
    *(Cut(registers=registers) for registers in (64, 96, 128)),
    Cut(blocks=8, registers=64),
    Cut(block=2048, warps=4, registers=128),
    Cut(block=8192, blocks=32, registers=128),
    Cut(block=8192, blocks=16, warps=16, registers=64),
)
"""The first is the default."""


@contextmanager
def applied(cut: Cut) -> Iterator[None]:
    """Within, launchers that are made cut in this way."""
    with (
        patch.multiple(tables, BLOCK=cut.block, BLOCKS=cut.blocks),
        patch.multiple(launch, WARPS=cut.warps, REGISTERS=cut.registers),
    ):
        yield


def seconds(gradients: Sequence[tables.Read], cut: Cut, device: torch.device) -> float:
    """What one launch over all gradients takes in this way, without what it takes to compile it."""
    with applied(cut):
        run = launch.Launcher(device, ORDINARY, launch.programs())
        return device_seconds(lambda: run(gradients, gradients), device)


def table(model: torch.nn.Module, device: torch.device, cuts: Sequence[Cut] = CUTS) -> record.Table:
    """Each way beside a copy, on the gradients of a model and with its units."""
    tracked = LayerIndex({"": model}).table.tracked
    reads: list[tables.Read] = [(gradient, one.units) for one in tracked if (gradient := one.gradient()) is not None]
    size = sum(gradient.nbytes for gradient, _ in reads)
    part = torch.zeros(min(size, 1 << 32), dtype=torch.uint8, device=device)
    other = torch.empty_like(part)
    copied = 2 * part.nbytes / device_seconds(lambda: other.copy_(part), device)
    rows: list[list[record.Cell]] = []
    for cut in cuts:
        took = seconds(reads, cut, device)
        cells = [cut.block, cut.blocks, cut.warps, cut.registers]
        rows.append([*cells, round(1e3 * took, 3), round(size / took / 1e9), round(100 * size / took / copied, 1)])
    columns = ("elements of a block", "blocks of a tile", "warps", "registers", "ms", "GB/s", "of a copy's %")
    notes = [
        f"{len(reads)} gradients, {size / 1e9:.3f} GB; a copy moved {copied / 1e9:.0f} GB/s, reading and writing counted.",
        "The first row is the default. Ten launches in a row between two device events.",
    ]
    return record.table("How the programs cut their work", columns, rows, notes)
