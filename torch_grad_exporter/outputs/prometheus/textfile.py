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

    A thread does so, since a file system may hang. It waits from the start, when it removes what an earlier process of the same run
    and rank has left, since its values are outdated: no thread begins at the end of a program. `guard` takes what fails.
    """

    def __init__(self, path: Path, content: Callable[[], bytes], guard: Guard) -> None:
        self._path = path
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
        if self._path.exists():  # a directory that does not exist yet, or cannot, is reported when there is something to write
            self._path.unlink()

    def _write(self) -> None:
        if not self._removed:  # the run was over before the thread came to it
            self._guard(self._remove)
        files.write(self._path, self._content())


def text_file(directory: str, run: str, rank: int) -> Path:
    """Where the file of a rank lies."""
    return Path(directory) / f"torch_grad_exporter-{files.file_name(run, rank, '.prom')}"
