"""The last metrics of a run as a file for node_exporter's textfile collector, which goes on serving them when the run is over.

`node_exporter --collector.textfile.directory=DIRECTORY` reads every `*.prom` there, until it is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_grad_exporter import files
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop


class LastValues:
    """The file of one rank of a run, written with `content` when the run ends; a later run of that name and rank overwrites it.

    A thread writes it, since a file system may hang. The thread begins at the start, since none can begin at the end of a program,
    and first removes the file of an earlier process of the same run and rank, whose values are outdated. `guard` counts failures.
    """

    def __init__(self, path: Path, content: Callable[[], bytes], guard: Guard) -> None:
        self._path = path
        self._content = content
        self._guard = guard
        self._removed = False
        self._thread = BackgroundLoop("textfile", self._remove, guard=guard, last=self._write)

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if no more threads can be started."""
        self._thread.wake()
        self._thread.start()

    def end(self) -> None:
        """Mark the run as over: the present values are written."""
        self._thread.stop()

    def close(self, seconds: float) -> None:
        """Wait until they are written, for this many seconds at most. Idempotent."""
        self._thread.close(seconds)

    def _remove(self) -> None:
        self._removed = True
        if self._path.exists():  # a directory that does not exist yet, or cannot, is reported when there is something to write
            self._path.unlink()

    def _write(self) -> None:
        if not self._removed:  # the run was over before the thread came to it
            self._guard(self._remove)
        files.write(self._path, self._content())


def text_file(directory: str, run: str, rank: int) -> Path:
    """Return the path of the file of a rank."""
    return Path(directory) / f"torch_grad_exporter-{files.file_name(run, rank, '.prom')}"
