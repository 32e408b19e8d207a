"""The running backward, the nodes of its graph, and hooks at them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from torch_grad_exporter.torch_compat.lost import find

_graph_task = find("torch._C._current_graph_task_id")
_queue: Any = find("torch.autograd.Variable._execution_engine.queue_callback")
_version = find("torch.Tensor._version")

BACKWARDS_ARE_SEEN = None not in (_graph_task, _queue, _version)
"""Whether there is all that the rungs `output` and `parameter` need."""


def _no_task() -> int:
    return -1


graph_task: Callable[[], int] = _graph_task if BACKWARDS_ARE_SEEN else _no_task
"""The id of the backward that the calling thread is in, -1 outside of one, and always where backwards are not seen."""

version_of: Callable[[torch.Tensor], int] = (lambda _tensor: 0) if _version is None else operator.attrgetter("_version")
"""How often a tensor was written to."""

after_backward: Callable[[Callable[[], None]], None] = _queue
"""Calls the callback when the running backward is done, though perhaps before other callbacks of this kind."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once when the running backward and all that it queued is done.

    A callback that is queued from within the backward may run before DistributedDataParallel's own last
    callback; one that is queued by a callback runs after all of those and sees the reduced gradients. DDP and FSDP2 rely on
    this themselves. Only for the rungs that see backwards.
    """
    _queue(functools.partial(_queue, callback))  # no frame of Python's that could be compiled


_level = find("torch._C._functorch.maybe_current_level")
_keeps_graph = find("torch._C._autograd._get_current_graph_task_keep_graph")


def within_transform() -> bool:
    """Return whether `torch.func` transforms the running function: its gradients go into no `.grad`."""
    return _level is not None and _level() is not None


def capturing_graph() -> bool:
    """Return whether a CUDA graph is being captured: nothing may be allocated or copied then."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def on_node_of(tensor: torch.Tensor, hook: Callable[[Sequence[torch.Tensor | None]], None]) -> bool:
    """Call `hook` with the gradients of the node that made a tensor, right before that node runs; `False` where none has.

    A hook at the tensor itself would be shared with those that others add after the tensor was modified in place.
    """
    node: Any = tensor.grad_fn
    if node is None:
        return False
    node.register_prehook(hook)
    return True


def _kept() -> bool:
    return True


graph_is_kept: Callable[[], bool] = _keeps_graph or _kept
"""Whether the running backward keeps its graph; true where torch cannot say."""


def node_of(parameter: torch.Tensor) -> torch.autograd.graph.Node:
    """Return the node that accumulates a parameter's gradient, found within a backward as well."""
    return nodes_of([parameter])[0]


TOGETHER = 200
"""Leaves of one function: what it takes for each is gone before the garbage collector comes, and a call is a small part of it."""


def nodes_of(parameters: Iterable[torch.Tensor]) -> list[torch.autograd.graph.Node]:
    """Return the same of many leaves that require a gradient, at a tenth of `get_gradient_edge`'s price.

    That would also call `view_as`, of which a subclass of tensors makes what it likes.
    """
    nodes: list[torch.autograd.graph.Node] = []
    left = iter(parameters)
    with torch.enable_grad():
        while several := (*itertools.islice(left, TOGETHER),):
            nodes += _nodes_behind(_OfMany.apply(*several))  # type: ignore[no-untyped-call]
    return nodes


class _OfMany(torch.autograd.Function):
    """A function of many leaves, whose node leads to theirs; it takes nothing from them, and no backward runs through it."""

    @staticmethod
    def forward(_context: Any, *_leaves: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own
        """A number."""
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> None:  # noqa: ANN401 - PyTorch's own
        """Give the leaves nothing."""


def _nodes_behind(result: torch.Tensor) -> Iterator[torch.autograd.graph.Node]:
    nodes: Any = result.grad_fn
    return (node for node, _ in nodes.next_functions)


_sequence = find("torch._C._autograd._get_sequence_nr")


def _sequence_of_a_new_node() -> int:
    with torch.enable_grad():
        return number_of(torch.empty((), requires_grad=True).view(()).grad_fn) + 1


next_sequence: Callable[[], int] = _sequence or _sequence_of_a_new_node
"""The number that the next node of the graph gets which this thread makes."""


def number_of(node: Any) -> int:  # noqa: ANN401 - a node
    """Return a node's number, in the order in which its thread has made them; -1 if it accumulates the gradient of a leaf."""
    number: int = node._sequence_nr()
    return -1 if number == _ACCUMULATES else number


_ACCUMULATES = 2**64 - 1


def operation(node: torch.autograd.graph.Node) -> str:
    """Return the name of the operation that made a node: `Relu` for `ReluBackward0`."""
    name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    return name.rpartition(".")[2]  # a compiled or custom function shows its path


def started_from(frame: types.FrameType | None) -> Sequence[torch.Tensor]:
    """Return the tensors that the nearest backward among the callers has started from; none where that is not to be seen."""
    code = torch.autograd.backward.__code__
    while frame is not None:
        if frame.f_code is code:
            tensors = frame.f_locals.get("tensors", ())
            return [
                tensor
                for tensor in (tensors if isinstance(tensors, list | tuple) else [tensors])
                if isinstance(tensor, torch.Tensor)
            ]
        frame = frame.f_back
    return ()


_HIDES = find("torch.utils._python_dispatch._disable_current_modes") is not None


def outside_of_modes() -> contextlib.AbstractContextManager[object]:
    """Hide the operations of the calling function from all modes that intercept them, where that can be done."""
    return torch.utils._python_dispatch._disable_current_modes() if _HIDES else contextlib.nullcontext()


intercepting_modes: Callable[[], int] = find("torch._C._len_torch_dispatch_stack") or (lambda: 0)
"""How many modes of the user's, such as that of a selective checkpoint, see the operations of the calling function."""
