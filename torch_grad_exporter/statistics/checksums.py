"""Checksums of the bits of tensors, made on their device: equal for equal tensors, and never equal after one bit has flipped.

A tensor is read as signed or unsigned whole numbers x of at most 32 bits, in rows of `ROW`. Its checksum is the sum of u_r v_i x_ri
modulo 2^64, with odd weights: a flipped bit changes it by an odd number times a power of two below 2^32. All weights of a row
are different, so exchanged elements show as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

# Elements of a row, and rows that are multiplied at once: on the host as much as stays in a core's cache.
ROW, ROWS_AT_ONCE = 1 << 16, 64

# Whole numbers of 16 bits in which a checksum travels: floats of 32 bits hold each of them.
PIECES = 4

Sums = npt.NDArray[np.uint64]

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_STEP = 0x1E3779B97F4A7C15  # odd, and without a pattern in its bits
_Whole = TypeVar("_Whole", torch.Tensor, npt.NDArray[np.int64])


class Checksums:
    """Makes checksums; keeps the weights and the memory for products of each device. Belongs to one thread."""

    def __init__(self) -> None:
        self._kept: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the checksums of plain, dense tensors of one device, cut into pieces: shape (tensors * `PIECES`,).

        Starts operations on the device and waits for none. Raises what torch raises for a tensor that cannot be read so.
        """
        sums = torch.stack([self._of(tensor) for tensor in tensors])
        return torch.stack([(sums >> 16 * piece) & 0xFFFF for piece in range(PIECES)], dim=1).reshape(-1)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        bits = bits.view(_WHOLE[bits.element_size()])
        weights, products = self._for(bits.device)
        size = bits.numel()
        whole, of_rows = size // ROW, []
        for start in range(0, whole, len(products)):
            rows = bits[start * ROW : min(start + len(products), whole) * ROW].view(-1, ROW)
            of_rows.append(torch.mul(rows, weights, out=products[: len(rows)]).sum(1))
        if rest := size - whole * ROW:
            of_rows.append(torch.mul(bits[-rest:], weights[:rest], out=products[0, :rest]).sum(0, keepdim=True))
        if size <= ROW:  # the weight of the only row would be the same for all tensors
            return of_rows[0][0] if of_rows else bits.new_zeros((), dtype=torch.int64)
        sums = torch.cat(of_rows)
        return (sums * _weights(torch.arange(len(sums), device=bits.device))).sum()

    def _for(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._kept:
            rows = 1 if device.type == "cpu" else ROWS_AT_ONCE
            products = torch.empty((rows, ROW), dtype=torch.int64, device=device)
            self._kept[device] = _weights(torch.arange(ROW, device=device)), products
        return self._kept[device]


def joined(pieces: npt.NDArray[np.float64]) -> Sums:
    """Return the checksums that `Checksums.of` has cut into pieces, shape (tensors,)."""
    whole = pieces.astype(np.uint64).reshape(-1, PIECES)
    sums: Sums = np.bitwise_or.reduce(whole << (16 * np.arange(PIECES, dtype=np.uint64)), axis=1)
    return sums


def combined(sums: Sums) -> int:
    """Return the checksum of several in their order."""
    return int(np.add.reduce(sums * _weights(np.arange(len(sums), dtype=np.int64)).view(np.uint64)))


def _weights(numbers: _Whole) -> _Whole:
    """Return an odd number below 2^31 for each; the same on every device."""
    return ((numbers + 1) * _STEP >> 20) & 0x7FFFFFFF | 1
