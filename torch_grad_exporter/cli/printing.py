"""Standard output of the commands: it may be ASCII, closed or on a full disk, which says nothing of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from torch_grad_exporter.errors import UserError
from torch_grad_exporter.gate.shown import one_line


def show(text: str) -> None:
    """Print a text at once; characters that standard output cannot have become escapes. Raises `UserError`."""
    if sys.stdout is None:  # closed from the start
        raise UserError("cannot print: standard output is closed")
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
        _abandon(sys.stdout)
        raise UserError(f"cannot print: {getattr(error, 'strerror', None) or error}") from None


def complain(program: str, error: object) -> None:
    """Print an error in one line on standard error, if that takes it: names in it may be anything."""
    try:
        sys.stderr.write(f"{program}: error: {one_line(str(error))}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        _abandon(sys.stderr)


def _abandon(stream: TextIO) -> None:
    """Let the interpreter's own flush at the end succeed: it would print a traceback and change the exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
