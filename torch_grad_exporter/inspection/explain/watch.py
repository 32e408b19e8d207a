"""Watches one run of the user's function: where the way from a parameter to the loss is cut.

It is a `TorchFunctionMode`: PyTorch hands it every call of its functions and methods, with tensors that show their graph. A
`TorchDispatchMode` was tried and tells less: `.data` and `.detach()` are one operation there, NumPy and `torch.Tensor.backward` are
none, results do not show their graph yet, and lines of the user are behind operations that one call is made of.

A tensor carries a set of cuts: the places that its values passed at which a parameter was lost for the gradient. What the loss
carries says why a parameter gets none. A value that a tensor became, a number or an array, is followed by identity and by shared
memory; what is computed from it elsewhere is lost, and said to be.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.explain.graph import Graph, union
from torch_grad_exporter.inspection.explain.places import Places, Where
from torch_grad_exporter.inspection.explain.values import Outside, leaves
from torch_grad_exporter.torch_compat.autograd import graph_task

CUTS = 4096
"""Cuts that are told apart; later ones of the same line and operation are one."""


class CutKind(enum.Enum):
    """What a cut is."""

    DETACHED = "detached"
    NON_DIFFERENTIABLE = "non-differentiable"
    UNSEEN = "unseen"
    """What is behind it cannot be seen."""


@dataclass(slots=True)
class Cut:
    """A place at which parameters are lost for the gradient. `lost`: which, as `Graph` has them; `note`: more of it."""

    kind: CutKind
    operation: str
    where: Where
    lost: int
    note: str = ""


_SHAPE_ONLY = frozenset(f"{how}_like" for how in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")) | frozenset(
    {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor"}
)
"""They take only the form of their first argument."""
_OTHER_ONLY_SHAPE = frozenset({"type_as", "expand_as", "view_as", "reshape_as"})
_OVERWRITES = frozenset(
    {"zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "copy_", "set_", "cauchy_", "log_normal_"}
)
"""What their first argument held before is gone."""
_LEAVES = {
    "item": ".item()", "tolist": ".tolist()", "numpy": ".numpy()", "__array__": "numpy", "__float__": "float()",
    "__int__": "int()", "__complex__": "complex()", "__index__": "int()",
}  # fmt: skip
"""What makes a number or an array of a tensor."""
_DETACHES = {
    "detach": ".detach()", "detach_": ".detach_()", "data": ".data", "data=": ".data =",
    "grad": "torch.autograd.grad() without create_graph",
}  # fmt: skip
_COPIES = frozenset({"tensor", "scalar_tensor", "asarray", "from_numpy", "new_tensor", "sparse_coo_tensor"})
"""They make new tensors, which begin a graph of their own."""
_IGNORED = frozenset({"requires_grad", "requires_grad_", "_is_view", "is_leaf", "retain_grad", "register_hook", "backward"})


@dataclass(frozen=True, slots=True)
class _Given:
    """What a function was given, as bits.

    `behind`: the parameters behind its tensors; `cuts`: what these carry; `leaves`: the parameters that are among them.
    """

    behind: int = 0
    cuts: int = 0
    leaves: int = 0


class CutCollector(TorchFunctionMode):
    """Collects `cuts` while it is active. Its own failures are counted in `failures`, and change nothing for the function.

    `on_backward` is called with the tensors that a backward is about to begin from.
    """

    def __init__(self, graph: Graph, places: Places, on_backward: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._graph = graph
        self._places = places
        self._on_backward = on_backward
        self._carried: Any = WeakTensorKeyDictionary()
        self._outside = Outside()
        self._off = Where()
        self._merged: dict[tuple[str, Where], int] = {}
        self.cuts: list[Cut] = []
        self.used: dict[int, Where] = {}
        """Where each parameter, by its bit, was used first."""
        self._all_used = 0
        self.escaped = 0
        """The cuts whose values left PyTorch."""
        self.failures: list[Exception] = []
        self._guard = Guard(self.failures.append)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - PyTorch's
        """Runs the function as it is, and looks at what goes in and what comes out."""
        kwargs = kwargs or {}
        if graph_task() != -1:  # a checkpoint's second forward, where PyTorch hands no call of `backward` to a mode
            return func(*args, **kwargs)
        name = name_of(func)
        given = self._guard.result(self._before, name, args, kwargs)
        result = func(*args, **kwargs)
        if given is not None:
            self._guard(self._after, name, given, args, result)
        return result

    def carried(self, tensors: Iterable[torch.Tensor]) -> int:
        """The cuts that these carry."""
        found = 0
        for one in tensors:
            found |= self._carried.get(one, 0) | self._outside.cuts_of(one)
        return found

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
        if name == "backward":
            tensors = [one for one in leaves(args[:1] or list(kwargs.values())) if isinstance(one, torch.Tensor)]
            self._on_backward(tensors)
        if name == "_set_grad_enabled" and args and not args[0]:
            self._off = self._places.here()
        if name in _IGNORED:
            return _Given()
        read = args[1:] if name in _SHAPE_ONLY | _OVERWRITES else args[:1] if name in _OTHER_ONLY_SHAPE else args
        behind = cuts = own = 0
        for one in leaves([read, kwargs]):
            if isinstance(one, torch.Tensor):
                bits = self._graph.behind(one, self._places.here)
                own |= bits if one.grad_fn is None else 0
                behind |= bits
                cuts |= self._carried.get(one, 0)
            cuts |= self._outside.cuts_of(one)
        return _Given(behind, cuts, own)

    def _after(self, name: str, given: _Given, args: tuple[Any, ...], result: object) -> None:
        if name in _LEAVES:
            self._left(name, given, result)
            return
        if given.leaves & ~self._all_used:
            self._use(given.leaves & ~self._all_used, result)
        written = args[:1] if name in ("__setitem__", "data=") else ()
        # A parameter stays the leaf that it is, whatever an optimizer writes into it.
        tensors = [one for one in leaves([result, written]) if isinstance(one, torch.Tensor) and id(one) not in self._graph.bits]
        behind = [self._graph.behind(one, self._places.here) for one in tensors]
        kept = union(behind)
        for one, own in zip(tensors, behind, strict=True):
            lost = given.behind & ~own
            # One of several results, as of `broadcast_tensors`, need not depend on what another one keeps; indices do.
            lost &= ~kept if one.is_floating_point() or one.is_complex() else -1
            cuts = given.cuts | (self._cut(name, lost, one) if lost else 0)
            if name not in _OVERWRITES:
                cuts |= self._carried.get(one, 0)
            if cuts or one in self._carried:
                self._carried[one] = cuts

    def _use(self, parameters: int, result: object) -> None:
        """Parameters were given to a function; they are used if it made a tensor, not if it told of their form.

        What runs without gradients outside of the model's modules is an optimizer's step.
        """
        if not any(isinstance(one, torch.Tensor) for one in leaves(result)):
            return
        where = self._places.here()
        if torch.is_grad_enabled() or where.module:
            self._all_used |= parameters
            while parameters:
                bit = parameters & -parameters
                self.used[bit] = where
                parameters ^= bit

    def _left(self, name: str, given: _Given, result: object) -> None:
        """A tensor became a number or an array."""
        cuts = given.cuts
        if given.behind:
            cuts |= self._add(Cut(CutKind.DETACHED, _LEAVES[name], self._places.here(), given.behind))
        self.escaped |= cuts
        if cuts and (isinstance(result, float | list | np.ndarray)):
            self._outside.left(result, cuts)

    def _cut(self, name: str, lost: int, result: torch.Tensor) -> int:
        """The bit of the cut at an operation whose result is behind none of the parameters `lost`."""
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


def name_of(func: Any) -> str:  # noqa: ANN401 - a function, a method or an operator of PyTorch
    """The name of a function that PyTorch hands to a mode; of a property that of the attribute, `data=` where it is set."""
    name: str = getattr(func, "__name__", "") or str(func)
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        if attribute == "grad":
            return "requires_grad"  # a gradient is no part of the forward
        return f"{attribute}=" if name == "__set__" else str(attribute)
    return name.partition(".")[0]
