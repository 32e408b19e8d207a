"""Optimizers: which of the process' optimizers concern us, their names, and who owns which parameter.

PyTorch's step hooks are global, so they run for every optimizer of the process, on whichever thread it steps; only those that
own a tracked parameter get a number. `concerns` answers which those are, from any thread and without changing anything;
everything else belongs to the training thread. Optimizers are held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable, parameters_of

MANUAL = "manual"
"""The name under which `exporter.step()` counts where no optimizer's hook fires."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Whether an optimizer concerns us, as long as the table and the optimizer's groups are the same."""

    table: ParameterTable
    groups: tuple[tuple[int, ...], ...]
    concerned: bool


class Optimizers:
    """Numbers optimizers in the order in which they first step, or are named by the user."""

    def __init__(self, index: LayerIndex, named: Mapping[str, torch.optim.Optimizer] | None = None) -> None:
        self._index = index
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._references: list[tuple[int, weakref.ref[torch.optim.Optimizer]]] = []
        """The same in a list: each sample asks for all of them, and a weak dictionary takes ten times as long."""
        self._answers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Answer] = weakref.WeakKeyDictionary()
        self._tools: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Answer] = weakref.WeakKeyDictionary()
        """Those that were seen to step within the step of another."""
        self._silent: dict[int | None, weakref.ref[torch.optim.Optimizer]] = {}
        self._last: tuple[weakref.ref[torch.optim.Optimizer], int] | None = None
        self._shared: dict[str, int] = {}
        self.names: list[str] = []
        self.on_foreign: Callable[[torch.optim.Optimizer], object] | None = None
        """Called with an optimizer that was found to concern nothing here, on its own thread."""
        self.copying: set[int] = set()
        """Those that own copies of the parameters: what they see is in no gradient of the model."""
        self.settled = False
        """Whether a whole round is over, so that a parameter without an optimizer is known to be updated by none."""
        self._overlap = False
        """Whether two optimizers own the same parameter."""
        self._table: ParameterTable | None = None
        self._groups_seen = -1
        self._groups_listed: list[object] = []
        self._owners = np.zeros(0, dtype=np.int64)
        for name, optimizer in (named or {}).items():
            self.names.append(name)
            self._enter(optimizer, len(self.names) - 1)
            self._silent[len(self.names) - 1] = weakref.ref(optimizer)

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer has a number, or owns a parameter that is trained, or copies of all of them.

        Changes only its cache of answers, in single operations on a dictionary; from any thread.
        """
        last = self._last
        if (last is not None and last[0]() is optimizer) or optimizer in self._numbers:
            return True
        table, groups = self._index.table, _groups(optimizer)
        known = self._answers.get(optimizer)
        if known is not None and known.table is table and known.groups == groups:
            return known.concerned
        try:
            changed = self._index.changed()
            # Of models that are gone, the identities of parameters may be those of others by now.
            concerned = bool(self._index.roots()) and (
                _owns_of(table, optimizer) or not owned_by(optimizer).isdisjoint(map(id, changed)) or has_copies(optimizer, changed)
            )
        except (RuntimeError, LookupError):  # another thread is changing a model: call it again
            return False
        self._answers[optimizer] = _Answer(table, groups, concerned)
        if not concerned and self.on_foreign is not None:
            self.on_foreign(optimizer)
        return concerned

    def number(
        self, optimizer: torch.optim.Optimizer, *, within_backward: bool = False, inside: frozenset[int] = frozenset()
    ) -> int | None:
        """Return the optimizer's number; `None` if it does not concern us, and then nothing is changed.

        Optimizers of one kind that step within the backward, as one per parameter does, share a number. One that steps
        `inside` the step of another, on nothing but what that one owns, works for that one and has none.
        """
        if self._last is not None and self._last[0]() is optimizer:
            return self._last[1]
        number = self._numbers.get(optimizer)
        if number is None and self.concerns(optimizer) and not self._is_tool(optimizer, inside):
            number = self._number_new(optimizer, within_backward=within_backward)
        if number is not None:
            self._silent.pop(number, None)
            self._last = weakref.ref(optimizer), number
        return number

    @property
    def has_tools(self) -> bool:
        """Whether an optimizer steps within the step of another one."""
        return bool(self._tools)

    def _is_tool(self, optimizer: torch.optim.Optimizer, inside: frozenset[int]) -> bool:
        """Return whether it steps, or did so under the same table, within the step of another one that owns all that it owns."""
        answer = _Answer(self._index.table, _groups(optimizer), concerned=False)
        if any(number in inside and owned_by(optimizer) <= owned_by(outer) for number, outer in self.numbered()):
            self._tools[optimizer] = answer
        return self._tools.get(optimizer) == answer

    def _number_new(self, optimizer: torch.optim.Optimizer, *, within_backward: bool) -> int | None:
        """Return the number of an optimizer that has not stepped before."""
        if not _owns_of(self._index.table, optimizer) and not _owns_of(self._index.refresh(within_step=within_backward), optimizer):
            return None
        number = self._of_wrapper(optimizer)
        if number is None:
            number = self._new(type(optimizer).__name__, within_backward=within_backward)
        if has_copies(optimizer, parameters_of(self._index.table.tracked)):
            self.copying.add(number)
        self._enter(optimizer, number)
        return number

    def _enter(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        others = [(known, weakref.ref(alive)) for alive, known in self._numbers.items() if alive is not optimizer]
        self._references = [*others, (number, weakref.ref(optimizer))]
        self._numbers[optimizer] = number

    def _of_wrapper(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the number of a named optimizer that never reports a step itself, since it only wraps this one."""
        for number, reference in self._silent.items():
            wrapper = reference()
            if wrapper is not None and wrapper is not optimizer and owned_by(wrapper) == owned_by(optimizer):
                self._numbers.pop(wrapper, None)
                return number
        return None

    @property
    def reporting(self) -> bool:
        """Whether any optimizer's steps were seen by a hook."""
        return any(number not in self._silent for number, _ in self.numbered())

    def manual(self) -> int:
        """Return the number under which steps are counted that no optimizer's hook reports."""
        if MANUAL not in self.names:
            self.names.append(MANUAL)
        return self.names.index(MANUAL)

    @property
    def manual_number(self) -> int | None:
        """The number of `manual`, if it has one."""
        return self.names.index(MANUAL) if MANUAL in self.names else None

    def numbered(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """Return the optimizers that have a number and are alive."""
        return [(number, optimizer) for number, reference in self._references if (optimizer := reference()) is not None]

    def owners(self, table: ParameterTable, stepped: Collection[int] = (), *, new_sample: bool = False) -> IntArray:
        """For each parameter of the table its optimizer's number, -1 for none; of several owners one of those that `stepped`.

        Parameters that were replaced within a group are looked for in each `new_sample` only.
        """
        # Parameters without an optimizer are counted with the only one there is, but with several models only where that is known:
        # of these one may be trained before the other's optimizer is seen.
        alone = self.names == [MANUAL] or bool(self.copying) or (self.settled and self._index.models == 1)
        adopter = 0 if len(self.names) == 1 and alone else None
        groups: list[tuple[int, list[torch.nn.Parameter]]] = []
        listed: list[object] = [adopter]
        for number, optimizer in self.numbered():
            for group in optimizer.param_groups:
                parameters = group["params"]
                groups.append((number, parameters))
                listed += number, id(parameters), len(parameters)
        if table is self._table and listed == self._groups_listed and not (new_sample or (self._overlap and stepped)):
            return self._owners
        identities: list[object] = [adopter]
        for number, parameters in groups:
            identities += number, tuple(map(id, parameters))
        seen = hash(tuple(identities))
        self._groups_listed = listed
        if table is self._table and seen == self._groups_seen and not (self._overlap and stepped):
            return self._owners
        owners = self._assigned(table, groups, stepped)
        if adopter is not None:
            owners[owners == -1] = adopter
        # At once: what a signal's handler raises must not leave the owners of another table.
        self._table, self._groups_seen, self._owners = table, seen, owners
        return owners

    def _assigned(
        self, table: ParameterTable, groups: list[tuple[int, list[torch.nn.Parameter]]], stepped: Collection[int]
    ) -> IntArray:
        """Return the owner of each parameter; see `owners`."""
        position = table.tracked.positions
        owners = np.full(len(table.tracked), -1, dtype=np.int64)
        overlap = False
        for number, parameters in sorted(groups, key=lambda group: group[0] in stepped):
            owned = [where for parameter in parameters if (where := position.get(id(parameter))) is not None]
            overlap |= not np.isin(owners[owned], (-1, number)).all()
            owners[owned] = number
        self._overlap = overlap
        return owners

    def positions_of(self, table: ParameterTable, number: int) -> list[int]:
        """Return the positions in the table of what an optimizer owns."""
        owned: list[int] = np.flatnonzero(self.owners(table, {number}) == number).tolist()
        return owned

    def _new(self, name: str, *, within_backward: bool) -> int:
        if not within_backward:
            return self._add(name)
        if name not in self._shared:
            self._shared[name] = self._add(name)
        return self._shared[name]

    def _add(self, name: str) -> int:
        """Return a number for an optimizer; that of a dead one of the same name, if there is one.

        A loop that makes a new optimizer every epoch must not make new series every epoch.
        """
        alive = set(self._numbers.values())
        variants = [number for number, other in enumerate(self.names) if other == name or other.startswith(f"{name}-")]
        for number in variants:
            if number not in alive and self.names[number] != MANUAL:
                return number
        self.names.append(f"{name}-{len(variants) + 1}" if variants else name)
        return len(self.names) - 1


def owned_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the `id` of each parameter that an optimizer owns."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def positions_in(table: ParameterTable, optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the positions in the table of the parameters in an optimizer's groups, in their order."""
    known = table.tracked.positions
    return [known[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in known]


def _groups(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
    """Return what changes when parameters are added to an optimizer or replaced. Does not visit each of them."""
    every = (group["params"] for group in optimizer.param_groups)
    return tuple((id(group), len(group), *map(id, (group[:1] + group[-1:]))) for group in every)


def _owns_of(table: ParameterTable, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer owns a parameter of the table, even if that is out of its place, or copies of all."""
    return bool(positions_in(table, optimizer)) or has_copies(optimizer, parameters_of(table.tracked))


def has_copies(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter | None]) -> bool:
    """Return whether the optimizer owns a copy in another type of each parameter: a half-precision model's master weights."""
    copies = [p for group in optimizer.param_groups for p in group["params"]]
    return 0 < len(copies) == len(parameters) and all(
        p is not None and p.shape == c.shape and p.dtype != c.dtype for p, c in zip(parameters, copies, strict=True)
    )
