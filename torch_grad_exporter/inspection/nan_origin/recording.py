"""Recording: fills a tape while an armed forward and its backward run.

In the forward it notes which module runs within which, what it gets and what it gives. A value of the graph is flagged once, even
if many modules get it. After the forward it walks the graph from the outputs of modules, and hooks the nodes that can make a value
non-finite. A hook on a node sees what it gives for each of the values that it was computed from, so the operation that made a
gradient non-finite is not guessed.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch

from torch_grad_exporter.capture.torch_hooks import GuardedHook
from torch_grad_exporter.distributed.identity import group_size
from torch_grad_exporter.inspection.inner_hooks import Args, Kwargs
from torch_grad_exporter.inspection.measuring import tensors_in
from torch_grad_exporter.inspection.modules import VisibleModules, hides_its_inside
from torch_grad_exporter.inspection.nan_origin.tape import (
    LEAF,
    MOVES,
    Flags,
    GradientEvent,
    HeldTensor,
    Tape,
    TapedCall,
    TapedNode,
    TensorPlace,
    Value,
)  # fmt: skip
from torch_grad_exporter.model.names import clean, joined, uncompiled
from torch_grad_exporter.torch_compat.autograd import graph_task, next_sequence, number_of, operation, started_from, version_of
from torch_grad_exporter.torch_compat.modules import parameters_in

# Calls of modules, and nodes of the graph, in one recording at most.
CALLS, NODES = 1 << 14, 1 << 15


class Recording:
    """The forwards before one backward, such as those of a loss over two outputs, and that backward.

    Belongs to the thread that trains, and to that of the backward. `on_gradients` is the guarded hook after a node; it is called
    with the recording, the node's number, whether it is watched, and what autograd gives.
    """

    def __init__(self, step: int, on_gradients: GuardedHook) -> None:
        self.tape = Tape(step)
        self.flags = Flags()
        self.thread = threading.get_ident()
        self.over = False
        self._on_gradients = on_gradients
        self._task = -1
        self._leaves: dict[int, int] = {}  # numbers of parameters and buffers by identity
        self._times: dict[int, int] = {}  # calls of each module
        self._known: dict[tuple[int, int, int], int] = {}  # slots of values of the graph, by node, output and version
        self._outputs: list[torch.Tensor] = []  # of calls of the running forward; the walk through the graph begins there
        self._visible: VisibleModules | None = None
        self._root: weakref.ref[torch.nn.Module] | None = None

    # The forward

    def begin(self, visible: VisibleModules) -> None:
        """Begin the forward of a root. Flag all parameters, buffers and gradients that it has, once for each root."""
        again = self._root is not None and self._root() is visible.root
        self._visible, self._root, self._outputs = visible, weakref.ref(visible.root), []
        if not again:
            self._flag_held(visible)
            self.tape.before |= self._gradients()

    def enter(self, module: torch.nn.Module, label: str, args: Args, kwargs: Kwargs, parent: int) -> int | None:
        """Note that a module is called, within another call or -1; return the number of the call, None if there are too many."""
        tape, key = self.tape, id(module)
        if self._visible is None or len(tape.calls) >= CALLS:
            tape.full = True
            return None
        self._times[key] = number = self._times.get(key, 0) + 1
        hidden = tuple(self._visible.hidden.get(key, ()))
        kind, compiled = type(uncompiled(module)).__name__, hides_its_inside(module)
        tape.calls.append(TapedCall(label, kind, parent, number, key, module.training, hidden, compiled))
        call = len(tape.calls) - 1
        if parent == -1:
            tape.roots.append(call)
        tape.began.append((next_sequence(), call))
        self._flag(call, (args, dict(kwargs)) if kwargs else args, output=False)
        return call

    def leave(self, call: int, output: object, parent: int) -> None:
        """Note that a call has returned to another one or -1."""
        self.tape.began.append((next_sequence(), parent))
        self._flag(call, output, output=True)

    def _flag_held(self, visible: VisibleModules) -> None:
        for path, module in visible.root.named_modules():
            known = visible.modules.get(id(module))
            layer = known.label if known is not None else clean(path) or type(module).__name__
            own = [(name, parameter, False) for name, parameter in parameters_in(module).items()]
            own += [(name, buffer, True) for name, buffer in module.named_buffers(recurse=False)]
            for attribute, tensor, is_buffer in own:
                if tensor is None or id(tensor) in self._leaves:
                    continue
                slot = self.flags.add(tensor)
                if slot is not None:
                    self._leaves[id(tensor)] = len(self.tape.held)
                    name = joined(clean(path), attribute)
                    self.tape.held.append(HeldTensor(name, attribute, layer, id(module), is_buffer, slot))

    def _gradients(self) -> dict[str, int]:
        """Flag the gradients that the parameters of the last root have now; return the slots by name."""
        root = None if self._root is None else self._root()
        slots = {}
        for name, parameter in () if root is None else root.named_parameters():
            gradient = parameter.grad if parameter.is_leaf else None  # within `functional_call` others are in their places
            slot = None if gradient is None else self.flags.add(gradient)
            if slot is not None:
                slots[name] = slot
        return slots

    def _flag(self, call: int, given: object, *, output: bool) -> None:
        for name, tensor in tensors_in(given):
            value = _value_of(tensor)
            slot = self._slot(tensor, value)
            if slot is not None:
                self.tape.places.append(TensorPlace(call, output, name, slot, value))
            if output and value is not None:
                self._outputs.append(tensor)

    def _slot(self, tensor: torch.Tensor, value: Value | None) -> int | None:
        if value is None:
            return self.flags.add(tensor)
        known = (*value, version_of(tensor))
        if known not in self._known:
            slot = self.flags.add(tensor)
            if slot is None:
                return None
            self._known[known] = slot
        return self._known[known]

    # The graph and the backward

    def hook_graph(self) -> None:
        """Walk what the forward that is over has made, and hook it."""
        outputs, self._outputs, self._visible = self._outputs[::-1], [], None
        nodes = self._walk([node for tensor in outputs if (node := tensor.grad_fn) is not None])
        users: dict[int, int] = {}
        for number, _ in nodes:
            for value in self.tape.nodes[number].edges:
                if value is not None and value[0] != LEAF:
                    users[value[0]] = users.get(value[0], 0) + 1
        ends = {value[0] for tensor in outputs if (value := _value_of(tensor)) is not None}
        self._hook(nodes, ends | {number for number, count in users.items() if count > 1})

    def _hook(self, nodes: list[tuple[int, Any]], watched: Collection[int]) -> None:
        """Hook nodes, except those that move values only; of those in `watched` also what they get is flagged."""
        for number, node in nodes:
            if number in watched or self.tape.nodes[number].name not in MOVES:
                node.register_hook(functools.partial(self._on_gradients, self, number, number in watched))

    def gradients(self, number: int, given: Iterable[object], got: Iterable[object]) -> None:
        """Note the gradients that a node has given, and those that it has got."""
        if self.over:  # the graph is kept, and goes through another backward
            return
        if self._task != (task := graph_task()):
            self._task = task
            self._flag_losses()
        self.tape.events.append(GradientEvent(number, self._slots(got), self._slots(given)))

    def _slots(self, gradients: Iterable[object]) -> tuple[tuple[int, int], ...]:
        tensors = ((at, gradient) for at, gradient in enumerate(gradients) if isinstance(gradient, torch.Tensor))
        return tuple((at, slot) for at, gradient in tensors if (slot := self.flags.add(gradient)) is not None)

    def _flag_losses(self) -> None:
        """Flag what a backward has started from, and hook the nodes from there to those that are known."""
        for loss in started_from(sys._current_frames().get(self.thread)):
            slot = self.flags.add(loss)
            if slot is not None:
                self.tape.losses.append((slot, _value_of(loss)))
                self._hook(self._walk([] if loss.grad_fn is None else [loss.grad_fn]), ())

    def _walk(self, starts: list[Any]) -> list[tuple[int, Any]]:
        """Note all nodes behind these that are not known yet; return them with their numbers."""
        new, known = [], self.tape.nodes
        while starts:
            node = starts.pop()
            number = number_of(node)
            if number in known or number == LEAF:
                continue
            if len(known) >= NODES:
                self.tape.full = True
                break
            edges: list[Value | None] = []
            for behind, output in node.next_functions:
                if behind is None:
                    edges.append(None)
                else:
                    leaf = number_of(behind) == LEAF
                    edges.append((LEAF, self._leaves.get(id(behind.variable), -1)) if leaf else (number_of(behind), output))
                    starts.append(behind)
            leaves = tuple(behind is not None and _leads_to_leaf(behind) for behind, _ in node.next_functions)
            known[number] = TapedNode(operation(node), tuple(edges), leaves)
            new.append((number, node))
        return new

    def finish(self, *, backward: bool, scaled: bool) -> Tape:
        """Record nothing any more; return the tape."""
        self.over, tape = True, self.tape
        tape.after = self._gradients() if backward else {}
        tape.ranks = group_size() > 1
        tape.backward, tape.scaled = backward, scaled
        return tape


def _value_of(tensor: torch.Tensor) -> Value | None:
    """Return where a tensor is in the graph, None if it is a leaf or in none."""
    node = tensor.grad_fn
    return None if node is None else (number_of(node), tensor.output_nr)


def _leads_to_leaf(node: Any) -> bool:  # noqa: ANN401 - a node
    """Return whether there are only moves between here and a leaf."""
    while number_of(node) != LEAF:
        behind = node.next_functions
        if operation(node) not in MOVES or len(behind) != 1 or behind[0][0] is None:
            return False
        node = behind[0][0]
    return True
