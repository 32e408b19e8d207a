"""Files that another program reads at any moment: it sees the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

# Readable by all: Prometheus and node_exporter run as users of their own.
MODE = 0o644

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


def write(path: Path, content: bytes) -> int:
    """Replace the file at once, make missing directories, and return the new file's inode.

    It is written in a directory below and moved: Prometheus reads all files again at each event in a directory that it watches,
    such as this one.

    Raises:
        OSError: It cannot be written.
    """
    below = path.parent / NEW
    below.mkdir(parents=True, exist_ok=True)
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
