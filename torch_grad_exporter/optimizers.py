"""Optimizers: which of the process' optimizers concern us, their names, and who owns which parameter.

PyTorch's step hooks are global, so every optimizer of the process comes by; only those that own a tracked
parameter get a number. Held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import torch

from torch_grad_exporter.families import IntArray
from torch_grad_exporter.layers import LayerIndex, Plan

MANUAL = "manual"
"""The name under which `exporter.step()` counts where no optimizer's hook fires."""


class Optimizers:
    """Numbers optimizers in the order in which they first step, or are named by the user."""

    def __init__(self, index: LayerIndex, named: Mapping[str, torch.optim.Optimizer] | None = None) -> None:
        self._index = index
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int | None] = weakref.WeakKeyDictionary()
        self._last: tuple[weakref.ref[torch.optim.Optimizer], int | None] | None = None
        self._shared: dict[str, int] = {}
        self.names: list[str] = []
        self.settled = False
        """Whether a whole round is over, so that a parameter without an optimizer is one that nobody updates."""
        self._plan: Plan | None = None
        self._groups_seen = -1
        self._owners = self._groups = np.zeros(0, dtype=np.int64)
        for name, optimizer in (named or {}).items():
            self.names.append(name)
            self._numbers[optimizer] = len(self.names) - 1

    def number(self, optimizer: torch.optim.Optimizer, *, within_backward: bool = False) -> int | None:
        """The optimizer's number, `None` if it owns no tracked parameter. Looks closely once per optimizer.

        Optimizers of one kind that step within the backward, as one per parameter does, share a number.
        """
        if self._last is not None and self._last[0]() is optimizer:
            return self._last[1]
        try:
            found = self._numbers[optimizer]
        except KeyError:
            found = self._new(type(optimizer).__name__, within_backward=within_backward) if self.concerns(optimizer) else None
            self._numbers[optimizer] = found
        self._last = (weakref.ref(optimizer), found)
        return found

    def manual(self) -> int:
        """The number under which steps are counted that no optimizer's hook reports."""
        if MANUAL not in self.names:
            self.names.append(MANUAL)
        return self.names.index(MANUAL)

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer owns a tracked parameter."""
        tracked = {t.identity for t in self._index.plan.tracked}
        return any(id(p) in tracked for group in optimizer.param_groups for p in group["params"])

    def numbered(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """The optimizers that have a number and are alive."""
        return [(number, optimizer) for optimizer, number in self._numbers.items() if number is not None]

    def owners(self, plan: Plan) -> tuple[IntArray, IntArray]:
        """For each parameter of the plan its optimizer's number and its group's number, -1 for none.

        Groups are numbered over all optimizers. Both have shape (parameters,).
        """
        groups = [(number, group["params"]) for number, o in self.numbered() for group in o.param_groups]
        seen = hash((self._adopter, *((number, len(parameters), *map(id, parameters[:1])) for number, parameters in groups)))
        if plan is self._plan and seen == self._groups_seen:
            return self._owners, self._groups
        position = {t.identity: i for i, t in enumerate(plan.tracked)}
        owners, numbers = np.full((2, len(plan.tracked)), -1, dtype=np.int64)
        for group, (number, parameters) in enumerate(groups):
            for parameter in parameters:
                where = position.get(id(parameter))
                if where is not None:
                    owners[where], numbers[where] = number, group
        if self._adopter is not None:
            owners[owners == -1] = self._adopter
        if plan is not self._plan:
            self._forget_strangers()
        self._plan, self._groups_seen, self._owners, self._groups = plan, seen, owners, numbers
        return owners, numbers

    @property
    def _adopter(self) -> int | None:
        """The optimizer that parameters without one are counted with: the only one there is.

        Not with several models, of which one may be trained before the other's optimizer is seen.
        """
        if len(self.names) != 1:
            return None
        return 0 if self.names == [MANUAL] or (self.settled and self._index.models == 1) else None

    def _forget_strangers(self) -> None:
        """Looks again at optimizers that owned nothing of ours: the plan may have grown."""
        for optimizer, number in list(self._numbers.items()):
            if number is None:
                del self._numbers[optimizer]
        self._last = None

    def _new(self, name: str, *, within_backward: bool) -> int:
        if not within_backward:
            return self._add(name)
        if name not in self._shared:
            self._shared[name] = self._add(name)
        return self._shared[name]

    def _add(self, name: str) -> int:
        """A number for an optimizer; that of a dead one of the same name, if there is one.

        A loop that makes its optimizer anew every epoch must not make new series every epoch.
        """
        alive = set(self._numbers.values())
        variants = [number for number, other in enumerate(self.names) if other == name or other.startswith(f"{name}-")]
        for number in variants:
            if number not in alive and self.names[number] != MANUAL:
                return number
        self.names.append(f"{name}-{len(variants) + 1}" if variants else name)
        return len(self.names) - 1
