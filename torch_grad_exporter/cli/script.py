"""Runs a script, or a module, in this process like `python script.py` and `python -m module`."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

from torch_grad_exporter.errors import UserError, leave_traceback

# Programs that start other processes, by name or module, and how to start this command in each of those.
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
LAUNCHERS = {
    **dict.fromkeys(_TORCHRUN, "torchrun --nproc-per-node=2 -m torch_grad_exporter run train.py"),
    **dict.fromkeys(("accelerate", "accelerate.commands.launch"), "accelerate launch -m torch_grad_exporter run train.py"),
    "deepspeed": "deepspeed --module torch_grad_exporter run train.py",
    **{
        name: f"{name} torch-grad-exporter run train.py"
        for name in ("mpirun", "mpiexec", "srun", "opentelemetry-instrument", "nohup", "uv", "env")
    },
    **dict.fromkeys(("python", "python3", "bash", "sh"), "torch-grad-exporter run train.py"),
}


@dataclass(frozen=True)
class Target:
    """A script, or a module if `is_module`, and its arguments."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False


def check(target: Target) -> None:
    """Raise `UserError` if the target cannot be run. Runs nothing of a script; imports the packages around a module."""
    launcher = LAUNCHERS.get(target.name if target.is_module else Path(target.name).name)
    if launcher is not None:
        raise UserError(f"{target.name} starts other processes, or programs; turn it around: {launcher}")
    if target.is_module:
        _check_module(target.name)
        return
    path = Path(target.name)
    if target.name == "-":
        raise UserError("a script on standard input cannot be run; write it to a file")
    if path.is_dir():
        raise UserError(f"{target.name!r} is a directory; name the script in it, or a module with -m")
    if not path.exists():
        near = f"; for a module say -m {path.name}" if not path.suffix and "/" not in str(path) else ""
        if not path.suffix and path.with_suffix(".py").exists():
            near = f"; there is {str(path.with_suffix('.py'))!r}"
        raise UserError(f"there is no script {target.name!r}{near}")
    if not os.access(path, os.R_OK):
        raise UserError(f"the script {target.name!r} cannot be read")


def _check_module(name: str) -> None:
    before = list(sys.path)
    _insert(_working_directory())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None and name != "__main__":
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except Exception as error:  # noqa: BLE001 - a package around it that cannot be imported, whatever its code raises
        raise UserError(f"module {name!r} cannot be imported: {type(error).__name__}: {error}") from None
    finally:
        sys.path[:] = before
    if spec is None:
        raise UserError(f"there is no module {name!r}")


def run(target: Target) -> None:
    """Run the target as `__main__`. Raises what it raises; the interpreter then shows only the frames of the script.

    What it leaves in the process stays there.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    try:
        if target.is_module:
            sys.argv = [target.name, *target.arguments]
            _insert(_working_directory())
            runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
        else:
            path = os.path.abspath(target.name)  # noqa: PTH100 - like the interpreter: links stay
            main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            sys.argv = [target.name, *target.arguments]
            _insert(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120 - links do not stay here
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
            exec(code, main.__dict__)  # noqa: S102 - what the command is for
    except BaseException as error:
        leave_traceback(error)
        _show_without_us(error)
        raise


# The module `__main__` of this command, whose code still runs.
_replaced: list[types.ModuleType] = []


def _working_directory() -> str:
    return os.getcwd()  # noqa: PTH109 - like the interpreter


def _insert(folder: str) -> None:
    """Put a folder in the place of this command's own, which comes first unless Python runs with -P."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _show_without_us(error: BaseException) -> None:
    """Let the interpreter show an exception as if the script were the first frame, by any hook that is installed."""
    shown_by, own = sys.excepthook, error.__traceback__
    while own is not None and own.tb_frame.f_globals is globals():
        own = own.tb_next  # none is left if the script could not be compiled

    def show(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        sys.excepthook = shown_by
        if value is error:
            value.__traceback__ = trace = own
        shown_by(kind, value, trace)

    sys.excepthook = show
