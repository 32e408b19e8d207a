"""GuardedHook: a callable for PyTorch that never raises into the user's code.

Three rules hold for every hook of the exporter. It returns at once while `torch.compile`, `torch.export` or `torch.jit` traces it,
so it adds no graph break and is traced away; below a compiled function it runs uncompiled. It never raises into the user's code.
It holds the exporter only until `close()` disconnects it, so a hook that is still referenced elsewhere does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.compiler import is_compiling

from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.torch_compat.autograd import dispatch_is_intercepted, outside_of_modes
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling


class HookHandle(Protocol):
    """What a registration returns; `remove` is idempotent."""

    def remove(self) -> None:
        """Takes the registration back."""


@dataclass(slots=True, eq=False)
class GuardedHook:
    """A callable for PyTorch that runs `action` behind the guard and returns `None` to PyTorch.

    A deep copy or a pickle of the model must neither copy the exporter nor need this package when it is
    loaded again, so both turn the hook into a callable of the standard library that does nothing.
    """

    _source: str
    _action: Callable[..., None] | None
    _errors: ErrorLog
    _in_a_row: int = 0

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401 - PyTorch's own signatures differ per hook
        """Runs the action. What it raises is counted; after `LIMIT` failures in a row it is not run again."""
        # First, and outside the `try`: under compiled autograd an exception here could not be caught.
        if is_compiling() or is_tracing():
            return
        action = self._action
        if action is None:
            return
        compiler = stop_compiling()
        try:
            if dispatch_is_intercepted():  # by a mode of the user's, which is not to see our operations
                with outside_of_modes():
                    action(*arguments)
            else:
                action(*arguments)
        except Exception as error:  # noqa: BLE001 - the boundary: nothing of ours may reach the user's code
            self.failed(error)
        else:
            self._in_a_row = 0
        finally:
            compile_again(compiler)

    def failed(self, error: Exception) -> None:
        """Counts a failure; after `LIMIT` in a row the action is not run again."""
        self._errors.count(self._source, error)
        self._in_a_row += 1
        if self._in_a_row == LIMIT:
            self._errors.gave_up(self._source)
            self._action = None

    def disconnect(self) -> None:
        """Makes the hook do nothing and drop what it held; idempotent."""
        self._action = None

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


never_compile(GuardedHook.__call__)
