"""Places: where in the user's program something runs, by module, file and line."""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

# Files below these are not the user's.
_OURS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))

# In which the forward of each autograd function runs.
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the program.

    Attributes:
        module: The innermost module of the model in whose forward it is, empty outside of any.
        file: Of the nearest line that belongs neither to PyTorch nor to this package, empty if there is none.
        line: Its number, from 1; 0 if there is none.
        code: Its text.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        line = f"{Path(self.file).name}:{self.line}" if self.file else ""
        return " ".join(part for part in (self.module, line and f"({line})" if self.module else line) if part)


class Places:
    """The place of what is running. `names`: of the models' modules by their `id`."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def here(self) -> Where:
        """Return the place of the caller."""
        return self._of(sys._getframe(1))

    def in_function(self) -> tuple[type, Where] | None:
        """Return the class of the outermost running `torch.autograd.Function`, and where it was called; None without one."""
        running = [frame for frame in _frames(sys._getframe(1)) if frame.f_code is _APPLY]
        return (running[-1].f_locals["cls"], self._of(running[-1].f_back)) if running else None

    def _of(self, frame: types.FrameType | None) -> Where:
        module, at = "", None
        for caller in _frames(frame):
            code = caller.f_code
            if at is None and not code.co_filename.startswith((*_OURS, "<frozen")):
                at = code.co_filename, caller.f_lineno
            # For most frames a look at their code is enough, which is fast.
            if not module and code.co_argcount and code.co_varnames[0] == "self":
                module = self._names.get(id(caller.f_locals.get("self")), "")
            if module and at is not None:
                break
        return Where(module) if at is None else Where(module, *at, linecache.getline(*at).strip())


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
