"""The last metrics of a run as a file for node_exporter's textfile collector, which goes on serving them when the run is over.

`node_exporter --collector.textfile.directory=DIRECTORY` reads every `*.prom` there, until it is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_grad_exporter import files
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop


class TextFile:
    """The file of one rank of a run; a later run, or a restart, of that name and rank overwrites it."""

    def __init__(self, directory: str, run: str, rank: int) -> None:
        self.path = Path(directory) / f"torch_grad_exporter-{files.file_name(run, rank, '.prom')}"

    def write(self, content: bytes) -> None:
        """Writes the content, Prometheus' text format 0.0.4 without timestamps, readable for all. Raises `OSError`."""
        files.write(self.path, content)

    def remove(self) -> None:
        """Removes what an earlier process of the same run and rank has left, since its values are outdated. Raises `OSError`."""
        if self.path.exists():  # a directory that does not exist yet, or cannot, is reported when there is something to write
            self.path.unlink()


class LastValues:
    """Writes `content` to the file when the run ends, in a thread, since a file system may hang.

    The thread waits from the start, when it removes what was left there: no thread begins at the end of a program.
    """

    def __init__(self, file: TextFile, content: Callable[[], bytes], guard: Guard) -> None:
        self._file = file
        self._content = content
        self._guard = guard
        self._removed = False
        self._thread = BackgroundLoop("textfile", self._remove, guard=guard, last=self._write)

    def start(self) -> None:
        """Starts the thread. Raises `RuntimeError` where there are no more threads to be had."""
        self._thread.wake()
        self._thread.start()

    def end(self) -> None:
        """Marks the run as over: the values as of now are written."""
        self._thread.stop()

    def close(self, seconds: float) -> None:
        """Waits until they are written, for so long at most. Idempotent."""
        self._thread.close(seconds)

    def _remove(self) -> None:
        self._removed = True
        self._file.remove()

    def _write(self) -> None:
        if not self._removed:  # the run was over before the thread came to it
            self._guard(self._remove)
        self._file.write(self._content())
