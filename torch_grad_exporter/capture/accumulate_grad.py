"""AccumulateGradNodes: reports backwards, and which parameters receive their gradients in them.

Every accumulation into a `.grad` by autograd runs through the parameter's AccumulateGrad node, whatever the backward runs through,
and `torch.autograd.grad` runs through none. So hooks on the nodes see all of a round's backwards, each before its first gradient is
written. Unlike post-accumulate-grad hooks they leave next to nothing behind when they are removed.

A node lives as long as something references it, and it references its parameter: nodes are hooked for single rounds. A node expects
gradients of the shape that its parameter had when it was made, and autograd uses it as long as it lives. So none is made of a
parameter without elements, which is gathered later, and none outlives a change of its parameter's shape: that is looked at before
each forward of a root.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from torch_grad_exporter.model.parameters import AT_ONCE, ParameterTable, TrackedParameter, TrackedParameters, parameters_of
from torch_grad_exporter.torch_compat.autograd import nodes_of

T = TypeVar("T")
_Kind = tuple[torch.Size, torch.dtype, torch.device]

Gradients = tuple[torch.Tensor | None, ...]

NodeHook = Callable[[TrackedParameter, Gradients], None]
"""Is called with the first parameter that a backward reaches, and what it is about to receive; guarded."""

Node = torch.autograd.graph.Node


def _nothing(_tracked: TrackedParameter, _gradients: Gradients) -> None:
    """Before there is anything to be called."""


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Nodes that are kept alive, whose they are, and what these parameters were when the nodes were taken; all in one order."""

    tracked: TrackedParameters
    parameters: Sequence[torch.nn.Parameter] = ()
    """The nodes keep them alive anyway."""
    nodes: Sequence[Node] = ()
    kinds: Sequence[_Kind] = ()
    places: Sequence[int] = ()
    """Their memory: autograd makes another node where it is replaced by that of another type, even if that is taken back."""

    @classmethod
    def of(cls, tracked: TrackedParameters, trained: dict[TrackedParameter, torch.nn.Parameter], before: _Held) -> _Held:
        """Return the nodes of what is trained of these parameters, and of the rest of them those that were held before."""
        parameters = [*trained.values()]
        nodes, kinds, places = nodes_of(parameters), _shared(map(_kind, parameters)), _places(parameters)
        if len(trained) == len(tracked):
            return cls(tracked, parameters, nodes, kinds, places)
        frozen = before.only({t for t in tracked if t not in trained and t.parameter() is not None})
        return cls(
            TrackedParameters((*trained, *frozen.tracked)),
            [*parameters, *frozen.parameters],
            [*nodes, *frozen.nodes],
            [*kinds, *frozen.kinds],
            [*places, *frozen.places],
        )

    def only(self, wanted: Collection[TrackedParameter]) -> _Held:
        """Return those of some parameters."""
        chosen = [tracked in wanted for tracked in self.tracked] if wanted else []

        def some(column: Sequence[T]) -> list[T]:
            return [*itertools.compress(column, chosen)]

        tracked = TrackedParameters(some(self.tracked))
        return _Held(tracked, some(self.parameters), some(self.nodes), some(self.kinds), some(self.places))

    def items(self) -> Iterator[tuple[TrackedParameter, Node]]:
        """Return the parameters with their nodes."""
        return zip(self.tracked, self.nodes, strict=True)


class AccumulateGradNodes:
    """Hooks on the AccumulateGrad nodes of parameters.

    `on_first`: what is called with the first parameter that a backward reaches. `table`: the table of which all parameters are
    hooked, `None` while none or only some of them are. `running`: whether a backward runs that writes gradients, as `BackwardHooks`
    sets it. `fired`: the parameters that it has reached.

    A parameter that is frozen has no node, and one that is thawed within the round is thawed too late to be hooked, as by a loop
    that trains two networks in turn. So the nodes of those that are frozen at times are held: a node outlives the freezing.

    What a signal's handler raises may end any method here between two statements: what was hooked and is not held is hooked again.
    """

    def __init__(self) -> None:
        self.on_first: NodeHook = _nothing
        self._held = _Held(TrackedParameters())
        self.hooked: dict[TrackedParameter, MutableMapping[int, object]] = {}
        """The hooks of each node that is hooked."""
        self._numbers: dict[TrackedParameter, int] = {}
        """The number of ours among them."""
        self.frozen_at_times: set[TrackedParameter] = set()
        """Those that were frozen at the end of a round, or thawed within one, as long as they are hooked."""
        self.table: ParameterTable | None = None
        self.running = False
        self.fired: list[TrackedParameter] = []

    def drop_changed(self) -> bool:
        """Release the nodes of parameters whose shape, type or device has changed since; return whether there are any.

        Also of one that is not in its place, since `torch.func.functional_call` puts others there for the time of a forward.
        """
        held = self._held
        # Another type or device is another place in memory, where that is known. This is asked in each sample.
        for start in range(0, len(held.parameters), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            now = held.parameters[part]
            shapes = [*map(operator.itemgetter(0), held.kinds[part])]
            if _places(now) != held.places[part] or [*map(_shape, now)] != shapes:
                break
        else:
            if 0 not in held.places or [*map(_kind, held.parameters)] == held.kinds:
                return False
        rows = zip(held.tracked, held.parameters, held.kinds, held.places, strict=True)
        changed = {t for t, p, kind, place in rows if _kind(p) != kind or _places([p]) != [place]}
        for tracked in changed:
            self._unhook(tracked)
        self._held = held.only({*held.tracked} - changed)
        self.frozen_at_times -= changed
        return bool(changed)

    def arm(self, table: ParameterTable, *, late: bool = False) -> None:
        """Hook the nodes of all parameters of the table, those that are frozen now as far as their nodes are held.

        `late`: a backward runs already.
        """
        self.drop_changed()
        trained = _trained(table.tracked)
        if late and self.table is not None:  # else not all were hooked before, as in a round that is sampled in addition
            self.frozen_at_times |= trained.keys() - {*self._held.tracked}
        self._hook_all(table.tracked, trained)
        self.table = table

    def arm_some(self, tracked: Iterable[TrackedParameter]) -> None:
        """Hook the nodes of these parameters, which are to report backwards, and of no others."""
        self.drop_changed()
        some = TrackedParameters(tracked)
        if self.table is not None:
            self._remember_frozen()
        self._hook_all(TrackedParameters(dict.fromkeys((*some, *self.frozen_at_times))), _trained(some), hooked={*some})
        self.table = None

    def _hook_all(
        self,
        tracked: TrackedParameters,
        trained: dict[TrackedParameter, torch.nn.Parameter],
        hooked: Collection[TrackedParameter] | None = None,
    ) -> None:
        before, held = self._held, _Held.of(tracked, trained, self._held)
        known = dict(before.items()) if self.hooked else {}
        wanted = {*held.tracked} if hooked is None else hooked
        for stale in self.hooked.keys() - wanted:
            self._unhook(stale)
        for owner, node in held.items():
            if owner in wanted and (owner not in self.hooked or known.get(owner) is not node):
                self._unhook(owner)
                owner.listener = self
                handle = node.register_prehook(owner)
                if (hooks := handle.hooks_dict_ref()) is not None:
                    self._numbers[owner], self.hooked[owner] = handle.id, hooks
        self._held = held
        self.frozen_at_times &= {*held.tracked}

    def hooks_all_of(self, table: ParameterTable) -> bool:
        """Return whether every trained parameter of the table is hooked."""
        if self.table is None:
            return False
        if self.table is table and len(self.hooked) == len(table.tracked):  # no others than those of the table are hooked
            return True
        return all(map(self.hooked.__contains__, table.tracked)) or not _trained(t for t in table.tracked if t not in self.hooked)

    def positions(self, table: ParameterTable) -> set[int]:
        """The positions in the table of the parameters that a backward has reached."""
        fired = {*self.fired}
        if fired.issuperset(table.tracked):
            return {*range(len(table.tracked))}
        return {position for position, tracked in enumerate(table.tracked) if tracked in fired}

    def disarm(self) -> None:
        """Remove the hooks and release the nodes, but for those of parameters that are frozen at times; idempotent."""
        if not self.hooked:
            return
        self._remember_frozen()
        self._unhook_all()
        self._held = self._held.only(self.frozen_at_times)

    def release(self) -> None:
        """Remove the hooks and release all nodes; idempotent, from any thread."""
        self._unhook_all()
        self._held, self.frozen_at_times = _Held(TrackedParameters()), set()

    def _remember_frozen(self) -> None:
        pairs = zip(self._held.tracked, parameters_of(self._held.tracked), strict=True)
        self.frozen_at_times = {t for t, p in pairs if p is not None and (t in self.frozen_at_times or not p.requires_grad)}

    def _unhook(self, tracked: TrackedParameter) -> None:
        tracked.listener = None
        hooks = self.hooked.pop(tracked, None)
        if hooks is not None:
            hooks.pop(self._numbers.pop(tracked, -1), None)

    def _unhook_all(self) -> None:
        self.table = None
        for tracked in [*self.hooked]:
            self._unhook(tracked)
        self.fired = []


def _trained(tracked: Iterable[TrackedParameter]) -> dict[TrackedParameter, torch.nn.Parameter]:
    """Return the parameters that are in their places and not frozen, and have elements."""
    several = tracked if isinstance(tracked, TrackedParameters) else [*tracked]
    pairs = zip(several, parameters_of(several), strict=True)
    return {t: p for t, p in pairs if p is not None and p.requires_grad and p.numel()}


_shape: Callable[[torch.Tensor], torch.Size] = operator.attrgetter("shape")

_kind: Callable[[torch.Tensor], _Kind] = operator.attrgetter("shape", "dtype", "device")


def _places(parameters: Collection[torch.Tensor]) -> list[int]:
    """Where the parameters' memory begins; 0 for those of kinds that do not tell."""
    try:
        return [*map(torch.Tensor.data_ptr, parameters)]
    except (RuntimeError, NotImplementedError):
        return [0 for _ in parameters]


def _shared(kinds: Iterable[_Kind]) -> list[_Kind]:
    """Return the same object for those that are equal."""
    known: dict[_Kind, _Kind] = {}
    return [known.setdefault(kind, kind) for kind in kinds]
