"""Cuts: the places in one run of the user's function at which the way from a parameter to the loss is cut.

The collector is a `TorchFunctionMode`: PyTorch passes it every call of its functions and methods, with tensors that show their
graph. A `TorchDispatchMode` shows less: `.data` and `.detach()` are one operation there, NumPy and `torch.Tensor.backward` do not
appear, results do not show their graph yet, and one call is several operations.

A tensor carries a set of cuts: the places that its values passed at which a parameter was lost for the gradient. What the loss
carries says why a parameter gets none. A number that a tensor became is followed by identity; what is computed from it elsewhere,
and what becomes of arrays, is unknown.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torch_grad_exporter.inspection.explain.graph import Graph, union
from torch_grad_exporter.inspection.explain.places import Places, Where
from torch_grad_exporter.torch_compat.autograd import graph_task

# Cuts that are kept apart; later ones of the same line and operation are one.
CUTS = 4096

# Items of a function's arguments or of a list that are visited, at most.
VISITED = 10_000


class CutKind(enum.Enum):
    """Why a parameter is lost at a cut."""

    DETACHED = "detached"
    NON_DIFFERENTIABLE = "non-differentiable"
    UNSEEN = "unseen"  # what is behind it cannot be seen


@dataclass(slots=True)
class Cut:
    """A place at which parameters are lost for the gradient. `lost`: a set of them, see `Graph`; `note`: more of it."""

    kind: CutKind
    operation: str
    where: Where
    lost: int
    note: str = ""


# They take only the shape and type of their first argument.
_SHAPE_ONLY = frozenset(f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")) | frozenset(
    {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor"}
)
_OTHER_ONLY_SHAPE = frozenset({"type_as", "expand_as", "view_as", "reshape_as"})

# They overwrite what their first argument held before.
_OVERWRITES = frozenset(
    {"zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "copy_", "set_", "cauchy_", "log_normal_"}
)

# They make a number or an array of a tensor.
_EXITS = {
    "item": ".item()", "tolist": ".tolist()", "numpy": ".numpy()", "__array__": "numpy", "__float__": "float()",
    "__int__": "int()", "__complex__": "complex()", "__index__": "int()",
}  # fmt: skip
_DETACHES = {
    "detach": ".detach()", "detach_": ".detach_()", "data": ".data", "data=": ".data =",
    "grad": "torch.autograd.grad() without create_graph",
}  # fmt: skip

# They make new tensors, which begin a graph of their own.
_COPIES = frozenset({"tensor", "scalar_tensor", "asarray", "from_numpy", "new_tensor", "sparse_coo_tensor"})
_IGNORED = frozenset({"requires_grad", "requires_grad_", "_is_view", "is_leaf", "retain_grad", "register_hook", "backward"})


# Of a function's arguments: the parameters behind its tensors, the cuts that these carry, and the parameters among them.
_Arguments = tuple[int, int, int]


class CutCollector(TorchFunctionMode):
    """The mode that collects cuts while it is active.

    Attributes:
        cuts: In the order of the forward; bit `i` of a set of cuts stands for number `i`.
        used: Where each parameter, by its bit, was used first.
        escaped: The cuts whose values left PyTorch.
    """

    def __init__(self, graph: Graph, places: Places) -> None:
        super().__init__()
        self._graph, self._places = graph, places
        self._carried: Any = WeakTensorKeyDictionary()
        # The numbers that tensors became, by `id`, with the cuts of each; kept, so that no other number gets the same `id`.
        self._numbers: dict[int, tuple[float, int]] = {}
        self._off = Where()  # where gradients were disabled
        self._all_used = 0
        self._merged: dict[tuple[str, Where], int] = {}
        self.cuts: list[Cut] = []
        self.used: dict[int, Where] = {}
        self.escaped = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - PyTorch's
        """Run the function unchanged, and inspect its arguments and its result."""
        kwargs = kwargs or {}
        if graph_task() != -1:  # a checkpoint's second forward, where PyTorch passes no call of `backward` to a mode
            return func(*args, **kwargs)
        name = _name_of(func)
        given = self._graph.guard.result(self._before, name, args, kwargs)
        result = func(*args, **kwargs)
        if given is not None:
            self._graph.guard(self._after, name, given, args, result)
        return result

    def carried(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the cuts that these carry."""
        return union(self._carried.get(tensor, 0) for tensor in tensors)

    def of(self, cuts: int) -> list[Cut]:
        """Return the cuts of a set."""
        return [cut for number, cut in enumerate(self.cuts) if cuts >> number & 1]

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        if name == "backward":
            self._graph.begin([leaf for leaf in _leaves(args[:1] or list(kwargs.values())) if isinstance(leaf, torch.Tensor)])
        if name == "_set_grad_enabled" and args and not args[0]:
            self._off = self._places.here()
        if name in _IGNORED:
            return 0, 0, 0
        read = args[1:] if name in _SHAPE_ONLY | _OVERWRITES else args[:1] if name in _OTHER_ONLY_SHAPE else args
        behind = cuts = own = 0
        for leaf in _leaves([read, kwargs]):
            if isinstance(leaf, torch.Tensor):
                bits = self._graph.behind(leaf, self._places)
                own |= bits if leaf.grad_fn is None else 0
                behind |= bits
                cuts |= self._carried.get(leaf, 0)
            cuts |= self._cuts_of_number(leaf)
        return behind, cuts, own

    def _after(self, name: str, given: _Arguments, args: tuple[Any, ...], result: object) -> None:
        behind, carried, parameters = given
        if name in _EXITS:
            self._left(name, behind, carried, result)
            return
        # What runs without gradients outside of the model's modules is an optimizer's step.
        new = parameters & ~self._all_used
        if new and any(isinstance(leaf, torch.Tensor) for leaf in _leaves(result)):
            where = self._places.here()
            if torch.is_grad_enabled() or where.module:
                self._all_used |= new
                self.used |= {1 << number: where for number in range(new.bit_length()) if new >> number & 1}
        written = args[:1] if name in ("__setitem__", "data=") else ()
        # A parameter stays the leaf that it is, whatever an optimizer writes into it.
        leaves = (leaf for leaf in _leaves([result, written]) if isinstance(leaf, torch.Tensor))
        tensors = [tensor for tensor in leaves if id(tensor) not in self._graph.bits]
        reached = [self._graph.behind(tensor, self._places) for tensor in tensors]
        kept = union(reached)
        for tensor, own in zip(tensors, reached, strict=True):
            lost = behind & ~own
            # One of several results, such as those of `broadcast_tensors`, need not depend on what another one keeps; indices do.
            lost &= ~kept if tensor.is_floating_point() or tensor.is_complex() else -1
            cuts = carried | (self._cut(name, lost, tensor) if lost else 0)
            if name not in _OVERWRITES:
                cuts |= self._carried.get(tensor, 0)
            if cuts or tensor in self._carried:
                self._carried[tensor] = cuts

    def _left(self, name: str, behind: int, cuts: int, result: object) -> None:
        """Follow the numbers that a tensor became."""
        if behind:
            cuts |= self._add(Cut(CutKind.DETACHED, _EXITS[name], self._places.here(), behind))
        self.escaped |= cuts
        for number in _leaves(result) if cuts else ():
            if type(number) is float:  # integers and booleans are shared by the whole program
                self._numbers[id(number)] = number, cuts | self._cuts_of_number(number)

    def _cuts_of_number(self, value: object) -> int:
        """Return the cuts that a number went through before it came back, 0 for anything else."""
        return self._numbers.get(id(value), (0.0, 0))[1] if type(value) is float else 0

    def _cut(self, name: str, lost: int, result: torch.Tensor) -> int:
        """Add the cut at an operation whose result does not lead to the parameters `lost`; return its bit."""
        where = self._places.here()
        if name in _DETACHES:
            return self._add(Cut(CutKind.DETACHED, _DETACHES[name], where, lost))
        if not torch.is_grad_enabled():
            return self._add(self._without_gradients(where, lost))
        if name in _COPIES:
            return self._add(Cut(CutKind.DETACHED, f"torch.{name}()", where, lost, "it copies the values into a new tensor"))
        kind = str(result.dtype).removeprefix("torch.")
        whole = not (result.is_floating_point() or result.is_complex())
        return self._add(Cut(CutKind.NON_DIFFERENTIABLE, name, where, lost, f"its result is {kind}" if whole else ""))

    def _without_gradients(self, where: Where, lost: int) -> Cut:
        function = self._places.in_function()
        if function is not None:
            (kind, where), name = function, function[0].__name__
            if name == "CheckpointFunction":
                note = "a checkpoint with use_reentrant=True hides what is in it; explain the model with use_reentrant=False"
                return Cut(CutKind.UNSEEN, name, where, lost, note)
            return Cut(CutKind.NON_DIFFERENTIABLE, kind.__name__, where, lost, "an autograd function whose result has no gradient")
        if torch.is_inference_mode_enabled():
            return Cut(CutKind.DETACHED, "torch.inference_mode()", where, lost)
        since = f"gradients are off since {self._off}" if self._off.file and self._off.line != where.line else ""
        return Cut(CutKind.DETACHED, "torch.no_grad()", where, lost, since)

    def _add(self, cut: Cut) -> int:
        if len(self.cuts) >= CUTS:
            number = self._merged.setdefault((cut.operation, cut.where), len(self.cuts))
            if number < len(self.cuts):
                self.cuts[number].lost |= cut.lost
                return 1 << number
        self.cuts.append(cut)
        return 1 << len(self.cuts) - 1


def _name_of(func: Any) -> str:  # noqa: ANN401 - a function, a method or an operator of PyTorch
    """Return the name of a function that PyTorch passes to a mode; for a property the attribute, `data=` where it is set."""
    name: str = getattr(func, "__name__", "") or str(func)
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        if attribute == "grad":
            return "requires_grad"  # a gradient is not part of the forward
        return f"{attribute}=" if name == "__set__" else str(attribute)
    return name.partition(".")[0]


def _leaves(value: object) -> Iterator[object]:
    """Yield what containers hold, at any depth; `VISITED` items at most."""
    stack, left = [value], VISITED
    while stack and left:
        left -= 1
        item = stack.pop()
        if isinstance(item, list | tuple):
            stack += item[:VISITED]
        elif isinstance(item, dict):
            stack += list(item.values())[:VISITED]
        else:
            yield item
