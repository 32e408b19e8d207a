"""FlatParts: what this rank has of the parameters under `FullyShardedDataParallel`, the older FSDP.

Each of its modules keeps its parameters one behind the other in a flat one, of which every rank has an equal piece. With
`use_orig_params=False` the flat one is the parameter that the script sees. With `use_orig_params=True` those are the original
parameters, whose data is this rank's piece of each; in forwards and backwards other tensors are in their places.

Everything here reads attributes only, and searches the process for wrappers around a model that was wrapped after the start.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from torch_grad_exporter.torch_compat.fsdp import Flat, awaits_reduction, flat_of, flat_wrapper, is_flattened


@dataclass(frozen=True, slots=True)
class FlatPart:
    """What this rank has of one parameter. `wrapper`: the module that keeps it; `original`: which of those it is there.

    `original` is `None` of the flat parameter itself. `elements`: without padding. `copy`: see `TrackedParameter`.
    """

    wrapper: weakref.ref[torch.nn.Module]
    original: int | None
    elements: int
    padding: int
    sharded: bool
    copy: bool

    def parameter(self) -> torch.nn.Parameter | None:
        """Return the parameter, also while another tensor is in its place."""
        flat = self._flat()
        if flat is None or self.original is None:
            return None if flat is None else flat.parameter
        return None if flat.originals is None else flat.originals[self.original]

    def is_reduced(self) -> bool:
        """Return whether the gradient is that of the part, and not this rank's own of the whole."""
        flat = self._flat() if self.sharded else None
        return flat is None or not awaits_reduction(flat.parameter)

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient without padding."""
        return gradient.view(-1)[: self.elements] if self.padding and gradient.dim() == 1 else gradient

    def _flat(self) -> Flat | None:
        wrapper = self.wrapper()
        return None if wrapper is None else flat_of(wrapper)


class FlatParts:
    """Finds the parts of models. Holds wrappers weakly."""

    def __init__(self) -> None:
        self._found: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def of(self, roots: Iterable[torch.nn.Module]) -> Mapping[int, FlatPart | None]:
        """By the `id` of each parameter that is kept flat, what this rank has of it; `None` where that cannot be known."""
        kind, roots = flat_wrapper(), [*roots]
        if kind is None:
            return {}
        self._found.update(module for root in roots for module in root.modules() if isinstance(module, kind))
        parts, flattened = self._known(), {id(p) for root in roots for p in root.parameters() if is_flattened(p)}
        if not flattened <= parts.keys():  # the models were wrapped as a whole, later
            self._found.update(_anywhere(kind))
            parts = self._known()
        return {identity: parts.get(identity) for identity in flattened}

    def _known(self) -> dict[int, FlatPart]:
        parts: dict[int, FlatPart] = {}
        for wrapper in self._found:
            flat = flat_of(wrapper)
            if flat is not None:
                parts.update(_parts(wrapper, flat))
        return parts


def has_part(parameter: torch.Tensor, parts: Mapping[int, FlatPart | None]) -> bool:
    """Return whether this rank has elements of a parameter, as far as these say; where that is not known it is taken for none."""
    if not is_flattened(parameter):
        return True
    part = parts.get(id(parameter))
    return part is not None and part.elements > 0


def _parts(wrapper: torch.nn.Module, flat: Flat) -> Iterable[tuple[int, FlatPart]]:
    reference, copy = weakref.ref(wrapper), _is_later(flat.copies if flat.sharded else flat.group)
    if flat.originals is None:
        yield id(flat.parameter), FlatPart(reference, None, flat.elements[0], flat.padding, flat.sharded, copy)
        return
    for place, (parameter, elements) in enumerate(zip(flat.originals, flat.elements, strict=True)):
        yield id(parameter), FlatPart(reference, place, elements, 0, flat.sharded, copy)


def _is_later(group: object) -> bool:
    """Return whether this rank is not the first of a group. No collective."""
    return group is not None and torch.distributed.get_rank(group) > 0  # type: ignore[arg-type]


def _anywhere(kind: type[torch.nn.Module]) -> list[torch.nn.Module]:
    """All modules of a class in the process. Visits every object, which takes a tenth of a second."""
    # Not `isinstance`, which asks an object for its `__class__`: some answer with a side effect.
    return [instance for instance in gc.get_objects() if issubclass(type(instance), kind)]
