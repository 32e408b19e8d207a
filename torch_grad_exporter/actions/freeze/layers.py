"""FrozenLayers: freezes layers of the models, and gives back exactly what it froze.

A parameter is frozen if it required a gradient and all the layers that have it are frozen. Freezing sets `requires_grad` to false
and takes the gradient away, so that optimizers pass the parameter over: no update, no weight decay. Their state stays. Parameters
are known by their place and `id`, as those that are tracked: one that has been replaced is forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from torch_grad_exporter.actions.freeze.refusals import emptied, refusal
from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import TrackedParameter, parameters_of

logger = logging.getLogger("torch_grad_exporter")


class NothingLeftError(RuntimeError):
    """Of a model or of an optimizer nothing would be trained any more."""


@dataclass(eq=False, slots=True)
class FrozenParameter:
    """A parameter of a layer that is frozen. `partners`: the other layers that have it, without which it stays trained."""

    one: TrackedParameter
    partners: frozenset[str]
    frozen: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Layers that are to be frozen, each with its parameters. `shown`: those that this rank reports."""

    layers: Mapping[str, Sequence[FrozenParameter]] = field(default_factory=dict)
    shown: frozenset[str] = frozenset()


class FrozenLayers:
    """What is frozen of one exporter's models. `plan` is for any thread, `freeze`, `thaw` and `look` for the one that trains.

    `thaw` and `close` may be called from any thread as well.
    """

    def __init__(self, index: LayerIndex, optimizers: Optimizers, labels: FrozenLabels) -> None:
        self._index = index
        self._known = optimizers
        self.labels = labels
        self._held: Mapping[str, Sequence[FrozenParameter]] = {}
        """Replaced, never changed, as the next one."""
        self._given_back: Mapping[str, Sequence[TrackedParameter]] = {}
        """What is trained again, though the table will have it only from the next sample on."""
        self._lock = threading.RLock()
        self._turn = 0

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for _, optimizer in self._known.numbered()]

    def refuse(self) -> None:
        """Raises `RuntimeError` where freezing anything would harm the training."""
        reason = refusal(self._index, self._optimizers())
        if reason is not None:
            raise RuntimeError(f"layers cannot be frozen: {reason}")

    def trained(self) -> dict[str, list[TrackedParameter]]:
        """The layers that are trained now and not frozen by an action, each with its parameters that require a gradient."""
        table, found = self._index.table, dict[str, list[TrackedParameter]]()
        for one, layer, parameter in zip(table.tracked, table.layer_of.tolist(), self._parameters(table.tracked), strict=True):
            label = table.layers[layer]
            if label not in self._held and parameter is not None and parameter.requires_grad:
                found.setdefault(label, []).append(one)
        for label, ones in self._given_back.items():
            pairs = zip(ones, self._parameters(ones), strict=True)
            again = [one for one, parameter in pairs if parameter is not None and parameter.requires_grad]
            if label not in found and label not in self._held and again:
                found[label] = again
        return found

    @property
    def held(self) -> Collection[str]:
        """The layers that are frozen: another object whenever these are other ones."""
        return self._held

    def _parameters(self, ones: Sequence[TrackedParameter]) -> list[torch.nn.Parameter | None]:
        """Those that exist. While FSDP2 shows gathered ones in the places of some, the optimizers have these."""
        found = parameters_of(ones)
        if self._index.fully_sharded and None in found:
            groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers())
            owned = {id(parameter): parameter for group in groups for parameter in group["params"]}
            found = [
                owned.get(one.identity) if parameter is None else parameter for one, parameter in zip(ones, found, strict=True)
            ]
        return found

    def sharded(self) -> frozenset[str]:
        """The layers of which this rank has only a part."""
        table = self._index.table
        return frozenset(label for label, part in zip(table.layers, table.sharded.tolist(), strict=True) if part)

    def plan(self, labels: Iterable[str], follows: Callable[[str], bool] = lambda _layer: True) -> Plan:
        """What freezing these layers comes to: those of them that are trained, and have a parameter that no other layer trains.

        `follows`: whether a layer is to be frozen that has nothing but parameters of other layers, and so no norm of its own.
        Raises `NothingLeftError` where nothing would be left to train.
        """
        trained = self.trained()
        partners = self._partners(trained, follows)
        wanted = {label: trained[label] for label in labels if label in trained}
        while True:
            frozen = frozenset((*self._held, *wanted))
            kept = {label: ones for label, ones in wanted.items() if any(partners[one.identity] <= frozen for one in ones)}
            if len(kept) == len(wanted):
                break
            wanted = kept
        self._refuse_all(trained, wanted, {one for one, others in partners.items() if others <= frozen})
        table = self._index.table
        shown = frozenset(label for label, here in zip(table.layers, table.shown.tolist(), strict=True) if here)
        return Plan(
            {label: [FrozenParameter(one, partners[one.identity]) for one in ones] for label, ones in wanted.items()}, shown
        )

    def _refuse_all(
        self, trained: Mapping[str, Sequence[TrackedParameter]], wanted: Collection[str], free: Collection[int]
    ) -> None:
        every = {one.identity: label for label, ones in trained.items() for one in ones}
        left = [one for one, label in every.items() if label not in wanted or one not in free]
        reason = emptied(self._index, self._optimizers(), left, every) if wanted else None
        if reason is not None:
            raise NothingLeftError(f"freezing {', '.join(wanted)}: {reason}; leave one of its layers out")

    def _partners(
        self, trained: Mapping[str, Sequence[TrackedParameter]], follows: Callable[[str], bool]
    ) -> dict[int, frozenset[str]]:
        """By the `id` of each parameter that is trained, the other layers without which it cannot be frozen."""
        members = self._index.shared()
        table = self._index.table
        label_of = {held.one.layer: label for label, ones in self._held.items() for held in ones}
        label_of |= {one.layer: table.layers[layer] for one, layer in zip(table.tracked, table.layer_of.tolist(), strict=True)}
        label_of |= {one.layer: label for label, ones in trained.items() for one in ones}
        tracked = {one.identity for one in (*table.tracked, *chain.from_iterable(trained.values()))}
        sharing: dict[int, list[str]] = {}
        for layer, parameters in members.items():
            for identity in parameters:
                sharing.setdefault(identity, []).append(layer)
        found: dict[int, frozenset[str]] = {}
        for label, ones in trained.items():
            for one in ones:
                others = [layer for layer in sharing.get(one.identity, ()) if label_of.get(layer) != label]
                # A layer without a label is trained only as a part of others, or is none that the exporter watches.
                needed = {label_of.get(layer, "") for layer in others if layer in label_of or not (
                    members[layer] <= tracked and follows(layer)
                )}  # fmt: skip
                found[one.identity] = frozenset(needed)
        return found

    # The training thread

    def freeze(self, plan: Plan) -> list[str]:
        """Freezes layers, between two steps; returns those of which a parameter was frozen, or waits for its other layers.

        Raises `RuntimeError` where none of the layers that stay has a gradient: the next backward would raise.
        """
        with self._lock:
            wanted = {label: held for label, held in plan.layers.items() if label not in self._held}
            self._refuse_unreached({held.one.identity for ones in wanted.values() for held in ones})
            self._held = {**self._held, **wanted}
            self._settle()
            found = [label for label, ones in wanted.items() if any(held.frozen for held in ones)]
            self._held = {label: ones for label, ones in self._held.items() if label not in wanted or label in found}
            self.labels.add(found, plan.shown.intersection(found))
        return found

    def _refuse_unreached(self, going: Collection[int]) -> None:
        """Whether a gradient has come to anything is known where optimizers do not clear them within the backward."""
        parameters = [parameter for parameter in self._parameters(self._index.table.tracked) if parameter is not None]
        reached = [id(parameter) for parameter in parameters if parameter.requires_grad and parameter.grad is not None]
        if reached and all(identity in going for identity in reached):
            raise RuntimeError("no layer that stays has a gradient, so the next backward would fail; leave one out that has")

    def thaw(self, labels: Iterable[str]) -> list[str]:
        """Gives back what was frozen of these layers; returns those that were."""
        with self._lock:
            gone = {label: self._held[label] for label in labels if label in self._held}
            self._held = {label: ones for label, ones in self._held.items() if label not in gone}
            for held in chain.from_iterable(gone.values()):
                self._thaw(held)
            table, ours = self._index.table, {label: [held.one for held in ones] for label, ones in gone.items()}
            waiting = {label: ones for label, ones in self._given_back.items() if label not in table.layers}
            # Of a module that is gone there is nothing to be trained again, and to be remembered.
            self._given_back = {label: ones for label, ones in (waiting | ours).items() if any(map(_exists, ones))}
            self._settle()
            self.labels.remove(gone, kept={*table.layers, *table.frozen, *self._given_back})
        return [*gone]

    def _settle(self) -> None:
        """Freezes the parameters all of whose layers are frozen, and gives back the others."""
        for ones in self._held.values():
            for held in ones:
                if held.partners <= self._held.keys():
                    self._freeze(held)
                else:
                    self._thaw(held)

    def _freeze(self, held: FrozenParameter) -> None:
        """Only what requires a gradient: what the user has frozen stays the user's."""
        (parameter,) = self._parameters([held.one])
        if parameter is not None and not held.frozen and parameter.requires_grad:
            parameter.requires_grad_(False)
            # None, and not zero: with a gradient of zero an optimizer goes on with momentum and weight decay.
            parameter.grad = None
            held.frozen = True

    def _thaw(self, held: FrozenParameter) -> None:
        (parameter,) = self._parameters([held.one])
        if parameter is not None and held.frozen:
            parameter.requires_grad_(True)
        held.frozen = False

    def look(self) -> str | None:
        """Looks at one layer, another one each time: whether the script trains it again, and then it is not ours any more."""
        with self._lock:
            if not self._held:
                return None
            self._turn = (self._turn + 1) % len(self._held)
            label = [*self._held][self._turn]
            ones = [held for held in self._held[label] if held.frozen]
            parameters = self._parameters([held.one for held in ones])
            if all(parameter is None or not parameter.requires_grad for parameter in parameters) and any(
                parameter is not None for parameter in parameters
            ):
                return None
            self.thaw([label])
        say(logger, logging.WARNING, "layer %s was thawed or replaced by the script, and is not kept frozen", label)
        return label


def _exists(one: TrackedParameter) -> bool:
    """Whether the module of a parameter does."""
    return one.module() is not None
