"""Launches the programs over gradients that are readable, without ever waiting for the device.

The tables of one set of gradients are sent once; while gradients of the same kinds come again elsewhere in memory, only their
addresses are. What is sent lies in pinned memory that is written once: torch does not use it again before the copy is done.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.declared import MOMENTS
from torch_grad_exporter.statistics.device import StreamOrder, joined, to_device
from torch_grad_exporter.statistics.kernels import tables
from torch_grad_exporter.statistics.layout import Layout

WARPS = 8
"""Of a program of the first launch: 16 elements of a block for each thread."""

REGISTERS = 80
"""Of a thread, at most, so that three programs share a multiprocessor. With 64, for four of them, Triton 3.6 spills."""

ANY: Mapping[str, object] = {"enable_fp_fusion": True}
"""How both programs are compiled: a product and a sum may be one operation. Left open, newer versions of Triton warn."""

WRITTEN = (Column.NORM, Column.ZEROS, Column.NANS, Column.INFS, Column.MIN, Column.MAX, Column.SUM)
"""What the programs write; the units are counted with their past."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What was read of gradients: `rows`, shape (gradients, width), float64; `zero`, `alive`: see `eager.Reading`."""

    rows: torch.Tensor
    zero: torch.Tensor
    alive: torch.Tensor


@dataclass(slots=True, eq=False)
class _Sent:
    """The tables of one launch on the device. `gradients`: which of all it reads; `at`: where they are."""

    gradients: slice
    owners: torch.Tensor
    entries: torch.Tensor
    flags: int
    at: list[int]
    addresses: torch.Tensor


class Launcher:
    """Measures gradients of one device. `programs`: the module of that name. `most`: tiles of one launch.

    The first call compiles: seconds, or less where Triton finds on the disk what another process has compiled.
    """

    def __init__(self, device: torch.device, layout: Layout, programs: ModuleType, most: int = tables.MOST_PARTIALS) -> None:
        self._device = device
        self._layout = layout
        self._programs = programs
        self._most = most
        self._moments = MOMENTS in layout.apart
        self._options = options(hip=torch.version.hip is not None)
        self._kinds: list[tuple[object, ...]] = []
        self._same: object = None
        self._sent: list[_Sent] = []
        self._forms: tuple[object, list[int]] = None, []
        self._streams = StreamOrder(device)

    def readable(self, gradients: Sequence[tables.Read], same: object) -> list[bool]:
        """Return which of them the programs can read. As long as `same` is the same object, only their memory may differ."""
        if self._forms[0] is not same:
            self._forms = same, [tables.form(*one) for one in gradients]
        found = []
        for (gradient, layout), form in zip(gradients, self._forms[1], strict=True):
            if form and gradient.is_contiguous():
                address = gradient.data_ptr()
                found.append(address != 0 and address % form == 0 and not gradient.is_neg())
            else:
                found.append(tables.readable(gradient, layout))
        return found

    def __call__(self, gradients: Sequence[tables.Read], same: object = None) -> Found:
        """Read all of them; they are `readable`, on the device, and not empty. `same`: as there, and all are contiguous."""
        self._streams.begin(*(table for sent in self._sent for table in (sent.owners, sent.entries, sent.addresses)))
        if same is None or same is not self._same:
            self._tell(gradients)
        self._same = same
        at = [gradient.data_ptr() for gradient, _ in gradients]
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            found = [self._flight(sent, at[sent.gradients]) for sent in self._sent]
        self._streams.end()
        return Found(*(joined(parts) for parts in zip(*((one.rows, one.zero, one.alive) for one in found), strict=True)))

    def _tell(self, gradients: Sequence[tables.Read]) -> None:
        """Send tables, unless the gradients are of the same kinds as those of the last call."""
        kinds: list[tuple[object, ...]] = [(g.shape, g.stride(), g.dtype, layout) for g, layout in gradients]
        if kinds == self._kinds and self._sent:
            return
        self._same, self._sent, sent = None, [], []  # what fails below leaves nothing that is half true
        nowhere = to_device([0], self._device)
        for flight in tables.flights(gradients, self._most):
            made = tables.tables(gradients[flight])
            owners, entries = (to_device(table, self._device) for table in (made.owners, made.entries))
            sent.append(_Sent(flight, owners, entries, made.flags, [], nowhere))
        self._kinds, self._sent = kinds, sent

    def _flight(self, sent: _Sent, at: list[int]) -> Found:
        if sent.at != at:
            # Not into the same memory: an earlier launch may still be going to read it. A copy that fails leaves both as they were.
            sent.addresses, sent.at = to_device(at, self._device), at
        aligned = -(-sent.flags // 16) * 16 + 16
        flags = torch.zeros((2, aligned), dtype=torch.uint8, device=self._device)
        rows = torch.zeros((len(at), self._layout.width), dtype=torch.float64, device=self._device)
        partials = torch.empty(len(sent.owners) * tables.PARTIALS, dtype=torch.float64, device=self._device)
        shape = {"COLUMNS": tables.COLUMNS, "PARTIALS": tables.PARTIALS}
        self._programs.read[len(sent.owners),](
            sent.owners, sent.entries, sent.addresses, partials, flags[0], flags[1],
            BLOCK=tables.BLOCK, GROUP=tables.GROUP, MOMENTS=self._moments, **shape, **self._options,
        )  # fmt: skip
        places = {column.name: int(column) for column in WRITTEN}
        self._programs.add_up[len(at),](
            sent.entries, partials, rows, MOST=tables.MOST_TILES, WIDTH=self._layout.width, **places, **shape, **ANY
        )
        nonzero, nan = flags[:, : sent.flags].view(torch.bool)
        return Found(rows, ~nonzero, nonzero > nan)


def options(*, hip: bool) -> dict[str, object]:
    """Return how the first program is compiled. For AMD's GPUs Triton knows no limit of registers."""
    chosen: dict[str, object] = {"num_warps": WARPS, **ANY}
    return chosen if hip else chosen | {"maxnreg": REGISTERS}


def programs() -> ModuleType:
    """Return the programs; imports Triton. Raises `ImportError` where it is not installed."""
    return importlib.import_module("torch_grad_exporter.statistics.kernels.programs")
