"""Files that another program reads at any moment: it sees the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from pathlib import Path

from torch_grad_exporter.errors import say

logger = logging.getLogger("torch_grad_exporter")

# Readable by all: Prometheus and node_exporter run as users of their own.
MODE = 0o644

PRIVATE = (
    "the new folder %s is closed to other users, as the umask asks: Prometheus and node_exporter cannot read what is in it, unless "
    "they run as this user; chmod it and the folders in it, or create them before"
)

# After this time a file that is still being written belongs to a process that was killed.
STALE_SECONDS = 3600.0

# The directory, next to the files, in which new ones are written: each user has one, since others may not write in it.
NEW = f".new-{os.getuid()}" if hasattr(os, "getuid") else ".new"


def file_name(run: str, rank: int, suffix: str) -> str:
    """Return a name for the file of a rank: letters, digits, `.`, `_` and `-` only; different runs never share one."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run).lstrip(".")[:150] or "run"
    if name != run:
        name = f"{name}-{hashlib.sha256(run.encode(errors='surrogatepass')).hexdigest()[:8]}"
    return f"{name}-{rank}{suffix}"


def replace(path: Path, content: bytes) -> None:
    """Replace a file of the user's own at once, or leave all as it was. What a symbolic link points to is replaced, not the link.

    Raises:
        OSError: It cannot be written, or is a folder, a pipe or a device.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, not a file")
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        try:
            _write_unnamed(part, content)
        except OSError:  # not all file systems can do so
            part.write_bytes(content)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_output(path: Path, content: bytes) -> None:
    """Write what the user asks for: a file is replaced at once, and a pipe or a device, such as /dev/stdout, gets the content.

    Raises:
        OSError: It cannot be written, or is a folder.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        replace(path, content)


def _write_unnamed(path: Path, content: bytes) -> None:
    """Write a file that has no name until it is whole, so that a process that is killed leaves nothing. Linux only."""
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.ENOTSUP, "there are no files without a name")
    with os.fdopen(os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        # With `src_dir_fd` Python calls linkat, and so that the link in /proc is followed.
        os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno())


def write(path: Path, content: bytes) -> int:
    """Replace the file at once, make missing directories, and return the new file's inode.

    It is written in a directory below and moved: Prometheus reads all files again at each event in a directory that it watches,
    such as this one.

    Raises:
        OSError: It cannot be written.
    """
    below, missing = path.parent / NEW, [folder for folder in path.parents if not folder.exists()]
    below.mkdir(parents=True, exist_ok=True)
    if missing and not missing[-1].stat().st_mode & stat.S_IXOTH:
        say(logger, logging.WARNING, PRIVATE, missing[-1])
    _sweep(below)
    descriptor, temporary = tempfile.mkstemp(dir=below, prefix=f"{path.name[:100]}-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            Path(temporary).chmod(MODE)
            os.fsync(file.fileno())
            inode = os.fstat(file.fileno()).st_ino
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise
    return inode


def _sweep(below: Path) -> None:
    """Remove what killed processes of this user have left."""
    for file in below.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < time.time() - STALE_SECONDS:
                file.unlink()
