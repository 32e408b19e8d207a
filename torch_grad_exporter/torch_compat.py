"""All that the package uses of PyTorch's private names, and what takes the place of one that a version does not have.

The rest of the package relies on the public interface of torch 2.4 and newer. Names of modules are looked up once, when this
module is imported, so that it costs a hook nothing; attributes of objects are looked up where they are used. A missing one never
raises: `LOST` says what the exporter then does without, and `tell` logs that once. A name that is not in `LOST` has a public
substitute, which is slower and loses nothing.

It lies in the root of the package because folders above and below `capture` need it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from torch_grad_exporter.errors import say

logger = logging.getLogger("torch_grad_exporter")

_RUNG = "gradients are read when optimizers step, so norms are those after clipping"
_COUNTING = "steps are never only counted, which costs some microseconds per step"
_COMPILED = "below a compiled function PyTorch may compile the exporter's hooks, too"

LOST: Mapping[str, str] = {
    "torch._C._current_graph_task_id": _RUNG,
    "torch.autograd.Variable._execution_engine.queue_callback": _RUNG,
    "torch.Tensor._version": _RUNG,
    "torch.optim.optimizer._global_optimizer_pre_hooks": _COUNTING,
    "torch.optim.optimizer._global_optimizer_post_hooks": _COUNTING,
    "torch.nn.Module._forward_hooks": f"{_COUNTING}, and gradients of FSDP2 may be missed",
    "torch._C._dynamo.eval_frame.set_eval_frame": _COMPILED,
    "torch._C._dynamo.eval_frame.skip_code": _COMPILED,
    "torch._C._functorch.maybe_current_level": "backwards within torch.func count as backwards of the training",
    "torch.amp.GradScaler._scale": "the training thread waits for the device to learn the loss scale of a sample",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "sums over ranks count copies on other mesh dimensions again",
    "torch.distributed._composable.replicate": "layers of a model under replicate() are shown by rank 0 only",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module": "layers of a wrapped model are shown by rank 0 only",
    "torch.nn.parallel.DistributedDataParallel._comm_hooks": "the gradient noise scale is not known",
    "torch.distributed.fsdp.FullyShardedDataParallel._handle": "gradients under FullyShardedDataParallel are not shown",
    "torch.distributed.pipelining.schedules._PipelineSchedule": f"under a pipeline schedule {_RUNG}",
    "torch.distributed.distributed_c10d._get_default_store": "ranks find each other only where torchrun started them",
}
"""What the exporter does without where a private name is gone."""

missing: dict[str, bool] = {}
"""The names of `LOST` that were found to be missing, with whether that was logged."""


def tell() -> None:
    """Logs for each name that is gone, once per process, what the exporter does without."""
    for name, logged in missing.items():
        if not logged:
            missing[name] = True
            message = "this version of PyTorch (%s) has no %s: %s"
            say(logger, logging.WARNING, message, torch.__version__, name, LOST[name])


def _find(path: str) -> Any:  # noqa: ANN401 - whatever PyTorch keeps there
    """What is found at a path that begins with `torch`, `None` if it is missing."""
    found: Any = torch
    name, *parts = path.split(".")
    for part in parts:
        name = f"{name}.{part}"
        found = getattr(found, part, sys.modules.get(name))  # torch.optim deletes its attribute `optimizer`
    if found is None and path in LOST:
        missing[path] = False
    return found


def _gone(path: str) -> None:
    """Remembers, and logs at once, that a name is missing that is looked up while the training runs."""
    if path not in missing:
        missing[path] = False
        tell()


def _has(one: object, *names: str) -> bool:
    return all(getattr(one, name, None) is not None for name in names)


# The compiler


is_tracing: Callable[[], bool] = _find("torch._C._is_tracing") or _find("torch.jit.is_tracing")
"""Whether `torch.jit.trace` traces the running function."""

_set_eval_frame: Callable[[Any], Any] = _find("torch._C._dynamo.eval_frame.set_eval_frame") or (lambda _callback: None)

stop_compiling: Callable[[], Any] = functools.partial(_set_eval_frame, None)
"""Frames that this thread enters from now on are not compiled; returns what `compile_again` takes in a `finally`.

Two calls without a frame of Python's, for what runs in each hook: about 18 ns more than calling it directly and only where needed,
where two functions take 37 more and a context manager 150, of 230 for an empty hook.
"""

compile_again: Callable[[Any], Any] = _set_eval_frame
"""Undoes `stop_compiling`, which has returned what to give here."""


def never_compile(function: Callable[..., object]) -> None:
    """Keeps a function from being compiled as a frame of its own.

    Below a compiled function `torch.compile` compiles every frame that is entered eagerly, so also that of a hook, in which
    `is_compiling()` would then be true for ever. `torch.compiler.disable` would be a graph break where a hook is inlined.
    """
    compiler, code = _find("torch._C._dynamo.eval_frame"), function.__code__
    if _has(compiler, "set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"):
        strategy = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT)
        compiler.set_code_exec_strategy(code, strategy)
    elif (skip := _find("torch._C._dynamo.eval_frame.skip_code")) is not None:
        skip(code)


def compiled_backwards() -> int:
    """How many backwards compiled autograd has compiled in this process. Those run no hook; a new set of hooks makes one more."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["compiled_autograd"]["captures"]) if "compiled_autograd" in counters else 0


def runs_compiled() -> bool:
    """Whether functions of this process may run compiled, without a way to run them as they are written (before torch 2.6)."""
    return "torch._dynamo" in sys.modules and not hasattr(torch.compiler, "set_stance")


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Lets compiled functions run as they are written, where that is possible."""
    stance: Any = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:  # importing it takes seconds
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[object] = stance("force_eager")
    return found


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is compiled as a whole, with all that is in it: hooks in there are traced away, or compile it anew."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    said = vars(module)  # and not `getattr`, which costs a microsecond where there is no such attribute
    return (
        said.get("_compiled_call_impl") is not None
        or isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule, wrapper))
        or hasattr(said.get("forward", type(module).forward), "_torchdynamo_orig_callable")
    )


def called_from_compiled(frame: types.FrameType | None) -> bool:
    """Whether compiled code is among the callers, or what compiles it: modules called from here may be part of it."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while frame is not None and compiler is not None:
        if frame.f_globals is vars(compiler):
            return True
        frame = frame.f_back
    return False


def something_is_compiled() -> bool:
    """Whether `torch.compile` was called in this process; what it made may have run already, or not."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    backends: Mapping[int, object] = getattr(compiler, "cached_backends", {0: compiler})
    return any(backend is not None for backend in backends.values())  # `None` stands for what is not to be compiled


def compiles_backwards() -> bool:
    """Whether compiled autograd is on, for which a hook at a node makes another graph of the backward."""
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(autograd, "compiled_autograd_enabled", False)) or compiled_backwards() > 0


# The backward


_graph_task = _find("torch._C._current_graph_task_id")
_queue: Any = _find("torch.autograd.Variable._execution_engine.queue_callback")
_version = _find("torch.Tensor._version")

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
    """Calls `callback` once when the running backward and all that it queued is done.

    A callback that is queued from within the backward may run before DistributedDataParallel's own last
    callback; one that is queued by a callback runs after all of those and sees the reduced gradients. DDP and FSDP2 rely on
    this themselves. Only for the rungs that see backwards.
    """
    _queue(functools.partial(_queue, callback))  # no frame of Python's that could be compiled


_level = _find("torch._C._functorch.maybe_current_level")
_keeps_graph = _find("torch._C._autograd._get_current_graph_task_keep_graph")


def within_transform() -> bool:
    """Whether `torch.func` transforms the running function: its gradients go into no `.grad`."""
    return _level is not None and _level() is not None


def on_node_of(tensor: torch.Tensor, hook: Callable[[Sequence[torch.Tensor | None]], None]) -> bool:
    """Calls `hook` with the gradients of the node that made a tensor, right before that node runs; `False` where none has.

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
    """The node that accumulates a parameter's gradient, found within a backward as well."""
    return nodes_of([parameter])[0]


TOGETHER = 200
"""Leaves of one function: what it takes for each is gone before the garbage collector comes, and a call is a small part of it."""


def nodes_of(parameters: Iterable[torch.Tensor]) -> list[torch.autograd.graph.Node]:
    """The same of many leaves that require a gradient: by functions of many plain ones, a tenth of `get_gradient_edge`'s price."""
    found: list[torch.autograd.graph.Node] = []
    with torch.enable_grad():  # before torch 2.5 `get_gradient_edge` raises where gradients are off
        for kind, run in itertools.groupby(parameters, type):
            if kind in _PLAIN:
                while several := (*itertools.islice(run, TOGETHER),):
                    found += _nodes_behind(_OfMany.apply(*several))  # type: ignore[no-untyped-call]
            else:
                found += map(_node_of_any, run)
    return found


class _OfMany(torch.autograd.Function):
    """A function of many leaves, whose node leads to theirs; it takes nothing from them, and no backward runs through it."""

    @staticmethod
    def forward(_context: Any, *_leaves: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own
        """A number."""
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> None:  # noqa: ANN401 - PyTorch's own
        """Gives the leaves nothing."""


def _nodes_behind(result: torch.Tensor) -> Iterator[torch.autograd.graph.Node]:
    nodes: Any = result.grad_fn
    return (node for node, _ in nodes.next_functions)


def _node_of_any(parameter: torch.Tensor) -> torch.autograd.graph.Node:
    return torch.autograd.graph.get_gradient_edge(parameter).node


def on_gradient(tensor: torch.Tensor, hook: Callable[..., None]) -> None:
    """Calls `hook` with the gradient of a tensor that is no leaf, as its `register_hook` would at three times the price.

    That makes a handle which is not needed here: the hook goes with the graph.
    """
    attach = getattr(tensor.grad_fn, "_register_hook_dict", None)
    if attach is None or getattr(tensor, "_backward_hooks", tensor) is not None or type(tensor) is not torch.Tensor:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    # No number: handles of hooks that others add later have those.
    tensor._backward_hooks = OrderedDict(torch_grad_exporter=hook)
    attach(tensor)


_sequence = _find("torch._C._autograd._get_sequence_nr")


def _sequence_of_a_new_node() -> int:
    with torch.enable_grad():
        return number_of(torch.empty((), requires_grad=True).view(()).grad_fn) + 1


next_sequence: Callable[[], int] = _sequence or _sequence_of_a_new_node
"""The number that the next node of the graph gets which this thread makes."""


def number_of(node: Any) -> int:  # noqa: ANN401 - a node
    """The number of a node, in the order in which its thread has made them; -1 of one that accumulates the gradient of a leaf."""
    number: int = node._sequence_nr()
    return -1 if number == _ACCUMULATES else number


_ACCUMULATES = 2**64 - 1


def started_from(frame: types.FrameType | None) -> Sequence[torch.Tensor]:
    """The tensors that the nearest backward among the callers has started from; none where that is not to be seen."""
    code = torch.autograd.backward.__code__
    while frame is not None:
        if frame.f_code is code:
            tensors = frame.f_locals.get("tensors", ())
            return [one for one in (tensors if isinstance(tensors, list | tuple) else [tensors]) if isinstance(one, torch.Tensor)]
        frame = frame.f_back
    return ()


_dispatch_modes = _find("torch._C._len_torch_dispatch_stack")


def dispatch_is_intercepted() -> bool:
    """Whether a mode of the user's, such as that of a selective checkpoint, would see the operations of the calling function."""
    return _dispatch_modes is not None and _dispatch_modes() > 0


# Optimizers and gradient scalers


_step_hooks = tuple(_find(f"torch.optim.optimizer._global_optimizer_{when}_hooks") for when in ("pre", "post"))
STEP_HOOKS: tuple[dict[int, Any], ...] = () if None in _step_hooks else _step_hooks
"""The hooks before and after every optimizer's step by their numbers; empty where they are not shown."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has hooks of its own before its step; true where it cannot say."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", True))


def hooked_last(optimizer: torch.optim.Optimizer, hook: Callable[..., object]) -> bool:
    """Whether this is the last of the optimizer's own hooks before its step; false where it cannot say."""
    return next(reversed(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()), None) is hook


def _step_code() -> types.CodeType | None:
    """The code of the function in which PyTorch wraps an optimizer's `step`."""
    wrap = _find("torch.optim.Optimizer.profile_hook_step")
    return None if wrap is None else getattr(wrap(_no_task), "__code__", None)


_STEP = _step_code()


def called_from_step(frame: types.FrameType | None) -> bool:
    """Whether an optimizer's step is among the callers: else one that had begun has raised."""
    return _step_around(frame) is not None


def stepping_around(frame: types.FrameType | None) -> torch.optim.Optimizer | None:
    """The optimizer within whose step the nearest step among the callers runs, `None` if that one runs by itself."""
    own = _step_around(frame)
    around = None if own is None else _step_around(own.f_back)
    return None if around is None else around.f_locals.get("self")


def _step_around(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None:
        if frame.f_code is _STEP if _STEP is not None else _is_step(frame):
            return frame
        frame = frame.f_back
    return None


def _is_step(frame: types.FrameType) -> bool:
    return frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def scale_of(scaler: Any) -> torch.Tensor | None:  # noqa: ANN401 - an object that may be a gradient scaler
    """The loss scale now, `None` before the scaler's first use, and of one that is disabled."""
    if hasattr(scaler, "_scale"):
        scale: torch.Tensor | None = scaler._scale
        return scale
    if scaler is None or not scaler.is_enabled():
        return None
    _gone("torch.amp.GradScaler._scale")
    return torch.tensor(scaler.get_scale(), device=getattr(scaler, "_device", "cuda"))


def has_scale(scaler: object) -> bool:
    """Whether it is a gradient scaler, or has the interface of one."""
    # A disabled one has no scale.
    return hasattr(scaler, "_scale") or isinstance(scaler, torch.amp.GradScaler)


# Modules


_OWN = vars(torch.nn.Module())

MODULE_HOOKS = _OWN.keys() >= {f"_forward{pre}_hooks{kind}" for pre in ("", "_pre") for kind in ("", "_with_kwargs")}
"""Whether modules show their hooks around forwards."""
if not MODULE_HOOKS:
    missing["torch.nn.Module._forward_hooks"] = False


def _parameters_in(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _children_in(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    return dict(module.named_children())


Parameters = Callable[[torch.nn.Module], Mapping[str, torch.nn.Parameter | None]]

parameters_in: Parameters = operator.attrgetter("_parameters") if "_parameters" in _OWN else _parameters_in
"""The parameters that a module owns itself, by attribute."""

children_in: Callable[[torch.nn.Module], Mapping[str, torch.nn.Module | None]] = (
    operator.attrgetter("_modules") if "_modules" in _OWN else _children_in
)
"""The modules that a module owns itself, by attribute."""

TRANSPOSED: tuple[type[torch.nn.Module], ...] = (
    _find("torch.nn.modules.conv._ConvTransposeNd") or torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)
"""The classes of transposed convolutions."""

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_plain(tensor: torch.Tensor | None) -> bool:
    """Whether it is an ordinary tensor or parameter, and no object of another class that stands for one."""
    return type(tensor) in _PLAIN


def compiles_its_call(module: torch.nn.Module) -> bool:
    """Whether its hooks, too, are part of what is compiled, as after `module.compile()`."""
    return isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, another tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor
    part: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if part is not None or not hasattr(tensor, "to_local"):
        return tensor if part is None else part
    with torch.no_grad():
        part = tensor.to_local()
    return tensor if part is None else part


# Many tensors at once


_norms: Any = _find("torch._foreach_norm")
_multiply: Any = _find("torch._foreach_mul_")
_by_kind: Any = _find("torch.utils._foreach_utils._group_tensors_by_device_and_dtype")
_at_once: Any = _find("torch.utils._foreach_utils._has_foreach_support")

TensorGroup = tuple[list[torch.Tensor], list[int]]
"""Tensors of one device and type, and their places in the list that they come from."""


def by_device_and_dtype(tensors: list[torch.Tensor]) -> list[TensorGroup]:
    """The tensors by device and type, in the order in which `clip_grad_norm_` takes them."""
    if _by_kind is not None:
        return [(lists[0], places) for lists, places in _by_kind([tensors], with_indices=True).values()]
    found: dict[tuple[torch.device, torch.dtype], TensorGroup] = {}
    for place, tensor in enumerate(tensors):
        group = found.setdefault((tensor.device, tensor.dtype), ([], []))
        group[0].append(tensor)
        group[1].append(place)
    return [*found.values()]


def can_foreach(tensors: list[torch.Tensor]) -> bool:
    """Whether PyTorch takes these tensors, which have one device, at once."""
    if tensors[0].is_complex() and any(tensor.is_conj() for tensor in tensors):
        return False  # it fails on one that is only marked as conjugate
    return None not in (_norms, _multiply, _at_once) and bool(_at_once(tensors, tensors[0].device))


def norms_of(tensors: list[torch.Tensor], dtype: torch.dtype | None = None, *, at_once: bool) -> Sequence[torch.Tensor]:
    """The norm of each tensor, rounded to its own type or to `dtype`; `at_once`: as `can_foreach` says."""
    if at_once:
        found: Sequence[torch.Tensor] = _norms(tensors, 2.0) if dtype is None else _norms(tensors, 2.0, dtype=dtype)
        return found
    return [torch.linalg.vector_norm(tensor, 2.0, dtype=dtype) for tensor in tensors]


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor | Sequence[torch.Tensor], *, at_once: bool) -> None:
    """Multiplies each tensor by one factor, or by its own; `at_once`: as `can_foreach` says."""
    if at_once:
        _multiply(tensors, factor)
        return
    factors = [factor] * len(tensors) if isinstance(factor, torch.Tensor) else factor
    for tensor, one in zip(tensors, factors, strict=True):
        tensor.mul_(one)


# Other ranks


def follows_freezing() -> bool:
    """Whether FSDP2 hands `requires_grad` on to the gathered parameters at each forward, as from torch 2.6 on."""
    places = ("torch.distributed.fsdp._fully_shard._fsdp_param", "torch.distributed._composable.fsdp._fsdp_param")
    return any(hasattr(sys.modules.get(place), "set_requires_grad_if_needed") for place in places)


def root_mesh(mesh: Any) -> Any:  # noqa: ANN401 - a DeviceMesh, which is not in every build
    """The mesh from which this one was sliced; `None` where that is not available. The name has moved twice."""
    ask = getattr(mesh, "_get_root_mesh", None)
    if ask is not None:
        return ask()
    resources: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    if _has(resources, "get_root_mesh"):
        return resources.get_root_mesh(mesh)
    if not _has(resources, "get_parent_mesh"):  # that of torch 2.4
        _gone("torch.distributed.device_mesh.DeviceMesh._get_root_mesh")
        return None
    while (parent := resources.get_parent_mesh(mesh)) is not None:
        mesh = parent
    return mesh


def active_wrapper() -> Any:  # noqa: ANN401 - a wrapper
    """The `DistributedDataParallel` whose forward is running, if any."""
    ask = getattr(torch.nn.parallel.DistributedDataParallel, "_get_active_ddp_module", None)
    if ask is None:
        _gone("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module")
    return None if ask is None else ask()


def composed_wrapper(module: torch.nn.Module) -> Any:  # noqa: ANN401 - a wrapper
    """The wrapper by which `replicate` changed a module in place, made in the module's first forward; `None` without one."""
    # Composed in place, the module has another class; the wrapper is in its state.
    composed = sys.modules.get("torch.distributed._composable.replicate")
    if composed is None:
        return None
    state = getattr(getattr(composed, "replicate", None), "state", None)
    if not _has(composed, "DDP") or state is None:
        _gone("torch.distributed._composable.replicate")
        return None
    return getattr(state(module), "_ddp", None) if isinstance(module, composed.DDP) else None


def reduced_parameters(wrapper: torch.nn.parallel.DistributedDataParallel) -> Iterable[torch.nn.Parameter]:
    """The parameters whose gradients a wrapper reduces."""
    found: Iterable[torch.nn.Parameter] | None = getattr(wrapper, "_module_parameters", None)
    return (p for p in wrapper.module.parameters() if p.requires_grad) if found is None else found


def takes_the_mean(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether the wrapper makes the plain mean of gradients: no hook communicates in its place, nor is it under `join`."""
    hooks, join = getattr(wrapper, "_comm_hooks", None), getattr(wrapper, "_join_config", None)
    if hooks is None or not hasattr(join, "enable"):
        _gone("torch.nn.parallel.DistributedDataParallel._comm_hooks")
        return False
    return not hooks and not getattr(join, "enable", True)


@dataclass(frozen=True, slots=True)
class Flat:
    """The parameters of one `FullyShardedDataParallel` module, which it keeps in one flat parameter.

    `originals`: the module's own parameters, where the script sees those, else `None`. `elements`: how many of each this rank has,
    or, first and alone, how many of the flat parameter. `padding`: what follows those in the flat one. `sharded`: whether other
    ranks have the rest. `group`, `copies`: the ranks that share it, and those that have the same part, if there are more.
    """

    parameter: torch.nn.Parameter
    originals: Sequence[torch.nn.Parameter] | None
    elements: Sequence[int]
    padding: int
    sharded: bool
    group: Any
    copies: Any


def flat_wrapper() -> type[torch.nn.Module] | None:
    """The class `FullyShardedDataParallel`; `None` where the script has not imported it."""
    found: type[torch.nn.Module] | None = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return found


def flat_of(wrapper: torch.nn.Module) -> Flat | None:
    """What a `FullyShardedDataParallel` module itself keeps; `None` where that is nothing, or is not shown."""
    if not hasattr(wrapper, "_handle"):
        _gone("torch.distributed.fsdp.FullyShardedDataParallel._handle")
        return None
    handle: Any = wrapper._handle
    if handle is None:
        return None
    flat: Any = getattr(handle, "flat_param", None)
    infos, padding = getattr(flat, "_shard_param_infos", None), getattr(flat, "_shard_numel_padded", None)
    sharded = getattr(handle, "uses_sharded_strategy", None)
    if infos is None or padding is None or sharded is None or not _has(flat, "_sharded_size"):
        _gone("torch.distributed.fsdp.FullyShardedDataParallel._handle")
        return None
    originals = getattr(flat, "_params", None)
    own = [one.numel_in_shard or 0 for one in infos] if originals is not None else [flat._sharded_size.numel() - padding]
    copies = getattr(wrapper, "_inter_node_pg", None) if sharded else None
    return Flat(flat, originals, own, padding, sharded, getattr(wrapper, "process_group", None), copies)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether `FullyShardedDataParallel` keeps a parameter in a flat one, or it is that one."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def is_managed(module: torch.nn.Module) -> bool:
    """Whether FSDP, of either kind, gathers the parameters of a module for its forward and backward."""
    # Not by `hasattr`: a module's own look-up costs a microsecond where there is no such attribute.
    return "_is_fsdp_managed_module" in vars(module)


def awaits_reduction(flat: torch.Tensor) -> bool:
    """Whether the gradient of a sharded flat parameter is still this rank's own and whole, as after `no_sync()`."""
    gradient, whole = flat.grad, getattr(flat, "_unpadded_unsharded_size", None)
    return gradient is not None and gradient.shape == whole != getattr(flat, "_sharded_size", None)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline schedule. `divisor`: by what it divides gradients after its last backward, 1 for nothing; `None` if not known.

    `piecewise`: it may divide some gradients before the backwards of others, or write some without a backward.
    """

    divisor: int | None
    piecewise: bool


_SCHEDULES = "torch.distributed.pipelining.schedules"


def calling_pipeline(frame: types.FrameType | None) -> Pipeline | None:
    """The pipeline schedule among the callers, if any."""
    schedules = sys.modules.get(_SCHEDULES)
    while frame is not None and schedules is not None:
        if frame.f_globals is vars(schedules) and hasattr(schedule := frame.f_locals.get("self"), "_step_microbatches"):
            return _pipeline(schedules, schedule)
        frame = frame.f_back
    return None


def _pipeline(schedules: types.ModuleType, schedule: object) -> Pipeline:
    kinds = getattr(schedules, "PipelineScheduleSingle", ()), getattr(schedules, "_PipelineStageBase", None)
    single, divides = isinstance(schedule, kinds[0]), getattr(schedule, "scale_grads", None)
    if divides is None and not hasattr(kinds[1], "scale_grads"):
        divides = False  # before torch 2.6 no schedule divides
    chunks = getattr(schedule, "_n_microbatches", None)
    if divides is None or chunks is None or kinds[1] is None:
        _gone("torch.distributed.pipelining.schedules._PipelineSchedule")
        return Pipeline(None, not single)
    return Pipeline(chunks if divides else 1, not single)


def default_store() -> Any:  # noqa: ANN401 - a store
    """The store of the default process group, with the group's prefix; `None` where it is not shown."""
    ask = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if ask is None:
        _gone("torch.distributed.distributed_c10d._get_default_store")
    return None if ask is None else ask()


def own_connection(store: Any, timeout: timedelta) -> Any:  # noqa: ANN401 - a store
    """Another connection to a store; where PyTorch has no `clone`, as torch 2.6, without the prefixes around the store."""
    bare: Any = without_prefix(store)
    dist: Any = torch.distributed
    if not hasattr(store, "clone"):
        if isinstance(bare, dist.TCPStore):
            return dist.TCPStore(bare.host, bare.port, is_master=False, timeout=timeout)
        if isinstance(bare, dist.FileStore):
            return dist.FileStore(bare.path)
        if isinstance(bare, dist.HashStore):
            return bare
    return store.clone()


def without_prefix(store: object) -> object:
    """A store without the prefixes around it; itself where they cannot be taken off."""
    return getattr(store, "_underlying_non_prefix_store", store)


# What attaches without being told


_STEPS_ARE_MARKED = _find("torch.optim.Optimizer._patch_step_function") is not None


def optimizers_made() -> bool:
    """Whether an optimizer has ever been made in this process; true where that cannot be known. Takes microseconds."""
    kinds = [torch.optim.Optimizer]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    return not _STEPS_ARE_MARKED or any(getattr(vars(kind).get("step"), "hooked", False) for kind in kinds)


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """An optimizer's step, of which the last of the hooks before all optimizers' steps is being called. `known`: all of those."""

    arguments: tuple[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]]
    known: frozenset[int]

    def begins_anew(self) -> None:
        """Calls the hooks that were set since: PyTorch's iteration over them is at its end."""
        for key, hook in [*STEP_HOOKS[0].items()]:
            if key not in self.known:
                hook(*self.arguments)


def step_under_way(
    handle: Any,  # noqa: ANN401 - a handle of a hook
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepUnderWay | None:
    """The step before which the hook of `handle` is being called; `None` where it is not the last one, or that cannot be known.

    Within the last one hooks may be set and removed; within any other one PyTorch's iteration over them would raise.
    """
    if not STEP_HOOKS or next(reversed(STEP_HOOKS[0]), None) != handle.id:
        return None
    return StepUnderWay((optimizer, args, kwargs), frozenset(STEP_HOOKS[0]))


@dataclass(frozen=True, slots=True)
class ForwardUnderWay:
    """A module's forward, of which only the hooks before it have begun. `known`: those that PyTorch is about to call."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    known: frozenset[Any]

    def begins_anew(self) -> None:
        """Calls the hooks that were set since: PyTorch has made its list of them before."""
        if self.kwargs is None:
            return
        for key, hook in [*self.module._forward_pre_hooks.items()]:
            if key not in self.known:
                hook(self.module, self.args, self.kwargs)


def forward_under_way(frame: types.FrameType, module: torch.nn.Module, args: tuple[Any, ...]) -> ForwardUnderWay:
    """The forward whose global hooks `frame` is calling. Without its keyword arguments, its beginning is not seen."""
    # Not the variables of any other function: before Python 3.13 they are one dictionary, which the function itself may have.
    if not MODULE_HOOKS or frame.f_globals is not vars(torch.nn.modules.module):
        return ForwardUnderWay(module, args, None, frozenset())
    variables = frame.f_locals
    kwargs = variables.get("kwargs") if variables.get("self") is module else None
    if sys.version_info < (3, 13):
        variables.clear()  # a copy that the frame would keep
    return ForwardUnderWay(module, args, kwargs if isinstance(kwargs, dict) else None, frozenset(module._forward_pre_hooks))
