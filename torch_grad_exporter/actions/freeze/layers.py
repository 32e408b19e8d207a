"""FrozenLayers: freezes layers of the models, and gives back exactly what it froze.

A parameter is frozen if it required a gradient and no other layer has it: one that is tied stays trained. Freezing sets
`requires_grad` to false and takes the gradient away, so that optimizers pass the parameter over: no update, no weight decay. Their
state stays. Parameters are known by their place and `id`, as those that are tracked: one that has been replaced is forgotten.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
from torch_grad_exporter.errors import warn
from torch_grad_exporter.model import replicas
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers, owned_by
from torch_grad_exporter.model.parameters import TrackedParameter, parameters_of
from torch_grad_exporter.torch_compat.fsdp import follows_freezing


class NothingLeftError(RuntimeError):
    """Of a model or of an optimizer nothing would be trained any more."""


class FrozenLayers:
    """What is frozen of one exporter's models. `freeze` and `look` are for the training thread, all else for any."""

    def __init__(self, index: LayerIndex, optimizers: Optimizers, labels: FrozenLabels) -> None:
        self._index = index
        self._known = optimizers
        self.labels = labels
        # By layer what was frozen of it; replaced, never changed. What is given back is in the table only from the next sample on.
        self._held: Mapping[str, Sequence[TrackedParameter]] = {}
        self._given_back: Mapping[str, Sequence[TrackedParameter]] = {}
        self._lock = threading.RLock()
        self._turn = 0

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for _, optimizer in self._known.numbered()]

    def refuse(self) -> None:
        """Raise `RuntimeError` if freezing anything would harm the training."""
        reason = next(refusals(self._index, self._optimizers()), None)
        if reason is not None:
            raise RuntimeError(f"layers cannot be frozen: {reason}")

    @property
    def held(self) -> Collection[str]:
        """The layers that are frozen: another object whenever they are others."""
        return self._held

    def trained(self) -> dict[str, list[TrackedParameter]]:
        """Return the layers that are trained now, each with its parameters that require a gradient."""
        table = self._index.table
        layers: dict[str, list[TrackedParameter]] = {}
        for row, tracked in zip(table.layer_of.tolist(), table.tracked, strict=True):
            layers.setdefault(table.layers[row], []).append(tracked)
        trained: dict[str, list[TrackedParameter]] = {}
        for label, members in chain(layers.items(), self._given_back.items()):
            if label not in self._held and label not in trained:
                pairs = zip(members, self._parameters(members), strict=True)
                requiring = [key for key, parameter in pairs if parameter is not None and parameter.requires_grad]
                trained |= {label: requiring} if requiring else {}
        return trained

    def _parameters(self, tracked: Sequence[TrackedParameter]) -> list[torch.nn.Parameter | None]:
        """Return those that exist. While FSDP2 shows gathered ones in the places of some, the optimizers have these."""
        parameters = parameters_of(tracked)
        if self._index.fully_sharded and None in parameters:
            groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers())
            owned = {id(parameter): parameter for group in groups for parameter in group["params"]}
            return [owned.get(key.identity) if here is None else here for key, here in zip(tracked, parameters, strict=True)]
        return parameters

    def sharded(self) -> frozenset[str]:
        """Return the layers of which this rank has only a part."""
        table = self._index.table
        return frozenset(label for label, part in zip(table.layers, table.sharded.tolist(), strict=True) if part)

    def plan(self, labels: Iterable[str]) -> dict[str, list[TrackedParameter]]:
        """Return those of these layers that are trained, each with its parameters that no other layer has.

        Raises:
            NothingLeftError: Nothing would be left to train.
        """
        trained, times = self.trained(), Counter(chain.from_iterable(self._index.shared().values()))
        own = {label: [key for key in trained.get(label, ()) if times[key.identity] < 2] for label in labels}
        plan = {label: parameters for label, parameters in own.items() if parameters}
        if plan:
            now, going = (frozenset(key.identity for key in chain.from_iterable(each.values())) for each in (trained, plan))
            reason = emptied(self._index, self._optimizers(), now - going, now)
            if reason is not None:
                raise NothingLeftError(f"freezing {', '.join(plan)}: {reason}; leave one of its layers out")
        return plan

    # Changes, `freeze` and `look` on the training thread

    def freeze(self, plan: Mapping[str, Sequence[TrackedParameter]]) -> list[str]:
        """Freeze the layers of a plan, between two steps. Returns those of which a parameter was frozen.

        Raises:
            RuntimeError: None of the layers that stay has a gradient: the next backward would raise.
        """
        with self._lock:
            wanted = {label: tracked for label, tracked in plan.items() if label not in self._held}
            self._refuse_unreached({key.identity for key in chain.from_iterable(wanted.values())})
            frozen: dict[str, list[TrackedParameter]] = {}
            for label, tracked in wanted.items():
                for key, parameter in zip(tracked, self._parameters(tracked), strict=True):
                    if parameter is not None and parameter.requires_grad:  # what the user has frozen stays the user's
                        parameter.requires_grad_(False)
                        # None, and not zero: with a gradient of zero an optimizer goes on with momentum and weight decay.
                        parameter.grad = None
                        frozen.setdefault(label, []).append(key)
            self._held = {**self._held, **frozen}
            table = self._index.table
            here = {label for label, shown in zip(table.layers, table.shown.tolist(), strict=True) if shown}
            self.labels.add(frozen, here.intersection(frozen))  # other ranks report the others
        return [*frozen]

    def _refuse_unreached(self, going: Collection[int]) -> None:
        # Optimizers that clear gradients within the backward leave none: then it is unknown which layers are reached.
        parameters = [parameter for parameter in self._parameters(self._index.table.tracked) if parameter is not None]
        reached = [id(parameter) for parameter in parameters if parameter.requires_grad and parameter.grad is not None]
        if reached and all(identity in going for identity in reached):
            raise RuntimeError("no layer that stays has a gradient, so the next backward would fail; leave one out that has")

    def thaw(self, labels: Iterable[str]) -> None:
        """Give back what was frozen of these layers."""
        with self._lock:
            gone = {label: self._held[label] for label in labels if label in self._held}
            self._held = {label: members for label, members in self._held.items() if label not in gone}
            for parameter in self._parameters([*chain.from_iterable(gone.values())]):
                if parameter is not None:
                    parameter.requires_grad_(True)
            table = self._index.table
            waiting = {label: members for label, members in self._given_back.items() if label not in table.layers} | gone
            # Of a module that is gone there is nothing to train again.
            self._given_back = {
                label: members for label, members in waiting.items() if any(key.module() is not None for key in members)
            }
            self.labels.remove(gone, kept={*table.layers, *table.frozen, *self._given_back})

    def look(self) -> None:
        """Look at one layer, another one each time: if the script trains it again, it is no longer ours."""
        with self._lock:
            if not self._held:
                return
            self._turn = (self._turn + 1) % len(self._held)
            label = [*self._held][self._turn]
            existing = [parameter for parameter in self._parameters(self._held[label]) if parameter is not None]
            if existing and not any(parameter.requires_grad for parameter in existing):
                return
            self.thaw([label])
        warn("layer %s was thawed or replaced by the script, and is not kept frozen", label)


def refusals(index: LayerIndex, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[str]:
    """Yield why freezing layers of these models would harm the training, each with what to do about it.

    May visit every object of the process, which takes a tenth of a second.

    Seen on torch 2.13 with gloo: `DistributedDataParallel` waits for a gradient of every parameter that required one when it was
    made. Once one of them no longer does, the next backward ends with gradients that are not reduced, and the forward after it
    raises, with `static_graph=True` as well. With `find_unused_parameters=True` it goes on, also when the parameter is thawed.
    """
    wrappers: list[DistributedDataParallel] = []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for root in index.roots():
            around = replicas.wrapper_of(root) or replicas.anywhere(root)
            wrappers += [around] if around is not None else [wrapper for _, wrapper in replicas.within(root)]
    for wrapper in wrappers:
        if getattr(wrapper, "static_graph", False):
            yield (
                "DistributedDataParallel was made with static_graph=True, by which the set of parameters with a gradient must "
                "never change; make it with find_unused_parameters=True and without static_graph"
            )
        if not wrapper.find_unused_parameters:
            yield (
                "DistributedDataParallel waits for a gradient of every parameter that required one when it was made; make it with "
                "find_unused_parameters=True"
            )
        if wrapper.mixed_precision is not None:
            yield "DistributedDataParallel(mixed_precision=...) trains copies of the parameters; use torch.autocast"
    if index.table.tracked.flat:
        yield "FullyShardedDataParallel keeps the parameters in flat ones, which are trained as a whole; use fully_shard (FSDP2)"
    if index.fully_sharded and not follows_freezing():
        yield f"fully_shard of torch {torch.__version__} does not look at requires_grad again; use torch 2.6 or newer"
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        yield "LBFGS moves parameters without a gradient along the directions of earlier steps; use another optimizer"


def emptied(
    index: LayerIndex, optimizers: Iterable[torch.optim.Optimizer], left: frozenset[int], now: frozenset[int]
) -> str | None:
    """Return what would have nothing left to train; None if each model and each optimizer has.

    A loss that needs no gradient raises in its backward, and a GradScaler at an optimizer without gradients. Optimizers of one
    parameter each, such as those that step within the backward, are used without a GradScaler.

    `left`, `now`: the `id` of each parameter that would be trained, and that is trained now.
    """
    of_models: dict[int, set[int]] = {}
    for tracked in index.table.tracked:
        of_models.setdefault(tracked.model, set()).add(tracked.identity)
    for model, parameters in of_models.items():
        if parameters & now and not parameters & left:
            return f"no layer of {'the model' if len(of_models) == 1 else f'model {model}'} would be trained"
    owned = [owned_by(optimizer) for optimizer in optimizers]
    if len(owned) > 1 and all(len(parameters) == 1 for parameters in owned):
        return None
    emptied = any(parameters & now and not parameters & left for parameters in owned)
    return "an optimizer would have no layer left to train" if emptied else None
