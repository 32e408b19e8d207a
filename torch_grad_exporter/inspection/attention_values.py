"""The values of one call of attention: a bound of its logits, and the largest logit and the entropy of some query rows.

Nothing here waits for a device. Queries and keys are read once; rows are picked as views, and their logits computed in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from torch_grad_exporter.inspection.measuring import dense
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.torch_compat.tensors import is_plain

# Query rows of each head that are computed, at most.
ROWS = 64

# Elements of logits and of keys that are computed at once; a head at least.
ELEMENTS = 1 << 22

# A mask that adds this or less leaves no weight: models add it, or the least number of the type, where -inf gives NaN.
HIDDEN = -1e4

# What a vector has: the bound or NaN, the largest logit, the entropies of rows added up, and how many rows these are.
WIDTH = 4


def of_call(  # noqa: PLR0917 - its parameters
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,  # noqa: ARG001
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Measure a call of `scaled_dot_product_attention`, which has these arguments.

    The bound is the largest product of a head's norms of queries and keys. The entropy is of the weights, with what the mask adds;
    logits are without that, where it does not hide them.

    Returns:
        A vector of shape (`WIDTH`,) on the device; None for tensors of other classes, such as sharded or nested ones.
    """
    if not (_plain(query) and _plain(key) and (attn_mask is None or _plain(attn_mask))):
        return None
    q, k = (tensor.detach()[(None,) * (3 - tensor.dim())] for tensor in (query, key))
    accumulate = torch.promote_types(q.dtype, torch.float32)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads = k.shape[-3] if enable_gqa else q.shape[-3]
    # Shapes from here on: (..., heads of keys, heads of queries that share them, length, width).
    q, k = _split(q, (heads, -1)), k.unsqueeze(-3)
    q_norm, k_norm = (torch.linalg.vector_norm(tensor, dim=-1, dtype=accumulate).amax(-1) for tensor in (q, k))
    bound = (q_norm * k_norm).amax() * abs(factor)
    shape: torch.Size = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])  # type: ignore[no-untyped-call]
    length, others = q.shape[-2], k.shape[-2]
    mask = attn_mask
    if mask is not None:
        mask = _split(mask.expand(*shape[:-2], shape[-2] * shape[-1], length, others), shape[-2:])
    q, k = q.expand(*shape, *q.shape[-2:]), k.expand(*shape, *k.shape[-2:])
    queries, keys = (torch.arange(count, device=q.device) for count in (length, others))
    later = keys > queries[_picked(length), None] if is_causal else None
    rows = []
    for q_part, k_part, mask_part in _parts(q, k, mask):
        logits = (q_part.to(accumulate) @ k_part.to(accumulate).transpose(-1, -2)) * factor
        biased, hidden = logits, later
        if mask_part is not None:
            boolean = mask_part.dtype is torch.bool
            biased, hidden = (logits, ~mask_part) if boolean else (logits + mask_part, mask_part <= HIDDEN)
        rows.append(_of_rows(logits, biased, hidden))
    return _together(bound, rows)


def of_logits(logits: torch.Tensor) -> torch.Tensor | None:
    """Measure logits, with what a mask has added, of shape (..., queries, keys); see `of_call`. The bound is unknown."""
    if not _plain(logits):
        return None
    # As one of several heads of queries, with keys of no width.
    logits = logits.detach()[(None,) * (4 - logits.dim())].unsqueeze(-3)
    rows = []
    for part, _, _ in _parts(logits, logits.transpose(-1, -2)[..., :0], None):
        values = part.to(torch.promote_types(part.dtype, torch.float32))
        rows.append(_of_rows(values, values, values <= HIDDEN))
    return _together(rows[0].new_full((), math.nan), rows)


def _split(tensor: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """Return a view with two dimensions in the place of that of the heads."""
    return tensor.unflatten(-3, heads)  # type: ignore[no-untyped-call,no-any-return]


def _picked(length: int) -> slice:
    """Return which query rows are computed: evenly spread, with the last one."""
    step = -(-length // ROWS)
    return slice((length - 1) % step, None, step)


def _parts(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield views of picked queries, of keys and mask, each of few elements or of one head of keys.

    Of a batch as many examples are picked, evenly spread, as their rows allow; of further dimensions the first element.
    """
    tensors = [q, k] if mask is None else [q, k, mask]
    extra = q.dim() - 5
    q, k, *masks = (tensor[(0,) * extra] if extra > 0 else tensor[(None,) * -extra] for tensor in tensors)
    q, *masks = (tensor[..., _picked(q.shape[-2]), :] for tensor in (q, *masks))
    examples = slice(None, None, -(-len(q) // max(1, ROWS // q.shape[-2])))
    q, k, *masks = (tensor[examples] for tensor in (q, k, *masks))
    heads, shared, rows, _ = q.shape[1:]
    each = shared * k.shape[-2] * (rows + k.shape[-1])
    of_batch, of_heads = max(1, ELEMENTS // (each * heads)), max(1, ELEMENTS // each)
    for batch in range(0, len(q), of_batch):
        for head in range(0, heads, of_heads):
            part = slice(batch, batch + of_batch), slice(head, head + of_heads)
            yield q[part], k[part], masks[0][part] if masks else None


def _of_rows(logits: torch.Tensor, biased: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Return the largest logit that is not hidden, the entropies of rows that have one, added up, and their number; shape (3,)."""
    if hidden is not None:
        logits, biased = logits.masked_fill(hidden, -torch.inf), biased.masked_fill(hidden, -torch.inf)
    known = (logits > -torch.inf).any(-1)
    entropies = torch.special.entr(biased.softmax(-1)).sum(-1)
    total = entropies.masked_fill(~known, 0.0).sum()
    return torch.stack([logits.amax(), total, known.sum().to(total.dtype)])


def _together(bound: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    parts = torch.stack(rows)
    return torch.cat([bound[None], parts[:, 0].amax()[None], parts[:, 1:].sum(0)]).to(wide(bound.device))


def _plain(tensor: object) -> bool:
    """Return whether these are all elements of a plain real tensor: of a sharded one a row's other keys may be elsewhere."""
    if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
        return False
    return tensor.dim() >= 2 and not tensor.is_nested and not tensor.is_complex() and dense(tensor) is not None
