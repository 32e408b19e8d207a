"""Where in the user's program something happened: the module in whose forward, and the line."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_OURS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Files below these are not the user's."""


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the program. `module`: the innermost one of the model in whose forward it is, empty outside of any.

    `file`, `line`, `code`: of the nearest line that belongs neither to PyTorch nor to this package; empty and 0 if there is none.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        line = f"{Path(self.file).name}:{self.line}" if self.file else ""
        return " ".join(part for part in (self.module, line and f"({line})" if self.module else line) if part)


class Places:
    """Finds the place of what is running. `names`: of the models' modules by their `id`."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def here(self) -> Where:
        """The place of the caller."""
        return self._of(sys._getframe(1))

    def in_function(self) -> tuple[type, Where] | None:
        """The class of the outermost `torch.autograd.Function` whose forward is running, and where it was called; else `None`."""
        codes = _forwards(len(_functions()))
        found = [(codes[frame.f_code], frame) for frame in _frames(sys._getframe(1)) if frame.f_code in codes]
        if not found:
            return None
        function, frame = found[-1]
        return function, self._of(frame.f_back)

    def _of(self, frame: types.FrameType | None) -> Where:
        module, at = "", None
        for one in _frames(frame):
            if at is None and not one.f_code.co_filename.startswith((*_OURS, "<frozen")):
                at = one.f_code.co_filename, one.f_lineno
            if not module:
                module = self._names.get(id(_self_of(one)), "")
            if module and at is not None:
                break
        if at is None:
            return Where(module)
        return Where(module, *at, linecache.getline(*at).strip())


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _self_of(frame: types.FrameType) -> object:
    """What a method's frame belongs to, `None` elsewhere. Most frames are told by their code alone, which is fast."""
    code = frame.f_code
    return frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None


def _functions() -> list[type]:
    """All classes of autograd functions there are."""
    found: list[type] = [torch.autograd.Function]
    for one in found:
        found += type.__subclasses__(one)
    return found


@functools.lru_cache(maxsize=1)
def _forwards(_count: int) -> Mapping[types.CodeType, type]:
    """The functions by the code of their forwards; made anew when there are more of them."""
    plain = ((inspect.unwrap(one.forward), one) for one in _functions() if one is not torch.autograd.Function)  # type: ignore[attr-defined]
    return {code: one for forward, one in plain if (code := getattr(forward, "__code__", None)) is not None}
