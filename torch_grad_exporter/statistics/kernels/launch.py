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
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.statistics import Column, moments
from torch_grad_exporter.statistics.device import joined
from torch_grad_exporter.statistics.kernels import tables
from torch_grad_exporter.statistics.layout import Layout

WARPS = 8
"""Of a program of the first launch: 16 elements of a block for each thread."""

REGISTERS = 80
"""Of a thread, at most, so that three programs share a multiprocessor; then a thread spills up to 256 bytes, says `ptxas -v`."""

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
    """The tables of one launch on the device, and what they are about."""

    kinds: list[tuple[object, ...]]
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
        self._moments = moments.STATISTIC in layout.apart
        self._options = options(hip=torch.version.hip is not None)
        self._sent: list[_Sent] = []

    def __call__(self, gradients: Sequence[tables.Read]) -> Found:
        """Reads all of them; they are `tables.readable`, on the device, and not empty."""
        flights = list(tables.flights(gradients, self._most))
        del self._sent[len(flights) :]
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            found = [self._flight(place, flight) for place, flight in enumerate(flights)]
        return Found(*(joined(parts) for parts in zip(*((one.rows, one.zero, one.alive) for one in found), strict=True)))

    def _flight(self, place: int, gradients: Sequence[tables.Read]) -> Found:
        sent = self._told(place, gradients)
        aligned = -(-sent.flags // 16) * 16 + 16
        flags = torch.zeros((2, aligned), dtype=torch.uint8, device=self._device)
        rows = torch.zeros((len(gradients), self._layout.width), dtype=torch.float64, device=self._device)
        partials = torch.empty(len(sent.owners) * tables.PARTIALS, dtype=torch.float64, device=self._device)
        shape = {"COLUMNS": tables.COLUMNS, "PARTIALS": tables.PARTIALS}
        self._programs.read[len(sent.owners),](
            sent.owners, sent.entries, sent.addresses, partials, flags[0], flags[1],
            BLOCK=tables.BLOCK, GROUP=tables.GROUP, MOMENTS=self._moments, **shape, **self._options,
        )  # fmt: skip
        places = {column.name: int(column) for column in WRITTEN}
        self._programs.add_up[len(gradients),](
            sent.entries, partials, rows, MOST=tables.MOST_TILES, WIDTH=self._layout.width, **places, **shape, **ANY
        )
        nonzero, nan = flags[:, : sent.flags].view(torch.bool)
        return Found(rows, ~nonzero, nonzero > nan)

    def _told(self, place: int, gradients: Sequence[tables.Read]) -> _Sent:
        """The tables of a launch on the device: those of the last call as far as they are the same."""
        kinds: list[tuple[object, ...]] = [(g.shape, g.stride(), g.dtype, layout) for g, layout in gradients]
        at = [gradient.data_ptr() for gradient, _ in gradients]
        sent = self._sent[place] if place < len(self._sent) else None
        if sent is None or sent.kinds != kinds:
            made = tables.tables(gradients)
            sent = _Sent(kinds, self._copied(made.owners), self._copied(made.entries), made.flags, at, self._copied(at))
            self._sent[place : place + 1] = [sent]
        elif sent.at != at:
            # Not into the same memory: an earlier launch may still be going to read it.
            sent.at, sent.addresses = at, self._copied(at)
        return sent

    def _copied(self, values: Sequence[int] | np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(values))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def options(*, hip: bool) -> dict[str, object]:
    """How the first program is compiled. For AMD's GPUs Triton knows no limit of registers."""
    chosen: dict[str, object] = {"num_warps": WARPS, **ANY}
    return chosen if hip else chosen | {"maxnreg": REGISTERS}


def programs() -> ModuleType:
    """The programs; imports Triton. Raises `ImportError` where it is not installed."""
    return importlib.import_module("torch_grad_exporter.statistics.kernels.programs")
