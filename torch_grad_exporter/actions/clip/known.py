"""KnownOptimizers: the optimizers that train something of the models: their names, and which of them steps in place of which.

An optimizer may step within the step of another one that owns all that it owns. Where it owns all that the other owns, as in
Lookahead, what it uses is what is to be clipped, since the other one may have changed gradients before. Where it owns a part, the
other one may train the rest by itself: then all is clipped as a whole, before the step of the other.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_grad_exporter.actions.clip.clipping import Clipping
from torch_grad_exporter.actions.clip.owned import OwnedParameters
from torch_grad_exporter.actions.clip.skipping import Told, untell
from torch_grad_exporter.capture.torch_hooks import HookHandle
from torch_grad_exporter.model.optimizers import owned_by


@dataclass(slots=True, eq=False)
class KnownOptimizer:
    """What is known of one optimizer. `name`: empty as long as it has owned nothing of the models.

    `wraps`: it steps by calling a step within its own on all that it owns, before which gradients are clipped. `covered`: in the
    step that runs now, gradients were clipped when it began. `told`: what a fused optimizer is told while it is to leave its step
    out.
    """

    parameters: OwnedParameters
    name: str = ""
    clipping: Clipping | None = None
    handle: HookHandle | None = None
    wraps: bool = False
    covered: bool = False
    told: list[Told] = field(default_factory=list)

    def untell(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends whatever it is told."""
        while self.told:
            untell(optimizer, self.told.pop())


class KnownOptimizers:
    """Holds models and optimizers weakly. Optimizers may come and go on any thread, and step on those that train.

    `named`: those that the user has named. `gone`: keeps the memory of one that is gone, by its name; raises nothing.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        named: Mapping[str, torch.optim.Optimizer],
        gone: Callable[[str, Clipping], object],
    ) -> None:
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._named = {name: weakref.ref(optimizer) for name, optimizer in named.items()}
        self._keep = gone
        self._known: dict[int, tuple[weakref.ref[torch.optim.Optimizer], KnownOptimizer]] = {}
        self.saved: dict[str, Mapping[str, Any]] = {}
        """By name, what an optimizer that has not stepped yet goes on with."""

    def of(self, optimizer: torch.optim.Optimizer) -> KnownOptimizer | None:
        """The optimizer's record, `None` if it owns nothing of the models."""
        one = self.seen(optimizer)
        if one is None:
            one = KnownOptimizer(OwnedParameters(self._models, optimizer))
            self._known[id(optimizer)] = weakref.ref(optimizer, functools.partial(self._gone, id(optimizer))), one
        if not one.name and one.parameters.found() is not None:
            one.name = self._name(optimizer)
        return one if one.name else None

    def seen(self, optimizer: torch.optim.Optimizer) -> KnownOptimizer | None:
        """The record, also of one that owns nothing of the models; `None` if it has not stepped yet."""
        known = self._known.get(id(optimizer))
        return known[1] if known is not None and known[0]() is optimizer else None

    def all(self) -> list[tuple[torch.optim.Optimizer, KnownOptimizer]]:
        """Those that are alive."""
        known = [*self._known.values()]  # at once: other threads may make and drop optimizers
        return [(optimizer, one) for reference, one in known if (optimizer := reference()) is not None]

    def clippings(self) -> dict[str, Clipping]:
        """By name of the optimizer."""
        return {one.name: one.clipping for _, one in [*self._known.values()] if one.clipping is not None}

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()

    def outer(self, optimizer: torch.optim.Optimizer, around: torch.optim.Optimizer | None) -> KnownOptimizer | None:
        """The record of `around`, if that owns all that this one owns."""
        outer = None if around is None else self.seen(around)
        if around is None or outer is None:
            return None
        return outer if around is optimizer or owned_by(optimizer) <= owned_by(around) else None

    def clipped_elsewhere(
        self, one: KnownOptimizer, optimizer: torch.optim.Optimizer, around: torch.optim.Optimizer | None
    ) -> bool:
        """Whether its gradients were clipped already, or will be before a step within this one. `around`: as of `outer`.

        That a step calls another one is not known before it has done so: its first one is clipped when it begins.
        """
        outer = self.outer(optimizer, around)
        if outer is one:  # its step has called that of its base class
            one.wraps = True
            return one.covered
        covered = outer is not None and outer.covered
        if outer is not None and around is not None:
            outer.wraps = outer.wraps or owned_by(around) <= owned_by(optimizer)
            self._hand_over(outer, one)
        one.covered = covered or not one.wraps
        return covered or one.wraps

    def _hand_over(self, outer: KnownOptimizer, one: KnownOptimizer) -> None:
        """One that is clipped within the step of another goes on with its memory, under its name."""
        if outer.wraps and not outer.covered and outer.clipping is not None:
            if one.clipping is None:
                self.saved[outer.name], one.name = outer.clipping.state(copied=False), outer.name
            outer.clipping = None

    def _gone(self, number: int, _reference: object) -> None:
        """One that takes its place, as where a loop makes a new one each epoch, goes on with its memory."""
        _, one = self._known.pop(number, (None, None))
        if one is not None and one.clipping is not None:
            self._keep(one.name, one.clipping)

    def _name(self, optimizer: torch.optim.Optimizer) -> str:
        """The name that the user gave, else that of its class, with a number from the second of a class on."""
        given = next((name for name, reference in self._named.items() if reference() is optimizer), None)
        name = given or self._replaced(optimizer)
        if name is not None:
            return name
        kind, taken = type(optimizer).__name__, {one.name for _, one in [*self._known.values()] if one.name}
        names = (kind if number == 1 else f"{kind}-{number}" for number in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)

    def _replaced(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The name of one of the same kind with the same parameters, in whose place this one comes, with its memory.

        A scheduler holds its optimizer in a cycle: where a loop makes both anew, those before are there for a while.
        """
        for other, one in self.all():
            if one.name and type(other) is type(optimizer) and owned_by(other) == owned_by(optimizer):
                name, clipping = one.name, one.clipping
                one.name, one.clipping, one.wraps = "", None, False
                if clipping is not None:
                    self.saved[name] = clipping.state(copied=False)
                return name
        return None
