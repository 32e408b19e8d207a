"""Finds where freezing would harm the training, from the models and optimizers, without touching them.

Seen on torch 2.13 with gloo: `DistributedDataParallel` waits for a gradient of every parameter that required one when it was made.
Once one of them no longer does, the next backward ends with gradients that are not reduced, and the forward after it raises, with
`static_graph=True` as well. With `find_unused_parameters=True` it goes on, also when the parameter is thawed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_grad_exporter.model import replicas
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.torch_compat.fsdp import follows_freezing


def refusal(index: LayerIndex, optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    """Return why layers of these models cannot be frozen, with what to do about it; None if they can be.

    May visit every object of the process, which takes a tenth of a second.
    """
    roots = index.roots()
    for wrapper in _wrappers(roots):
        reason = _of_wrapper(wrapper)
        if reason is not None:
            return reason
    if index.table.tracked.flat:
        return "FullyShardedDataParallel keeps the parameters in flat ones, which are trained as a whole; use fully_shard (FSDP2)"
    if index.fully_sharded and not follows_freezing():
        return f"fully_shard of torch {torch.__version__} does not look at requires_grad again; use torch 2.6 or newer"
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        return "LBFGS moves parameters without a gradient along the directions of earlier steps; use another optimizer"
    return None


def _wrappers(roots: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Return those around the models, or within them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    wrappers: list[DistributedDataParallel] = []
    for root in roots:
        around = replicas.wrapper_of(root) or replicas.anywhere(root)
        wrappers += [around] if around is not None else [wrapper for _, wrapper in replicas.within(root)]
    return wrappers


def _of_wrapper(wrapper: DistributedDataParallel) -> str | None:
    if getattr(wrapper, "static_graph", False):
        return (
            "DistributedDataParallel was made with static_graph=True, by which the set of parameters with a gradient must never "
            "change; make it with find_unused_parameters=True and without static_graph"
        )
    if not wrapper.find_unused_parameters:
        return (
            "DistributedDataParallel waits for a gradient of every parameter that required one when it was made; make it with "
            "find_unused_parameters=True"
        )
    if wrapper.mixed_precision is not None:
        return "DistributedDataParallel(mixed_precision=...) trains copies of the parameters; use torch.autocast"
    return None


def emptied(index: LayerIndex, optimizers: Iterable[torch.optim.Optimizer], left: Iterable[int], all_: Iterable[int]) -> str | None:
    """Return what would have nothing left to train; None if each model and each optimizer has.

    A loss that needs no gradient raises in its backward, and a GradScaler at an optimizer without gradients. Optimizers of one
    parameter each, such as those that step within the backward, are used without a GradScaler.

    Args:
        index: The layers.
        optimizers: Those that train the models.
        left: The `id` of each parameter that would be trained.
        all_: The `id` of each parameter that is trained now.
    """
    remaining, trained = frozenset(left), frozenset(all_)
    of_models: dict[int, set[int]] = {}
    for tracked in index.table.tracked:
        of_models.setdefault(tracked.model, set()).add(tracked.identity)
    for model, parameters in of_models.items():
        if parameters & trained and not parameters & remaining:
            return (
                "no layer of the model would be trained" if len(of_models) == 1 else f"no layer of model {model} would be trained"
            )
    owned = [owned_by(optimizer) for optimizer in optimizers]
    if len(owned) > 1 and all(len(parameters) == 1 for parameters in owned):
        return None
    if any(parameters & trained and not parameters & remaining for parameters in owned):
        return "an optimizer would have no layer left to train"
    return None
