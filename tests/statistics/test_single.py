"""The norm of one gradient, or of its sum with another one, in pieces."""

from __future__ import annotations

import pytest
import torch

from torch_grad_exporter.statistics import single
from torch_grad_exporter.statistics.blocks import BLOCK_ELEMENTS, Scratch

LARGE = 5 * BLOCK_ELEMENTS


@pytest.mark.parametrize("shape", [(LARGE,), (1, LARGE), (LARGE // 8, 8), (1, 1, LARGE // 2, 2)], ids=str)
def test_a_large_sum_is_made_in_pieces(shape: tuple[int, ...]) -> None:
    """Whatever its first dimension is: none of the pieces is much larger than a block, and their squares add up."""
    first, second = torch.randn(2, *shape)
    parts = [float(part) for part in single.norms(first, second, Scratch())]
    assert len(parts) >= LARGE // BLOCK_ELEMENTS
    expected = float((first.double() + second.double()).norm())
    assert sum(part * part for part in parts) ** 0.5 == pytest.approx(expected, rel=1e-6)


def test_a_large_sum_that_is_not_contiguous() -> None:
    """A transposed gradient is cut along its first dimension; nothing is copied whole."""
    first, second = torch.randn(2, 8, LARGE // 8)
    parts = [float(part) for part in single.norms(first.t(), second.t(), Scratch())]
    assert len(parts) >= LARGE // BLOCK_ELEMENTS
    assert sum(part * part for part in parts) ** 0.5 == pytest.approx(float((first.double() + second.double()).norm()), rel=1e-6)


def test_one_gradient_is_one_piece_and_none_is_none() -> None:
    """Without a sum there is nothing to save; what is empty has no norm to add."""
    gradient = torch.randn(LARGE)
    (norm,) = single.norms(gradient, None, Scratch())
    assert float(norm) == pytest.approx(float(gradient.double().norm()), rel=1e-6)
    assert list(single.norms(torch.empty(0), None, Scratch())) == []
