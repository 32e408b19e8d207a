"""AccumulateGradNodes: tells which parameters just received their gradients, whatever the backward runs through.

Every accumulation into a `.grad` by autograd runs through the parameter's AccumulateGrad node. So its hook sees all of them in a
sampled round, also those of a backward that nothing has announced. Unlike post-accumulate-grad hooks, hooks on the nodes leave
next to nothing behind when they are removed. A node lives as long as something references it, and it references its parameter.
Nodes keep parameters alive, so they are armed for single rounds only. A node expects gradients of the shape that its parameter had
when it was made, and autograd uses it as long as it lives. So none is made of a parameter without elements, which is gathered
later, and none outlives a change of its parameter's shape: that is looked at before each forward of a root.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, TrackedParameters, parameters_of
from torch_grad_exporter.torch_compat.autograd import graph_task, nodes_of
from torch_grad_exporter.torch_compat.compiler import never_compile

_Kind = tuple[torch.Size, torch.dtype, torch.device]

NodeHook = Callable[[TrackedParameter], None]
"""Is called with the `TrackedParameter` whose node fired in a backward that is not the expected one; guarded."""

Node = torch.autograd.graph.Node


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Nodes that are kept alive, whose they are, and what these parameters were when the nodes were taken; all in one order."""

    tracked: TrackedParameters
    nodes: Sequence[Node] = ()
    kinds: Sequence[_Kind] = ()

    @classmethod
    def of(cls, table: ParameterTable, trained: dict[TrackedParameter, torch.nn.Parameter], before: _Held) -> _Held:
        """The nodes of what is trained of a table, and of the rest of it those that were held before."""
        nodes, kinds = nodes_of(trained.values()), _shared(map(_kind, trained.values()))
        if len(trained) == len(table.tracked):
            return cls(table.tracked, nodes, kinds)
        frozen = before.only({*table.tracked} - trained.keys())
        return cls(TrackedParameters((*trained, *frozen.tracked)), [*nodes, *frozen.nodes], [*kinds, *frozen.kinds])

    def only(self, wanted: Collection[TrackedParameter]) -> _Held:
        """Those of some parameters."""
        rows = zip(self.tracked, self.nodes, self.kinds, strict=True) if wanted else ()
        found = [row for row in rows if row[0] in wanted]
        return _Held(TrackedParameters(t for t, _, _ in found), [node for _, node, _ in found], [kind for _, _, kind in found])

    def items(self) -> Iterator[tuple[TrackedParameter, Node]]:
        """The parameters with their nodes."""
        return zip(self.tracked, self.nodes, strict=True)

    def changed(self, parameters: Sequence[torch.nn.Parameter | None]) -> set[TrackedParameter]:
        """Which of these, which there are now, are of another kind. What is not in its place is left."""
        if types.NoneType not in map(type, parameters) and all(map(operator.eq, map(_kind, parameters), self.kinds)):  # type: ignore[arg-type]
            return set()
        rows = zip(self.tracked, parameters, self.kinds, strict=True)
        return {tracked for tracked, parameter, kind in rows if parameter is not None and _kind(parameter) != kind}


class AccumulateGradNodes:
    """Hooks on the AccumulateGrad nodes of a table's parameters, while `armed`.

    `table`: whose parameters' nodes were hooked last, `None` while none is armed. `task`: autograd's number of the backward that
    is known to run, -1 for none. `fired`: the parameters that received a gradient since `begin`.

    A parameter that is frozen has no node, and one that is thawed within the round is thawed too late to be hooked, as by a loop
    that trains two networks in turn. So the nodes of those that are frozen at times are held: a node outlives the freezing.

    What a signal's handler raises may end any method here between two statements: what was hooked and is not held is hooked anew.
    """

    def __init__(self) -> None:
        self._held = _Held(TrackedParameters())
        self._hooks: dict[TrackedParameter, MutableMapping[int, object]] = {}
        """The hooks of each node that is hooked."""
        self._numbers: dict[TrackedParameter, int] = {}
        """The number of ours among them."""
        self._hook: NodeHook | None = None
        self._at_times: set[TrackedParameter] = set()
        """Those that were frozen at the end of a round, or thawed within one, as long as the table has them."""
        self.table: ParameterTable | None = None
        self.task = -1
        self.fired: set[TrackedParameter] = set()

    @property
    def armed(self) -> bool:
        """Whether nodes are hooked."""
        return self.table is not None

    @property
    def held(self) -> bool:
        """Whether any node is kept alive."""
        return bool(self._held.tracked)

    def drop_changed(self, table: ParameterTable | None = None, present: Sequence[torch.nn.Parameter | None] | None = None) -> bool:
        """Releases the nodes of parameters that have another shape, type or device than when the node was taken; whether any has.

        What is not in its place is left: `torch.func.functional_call` puts others there for the time of a forward. `present`: the
        parameters of this table, where they were looked up already.
        """
        held = self._held
        if present is None or table is None or table.tracked is not held.tracked:
            present = held.tracked.parameters()
        changed = held.changed(present)
        for tracked in changed:
            self._unhook(tracked)
        if changed:
            self._held = self._held.only({*self._held.tracked} - changed)
            self._at_times -= changed
        return bool(changed)

    def arm(self, table: ParameterTable, hook: NodeHook, *, late: bool = False) -> None:
        """Hooks the nodes of all parameters of the table, those that are frozen now as far as their nodes are held.

        What is hooked stays so; what was hooked and is another node now is hooked anew. `late`: a backward runs already.
        """
        self.drop_changed()
        trained = _trained(table.tracked)
        before, held = self._held, _Held.of(table, trained, self._held)
        if late and before.tracked:  # else none was hooked before, as in a round that is sampled in addition
            self._at_times |= trained.keys() - {*before.tracked}
        self._hook = hook
        hooked, told = dict(before.items()) if self._hooks else {}, self._accumulated
        for stale in self._hooks.keys() - {*held.tracked}:
            self._unhook(stale)
        for tracked, node in held.items():
            if tracked not in self._hooks or hooked.get(tracked) is not node:
                self._unhook(tracked)
                self._hook_on(node, tracked, told)
        self._held, self.table = held, table
        self._at_times &= {*held.tracked}

    def begin(self, task: int) -> None:
        """A backward begins, of this number."""
        self.task = task
        self.fired.clear()

    def end(self) -> None:
        """It is over."""
        self.task = -1

    def hooks_all_of(self, table: ParameterTable) -> bool:
        """Whether every trained parameter of the table was hooked; its node may be another one by now."""
        if self.table is None:
            return False
        return all(map(self._hooks.__contains__, table.tracked)) or not _trained(t for t in table.tracked if t not in self._hooks)

    def sees_all_of(self, table: ParameterTable) -> bool:
        """Whether the node of every trained parameter of the table is hooked, and is still the one that a backward runs through."""
        if not self.hooks_all_of(table):
            return False
        trained = _trained(table.tracked)
        now = nodes_of(trained.values())
        if self._held.tracked == (*trained,):
            return all(map(operator.is_, self._held.nodes, now))
        return all(map(operator.is_, map(dict(self._held.items()).get, trained), now))

    def positions(self, table: ParameterTable) -> set[int]:
        """The positions in the table of the parameters that fired."""
        return {position for position, tracked in enumerate(table.tracked) if tracked in self.fired}

    def disarm(self) -> None:
        """Removes the hooks and releases the nodes, but for those of parameters that are frozen at times; idempotent."""
        if not self.armed:  # as at the end of each round that was not sampled
            return
        self._unhook_all()
        pairs = zip(self._held.tracked, self._held.tracked.parameters(), strict=True)
        self._at_times = {t for t, p in pairs if p is not None and (t in self._at_times or not p.requires_grad)}
        self._held = self._held.only(self._at_times)

    def release(self) -> None:
        """Removes the hooks and releases all nodes; idempotent, from any thread."""
        self._unhook_all()
        self._held, self._at_times = _Held(TrackedParameters()), set()

    def _accumulated(self, tracked: TrackedParameter) -> None:
        """A parameter has received a gradient. Called for each one of each backward of a sampled round: it does next to nothing."""
        if graph_task() != self.task and self._hook is not None:
            self._hook(tracked)
        self.fired.add(tracked)

    def _hook_on(self, node: Node, tracked: TrackedParameter, told: NodeHook) -> None:
        tracked.told = told
        handle = node.register_hook(tracked)
        hooks = handle.hooks_dict_ref()
        if hooks is not None:
            self._numbers[tracked] = handle.id
            self._hooks[tracked] = hooks

    def _unhook(self, tracked: TrackedParameter) -> None:
        tracked.told = None
        hooks = self._hooks.pop(tracked, None)
        if hooks is not None:
            hooks.pop(self._numbers.pop(tracked, -1), None)

    def _unhook_all(self) -> None:
        self.table = None
        for tracked in [*self._hooks]:
            self._unhook(tracked)
        self._hook, self.fired = None, set()


never_compile(AccumulateGradNodes._accumulated)


def _trained(tracked: Iterable[TrackedParameter]) -> dict[TrackedParameter, torch.nn.Parameter]:
    """The parameters that are in their places and not frozen, and have elements."""
    several = tracked if isinstance(tracked, TrackedParameters) else [*tracked]
    found = zip(several, parameters_of(several), strict=True)
    return {t: p for t, p in found if p is not None and p.requires_grad and p.numel()}


_kind: Callable[[torch.Tensor], _Kind] = operator.attrgetter("shape", "dtype", "device")


def _shared(kinds: Iterable[_Kind]) -> list[_Kind]:
    """The same object for those that are equal."""
    known: dict[_Kind, _Kind] = {}
    return [known.setdefault(kind, kind) for kind in kinds]
