"""OwnedParameters: the parameters of the models that one optimizer trains, in the order of the models. Holds the models weakly."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch

from torch_grad_exporter.actions.clip.table import ParameterGroups, entry_of, structure_of
from torch_grad_exporter.model.names import Place, places_of
from torch_grad_exporter.model.optimizers import has_copies


class NothingOwnedError(LookupError):
    """An optimizer has no parameter of the models any more."""


class OwnedParameters:
    """Follows the models and the optimizer: what is added, replaced or handed over later is found at the next step.

    An optimizer that owns copies of all parameters, as of a model in half precision, is clipped in these: they have its gradients.
    """

    def __init__(self, models: Mapping[str, weakref.ref[torch.nn.Module]], optimizer: torch.optim.Optimizer) -> None:
        self._models = models
        self._optimizer = weakref.ref(optimizer)
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._structure: tuple[list[int], ...] | None = None
        self._groups: ParameterGroups | None = None

    def groups(self) -> ParameterGroups:
        """The groups now; the same object as long as nothing has changed. Raises `NothingOwnedError` where there are none."""
        found = self.found()
        if found is None:
            raise NothingOwnedError("the optimizer has no parameter of the models")
        return found

    def found(self) -> ParameterGroups | None:
        """The groups now, `None` where the optimizer owns nothing of the models."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        modules = [module for reference in self._modules if (module := reference()) is not None]
        owned = [*map(id, itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))]
        structure = (*structure_of(modules), owned)
        if structure != self._structure or (self._groups is not None and not self._groups.settled):
            models = {name: model for name, reference in self._models.items() if (model := reference()) is not None}
            modules = [module for model in models.values() for module in model.modules()]
            self._modules = [weakref.ref(module) for module in modules]
            self._structure = (*structure_of(modules), owned)
            places = [*places_of((number, *named) for number, named in enumerate(models.items()))]
            self._groups = _groups(places, optimizer, set(owned))
        return self._groups


def _groups(places: Sequence[Place], optimizer: torch.optim.Optimizer, owned: set[int]) -> ParameterGroups | None:
    mine: list[tuple[Place, torch.Tensor]] = [(place, place.parameter) for place in places if id(place.parameter) in owned]
    if not mine and has_copies(optimizer, [place.parameter for place in places]):
        copies = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        mine = [*zip(places, copies, strict=True)]
    return ParameterGroups.of(entry_of(one.name, one.layer, its, one.module) for one, its in mine) if mine else None
