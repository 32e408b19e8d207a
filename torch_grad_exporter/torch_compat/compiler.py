"""What is compiled, and how the exporter stays out of it."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_grad_exporter.torch_compat.lost import find, has

is_tracing: Callable[[], bool] = find("torch._C._is_tracing") or find("torch.jit.is_tracing")
"""Whether `torch.jit.trace` traces the running function."""

_set_eval_frame: Callable[[Any], Any] = find("torch._C._dynamo.eval_frame.set_eval_frame") or (lambda _callback: None)

stop_compiling: Callable[[], Any] = functools.partial(_set_eval_frame, None)
"""Frames that this thread enters from now on are not compiled; returns what `compile_again` takes in a `finally`.

Two calls without a frame of Python's, for what runs in each hook: about 18 ns more than calling it directly and only where needed,
where two functions take 37 more and a context manager 150, of 230 for an empty hook.
"""

compile_again: Callable[[Any], Any] = _set_eval_frame
"""Undoes `stop_compiling`, which has returned what to give here."""


def never_compile(function: Callable[..., object]) -> None:
    """Keep a function from being compiled as a frame of its own.

    Below a compiled function `torch.compile` compiles every frame that is entered eagerly, so also that of a hook, in which
    `is_compiling()` would then be true for ever. `torch.compiler.disable` would be a graph break where a hook is inlined.
    """
    compiler, code = find("torch._C._dynamo.eval_frame"), function.__code__
    if has(compiler, "set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"):
        strategy = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT)
        compiler.set_code_exec_strategy(code, strategy)
    elif (skip := find("torch._C._dynamo.eval_frame.skip_code")) is not None:
        skip(code)


def compiled_backwards() -> int:
    """Return how many backwards compiled autograd has compiled in this process: they run no hook, and a new hook makes another."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["compiled_autograd"]["captures"]) if "compiled_autograd" in counters else 0


def runs_compiled() -> bool:
    """Return whether functions may run compiled, without a way to run them as they are written (before torch 2.6)."""
    return "torch._dynamo" in sys.modules and not hasattr(torch.compiler, "set_stance")


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Let compiled functions run as they are written, where that is possible."""
    stance: Any = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:  # importing it takes seconds
        return contextlib.nullcontext()
    stance_of_eager: contextlib.AbstractContextManager[object] = stance("force_eager")
    return stance_of_eager


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled as a whole, with all that is in it: its hooks are traced away, or compile it again."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    said = vars(module)  # and not `getattr`, which costs a microsecond where there is no such attribute
    return (
        said.get("_compiled_call_impl") is not None
        or isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule, wrapper))
        or hasattr(said.get("forward", type(module).forward), "_torchdynamo_orig_callable")
    )


def called_from_compiled(frame: types.FrameType | None) -> bool:
    """Return whether compiled code is among the callers, or what compiles it: modules called from here may be part of it."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while frame is not None and compiler is not None:
        if frame.f_globals is vars(compiler):
            return True
        frame = frame.f_back
    return False


def something_is_compiled() -> bool:
    """Return whether `torch.compile` was called in this process; what it made may have run already, or not."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    backends: Mapping[int, object] = getattr(compiler, "cached_backends", {0: compiler})
    return any(backend is not None for backend in backends.values())  # `None` stands for what is not to be compiled


def compiles_backwards() -> bool:
    """Return whether compiled autograd is on, for which a hook at a node makes another graph of the backward."""
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(autograd, "compiled_autograd_enabled", False)) or compiled_backwards() > 0


def compiles_its_call(module: torch.nn.Module) -> bool:
    """Return whether its hooks, too, are part of what is compiled, as after `module.compile()`."""
    return isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None
