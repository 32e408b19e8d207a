"""Stands for the programs of `statistics/kernels/`, which need Triton: reads gradients of the CPU by their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.kernels.tables import KINDS

TYPES = {number: kind for kind, number in KINDS.items()}


class Program:
    """Is launched as Triton's programs are: `program[grid](...)`."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run


class Programs(SimpleNamespace):
    """The two programs. `launches`: how many gradients each launch has read. `change`: what becomes of each row."""

    def __init__(self, change: Callable[[np.ndarray], None] = lambda row: None) -> None:
        super().__init__(read=Program(self._read), add_up=Program(self._add_up), launches=[], change=change)
        self._rows: list[np.ndarray] = []

    def _read(self, *tensors: torch.Tensor, **named: Any) -> None:  # noqa: ANN401 - what Triton takes
        owners, entries, addresses, partials, nonzero, nan = tensors
        assert owners.tolist() == [i for i, tiles in enumerate(entries[:, 4].tolist()) for _ in range(tiles)]
        assert partials.numel() >= len(owners) * named["PARTIALS"]
        self._rows = []
        self.launches.append(len(entries))
        for entry, address in zip(entries.tolist(), addresses.tolist(), strict=True):
            elements, kind, *_, inner, count, flags = entry
            values = held(address, elements, TYPES[kind])
            self._rows.append(row_of(values, moments=named["MOMENTS"]))
            if flags >= 0:
                units = np.arange(elements) // inner % count
                nonzero[flags + np.unique(units[values != 0])] = 1
                nan[flags + np.unique(units[np.isnan(values)])] = 1

    def _add_up(self, entries: torch.Tensor, partials: torch.Tensor, rows: torch.Tensor, **_: object) -> None:
        assert len(rows) == len(entries) == len(self._rows)
        for row, found in zip(rows, self._rows, strict=True):
            self.change(found)
            row[: len(found)] = torch.from_numpy(found)


def held(address: int, elements: int, kind: torch.dtype) -> np.ndarray:
    """The elements that are in memory at an address, as float64."""
    memory = (ctypes.c_char * (elements * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind).double().numpy()


def row_of(values: np.ndarray, *, moments: bool) -> np.ndarray:
    """A row of the columns of the package."""
    row = np.zeros(len(Column))
    with np.errstate(all="ignore"):
        row[Column.NORM] = np.sqrt(np.square(values).sum())
        row[Column.SUM] = values.sum() if moments else 0
    row[Column.ZEROS], row[Column.NANS], row[Column.INFS] = (values == 0).sum(), np.isnan(values).sum(), np.isinf(values).sum()
    row[Column.MIN], row[Column.MAX] = values.min(), values.max()
    return row
