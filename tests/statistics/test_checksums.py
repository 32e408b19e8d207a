"""Checksums of tensors: any bit counts, and the order of elements does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from torch_grad_exporter.statistics.checksums import ROW, Checksums, joined

KINDS = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
)  # fmt: skip
SIZES = ((5,), (), (0,), (3, 7), (ROW,), (ROW + 1,), (3, ROW + 5))


def checksum(*tensors: torch.Tensor) -> list[int]:
    """Return the checksums of tensors."""
    return joined(Checksums().of(tensors).double().numpy()).tolist()


def made(kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a seeded tensor of a type."""
    torch.manual_seed(0)
    return (torch.randn(shape, dtype=torch.complex128 if kind.is_complex else torch.float64) * 50).to(kind)


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_flipped_bit_shows(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    """A tensor has the checksum of its copy, and no other one after any single bit of it was flipped."""
    tensor = made(kind, shape)
    before = checksum(tensor)
    assert before == checksum(tensor.clone())
    if not tensor.numel():
        return
    bits = tensor.reshape(-1).view(torch.uint8)
    random = np.random.default_rng(0)
    places = [0, len(bits) - 1, *random.integers(len(bits), size=20 if len(bits) < ROW else 1).tolist()]
    for place, bit in itertools.product(places, range(8)):
        bits[place] ^= 1 << bit
        assert checksum(tensor) != before, (place, bit)
        bits[place] ^= 1 << bit
    assert checksum(tensor) == before


def test_is_the_weighted_sum_of_bits() -> None:
    """The checksum is the sum of the whole numbers with odd weights, as Python's integers give it; those of a row are distinct."""
    units = torch.eye(64, dtype=torch.int32)
    weights = checksum(*units)
    assert len(set(weights)) == 64
    assert all(weight % 2 for weight in weights)
    numbers = torch.randint(-(2**31), 2**31 - 1, (64,), dtype=torch.int32)
    expected = sum(w * x for w, x in zip(weights, numbers.tolist(), strict=True))
    assert checksum(numbers) == [expected % 2**64]


def test_exchanged_elements_show() -> None:
    """Exchanging any two elements, two signs, or two rows changes the checksum."""
    tensor = made(torch.float32, (2 * ROW + 9,))
    before, random = checksum(tensor), np.random.default_rng(0)
    for _ in range(50):
        i, j = random.choice(tensor.numel(), 2, replace=False).tolist()
        exchanged, turned = tensor.clone(), tensor.clone()
        exchanged[[i, j]] = tensor[[j, i]]
        turned[[i, j]] = -tensor[[i, j]]
        assert before not in (checksum(exchanged), checksum(turned))
    assert checksum(torch.cat((tensor[ROW : 2 * ROW], tensor[:ROW], tensor[2 * ROW :]))) != before
    assert checksum(-tensor) != before


def test_memory_layout_does_not_matter() -> None:
    """Only the elements in their logical order count, not how they lie in memory; a conjugate has the bits of its values."""
    tensor = made(torch.float32, (4, 6, 5, 3))
    wanted = checksum(tensor)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == wanted
    assert checksum(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == wanted
    complex_one = made(torch.complex64, (7,))
    assert checksum(complex_one.conj()) == checksum(complex_one.conj().resolve_conj())
