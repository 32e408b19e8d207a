"""Gradients made ready for measuring: dense, real, local, and the small ones of one shape stacked.

A model of many small tensors is bound by the number of calls, not by bytes, so gradients of the same
shape and type share their calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from torch_grad_exporter.layers import Plan

STACKED_ELEMENTS = 1 << 16
"""Elements of a stack at most: 256 KiB of float32 stay in a core's cache between the passes."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Gradients of one shape as one tensor.

    `values`: shape (tensors, rows, columns). With `units` a row is an output unit, otherwise rows mean
    nothing. `implied_zeros`: elements of a sparse gradient that are not stored, and so are zero.
    """

    positions: tuple[int, ...]
    values: torch.Tensor
    units: bool
    implied_zeros: int = 0


def dense_local(gradient: torch.Tensor, *, keep_sparse: bool) -> torch.Tensor:
    """The gradient without graph, as this rank's own plain, real tensor; the stored values if sparse.

    A sparse gradient is coalesced first: entries that stand twice must be added before they are squared.
    """
    gradient = gradient.detach()
    to_local = getattr(gradient, "to_local", None)
    if to_local is not None:
        gradient = to_local()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values() if keep_sparse else gradient.to_dense()
    elif gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    # Of the types of one byte torch knows little more than how to convert them; float32 holds each of their values.
    return gradient.float() if gradient.element_size() == 1 else gradient.resolve_neg()


def batches(plan: Plan, gradients: Iterable[tuple[int, torch.Tensor]]) -> Iterator[Batch]:
    """Groups `(position in the plan, gradient)` of one device into batches; empty gradients are left out."""
    stacks: dict[tuple[object, ...], list[tuple[int, torch.Tensor]]] = {}
    for position, gradient in gradients:
        tracked = plan.tracked[position]
        layout = tracked.units
        values = dense_local(gradient, keep_sparse=layout is None)
        if values.numel() == 0:
            if tracked.elements:
                yield Batch((position,), values.new_zeros((1, 1, 1)), units=False, implied_zeros=tracked.elements - 1)
            continue
        rows = layout.rows(values) if layout is not None else values.reshape(1, -1)
        implied = tracked.elements - values.numel() if gradient.is_sparse else 0
        if implied or rows.numel() > STACKED_ELEMENTS // 2:
            yield Batch((position,), rows.unsqueeze(0), layout is not None, implied)
        else:
            stacks.setdefault((rows.shape, rows.dtype, layout is not None), []).append((position, rows))
    for (_, _, units), members in stacks.items():
        most = max(1, STACKED_ELEMENTS // members[0][1].numel())
        for start in range(0, len(members), most):
            part = members[start : start + most]
            yield Batch(tuple(p for p, _ in part), torch.stack([rows for _, rows in part]), bool(units))
