"""Recording: what an armed forward does, as it happens: which module runs within which, what it gets and what it gives.

A value of the graph is flagged once, however many modules get it. A recording may span several forwards, as of a loss over two
outputs, and ends with the backward through them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.inspection.nan_origin.flags import Flags, tensors_in
from torch_grad_exporter.inspection.nan_origin.tape import GradientEvent, HeldTensor, Node, Tape, TapedCall, TensorPlace, Value
from torch_grad_exporter.model.names import clean, uncompiled
from torch_grad_exporter.torch_compat.autograd import next_sequence, number_of, version_of
from torch_grad_exporter.torch_compat.compiler import compiles_its_call
from torch_grad_exporter.torch_compat.modules import children_in, parameters_in  # fmt: skip

CALLS = 1 << 14
"""Calls of modules in one recording, at most."""


@dataclass(slots=True)
class Inside:
    """The modules of a root that can be hooked, with their names, and for each the compiled ones in it that cannot."""

    root: torch.nn.Module
    modules: list[torch.nn.Module] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    hidden: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, root: torch.nn.Module, name: str) -> Inside:
        """Walks the modules; each once, under its first name. `name`: of the model, where there are several."""
        found = cls(root)
        found._add(root, name, name or type(root).__name__)
        return found

    def _add(self, module: torch.nn.Module, path: str, label: str) -> None:
        self.modules.append(module)
        self.names[id(module)] = label
        if _hides_its_inside(module):
            return
        for attribute, child in children_in(module).items():
            if child is None or id(child) in self.names:
                continue
            below = f"{path}.{attribute}" if path else attribute
            if compiles_its_call(child):
                self.hidden.setdefault(id(module), []).append(clean(below))
            else:
                self._add(child, below, clean(below) or label)


class Recording:
    """What has been seen of the forwards so far. Belongs to the thread that trains, and to that of the backward."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.thread = threading.get_ident()
        self.flags = Flags()
        self.nodes: dict[int, Node] = {}
        self.events: list[GradientEvent] = []
        self.losses: list[tuple[int, Value | None]] = []
        self.roots: list[int] = []
        self.task = -1
        self.leaves: dict[int, int] = {}
        """Numbers of parameters by identity."""
        self.before: dict[str, int] = {}
        self.over = False
        self.full = False
        self._calls: list[TapedCall] = []
        self._places: list[TensorPlace] = []
        self._held: list[HeldTensor] = []
        self._began: list[tuple[int, int]] = []
        self._stack: list[tuple[int, int]] = []
        self._times: dict[int, int] = {}
        self._known: dict[tuple[int, int, int], int] = {}
        """Slots of values of the graph that were flagged, by node, output and version."""
        self._given: list[torch.Tensor] = []
        """The outputs of calls of the running forward, whose nodes are where the walk through the graph begins."""
        self._inside: Inside | None = None
        self._root: weakref.ref[torch.nn.Module] | None = None

    # A forward of a root

    def begin(self, inside: Inside) -> None:
        """A forward of a root begins. Flags all parameters, buffers and gradients that it has, once for each root."""
        root = inside.root
        again = self._root is not None and self._root() is root
        self._inside, self._root, self._stack, self._given = inside, weakref.ref(root), [], []
        if not again:
            self._hold(inside)
            self.before |= self.gradients()
        self.enter(root, (), {})
        self.roots.append(len(self._calls) - 1)

    def got(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """What the root was called with."""
        if self._stack:
            self._flag(self._stack[-1][1], args, kwargs, output=False)

    def _hold(self, inside: Inside) -> None:
        for path, module in inside.root.named_modules():
            layer = inside.names.get(id(module), clean(path) or type(module).__name__)
            own = [(name, one, False) for name, one in parameters_in(module).items()]
            own += [(name, one, True) for name, one in module.named_buffers(recurse=False)]
            for attribute, tensor, buffer in own:
                if tensor is None or id(tensor) in self.leaves:
                    continue
                slot = self.flags.add(tensor)
                if slot is not None:
                    self.leaves[id(tensor)] = len(self._held)
                    name = ".".join(part for part in (clean(path), attribute) if part)
                    self._held.append(HeldTensor(name, attribute, layer, id(module), buffer, slot))

    def gradients(self) -> dict[str, int]:
        """Flags the gradients that the parameters of the last root have now; slots by name."""
        root = None if self._root is None else self._root()
        found = {}
        for name, parameter in () if root is None else root.named_parameters():
            gradient = parameter.grad if parameter.is_leaf else None  # within `functional_call` others are in their places
            slot = None if gradient is None else self.flags.add(gradient)
            if slot is not None:
                found[name] = slot
        return found

    # Calls

    def enter(self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A module is called."""
        if self._inside is None or len(self._calls) >= CALLS:
            self.full = True
            return
        key = id(module)
        self._times[key] = number = self._times.get(key, 0) + 1
        parent = self._stack[-1][1] if self._stack else -1
        label = self._inside.names.get(key, type(module).__name__)
        hidden = tuple(self._inside.hidden.get(key, ()))
        call = TapedCall(
            label, type(uncompiled(module)).__name__, parent, number, key, module.training, hidden, _hides_its_inside(module)
        )
        self._calls.append(call)
        self._stack.append((key, len(self._calls) - 1))
        self._began.append((next_sequence(), len(self._calls) - 1))
        self._flag(len(self._calls) - 1, args, kwargs, output=False)

    def runs(self, module: torch.nn.Module) -> bool:
        """Whether a module is the root that runs, and calls no other now."""
        return [key for key, _ in self._stack] == [id(module)]

    def leave(self, module: torch.nn.Module, output: object) -> bool:
        """A module has returned; whether it was the root. Calls that have raised within it end with it."""
        key = id(module)
        if not any(one == key for one, _ in self._stack):
            return False
        while True:
            ended, call = self._stack.pop()
            if ended == key:
                break
        self._began.append((next_sequence(), self._stack[-1][1] if self._stack else -1))
        self._flag(call, (output,), {}, output=True)
        return not self._stack

    def given(self) -> Iterator[torch.Tensor]:
        """Takes the outputs of all calls of the forward that is over; they are not held any more."""
        found, self._given, self._inside = self._given, [], None
        yield from reversed(found)

    def _flag(self, call: int, args: tuple[object, ...], kwargs: dict[str, object], *, output: bool) -> None:
        for name, tensor in tensors_in((args[0] if output else args, kwargs) if kwargs else args[0] if output else args):
            value = value_of(tensor)
            slot = self._slot(tensor, value)
            if slot is not None:
                self._places.append(TensorPlace(call, output, name, slot, value))
            if output and value is not None:
                self._given.append(tensor)

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

    # The end

    def tape(self, after: dict[str, int], *, backward: bool, ranks: bool, scaled: bool) -> Tape:
        """All of it; nothing is recorded any more."""
        self.over = True
        return Tape(
            self.step, (*self._calls,), (*self._places,), (*self._held,), self.nodes, (*self.events,), (*self._began,),
            (*self.roots,), (*self.losses,), backward, self.before, after, ranks, scaled, self.full,
        )  # fmt: skip


def value_of(tensor: torch.Tensor) -> Value | None:
    """Where a tensor is in the graph, `None` if it is a leaf or in none."""
    node = tensor.grad_fn
    return None if node is None else (number_of(node), tensor.output_nr)


def _hides_its_inside(module: torch.nn.Module) -> bool:
    """Whether modules below it are compiled or scripted with it, so that their hooks are not called."""
    return uncompiled(module) is not module or compiles_its_call(module)
