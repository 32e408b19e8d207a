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
from collections.abc import Callable, Iterable, MutableMapping

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, TrackedParameters, parameters_of
from torch_grad_exporter.torch_compat import graph_task, never_compile, nodes_of

_Kind = tuple[torch.Size, torch.dtype, torch.device]

NodeHook = Callable[[TrackedParameter], None]
"""Is called with the `TrackedParameter` whose node fired in a backward that is not the expected one; guarded."""


class _Fired:
    """The hook on one node. It is called for each parameter of each backward of a sampled round, so it does next to nothing.

    It is its own handle: where there are thousands of nodes, what the garbage collector has to visit of each costs most.
    """

    __slots__ = ("_hook", "_nodes", "_number", "_registered", "_tracked")

    def __init__(self, nodes: AccumulateGradNodes, tracked: TrackedParameter, hook: NodeHook) -> None:
        self._nodes = nodes
        self._tracked = tracked
        self._hook = hook
        self._registered: MutableMapping[int, object] | None = None
        self._number = -1

    def set_on(self, node: torch.autograd.graph.Node) -> _Fired:
        """Hooks a node; itself."""
        handle = node.register_hook(self)
        self._registered, self._number = handle.hooks_dict_ref(), handle.id
        return self

    def remove(self) -> None:
        """Takes the registration back; idempotent."""
        registered, self._registered = self._registered, None
        if registered is not None:
            registered.pop(self._number, None)

    def __call__(self, *_gradients: object) -> None:
        if is_compiling():
            return
        nodes = self._nodes
        if graph_task() != nodes.task:
            self._hook(self._tracked)
        nodes.fired.add(self._tracked)


never_compile(_Fired.__call__)


class AccumulateGradNodes:
    """Hooks on the AccumulateGrad nodes of a table's parameters, while `armed`.

    `table`: whose parameters' nodes were hooked last, `None` while none is armed. `task`: autograd's number of the backward that
    is known to run, -1 for none. `fired`: the parameters that received a gradient since `begin`.

    A parameter that is frozen has no node, and one that is thawed within the round is thawed too late to be hooked, as by a loop
    that trains two networks in turn. So the nodes of those that are frozen at times are held: a node outlives the freezing.

    What a signal's handler raises may end any method here between two statements: what was taken of a node and is missing counts as
    changed.
    """

    def __init__(self) -> None:
        self._nodes: dict[TrackedParameter, torch.autograd.graph.Node] = {}
        self._taken = TrackedParameters()
        """Whose nodes those are."""
        self._handles: dict[TrackedParameter, _Fired] = {}
        self._kinds: dict[TrackedParameter, _Kind] = {}
        """What the parameters were when their nodes were taken."""
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
        return bool(self._nodes)

    def drop_changed(self) -> bool:
        """Releases the nodes of parameters that have another shape, type or device than when the node was taken; whether any has.

        What is not in its place is left: `torch.func.functional_call` puts others there for the time of a forward.
        """
        pairs = zip(self._taken, self._taken.parameters(), strict=True)
        changed = [t for t, p in pairs if p is not None and _kind(p) != self._kinds.get(t)]
        for tracked in changed:
            handle = self._handles.pop(tracked, None)
            if handle is not None:
                handle.remove()
            self._nodes.pop(tracked, None)
            self._kinds.pop(tracked, None)
            self._at_times.discard(tracked)
        if changed:
            self._taken = TrackedParameters(self._nodes)
        return bool(changed)

    def arm(self, table: ParameterTable, hook: NodeHook, *, late: bool = False) -> None:
        """Hooks the nodes of all parameters of the table, those that are frozen now as far as their nodes are held.

        What is hooked stays so; what was hooked and is another node now is hooked anew. `late`: a backward runs already.
        """
        self.drop_changed()
        trained = _trained(table.tracked)
        found = dict(zip(trained, nodes_of(trained.values()), strict=True))
        if late and self._nodes:  # else none was hooked before, as in a round that is sampled in addition
            self._at_times |= found.keys() - self._nodes.keys()
        frozen = {t: self._nodes[t] for t in table.tracked if t not in found and t in self._nodes}
        nodes = {**found, **frozen}
        for stale in [t for t in self._handles if t not in self._nodes or self._nodes[t] is not nodes.get(t)]:
            self._handles.pop(stale).remove()
        for tracked, node in nodes.items():
            if tracked not in self._handles:
                self._handles[tracked] = _Fired(self, tracked, hook).set_on(node)
        kinds = {t: kind for t, kind in self._kinds.items() if t in frozen} | _kinds_of(trained)
        taken = table.tracked if len(found) == len(table.tracked) else TrackedParameters(nodes)
        self._nodes, self._taken, self._kinds, self.table = nodes, taken, kinds, table
        self._at_times &= self._nodes.keys()

    def begin(self, task: int) -> None:
        """A backward begins, of this number."""
        self.task = task
        self.fired.clear()

    def end(self) -> None:
        """It is over."""
        self.task = -1

    def hooks_all_of(self, table: ParameterTable) -> bool:
        """Whether every trained parameter of the table was hooked; its node may be another one by now."""
        return self.table is not None and not _trained(t for t in table.tracked if t not in self._handles)

    def sees_all_of(self, table: ParameterTable) -> bool:
        """Whether the node of every trained parameter of the table is hooked, and is still the one that a backward runs through."""
        if not self.hooks_all_of(table):
            return False
        trained = _trained(table.tracked)
        return all(map(operator.is_, map(self._nodes.get, trained), nodes_of(trained.values())))

    def positions(self, table: ParameterTable) -> set[int]:
        """The positions in the table of the parameters that fired."""
        return {position for position, tracked in enumerate(table.tracked) if tracked in self.fired}

    def disarm(self) -> None:
        """Removes the hooks and releases the nodes, but for those of parameters that are frozen at times; idempotent."""
        if not self.armed:  # as at the end of each round that was not sampled
            return
        self._unhook()
        pairs = zip(self._taken, self._taken.parameters(), strict=True)
        held = [t for t, p in pairs if p is not None and (t in self._at_times or not p.requires_grad) and t in self._nodes]
        self._nodes = {t: self._nodes[t] for t in held}
        self._taken, self._at_times = TrackedParameters(held), {*held}
        self._kinds = {t: kind for t, kind in self._kinds.items() if t in self._nodes}

    def release(self) -> None:
        """Removes the hooks and releases all nodes; idempotent, from any thread."""
        self._unhook()
        self._nodes, self._taken, self._kinds, self._at_times = {}, TrackedParameters(), {}, set()

    def _unhook(self) -> None:
        self.table = None
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.remove()
        self.fired = set()


def _trained(tracked: Iterable[TrackedParameter]) -> dict[TrackedParameter, torch.nn.Parameter]:
    """The parameters that are in their places and not frozen, and have elements."""
    several = tracked if isinstance(tracked, TrackedParameters) else [*tracked]
    found = zip(several, parameters_of(several), strict=True)
    return {t: p for t, p in found if p is not None and p.requires_grad and p.numel()}


_kind: Callable[[torch.Tensor], _Kind] = operator.attrgetter("shape", "dtype", "device")


def _kinds_of(parameters: dict[TrackedParameter, torch.nn.Parameter]) -> dict[TrackedParameter, _Kind]:
    """What the parameters are, the same object for those that are of one kind."""
    known: dict[_Kind, _Kind] = {}
    return {tracked: known.setdefault(kind := _kind(parameter), kind) for tracked, parameter in parameters.items()}
